"""Activations of breadth-first accumulation, and the state that its coroutines have of torch."""

import pytest
import torch
from chains import MICRO_BATCHES
from test_recompute import BATCH, MODEL, NORM_STATISTICS
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import lowband
from lowband.cost.activations import kept_bytes_per_token
from lowband.engine.passes.coroutine import Coroutine
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from tests.checkout import ROOT


class Blocks(GPT):
    """A GPT's blocks alone."""

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BTH = block(x_BTH)
        return x_BTH.float().sum()


def kept(recompute: str) -> int:
    """Bytes that the forwards of all micro-batches keep for their backwards, parameters left out."""
    model = Blocks(MODEL, recompute=recompute)  # type: ignore[arg-type]
    lowband.shard(model, "zero3", lowband.Topology({}), Block, torch.bfloat16)
    parameters = {unit.flat.untyped_storage()._cdata for unit in engine_of(model).units}
    held: dict[int, int] = {}
    tensors: list[torch.Tensor] = []  # kept alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)
        return tensor

    shape = (BATCH, MODEL.seq_len, MODEL.hidden)
    parts = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(MICRO_BATCHES)]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        lowband.accumulate(model, parts, model)
    return sum(held.values())


@pytest.mark.parametrize(("recompute", "statistics"), [("none", NORM_STATISTICS), ("full", 0)])
def test_activations_of_all_micro_batches_are_kept(monkeypatch, recompute, statistics: int) -> None:
    monkeypatch.chdir(ROOT)
    per_token = kept_bytes_per_token(MODEL, MODEL.seq_len, recompute, "flash").block + statistics
    [found] = on_ranks(1, kept, recompute)
    assert found == per_token * BATCH * MODEL.seq_len * MODEL.layers * MICRO_BATCHES


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def state_inside() -> tuple[bool, ...]:
    """Of a coroutine: the caller's modes, and a state of its own after that."""
    seen: list[object] = []

    def call() -> int:
        seen.extend((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()))
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).device.type)
        with torch.no_grad():
            coroutine.suspend()
            seen.append(torch.is_grad_enabled())
        return 5

    torch.set_num_threads(2)
    with Counting() as mode, torch.autocast("cpu"), torch.device("meta"):
        coroutine = Coroutine(call)
        first = coroutine.resume()
        counted = mode.count
    outside = torch.is_grad_enabled()
    last = coroutine.resume()
    return (
        first and not last and outside and coroutine.take_result() == 5,
        seen == [True, True, 2, "meta", False],
        counted > 2,
    )


def test_a_coroutine_has_the_callers_state() -> None:
    assert on_ranks(1, state_inside) == [(True, True, True)]
