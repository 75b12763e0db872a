"""Along which axes the parts of a module were cut: lowband.parallelize and lowband.spread_experts note it in
each of them."""

from collections.abc import Sequence

from torch import nn

from lowband.engine.collectives.activations import Along
from lowband.engine.collectives.experts import ExpertAxis
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.ledger import Ledger
from lowband.engine.units.slice_of import is_of_expert, is_partial, slice_of
from lowband.errors import UserError
from lowband.spec.partition import ALIGN
from lowband.spec.scheme import Scheme


def along_tensor(module: nn.Module) -> Along | None:
    """The exchanges along a module's tensor axis; None if no part of it was cut (parallel.tensor).

    Parts that were cut one by one count in one ledger from now on. Raises UserError if their axes differ, or
    for parameters of which cannot be known what the tensor axis makes of their gradients.
    """
    found = list(dict.fromkeys(each for part in module.modules() if (each := of_part(part)) is not None))
    for along in found[1:]:
        if along.axis is not found[0].axis:
            what = "parts were cut along different tensor axes"
            raise UserError(what, where=type(module).__name__, allowed="one Topology for all of them")
        along.count_in(found[0].ledger)
    _check_parts(module, found[0].cuts_tokens if found else False)
    return found[0] if found else None


def check_blocks(schemes: Sequence[Scheme], tensor: Along | None) -> None:
    """Raises UserError if blocks that a scheme quantizes mix slices with parameters that tensor ranks have
    whole: these would be rounded otherwise on each of them.
    """
    for scheme in schemes if tensor is not None else ():
        if scheme.is_quantized and ALIGN % scheme.block_size:
            what = f"block_size {scheme.block_size} beside slices of a tensor axis"
            raise UserError(what, where=f"scheme '{scheme.name}'", allowed=f"divisors of {ALIGN}")


def check_experts(module: nn.Module, axis: Axis, where: str) -> None:
    """Raises UserError for experts that were spread over another axis than that of the module's Topology."""
    if (experts := along_experts(module)) is not None and experts.axis is not axis:
        what = "its experts were spread over the axis of another Topology"
        allowed = "one Topology for spread_experts and shard, or Pipeline"
        raise UserError(what, where=where, allowed=allowed)


def along_experts(module: nn.Module) -> ExpertAxis | None:
    """The exchanges between ranks that have different experts of a module; None if all have the same ones.

    Raises UserError if layers were spread over different axes, or if parameters are no longer those that
    `spread_experts` made, so that nothing says which experts they are of.
    """
    layers = {name: part for name, part in module.named_modules() if hasattr(part, "_lowband_experts")}
    spread = {name: part for name, part in layers.items() if part._lowband_experts is not None}
    for name, layer in spread.items():
        for inner, parameter in layer.experts.named_parameters():  # type: ignore[union-attr, operator]
            if not is_of_expert(parameter):
                what = f"'{name}.experts.{inner}' was replaced after lowband.spread_experts"
                raise UserError(
                    what,
                    where=type(module).__name__,
                    allowed="to_empty and the like before it; init= of lowband.shard",
                )
    found = list(dict.fromkeys(layer._lowband_experts for layer in spread.values()))
    for other in found[1:]:
        if other.axis is not found[0].axis:
            what = "its experts were spread over different axes"
            raise UserError(what, where=type(module).__name__, allowed="one Topology for all of them")
    return found[0] if found else None


def ledger_of(along: Along | None) -> Ledger:
    """Where what is sent for a module is counted. along: its tensor axis"""
    return Ledger() if along is None else along.ledger


def of_part(module: nn.Module) -> Along | None:
    """The exchanges of the module that this one was a part of, or was itself, when it was cut."""
    found: Along | None = getattr(module, "_lowband_tensor", None)
    return found


def _check_parts(module: nn.Module, cuts_tokens: bool) -> None:
    for name, child in module.named_modules():
        for attribute, parameter in child._parameters.items():
            if parameter is None or of_part(child) is not None:
                continue
            full = f"{name}.{attribute}".lstrip(".")
            of = slice_of(parameter)
            if (of is not None and of.axis == "tensor") or is_partial(parameter):
                raise UserError(
                    f"'{full}' belongs to a module that was cut along tensor, and not to this one",
                    allowed="the modules that lowband.parallelize has cut",
                )
            if cuts_tokens:
                raise UserError(
                    f"no rule says whether '{full}' sees all tokens",
                    where="sequence_parallel",
                    allowed="modules that were cut with a plan that names all of them",
                )
