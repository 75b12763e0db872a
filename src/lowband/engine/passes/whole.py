"""Whole parameters from their shards, one unit at a time, so that no rank holds the whole module."""

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from lowband.engine.passes.engine import Engine
from lowband.engine.transport.everyone import everyones, warn
from lowband.engine.units.slice_of import SliceOf
from lowband.engine.units.state_dict import own_state_dict
from lowband.spec.activations import STATE_GATHER
from lowband.spec.mesh import SELF


def units_gathered(engine: Engine) -> Iterator[list[tuple[nn.Parameter, torch.Tensor]]]:
    """Per unit, on every rank: each of its shards with the whole logical fp32 parameter.

    Of replicas that meet seldom: the parameters that they agreed on last, or their mean if they never agree.
    Every rank must take every unit. A unit's tensors share memory that the next unit does not reuse.
    Warns of parameters of such replicas that were written since the last step, as averages of them.
    """
    engine.put_shards()
    replicas = engine.replicas
    if replicas is not None and replicas.is_written:
        warn(
            "parameters were written since the last step, and whole ones are those of replicas' last "
            "exchange, which lack that: lowband.sync_replicas exchanges them"
        )
    exchanges = [] if replicas is None or replicas.is_new else replicas.exchanges
    exchange_of = {each.unit: each for each in exchanges}
    for unit in engine.units:
        whole = torch.empty(unit.layout.numel, dtype=torch.float32, device=unit.collectives.device)
        messages = unit.collectives
        held, level = unit.master, unit.scheme.optim
        if unit in exchange_of:
            held, level = exchange_of[unit].agreed()
        # On the lanes, as a forward that failed half-way may have left a gather there; on the device, because
        # the ranks' messages lie there wherever the states do.
        with nullcontext() if unit.held.disk is None else unit.held.disk.in_memory():
            there = held.to(whole.device)
            gather = partial(
                messages.gather, shard=there, out=whole, inner=SELF, outer=level, name="state_dict"
            )
            messages.submit(unit.name, messages.inwards(SELF, level), gather).wait()
        places = zip(unit.shards, unit.layout.shapes, unit.layout.ranges(), strict=True)
        yield [
            (shard, _joined(engine, shard, whole[start:stop].view(shape)))
            for shard, shape, (start, stop) in places
        ]


def _joined(engine: Engine, shard: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """The whole parameter, from the slices of it of all ranks along the axis that divides it."""
    cut: SliceOf | None = shard.shard_of.slice_of  # type: ignore[attr-defined]
    along = None if cut is None else engine.experts if cut.axis == "expert" else engine.tensor
    if cut is None or along is None:
        return part
    return cut.join(along.gathered(part.unsqueeze(0), STATE_GATHER, 0, "state_dict").unbind())


def state_digests(module: nn.Module, engine: Engine) -> dict[str, str]:
    """The sha256 of each entry of the module's whole state, by name, on every rank.

    Ranks take turns, a parameter each, so hashing takes a rank its share of the model's bytes.
    """
    mine: dict[int, str] = {}
    ranks = engine.axis.ranks
    order: dict[int, int] = {}  # id of a shard -> its place among all
    for parameters in units_gathered(engine):
        for shard, whole in parameters:
            order[id(shard)] = len(order)
            if order[id(shard)] % len(ranks) == ranks.index(engine.axis.rank):
                mine[order[id(shard)]] = sha256(whole)
    everybody = everyones(mine)
    digests = {place: digest for rank in ranks for place, digest in everybody[rank].items()}
    return {
        name: digests[order[id(value)]] if id(value) in order else sha256(value)
        for name, value in own_state_dict(module).items()
    }


def sha256(tensor: torch.Tensor) -> str:
    """The checksum of a tensor's values, as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()
