"""The order of one micro-batch after the other: hooks that gather each unit before it computes and reduce its
gradients afterwards.

Forward, per unit:   gather (the next unit's gather runs behind the computation), compute, keep the secondary
                     shard if the scheme has one, drop.
Backward, per unit:  gather from the secondary level if there is one, compute, drop, reduce the gradient to
                     the grads level; at an accumulation boundary reduce it further, to the optimizer's level.
Next forward:        each unit's gather first fetches the new weights from the optimizer's level.

A backward need not reach a unit by its output: the graph of a side loss leads around it. So a unit is also
gathered when weights that its forward saved are used; and the first gradient that arrives at a leaf begins a
backward that the engine has not seen before.

[Note: late gradients] Reentrant activation checkpointing runs parts of the graph as separate backward passes
(autograd's graph tasks) inside the backward. A parameter that is used both inside and outside of such a part
gets its gradient in pieces. So a unit is ready early only if all its gradients arrive in the graph task in
which its owner's output received its gradient, or weights that it saved were used. The root may share
parameters with any layer, so it is ready early only if no layer is checkpointed this way. Other units are
dropped and reduced at the backward's end. Which other functions run a backward within their own, as those of
reversible layers do, nobody can tell beforehand: a unit that has gradients from one is ready when the next
unit's backward begins.

[Note: compiler] torch.compile of a module runs `_call_impl`, and in it the hooks, as they are; it compiles
the forward. So a block becomes a graph over its leaves, whether it is compiled before or after sharding, and
one graph serves all equal blocks. Inside a compiled whole module the hooks are hidden from the compiler,
which breaks the graph at them.
"""

import inspect
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from lowband.engine.options import Options
from lowband.engine.passes.compilers import refuse_compiled_autograd
from lowband.engine.passes.forward_pass import Pass
from lowband.engine.passes.inputs import Inputs
from lowband.engine.passes.kept_on_host import KeptOnHost
from lowband.engine.passes.nested import differentiable
from lowband.engine.passes.passes import Passes
from lowband.engine.passes.saved_leaves import SavedLeaves
from lowband.engine.units.copied import raised_here
from lowband.engine.units.state_dict import refuse_state_dicts
from lowband.engine.units.states import UnitState
from lowband.engine.units.unit import Unit
from lowband.errors import UserError


class Hooks:
    """The hooks on one module, on the owners of its units and on its parameters' gradients."""

    def __init__(
        self,
        passes: Passes,
        unit_of: dict[int, Unit],
        options: Options,
        device: torch.device,
        on_host: KeptOnHost | None,
    ) -> None:
        """unit_of, on_host: see SavedLeaves"""
        self._passes, self._backward = passes, passes.backward
        self._module, self._units_of = passes.module, passes.units_of
        self._inputs, self._device = Inputs(options.compute_dtype), device
        self._saved = SavedLeaves(unit_of, self._before_use, on_host)
        # The running forward, or the last one; of units that are called on their own, those until a backward.
        self._pass = Pass(trains=False, is_spent=True)
        self._running: list[nn.Module] = []  # owners whose forwards are running, outermost first
        self._arrived_in = -1  # autograd's graph task in which the last gradient arrived
        for unit in passes.units:
            unit.grads.watch(self._gradient_arrives, partial(passes.ready, unit))
        module = self._module
        for owner in (*(owner for owner in self._units_of if owner is not module), module):
            self._hook(owner)
        module.register_forward_hook(self._leave_forward, always_call=True)

    def close(self) -> None:
        """Outside of a forward: end what an interrupted one has left in this thread."""
        self._saved.close()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Reached by whoever copies the module, whose hooks come first."""
        raise UserError(
            "a sharded module cannot be copied or pickled",
            where=type(self._module).__name__,
            allowed="lowband.full_state_dict(module), lowband.Checkpointer",
        )

    # ---- forward

    def _hook(self, owner: nn.Module) -> None:
        owner.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        owner.register_forward_hook(self._end_forward, always_call=True)
        owner.register_forward_hook(self._after_forward)
        places = (place for unit in self._units_of.get(owner, []) for slot in unit.slots for place in slot)
        refuse_state_dicts({owner, *(module for module, _ in places)})

    @torch._disable_dynamo
    def _before_forward(self, owner: nn.Module, args: Any, kwargs: Any) -> Any:
        units = self._units_of.get(owner, [])
        if owner is self._module and not self._backward.runs:
            self._saved.close()
            self._inputs.close()
        self._saved.enter(owner)
        if (leader := self._passes.leader) is not None and leader.runs_here:
            leader.before_forward(owner, (args, kwargs))
            return self._inputs.cast(owner, args, kwargs)
        if owner is self._module:
            self._passes.enter_thread()
            self._passes.leave_broken_backward()
        if units and owner in self._running and _calls_itself(owner):
            raise UserError(
                "calls itself in its forward, where its parameters are in use",
                where=f"'{units[0].name}'",
                allowed="a module around it that calls it twice",
            )
        is_first = owner is self._module or (not self._running and self._pass.is_spent)
        if is_first and not self._backward.runs:
            self._pass = Pass(trains=torch.is_grad_enabled())
            self._running.clear()
        self._running.append(owner)
        runs, trains = self._backward.runs, self._pass.trains or torch.is_grad_enabled()
        self._passes.gather(units, backward=runs, trains=trains or runs)
        # A forward inside a backward is activation checkpointing's recomputation.
        if not self._backward.runs and self._running[0] is self._module:
            self._pass.begun.append(owner)
            following = self._pass.after(owner, self._passes.forward_order)
            self._passes.prefetch(following, backward=False, trains=trains)
        args, kwargs = self._inputs.cast(owner, args, kwargs)
        self._watch_frozen(units, (args, kwargs))
        return args, kwargs

    def _watch_frozen(self, units: list[Unit], inputs: Any) -> None:
        """Drop frozen units when their inputs have gradients, because their parameters have none."""
        frozen = [unit for unit in units if not unit.requires_grad]
        if not frozen:
            return
        tensors = differentiable(inputs)

        def over(_: object) -> None:
            for unit in frozen:
                if self._backward.end_call(unit):
                    unit.drop()

        # torch.autograd.grad refuses to look for leaves; then they are dropped at the backward's end.
        if tensors and not any(tensor.is_leaf for tensor in tensors):
            register_multi_grad_hook(tensors, over, mode="all")

    @torch._disable_dynamo
    def _end_forward(self, owner: nn.Module, _args: Any, output: Any) -> Any:
        """After every forward, also after one that ended with an exception."""
        self._saved.leave(owner)
        if self._running and self._running[-1] is owner:
            self._running.pop()
        return self._inputs.give_back(owner, output)

    @torch._disable_dynamo
    def _after_forward(self, owner: nn.Module, _args: Any, output: Any) -> Any:
        if torch.is_grad_enabled():
            for unit in self._units_of.get(owner, ()):
                unit.check_trains()
        if (leader := self._passes.leader) is not None and leader.runs_here:
            return leader.after_forward(owner, output)
        # Not leaves: a hook on a weight that is returned, or an input, would outlive this graph.
        tensors = [tensor for tensor in differentiable(output) if not tensor.is_leaf]
        units, run = self._units_of.get(owner, []), self._pass
        if tensors:
            versions = [unit.changes.version for unit in units]
            before = lambda _: self._before_backward(owner, run, versions)  # noqa: E731
            register_multi_grad_hook(tensors, before, mode="any")
            for tensor in tensors:  # also the output of a unit before, if this one leaves it as it is
                _call_last_first(tensor)
        if self._backward.runs:
            return None
        is_checkpointed = run.trains and not torch.is_grad_enabled()  # reentrantly: recomputed in backward
        run.is_reentrant |= is_checkpointed
        if tensors or is_checkpointed:
            run.ended.append(owner)
        for unit in units:
            unit.keep_secondary()  # without gradients, too: it may be computed again with them (checkpoint)
            # The root's units are used first and last in a pass, so they stay between forward and backward.
            if not (tensors and owner is self._module):
                unit.drop()
        if owner is self._module:
            self._passes.forward_order, run.place, run.is_over = run.begun, 0, True
            with raised_here:
                for unit in self._passes.units:  # one may have been prefetched and not used
                    if unit not in units:
                        unit.drop()
        return None

    @torch._disable_dynamo
    def _leave_forward(self, *_: object) -> None:
        """Put the shards back after a forward, also after one that ended with an exception."""
        if not self._backward.runs and self._passes.leader is None:
            self._passes.leave_thread()
            for unit in self._passes.units:
                if not self._pass.is_over:
                    unit.drop()
                elif unit.is_put:
                    unit.put_shards()

    # ---- backward

    @torch._disable_dynamo
    def _before_backward(self, owner: nn.Module, run: Pass, versions: list[int]) -> None:
        self._passes.leave_broken_backward()
        units = self._units_of.get(owner, [])
        for unit, version in zip(units, versions, strict=True):
            self._backward.begin_call(unit)
            unit.check_version(version)
        self._enter_backward()
        self._backward.forgo_unreached()
        if owner is self._module:
            run.place = 0
        # See [Note: late gradients]. A leader says itself when gradients are whole: this may be the
        # recomputation of one micro-batch, reentrantly, and others follow.
        if self._passes.leader is None and not (owner is self._module and run.is_reentrant):
            for unit in units:
                self._backward.expect(unit, may_be_whole=not run.is_reentrant)
        self._passes.gather(units, backward=True)
        self._passes.prefetch(run.after(owner, run.ended[::-1]), backward=True)

    def _before_use(self, unit: Unit, version: int) -> None:
        """Before weights that a forward saved are used: by the unit's backward, or by a side output's."""
        if (
            unit in self._backward.in_use
            and unit.state is UnitState.GATHERED
            and unit.gathered_version == version
        ):
            return
        self._passes.leave_broken_backward()
        unit.check_version(version)
        if torch._C._current_graph_task_id() == -1:
            if unit.state is UnitState.GATHERED:
                return
            raise UserError(
                "weights that a forward saved are read outside of a backward", where=f"unit '{unit.name}'"
            )
        self._enter_backward()
        if unit.state is not UnitState.GATHERED:
            self._backward.forgo_unreached()
            if self._passes.leader is None and unit not in self._units_of.get(self._module, []):
                self._backward.expect(unit, may_be_whole=not self._pass.is_reentrant)
            self._passes.gather([unit], backward=True)
        self._backward.in_use.add(unit)

    def _gradient_arrives(self, _grad: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._arrived_in:  # as seldom as possible, because each parameter comes by here
            self._passes.leave_broken_backward()
            self._enter_backward()
            self._arrived_in = task

    @torch._disable_dynamo
    def _enter_backward(self) -> None:
        """Begin a backward, unless one is running."""
        if self._backward.runs:
            return
        refuse_compiled_autograd(type(self._module).__name__)
        if self._passes.leader is not None:
            raise UserError(
                "a backward inside of a forward of several micro-batches",
                where=type(self._module).__name__,
                allowed="the usual loop, with lowband.no_sync",
            )
        if self._device.type == "cpu":  # on a GPU autograd uses its own threads
            self._passes.enter_thread()
        self._passes.begin_backward()
        self._backward.queue_end(partial(self._end_backward))

    @torch._disable_dynamo
    def _end_backward(self) -> None:
        self._passes.end_backward()
        self._pass.is_spent = True
        for owner in self._running:  # a backward inside of a forward, which goes on
            self._passes.gather(self._units_of.get(owner, []), backward=False)


def _call_last_first(tensor: torch.Tensor) -> None:
    """Have the last of a tensor's hooks called before the others."""
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        *others, last = hooks.items()
        hooks.clear()  # autograd reads it as a plain dict: `move_to_end` would change nothing
        hooks.update([last, *others])


def _calls_itself(owner: nn.Module) -> bool:
    """Whether a call of it is inside of another. An interrupted one, which ended no hook, is not."""
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        calls += frame.f_code is nn.Module._wrapped_call_impl.__code__ and frame.f_locals.get("self") is owner
        frame = frame.f_back
    return calls > 1
