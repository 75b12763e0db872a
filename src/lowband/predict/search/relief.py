"""What a search tries besides where memory is short: some layers recomputed, optimizer states on the host.

A plan whose first row recomputes nothing, lies on the device and surely fits needs neither, and has neither:
both only cost time.

    layers  recomputed of each stage, or with activations on the host: 1 to all but one, at most seven
            numbers, evenly; and every n-th of a rank's, n at most 8, as torchtitan does
    host    the optimizer's states on the host, with every kind of recomputation, of a machine that states how
            fast its host updates them
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowband.cost.tiers import Beyond
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec
from lowband.spec.step import Recompute

PARTS = 8  # of a stage's layers, of which none, one ... are recomputed
OFTEN = range(2, 9)  # every how-many-th layer is recomputed
HOST = Beyond(optim="host")


def in_parts(model: ModelSpec, axes: Ways) -> list[int]:
    """How many of the layers may be recomputed, without none and all. Where stages are uneven each recomputes
    equally many, which is a part of the longest one's that is less by at most two layers of the model's."""
    if axes.context * axes.expert > 1:  # not predicted
        return []
    longest = max(axes.layers, default=model.layers // axes.stages)
    of_stage = {max(1, i * longest // PARTS) for i in range(1, PARTS)} if longest > 1 else set()
    found = {axes.stages * count for count in of_stage}
    if not axes.is_uneven:
        found |= {axes.pipeline * (model.layers // axes.pipeline // n) for n in OFTEN}
    return sorted(count for count in found if 0 < count < model.layers)


def relieved(base: Workload, recompute: Sequence[Recompute], fits: bool) -> Iterator[Workload]:
    """Jobs in place of one. recompute: what is tried, of all layers

    fits: whether anything does; else nothing does that recomputes some layers in place of all
    """
    layers = in_parts(base.model, base.axes) if fits and "none" in recompute else []
    parts = [n / base.model.layers for n in layers]
    partly = [base.varied(recompute="full", recomputed=part) for part in parts if "full" in recompute]
    yield from partly
    if "host" in recompute and _keeps_on_host(base):
        yield from (base.varied(recompute="host", recomputed=part) for part in parts)
    host = base.machine.tiers.get("host")
    if host is None or host.update_gigabytes_per_s is None:
        return
    if base.placed is None and base.lora is None and base.stack.optimizer == "adamw":
        for one in (*kinds(base, [each for each in recompute if each != "host"]), *partly):
            yield one.varied(beyond=HOST)


def kinds(base: Workload, recompute: Sequence[Recompute]) -> list[Workload]:
    """The job with each kind of recomputation. A fused kernel keeps no scores to recompute, and activations
    are kept on the host where the machine states its rates and a run could keep them there."""
    possible = {"selective": base.stack.attention == "plain", "host": _keeps_on_host(base)}
    tried = [each for each in recompute if possible.get(each, True)]
    if base.lora is not None:  # with which not every kind is predicted
        return [replace(base, recompute=each) for each in tried]
    return [base.varied(recompute=each) for each in tried]


def _keeps_on_host(base: Workload) -> bool:
    return "host" in base.machine.tiers and base.can_keep_on_host
