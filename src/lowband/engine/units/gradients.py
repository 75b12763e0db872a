"""A unit's gradients: from the leaves, and to the optimizer's shards. units.bucket reduces them in between.

Breadth-first (engine.breadth), the leaves' gradients of a step's micro-batches are summed first, in fp32, and
reduced once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn
from weakref import ref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowband.cost.memory import GRAD_BYTES
from lowband.engine.transport.meter import MemoryMeter
from lowband.engine.units.shard_grad import ShardGrad
from lowband.errors import UserError
from lowband.spec.partition import UnitLayout, intersect


@dataclass
class Taken:
    """A unit's gradients that its leaves do not have any more.

    grads: per leaf
    flat:  in their place one tensor, 1D, the whole unit: their sum over micro-batches; or none
    """

    grads: list[torch.Tensor | None]
    flat: list[torch.Tensor]

    def move_to(self, flat: torch.Tensor, layout: UnitLayout) -> None:
        """Fill `flat`, 1D, the whole unit. Empties the lists, so that their tensors can be freed."""
        if self.flat:
            flat.copy_(self.flat.pop())
            return
        into, present = [], []
        spans = layout.spans()
        parts = flat.split([end - start for start, end in spans])  # all at once, which is quicker
        for part, (start, end), (_, stop), grad in zip(
            parts, spans, layout.ranges(), self.grads, strict=True
        ):
            if grad is None:
                part.zero_()
                continue
            if stop < end:
                part[stop - start :] = 0
                part = part[: stop - start]  # noqa: PLW2901  without the padding
            into.append(part.view(grad.shape))
            present.append(grad)
        self.grads.clear()
        if present:
            torch._foreach_copy_(into, present)

    def add_to(self, flat: torch.Tensor, layout: UnitLayout) -> None:
        """Add to `flat`, as `move_to` fills it."""
        if self.flat:
            flat += self.flat.pop()
            return
        ranges = zip(layout.ranges(), self.grads, strict=True)
        pairs = [(flat[a:b].view(grad.shape), grad) for (a, b), grad in ranges if grad is not None]
        if pairs:
            sums, parts = zip(*pairs, strict=True)
            torch._foreach_add_(sums, parts)


class Gradients:
    """One unit's gradients on one rank."""

    def __init__(
        self,
        leaves: Sequence[nn.Parameter],
        shards: Sequence[nn.Parameter],
        layout: UnitLayout,
        optim_range: tuple[int, int],
        meter: MemoryMeter,
    ) -> None:
        """leaves, shards: autograd's parameters; the optimizer's, which cover `optim_range` of the layout"""
        self._leaves, self._shards, self._layout, self._meter = leaves, shards, layout, meter
        spans = [intersect(span, optim_range) for span in layout.spans()]
        self._sizes = [stop - start for start, stop in spans]
        self.takes_reduced = False  # whether the optimizer takes gradients in the reduce dtype
        # What is called, if it is there, before new gradients are set, or added to those of the shards.
        self.before: Callable[[], Callable[[], None] | None] = lambda: None
        self._missing: set[int] = set()  # places of leaves still without a gradient in `_ready_in`
        self._ready_in: int | None = None  # the graph task whose last gradient makes the unit ready
        self._is_ready = False  # whether one has
        self._arrived_in: set[int] = set()  # graph tasks in which gradients have arrived in this backward
        self._sum: torch.Tensor | None = None  # 1D, the whole unit, fp32: over micro-batches, breadth-first

    # ---- from autograd

    def watch(self, begins: Callable[[torch.Tensor], None], ready: Callable[[], None]) -> None:
        """Call `begins` before each gradient of a leaf; call `ready` once every leaf has its gradient of this
        backward, if that can be known in time.
        """

        self._ready = ready
        mine = ref(self)  # the collector does not see into this kind of hook, which would keep all for ever

        def arrived(place: int, leaf: torch.Tensor) -> None:
            gradients = mine()
            if gradients is None:
                return
            task = torch._C._current_graph_task_id()
            if task not in gradients._arrived_in:
                gradients._arrived_in.add(task)
            grad = leaf.grad
            if grad is not None and grad.layout is not torch.strided:
                gradients._refuse_sparse(place)
            missing = gradients._missing
            if place in missing and gradients._ready_in in (None, task):
                missing.discard(place)
                # See passes.hooks, [Note: late gradients].
                if not missing and gradients._arrived_in == {gradients._ready_in}:
                    gradients._be_ready()

        for place, leaf in enumerate(self._leaves):
            if leaf.requires_grad:
                leaf.register_hook(begins)
                leaf.register_post_accumulate_grad_hook(partial(arrived, place))

    def _be_ready(self) -> None:
        self._is_ready = True
        self._ready()

    def _refuse_sparse(self, place: int) -> NoReturn:
        raise UserError(
            "its gradient is sparse",
            where=self._shards[place].shard_of.name,
            allowed="embeddings with sparse=False",
        )

    def expect(self) -> None:
        """Prepare for a backward that begins."""
        self._missing, self._ready_in = set(range(len(self._leaves))), None
        self._arrived_in.clear()
        self._is_ready = False

    def expect_ready(self, graph_task: int) -> None:
        """Make the unit ready at its last gradient, provided that all arrive in this autograd graph task."""
        if self._arrived_in <= {graph_task}:
            self._ready_in = graph_task

    def forgo_unreached(self) -> None:
        """Wait no longer for leaves that the running graph task, which is the whole backward but for those
        inside of its functions, does not reach.
        """
        if self._is_ready or self._ready_in != torch._C._current_graph_task_id():
            return
        self._missing = {place for place in self._missing if _is_reached(self._leaves[place])}
        if not self._missing:
            self._be_ready()

    # ---- to the reduction

    @property
    def are_waiting(self) -> bool:
        """Whether leaves have gradients that nobody has taken."""
        with torch._C.DisableTorchFunctionSubclass():  # quicker
            return _has_gradient(self._leaves)

    def add_to_sum(self) -> None:
        """Move the leaves' gradients, those of one micro-batch, to their sum over the micro-batches."""
        taken = Taken(self._take_grads(), [])
        if self._sum is None and any(grad is not None for grad in taken.grads):
            empty = torch.empty(self._layout.numel, dtype=torch.float32, device=self._leaves[0].device)
            self._sum = self._meter.hold("sums", empty)
            taken.move_to(self._sum, self._layout)
        elif self._sum is not None:
            taken.add_to(self._sum, self._layout)

    def take(self, dtype: torch.dtype) -> Taken:
        """The gradients, or their sum in this dtype, which the unit then does not have any more."""
        summed = []
        if self._sum is not None:
            whole, self._sum = self._sum.to(dtype), None
            self._meter.release("sums", whole.numel() * GRAD_BYTES)
            summed.append(whole)
        return Taken(self._take_grads(), summed)

    def _take_grads(self) -> list[torch.Tensor | None]:
        with torch._C.DisableTorchFunctionSubclass():  # quicker: those of a dropped unit refuse their use
            grads = [leaf.grad for leaf in self._leaves]
            for leaf in self._leaves:
                leaf.grad = None
        return grads

    def forget(self) -> None:
        """Discard those that nobody has taken."""
        self._take_grads()
        self._meter.release("sums", 0 if self._sum is None else self._sum.nbytes)
        self._sum = None

    # ---- to the optimizer's parameters

    @property
    def are_unset(self) -> bool:
        """Whether none of the optimizer's parameters has one."""
        with torch._C.DisableTorchFunctionSubclass():  # quicker
            return not _has_gradient(self._shards)

    def settle(self) -> None:
        """Before others change the gradients of the optimizer's parameters: have it do to them what it would
        do when it reads them.
        """
        if (before := self.before()) is not None:
            before()

    def hand_over(self, reduced: torch.Tensor) -> None:
        """Set or add to the gradients of the optimizer's parameters. reduced: 1D, of all shards, fp32 or what
        the optimizer takes
        """
        self.settle()
        with torch._C.DisableTorchFunctionSubclass():  # quicker; sums of gradients are right on parts
            is_fake = isinstance(reduced, FakeTensor)
            for shard, values in zip(self._shards, reduced.split(self._sizes), strict=True):
                if shard.grad is not None:
                    if shard.on_disk is not None:
                        shard.on_disk.disk.frees_gradients()
                    if shard.grad.dtype == values.dtype == torch.float32:
                        shard.grad.add_(values)
                        continue
                    values = shard.grad.float().add_(values)  # noqa: PLW2901  sums are fp32
                if is_fake:
                    shard.grad = values
                else:
                    shard.grad = part = values.as_subclass(ShardGrad)
                    part.shard_of = shard.shard_of  # type: ignore[attr-defined]


def _is_reached(leaf: torch.Tensor) -> bool:
    """Whether the running graph task gives it a gradient; true, too, where torch.func hides that."""
    if not leaf.requires_grad:
        return False
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        used_by = leaf.view_as(leaf).grad_fn
    if used_by is None:  # inside of torch.func.grad, of whose inputs the leaf is none
        return True
    reached: bool = torch._C._will_engine_execute_node(used_by.next_functions[0][0])  # type: ignore[attr-defined]
    return reached


def is_hooked(leaf: torch.Tensor) -> bool:
    """Whether a forward has put a hook on a leaf, beside the one of `Gradients.watch`."""
    return len(leaf._backward_hooks or ()) > 1


def _has_gradient(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether one of them has one."""
    for parameter in parameters:  # noqa: SIM110  quicker than `any`, and asked several times a step
        if parameter.grad is not None:
            return True
    return False
