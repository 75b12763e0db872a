"""What units keep for the backward, in host memory: the same bits, and the bytes that autograd saves."""

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import started
import torch
from pydantic import ValidationError
from test_parity import SPEC
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import lowband
from lowband.cost.contents import step_bytes
from lowband.cost.held import held_bytes
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.records import by_row
from lowband.spec.run import RunSpec
from lowband.spec.tiers import Tier
from lowband.trainers.prepare import prepare
from lowband.trainers.trainer import Trainer
from tests.checkout import CONFIG

SMOKE = next(spec for spec in CONFIG.runs(["smoke"]) if spec.scheme.name == "zero3")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(SPEC.vocab, (2, 1, SPEC.seq_len), generator=drawn)
    return tokens, targets


def trained(activations: Tier, order: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
    """Losses, weights, and the bytes of a step that are copied to and from the host."""
    model = lowband.shard(
        GPT(SPEC, seed=7), CONFIG.scheme("zero3"), lowband.Topology({}), Block, torch.float32,
        activations=activations,
    )  # fmt: skip
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(3):
        engine_of(model).ledger.take()
        if order == "breadth":
            losses += map(float, lowband.accumulate(model, [batch()], lambda given: model(*given)))
        else:
            loss = model(*batch())
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    copied = {one.collective: one.bytes for one in engine_of(model).ledger.take() if one.level == "host"}
    return losses, lowband.full_state_dict(model), copied


def both(order: str) -> tuple[object, ...]:
    return trained("device", order), trained("host", order)


def saved_in_blocks() -> int:
    """Bytes that autograd saves while blocks of the plain model compute, parameters left out."""
    model, total = GPT(SPEC, seed=7), 0
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    open_pairs: dict[nn.Module, saved_tensors_hooks] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += 0 if tensor.untyped_storage()._cdata in own else tensor.nbytes
        return tensor

    def enter(block: nn.Module, _: object) -> None:
        open_pairs[block] = saved_tensors_hooks(pack, lambda tensor: tensor)
        open_pairs[block].__enter__()

    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(lambda block, *_: open_pairs.pop(block).__exit__())
    model(*batch()).backward()
    return total


@pytest.mark.parametrize("order", ["depth", "breadth"])
def test_bits_and_bytes(order: str) -> None:
    [expected] = on_ranks(1, saved_in_blocks)
    for (losses, weights, none), (also, others, copied) in on_ranks(2, both, order):
        assert also == losses and not none
        assert all(torch.equal(weights[key], others[key]) for key in weights)
        assert copied == {"keep_stash": expected, "keep_fetch": expected}


def refused() -> None:
    """Also by a function, before anything is sharded; it sees whole modules."""
    model, seen = GPT(SPEC), list[tuple[nn.Module, int]]()
    expected = [(block, sum(p.numel() for p in block.parameters())) for block in model.blocks]

    def wrong_in_the_end(block: nn.Module) -> str:
        seen.append((block, sum(p.numel() for p in block.parameters())))
        return "host" if len(seen) < len(expected) else "disk"

    for activations in ("disk", wrong_in_the_end):
        with pytest.raises(UserError, match="activations in 'disk'"):
            lowband.shard(model, "zero3", lowband.Topology({}), Block, activations=activations)
    assert seen == expected
    model(*batch()).backward()


def test_another_tier_is_refused() -> None:
    on_ranks(1, refused)


# ---- runs


def spec_with(recompute: str, **options: Any) -> RunSpec:
    model = options.pop("model", SPEC.model_dump())
    if recompute == "none":
        options.pop("recompute_layers", None)
    small = {"model": model, "seq_len": SPEC.seq_len, "ranks": 2, "micro_batch": 2, "accumulation": 2}
    return RunSpec.model_validate({**SMOKE.model_dump(), **small, "recompute": recompute, **options})


def step(trainer: Trainer, spec: RunSpec, number: int) -> list[float]:
    """Losses and the norm."""
    generator = torch.Generator().manual_seed(2 * number + torch.distributed.get_rank())
    micro_batches = torch.randint(
        SPEC.vocab, (spec.accumulation, 2, spec.micro_batch, spec.seq_len), generator=generator
    )
    losses = trainer.accumulate(spec.accumulation, lambda i: tuple(micro_batches[i]))
    return [*map(float, losses), trainer.step(spec.grad_clip)]


def run(spec: RunSpec) -> tuple[list[float], dict[str, torch.Tensor], dict[Any, Any], dict[str, int]]:
    """Losses and norms, weights, the last step's bytes, and the meter."""
    trainer, seen, sent = prepare(spec, torch.device("cpu")), list[float](), []
    for number in range(3):
        trainer.take_sent()
        seen += step(trainer, spec, number)
        sent = trainer.take_sent()
    counted = by_row(sent)
    return seen, trainer.full_state(), counted, trainer.state_peaks()


def run_each(specs: list[RunSpec]) -> list[Any]:
    return [run(spec) for spec in specs]


WAYS: list[dict[str, Any]] = [
    {}, {"order": "breadth"}, {"scheme": CONFIG.scheme("zero1").model_dump()},
    {"recompute_layers": 1}, {"order": "breadth", "recompute_layers": 1},
    {"compute_dtype": "bf16", "accumulation": 1},
    {"model": SPEC.model_copy(update={"positions": "rotary"}).model_dump()},
]  # fmt: skip


def test_runs_keep_their_bits_and_their_bytes_are_the_closed_form() -> None:
    specs = [spec_with(way, **options) for options in WAYS for way in ("none", "host")]
    found = on_ranks(2, run_each, specs)
    for of_rank in found:
        for spec, plain, kept in zip(specs[1::2], of_rank[::2], of_rank[1::2], strict=True):
            (losses, weights, sent, held), (also, others, copied, with_kept) = plain, kept
            assert also == losses and all(torch.equal(weights[key], others[key]) for key in weights)
            added = {key: count for key, count in copied.items() if key not in sent}
            assert added == {key: count for key, count in step_bytes(spec).items() if key[0] == "host"}
            assert {key: copied[key] for key in sent} == sent
            closed = held_bytes(spec, "gloo")
            assert with_kept == {**held, "activations@host": closed["activations@host"]}


def test_a_whole_run_says_the_same(tmp_path: Path) -> None:
    found = {}
    for way in ("none", "host"):
        folder = started.run(
            tmp_path / way, ranks=2, steps=3, warmup_steps=1, seq_len=32, micro_batch=2, accumulation=2,
            model=CONFIG.model("gpt-200k"), scheme=CONFIG.scheme("zero1"), recompute=way,
        )  # fmt: skip
        _, outcome = started.counts_as_closed_forms(folder)
        assert ("activations@host" in [one.kind for one in outcome.states]) == (way == "host")
        found[way] = [line.loss for line in folder.whole_steps()], outcome.weights_sha256
    assert found["host"] == found["none"]


def test_some_blocks_are_recomputed(tmp_path: Path) -> None:
    """Along tensor and in stages: bits, and bytes in closed form."""
    of = {"seq_len": 32, "model": CONFIG.model("gpt-240k"), "scheme": CONFIG.scheme("zero1")}
    some: list[dict[str, Any]] = [{"recompute": "full", "recompute_layers": count} for count in (2, 4)]
    for name, axes in (
        ("tensor", {"tensor": 2, "sequence_parallel": True}),
        ("pipeline", {"pipeline": 2, "accumulation": 4}),
    ):
        found = []
        for i, way in enumerate(({}, *some)):
            options = {"ranks": 2, "steps": 2, "warmup_steps": 1, "micro_batch": 2, **of, **axes, **way}
            folder = started.run(tmp_path / f"{name}-{i}", **options)
            _, outcome = started.counts_as_closed_forms(folder)
            found.append(([line.loss for line in folder.whole_steps()], outcome.weights_sha256))
        assert found[0] == found[1] == found[2]


SOME = {"recompute": "full", "recompute_layers": 1}


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("recompute none (allowed: recompute full or host)", {"recompute_layers": 1}),
        (
            "3 blocks are not equally many of each of 1 stages (allowed: multiples of 1 to 2)",
            {**SOME, "recompute_layers": 3},
        ),
        ("context 2, expert 1 (allowed: neither of both axes)", {**SOME, "context": 2, "seq_len": 8}),
        (
            "stages of [1, 3] blocks (allowed: stages of equally many)",
            {**SOME, "model": {**SPEC.model_dump(), "layers": 4}, "pipeline": 2, "layers": (1, 3)}
            | {"recompute_layers": 2},
        ),
        (
            "blocks of two kinds (allowed: 0: all of them)",
            {**SOME, "model": {**SPEC.model_dump(), "attention": "linear", "softmax_every": 2}},
        ),
    ],
)
def test_numbers_of_blocks_that_are_refused(said: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        RunSpec.model_validate({**spec_with("none").model_dump(), **options})


def resumed(folder: str, first: RunSpec, then: RunSpec) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A step and a checkpoint, from which another trainer goes on."""
    trainer, checkpointer = prepare(first, torch.device("cpu")), lowband.Checkpointer(folder)
    step(trainer, first, 0)
    checkpointer.save(1, trainer.model, trainer.optimizer)
    checkpointer.wait()
    other = prepare(then, torch.device("cpu"))
    checkpointer.load(checkpointer.latest(), other.model, other.optimizer)
    return step(other, then, 1), other.full_state()


def resume_each(folders: dict[tuple[str, str], str]) -> list[Any]:
    return [resumed(folder, *map(spec_with, ways)) for ways, folder in folders.items()]


def test_a_checkpoint_is_resumed_in_the_other_setting(tmp_path: Path) -> None:
    ways = [("none", "none"), ("none", "host"), ("host", "none")]
    folders = {pair: str(tmp_path / "-".join(pair)) for pair in ways}
    for (seen, weights), *others in on_ranks(2, resume_each, folders):
        for also, mine in others:
            assert also == seen and all(torch.equal(weights[key], mine[key]) for key in weights)


def left_on_device(recompute: str) -> list[bool]:
    """Of each block, whether its forward leaves what its MLP computed in the device's memory."""
    trainer, refs = prepare(spec_with(recompute), torch.device("cpu")), []
    for block in (module for module in trainer.model.modules() if isinstance(module, Block)):
        keep = lambda _module, _args, output: refs.append(weakref.ref(output.untyped_storage()))  # noqa: E731
        block.mlp.up.register_forward_hook(keep)
    loss = trainer.model(*batch())
    found = [ref() is not None for ref in refs]
    loss.backward()
    return found


def left_each() -> list[list[bool]]:
    return [left_on_device(way) for way in ("none", "host", "full")]


def test_the_device_keeps_nothing_of_a_block() -> None:
    [(kept, on_host, again)] = on_ranks(1, left_each)
    assert kept == [True] * SPEC.layers and on_host == again == [False] * SPEC.layers


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": "fsdp2"}, "recompute host: engine fsdp2, device auto (allowed: engine lowband, device"),
        ({"device": "fake"}, "recompute host: engine lowband, device fake"),
        (
            {"pipeline": 2},
            "recompute host: engine lowband, device auto (allowed: engine lowband, device auto",
        ),
        ({"compile": True}, "recompute host: bytes that compiled blocks, experts or linear layers keep"),
        ({"model": CONFIG.model("gpt-200k-experts").model_dump()}, "recompute host: bytes that compiled"),
        ({"machine": CONFIG.machine("perlmutter").model_dump()}, "tier 'host' has no rates"),
    ],
)
def test_what_a_run_cannot_keep_there_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        spec_with("host", **options)
