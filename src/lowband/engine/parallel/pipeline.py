"""A model as a chain of modules, whose stages lie on the ranks along the pipeline axis."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Integral
from types import NoneType
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.arguments import check_kind, check_pair
from lowband.engine.options import Options
from lowband.engine.parallel.cut_layers import ColumnLinear
from lowband.engine.parallel.deferred import Deferring
from lowband.engine.parallel.executor import Executor
from lowband.engine.parallel.left_out import bound_context
from lowband.engine.parallel.mail import Mail
from lowband.engine.parallel.plan import Plan, check_apart, cut, ends, lists_of
from lowband.engine.parallel.tied import Tied, tie_copies
from lowband.engine.passes.alike import Alike, along_tensor
from lowband.engine.passes.compilers import refuse_compiled_autograd
from lowband.engine.passes.engine import Engine
from lowband.engine.transport.consistency import check_same, is_alone
from lowband.engine.transport.gloo import PeerLost
from lowband.engine.transport.messages import Messages
from lowband.engine.transport.topology import Topology
from lowband.engine.units.initial import Init, Source
from lowband.engine.units.parts import check_experts, of_part
from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.spec.context import check_context
from lowband.spec.schedule import Action, Lists, stages
from lowband.spec.schedules import Name
from lowband.spec.scheme import Scheme
from lowband.spec.tiers import DISK, HOST

_PIPELINES = itertools.count()


@runtime_checkable
class Chained(Protocol):
    """A module that is a chain."""

    def chain(self) -> Mapping[str, nn.Module]:
        """The modules of the chain, in order, by their names in this one."""


# by argument: the kinds that it may have, and how a refusal tells them
_KINDS = {
    "chain": (
        (Chained, Sequence, nn.ModuleList, nn.Sequential),
        "a list of modules, or a module with a method `chain()`",
    ),
    "loss": (Callable, "a function of an output and a target"),
    "scheme": ((Scheme, str), "a lowband.Scheme, or the name of one"),
    "topology": (Topology, "a lowband.Topology"),
    "micro_batches": (Integral, "a number of them"),
    "schedule": (Sequence, "the name of one, or lists of actions by rank"),
    "chunks": ((Integral, NoneType), "a number of stages"),
    "layers": ((Sequence, NoneType), "numbers of modules, by stage"),
}


class Pipeline(nn.Module):
    """A chain of modules in stages along a topology's pipeline axis, each stage sharded along its data axis.

    chain:         the whole model, on every rank: modules of which each takes the output of the one before, a
                   tensor, or a tuple as its arguments. A rank keeps those of its stages, as its submodules
                   "0", "1", ...: their places in the chain. Or a module with a method `chain()` that returns
                   them by their names in it, which they keep. On the meta device no rank has them all. To
                   cut it along tensor, too, `lowband.parallelize` that module, or an nn.ModuleList, before;
                   to divide tokens, `bind` it to a `lowband.Context`, and `split` what a step takes
    loss:          maps the last module's output and a target to one number. If the head's vocabulary is cut,
                   an nn.CrossEntropyLoss that was cut with the chain, as a further module of the ModuleList
    scheme:        of every stage, a Scheme or its name; a module of the chain is a unit
    micro_batches: per step
    schedule:      a name (`lowband.spec.schedules.SCHEDULES`), or one's own lists of actions, by rank
    chunks:        stages on each rank, where the schedule allows several; default: the fewest
    layers:        modules of each stage, in order; default: as evenly as possible

    compute_dtype, reduce_dtype, overlap, init, seed and device are those of `lowband.shard`. Afterwards the
    pipeline is a sharded module: optimizers, `lowband.clip_grad_norm_` (over all stages), `lowband.no_sync`
    and `lowband.full_state_dict` (of this rank's stages, on the first rank along data) take it as any other.

    `ends` is when each action of the last step ended on this rank, by `time.perf_counter()`.

    Every rank of the job must make the same pipelines in the same order. Raises UserError, on every rank
    before anything is sent, for lists that wait for each other, a stage without modules, a
    rank without parameters, or arguments that differ between ranks.
    """

    def __init__(
        self,
        chain: Sequence[nn.Module] | Chained,
        loss: Callable[[Any, Any], torch.Tensor],
        scheme: Scheme | str,
        topology: Topology,
        micro_batches: int,
        schedule: Name | Lists = "1f1b",
        chunks: int | None = None,
        layers: Sequence[int] | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        reduce_dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        init: Init | Source | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        given = {"chain": chain, "loss": loss, "scheme": scheme, "topology": topology}
        given |= {"micro_batches": micro_batches, "schedule": schedule, "chunks": chunks, "layers": layers}
        for name, (kinds, allowed) in _KINDS.items():
            check_kind("lowband.Pipeline", name, given[name], kinds, allowed)
        axis = topology.along("pipeline")
        named = chain.chain() if isinstance(chain, Chained) else {str(i): m for i, m in enumerate(chain)}
        names, modules = list(named), list(named.values())
        for name, module in named.items():
            check_kind("lowband.Pipeline", f"chain[{name}]", module, nn.Module, "a torch.nn.Module")
        if not is_alone():
            check_same(
                {
                    "micro-batches of a pipeline": micro_batches,
                    "schedule of a pipeline": str(schedule),
                    "chunks of a pipeline": chunks,
                    "layers of a pipeline": None if layers is None else list(layers),
                    "modules of a pipeline": [type(module).__name__ for module in modules],
                }
            )
        of_ranks = lists_of(schedule, len(axis.ranks), micro_batches, chunks)
        of_stages = Config().scheme(scheme) if isinstance(scheme, str) else scheme
        _check_tiers(of_stages)
        check_context(topology.axes, of_stages, topology.levels)
        self._plan = Plan(of_ranks, axis.place)
        cuts = cut(len(modules), stages(of_ranks), layers)
        check_apart(names, modules, cuts, self._plan)
        self._stages = {stage: modules[slice(*cuts[stage])] for stage in self._plan.stages}
        for of_it in self._stages.values():
            check_experts(nn.ModuleList(of_it), topology.along("expert"), "lowband.Pipeline")
        tie_copies(named, cuts, self._plan, axis.place)
        for stage, of_it in self._stages.items():
            for name, module in zip(names[slice(*cuts[stage])], of_it, strict=True):
                _register(self, name, module)
                _end_entries(module)
        self._deferring = Deferring(self.modules() if self._plan.split else iter(()))
        self._loss = partial(_checked_loss(loss))  # no submodule: no stage has it
        self._micro_batches = micro_batches
        self._name, self._steps = f"pipeline {next(_PIPELINES)}", 0
        self.ends: list[tuple[Action, float]] = []

        options = Options(compute_dtype, reduce_dtype, overlap)
        own = {module for of_it in self._stages.values() for module in of_it}
        # Of one that another one has inside, the parameters are the root's, as all that stages share.
        own -= {inner for module in own for inner in module.modules() if inner is not module}
        self._lowband = Engine(
            self,
            of_stages,
            lambda _name, _owner: of_stages,
            topology.along("data"),
            lambda module: module in own,
            options,
            init,
            seed,
            device,
        )
        engine = self._lowband
        engine.ends = ends(named)
        messages = Messages(axis)
        self._mail = Mail(self._plan, axis, messages, engine.ledger, engine.device, self._name)
        self._tied = Tied(axis, messages, engine.ledger, self._name)
        engine.passes.backward.sum_tied = self._tied.sum_over_copies
        if len(axis.ranks) > 1:
            engine.be_stages_along(axis)
        if isinstance(loss, nn.Module) and (of_loss := of_part(loss)) is not None:
            of_loss.count_in(engine.ledger)
        whole = chain if isinstance(chain, nn.Module) else nn.ModuleList(modules)
        if (context := bound_context(whole, topology)) is not None:
            context.count_in(engine.ledger, engine.averaged)
        self._alike = None if engine.pipeline is None else Alike(engine.pipeline, engine.device)
        self._alike_along_tensor = along_tensor(engine.tensor, engine.device)
        if self._alike_along_tensor is not None:
            engine.passes.backward.compare = partial(self._alike_along_tensor.check_gradients, compute_dtype)

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return self._plan.last in self._stages

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> list[torch.Tensor]:
        """Forward and backward of a step's micro-batches; returns their losses, detached, on the ranks with
        the last stage, elsewhere none.

        micro_batches: (input, target) each, the same on all ranks along the pipeline axis: a rank uses the
                       inputs if it has the first stage, the targets if it has the last one, and may have None
                       for what it does not use. An input is a tensor, or a tuple of arguments of the first
                       module

        The losses are summed, not averaged: for their mean, `loss` divides by the number of micro-batches.
        Gradients are averaged over the ranks along data. Under `torch.no_grad()` there are forwards only.
        Raises UserError for another number of micro-batches, for shapes that differ between them, and, in the
        first step, on ranks along pipeline or tensor that have different batches. A rank
        that fails ends the others, which name it and its error, as soon as they miss it, at the latest after
        the job's timeout.
        """
        check_kind(self._name, "micro_batches", micro_batches, Sequence, "a list of (input, target)")
        for i, pair in enumerate(micro_batches):
            check_pair(self._name, f"micro_batches[{i}]", pair)
        if len(micro_batches) != self._micro_batches:
            raise UserError(
                f"{len(micro_batches)} micro-batches",
                where=self._name,
                allowed=f"the {self._micro_batches} that it was made for",
            )
        refuse_compiled_autograd(self._name)
        self._steps += 1
        self._lowband.put_shards()
        self._mail.begin(self._steps, torch.is_grad_enabled())
        with self._cause(), self._tied.same_buffers(self):
            self._check_inputs(micro_batches)
            ours = self._plan, self._mail, self._stages, self._deferring, self._loss
            executor = Executor(self._lowband.passes, *ours, micro_batches)
            self.ends = executor.ends
            losses = executor.run()
        if (alike := self._alike_along_tensor) is not None:
            alike.end()
        return losses

    def _check_inputs(self, micro_batches: Sequence[tuple[Any, Any]]) -> None:
        """In the first step: that ranks which are to have the same micro-batches have them."""
        inputs, targets = zip(*micro_batches, strict=True)
        if (alike := self._alike_along_tensor) is not None:
            alike.check_inputs(inputs, targets)
            alike.begin()
        if self._alike is not None:
            is_used = 0 in self._stages or self.has_loss
            self._alike.check_inputs(*((inputs, targets) if is_used else (None, None)))

    def forward(self, *_: Any) -> NoReturn:
        """Raises UserError: a pipeline runs whole steps."""
        raise UserError("a pipeline is not called", where=self._name, allowed="its step(micro_batches)")

    @contextmanager
    def _cause(self) -> Iterator[None]:
        """Let the other ranks know why this one fails, and why they miss another one."""
        store, key = dist.distributed_c10d._get_default_store(), f"lowband/{self._name}/failed/{self._steps}"
        try:
            yield
        except PeerLost as error:
            try:
                known = store.get(key).decode() if store.check([key]) else ""
            except RuntimeError:  # the store was that rank's
                known = ""
            if not known:
                raise
            raise PeerLost(f"{error}; before, {known}") from None
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")
            with suppress(RuntimeError):  # the store's rank has ended
                store.set(key, f"rank {self._lowband.axis.rank} failed: {type(error).__name__}: {text}")
            raise


def _check_tiers(scheme: Scheme) -> None:
    """Raises UserError for a tier that stages do not use."""
    for key, tier in (("optim", scheme.optim_tier), ("weights", scheme.weights_tier)):
        if tier == DISK:
            level = getattr(scheme, key)
            what = f"{key} {level}@{DISK} in stages of a pipeline"
            raise UserError(what, where=f"scheme '{scheme.name}'", allowed=(level, f"{level}@{HOST}"))
    if (parted := scheme.parted) is not None:
        what = f"{parted} in stages of a pipeline"
        raise UserError(what, where=f"scheme '{scheme.name}'", allowed=f"no {parted}")


def _checked_loss(loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """Raises UserError if it has parameters: no rank would reduce their gradients, nor save them."""
    if isinstance(loss, nn.Module) and (names := [name for name, _ in loss.named_parameters()]):
        raise UserError(
            f"the loss has parameters, such as '{names[0]}'",
            where="a pipeline",
            allowed="parameters in modules of the chain",
        )
    return loss


def _register(within: nn.Module, name: str, module: nn.Module) -> None:
    """Make a module a submodule; of a name with dots, inside of others that only hold it."""
    first, _, rest = name.partition(".")
    if not rest:
        within.add_module(name, module)
        return
    if first not in within._modules:
        within.add_module(first, nn.Module())
    _register(within.get_submodule(first), rest, module)


def _end_entries(module: nn.Module) -> None:
    """Let column products of tensor ranks forget their input with the module, as the whole model would."""
    columns = [inner for inner in module.modules() if isinstance(inner, ColumnLinear)]
    for entered in {id(column.cut.entered): column.cut.entered for column in columns}.values():
        module.register_forward_hook(entered, always_call=True)
