"""A layer of experts, and its experts over the ranks of a job.

[Note: experts] Ranks along the data axis have different tokens. Of `expert` neighbours among them each has
other experts, to which it is sent the tokens of all of them (parallel.dispatch); those ranks that have the
same experts are what is left of the data axis, and a scheme places experts' parameters on these as it places
all others on the whole axis. A gradient of theirs is the sum over tokens of `expert` ranks when the backward
ends. It is summed over the ranks left and divided by the number of all ranks along data, as every other one
is: by tokens, never by the size of a group.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from lowband.engine.collectives.activations import Along
from lowband.engine.collectives.experts import ExpertAxis
from lowband.engine.parallel.dispatch import Dispatch
from lowband.engine.parallel.expert_products import products
from lowband.engine.parallel.hot_experts import HotExperts
from lowband.engine.parallel.routing import Router, balance
from lowband.engine.passes.engine import Engine
from lowband.engine.transport.consistency import check_same, facts_of, is_alone
from lowband.engine.transport.topology import Topology
from lowband.engine.units.changes import check_no_hooks
from lowband.engine.units.own_attributes import keep_attributes
from lowband.engine.units.slice_of import SliceOf, is_of_expert, is_partial, mark_partial, refuse_wholes
from lowband.errors import UserError
from lowband.spec.activations import EXPERTS_LOAD
from lowband.spec.routing import Routing

Activation = Callable[[torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """Matrices of this rank's experts: of all of them until `spread_experts`.

    up, gate: [experts, width, hidden], gate with `gated` alone; down: [experts, hidden, width]: an expert's
    are as a linear layer's, without biases
    activation: a function of its input alone, which the backward computes again
    """

    def __init__(
        self, experts: int, hidden: int, width: int, gated: bool = False, activation: Activation = F.gelu
    ) -> None:
        super().__init__()
        if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
            what = f"the activation {type(activation).__name__} has parameters, which would get no gradients"
            raise UserError(what, where="experts", allowed="a function of its input alone")
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.gate = nn.Parameter(torch.empty(experts, width, hidden)) if gated else None
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.activation, self.hot = activation, cast("HotExperts | None", None)
        for parameter in self.parameters():
            if not parameter.is_meta:
                bound = parameter.shape[2] ** -0.5  # as torch fills a linear layer
                nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x_TH: torch.Tensor,
        counts: torch.Tensor,
        places: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[R, H], see expert_products. counts: [experts] int64, rows of each; places: [R], theirs in x"""
        up, down, gate = (
            each if each is None or self.hot is None else self.hot.weights(each, "experts")
            for each in (self.up, self.down, self.gate)
        )
        assert up is not None
        assert down is not None
        return products(x_TH, counts, up, down, gate, self.activation, places, weights)


class MixtureOfExperts(nn.Module):
    """x [..., hidden] -> as x: by token, the weighted sum of the outputs of the experts that a router chose.

    width:  of an expert
    shared: None, or a module that sees every token and whose output is added, such as DeepSeek's
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        routing: Routing,
        gated: bool = False,
        activation: Activation = F.gelu,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(hidden, routing)
        self.experts = Experts(routing.experts, hidden, width, gated, activation)
        self.shared = shared
        self._lowband_experts: Any = None  # an ExpertAxis, once they are spread
        self._name = "experts"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TH = x.reshape(-1, x.shape[-1])
        # Made anew: a copy of this module, or one that was given other experts, computes with its own.
        hot = getattr(self.experts, "hot", None)
        of_layer = self._lowband_experts, self.router.routing.experts, self.experts, self._name
        route = Dispatch(*of_layer, hot)
        out = route(x_TH, *self.router(x_TH)).view(x.shape)
        return out if self.shared is None else out + self.shared(x)

    def spread(
        self, axis: ExpertAxis, name: str, slices: dict[nn.Parameter, nn.Parameter], copies: int
    ) -> None:
        """Keep this rank's experts alone.

        slices: by whole parameter, which layers may share; copies: the most experts that have some
        """
        self._lowband_experts, self._name = axis, name
        for part in self.experts.modules():
            for attribute, whole in part._parameters.items():
                if whole is not None and not is_of_expert(whole):
                    if whole not in slices:
                        slices[whole] = _sliced(whole, axis)
                    part._parameters[attribute] = slices[whole]
        if copies and self.experts.hot is None:  # else they are another layer's, too
            self.experts.hot = HotExperts(axis, self.router.routing.experts, copies)


def _sliced(whole: nn.Parameter, axis: ExpertAxis) -> nn.Parameter:
    of = SliceOf(whole.shape, 0, 1, axis.place, axis.ranks, "expert")
    values = of.cut(whole.detach()).clone(memory_format=torch.contiguous_format)
    mine = nn.Parameter(values, whole.requires_grad)
    mine.slice_of = of  # type: ignore[attr-defined]
    keep_attributes(whole, mine)
    if is_partial(whole):  # each tensor rank has other tokens
        mark_partial([mine])
    return mine


def spread_experts(module: nn.Module, topology: Topology) -> nn.Module:
    """Divide the experts of a module's layers over the topology's expert axis, in place, and return it.

    module: whole on every rank, with the same values, or on the meta device; after `lowband.parallelize`,
            before `lowband.shard`
    On an axis of one rank the module stays as it is. Every rank must call it, because it creates process
    groups. Raises UserError for a module without a `MixtureOfExperts`, for experts that cannot be divided,
    and, on every rank, if ranks differ in shapes or values.
    """
    axis = topology.along("expert")
    layers = {name: each for name, each in module.named_modules() if isinstance(each, MixtureOfExperts)}
    if any(hasattr(part, "_lowband") for part in module.modules()):
        what = "the module is already sharded"
        raise UserError(what, where=type(module).__name__, allowed="spread_experts before shard")
    if not layers:
        raise UserError("no layer of experts", where=type(module).__name__, allowed="MixtureOfExperts")
    topology.axes.check_route_parts()
    for name, layer in layers.items():
        if layer._lowband_experts is not None:
            raise UserError("its experts are already spread", where=f"'{name}'", allowed="one spread_experts")
        if (experts := layer.router.routing.experts) % len(axis.ranks):
            what = f"{experts} experts cannot be divided over expert {len(axis.ranks)}"
            raise UserError(what, where=f"'{name}'", allowed=f"what divides {experts}")
        if topology.axes.copies and not isinstance(layer.experts, Experts):
            what = f"copies {topology.axes.copies} of experts of type {type(layer.experts).__name__}"
            raise UserError(what, where=f"'{name}'", allowed="copies 0")
        for inner, parameter in layer.experts.named_parameters():
            check_no_hooks(f"{name}.experts.{inner}", parameter, "spread_experts")
            if parameter.shape[:1] != (experts,):
                what = f"'{name}.experts.{inner}' has shape {list(parameter.shape)}"
                raise UserError(
                    what, where="spread_experts", allowed=f"[{experts}, ...], an expert after another"
                )
    if len(axis.ranks) == 1:
        return module
    if not is_alone():
        check_same(facts_of(module, ()), axis.ranks[0])
    along = ExpertAxis(axis, topology.along("alike"), topology.axes.route, topology.axes.route_parts)
    slices: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in layers.items():
        layer.spread(along, name, slices, topology.axes.copies)
    refuse_wholes(module)
    return module


def balance_experts(module: nn.Module) -> dict[str, torch.Tensor]:
    """After each `optimizer.step()`: move every router's bias against the load, and count anew.

    With `copies` among the topology's axes, this also decides which experts have copies from now on.

    Returns the pairs of each expert since the last call, [experts] int64, by the router's name: of all ranks
    whose tokens differ. Every rank must call it; there is one all-reduce for all layers. Routers that are
    balanced otherwise are only counted (spec.routing). A module that is not sharded has its own tokens alone.
    Raises UserError for a module only some part of which is sharded, and for a job of several replicas that
    meet seldom: the sum would cross their links at every step. A replica of `lowband.Quorum` sums its own.
    Source: arXiv 2408.15664.
    """
    engine: Engine | None = getattr(module, "_lowband", None)
    if engine is None:
        inside = next((name for name, part in module.named_modules() if hasattr(part, "_lowband")), None)
        if inside is not None:
            what = f"'{inside}' in it is sharded, and not the module itself"
            raise UserError(what, where="balance_experts", allowed="the module that lowband.shard was given")
        return balance(module)
    if engine.replicas is not None and engine.replicas.count > 1:
        what = "replicas that meet seldom would sum the load of experts over their links at every step"
        raise UserError(what, where="balance_experts", allowed="schemes without sync, or a job per replica")
    engine.put_shards()
    names = {child: name for name, child in module.named_modules()}
    if engine.load is None:
        engine.load = Along(engine.axis)
        engine.load.count_in(engine.ledger)
    along = [engine.load]
    if engine.tensor is not None and engine.tensor.cuts_tokens:
        along.append(engine.tensor)

    def summed(counts: torch.Tensor) -> torch.Tensor:
        total = counts.double()  # exact up to 2^53 pairs
        for each in along:
            total = each.summed(total, EXPERTS_LOAD, "balance") if each.ranks > 1 else total
        return total.long()

    loads = balance(module, summed)
    for layer in module.modules():
        if isinstance(layer, MixtureOfExperts) and getattr(layer.experts, "hot", None) is not None:
            layer.experts.hot.update(loads[names[layer.router]])
    return loads


def recent_loads(module: nn.Module) -> dict[str, list[list[int]]]:
    """By the layer's name, the loads that say which experts have copies; on this rank's layers alone."""
    return {name: hot.loads for name, hot in _hot_experts(module).items()}


def resume_loads(module: nn.Module, loads: dict[str, list[list[int]]]) -> None:
    """Let those experts have copies that had some when the loads were taken."""
    for name, hot in _hot_experts(module).items():
        for counts in loads[name]:
            hot.update(torch.tensor(counts))


def _hot_experts(module: nn.Module) -> dict[str, HotExperts]:
    """By the name of the first layer that has them."""
    found = dict[HotExperts, str]()
    for name, layer in module.named_modules():
        hot = getattr(layer.experts, "hot", None) if isinstance(layer, MixtureOfExperts) else None
        if hot is not None:
            found.setdefault(hot, name)
    return {name: hot for hot, name in found.items()}
