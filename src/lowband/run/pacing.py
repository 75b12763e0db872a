"""A device of constant speed: matrix products take as long as they would at a stated rate.

[Note: pacing] In a box many ranks share a few CPU cores, so each rank's speed depends on the activity of the
others. A paced rank does its real computation, and then waits until the matrix products would be done at
the rate of the machine's device divided by the box's scale. Only products are counted (the same ones as in
MFU); the CPU time of everything between them, such as norms, is subtracted from the wait, as if it overlapped
with them. Waiting for communication is not changed: messages are real, and so is the time they take.

Products of bf16 are computed in fp32 and rounded to bf16, as matrix units do; in bf16, a CPU without bf16
units would take ten times as long. Source of the method: docs/scale-model.md.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

# Share of real in paced time above which a run is rejected: waits could no longer keep the speed constant.
MOST_REAL_SHARE = 0.8
_SHORTEST_WAIT_S = 1e-3  # a shorter one is added to the next

aten = torch.ops.aten


class Overloaded(Exception):
    """The real computation took too much of the paced time. The text contains the share."""


def _attention_flop(query: torch.Tensor, key: torch.Tensor) -> int:
    """FLOP of attention's two products, not halved for causality: [B, N, T, D] x [B, N, S, D]."""
    B, N, T, D = query.shape
    return 4 * B * N * T * key.shape[2] * D


def _flop(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOP of an operator; 0 unless it is a matrix product."""
    if op is aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention_flop(args[0], args[1])
    if op is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 2 * _attention_flop(args[1], args[2])
    formula: Callable[..., int] | None = flop_registry.get(op)
    return formula(*args, **kwargs, out_val=out) if formula is not None else 0


_PRODUCTS = {
    *flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
}


class _ProcessorTime(threading.local):
    """Each thread's processor time at its last product: threads take turns in breadth-first accumulation."""

    seconds = 0.0  # a new thread has none


class PacedDevice(TorchDispatchMode):
    """A context in which this thread's matrix products run at `flop_per_s`, forward and backward.

    On a CPU, backward runs in the thread that calls it. The threads of breadth-first accumulation take over
    the context; others, such as the engine's lane, are not paced.
    """

    def __init__(self, flop_per_s: float) -> None:
        super().__init__()
        self.flop_per_s = flop_per_s
        self._paced_s = self._real_s = 0.0
        self._ahead_s = 0.0  # how far the real computation is ahead of the paced one
        self._before = _ProcessorTime()

    def __enter__(self) -> "PacedDevice":
        # An optimizer step or a checkpoint since the last product is not part of the computation.
        self._before.seconds = time.thread_time()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = func.overloadpacket
        if op not in _PRODUCTS:
            return func(*args, **kwargs)
        between_s = time.thread_time() - self._before.seconds
        start = time.perf_counter()
        out = _as_matrix_unit(func, args, kwargs)
        product_s = time.perf_counter() - start  # including time in which other ranks had the core
        self._pace(_flop(op, args, kwargs, out) / self.flop_per_s, product_s + between_s)
        return out

    def _pace(self, paced_s: float, real_s: float) -> None:
        self._paced_s += paced_s
        self._real_s += real_s
        self._ahead_s += paced_s - real_s
        if self._ahead_s > _SHORTEST_WAIT_S:
            start = time.perf_counter()
            time.sleep(self._ahead_s)
            self._ahead_s -= time.perf_counter() - start  # oversleep counts towards the next wait
        self._before.seconds = time.thread_time()

    def take_real_share(self) -> float:
        """Real over paced computation time since the last call; 0 if nothing was computed."""
        share = self._real_s / self._paced_s if self._paced_s else 0.0
        self._paced_s = self._real_s = 0.0
        return share


def _as_matrix_unit(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator's result, computed in fp32 for bf16 arguments. Attention's log-sum-exp (its second result)
    is always fp32.
    """
    if not any(isinstance(arg, torch.Tensor) and arg.dtype == torch.bfloat16 for arg in args):
        return func(*args, **kwargs)
    out = func(*tree_map(_up, tuple(args)), **tree_map(_up, dict(kwargs)))
    if func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu:
        return (out[0].bfloat16(), *out[1:])
    return tree_map(lambda part: part.bfloat16() if isinstance(part, torch.Tensor) else part, out)


def _up(value: Any) -> Any:
    is_bf16 = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_bf16 else value
