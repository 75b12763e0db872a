"""What the ranks of a composition of axes (`composed`) send in a step, by row and level, in closed form."""

from collections import Counter
from itertools import product

from composed import EMBED, HEAD, INNER, SPEC, B, Job, T, chain, plan

from lowband.cost.bytes import NORM_BYTES, transfers
from lowband.cost.contents import tensor_bytes
from lowband.cost.context import context_bytes
from lowband.cost.stages import CHECKSUM_BYTES
from lowband.spec.activations import TOKENS_COUNT
from lowband.spec.mesh import SELF, Mesh
from lowband.spec.partition import UnitLayout
from lowband.spec.run import RunSpec
from lowband.spec.schedule import stages
from lowband.spec.schedules import SCHEDULES
from lowband.spec.tensor import cut_shape
from tests.checkout import CONFIG


def expected_bytes(job: Job, step: int) -> Counter[tuple[str, str]]:
    """Of all ranks together. Rows of the pipeline's axis are not told apart by levels: theirs is empty."""
    found: Counter[tuple[str, str]] = Counter()
    mesh = Mesh.fit(INNER, job.axes.degrees(job.ranks))
    levels, along_tensor = mesh.levels("data"), mesh.levels("tensor")
    values, scheme = job.values, job.scheme
    tensor, data, pipeline, tokens = (
        values["tensor"],
        job.along_data,
        values["pipeline"],
        T // job.axes.context,
    )
    # data: each module of the chain is a unit
    alike = Mesh.fit(INNER, job.axes.with_experts(job.ranks)).levels("alike")
    of_all, of_experts = (
        _units(job, levels.world, of_experts=False),
        _units(job, alike.world, of_experts=True),
    )
    for units, on in ((of_all, levels), (of_experts, alike)):
        for (unit, times), _ in product(zip(units, _times(job), strict=True), range(tensor * data)):
            for each in transfers(unit, False, scheme, on, "fp32", "fp32") if unit else ():
                row = each.collective
                wide = 2 if row.carries == "weights" else 1  # fp64 where the formula has fp32
                often = times.get(row.name, 1)
                if row.name == "update_gather" and step == 0:
                    often = 0
                found[row.name, each.hop.level] += each.sent_bytes * wide * often
    if job.is_tied:  # two ranks of the pipeline have it, as their root
        found.update(_tied_bytes(job, step, data))
    held = NORM_BYTES
    for hop in reversed(levels.hops(SELF, scheme.level("replica"))):
        found["norm_gather", hop.level] += (hop.count - 1) * held * job.ranks
        held *= hop.count
    # tensor: of the whole model, so of all stages together
    micro_batches, optim = values["micro_batches"] * values["accumulation"], levels.size(scheme.optim)
    optims = optim, alike.size(scheme.optim)
    parts = tensor_bytes(job.spec, along_tensor, optims, job.axes, B, tokens, micro_batches, "fp32", True)
    for (level, row, _), sent in parts.items():
        wide = 1 if row in ("shared_reduce", "tensor_norm") else 2
        times = pipeline if row == "tensor_norm" else 1
        found[row, level] += round(sent * wide * times * tensor * data)
    # context: likewise; no loss asks how many tokens count, so that row is not there
    spec = RunSpec.model_construct(
        model=job.spec, scheme=job.scheme, machine=CONFIG.machine("local"), ranks=job.ranks, seq_len=T,
        micro_batch=B, accumulation=micro_batches, compute_dtype="fp32", recompute="none", **dict(job.axes),
    )  # fmt: skip
    for (level, row, _), sent in context_bytes(spec).items():
        if row != TOKENS_COUNT.name:
            found[row, level] += round(2 * sent * tensor * data)
    # pipeline: over levels that follow from the machine's sizes, here taken together
    if pipeline > 1:
        x = 8 * B * tokens * SPEC.hidden * micro_batches * tensor * data
        is_vee = SCHEDULES[values["schedule"]].in_a_vee
        crossed = stages(job.lists) - 1 - is_vee
        if values["sequence_parallel"]:  # tokens are divided before the second module of the chain
            is_whole = _modules_by_stage(stages(job.lists))[0] == 1
            found["stage_output", ""] = found["stage_grad", ""] = (crossed + is_whole) * x // tensor
        else:
            found["stage_output", ""] = found["stage_grad", ""] = crossed * x
        found["stages_norm", ""] = NORM_BYTES * (pipeline - 1) * job.ranks
    return +found


def _tied_bytes(job: Job, step: int, data: int) -> Counter[tuple[str, str]]:
    """Of a weight that the first and the last rank share: it stays gathered for the whole step, and each
    sends the other one its shard of the gradient and a checksum."""
    found: Counter[tuple[str, str]] = Counter()
    levels = Mesh.fit(INNER, job.axes.degrees(job.ranks)).levels("data")
    shape = cut_shape(EMBED, (SPEC.vocab, SPEC.hidden), plan(job), job.values["tensor"])
    numel, users = UnitLayout.of([shape], data).numel, 2 * job.values["tensor"] * data
    for each in transfers(numel, True, job.scheme, levels, "fp32", "fp32"):
        row, again = each.collective, job.values["accumulation"]
        wide = 2 if row.carries == "weights" else 1
        often = {"update_gather": min(step, 1), "grad_reduce": again, "forward_gather": again}.get(
            row.name, 1
        )
        found[row.name, each.hop.level] += each.sent_bytes * wide * often * users
    found["tied_reduce", ""] = users * (4 * numel // levels.size(job.scheme.optim) + CHECKSUM_BYTES)
    return found


def _units(job: Job, data: int, of_experts: bool) -> list[int]:
    """Elements of each module's unit on a tensor rank, without a tied weight; or of its experts' unit.

    0: it has none
    """
    untied, ranks = Job({**job.values, "tied": False}), job.axes.expert
    shapes = [
        {f"{i}.{n}": tuple(p.shape) for n, p in m.named_parameters()} for i, m in enumerate(chain(untied))
    ]
    tied = {EMBED, HEAD} if job.is_tied else set()
    cut = [
        [
            (shape[0] // ranks, *shape[1:]) if of_experts else cut_shape(n, shape, plan(job), job.axes.tensor)
            for n, shape in of.items()
            if n not in tied and (ranks > 1 and ".experts." in n) == of_experts
        ]
        for of in shapes
    ]
    return [UnitLayout.of(of_unit, data).numel if of_unit else 0 for of_unit in cut]


def _times(job: Job) -> list[dict[str, int]]:
    """By module of the chain, how often a step runs the rows that are not run once.

    In a pipeline weights come where a list comes to their stage, and go where it leaves it.
    """
    values, modules = job.values, SPEC.layers + 2
    again = values["accumulation"]
    if values["schedule"] == "none":
        every = again * values["micro_batches"]
        return [dict.fromkeys(("forward_gather", "backward_gather", "grad_reduce"), every)] * modules
    gathered: Counter[tuple[int, str]] = Counter()
    for of_rank in job.lists:
        stage, needs = None, True
        for action in of_rank:
            if action.stage != stage:
                stage, needs = action.stage, True
            if needs and action.kind != "weight":
                needs = False
                gathered[stage, "forward_gather" if action.kind == "forward" else "backward_gather"] += again
    in_stages = _modules_by_stage(stages(job.lists))
    of_module = [stage for stage, count in enumerate(in_stages) for _ in range(count)]
    names = ("forward_gather", "backward_gather")
    return [{"grad_reduce": again, **{n: gathered[stage, n] for n in names}} for stage in of_module]


def _modules_by_stage(count: int) -> list[int]:
    """As evenly as possible, the first stages one more."""
    size, more = divmod(SPEC.layers + 2, count)
    return [size + (stage < more) for stage in range(count)]
