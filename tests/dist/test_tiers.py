"""The optimizer's states in another tier: the same bits as without, bytes and memory as in closed form.

torch's fused AdamW on both sides. `--wide`: the whole product.
"""

import math
import re
import tempfile
from functools import cache
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import started
import torch
import torch.distributed as dist
from test_parity import SPEC

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.engine.units.turns import all_in_memory
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.model.gpt import on_ranks as on_axes
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.records import by_row
from lowband.spec.scheme import Scheme
from lowband.spec.tiers import TIERS, at
from tests.checkout import CONFIG
from tests.pairwise import covering
from tests.refused import refusal

Case = tuple[int, str, int, float, str]  # ranks, scheme, accumulation, norm to clip to, compute dtype
STEPS, NAN_STEP = 4, 1
EVEN = SPEC.model_copy(update={"vocab": 54, "heads": 2})  # which ranks along tensor divide
VECTOR = 16  # values: fused AdamW computes a shorter rest one by one, and rounds otherwise
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
# By ranks, the levels inside the world.
INNER: dict[int, dict[str, int]] = {
    1: {"package": 2, "node": 4}, 2: {"package": 1, "node": 2}, 3: {}, 4: {"package": 2, "node": 4},
    5: {}, 6: {"package": 2}, 7: {}, 8: {"package": 2, "node": 4},
}  # fmt: skip


def placed(name: str, tier: str, weights: str = "device") -> Scheme:
    """A named scheme with its optimizer's states in a tier, and the weights in one."""
    scheme = CONFIG.scheme(name)
    places = {"optim": at(scheme.optim, tier), "weights": at(scheme.weights, weights)}
    return Scheme.parse({**scheme.model_dump(), **places}, "test")


def folder_of(scheme: Scheme) -> str | None:
    """A new folder for what lies on disk; of this rank alone."""
    return tempfile.mkdtemp() if "disk" in scheme.tiers else None


def adamw(module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.1, fused=True)


def state_peaks(engine, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The meter's, and what the optimizer keeps where its unit's states lie."""
    held = dict(engine.meter.peak)
    for unit in engine.units:
        held[at("optim", unit.scheme.optim_tier)] += sum(
            value.nbytes for shard in unit.shards for value in optimizer.state[shard].values() if value.ndim
        )
    return held


def step(model, optimizer, number: int, accumulation: int, clip: float) -> tuple[float, float]:
    """This rank's loss and the norm; a step whose gradients are not finite is left out."""
    total = 0.0
    for micro in range(accumulation):
        engine_of(model).sync = micro == accumulation - 1
        drawn = torch.Generator().manual_seed((number * accumulation + micro) * 100 + dist.get_rank())
        loss = model(*torch.randint(SPEC.vocab, (2, 1, SPEC.seq_len), generator=drawn))
        (loss / accumulation * (math.nan if number == NAN_STEP else 1)).backward()
        total += loss.item() / accumulation
    norm = float(lowband.clip_grad_norm_(model, clip))
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return total, norm


def train(
    tier: str, ranks: int, name: str, accumulation: int, clip: float, dtype: str, weights: str = "device"
):
    return trained(placed(name, tier, weights), ranks, accumulation, clip, dtype)


@cache
def topology_of(ranks: int) -> lowband.Topology:
    """One for all models of a process: groups, each with three threads, stay until it ends."""
    return lowband.Topology(INNER[ranks])


def trained(scheme: Scheme, ranks: int, accumulation: int, clip: float, dtype: str, spec=SPEC):
    """Losses, norms, the last step's bytes and the meter, in closed form too, and the weights."""
    topology = topology_of(ranks)
    model = lowband.shard(GPT(spec, seed=7), scheme, topology, Block, DTYPE[dtype], disk=folder_of(scheme))
    engine, optimizer = engine_of(model), adamw(model)
    assert all(shard.numel() % VECTOR == 0 for shard in model.parameters())
    seen = []
    for number in range(STEPS):
        engine.ledger.take()
        seen.append(step(model, optimizer, number, accumulation, clip))
    sent = by_row(engine.ledger.take())
    held = state_peaks(engine, optimizer)
    of_scheme = unit_numels(spec, topology.levels), scheme, topology.levels, dtype, "fp32", accumulation
    states = state_bytes(*of_scheme, "gloo")
    closed = sent_bytes(*of_scheme, True), states
    return seen, (sent, {kind: held.get(kind, 0) for kind in states}), closed, lowband.full_state_dict(model)


def both(cases: list[Case]) -> list[list[Any]]:
    """By case: without tiers, and in each."""
    return [[train(tier, *case) for tier in ("device", *TIERS)] for case in cases]


CASES: list[Case] = [
    (ranks, *rest)
    for ranks, *rest in product(INNER, ("zero1", "zero3", "hier3"), (1, 2, 4), (0.05, math.inf), DTYPE)
    if CONFIG.scheme(rest[0]).machine_levels <= {*INNER[ranks]}
]
FEW = covering([case for case in CASES if case[0] in (1, 2)], size=1)
FEW |= {(4, "hier3", 2, 0.05, "bf16")}  # levels


@pytest.mark.parametrize(
    ("ranks", "some"),
    [
        *((ranks, "few") for ranks in (1, 2, 4)),
        *(pytest.param(n, "all", marks=pytest.mark.wide) for n in INNER),
    ],
)
def test_bits_bytes_and_memory(ranks: int, some: str) -> None:
    cases = [case for case in CASES if case[0] == ranks and (some == "all" or case in FEW)]
    for of_rank in on_ranks(ranks, both, cases, time_limit_s=1200):
        for case, found in zip(cases, of_rank, strict=True):
            check(case, case[3], *found)


def check(case: tuple[Any, ...], clip: float, plain: tuple[Any, ...], *in_tiers: tuple[Any, ...]) -> None:
    """Results of `trained` in tiers have the bits of those on the device, and are as in closed form."""
    seen, _, _, weights = plain
    assert math.isnan(seen[NAN_STEP][1]) and all(math.isfinite(norm) for _, norm in seen[2:]), case
    assert clip == math.inf or seen[0][1] > clip, "no step was clipped"
    for place, (also, counted, closed, others) in enumerate(in_tiers):
        assert str(also) == str(seen), (case, place)  # NaN included
        assert counted == closed, (case, place)
        assert all(torch.equal(weights[key], others[key]) for key in weights), (case, place)


def built(tier: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    scheme, topology = placed("zero3", tier), lowband.Topology({})
    model = lowband.shard(
        GPT(SPEC, seed=seed), scheme, topology, Block, DTYPE["fp32"], disk=folder_of(scheme)
    )
    return model, adamw(model)


def save(folder: str, tier: str) -> dict[str, torch.Tensor]:
    return saved(folder, *built(tier, 7))


def saved(folder: str | Path, model, optimizer) -> dict[str, torch.Tensor]:
    """The weights two steps after a checkpoint."""
    for number in (2, 3):
        step(model, optimizer, number, 1, 0.05)
    checkpointer = lowband.Checkpointer(Path(folder))
    checkpointer.save(2, model, optimizer, {})
    checkpointer.wait()
    return go_on(model, optimizer)


def resumed(folder: str | Path, model, optimizer) -> dict[str, torch.Tensor]:
    """The same of a model that goes on from there."""
    checkpointer = lowband.Checkpointer(Path(folder))
    checkpointer.load(checkpointer.latest(), model, optimizer)
    return go_on(model, optimizer)


def go_on(model, optimizer) -> dict[str, torch.Tensor]:
    for number in (4, 5):
        step(model, optimizer, number, 1, 0.05)
    return lowband.full_state_dict(model)


def resume(folder: str, tier: str) -> dict[str, torch.Tensor]:
    return resumed(folder, *built(tier, 8))


ROUND = ("device", "host"), ("host", "disk"), ("disk", "device")  # from each and to each


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*pair, marks=[] if pair in ROUND else [pytest.mark.wide])
        for pair in permutations(("device", *TIERS), 2)
    ],
)
def test_a_checkpoint_is_resumed_in_another_tier(tmp_path: Path, before: str, after: str) -> None:
    expected = on_ranks(2, save, str(tmp_path), before)[0]
    found = on_ranks(2, resume, str(tmp_path), after)[0]
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def mixed() -> bool:
    """A unit's own tier, beside others without: the norm, the clipping and the weights."""

    def trained(of_block: str | None) -> tuple[list, dict[str, torch.Tensor]]:
        model = lowband.shard(
            GPT(SPEC, seed=7), placed("zero3", "device"), lowband.Topology({}), Block, DTYPE["bf16"],
            placement_of=lambda name, _: placed("zero3", of_block) if name == of_unit else None,
            disk=tempfile.mkdtemp(),
        )  # fmt: skip
        of = adamw(model)
        return [step(model, of, number, 2, 0.05) for number in (2, 3, 4)], lowband.full_state_dict(model)

    of_unit = "blocks.1"
    (seen, weights), *others = (trained(tier) for tier in ("device", *TIERS))
    return all(also == seen and all(torch.equal(weights[k], w[k]) for k in w) for also, w in others)


def test_units_may_lie_in_different_tiers() -> None:
    assert all(on_ranks(2, mixed))


def beside(
    axes: dict[str, int], tier: str, name: str = "zero1", weights: str = "device"
) -> tuple[list, dict[str, torch.Tensor]]:
    """Losses, norms and this rank's weights, which another axis than data divides, too."""
    scheme, topology = placed(name, tier, weights), lowband.Topology({}, lowband.Axes(**axes))
    options = {} if (folder := folder_of(scheme)) is None else {"disk": folder}
    schedule = {"schedule": "1f1b"} if "pipeline" in axes else {}
    with torch.device("meta"):
        whole = GPT(EVEN, seed=7)
    model = on_axes(whole, scheme, topology, 2, compute_dtype=DTYPE["bf16"], **schedule, **options)
    optimizer, seen, rank = adamw(model), [], topology.along("data").place
    for number in range(3):
        drawn = torch.Generator().manual_seed(number * 100 + rank)
        micros = [torch.randint(EVEN.vocab, (2, 1, SPEC.seq_len), generator=drawn) for _ in range(2)]
        if schedule:
            losses = model.step([whole.split(*micro) for micro in micros])
        else:
            losses = []
            for place, micro in enumerate(micros):
                engine_of(model).sync = place == 1
                losses.append(model(*micro) / 2)
                losses[-1].backward()
        seen.append([*map(float, losses), float(lowband.clip_grad_norm_(model, 0.05))])
        optimizer.step()
        optimizer.zero_grad()
    assert all(row[-1] > 0.05 for row in seen), "no step was clipped"
    engine = engine_of(model)
    with all_in_memory(engine.on_disk(), optimizer, writes=False):
        weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    return seen, weights


def all_beside(axes: dict[str, int], tiers: tuple[str, ...]) -> list[Any]:
    return [beside(axes, tier) for tier in ("device", *tiers)]


@pytest.mark.parametrize(("axes", "tiers"), [({"tensor": 2}, TIERS), ({"pipeline": 2}, ("host",))])
def test_beside_other_axes(axes: dict[str, int], tiers: tuple[str, ...]) -> None:
    for (seen, weights), *others in on_ranks(4, all_beside, axes, tiers):
        for also, mine in others:
            assert also == seen and all(torch.equal(weights[key], mine[key]) for key in weights)


def in_stages() -> str:
    topology = lowband.Topology({}, lowband.Axes(pipeline=2))
    return refusal(lambda: on_axes(GPT(SPEC, seed=7), placed("zero1", "disk"), topology, 2, schedule="1f1b"))


def test_a_disk_in_stages_is_refused() -> None:
    for said in on_ranks(2, in_stages):
        assert said == "scheme 'zero1': optim world@disk in stages of a pipeline (allowed: world, world@host)"


def test_a_run_equals_the_run_without(tmp_path: Path) -> None:
    """AdamW is fused there and torch's default without, so weights are apart by its rounding."""
    outcomes = {}
    for tier in ("device", *TIERS):
        folder = started.run(
            tmp_path / tier, ranks=2, steps=4, warmup_steps=1, seq_len=32, micro_batch=2, accumulation=2,
            model=CONFIG.model("gpt-200k"), scheme=placed("zero1", tier), compute_dtype="bf16",
        )  # fmt: skip
        spec, _ = started.counts_as_closed_forms(folder)
        assert spec.scheme == placed("zero1", tier)
        outcomes[tier] = [line.loss for line in folder.whole_steps()]
        assert not folder.disk.exists(), "states are left behind"
    for tier in TIERS:
        assert outcomes[tier] == pytest.approx(outcomes["device"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim": "world@attic"}, "optim: no tier 'attic' (allowed: host, disk)"),
        ({"optim": "world@host", "update_gather": "int8"}, "update_gather int8: weights come from the host"),
        (
            {
                "grads": "self",
                "optim": "self@host",
                "sync": {"beyond": "self", "every": 2},
                "weights": "self",
            },
            "optim self@host: replicas that meet seldom",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    given = {"name": "x", "weights": "world", "grads": "world", "optim": "world", **changes}
    with pytest.raises(UserError, match=re.escape(says)):
        Scheme.parse(given, "file.yaml: x").check(Levels.fit({}, 4))
