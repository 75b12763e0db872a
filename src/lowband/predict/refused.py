"""Which workloads are refused: those that cannot be, and those that are not predicted."""

import numpy as np

from lowband.errors import UserError
from lowband.predict.given import Given
from lowband.spec.axes import Ways, check_parts
from lowband.spec.context import check_context, check_layout
from lowband.spec.model import ModelSpec
from lowband.spec.tiers import HOST


def check(job: Given) -> None:
    """Raises UserError for impossible degrees or sizes, if the levels cannot serve the scheme, and for
    stages of which some have more layers of softmax."""
    for name in ("ranks", "micro_batch", "seq_len", "accumulation"):
        if np.min(getattr(job, name)) < 1:
            raise UserError(f"{name} {getattr(job, name)}", allowed="1 or more")
    if not job.imbalance >= 1:
        raise UserError(f"imbalance {job.imbalance}", allowed="1 or more")
    if not 0 <= job.recomputed <= 1 or (job.recomputed < 1 and job.axes.context * job.axes.expert > 1):
        what = f"{job.recomputed * job.model.layers:g} layers that are recomputed"
        allowed = f"1 to {job.model.layers}; with ranks along context or experts all"
        raise UserError(what, where=f"model '{job.model.name}'", allowed=allowed)
    for tier in job.beyond.tiers if job.beyond else ():
        job.machine.tier(tier)
    if job.stack.optimizer != "adamw" and job.placed is not None:
        raise UserError(
            f"states of {job.stack.optimizer} beyond the device are not predicted", allowed="adamw"
        )
    _check_offload(job)
    _check_resident(job)
    check_stages(job.model, job.axes)
    _check_adapters(job)
    _check_kept(job)
    levels = job.levels
    for length in {int(each) for each in np.ravel(job.seq_len)} if job.axes.context > 1 else ():
        check_layout(job.layout, job.axes, job.model, length)
    try:
        job.scheme.check(levels)
        check_context(job.axes, job.scheme, levels)
        job.axes.check_experts(job.model, job.scheme)
        check_parts(job.axes.route_parts, job.scheme, job.levels_alike.world)
        job.scheme.check(job.levels_alike)
    except UserError as error:
        where = f"{error.where} on machine '{job.machine.name}'"
        raise UserError(error.what, where=where, allowed=error.allowed) from None


def _check_offload(job: Given) -> None:
    given = job.beyond.offload if job.beyond else None
    if job.scheme.offload is None and given is None:
        return
    where = f"scheme '{job.scheme.name}'"
    if job.scheme.offload is not None and job.beyond is not None and job.beyond.optim is not None:
        raise UserError("offload beside --tiers optim", where=where, allowed="one of them")
    if job.axes.stages > 1 or job.axes.expert > 1:
        what = "offload in stages of a pipeline or with ranks along experts is not predicted"
        raise UserError(what, where=where, allowed="no offload")


def _check_resident(job: Given) -> None:
    if not job.scheme.resident:
        return
    where = f"scheme '{job.scheme.name}'"
    if job.beyond is not None and job.beyond.weights is not None:
        raise UserError("resident beside --tiers weights", where=where, allowed="one of them")
    if job.axes.stages > 1 or job.axes.expert > 1:
        what = "resident in stages of a pipeline or with ranks along experts is not predicted"
        raise UserError(what, where=where, allowed="no resident")


def check_stages(model: ModelSpec, axes: Ways) -> None:
    """Raises UserError for stages that have not the same kinds of layers."""
    if model.dense_layers and axes.is_uneven:
        what = "uneven stages of a model of which some layers have no experts are not predicted"
        raise UserError(what, where=f"model '{model.name}'", allowed="stages of equally many layers")
    every = model.softmax_every
    if every is None or axes.stages == 1:
        return
    if any(count % every for count in axes.blocks(model)):
        what = f"stages in which not every {every}-th layer is one of softmax are not predicted"
        allowed = f"stages of multiples of {every} layers"
        raise UserError(what, where=f"model '{model.name}'", allowed=allowed)


def _check_adapters(job: Given) -> None:
    if job.lora is None:
        return
    job.lora.check(job.model)
    axes = job.axes
    for what, is_there in (
        ("ranks along tensor, context, pipeline or experts",
         axes.tensor * axes.context * axes.stages * axes.expert > 1),
        ("states beyond the device", job.placed is not None),
        ("replicas that meet seldom", job.scheme.sync is not None),
        ("recomputation by operator", job.recompute == "op"),
        (f"{job.stack.products} products", job.stack.products != "bf16"),
        (job.stack.optimizer, job.stack.optimizer != "adamw"),
    ):  # fmt: skip
        if is_there:
            raise UserError(f"adapters with {what} are not predicted")


def _check_kept(job: Given) -> None:
    if job.recompute != "host":
        return
    job.machine.tier(HOST)
    if not job.can_keep_on_host:
        what = "activations on the host with other axes than data, experts, linear layers or adapters"
        raise UserError(f"{what} are not predicted")
