"""What autograd keeps of a forward, and what a backward holds at most, as torch counts them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from lowband import Context
from lowband.cost.activations import kept_bytes_per_token
from lowband.model.gpt import GPT, attend_along
from lowband.spec.model import ModelSpec

# Of each token LayerNorm keeps a mean and a deviation, which the closed form leaves out; 16 bit on a CPU.
NORM_STATISTICS = 2 * 2 * 2


def has_memory(storage: StorageWeakRef) -> bool:
    """Whether somebody has the storage, with what was in it."""
    found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return found is not None and found.nbytes() > 0


def kept_by(model: nn.Module, forward: Callable[..., object], *inputs: object) -> int:
    """Bytes that autograd keeps of a forward, parameters of the model left out."""
    local = lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor  # noqa: E731
    parameters = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}
    tensors: list[torch.Tensor] = []  # kept alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(*inputs)
    return sum(held.values())


def kept_by_blocks(spec: ModelSpec, context: Context | None, more: float) -> tuple[float, float]:
    """Bytes per token that autograd keeps of a block of a GPT, and the closed form. more: of the way"""
    model, ranks = GPT(spec).bfloat16(), dist.get_world_size()
    if context is not None:
        attend_along(model, context)
    tokens = spec.seq_len // ranks
    x = torch.randn(2, tokens, spec.hidden, dtype=torch.bfloat16, requires_grad=True)
    kept = kept_by(model, nn.Sequential(*model.blocks), x)
    expected = kept_bytes_per_token(spec, spec.seq_len, "none", "flash", context=more).block
    return kept / (2 * tokens * spec.layers), expected + NORM_STATISTICS


def most_held(backward: Callable[[], object]) -> int:
    """Bytes that a backward holds at most beside what was there, as torch's profiler adds them up."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        backward()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
