"""The engine: hooks that gather each unit before it computes and reduce its gradients afterwards.

Forward, per unit:   gather (the next unit's gather runs behind the computation), compute, keep the secondary
                     shard if the scheme has one, drop.
Backward, per unit:  gather from the secondary level if there is one, compute, drop, reduce the gradient to
                     the grads level; at an accumulation boundary reduce it further, to the optimizer's level.
Next forward:        each unit's gather first fetches the new weights from the optimizer's level.

A backward need not reach a unit by its output: the graph of a side loss leads around it. So a unit is also
gathered when weights that its forward saved are used; and the first gradient that arrives at a leaf begins a
backward that the engine has not seen before.

This is the order of one micro-batch after the other; engine.breadth has the other one, unit by unit.

[Note: late gradients] Reentrant activation checkpointing runs parts of the graph as separate backward passes
(autograd's graph tasks) inside the backward. A parameter that is used both inside and outside of such a part
gets its gradient in pieces. So a unit is ready early only if all its gradients arrive in the graph task in
which its owner's output received its gradient, or weights that it saved were used. The root may share
parameters with any layer, so it is ready early only if no layer is checkpointed this way. Other units are
dropped and reduced at the backward's end.

[Note: compiler] torch.compile of a module runs `_call_impl`, and in it the hooks, as they are; it compiles
the forward. So a block becomes a graph over its leaves, whether it is compiled before or after sharding, and
one graph serves all equal blocks. Inside a compiled whole module the hooks are hidden from the compiler,
which breaks the graph at them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map

from lowband.engine.collectives.activations import Along
from lowband.engine.collectives.collectives import Collectives
from lowband.engine.options import Options
from lowband.engine.passes.backward import Backward
from lowband.engine.passes.forward_pass import MicroBatches, Pass
from lowband.engine.passes.nested import differentiable
from lowband.engine.passes.places import Places
from lowband.engine.passes.saved_leaves import SavedLeaves
from lowband.engine.replicas.replicas import Replicas
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.consistency import check_same_sharding, check_schemes
from lowband.engine.transport.meter import MemoryMeter
from lowband.engine.units.bucket import collect
from lowband.engine.units.changes import check_unsharded
from lowband.engine.units.division import Wrap, divide
from lowband.engine.units.initial import Init, Initial, Source
from lowband.engine.units.kinds import check_kinds
from lowband.engine.units.parts import along_tensor, ledger_of
from lowband.engine.units.state_dict import refuse_state_dicts
from lowband.engine.units.states import UnitState
from lowband.engine.units.unit import Unit
from lowband.errors import UserError
from lowband.spec.scheme import Scheme


class Engine:
    """The state that lowband keeps for one sharded module, and the hooks on it."""

    _breadth: MicroBatches | None = None  # the running breadth-first accumulation

    def __init__(
        self,
        module: nn.Module,
        scheme: Scheme,
        scheme_of: Callable[[str, nn.Module], Scheme],
        axis: Axis,
        wrap: Wrap,
        options: Options,
        init: Init | Source | None,
        seed: int,
        device: torch.device,
    ) -> None:
        """scheme_of: maps a unit's name and owner to its scheme; `scheme` serves collectives of no unit

        init, seed, device: of parameters on the meta device, see units.initial
        """
        check_unsharded(module)
        check_kinds(module)
        groups = divide(module, wrap)
        schemes = [scheme_of(name, owner) for owner, name, _ in groups]
        check_schemes(scheme, schemes, axis.levels)
        placed = [(name, of_unit) for (_, name, _), of_unit in zip(groups, schemes, strict=True)]
        alike = {"compute_dtype": str(options.compute_dtype), "reduce_dtype": str(options.reduce_dtype)}
        alike |= {"collectives": options.pattern, "seed of initial values": seed}
        check_same_sharding(module, scheme, placed, alike, axis.ranks[0])
        first = next(module.parameters(), None)
        if first is None:
            raise UserError("the module has no parameters to shard", where=type(module).__name__)
        self.module, self.axis = module, axis
        self.compute_dtype = options.compute_dtype
        self.tensor = along_tensor(module)
        self.pipeline: Along | None = None  # whose other ranks have other stages
        self.ledger, self.meter = ledger_of(self.tensor), MemoryMeter()
        self.device = device if any(p.is_meta for p in module.parameters()) else first.device
        del first  # the whole parameters are freed unit by unit
        initial = Initial(module, init, seed, self.device, self.meter)
        initial.fill_buffers(module)
        self._arrived_in = -1  # autograd's graph task in which the last gradient arrived
        self.sync = True  # whether the next backward ends at an accumulation boundary
        self._thread: int | None = None  # the one that runs a forward or, on a CPU, a backward
        self._pass = Pass(trains=False)  # the running forward, or the last one
        self._running: list[nn.Module] = []  # owners whose forwards are running, outermost first
        self._saved = SavedLeaves(self._before_use)
        self.forward_order: list[nn.Module] = []  # owners of units, as the last forward began them

        shared = axis, self.ledger, self.meter, self.device, options
        self.collectives = Collectives(scheme, *shared)
        self.lanes = self.collectives.lanes
        self.units: list[Unit] = []
        self.units_of: dict[nn.Module, list[Unit]] = {}
        collectives = {scheme: self.collectives}
        names = {parameter: name for name, parameter in module.named_parameters()}
        for (owner, name, slots), placed in zip(groups, schemes, strict=True):
            if placed not in collectives:
                collectives[placed] = Collectives(placed, *shared)
            named = [names[getattr(*places[0])] for places in slots]
            unit = Unit(name, slots, named, collectives[placed], initial, self._saved.unit_of)
            self.units.append(unit)
            self.units_of.setdefault(owner, []).append(unit)
        buckets = collect(self._backward_order())
        self._backward = Backward(self.units, buckets, at_boundary=lambda: self.sync, tensor=self.tensor)
        for unit in self.units:
            unit.grads.watch(self._gradient_arrives, partial(self.ready, unit))
        self.replicas = None if scheme.sync is None else Replicas(scheme.sync, self.units, self.lanes)
        for owner in (*(owner for owner in self.units_of if owner is not module), module):
            self._hook(owner)
        module.register_forward_hook(self._leave_forward, always_call=True)
        self._places = Places(module, self.units)
        module.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UserError(
            "a sharded module cannot be copied or pickled",
            where=type(self.module).__name__,
            allowed="lowband.full_state_dict(module), lowband.Checkpointer",
        )

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that share the module."""
        return self.axis.is_first and (self.tensor is None or self.tensor.axis.is_first)

    @property
    def tensor_ranks(self) -> int:
        """The ranks over which the module's layers are cut."""
        return 1 if self.tensor is None else self.tensor.ranks

    # ---- forward

    def _hook(self, owner: nn.Module) -> None:
        owner.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        owner.register_forward_hook(self._end_forward, always_call=True)
        owner.register_forward_hook(self._after_forward)
        places = (place for unit in self.units_of.get(owner, []) for slot in unit.slots for place in slot)
        refuse_state_dicts({owner, *(module for module, _ in places)})

    @torch._disable_dynamo
    def _before_forward(self, owner: nn.Module, args: Any, kwargs: Any) -> Any:
        units = self.units_of.get(owner, [])
        if owner is self.module and not self._backward.runs:
            self._saved.close()
        self._saved.enter(owner)
        if (breadth := self._breadth) is not None and breadth.runs_here:
            breadth.before_forward(owner, (args, kwargs))
            return tree_map(self._cast, args), tree_map(self._cast, kwargs)
        if owner is self.module:
            self._enter_thread()
            self.leave_broken_backward()
        if owner is self.module and not self._backward.runs:
            self._pass = Pass(trains=torch.is_grad_enabled())
            self._running.clear()
        self._running.append(owner)
        self.gather(units, backward=self._backward.runs)
        if not self._backward.runs:  # a forward inside a backward is activation checkpointing's recomputation
            self._pass.begun.append(owner)
            self.prefetch(self._pass.after(owner, self.forward_order), backward=False)
        args, kwargs = tree_map(self._cast, args), tree_map(self._cast, kwargs)
        self._watch_frozen(units, (args, kwargs))
        return args, kwargs

    def _watch_frozen(self, units: list[Unit], inputs: Any) -> None:
        """Drop frozen units when their inputs have gradients, because their parameters have none."""
        frozen = [unit for unit in units if not unit.requires_grad]
        tensors = differentiable(inputs)

        def over(_: object) -> None:
            for unit in frozen:
                if self._backward.end_call(unit):
                    unit.drop()

        # torch.autograd.grad refuses to look for leaves; then they are dropped at the backward's end.
        if frozen and tensors and not any(tensor.is_leaf for tensor in tensors):
            register_multi_grad_hook(tensors, over, mode="all")

    def _cast(self, value: Any) -> Any:
        """Cast a floating-point tensor to the compute dtype; other values stay as they are."""
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype) if is_float else value

    @torch._disable_dynamo
    def _end_forward(self, owner: nn.Module, *_: object) -> None:
        """After every forward, also after one that ended with an exception."""
        self._saved.leave(owner)
        if self._running and self._running[-1] is owner:
            self._running.pop()

    @torch._disable_dynamo
    def _after_forward(self, owner: nn.Module, _args: Any, output: Any) -> Any:
        if (breadth := self._breadth) is not None and breadth.runs_here:
            return breadth.after_forward(owner, output)
        # Not leaves: a hook on a weight that is returned, or an input, would outlive this graph.
        tensors = [tensor for tensor in differentiable(output) if not tensor.is_leaf]
        units, run = self.units_of.get(owner, []), self._pass
        if tensors:
            versions = [unit.changes.version for unit in units]
            before = lambda _: self._before_backward(owner, run, versions)  # noqa: E731
            register_multi_grad_hook(tensors, before, mode="any")
        if self._backward.runs:
            return None
        is_checkpointed = run.trains and not torch.is_grad_enabled()  # reentrantly: recomputed in backward
        run.is_reentrant |= is_checkpointed
        if tensors or is_checkpointed:
            run.ended.append(owner)
        for unit in units:
            if run.trains:
                unit.keep_secondary()
            # The root's units are used first and last in a pass, so they stay between forward and backward.
            if not (tensors and owner is self.module):
                unit.drop()
        if owner is self.module:
            self.forward_order, run.place, run.is_over = run.begun, 0, True
            for unit in self.units:  # one may have been prefetched and not used
                if unit not in units:
                    unit.drop()
        return None

    # ---- backward

    @torch._disable_dynamo
    def _before_backward(self, owner: nn.Module, run: Pass, versions: list[int]) -> None:
        self.leave_broken_backward()
        units = self.units_of.get(owner, [])
        for unit, version in zip(units, versions, strict=True):
            self._backward.begin_call(unit)
            unit.check_version(version)
        self._enter_backward()
        if owner is self.module:
            run.place = 0
        if not (owner is self.module and run.is_reentrant):  # see [Note: late gradients]
            for unit in units:
                unit.grads.expect_ready(torch._C._current_graph_task_id())
        self.gather(units, backward=True)
        self.prefetch(run.after(owner, run.ended[::-1]), backward=True)

    def _before_use(self, unit: Unit, version: int) -> None:
        """Before weights that a forward saved are used: by the unit's backward, or by a side output's."""
        if (
            unit in self._backward.in_use
            and unit.state is UnitState.GATHERED
            and unit.gathered_version == version
        ):
            return
        self.leave_broken_backward()
        unit.check_version(version)
        if torch._C._current_graph_task_id() == -1:
            if unit.state is UnitState.GATHERED:
                return
            raise UserError(
                "weights that a forward saved are read outside of a backward", where=f"unit '{unit.name}'"
            )
        self._enter_backward()
        if unit.state is not UnitState.GATHERED:
            if self._breadth is None and unit not in self.units_of.get(self.module, []):
                unit.grads.expect_ready(torch._C._current_graph_task_id())
            self.gather([unit], backward=True)
        self._backward.in_use.add(unit)

    def _gradient_arrives(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._arrived_in:  # as seldom as possible, because each parameter comes by here
            self.leave_broken_backward()
            self._enter_backward()
            self._arrived_in = task

    def _enter_backward(self) -> None:
        """Begin a backward, unless one is running."""
        if self._backward.runs:
            return
        if self._breadth is not None:
            raise UserError(
                "breadth-first: a backward inside of a forward",
                where=type(self.module).__name__,
                allowed="the usual loop, with lowband.no_sync",
            )
        if self.device.type == "cpu":  # on a GPU autograd uses its own threads
            self._enter_thread()
        self.begin_backward()
        self._backward.queue_end(partial(self.end_backward))

    def begin_backward(self) -> None:
        """Begin one whose end the caller calls."""
        self._backward.begin(self._backward_order())

    def _backward_order(self) -> list[Unit]:
        """All units, in an order of their reductions that is the same on all ranks; the root's come last."""
        root = self.units_of.get(self.module, [])
        return [*(unit for unit in reversed(self._in_order()) if unit not in root), *root]

    def _in_order(self) -> list[Unit]:
        """All units, in an order that is the same on all ranks.

        It is the module's own, in which those that are gathered change places: they are in the order of the
        last forward, as their gathers were. Ranks may compute with different ones of the others.
        """
        begun = (unit for owner in self.forward_order for unit in self.units_of.get(owner, []))
        gathered = dict.fromkeys(unit for unit in (*begun, *self.units) if not unit.is_whole)
        following = iter(gathered)
        return [unit if unit.is_whole else next(following) for unit in self.units]

    def ready(self, unit: Unit) -> None:
        """All gradients of a unit are there."""
        self._backward.ready(unit)

    def end_backward(self) -> None:
        self._backward.end()
        self._thread = None
        for owner in self._running:  # a backward inside of a forward, which goes on
            self.gather(self.units_of.get(owner, []), backward=False)
        if self.sync and dist.get_backend() not in ("gloo", "fake"):
            self.axis.order.compare()

    def leave_broken_backward(self) -> None:
        """If the last backward ended with an exception, discard its gathered weights and partial gradients.

        This includes gradients that earlier backward passes accumulated under `no_sync`, because some units'
        gradients may already have been reduced to the optimizer's level. The gradients that the optimizer's
        parameters already have stay until `zero_grad`.
        """
        if self._backward.is_broken() and self._breadth is None:
            self._backward.discard()

    # ---- forward and backward

    def _enter_thread(self) -> None:
        """Raises UserError if another thread is in a forward or backward: collectives need one order."""
        mine = threading.get_ident()
        alive = {thread.ident for thread in threading.enumerate()}
        if self._thread not in (None, mine) and self._thread in alive:
            raise UserError(
                "another thread runs a forward or backward of this module",
                where=type(self.module).__name__,
                allowed="one thread at a time",
            )
        self._thread = mine

    @contextmanager
    def breadth_first(self, breadth: MicroBatches) -> Iterator[None]:
        """Passes in this context go unit by unit: the hooks leave each micro-batch's forward to `breadth`."""
        self._enter_thread()
        self.leave_broken_backward()
        self._breadth = breadth
        try:
            yield
        except BaseException:
            self._backward.discard()
            raise
        finally:
            self._breadth = self._thread = None

    @torch._disable_dynamo
    def _leave_forward(self, *_: object) -> None:
        """Put the shards back after a forward, also after one that ended with an exception."""
        if not self._backward.runs and self._breadth is None:
            self._thread = None
            for unit in self.units:
                if self._pass.is_over:
                    unit.put_shards()
                else:
                    unit.drop()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """The module's zero_grad, which also discards gradients accumulated under `no_sync`."""
        self.put_shards()
        if not self._backward.runs:
            self._backward.forget_gradients()
        type(self.module).zero_grad(self.module, set_to_none)

    def put_shards(self) -> None:
        """Register the shards in the module, where a forward without a backward leaves whole parameters.

        Raises UserError for parameters that came in after sharding: what follows would not know them.
        """
        self._places.check()
        self._saved.close()
        self.leave_broken_backward()
        for unit in self.units:
            unit.put_shards()

    def gather(self, units: list[Unit], backward: bool) -> None:
        for unit in units:
            unit.start_gather(backward)
        for unit in units:
            unit.finish_gather()

    def prefetch(self, owner: nn.Module | None, backward: bool) -> None:
        """Start the gathers of the next module's units."""
        for unit in self.units_of.get(owner, []) if owner is not None else ():
            unit.start_gather(backward)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context accumulate gradients at the grads level and reduce no further.

        `module.zero_grad()` discards the accumulated gradients; an optimizer's zero_grad does not reach them.
        """
        self.sync = False
        try:
            yield
        finally:
            self.sync = True


def engine_of(module: nn.Module) -> Engine:
    """The engine of a sharded module. Raises UserError if it is not sharded."""
    engine = getattr(module, "_lowband", None)
    if not isinstance(engine, Engine):
        raise UserError(
            "the module is not sharded", where=type(module).__name__, allowed="after lowband.shard"
        )
    return engine
