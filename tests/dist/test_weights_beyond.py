"""Weights in another tier between uses: the same bits as without, bytes and memory as in closed form.

The steps and their checks are those of test_tiers.py. `--wide`: the whole product.
"""

import math
import os
import re
import resource
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import started
import torch
import torch.distributed as dist
from test_parity import SPEC
from test_tiers import (
    DTYPE,
    INNER,
    adamw,
    beside,
    check,
    folder_of,
    placed,
    resumed,
    saved,
    step,
    topology_of,
    train,
)

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.model.gpt import on_ranks as on_axes
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.peers import peer_arguments
from lowband.spec.records import by_row
from lowband.spec.scheme import Scheme
from lowband.spec.tiers import HOST, TIERS, at
from tests.checkout import CONFIG
from tests.pairwise import covering
from tests.refused import answer, refusal

# Ranks, tiers of the weights and of the optimizer's states, scheme, accumulation, norm to clip to, dtype.
Case = tuple[int, str, str, str, int, float, str]
PLACES = ("device", *TIERS)
CASES: list[Case] = [
    (ranks, *rest)
    for ranks, *rest in product(
        INNER, TIERS, PLACES, ("zero1", "zero3", "hier3", "hpz"), (1, 2, 4), (0.05, math.inf), DTYPE
    )
    if CONFIG.scheme(rest[2]).machine_levels <= {*INNER[ranks]}
]
EXPERTS = CONFIG.model("gpt-200k").model_copy(update={"experts": 4})
FEW = covering([case for case in CASES if case[0] == 2 and {"zero1", "zero3"} & {*case}], size=1) | {
    (2, "host", "disk", "hpz", 2, 0.05, "bf16"),
    (1, "host", "device", "zero3", 2, math.inf, "fp32"),
    (1, "disk", "host", "zero1", 1, 0.05, "bf16"),
    (4, "host", "host", "hier3", 2, 0.05, "bf16"),
}


def both(cases: list[Case]) -> list[list[Any]]:
    """By case: without tiers, and in them."""
    without = cache(lambda *case: train("device", *case))
    return [
        [without(ranks, *rest), train(optim, ranks, *rest, weights=weights)]
        for ranks, weights, optim, *rest in cases
    ]


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
        for case, (plain, beyond) in zip(cases, of_rank, strict=True):
            check(case, case[5], plain, beyond)
            _, _, (_, closed), _ = beyond
            assert closed["weights"] == 0 < closed[at("weights", case[1])], case


def test_bytes_by_hand() -> None:
    """Of a step with two micro-batches, over two ranks, in bf16: new weights come by way of `update_gather`,
    and the root stays from forward to backward."""
    (_, (sent, _), _, _), _ = on_ranks(2, train, "device", 2, "zero3", 2, math.inf, "bf16", "host")
    root, *blocks = (2 * numel // 2 for numel in unit_numels(SPEC, Levels.fit({}, 2)))
    assert {key[1]: count for key, count in sent.items() if key[0] == "host"} == {
        "forward_fetch": root + sum(blocks), "backward_fetch": 2 * sum(blocks),
        "weights_stash": root + sum(blocks),
    }  # fmt: skip


def placed_as(scheme: dict[str, Any], weights: str, optim: str) -> Scheme:
    of_tiers = {"weights": at(scheme["weights"], weights), "optim": at(scheme["optim"], optim)}
    return Scheme.parse({"name": "x", **scheme, **of_tiers}, "test")


def model_of(scheme: Scheme, seed: int = 7, folder: str | Path | None = None, dtype: str = "bf16") -> Any:
    """On the levels of as many ranks as there are."""
    topology = topology_of(dist.get_world_size())
    disk = folder_of(scheme) if folder is None else folder
    return lowband.shard(GPT(SPEC, seed=seed), scheme, topology, Block, DTYPE[dtype], disk=disk)


def save(folder: str, weights: str, optim: str) -> dict[str, torch.Tensor]:
    model = model_of(placed("zero3", optim, weights))
    return saved(folder, model, adamw(model))


def resume(folder: str, weights: str, optim: str) -> dict[str, torch.Tensor]:
    model = model_of(placed("zero3", optim, weights), seed=8)
    return resumed(folder, model, adamw(model))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("host", "device"), ("disk", "host")),
        pytest.param(("disk", "disk"), ("device", "device"), marks=pytest.mark.wide),
        pytest.param(("device", "host"), ("host", "host"), marks=pytest.mark.wide),
    ],
)
def test_a_checkpoint_is_resumed_in_other_tiers(
    tmp_path: Path, before: tuple[str, str], after: tuple[str, str]
) -> None:
    expected = on_ranks(2, save, str(tmp_path), *before)[0]
    found = on_ranks(2, resume, str(tmp_path), *after)[0]
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def otherwise_used(weights: str) -> list[Any]:
    """Losses, breadth-first and of forwards alone, before and behind updates and changes in place."""
    model = model_of(placed("hpz", "device", weights))
    optimizer, seen = adamw(model), list[Any]()
    for number in range(2):
        drawn = torch.Generator().manual_seed(number * 100 + dist.get_rank())
        micros = [torch.randint(SPEC.vocab, (2, 1, SPEC.seq_len), generator=drawn) for _ in range(2)]
        seen.append([float(loss) for loss in lowband.accumulate(model, micros, lambda m: model(*m) / 2)])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(float(model(*micros[0])))
            for parameter in model.parameters():
                parameter.mul_(0.9)
        model.eval()
        seen.append(model(*micros[1]).item())
        model.train()
        with torch.inference_mode():
            seen.append(float(model(*micros[0])))
    engine = engine_of(model)
    assert all(unit.held.weights is None or weights == "device" for unit in engine.units)
    return seen


def in_each(use: Callable[[str], Any], places: tuple[str, ...] = PLACES) -> list[Any]:
    return [use(weights) for weights in places]


def test_other_passes_use_the_same_weights() -> None:
    for expected, *others in on_ranks(2, in_each, otherwise_used):
        assert others == [expected, expected] and len({str(each) for each in expected}) == len(expected)


def frozen(weights: str) -> list[float]:
    """Losses where a unit's parameters are frozen, and where one has a tier of its own."""
    whole, scheme = GPT(SPEC, seed=7), placed("zero3", "device", weights)
    whole.blocks[0].requires_grad_(False)
    model = lowband.shard(
        whole, placed("zero3", "device"), lowband.Topology({}), Block, DTYPE["bf16"], disk=tempfile.mkdtemp(),
        placement_of=lambda name, _: scheme if name.startswith("blocks.0") else None,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    return [step(model, optimizer, number, 2, 0.05) for number in (2, 3, 4)]


def test_frozen_units_may_lie_elsewhere_alone() -> None:
    for expected, *others in on_ranks(2, in_each, frozen):
        assert others == [expected, expected]


def seldom(weights: str) -> list[Any]:
    """Losses and weights of replicas that meet every second step, at once, late and in pairs."""
    found = []
    for more in ({}, {"delay": 1}, {"partners": "ring"}):
        sync = {"beyond": "node", "every": 2, **more}
        given = {"weights": "node", "grads": "node", "optim": "node", "sync": sync}
        scheme, topology = placed_as(given, weights, "device"), lowband.Topology({"node": 1})
        model = lowband.shard(
            GPT(SPEC, seed=7), scheme, topology, Block, DTYPE["bf16"], disk=folder_of(scheme)
        )
        optimizer = adamw(model)
        seen = [step(model, optimizer, number, 1, 0.05) for number in (2, 3, 4, 5)]
        lowband.sync_replicas(model)
        sums = [float(one.double().sum()) for one in lowband.full_state_dict(model).values()]
        found.append((seen, sums))
    return found


@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.wide)])
def test_replicas_that_meet_seldom(tier: str) -> None:
    for expected, found in on_ranks(2, in_each, seldom, ("device", tier)):
        assert found == expected


def all_beside(axes: dict[str, int], tiers: list[tuple[str, str]]) -> list[Any]:
    return [beside(axes, optim, "zero3", weights) for weights, optim in (("device", "device"), *tiers)]


@pytest.mark.parametrize(
    ("axes", "tiers"),
    [
        ({"tensor": 2}, [("disk", "host")]),
        pytest.param({"tensor": 2}, [("host", "device"), ("disk", "disk")], marks=pytest.mark.wide),
        pytest.param({"pipeline": 2}, [("host", "host")], marks=pytest.mark.wide),
    ],
)
def test_beside_other_axes(axes: dict[str, int], tiers: list[tuple[str, str]]) -> None:
    for (seen, weights), *others in on_ranks(4, all_beside, axes, tiers):
        for also, mine in others:
            assert also == seen and all(torch.equal(weights[key], mine[key]) for key in weights)


@pytest.mark.parametrize(
    ("weights", "optim", "more"),
    [
        ("disk", "host", {"scheme": "zero1", "order": "breadth"}),
        ("host", "device", {"scheme": "zero3", "pipeline": 2, "layers": [2, 1]}),
        pytest.param(
            "host", "host", {"scheme": "zero1", "pipeline": 2, "layers": [1, 2]}, marks=pytest.mark.wide
        ),
        pytest.param("disk", "device", {"scheme": "zero3"}, marks=pytest.mark.wide),
        pytest.param("disk", "disk", {"scheme": "zero3", "tensor": 2}, marks=pytest.mark.wide),
        pytest.param("host", "device", {"scheme": "zero3", "collectives": "flat"}, marks=pytest.mark.wide),
        pytest.param("host", "device", {"scheme": "zero3", "fused_adamw": True}, marks=pytest.mark.wide),
        pytest.param("host", "device", {"scheme": "zero3", "recompute": "full"}, marks=pytest.mark.wide),
        pytest.param(
            "host", "host", {"scheme": "zero3", "model": EXPERTS, "expert": 2}, marks=pytest.mark.wide
        ),
        pytest.param("host", "host", {"scheme": "zero3", "device": "fake"}, marks=pytest.mark.wide),
    ],
)
def test_a_run_equals_the_run_without(tmp_path: Path, weights: str, optim: str, more: dict[str, Any]) -> None:
    found = {}
    for tiers in (("device", "device"), (weights, optim)):
        folder = started.run(tmp_path / tiers[0], **{
            "ranks": 2, "steps": 3, "warmup_steps": 1, "seq_len": 32, "micro_batch": 2, "accumulation": 2,
            "model": CONFIG.model("gpt-200k"), "compute_dtype": "bf16", **more,
            "scheme": placed(more["scheme"], *tiers[::-1]),
        })  # fmt: skip
        started.counts_as_closed_forms(folder)
        found[tiers] = [line.loss for line in folder.whole_steps()]
        assert not folder.disk.exists(), "weights are left behind"
    (_, first), (_, second) = found.items()
    assert second == pytest.approx(first, rel=1e-4)  # AdamW is fused where the host updates


# ---- what cannot be


def full(tmp: str) -> tuple[str, str, bool]:
    """A disk without room for the file, and one that refuses to be written later: what is left."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    scheme = placed("zero3", "device", "disk")
    models = [model_of(scheme, folder=Path(tmp, "one")), model_of(placed("zero3", "device"))]
    optimizers = [adamw(each) for each in models]
    most = max(file.stat().st_size for file in Path(tmp, "one", "rank0").glob("*.states"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most // 2, unlimited[1]))
    first = answer(lambda: model_of(scheme, folder=Path(tmp, "other")))
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, 2, 1, 0.05)
    second = ""
    try:
        step(models[0], optimizers[0], 3, 1, 0.05)
    except OSError as error:
        second = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    optimizers[0].zero_grad()
    seen = [step(model, of, 3, 1, 0.05) for model, of in zip(models, optimizers, strict=True)]
    mine, others = (lowband.full_state_dict(each) for each in models)
    return first, second, seen[0] == seen[1] and all(torch.equal(mine[key], others[key]) for key in others)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    [(first, second, is_whole)] = on_ranks(1, full, str(tmp_path))
    assert re.search(r"other/rank0/.*weights.*\.states: no room for \d+ bytes", first)
    assert re.search(r"File too large: '.*/one/rank0/.*weights.*\.states'", second)
    assert is_whole


def damaged(tmp: str) -> str:
    model = model_of(placed("zero3", "device", "disk"), folder=tmp)
    [file] = Path(tmp, "rank0").glob("blocks.1 *.states")
    os.truncate(file, 100)
    return answer(lambda: step(model, adamw(model), 2, 1, 0.05))


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    [said] = on_ranks(1, damaged, str(tmp_path))
    assert re.search(r"/rank0/blocks\.1 .*\.states: ends after 100 bytes", said), said


def refused() -> list[str]:
    topology, scheme = lowband.Topology({}, lowband.Axes(pipeline=2)), placed("zero3", "device", "disk")
    return [
        refusal(lambda: on_axes(GPT(SPEC, seed=7), scheme, topology, 2, schedule="1f1b")),
        refusal(lambda: lowband.shard(GPT(SPEC, seed=7), scheme, topology, Block)),
    ]


def test_what_a_disk_refuses() -> None:
    for in_stages, without_folder in on_ranks(2, refused):
        assert in_stages == (
            "scheme 'zero3': weights world@disk in stages of a pipeline (allowed: world, world@host)"
        )
        assert without_folder == (
            "scheme 'zero3': weights world@disk, and no folder (allowed: lowband.shard(..., disk=folder))"
        )


def test_what_cannot_be_is_refused_in_one_line() -> None:
    given = {"name": "x", "weights": "world@attic", "grads": "world", "optim": "world"}
    with pytest.raises(UserError, match=re.escape("weights: no tier 'attic' (allowed: host, disk)")):
        Scheme.parse(given, "file.yaml: x")
    for peer in ("fsdp2", "deepspeed"):
        says = "no counterpart: weights world@host"
        with pytest.raises(UserError, match=says):
            peer_arguments(peer, placed("zero3", "host", "host"), Levels.fit({}, 4))


def without_room(short: int) -> str:
    """What a rank says where the rank `short` alone may have a byte too little. -1: none"""
    scheme, whole = placed("zero3", "host", "host"), GPT(SPEC, seed=7)
    parameters = sum(p.numel() for p in whole.parameters())
    certain = (4 + 4 + 2) * parameters // 2  # bytes of master weights, gradients and weights, of two ranks
    free = certain - 4 * parameters - 1 if dist.get_rank() == short else 10**9  # what was given is freed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
        return answer(lambda: lowband.shard(whole, scheme, lowband.Topology({}), Block))


def test_a_rank_without_room_in_its_memory_is_refused_on_all() -> None:
    first, second = on_ranks(2, without_room, 1)
    assert first == second
    assert re.fullmatch(
        r"scheme 'zero3': [\d,]+ bytes of states in a process's memory, where [\d,]+ are free "
        r"\(allowed: a smaller module, more ranks\)",
        first,
    )
    assert on_ranks(2, without_room, -1) == ["", ""]


def resident(share: float, accumulation: int, name: str, order: str, folder: str) -> tuple[Any, ...]:
    """Losses of steps; bytes by row of the last one, and weights on the device, both in closed form, too."""
    scheme = placed(name, "device", "host").model_copy(update={"resident": share})
    ranks = dist.get_world_size()
    topology = topology_of(ranks)
    model = lowband.shard(GPT(SPEC, seed=7), scheme, topology, Block, DTYPE["bf16"])
    engine, optimizer, losses = engine_of(model), adamw(model), []
    checkpointer = lowband.Checkpointer(f"{folder}/{share}")
    for number in range(7):
        if number == 2:  # goes another way than the steps, with what a checkpoint may have
            with torch.no_grad():
                losses.append(model(*torch.zeros(2, 1, SPEC.seq_len, dtype=torch.long)).item())
            checkpointer.save(number, model, optimizer)
            checkpointer.wait()
            checkpointer.load(checkpointer.latest(), model, optimizer)
        engine.ledger.take()
        drawn = torch.Generator().manual_seed(number * 100 + dist.get_rank())
        shape = 2, 1, SPEC.seq_len
        given = [torch.randint(SPEC.vocab, shape, generator=drawn) for _ in range(accumulation)]
        if order == "breadth":
            losses += map(float, lowband.accumulate(model, given, lambda batch: model(*batch)))
        for micro, batch in enumerate(given if order == "depth" else ()):
            engine.sync = micro == accumulation - 1
            loss = model(*batch) / accumulation
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    counted = {key[1]: count for key, count in by_row(engine.ledger.take()).items() if key[0] == HOST}
    of_scheme = unit_numels(SPEC, topology.levels), scheme, topology.levels, "bf16", "fp32", accumulation
    sent = sent_bytes(*of_scheme, False, order=order)
    closed = {key[1]: count for key, count in sent.items() if key[0] == HOST and count}
    device = engine.meter.peak["weights"], state_bytes(*of_scheme, "gloo", order=order)["weights"]
    return losses, counted, closed, device


def shares(*of: Any) -> list[Any]:
    return [resident(share, *of) for share in (0.0, 0.3, 0.6, 1.0)]


@pytest.mark.parametrize(
    ("ranks", "accumulation", "name", "order"),
    [
        (1, 2, "zero1", "depth"), (2, 1, "zero3", "depth"), (4, 3, "zero3", "depth"), (4, 2, "hpz", "depth"),
        (2, 3, "zero3", "breadth"),
    ],
)  # fmt: skip
def test_some_weights_stay_on_the_device(
    ranks: int, accumulation: int, name: str, order: str, tmp_path: Path
) -> None:
    for of_rank in on_ranks(ranks, shares, accumulation, name, order, str(tmp_path)):
        losses, *_ = of_rank[0]
        sums = []
        for also, counted, closed, (peak, expected) in of_rank:
            assert also == losses
            assert counted == closed and peak == expected
            sums.append(sum(count for row, count in counted.items() if row.endswith("fetch")))
        assert sums == sorted(sums, reverse=True) and sums[0] > sums[-1] == 0, sums
