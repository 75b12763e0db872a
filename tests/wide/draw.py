"""A seed to a case. Pure: the same seed gives the same case on any machine."""

from dataclasses import replace
from random import Random
from typing import Any, TypeVar, get_args

from tests.wide.cases import GENERATE, Case, Mixer, Own

T = TypeVar("T")

# How often, in parts of the sum.
NETS = {
    "own": 10,
    "llama": 3,
    "gpt2": 2,
    "t5": 2,
    "bert": 2,
    "vit": 2,
    "mixtral": 2,
    "mamba": 2,
    "lora llama": 2,
    "lora gpt2": 1,
}
SCHEMES = {"zero3": 5, "zero1": 2, "zero2": 2, "hpz": 2, "hsdp": 2, "hier3-exact": 3, "ddp": 2}
RANKS = {1: 3, 2: 10, 4: 6, 8: 1}
OPTIMIZERS = (
    "SGD", "momentum", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop",
    "Lamb", "Lamb", "Adafactor", "Adafactor",
)  # fmt: skip


def case(seed: int) -> Case:
    random = Random(seed)

    def often(share: float) -> bool:
        return random.random() < share

    def one(weights: dict[T, int]) -> T:
        return random.choices(list(weights), list(weights.values()))[0]

    net, scheme, ranks = one(NETS), one(SCHEMES), one(RANKS)
    tries_refused = often(0.3)
    return _fitting(
        tries_refused,
        Case(
            seed=seed,
            net=net,
            own=_own(random) if net == "own" else None,
            is_tied=often(0.4),
            has_dropout=often(0.25),
            has_side_outputs=often(0.3),
            checkpointing=one({"none": 4, "reentrant": 1, "plain": 2}),
            frozen=random.choice((1, 2)) if often(0.2) else None,
            scheme=scheme,
            ranks=ranks,
            levels=_levels(random, ranks),
            wrap=one({"units": 16, "linears": 2, "nested": 1, "nothing": 2}),
            overlap=often(0.75),
            collectives=one({"hops": 6, "flat": 1, "joined": 1}),
            dtype=one({"fp32": 4, "bf16": 1}),
            micro_batches=random.choice((1, 1, 2, 3)),
            accumulation=one({"plain": 1, "no_sync": 1, "breadth": 1}),
            clip=random.choice((0.05, 1.0, 100.0)) if often(0.4) else None,
            optimizer=random.choice(OPTIMIZERS),
            decay_groups=often(0.3),
            schedule=often(0.2),
            evaluation=one({"none": 2, "no_grad": 1, "inference": 1}),
            generation=one({"none": 2, "direct": 2, "inside": 1}),
            average=often(0.2),
            resumed=one(SCHEMES) if often(0.12) else None,
        ),
    )


def _own(random: Random) -> Own:
    side = random.choice(("none", "before", "after", "after", "penalty", "map"))
    return Own(
        mixer=random.choice(get_args(Mixer)),
        by_units=random.choice(("tensor", "tensor", "tuple", "dataclass", "namespace", "dict")),
        by_root=random.choice(("tensor", "tuple", "dataclass", "namespace", "dict")),
        side=side,
        summed=random.choice(("loop", "root", "list")),
        is_reused=random.random() < 0.2,
    )


def _levels(random: Random, ranks: int) -> tuple[tuple[str, int], ...]:
    """Of the names that schemes have."""
    package = random.choice([n for n in (1, 2) if n <= ranks])
    node = random.choice([n for n in (1, 2, 4) if package <= n <= ranks])
    return ("package", package), ("node", node)


def _fitting(tries_refused: bool, drawn: Case) -> Case:
    """Without what the net does not have, or what makes the order of draws or a choice of experts matter.

    tries_refused: whether it may be what is refused; such a case shows little else
    """
    changes: dict[str, Any] = {} if drawn.own is None else _fitting_own(drawn, drawn.own)
    if drawn.net not in GENERATE or drawn.dtype == "bf16":  # a rounded logit chooses another token
        changes["generation"] = "none"
    if drawn.net == "mixtral":  # a rounded one another expert
        changes["dtype"] = "fp32"
    if drawn.net not in ("llama", "gpt2", "bert", "mixtral"):
        changes["has_side_outputs"] = False
    if drawn.net in ("llama", "mixtral", "mamba") or drawn.accumulation == "breadth":
        changes["has_dropout"] = False  # the first have none; breadth-first it draws in another order
    if drawn.net == "vit":
        changes["is_tied"] = False
    if drawn.net.startswith("lora"):
        changes["frozen"] = None
        if drawn.wrap in ("linears", "nested") and drawn.dtype == "bf16":
            # PEFT gives dropout the dtype of a weight that is not gathered then, fp32: it rounds elsewhere.
            changes["has_dropout"] = False
    if drawn.average:
        changes["resumed"] = None  # averages are sharded as weights were when they began
    fitting = replace(drawn, **changes)
    if not tries_refused and fitting.accumulation == "breadth" and not fitting.is_chain:
        fitting = replace(fitting, accumulation="no_sync")
    if not tries_refused and fitting.generates_outside:
        fitting = replace(fitting, generation="inside")
    return fitting


def _fitting_own(drawn: Case, own: Own) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if own.mixer == "statistics":
        changes["dtype"] = "fp32"  # torch takes fp32 statistics of fp32 only
        if own.is_reused or drawn.checkpointing != "none":
            changes["accumulation"] = "no_sync"  # breadth-first adds to statistics in another order
    if drawn.checkpointing == "reentrant" and own.side != "none":
        changes["checkpointing"] = "plain"  # the other loses what an attribute keeps
    elif drawn.checkpointing == "reentrant":
        changes["own"] = replace(own, by_units="tensor")  # torch takes no other
    return changes
