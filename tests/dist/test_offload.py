"""A part of the optimizer's states beyond the device, and a part of these updated on it: the bits of all on
the device, bytes and memory as in closed form. What is said of tiers alone: test_tiers.py, test_disk.py."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import started
import torch
from test_parity import SPEC
from test_tiers import CASES, DTYPE, adamw, check, folder_of, placed, resumed, saved, step, trained

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.model.gpt import on_ranks as on_axes
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG
from tests.pairwise import covering
from tests.refused import answer, refusal

FIVE = SPEC.model_copy(update={"layers": 4})  # units: the root, and four blocks
# A tier, and of what lies there the share and the stride.
WAYS = [
    ("host", 0.5, 0), ("host", 1.0, 2), ("host", 0.7, 2), ("host", 1.0, 1), ("disk", 0.5, 0),
]  # fmt: skip
ALL = [(*case, *way) for case, way in product(CASES, WAYS) if case[0] in (1, 2, 4)]
SOME = covering([case for case in ALL if case[0] < 4 and case[2] < 4], size=1)
SOME |= {(4, "hier3", 2, 0.05, "bf16", *way) for way in WAYS[2:3]}


def parted(name: str, tier: str, share: float, stride: int) -> Scheme:
    """A named scheme with parts of its optimizer's states in a tier."""
    offload = {"offload": {"share": share, "stride": stride}} if (share, stride) != (1, 0) else {}
    return Scheme.parse({**placed(name, tier).model_dump(), **offload}, "test")


def both(cases: list[Any]) -> list[list[Any]]:
    """By case: all on the device, and in parts; with the tiers of units."""
    return [
        [
            trained(scheme, ranks, *rest[:3], FIVE)
            for scheme in (placed(name, "device"), parted(name, *rest[3:]))
        ]
        for ranks, name, *rest in cases
    ]


@pytest.mark.parametrize(
    ("ranks", "some"),
    [
        *((ranks, "few") for ranks in (1, 2, 4)),
        *(pytest.param(n, "all", marks=pytest.mark.wide) for n in (1, 2, 4)),
    ],
)
def test_bits_bytes_and_memory(ranks: int, some: str) -> None:
    cases = sorted(case for case in (ALL if some == "all" else SOME) if case[0] == ranks)
    for of_rank in on_ranks(ranks, both, cases, time_limit_s=600 if some == "few" else 3600):
        for case, found in zip(cases, of_rank, strict=True):
            check(case, case[3], *found)


def built(scheme: Scheme, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    of = lowband.Topology({}), Block, DTYPE["bf16"]
    model = lowband.shard(GPT(FIVE, seed=seed), scheme, *of, disk=folder_of(scheme))
    return model, adamw(model)


PLACES = [("device", 1.0, 0), *WAYS[2:3], *WAYS[4:]]


def saved_and_resumed(folder: str) -> bool:
    """Whether a checkpoint of each goes on in each other as where it was saved."""
    right = True
    for before, scheme in enumerate([parted("zero3", *way) for way in PLACES]):
        expected = saved(Path(folder, str(before)), *built(scheme, 7))
        for after in PLACES:
            if after != PLACES[before]:
                found = resumed(Path(folder, str(before)), *built(parted("zero3", *after), 8))
                right &= all(torch.equal(expected[key], found[key]) for key in expected)
    return right


def test_a_checkpoint_is_resumed_with_other_parts(tmp_path: Path) -> None:
    assert all(on_ranks(2, saved_and_resumed, str(tmp_path)))


def places() -> list[tuple[str, str, str]]:
    model, _ = built(parted("zero3", "host", 0.7, 2), 7)
    units = engine_of(model).units
    return [(unit.name, unit.scheme.optim_tier, unit.scheme.update_tier) for unit in units]


def test_the_last_units_lie_beyond() -> None:
    [found] = on_ranks(1, places)
    assert [(name, tier, update) for name, tier, update in found] == [
        ("root", "device", "device"), ("blocks.0", "device", "device"), ("blocks.1", "host", "host"),
        ("blocks.2", "host", "device"), ("blocks.3", "host", "host"),
    ]  # fmt: skip


def refused_between_steps() -> list[str]:
    """What is said of states that have no memory on the device between steps, and of steps that cannot be in
    turns."""
    model, optimizer = built(parted("zero3", "host", 1.0, 1), 7)
    for number in (2, 3):
        step(model, optimizer, number, 1, 0.05)
    parameter, state = next(model.parameters()), next(iter(optimizer.state.values()))

    def hooked() -> None:
        optimizer.register_step_post_hook(lambda *_: None)
        optimizer.step()

    ways = (parameter.tolist, state["exp_avg"].sum, optimizer.state_dict, lambda: optimizer.step(lambda: 0.0))
    return [*map(answer, ways), answer(hooked)]


def test_what_is_not_on_the_device_is_not_read() -> None:
    [found] = on_ranks(1, refused_between_steps)
    for text, expected in zip(found, (
        "embed.weight: its values are in host memory between steps (allowed: lowband.full_state_dict",
        "exp_avg of embed.weight: its values are in host memory between steps",
        "AdamW: its states are in host memory between steps (allowed: lowband.Checkpointer)",
        "AdamW of states that come to the device: a closure, or hooks on the step",
        "AdamW of states that come to the device: a closure, or hooks on the step",
    ), strict=True):  # fmt: skip
        assert text.startswith(expected)


def in_stages() -> str:
    topology, scheme = lowband.Topology({}, lowband.Axes(pipeline=2)), parted("zero1", "host", 0.5, 0)
    return refusal(lambda: on_axes(GPT(SPEC, seed=7), scheme, topology, 2, schedule="1f1b"))


def test_parts_in_stages_are_refused() -> None:
    for said in on_ranks(2, in_stages):
        assert said == "scheme 'zero1': offload in stages of a pipeline (allowed: no offload)"


@pytest.mark.parametrize("offload", [{"share": 0.6, "stride": 2}, {"late": True}])
def test_a_run_counts_what_its_parts_do(tmp_path: Path, offload: dict[str, Any]) -> None:
    scheme = Scheme.parse({**placed("zero1", "host").model_dump(), "offload": offload}, "test")
    folder = started.run(
        tmp_path, ranks=2, steps=4, warmup_steps=1, seq_len=32, micro_batch=2, accumulation=2,
        model=CONFIG.model("gpt-200k"), scheme=scheme, compute_dtype="bf16",
    )  # fmt: skip
    spec, _ = started.counts_as_closed_forms(folder)
    assert spec.scheme == scheme


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"optim": "world"},
            "offload: optim world lies on the device (allowed: optim world@host, or no offload)",
        ),
        (
            {"weights": "world@host"},
            "offload beside weights world@host (allowed: weights world, or no offload)",
        ),
        ({"offload": {}}, "offload: all states lie there without it"),
        ({"offload": {"share": 0}}, "offload.share: Input should be greater than 0"),
        ({"offload": {"shares": 1}}, "unknown key 'offload.shares' (allowed: late, share, stride)"),
        (
            {"optim": "world@disk", "offload": {"stride": 2}},
            "offload.stride 2: states on a disk are updated by the host, when their gradients are there",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    given = {
        "name": "x",
        "weights": "world",
        "grads": "world",
        "optim": "world@host",
        "offload": {"share": 0.5},
    }
    with pytest.raises(UserError) as refused:
        Scheme.parse({**given, **changes}, "file.yaml: x").check(Levels.fit({}, 4))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_scheme_without_parts_is_written_as_before() -> None:
    assert "offload" not in placed("zero3", "host").model_dump()
    assert parted("zero3", "host", 0.5, 0).model_dump()["offload"] == {"share": 0.5}
