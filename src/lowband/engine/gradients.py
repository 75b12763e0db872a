"""A unit's gradients: from the leaves, over the levels, to the optimizer's shards.

Within a backward pass a unit's gradient is reduced to the grads level; at an accumulation boundary the sum is
reduced further to the optimizer's level, where it is averaged over the replica (without sync, all ranks).
Breadth-first (engine.breadth), the leaves' gradients of a step's micro-batches are summed first, in fp32, and
reduced once.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowband.cost.memory import GRAD_BYTES
from lowband.engine.call import Call
from lowband.engine.lane import Handle, Work
from lowband.engine.shard_grad import ShardGrad
from lowband.errors import UserError
from lowband.spec.partition import intersect
from lowband.spec.step import reductions

if TYPE_CHECKING:
    from lowband.engine.shard import Unit


class Gradients:
    """One unit's gradients on one rank: the shards it holds and the reductions it still waits for."""

    def __init__(self, unit: "Unit", reduce_dtype: torch.dtype) -> None:
        self._unit, self._dtype = unit, reduce_dtype
        self._collectives, self._meter, self._scheme = unit.collectives, unit.meter, unit.scheme
        self._reducing: Handle | None = None
        self._is_reduced = False  # whether this backward has submitted a reduction
        self._missing: set[torch.Tensor] = set()  # leaves still without a gradient in this backward
        self._ready_in: int | None = None  # the graph task in which the last gradient makes the unit ready
        self._arrived_in: set[int] = set()  # graph tasks in which gradients have arrived in this backward
        self._sum: torch.Tensor | None = None  # 1D, the whole unit, fp32: over micro-batches, breadth-first
        self._accumulated: torch.Tensor | None = None  # 1D, shard of `grads`, fp32
        self._boundary: torch.Tensor | None = None  # 1D, shard of `optim`, fp32
        self._handed_bytes = 0  # of the gradients that the optimizer's parameters have

    # ---- from autograd

    def watch(self, begins: Callable[[], None], ready: Callable[["Unit"], None]) -> None:
        """Call `begins` before each gradient of a leaf; call `ready` once every leaf has its gradient of this
        backward, if that can be known in time.
        """

        def arrives(_grad: torch.Tensor) -> None:
            begins()

        def arrived(leaf: torch.Tensor) -> None:
            self._arrived_in.add(torch._C._current_graph_task_id())
            if leaf.grad is not None and leaf.grad.layout is not torch.strided:
                self._refuse_sparse(leaf)
            is_first = leaf in self._missing
            self._missing.discard(leaf)
            # See engine.engine, [Note: late gradients].
            if is_first and not self._missing and self._arrived_in == {self._ready_in}:
                ready(self._unit)

        if self._unit.requires_grad:
            for leaf in self._unit.leaves:
                leaf.register_hook(arrives)
                leaf.register_post_accumulate_grad_hook(arrived)

    def _refuse_sparse(self, leaf: torch.Tensor) -> NoReturn:
        place = next(i for i, each in enumerate(self._unit.leaves) if each is leaf)
        raise UserError(
            "its gradient is sparse",
            where=self._unit.shards[place].shard_of.name,
            allowed="embeddings with sparse=False",
        )

    def expect(self) -> None:
        """Prepare for a backward that begins."""
        self._missing, self._ready_in, self._is_reduced = set(self._unit.leaves), None, False
        self._arrived_in.clear()
        if all(shard.grad is None for shard in self._unit.shards):
            self._meter.release("grads", self._handed_bytes)
            self._handed_bytes = 0

    def expect_ready(self, graph_task: int) -> None:
        """Make the unit ready at its last gradient, provided that all arrive in this autograd graph task."""
        if self._arrived_in <= {graph_task}:
            self._ready_in = graph_task

    @property
    def needs_reduce(self) -> bool:
        """Whether gradients of this backward, including late ones, have not been reduced yet."""
        return self._unit.requires_grad and (
            not self._is_reduced or any(leaf.grad is not None for leaf in self._unit.leaves)
        )

    # ---- over the levels

    def add_to_sum(self) -> None:
        """Move the leaves' gradients, those of one micro-batch, to their sum over the micro-batches."""
        grads = self._take_grads()
        if self._sum is None and any(grad is not None for grad in grads):
            self._sum = self._meter.hold("sums", self._flatten(grads, torch.float32))
        elif self._sum is not None:
            ranges = zip(self._unit.layout.ranges(), grads, strict=True)
            pairs = [(self._sum[a:b].view(grad.shape), grad) for (a, b), grad in ranges if grad is not None]
            if pairs:
                sums, parts = zip(*pairs, strict=True)
                torch._foreach_add_(sums, parts)

    def start_reduce(self, at_boundary: bool) -> None:
        """Submit the reduction of the gradients; at the boundary, to the optimizer's level."""
        self.wait_reduce()  # there may be an earlier one in this backward
        grads, summed = self._take_grads(), self._take_sum()
        self._is_reduced = True
        self._reducing = self._collectives.submit(
            self._unit.name,
            self._levels_of_reduction(at_boundary),
            partial(self._reduce, grads=grads, summed=summed, at_boundary=at_boundary),
            uses=[*grads, *summed, self._accumulated],
        )

    def _take_grads(self) -> list[torch.Tensor | None]:
        """The leaves' gradients, which the leaves then do not have any more."""
        grads = [leaf.grad for leaf in self._unit.leaves]
        for leaf in self._unit.leaves:
            leaf.grad = None
        return grads

    def _take_sum(self) -> list[torch.Tensor]:
        """The sum over micro-batches, 1D, in the reduce dtype; empty if there is none."""
        if self._sum is None:
            return []
        whole, self._sum = self._sum.to(self._dtype), None
        self._meter.release("sums", whole.numel() * GRAD_BYTES)
        return [whole]

    def wait_reduce(self) -> None:
        """Wait for the reduction. Raises, once, the error that it raised."""
        if self._reducing is not None:
            reducing, self._reducing = self._reducing, None
            reducing.wait()

    def _levels_of_reduction(self, at_boundary: bool) -> list[str]:
        rows = reductions("pass") + (reductions("step") if at_boundary else [])
        return [level for row in rows for level in self._collectives.levels_of_reduction(row, self._dtype)]

    def _reduce(
        self,
        call: Call,
        grads: list[torch.Tensor | None],
        summed: list[torch.Tensor],
        at_boundary: bool,
    ) -> Work:
        """grads: of the leaves; summed: the sum over micro-batches in their place, or empty"""
        meter = self._meter
        # A list, so that only the collective refers to the gradient while it is being sent.
        moving = [call.hold(summed.pop() if summed else self._flatten(grads, self._dtype))]
        for row in reductions("pass"):
            moving.append((yield from self._collectives.reduce(call, moving.pop(), row)))
        part = moving.pop()
        if self._accumulated is not None:
            self._accumulated += part
        elif not at_boundary:
            self._accumulated = meter.hold("grads", part.float())
        if self._accumulated is not None:
            call.release(part)
        if not at_boundary:
            return
        if self._accumulated is not None:
            meter.release("grads", self._accumulated.nbytes)
            part, self._accumulated = call.hold(self._accumulated.to(self._dtype)), None
        # Reduce to the optimizer's level, and average over the replica.
        moving.append(part)
        del part
        for row in reductions("step"):
            moving.append((yield from self._collectives.reduce(call, moving.pop(), row)))
        part = moving.pop()
        call.release(part)
        part = part.float()
        ranks = self._unit.levels.size(self._scheme.level("replica"))
        if ranks > 1:
            part /= ranks
        if self._boundary is None:
            self._boundary = meter.hold("grads", part)
        else:  # a second reduction in one backward: see Engine.end_backward
            self._boundary += part

    def _flatten(self, grads: list[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """The unit's gradient, 1D. Empties the list, so its tensors can be freed."""
        layout = self._unit.layout
        full = self._unit.master.new_empty(layout.numel, dtype=dtype)
        into, present = [], []
        for (start, stop), span, grad in zip(layout.ranges(), layout.spans(), grads, strict=True):
            if grad is not None:
                into.append(full[start:stop].view(grad.shape))
                present.append(grad)
            unfilled = start if grad is None else stop
            if unfilled < span[1]:
                full[unfilled : span[1]] = 0
        grads.clear()
        if present:
            torch._foreach_copy_(into, present)
        return full

    # ---- to the optimizer's parameters

    def finish_reduce(self) -> None:
        """Wait for the reduction; at a boundary, set the gradients of the optimizer's parameters."""
        self.wait_reduce()
        if self._boundary is None:
            return
        start, stop = self._unit.optim_range
        shards, boundary = self._unit.shards, self._boundary
        with torch._C.DisableTorchFunctionSubclass():  # quicker; sums of gradients are right on parts
            if all(shard.grad is None for shard in shards):
                self._handed_bytes = boundary.nbytes
            else:  # gradients accumulate without no_sync
                self._meter.release("grads", boundary.nbytes)
            for shard, span in zip(shards, self._unit.layout.spans(), strict=True):
                a, b = intersect(span, (start, stop))
                part = boundary[a - start : b - start]
                if not isinstance(boundary, FakeTensor):
                    part = part.as_subclass(ShardGrad)
                shard.grad = part if shard.grad is None else shard.grad.add_(part)
        self._boundary = None

    def forget(self) -> None:
        """Discard all gradients that the optimizer's parameters do not have yet."""
        with suppress(RuntimeError):  # the backward has failed already
            self.wait_reduce()
        for leaf in self._unit.leaves:
            leaf.grad = None
        for held in (self._accumulated, self._boundary):
            self._meter.release("grads", 0 if held is None else held.nbytes)
        self._meter.release("sums", 0 if self._sum is None else self._sum.nbytes)
        self._accumulated = self._boundary = self._sum = None
