"""Which schemes are refused on a machine's levels, because no order of collectives can serve them."""

from collections.abc import Callable

from lowband.errors import UserError
from lowband.spec.mesh import WORLD, Levels
from lowband.spec.placement import Placement
from lowband.spec.step import MEETINGS, UPDATE_GATHER
from lowband.spec.tiers import DEVICE, DISK, HOST, at
from lowband.spec.wire import Wire

Wires = Callable[[str], Wire]  # of a collective


def check(scheme: Placement, levels: Levels, wire: Wires) -> None:
    """Raises UserError, with the reason."""
    where = f"scheme '{scheme.name}'"
    for key in ("weights", "grads", "optim", "secondary"):
        level = getattr(scheme, key)
        if level is not None and level not in levels.names:
            raise UserError(f"{key}: no level '{level}'", where=where, allowed=levels.names)
    weights, grads, optim = (levels.index(x) for x in (scheme.weights, scheme.grads, scheme.optim))
    if not weights <= grads <= optim:
        raise UserError(
            f"weights ({scheme.weights}), grads ({scheme.grads}), optim ({scheme.optim}) must go from inner "
            "to outer, so that each state's shard is a part of the one before it",
            where=where,
        )
    if scheme.secondary is not None and levels.index(scheme.secondary) >= weights:
        raise UserError(
            f"secondary ({scheme.secondary}) must be inside the level of weights ({scheme.weights}); "
            "at or beyond it, it would save nothing",
            where=where, allowed=levels.names[:weights],
        )  # fmt: skip
    _check_tiers(scheme, wire, where)
    _check_sync(scheme, levels, wire, where)


def _check_tiers(scheme: Placement, wire: Wires, where: str) -> None:
    """Of states beyond the device."""
    offload, optim = scheme.offload, at(scheme.optim, scheme.optim_tier)
    on_host, update = at(scheme.optim, HOST), wire(UPDATE_GATHER.name)
    if scheme.resident and scheme.weights_tier != HOST:
        what = f"resident {scheme.resident:g} of weights {at(scheme.weights, scheme.weights_tier)}"
        raise UserError(what, where=where, allowed=f"weights {at(scheme.weights, HOST)}, or no resident")
    if scheme.optim_tier == DEVICE:
        if offload is not None:
            what = f"offload: optim {scheme.optim} lies on the device"
            raise UserError(what, where=where, allowed=f"optim {on_host}, or no offload")
        return
    if offload is not None and scheme.weights_tier != DEVICE:
        what = f"offload beside weights {at(scheme.weights, scheme.weights_tier)}"
        raise UserError(what, where=where, allowed=f"weights {scheme.weights}, or no offload")
    if offload is not None and scheme.optim_tier == DISK and (offload.stride or offload.late):
        raise UserError(
            f"offload.{'late' if offload.late else f'stride {offload.stride}'}: states on a disk are updated "
            "by the host, when their gradients are there",
            where=where, allowed=f"offload.share alone, or optim {on_host}",
        )  # fmt: skip
    if update != "native":
        what = f"update_gather {update}: weights come from the host in the compute dtype"
        raise UserError(what, where=where, allowed="update_gather native")
    if scheme.sync is not None:
        what = f"optim {optim}: replicas that meet seldom exchange on the device"
        raise UserError(what, where=where, allowed=f"optim {scheme.optim}, or no sync")


def _check_sync(scheme: Placement, levels: Levels, wire: Wires, where: str) -> None:
    """Of replicas that meet seldom."""
    sync = scheme.sync
    if sync is None:
        return
    for row in MEETINGS:
        if row is not scheme.meeting and wire(row.name) != "native":
            what = f"{row.name} {wire(row.name)}: replicas meet by {scheme.meeting.name}"
            raise UserError(what, where=where, allowed=f"{row.name} native")
    possible = levels.names[levels.index(scheme.optim) : -1]
    if not possible:
        what = "sync has no replicas: the optimizer's level is world"
        raise UserError(what, where=where, allowed="optim inside world")
    if sync.beyond not in possible:
        raise UserError(
            f"sync.beyond ({sync.beyond}) must be the optimizer's level ({scheme.optim}) or one between it "
            "and world",
            where=where, allowed=possible,
        )  # fmt: skip
    if sync.has_anchor:
        return
    hops = levels.hops(sync.beyond, WORLD)
    if len(hops) > 1:
        raise UserError(
            f"sync.partners {sync.partners}: {len(hops)} levels lie between replicas "
            f"({sync.beyond}) and world",
            where=where, allowed=f"sync.beyond {hops[-2].level}",
        )  # fmt: skip
    if sync.partners == "ring" and hops and hops[0].count % 2:
        raise UserError(
            f"sync.partners ring: {hops[0].count} replicas do not make pairs",
            where=where, allowed="an even number of replicas, or partners exponential",
        )  # fmt: skip
