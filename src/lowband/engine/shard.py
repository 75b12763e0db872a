"""One unit: the parameters that are gathered together, their shards and their transitions.

[Note: leaves] The module computes with `leaves`: parameters that are views into the unit's flat buffer.
They live as long as the unit, so that autograd's graph stays valid while the buffer behind them is freed
and filled again. They are made from `.data`, which gives them version counters of their own: filling the
buffer is no in-place change in autograd's eyes. It brings the same values back, unless a scheme gives forward
and backward gather different wires: then the backward uses its own wire's values, as is meant.

[Note: shards] Outside of forward and backward the module's parameters are this rank's fp32 optimizer
shards: one 1D parameter per original parameter (empty where this rank holds nothing of it), all of them
views into `master`, each with the padding behind it: zeros, with gradients of zero. Any optimizer that works
element by element works on them.

[Note: stale] An optimizer step changes `master` in place and so raises the version counters of the shards;
fused optimizers do not, so steps of torch's optimizers are counted too. The next gather sees either and first
carries the new weights from the optimizer's level to the weights' level.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowband.cost.memory import keeps_secondary, keeps_weights_copy
from lowband.engine.collectives import Collectives
from lowband.engine.lane import Handle, Lane
from lowband.engine.states import UnitState
from lowband.spec.machine import SELF, WORLD
from lowband.spec.partition import UnitLayout, intersect, shard_range


class _Steps:
    """Counts the steps of all of torch's optimizers in this process. See [Note: stale]."""

    taken = 0

    @classmethod
    def count(cls, *_: object) -> None:
        cls.taken += 1


register_optimizer_step_post_hook(_Steps.count)

Slot = tuple[nn.Module, str]  # where a parameter hangs: module and attribute


class Unit:
    """Parameters that are gathered together and the shards that this rank holds of them."""

    def __init__(
        self,
        name: str,
        slots: list[list[Slot]],
        collectives: Collectives,
        lane: Lane,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        """Take over the parameters at `slots`: per parameter, all places it hangs at."""
        self.name, self.slots = name, slots
        self.collectives, self.lane = collectives, lane
        self.scheme, self.meter, topology = collectives.scheme, collectives.meter, collectives.topology
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        self.levels, self.rank = topology.levels, topology.rank

        originals = [getattr(*places[0]) for places in slots]
        self.requires_grad = originals[0].requires_grad
        self.layout = UnitLayout.of([tuple(p.shape) for p in originals], self.levels.world)
        self._hold_shards(originals)
        self._make_leaves(originals)
        self.state = UnitState.GATHERED if self.is_whole else UnitState.SHARDED
        self._gathering: Handle | None = None
        self._reducing: Handle | None = None
        self._missing_grads: set[torch.Tensor] = set()
        self._ready_in: int | None = None  # the graph task in which the last missing gradient makes it ready
        self._accumulated: torch.Tensor | None = None  # 1D, shard of `grads`, fp32
        self._boundary: torch.Tensor | None = None  # 1D, shard of `optim`, fp32
        self._handed_bytes = 0  # of what the optimizer's parameters have as gradients
        self._secondary_fresh = False
        self.put_shards()

    # ---- what this rank holds

    def _range(self, level: str) -> tuple[int, int]:
        return shard_range(self.layout.numel, self.levels, level, self.rank)

    @property
    def optim_range(self) -> tuple[int, int]:
        """First and last-plus-one element of `master` in the unit."""
        return self._range(self.scheme.optim)

    def _part(self, originals: list[nn.Parameter], level: str, dtype: torch.dtype) -> torch.Tensor:
        """1D, this rank's shard over `level` of the flattened parameters, in fresh memory."""
        start, stop = self._range(level)
        part = originals[0].new_zeros(stop - start, dtype=dtype)
        for original, place in zip(originals, self.layout.ranges(), strict=True):
            a, b = intersect(place, (start, stop))
            part[a - start : b - start] = original.detach().reshape(-1)[a - place[0] : b - place[0]]
        return part

    def _hold_shards(self, originals: list[nn.Parameter]) -> None:
        hold, dtype = self.meter.hold, self.compute_dtype
        start, stop = self.optim_range
        self.master = hold("optim", self._part(originals, self.scheme.optim, torch.float32))  # 1D
        self.shards: list[nn.Parameter] = []
        for span in self.layout.spans():
            a, b = intersect(span, (start, stop))
            self.shards.append(nn.Parameter(self.master[a - start : b - start], self.requires_grad))
        self._seen_version = self._version()

        # Whether each rank holds the whole unit all the time, so that nothing is gathered to compute.
        self.is_whole = not self.levels.hops(SELF, self.scheme.weights)
        self.weights: torch.Tensor | None = None  # 1D, shard of `weights`, compute dtype
        if keeps_weights_copy(self.scheme, self.levels, dtype == torch.float32):
            self.weights = hold("weights", self._part(originals, self.scheme.weights, dtype))
        self.secondary: torch.Tensor | None = None  # 1D, shard of `secondary`, compute dtype
        if keeps_secondary(self.scheme, self.levels):
            a, b = self._range(self.scheme.backward_level)
            self.secondary = hold("secondary", self.master.new_zeros(b - a, dtype=dtype))

    def _make_leaves(self, originals: list[nn.Parameter]) -> None:
        """See [Note: leaves]."""
        if self.is_whole:
            self.flat = self.master if self.weights is None else self.weights
        else:
            self.flat = self.master.new_empty(self.layout.numel, dtype=self.compute_dtype)
        data = self.flat.data
        self.leaves = [
            nn.Parameter(data[start:stop].view(p.shape), self.requires_grad)
            for p, (start, stop) in zip(originals, self.layout.ranges(), strict=True)
        ]
        if not self.is_whole:
            self.flat.untyped_storage().resize_(0)

    def put_shards(self) -> None:
        """Hang this rank's shards at the module. See [Note: shards]."""
        self._put(self.shards)

    def put_leaves(self) -> None:
        """Hang the whole parameters at the module."""
        self._put(self.leaves)

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for places, parameter in zip(self.slots, parameters, strict=True):
            for module, attribute in places:
                module._parameters[attribute] = parameter

    # ---- weights: gather and drop

    def _version(self) -> int:
        return _Steps.taken + sum(shard._version for shard in self.shards)

    def start_gather(self, backward: bool) -> None:
        """Submit the gather of the whole unit, if it is not held or on its way."""
        version = self._version()
        stale = version != self._seen_version
        if self.is_whole:
            self._seen_version = version
            if stale and self.flat is not self.master:
                self._gathering = self.lane.submit(self._refresh)
            return
        if stale:  # an optimizer step came between a forward without its backward and this one
            self.drop()
        if self.state is not UnitState.SHARDED:
            return
        self._seen_version = version
        from_secondary = backward and self._secondary_fresh
        self.state = UnitState.GATHERING
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self.meter.hold("gathered", self.flat)
        self._gathering = self.lane.submit(lambda: self._gather(stale, backward, from_secondary))

    def finish_gather(self) -> None:
        """Wait for the gather and hang the whole parameters at the module."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.state = UnitState.GATHERED
        self.put_leaves()

    def keep_secondary(self) -> None:
        """Copy this rank's part of the gathered unit into the secondary shard."""
        if self.secondary is not None:
            start, stop = self._range(self.scheme.backward_level)
            self.secondary.copy_(self.flat[start:stop])
            self._secondary_fresh = True

    def drop(self) -> None:
        """Back to shards. The unit's buffer is freed unless it is held all the time."""
        if self._gathering is not None:  # prefetched, and not used after all
            self.finish_gather()
        self.put_shards()
        if not self.is_whole and self.state is UnitState.GATHERED:
            self.meter.release("gathered", self.flat.nbytes)
            self.flat.untyped_storage().resize_(0)
            self.state = UnitState.SHARDED

    def forget_secondary(self) -> None:
        self._secondary_fresh = False

    def _gather(self, stale: bool, backward: bool, from_secondary: bool) -> None:
        if from_secondary:
            assert self.secondary is not None
            source, level = self.secondary, self.scheme.backward_level
        else:
            if stale:
                self._refresh()
            source, level = self._weights_source(), self.scheme.weights
        purpose = "backward_gather" if backward else "forward_gather"
        self.collectives.gather(source, self.flat, SELF, level, purpose)

    def _weights_source(self) -> torch.Tensor:
        """This rank's shard of the weights; the master shard itself where no copy is kept of it."""
        return self.master if self.weights is None else self.weights

    def _refresh(self) -> None:
        """Carry the master weights from the optimizer's level in to the weights' level. [Note: stale]"""
        if self.weights is not None:
            self.collectives.gather(
                self.master, self.weights, self.scheme.weights, self.scheme.optim, "update_gather"
            )

    # ---- gradients: reduce and accumulate

    def watch_grads(self, ready: Callable[["Unit"], None]) -> None:
        """Call `ready` when every leaf has its gradient of this backward, if that can be told."""

        def arrived(leaf: torch.Tensor) -> None:
            if torch._C._current_graph_task_id() != self._ready_in:
                self._ready_in = None  # see engine.engine, [Note: late gradients]
            is_first = leaf in self._missing_grads
            self._missing_grads.discard(leaf)
            if is_first and not self._missing_grads and self._ready_in is not None:
                ready(self)

        if self.requires_grad:
            for leaf in self.leaves:
                leaf.register_post_accumulate_grad_hook(arrived)

    def expect_ready(self, graph_task: int) -> None:
        """If all gradients come in this graph task of autograd, the unit is ready with the last of them."""
        if len(self._missing_grads) == len(self.leaves):
            self._ready_in = graph_task

    def expect_grads(self) -> None:
        """A backward begins."""
        self._missing_grads, self._ready_in = set(self.leaves), None
        if all(shard.grad is None for shard in self.shards):
            self.meter.release("grads", self._handed_bytes)
            self._handed_bytes = 0

    @property
    def needs_reduce(self) -> bool:
        """Whether this backward's gradients, or some that came late, are still to be reduced."""
        return self.requires_grad and (
            self._reducing is None or any(leaf.grad is not None for leaf in self.leaves)
        )

    def start_reduce(self, at_boundary: bool) -> None:
        """Submit the reduction of the leaves' gradients; out to the optimizer's level at the boundary."""
        self.wait_reduce()  # one that came earlier in this backward
        grads = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        self._reducing = self.lane.submit(lambda: self._reduce(grads, at_boundary), uses=grads)

    def _reduce(self, grads: list[torch.Tensor | None], at_boundary: bool) -> None:
        reduce_scatter, scheme, meter = self.collectives.reduce_scatter, self.scheme, self.meter
        part = reduce_scatter(self._flatten(grads), SELF, scheme.grads, "grad_reduce")
        if self._accumulated is not None:
            self._accumulated += part
        elif not at_boundary:
            self._accumulated = meter.hold("grads", part.float())
        if self._accumulated is not None:
            meter.release("buffers", part.nbytes)
        if not at_boundary:
            return
        if self._accumulated is not None:
            meter.release("grads", self._accumulated.nbytes)
            part, self._accumulated = meter.hold("buffers", self._accumulated.to(self.reduce_dtype)), None
        # Out to the optimizer's level, averaged over all ranks. A list, to refer to the gradient only there.
        moving = [part]
        del part
        moving.append(reduce_scatter(moving.pop(), scheme.grads, scheme.optim, "boundary_reduce"))
        moving.append(reduce_scatter(moving.pop(), scheme.optim, WORLD, "replica_reduce"))
        part = self.collectives.gather_whole(moving.pop(), scheme.optim, WORLD, "replica_reduce")
        meter.release("buffers", part.nbytes)
        part = part.float()
        if self.levels.world > 1:
            part /= self.levels.world
        if self._boundary is None:
            self._boundary = meter.hold("grads", part)
        else:  # a second reduction in one backward: see Engine._end_backward
            self._boundary += part

    def _flatten(self, grads: list[torch.Tensor | None]) -> torch.Tensor:
        """1D, the unit's gradient in the reduce dtype. Empties the list, so that its tensors can be freed."""
        full = self.meter.hold("buffers", self.master.new_empty(self.layout.numel, dtype=self.reduce_dtype))
        for i, ((start, stop), span) in enumerate(
            zip(self.layout.ranges(), self.layout.spans(), strict=True)
        ):
            grad, grads[i] = grads[i], None
            if grad is not None:
                full[start:stop] = grad.reshape(-1)
            full[start if grad is None else stop : span[1]] = 0
        return full

    def forget_grads(self) -> None:
        """Give up whatever was reduced and not handed to the optimizer's parameters yet."""
        self.wait_reduce()
        self._reducing = None
        for leaf in self.leaves:
            leaf.grad = None
        for held in (self._accumulated, self._boundary):
            self.meter.release("grads", 0 if held is None else held.nbytes)
        self._accumulated = self._boundary = None

    def wait_reduce(self) -> None:
        """Return when the reduction is over."""
        if self._reducing is not None:
            self._reducing.wait()

    def finish_reduce(self) -> None:
        """Wait for the reduction; at a boundary hand the gradient shards to the optimizer's parameters."""
        self.wait_reduce()
        self._reducing = None
        if self._boundary is None:
            return
        start, stop = self.optim_range
        if all(shard.grad is None for shard in self.shards):
            self._handed_bytes = self._boundary.nbytes
        else:  # gradients accumulate without no_sync
            self.meter.release("grads", self._boundary.nbytes)
        for shard, span in zip(self.shards, self.layout.spans(), strict=True):
            a, b = intersect(span, (start, stop))
            part = self._boundary[a - start : b - start]
            shard.grad = part if shard.grad is None else shard.grad.add_(part)
        self._boundary = None
