"""The library: shard a module in place, clip its gradients, and get the whole state back."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args

import torch
from torch import nn

from lowband.engine.arguments import check_callable, check_kind, check_wrap
from lowband.engine.disk import Disk
from lowband.engine.options import Options
from lowband.engine.parallel.left_out import bound_context
from lowband.engine.parallel.torch_cut import take_over
from lowband.engine.passes.alike import along_tensor
from lowband.engine.passes.breadth import Breadth
from lowband.engine.passes.engine import Engine, engine_of
from lowband.engine.passes.grad_norm import factor_of, grad_norm
from lowband.engine.passes.whole import units_gathered
from lowband.engine.replicas.replicas import Replicas
from lowband.engine.transport.lane import outside_of_modes
from lowband.engine.transport.topology import Topology
from lowband.engine.units.division import Wrap
from lowband.engine.units.initial import Init, Source
from lowband.engine.units.parts import check_experts
from lowband.engine.units.state_dict import own_state_dict
from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.spec.context import check_context
from lowband.spec.scheme import Scheme
from lowband.spec.step import Pattern
from lowband.spec.tiers import DEVICE, Tier

T = TypeVar("T")


def shard(
    module: nn.Module,
    scheme: Scheme | str,
    topology: Topology,
    wrap: Wrap,
    compute_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    overlap: bool = True,
    placement_of: Callable[[str, nn.Module], Scheme | str | None] | None = None,
    init: Init | Source | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    collectives: Pattern = "hops",
    disk: str | Path | None = None,
    activations: Tier | Callable[[nn.Module], Tier] = DEVICE,
) -> nn.Module:
    """Shard a module in place, as `fully_shard` does, and return it.

    module:        whole on every rank, with the same values (rank 0's values are not broadcast); or cut along
                   the topology's tensor axis, by `lowband.parallelize` or torch's `parallelize_module`
    scheme:        a Scheme, or a name: in `config/schemes.yaml` of the working directory, or built in
    wrap:          class, tuple of classes or predicate that selects the modules to gather one at a time
                   (the transformer block); the other parameters are gathered as one unit
    compute_dtype: dtype of weights and activations; floating-point inputs of each unit are cast to it
    reduce_dtype:  dtype in which gradients are sent and summed
    overlap:       whether communication runs behind the computation; False serves to measure the benefit
    placement_of:  maps a unit's name and module to a scheme for that unit, or None for `scheme`. Units are
                   named after their module; the other parameters are "root", or "root (outermost)" beside
                   a module of that name, and frozen ones "... (frozen)"
    init:          fills a parameter or buffer in place, given its name and a tensor; called for those on the
                   meta device, one at a time, so that no rank ever holds the whole module. Random numbers
                   depend on `seed` and the name alone. Or `lowband.Safetensors(folder)`, of whose files each
                   rank reads its ranges
    device:        where a module on the meta device is made; default: this process's GPU if
                   torch.distributed uses NCCL or RCCL, else the CPU. A module that has values stays where
                   they are: any other device is refused
    collectives:   hops: one per level; flat: one ring over all ranks, the baseline to compare hops with;
                   joined: one exchange between all ranks, for a machine whose links are all equal
    disk:          folder for states that the scheme places there (`optim: world@disk`, also of `weights`), of
                   this job alone
    activations:   host: what units' forwards keep for the backward waits in host memory; device. Or, given
                   a wrapped module, which of both

    Afterwards `module.parameters()` are this rank's fp32 optimizer shards, 1D, under the module's own names.
    Gradients are averaged over all ranks; under a scheme with sync, over those of a replica, and the
    `optimizer.step()` that completes a period exchanges weights between replicas.
    Raises UserError for a scheme that does not fit the levels, and, on every rank, if ranks differ in scheme,
    dtypes, shapes, units or initial weights, or if one was given a device other than its module's, or has no
    room for what lies in host memory.
    """
    where = "lowband.shard"
    check_kind(where, "module", module, nn.Module, "a torch.nn.Module")
    if hasattr(module, "_lowband"):
        raise UserError("the module is already sharded", where=type(module).__name__)
    if collectives not in get_args(Pattern):
        raise UserError(f"unknown collectives '{collectives}'", allowed=get_args(Pattern))
    check_kind(where, "scheme", scheme, (Scheme, str), "a lowband.Scheme, or the name of one")
    check_kind(where, "topology", topology, Topology, "a lowband.Topology")
    check_wrap(where, wrap)
    check_callable(where, "placement_of", placement_of, "a function of a unit's name and module")
    check_kind(where, "disk", disk, (str, Path, type(None)), "a folder")
    config = Config()

    def named(given: Scheme | str) -> Scheme:
        return config.scheme(given) if isinstance(given, str) else given

    placed = named(scheme)

    def scheme_of(unit: str, owner: nn.Module) -> Scheme:
        own = placement_of(unit, owner) if placement_of is not None else None
        return placed if own is None else named(own)

    check_context(topology.axes, placed, topology.levels)
    take_over(module, topology)
    check_experts(module, topology.along("expert"), type(module).__name__)
    files = None if disk is None else Disk(Path(disk), topology.rank)
    options = Options(compute_dtype, reduce_dtype, overlap, collectives, files, activations)
    parts = module, placed, scheme_of, topology.along("data"), wrap
    engine = Engine(*parts, options, init, seed, device)
    module._lowband = engine  # type: ignore[assignment]
    if (context := bound_context(module, topology)) is not None:
        context.count_in(engine.ledger, engine.averaged)
    if (alike := along_tensor(engine.tensor, engine.device)) is not None:
        alike.watch(module)
        engine.passes.backward.compare = partial(alike.check_gradients, compute_dtype)
    return module


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Gradient accumulation, as DDP's no_sync: backward passes in here reduce to the grads level only.

    A backward outside of it, before the optimizer's step, reduces their sum; a step without it raises
    UserError.
    """
    return engine_of(module).no_sync()


@torch._disable_dynamo  # type: ignore[untyped-decorator]
def accumulate(
    module: nn.Module, micro_batches: Sequence[T], loss_of: Callable[[T], torch.Tensor]
) -> list[torch.Tensor]:
    """Gradient accumulation, breadth-first: each unit computes all micro-batches in turn.

    loss_of: maps a micro-batch to its loss, one number, by one call of the module. The losses are summed, not
             averaged: for their mean, `loss_of` divides by the number of micro-batches

    Runs all forward and backward passes and returns the losses, detached, in order. Gradients are averaged
    over all ranks, as those of a loop with `no_sync`. But each unit is gathered once in the forward and once
    in the backward, and its gradient is reduced once, after it was summed over the micro-batches in fp32. The
    activations of all micro-batches are in memory at once. Under `no_sync` it reduces to the grads level.

    Raises UserError if the module is not a chain of its units: every tensor that requires gradients and
    enters a unit, except the first, must be an earlier unit's output. Whatever it raises, the next call
    works; an exception has the same effect on gradients as one in a forward or in a backward.
    Source: Lamy-Poirier, arXiv 2211.05953.
    """
    check_kind("lowband.accumulate", "micro_batches", micro_batches, Sequence, "a list of them")
    if not micro_batches:
        raise UserError("no micro-batches to accumulate", where=type(module).__name__, allowed="1 or more")
    return Breadth(engine_of(module).passes, micro_batches, loss_of).run()


@torch._disable_dynamo  # type: ignore[untyped-decorator]
def clip_grad_norm_(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their global 2-norm is at most `max_norm`; returns the unscaled norm.

    The squares are summed in fp64, so that the norm does not depend on how the gradients are sharded. A
    pipeline's norm is over all of its stages. Under a scheme with sync, replicas have gradients, norms and
    scales of their own.
    Returns an fp64 scalar on the module's device; reading it, e.g. by `float(norm)`, waits for the device.
    Raises UserError if gradients of backwards under `no_sync` wait for one outside of it.
    """
    numbers = (int, float, torch.Tensor)
    check_kind("lowband.clip_grad_norm_", "max_norm", max_norm, numbers, "a number")
    engine = engine_of(module)
    for unit in engine.units:
        unit.grads.settle()
    norm, grads = grad_norm(engine)
    for disk, _ in engine.on_disk():
        disk.frees_gradients()
    # Scale unconditionally, which avoids a device sync: a factor of 1 changes nothing.
    factor = factor_of(norm, max_norm)
    for device, held in grads.items():
        torch._foreach_mul_(held, factor.to(device))
    return norm


@outside_of_modes()
def sync_replicas(module: nn.Module) -> None:
    """Under a scheme with sync, exchange all weights now, e.g. at the end of training; a new period begins.

    Training needs no such call: the optimizer's step that completes a period includes the exchange. Every
    rank must make it, between two steps. Raises UserError if the scheme has no sync.
    """
    _replicas_of(module).exchange()


@outside_of_modes()
def consensus_distance(module: nn.Module) -> float:
    """How far replicas are apart: the root mean square, over replicas, of their distance from their mean.

    The distance is Euclidean, over all trainable parameters. It takes an all-reduce of the weights between
    replicas, which is not counted. Every rank must call it, between two steps. Raises UserError if the scheme
    has no sync, or if tensor ranks hold slices of the module.
    """
    replicas, engine = _replicas_of(module), engine_of(module)
    stages = 1 if engine.pipeline is None else engine.pipeline.ranks
    if engine.tensor is not None or stages > 1:
        engine.axis.check_alone("consensus_distance", stages)
    return replicas.distance(stages)


def _replicas_of(module: nn.Module) -> Replicas:
    engine = engine_of(module)
    if engine.replicas is None:
        raise UserError(
            "the scheme has no sync: all ranks have the same weights after every step",
            where=f"scheme '{engine.collectives.scheme.name}'",
        )
    engine.put_shards()
    return engine.replicas


@outside_of_modes()
def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The logical fp32 parameters, the buffers and extra state on rank 0, under the module's own names or
    those that its hooks give them; elsewhere {}.

    Under a scheme with sync: the parameters that replicas agreed on last. `sync_replicas` makes them new.
    With one partner at a time replicas never agree, and these are the means of their parameters.
    """
    engine = engine_of(module)
    engine.put_shards()
    state = own_state_dict(module)  # on every rank: all refuse the same
    full: dict[int, torch.Tensor] = {}
    for parameters in units_gathered(engine):
        if engine.is_first:
            full |= {id(shard_): whole.to("cpu", copy=True) for shard_, whole in parameters}
    if not engine.is_first:
        return {}
    for value in state.values():
        if isinstance(value, torch.Tensor) and id(value) not in full:
            full[id(value)] = value.to("cpu", copy=True)
    return {key: full.get(id(value), value) for key, value in state.items()}
