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
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map

from lowband.engine.changes import check_unsharded
from lowband.engine.collectives import Collectives
from lowband.engine.consistency import check_same_sharding, check_schemes
from lowband.engine.division import Wrap, divide
from lowband.engine.forward_pass import Pass
from lowband.engine.initial import Init, Initial, Source
from lowband.engine.kinds import check_kinds
from lowband.engine.ledger import Ledger
from lowband.engine.memory import MemoryMeter
from lowband.engine.nested import requiring_grad
from lowband.engine.places import Places
from lowband.engine.replicas import Replicas
from lowband.engine.saved_leaves import SavedLeaves
from lowband.engine.shard import Unit
from lowband.engine.state_dict import refuse_state_dicts
from lowband.engine.states import UnitState
from lowband.engine.topology import Topology
from lowband.errors import UserError
from lowband.spec.mesh import SELF
from lowband.spec.scheme import Scheme
from lowband.spec.step import NORM_GATHER, Pattern

if TYPE_CHECKING:
    from lowband.engine.breadth import Breadth

MOST_REDUCING = 2


class Engine:
    """The state that lowband keeps for one sharded module, and the hooks on it."""

    _breadth: "Breadth | None" = None  # the running breadth-first accumulation

    def __init__(
        self,
        module: nn.Module,
        scheme: Scheme,
        topology: Topology,
        wrap: Wrap,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        overlap: bool,
        pattern: Pattern,
        scheme_of: Callable[[str, nn.Module], Scheme],
        init: Init | Source | None,
        seed: int,
        device: torch.device,
    ) -> None:
        """scheme_of: maps a unit's name and owner to its scheme; `scheme` serves collectives of no unit

        init, seed, device: of parameters on the meta device, see engine.initial
        """
        check_unsharded(module)
        check_kinds(module)
        groups = divide(module, wrap)
        schemes = [scheme_of(name, owner) for owner, name, _ in groups]
        check_schemes(scheme, schemes, topology.levels)
        placed = [(name, of_unit) for (_, name, _), of_unit in zip(groups, schemes, strict=True)]
        dtypes = {"compute_dtype": str(compute_dtype), "reduce_dtype": str(reduce_dtype)}
        check_same_sharding(
            module, scheme, placed, {"collectives": pattern, **dtypes, "seed of initial values": seed}
        )
        first = next(module.parameters(), None)
        if first is None:
            raise UserError("the module has no parameters to shard", where=type(module).__name__)
        self.module, self.topology = module, topology
        self.compute_dtype = compute_dtype
        self.ledger, self.meter = Ledger(), MemoryMeter()
        self.device = device if any(p.is_meta for p in module.parameters()) else first.device
        del first  # the whole parameters are freed unit by unit
        initial = Initial(module, init, seed, self.device, self.meter)
        initial.fill_buffers(module)
        self.sync = True  # whether the next backward ends at an accumulation boundary
        self._in_backward = False
        self._thread: int | None = None  # the one that runs a forward or, on a CPU, a backward
        self._reducing: deque[Unit] = deque()  # units whose reduction may still run, oldest first
        self._open: Counter[Unit] = Counter()  # calls of each unit whose backward has begun
        self._ending: Callable[[], object] = lambda: None  # the call at the backward's end, while it exists
        self._pass = Pass(trains=False)  # the running forward, or the last one
        self._running: list[nn.Module] = []  # owners whose forwards are running, outermost first
        self._saved = SavedLeaves(self._before_use)
        self._in_use: set[Unit] = set()  # units whose saved weights this backward has found to be right
        self.forward_order: list[nn.Module] = []  # owners of units, as the last forward began them

        shared = topology, self.ledger, self.meter, self.device, overlap, pattern
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
            shared_by_units = collectives[placed], initial, self._saved.unit_of
            unit = Unit(name, slots, named, *shared_by_units, compute_dtype, reduce_dtype)
            unit.grads.watch(self._gradient_arrives, self._grads_ready)
            self.units.append(unit)
            self.units_of.setdefault(owner, []).append(unit)
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
        self._saved.enter(owner)
        if (breadth := self._breadth) is not None and breadth.runs_here:
            breadth.before_forward(owner, (args, kwargs))
            return tree_map(self._cast, args), tree_map(self._cast, kwargs)
        if owner is self.module:
            self._enter_thread()
            self.leave_broken_backward()
        if owner is self.module and not self._in_backward:
            self._pass = Pass(trains=torch.is_grad_enabled())
            self._running.clear()
        self._running.append(owner)
        self.gather(units, backward=self._in_backward)
        if not self._in_backward:  # a forward inside a backward is activation checkpointing's recomputation
            self._pass.begun.append(owner)
            self.prefetch(self._pass.after(owner, self.forward_order), backward=False)
        args, kwargs = tree_map(self._cast, args), tree_map(self._cast, kwargs)
        self._watch_frozen(units, (args, kwargs))
        return args, kwargs

    def _watch_frozen(self, units: list[Unit], inputs: Any) -> None:
        """Drop frozen units when their inputs have gradients, because their parameters have none."""
        frozen = [unit for unit in units if not unit.requires_grad]
        tensors = _differentiable(inputs)

        def over(_: object) -> None:
            for unit in frozen:
                # No call may be open: a side output's backward does not go through the unit's output.
                self._open[unit] = max(0, self._open[unit] - 1)
                if not self._open[unit]:  # in f(f(x)) the inner call's backward has begun by now
                    unit.drop()

        if frozen and tensors:
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
        tensors = _differentiable(output)
        units, run = self.units_of.get(owner, []), self._pass
        if tensors:
            versions = [unit.changes.version for unit in units]
            before = lambda _: self._before_backward(owner, run, versions)  # noqa: E731
            register_multi_grad_hook(tensors, before, mode="any")
        if self._in_backward:
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
            self._open[unit] += 1
            _check_version(unit, version)
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
        if unit in self._in_use and unit.state is UnitState.GATHERED and unit.gathered_version == version:
            return
        self.leave_broken_backward()
        _check_version(unit, version)
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
        self._in_use.add(unit)

    def _gradient_arrives(self) -> None:
        self.leave_broken_backward()
        self._enter_backward()

    def _enter_backward(self) -> None:
        """Begin a backward, unless one is running."""
        if self._in_backward:
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
        self._queue_end()

    def begin_backward(self) -> None:
        self._in_backward = True
        for unit in self.units:
            unit.grads.expect()

    def _grads_ready(self, unit: Unit) -> None:
        unit.drop()
        self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """Start a unit's reduction; at most two are pending, because each holds a unit's whole gradient."""
        if len(self._reducing) == MOST_REDUCING:
            self._reducing.popleft().grads.wait_reduce()
        unit.grads.start_reduce(at_boundary=self.sync)
        self._reducing.append(unit)

    def _queue_end(self) -> None:
        """Have autograd call `end_backward`. If the backward fails, autograd frees the callback uncalled."""
        call = partial(self.end_backward)
        self._ending = weakref.ref(call)
        torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]

    def end_backward(self) -> None:
        """Reduce the units that the hooks did not: those with unused parameters or with late gradients."""
        for unit in self.units:
            if unit.grads.needs_reduce:
                self.reduce(unit)
        self._reducing.clear()
        self._drop_all()
        for unit in self.units:
            unit.grads.finish_reduce()
        self._open.clear()
        self._in_use.clear()
        self._in_backward, self._thread = False, None
        for owner in self._running:  # a backward inside of a forward, which goes on
            self.gather(self.units_of.get(owner, []), backward=False)
        if self.sync and dist.get_backend() not in ("gloo", "fake"):
            self.topology.order.compare()

    def leave_broken_backward(self) -> None:
        """If the last backward ended with an exception, discard its gathered weights and partial gradients.

        This includes gradients that earlier backward passes accumulated under `no_sync`, because some units'
        gradients may already have been reduced to the optimizer's level. The gradients that the optimizer's
        parameters already have stay until `zero_grad`.
        """
        runs = torch._C._current_graph_task_id() != -1 and self._ending() is not None
        if self._in_backward and not runs and self._breadth is None:
            self._discard()

    def _discard(self) -> None:
        """Drop all units and, in a backward, its gradients."""
        self._reducing.clear()
        self._drop_all()
        if self._in_backward:
            for unit in self.units:
                unit.grads.forget()
        self._open.clear()
        self._in_use.clear()
        self._in_backward = False

    def _drop_all(self) -> None:
        for unit in self.units:
            unit.drop()

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
    def breadth_first(self, breadth: "Breadth") -> Iterator[None]:
        """Passes in this context go unit by unit: the hooks leave each micro-batch's forward to `breadth`."""
        self._enter_thread()
        self.leave_broken_backward()
        self._breadth = breadth
        try:
            yield
        except BaseException:
            self._discard()
            raise
        finally:
            self._breadth = self._thread = None

    @torch._disable_dynamo
    def _leave_forward(self, *_: object) -> None:
        """Put the shards back after a forward, also after one that ended with an exception."""
        if not self._in_backward and self._breadth is None:
            self._thread = None
            for unit in self.units:
                if self._pass.is_over:
                    unit.put_shards()
                else:
                    unit.drop()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """The module's zero_grad, which also discards gradients accumulated under `no_sync`."""
        self.put_shards()
        if not self._in_backward:
            for unit in self.units:
                unit.grads.forget()
        type(self.module).zero_grad(self.module, set_to_none)

    def sum_over_replica(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum of the values, of shape [1], of all ranks that average gradients with this one.

        It is bit-equal on all of them, and counted as `norm_gather`.
        """
        messages = self.collectives
        level = messages.scheme.level("replica")
        everyones = mine.new_empty(self.topology.levels.size(level))
        messages.submit(
            "norm",
            messages.inwards(SELF, level),
            lambda call: messages.gather(call, mine, everyones, SELF, level, NORM_GATHER),
        ).wait()
        return everyones.sum()

    def put_shards(self) -> None:
        """Register the shards in the module, where a forward without a backward leaves whole parameters.

        Raises UserError for parameters that came in after sharding: what follows would not know them.
        """
        self._places.check()
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


def _check_version(unit: Unit, version: int) -> None:
    """Raises UserError if the unit's weights are not those that a forward computed with any more."""
    if unit.changes.version != version:
        raise UserError(
            f"weights of '{unit.name}' changed between this forward and its backward",
            allowed="the optimizer's step after the backward of every forward",
        )


def _differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors in nested values that require gradients; none where gradients are disabled."""
    return requiring_grad(values) if torch.is_grad_enabled() else []
