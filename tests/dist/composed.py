"""A small GPT in fp64 on any composition of axes, and the same in one process of plain torch.

A row of ROWS is an axis, or what works together with axes. A new axis is one more row, with its degree among
the `Axes` and, where it forbids something, a line in `is_possible`; rows from the scheme on forbid nothing.

Shards are fp32, whatever a module computes in. So gradients are recorded where the engine takes them from
autograd, in fp64, and compared there; and once more behind the reduction, clipped, as the optimizer has them.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import nn

import lowband
from lowband.engine.api import engine_of
from lowband.engine.parallel.context import Context
from lowband.engine.parallel.experts import spread_experts
from lowband.engine.units.gradients import Gradients
from lowband.engine.units.slice_of import SliceOf, is_partial, slice_of
from lowband.model.gpt import Attention, Block
from lowband.spec.axes import AXES, Axes
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import SCHEDULES, lists
from lowband.spec.scheme import Scheme
from lowband.spec.step import Route
from lowband.spec.tensor import Column, Plan, Row, Split, Tokens, Vocabulary, Whole
from tests.checkout import CONFIG
from tests.pairwise import Case

INNER = {"package": 2, "node": 4}
MOST_RANKS, STEPS, B, T, LR = 16, 2, 2, 8, 0.5
SPEC = ModelSpec(
    name="tiny", layers=6, hidden=16, heads=2, vocab=32, seq_len=T, tied_head=False, source="none"
)
MIXED = SPEC.model_copy(update={"experts": 4, "top_k": 2, "expert_hidden": 24, "shared_experts": 1})

ROWS: Mapping[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "sequence_parallel": (False, True),
    "context": (1, 2),
    "data": (1, 2, 4),  # ranks with other sequences
    "expert": (1, 2, 4),  # of all along data and context; more than 1: layers have experts
    "route": get_args(Route),
    "pipeline": (1, 2, 4),
    # none: lowband.shard and the usual loop
    "schedule": ("none", *SCHEDULES),
    "scheme": ("ddp", "zero1", "zero2", "zero3", "hpz", "hsdp", "hier3-exact"),
    "accumulation": (1, 2),  # steps of the pipeline before one of the optimizer
    "micro_batches": (1, 3, 4),
}
DECIDING = [*ROWS].index("scheme")  # how many rows, the first ones, `is_possible` looks at


class Job(NamedTuple):
    """A value of each row."""

    values: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        """Layers have experts where ranks divide them."""
        return MIXED if self.values["expert"] > 1 else SPEC

    @classmethod
    def of(cls, case: Case) -> "Job":
        return cls(dict(zip(ROWS, case, strict=True)))

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return bool(self.values.get("tied", False))

    @property
    def axes(self) -> Axes:
        return Axes(**{name: value for name, value in self.values.items() if name in AXES})

    @property
    def ranks(self) -> int:
        """Experts are divided over ranks along data and context."""
        return math.prod(self.values[name] for name in ("tensor", "context", "data", "pipeline"))

    @property
    def along_data(self) -> int:
        """Ranks that gradients are averaged over."""
        return int(self.values["data"] * self.values["context"])

    @property
    def scheme(self) -> Scheme:
        return CONFIG.scheme(self.values["scheme"])

    @property
    def lists(self) -> Any:
        """The schedule's; those of one rank without a pipeline have every module as a stage."""
        name, ranks = self.values["schedule"], self.values["pipeline"]
        return lists(name, ranks, self.values["micro_batches"], SCHEDULES[name].chunks[0])

    def is_possible(self) -> bool:
        values = self.values
        fits = values["tensor"] > 1 or not values["sequence_parallel"]
        fits &= values["pipeline"] == 1 or values["schedule"] not in ("none", "depth")
        fits &= self.along_data % values["expert"] == 0 and (
            values["expert"] > 1 or values["route"] == "merged"
        )
        return fits and self.ranks <= MOST_RANKS


@cache
def possible() -> list[Case]:
    rows = [*ROWS.values()]
    decide, others = rows[:DECIDING], rows[DECIDING:]
    first = tuple(row[0] for row in others)
    found = [case for case in product(*decide) if Job.of((*case, *first)).is_possible()]
    return [(*case, *rest) for case in found for rest in product(*others)]


def drawn(count: int) -> list[Case]:
    """Some of the product, the same ones each time, spread over the numbers of ranks."""
    return random.Random(0).sample(possible(), count)


# ---- the model


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(SPEC.vocab, SPEC.hidden), nn.Embedding(T, SPEC.hidden)
        self.context: Context | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = slice(T) if self.context is None else self.context.places(tokens)
        return self.embed(tokens) + self.positions.weight[places]


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.final_norm, self.head = (
            nn.LayerNorm(SPEC.hidden),
            nn.Linear(SPEC.hidden, SPEC.vocab, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.final_norm(x)).flatten(0, 1)


def chain(job: Job) -> list[nn.Module]:
    """In fp64, with values that fp32 shards hold exactly and no initialisation has."""
    torch.manual_seed(3)
    modules = [First(), *(Block(job.spec, "sdpa") for _ in range(SPEC.layers)), Last()]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    modules = [module.double() for module in modules]
    if job.is_tied:
        modules[-1].head.weight = modules[0].embed.weight
    return modules


LAST = SPEC.layers + 1  # its place in the chain; the loss has the next one
EMBED, HEAD = "0.embed.weight", f"{LAST}.head.weight"


def plan(job: Job) -> Plan:
    mlp: Plan = {"*mlp.up": Column(), "*mlp.down": Row()} if job.spec.experts is None else {"*mlp": Tokens()}
    return {
        "0.embed": Vocabulary(),
        "0.positions": Whole(),
        "1": Split(),
        "*_norm": Tokens(),
        "*attention.qkv": Column(parts=3, together=SPEC.hidden // SPEC.heads),
        "*attention.out": Row(),
        **mlp,
        f"{LAST}.head": Vocabulary(),
        f"{LAST + 1}": Vocabulary(),
    }


# ---- the data


def batches(step: int, data: int, job: Job) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of a rank along data, by accumulation and micro-batch: tokens and targets.

    Of some ranks and micro-batches no target counts, of others all do.
    """
    found = []
    for i in range(job.values["accumulation"]):
        generator = torch.Generator().manual_seed(1000 * step + 10 * data + i)
        of_it = []
        for j in range(job.values["micro_batches"]):
            tokens, targets = torch.randint(SPEC.vocab, (2, B, T), generator=generator)
            valid = (5 * data + 3 * i + 7 * j + 4 * step + 2) % (T + 1)
            targets[:, valid:] = -100
            of_it.append((tokens, targets))
        found.append(of_it)
    return found


def everything(step: int, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        pair for data in range(job.values["data"]) for of_it in batches(step, data, job) for pair in of_it
    ]


def valid_tokens(step: int, job: Job) -> int:
    return sum(int((targets >= 0).sum()) for _, targets in everything(step, job))


# ---- on the job's ranks


class Step(NamedTuple):
    """One optimizer step on one rank.

    loss:    this rank's sum over micro-batches, of all tokens' mean; 0 where the last stage is not
    grads:   by parameter, in fp64, before the reduction: of this rank's tokens and slices
    clipped: by parameter, this rank's part of what the optimizer has: (first, last, values)
    norm:    before clipping
    sent:    by row and level
    weights: before the step, of the stages of the first rank along data and tensor
    """

    loss: float
    grads: dict[str, torch.Tensor]
    clipped: dict[str, tuple[int, int, torch.Tensor]]
    norm: float
    sent: Counter[tuple[str, str]]
    weights: dict[str, torch.Tensor]


class Place(NamedTuple):
    """A rank along the axes, and how its parameters are cut."""

    tensor: int
    expert: int
    data: int
    pipeline: int
    slices: dict[str, SliceOf]
    partial: set[str]

    def slice_of(self, name: str) -> SliceOf | None:
        """How a rank at this place along tensor and expert cuts a parameter."""
        mine = self.slices.get(name)
        return None if mine is None else replace(mine, place=getattr(self, mine.axis))


def named(name: str, job: Job) -> str:
    """A parameter's name in one process; the last rank knows a tied one by another."""
    return EMBED if job.is_tied and name == HEAD else name


@contextmanager
def recorded(model: nn.Module, job: Job) -> Iterator[dict[str, torch.Tensor]]:
    """By a parameter's name: the sum of what the engine takes from autograd in here, in its own dtype."""
    pairs = (pair for u in engine_of(model).units for pair in zip(u.leaves, u.shards, strict=True))
    names = {id(leaf): named(shard.shard_of.name, job) for leaf, shard in pairs}
    found: dict[str, torch.Tensor] = {}
    take = Gradients._take_grads

    def watched(self: Gradients) -> list[torch.Tensor | None]:
        for leaf in self._leaves:
            if leaf.grad is not None:
                name = names[id(leaf)]
                found[name] = leaf.grad.clone() + found.get(name, 0)
        return take(self)

    Gradients._take_grads = watched
    try:
        yield found
    finally:
        Gradients._take_grads = take


def trained(job: Job, clip: float) -> tuple[Place, list[Step], dict[str, torch.Tensor]]:
    """The steps, and the weights after the last one."""
    topology = lowband.Topology(INNER, job.axes)
    place = {name: topology.along(name).place for name in ("tensor", "expert", "data", "pipeline")}
    chained = nn.ModuleList([*chain(job), nn.CrossEntropyLoss(reduction="sum")])
    lowband.parallelize(chained, plan(job), topology)
    if job.spec.experts is not None:
        spread_experts(chained, topology)
    context = Context(topology)
    for module in chained.modules():
        if isinstance(module, First | Attention):
            module.context = context
    *modules, loss = chained
    model: nn.Module = nn.Sequential(*modules)
    context.bind(model)
    scale = 1.0
    fp64 = {"compute_dtype": torch.float64}

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(logits, targets.flatten()) * scale

    own = {id(p): p for module in modules for p in module.parameters()}
    slices = {id(p): slice_of(p) for p in own.values()}
    partial = {id(p) for p in own.values() if is_partial(p)}
    names = {f"{i}.{name}": id(p) for i, m in enumerate(modules) for name, p in m.named_parameters()}
    if job.values["schedule"] == "none":
        units = set(modules)
        lowband.shard(model, job.scheme, topology, lambda m: m in units, **fp64)

        def run(of_it: Sequence[tuple[torch.Tensor, torch.Tensor]], is_last: bool) -> list[torch.Tensor]:
            losses = []
            for j, (tokens, targets) in enumerate(of_it):
                ends = is_last and j == len(of_it) - 1
                with nullcontext() if ends else lowband.no_sync(model):
                    losses.append(loss_of(model(tokens), targets))
                    losses[-1].backward()
            return [one.detach() for one in losses]
    else:
        options = {"schedule": job.values["schedule"], **fp64}
        model = lowband.Pipeline(model, loss_of, job.scheme, topology, job.values["micro_batches"], **options)

        def run(of_it: Sequence[tuple[torch.Tensor, torch.Tensor]], is_last: bool) -> list[torch.Tensor]:
            with nullcontext() if is_last else lowband.no_sync(model):
                return model.step(of_it)

    optimizer, steps = torch.optim.SGD(model.parameters(), lr=LR), []
    for step in range(STEPS):
        weights = lowband.full_state_dict(model)
        engine_of(model).ledger.take()
        scale = job.along_data / valid_tokens(step, job)  # gradients are averaged over data
        mine = [
            [(context.split(tokens), context.split(targets, fill=-100)) for tokens, targets in of_it]
            for of_it in batches(step, place["data"] // job.axes.context, job)
        ]
        with recorded(model, job) as grads:
            losses = [one for i, of_it in enumerate(mine) for one in run(of_it, i == len(mine) - 1)]
        norm = float(lowband.clip_grad_norm_(model, clip))
        sent = Counter({(s.collective, s.level): s.bytes for s in engine_of(model).ledger.take()})
        clipped = {
            named(name, job): (
                of.start,
                of.stop,
                p.grad.as_subclass(torch.Tensor)[: of.stop - of.start].clone(),
            )
            for name, p in model.named_parameters()
            if (of := p.shard_of).stop > of.start
        }
        optimizer.step()
        optimizer.zero_grad()
        loss_here = float(sum(losses, torch.zeros(()))) / job.along_data
        steps.append(Step(loss_here, dict(grads), clipped, norm, +sent, weights))
    by_name = {name: slices[of] for name, of in names.items() if slices[of] is not None}
    shared = {name for name, of in names.items() if of in partial}
    return Place(**place, slices=by_name, partial=shared), steps, lowband.full_state_dict(model)


# ---- in one process


def reference(
    step: int, job: Job, weights: Mapping[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of all valid tokens of the job, and its gradients: plain torch in fp64."""
    model = nn.Sequential(*chain(job))
    model.load_state_dict(weights)
    summed = torch.zeros(())
    for tokens, targets in everything(step, job):
        loss = F.cross_entropy(model(tokens), targets.flatten(), reduction="sum") / valid_tokens(step, job)
        loss.backward()
        summed = summed + loss.detach()
    return float(summed), {name: p.grad for name, p in model.named_parameters()}
