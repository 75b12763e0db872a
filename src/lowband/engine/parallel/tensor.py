"""Tensor parallelism: the matrices of a layer over the ranks along an axis (Megatron-LM, arXiv 1909.08053).

A plan says by name how a module is cut, as data. `parallelize` cuts a plain module in place; what is left is
a smaller plain module, which `lowband.shard` places on the data axis as any other.

[Note: shared] A parameter that no rule cuts is whole on every tensor rank. Its gradient is the same on all of
them, because all compute with the same activations. But a module between a Column and its Row sees only its
rank's features (Partial), and with sequence parallelism one outside of them only its rank's tokens (Tokens):
then its gradients are partial sums, which are added over the tensor axis once a step (`shared_reduce`). With
sequence parallelism a plan must name every parameter, so that none is forgotten.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from lowband.engine.collectives.activations import Along
from lowband.engine.parallel.cut_layers import CUT, ColumnLinear, Cut, Entered, Splitting
from lowband.engine.parallel.divided import Divided
from lowband.engine.transport.consistency import check_same, facts_of, is_alone
from lowband.engine.transport.topology import Topology
from lowband.engine.units.changes import check_no_hooks, check_own
from lowband.engine.units.own_attributes import keep_attributes
from lowband.engine.units.parts import of_part
from lowband.engine.units.slice_of import SliceOf, mark_partial, refuse_wholes
from lowband.engine.units.unusable import mark_replaced
from lowband.errors import UserError
from lowband.spec.tensor import DIVIDED, Column, Join, Partial, Plan, Row, Rule, Split, Tokens


def parallelize(module: nn.Module, plan: Plan, topology: Topology) -> nn.Module:
    """Cut a module along the topology's tensor axis, in place, and return it; before `lowband.shard`.

    module: whole on every rank, with the same values; or on the meta device
    plan:   rules by the name of a module in `module`; `*` stands for any characters; the first counts. If the
            topology's axes say `sequence_parallel`, activations between products are cut by tokens (arXiv
            2205.05198); the plan then says where, and has a rule for every parameter

    A parameter that is cut is this rank's slice from now on. Tensor ranks must be given the same inputs. On
    an axis of one rank the module stays as it is.
    Raises UserError for a rule that fits no module, for sizes that do not divide, and, on every rank, if
    tensor ranks differ in shapes or values.
    """
    axis, sequence_parallel = topology.along("tensor"), topology.axes.sequence_parallel
    if hasattr(module, "_lowband") or any(of_part(child) is not None for child in module.modules()):
        what = "the module is already sharded or cut"
        raise UserError(what, where=type(module).__name__, allowed="one parallelize, before shard")
    check_own(module)
    if not is_alone():  # before what ranks that differ would refuse one by one
        rules_of_plan = {"rules of its plan": [f"{pattern}: {rule}" for pattern, rule in plan.items()]}
        dropout = {"dropout of its modules": [f"{name}: {child.p}" for name, child in _dropouts(module)]}
        check_same({**rules_of_plan, **dropout, **facts_of(module, ())}, axis.ranks[0])
    rules = _rules(module, plan)
    ways = _ways(module, rules, sequence_parallel)
    _check(module, rules, len(axis.ranks))
    _check_ways(module, ways)
    if len(axis.ranks) == 1:
        return module
    _check_replaced(module, rules, ways)
    mark_partial(parameter for parameter, found in ways.items() if found == {PARTIAL})
    divided = Divided(module, len(axis.ranks)) if sequence_parallel else None
    cutter = _Cutter(Along(axis, sequence_parallel), divided)
    for name, child in [*module.named_modules()]:
        if child in rules:
            cutter.cut(child, name, rules[child], _around(module, name))
    cutter.mark_wholes()
    for child in module.modules():
        child._lowband_tensor = cutter.along  # type: ignore[assignment]
    refuse_wholes(module)
    return module


class _Cutter:
    """Cuts the layers of one module."""

    def __init__(self, along: Along, divided: Divided | None) -> None:
        """divided: with sequence parallelism"""
        self.along, self._divided = along, divided
        self._slices: dict[nn.Parameter, nn.Parameter] = {}  # by whole parameter: it may have several places
        self._places: dict[nn.Parameter, str] = {}
        self._entered: dict[nn.Module, Entered] = {}

    def cut(self, child: nn.Module, name: str, rule: Rule, parent: nn.Module) -> None:
        if self._divided is not None and isinstance(rule, Split):
            child.register_forward_pre_hook(Splitting(self.along, name, self._divided))
        kind = CUT.get(type(rule).__name__, {}).get(type(child))
        if kind is None:
            return
        exchange = kind.exchanges[self._divided is not None]
        child.__class__ = kind
        if isinstance(rule, Join):
            child.parts = rule.parts  # type: ignore[assignment]
        entered = self._shared_by(parent, kind)
        child.cut = Cut(self.along, exchange, name, entered, self._divided)  # type: ignore[assignment]
        dim, parts = DIVIDED.get(type(rule), 0), rule.parts if isinstance(rule, Column) else 1
        for attribute, parameter in child._parameters.items():
            if parameter is not None and parameter.ndim > dim:
                child._parameters[attribute] = self._sliced(parameter, dim, parts, f"{name}.{attribute}")

    def _shared_by(self, parent: nn.Module, kind: type[nn.Module]) -> Entered:
        if kind is ColumnLinear and parent not in self._entered:
            self._entered[parent] = Entered()
            parent.register_forward_hook(self._entered[parent], always_call=True)
        return self._entered.get(parent, Entered())

    def _sliced(self, whole: nn.Parameter, dim: int, parts: int, name: str) -> nn.Parameter:
        if whole not in self._slices:
            of = SliceOf(whole.shape, dim, parts, self.along.place, self.along.ranks)
            values = of.cut(whole.detach()).clone(memory_format=torch.contiguous_format)
            self._slices[whole] = nn.Parameter(values, whole.requires_grad)
            self._slices[whole].slice_of = of  # type: ignore[attr-defined]
            keep_attributes(whole, self._slices[whole])
            self._places[whole] = name
        return self._slices[whole]

    def mark_wholes(self) -> None:
        """Have the parameters that were cut refuse their use, by a module that shares one of them, say."""
        for whole, place in self._places.items():
            mark_replaced(whole, place)


def _rules(module: nn.Module, plan: Plan) -> dict[nn.Module, Rule]:
    """By module, the first rule that fits its name; of one that has several names, that fits any of them."""
    named = [*module.named_modules(remove_duplicate=False)]
    found: dict[nn.Module, Rule] = {}
    for pattern, rule in plan.items():
        fit = [child for name, child in named if fnmatchcase(name, pattern)]
        if not fit:
            what = f"no module is named '{pattern}'"
            raise UserError(what, where=f"plan for {type(module).__name__}")
        for child in fit:
            found.setdefault(child, rule)
    return found


def _around(module: nn.Module, name: str) -> nn.Module:
    """The nearest module around the one of that name that has a forward, which a ModuleList has not."""
    while name:
        name = name.rpartition(".")[0]
        if type(module.get_submodule(name)).forward is not nn.Module.forward:
            break
    return module.get_submodule(name)


# What becomes of a parameter: (CUT_ALONG, dimension, parts), or one of the others.
Way = tuple[str, int, int] | str
CUT_ALONG, PARTIAL, SAME, UNNAMED = "cut", "partial sums", "whole", "unnamed"


def _ways(
    module: nn.Module, rules: Mapping[nn.Module, Rule], sequence_parallel: bool
) -> dict[nn.Parameter, set[Way]]:
    """By parameter, what becomes of it at each of its places.

    A rule holds for the modules inside, too, but for those with one of their own. Split says nothing of them.
    """
    nearest: dict[nn.Module, Rule | None] = {}
    found: dict[nn.Parameter, set[Way]] = {}
    for name, child in module.named_modules():
        rule = rules.get(child)
        if rule is None or isinstance(rule, Split):
            rule = nearest.get(module.get_submodule(name.rpartition(".")[0]))
        nearest[child] = rule
        for parameter in child.parameters(recurse=False):
            found.setdefault(parameter, set()).add(_way(parameter, rule, sequence_parallel))
    return found


def _way(parameter: nn.Parameter, rule: Rule | None, sequence_parallel: bool) -> Way:
    dim = DIVIDED.get(type(rule))
    if dim is not None and dim < parameter.ndim:
        return CUT_ALONG, dim, rule.parts if isinstance(rule, Column) else 1
    if isinstance(rule, Partial):
        return PARTIAL
    if not sequence_parallel:
        return SAME
    if rule is None:
        return UNNAMED
    return PARTIAL if isinstance(rule, Row | Tokens) else SAME


def _check_ways(module: nn.Module, ways: Mapping[nn.Parameter, set[Way]]) -> None:
    for name, parameter in module.named_parameters():
        if UNNAMED in ways[parameter]:
            raise UserError(
                f"no rule says whether '{name}' sees all tokens",
                where="sequence_parallel",
                allowed="a rule for every parameter: Tokens() between products, Whole() elsewhere",
            )
        if len(ways[parameter]) > 1:
            what = f"'{name}' has several places, and the plan does not treat it alike in them"
            raise UserError(what, where=type(module).__name__, allowed="rules that cut all places in one way")


def _check_replaced(
    module: nn.Module, rules: Mapping[nn.Module, Rule], ways: Mapping[nn.Parameter, set[Way]]
) -> None:
    """Refuses what a slice in a parameter's place would lose: its hooks, and what computes a weight.

    spectral_norm, weight_norm and pruning compute a layer's weight before each forward, from other parameters
    and from buffers. Of slices that gives the slice of the weight only where each row, or column, is computed
    alone: from parameters that are cut as the weight is. Buffers are not cut.
    """
    for name, parameter in module.named_parameters():
        if any(isinstance(way, tuple) for way in ways[parameter]):
            check_no_hooks(name, parameter, type(module).__name__)
    for name, child in module.named_modules():
        rule = rules.get(child)
        kind = CUT.get(type(rule).__name__, {}).get(type(child))
        own = dict(child.named_parameters(recurse=False))
        if kind is None or not kind.divided or "weight" in own:
            continue
        dim, size = DIVIDED[type(rule)], getattr(child, kind.divided)
        found = [of for of, each in own.items() if of != "bias" and each.shape[dim : dim + 1] != (size,)]
        found += [of for of, buffer in child.named_buffers(recurse=False) if size in buffer.shape]
        if found:
            raise UserError(
                f"its weight is computed with '{found[0]}', which is not cut as its {size} {kind.divided}",
                where=f"{type(rule).__name__} of '{name}'",
                allowed="layers without pruning, spectral_norm or such a weight_norm",
            )


def _check(module: nn.Module, rules: Mapping[nn.Module, Rule], ranks: int) -> None:
    for name, child in _dropouts(module) if ranks > 1 else ():
        what = f"dropout {child.p}: tensor ranks would draw different random numbers"
        raise UserError(what, where=f"'{name}'", allowed="dropout 0")
    for name, child in module.named_modules():
        if child in rules:
            _check_rule(name, child, rules[child], ranks)


def _dropouts(module: nn.Module) -> list[tuple[str, nn.modules.dropout._DropoutNd]]:
    """Those that draw, by name."""
    kind = nn.modules.dropout._DropoutNd
    return [(name, each) for name, each in module.named_modules() if isinstance(each, kind) and each.p]


def _check_rule(name: str, child: nn.Module, rule: Rule, ranks: int) -> None:
    where = f"{type(rule).__name__} of '{name}'"
    if isinstance(rule, Column | Join) and rule.parts < 1:
        raise UserError(f"parts {rule.parts}", where=where, allowed="1 or more")
    kinds = CUT.get(type(rule).__name__)
    if kinds is None:
        return
    if type(child) not in kinds:
        names, own = [kind.__name__ for kind in kinds], type(child)
        kind = f"{own.__module__}.{own.__name__}" if own.__name__ in names else own.__name__
        inside = [f"'{name}.{each}'" for each, inner in child.named_modules() if type(inner) in kinds]
        allowed = ", ".join(names) + ("; in it: " + ", ".join(inside[:4]) if inside else "")
        raise UserError(f"the module is of type {kind}", where=where, allowed=allowed)
    if isinstance(child, nn.Embedding) and (
        child.max_norm is not None or child.padding_idx is not None or child.scale_grad_by_freq
    ):
        what = "the embedding has max_norm, padding_idx or scale_grad_by_freq"
        raise UserError(what, where=where, allowed="none of them")
    is_loss = isinstance(child, nn.CrossEntropyLoss)
    if is_loss and (child.weight is not None or child.label_smoothing or child.reduction == "none"):
        what = "has weights, smoothing or no reduction"
        raise UserError(what, where=where, allowed="the mean over tokens, or their sum")
    if divided := kinds[type(child)].divided:
        column = rule if isinstance(rule, Column) else Column()
        if getattr(child, divided) % (ranks * column.parts * column.together):
            of = f" in {column.parts} parts" * (column.parts > 1)
            of += f", each in groups of {column.together}," * (column.together > 1)
            what = f"{getattr(child, divided)} {divided}{of} cannot be divided over tensor {ranks}"
            raise UserError(what, where=where)
