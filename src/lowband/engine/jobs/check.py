"""Which jobs may be replicas of one run (jobs.quorum)."""

import json

import torch

from lowband.engine.passes.engine import Engine
from lowband.engine.replicas.replicas import Replicas
from lowband.errors import UserError


def checked(engine: Engine, optimizer: torch.optim.Optimizer) -> Replicas:
    """The replicas of an engine. Raises UserError unless it has one, whose exchanges allow others."""
    engine.axis.check_alone("Quorum")
    replicas, scheme = engine.replicas, engine.collectives.scheme
    where = f"scheme '{scheme.name}'"
    if replicas is None:
        raise UserError("has no sync", where=where, allowed="a scheme with sync, e.g. diloco")
    replicas.check_alone("the module has one already", "one Quorum for a module")
    sync = replicas.sync
    if not sync.has_anchor or sync.delay:
        raise UserError(
            f"sync has partners {sync.partners} and delay {sync.delay}", where=where,
            allowed="with Quorum: partners all, delay 0",
        )  # fmt: skip
    if replicas.count != 1:
        raise UserError(
            f"this job has {replicas.count} replicas, groups of level '{sync.beyond}'", where=where,
            allowed="with Quorum: a job for each replica",
        )  # fmt: skip
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(shard) not in stepped for each in replicas.exchanges for shard in each.unit.shards):
        raise UserError(
            "does not have all trainable parameters", where=type(optimizer).__name__,
            allowed="with Quorum: one optimizer of model.parameters()",
        )  # fmt: skip
    return replicas


def job_text(engine: Engine, optimizer: torch.optim.Optimizer) -> str:
    """What all replicas must have in common, as text."""
    scheme = engine.collectives.scheme
    units = [[unit.name, unit.layout.numel, unit.scheme.model_dump(mode="json")] for unit in engine.units]
    levels = [[name, engine.axis.levels.size(name)] for name in engine.axis.levels.names]
    return json.dumps([scheme.model_dump(mode="json"), levels, units, type(optimizer).__qualname__])


def check_weights(replicas: Replicas) -> None:
    """Raises UserError unless the weights are the anchor, as they are before the first step."""
    for each in replicas.exchanges:
        if not torch.equal(each.agreed()[0], each.weights):
            raise UserError(
                f"weights of '{each.unit.name}' were changed after it was made", where="lowband.Quorum",
                allowed="weights loaded before",
            )  # fmt: skip
