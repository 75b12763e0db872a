"""The predictor: closed forms by hand, monotonic in its links, and the planner against brute force."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.cost.bytes import sent_bytes, stage_numels, transfers
from lowband.cost.collectives import Network
from lowband.cost.flops import attention_flops_per_token, block_matmul_flops_per_token, head_flops_per_token
from lowband.errors import UserError
from lowband.evidence.validation.scale_model import box_step_s
from lowband.predict.prediction import predict
from lowband.predict.request import Grid, sequence
from lowband.predict.search.candidates import KNOBS, Candidate
from lowband.predict.search.degrees import axes_to_try
from lowband.predict.search.plan import RECOMPUTE, jobs, plan
from lowband.predict.show.plan_files import write
from lowband.predict.show.point_text import text
from lowband.predict.show.record import record
from lowband.predict.time import StepTime, step_time
from lowband.predict.workload import Workload, workload_of
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.mesh import SELF, WORLD, Joined, Levels
from lowband.spec.sourced import Fact
from lowband.spec.stack import OURS, Stack
from lowband.spec.tiers import TIERS
from tests.checkout import CONFIG, ROOT

FRONTIER = CONFIG.machine("frontier")
SCHEMES = sorted(name for name in CONFIG.schemes if CONFIG.scheme(name).machine_levels <= set(FRONTIER.sizes))
ZERO = CONFIG.stack_on("deepspeed-zero", "frontier")


def job(
    scheme: str = "hier3", machine: Machine = FRONTIER, stack: Stack = ZERO, **changes: object
) -> Workload:
    given_ = {"ranks": 64, "micro_batch": 1, "seq_len": 2048, "accumulation": 4, **changes}
    model, placed = CONFIG.model("gpt-20b"), CONFIG.scheme(scheme)
    return Workload(machine, stack, model, placed, **given_)  # type: ignore[arg-type]


def test_what_suites_cannot_say_is_not_written(tmp_path: Path) -> None:
    one = job(recompute="none", axes=Ways(tensor=2))
    one = replace(one, model=one.model.model_copy(update={"name": "odd", "vocab": 257}))
    with pytest.raises(UserError, match="257 rows of the vocabulary cannot be divided over tensor 2"):
        write(Candidate((), one, 1, 4, 1.0, 0.0), "found", Config(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transfers_add_up_to_the_bytes_sent(scheme: str) -> None:
    one = job(scheme)
    numels = stage_numels(one.model, one.levels)
    sent = sent_bytes(numels, one.scheme, one.levels, "bf16", "bf16", 4, is_clipped=False)
    total = sum(
        t.sent_bytes * {"pass": 4, "step": 1, "sync": 1 / one.scheme.period}[t.collective.every]
        for i, n in enumerate(numels)
        for t in transfers(n, i == 0, one.scheme, one.levels, "bf16", "bf16")
    )
    assert total == pytest.approx(
        sum(size for (level, *_), size in sent.items() if level not in TIERS),  # copies are no transfers
        rel=1e-12,
    )


def test_units_in_one_bucket_share_the_fixed_time_of_a_reduction_by_hand() -> None:
    """5M parameters in 7 units under ddp share one bucket: one all-reduce, there and back over 3 levels."""
    fixed = OURS.model_copy(update={"collective_us": Fact(value=1e6, source="test")})
    small = replace(job("ddp", stack=fixed), model=CONFIG.model("gpt-5m"), seq_len=128)
    assert step_time(small).lane["replica_reduce"] == pytest.approx(2 * 3 * 1.0, rel=0.01)
    large = step_time(job("ddp", stack=fixed)).lane["replica_reduce"]
    assert large == pytest.approx(2 * 3 * (1 + CONFIG.model("gpt-20b").layers), rel=0.1)


def test_replicas_that_meet_seldom_by_hand() -> None:
    """DiLoCo on 8 nodes of 8: an exchange sends 2 x 4 N / 8 x 7/8 bytes per rank, every 100 steps."""
    one = job("diloco")
    numel, sync = sum(stage_numels(one.model, one.levels)), one.scheme.sync
    assert sync is not None
    found = record(one, predict(one))
    assert found["memory_bytes"]["anchor"] == 4 * numel // 8
    assert found["memory_bytes"]["outer"] == 4 * numel // 64
    sent = {"sent_bytes": numel * 7 // 8, "most_at_once_bytes": numel * 7 // 8}
    assert found["sync"] == {"replica_ranks": 8, "every": 100, "fragments": 1, "delay": 0, **sent}
    assert "replicas of 8 ranks exchange weights every 100 steps" in text(found)
    assert found["communication_s"]["replica_reduce"] == 0
    often = replace(one, scheme=one.scheme.model_copy(update={"sync": sync.model_copy(update={"every": 1})}))
    seldom_s, often_s = (step_time(each).items["exposed_sync_reduce"] for each in (one, often))
    assert often_s == pytest.approx(100 * seldom_s)
    slowest = Network(FRONTIER, ZERO).rate("world")
    assert often_s == pytest.approx(numel * 7 / 8 / slowest, rel=0.02)  # the rest is fixed times


def test_exchanges_that_arrive_late_by_hand() -> None:
    """Streaming DiLoCo on 8 nodes of 8: a tenth of the units at once, and what a step hides of it."""
    one = job("streaming-diloco")
    numels, sync = stage_numels(one.model, one.levels), one.scheme.sync
    assert sync is not None
    found = record(one, predict(one))
    fragments = [sum(numels[fragment::10]) for fragment in range(10)]
    assert found["memory_bytes"]["in_flight"] == 4 * max(fragments) // 8
    per_value = (1 / 2 + 4 / one.scheme.block_size) * 2 / 8 * 7 / 8  # INT4 and scales; there and back
    assert found["sync"]["sent_bytes"] == pytest.approx(sum(numels) * per_value, rel=1e-3)
    assert found["sync"]["most_at_once_bytes"] == pytest.approx(max(fragments) * per_value, rel=1e-3)
    assert "every 100 steps, in 10 fragments in turn, which arrive 1 step(s) later, " in text(found)

    def step(stack: str, link: float, **sync_of: int) -> StepTime:
        scheme = one.scheme.model_copy(update={"sync": sync.model_copy(update=sync_of)})
        placed = CONFIG.stack_on(stack, "frontier")
        return step_time(replace(one, scheme=scheme, stack=placed, faster={"world": link}))

    def waits(stack: str, link: float, **sync_of: int) -> float:
        return float(step(stack, link, **sync_of).items["exposed_sync_reduce"])

    overlap, at_once = 0.874, waits("fsdp", 1, delay=0)
    assert at_once == pytest.approx(waits("fsdp", 1, delay=0, fragments=1))
    assert waits("fsdp", 1, delay=1) == pytest.approx((1 - overlap) * at_once)  # shorter than a step
    hides_nothing = [waits("deepspeed-zero", 1, delay=delay) for delay in (0, 1)]
    assert hides_nothing[1] == pytest.approx(hides_nothing[0])
    at_once, whole = waits("fsdp", 1e-4, delay=0), step("fsdp", 1e-4, delay=0)  # longer than ten steps
    each = float(whole.total) - at_once
    for delay in (1, 2, 10, 20):  # the next fragment's exchange starts after ten steps
        late = at_once - 10 * overlap * min(delay, 10) * each / 100
        assert waits("fsdp", 1e-4, delay=delay) == pytest.approx(late)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("stages", [1, 4])
def test_time_items_add_up(scheme: str, stages: int) -> None:
    step = step_time(job(scheme, axes=Ways(tensor=2, pipeline=stages)))
    assert sum(step.items.values()) == pytest.approx(step.total)
    assert all(seconds >= -1e-12 for seconds in step.items.values())


def test_a_runs_order_decides_how_often_its_units_are_gathered() -> None:
    """Breadth-first, four micro-batches send what one sends, and hide more of it than depth-first."""
    [spec, *_] = CONFIG.runs(["frontier"])
    runs = [spec.model_copy(update={"accumulation": n, "order": o}) for n, o in ((1, "depth"), (4, "depth"))]
    one, depth = (workload_of(run) for run in runs)
    breadth = workload_of(spec.model_copy(update={"accumulation": 4, "order": "breadth"}))
    assert (one.passes, depth.passes, breadth.passes) == (1, 4, 1)
    assert step_time(breadth).lane == pytest.approx(step_time(one).lane)
    assert step_time(breadth).total < step_time(depth).total
    assert step_time(breadth).items["forward"] == step_time(depth).items["forward"]


def test_a_ring_by_hand() -> None:
    """16 ranks on 2 nodes of Frontier, 1 GB: the package's, node's and NICs' steps, and the slowest rate."""
    network = Network(FRONTIER, ZERO, shards=False)
    hops = Levels.fit({"package": 2, "node": 8}, 16).hops(SELF, WORLD)
    sent = 1e9 * 15 / 16
    slowest = min(200e9 * 0.737, 50e9 * 0.78 * 2, 12.5e9 * 0.75 * 8)
    steps = 8 * 1 * 3.6e-6 + 2 * 3 * 3.6e-6 + 1 * 19.8e-6
    assert network.ring_s(hops, sent) == pytest.approx(17e-6 + steps + sent / slowest)
    assert network.ring_s(hops, sent, pieces=4) == pytest.approx(4 * (17e-6 + steps) + sent / slowest)
    assert network.ring_s(hops, sent, rounds=2) == pytest.approx(17e-6 + 2 * steps + sent / slowest)


def test_a_flat_all_reduce_takes_its_rings_steps_twice() -> None:
    """A ring reduces in one round and gathers in another."""
    network = Network(FRONTIER, ZERO, own="flat")
    levels = Levels.fit({"package": 2, "node": 8}, 16)
    parts = transfers(10**6 * 16, False, CONFIG.scheme("ddp"), levels, "fp32", "fp32")
    assert {part.collective.kind for part in parts} == {"all_reduce"}
    hops = levels.hops(SELF, WORLD)
    sent = sum(part.sent_bytes for part in parts)
    assert network.collective_s(parts) == pytest.approx(network.ring_s(hops, sent, rounds=2), rel=1e-12)


def test_an_all_reduce_hop_by_hop() -> None:
    """Along tensor, 16 ranks of Frontier: in and out again, each hop on what those inside have left."""
    network = Network(FRONTIER, ZERO, shards=False, own="hops")
    hops = Levels.fit({"package": 2, "node": 8}, 16).hops(SELF, WORLD)
    package = 17e-6 + 3.6e-6 + 1e9 / 2 / (200e9 * 0.737)
    node = 17e-6 + 3 * 3.6e-6 + 0.5e9 * 3 / 4 / (50e9 * 0.78)
    world = 17e-6 + 19.8e-6 + 0.125e9 / 2 / (12.5e9 * 0.75)
    assert network.all_reduce_s(hops, 1e9) == pytest.approx(2 * (package + node + world))
    flat = Network(FRONTIER, ZERO, shards=False)
    assert flat.all_reduce_s(hops, 1e9) == flat.ring_s(hops, 2e9 * 15 / 16, rounds=2)


@pytest.mark.parametrize("box", [True, False])
def test_the_runs_own_collectives_decide(box: bool) -> None:
    """Frontier and its box name a stack with flat rings: it does not matter for a run of our engine."""
    suite = "links" if box else "frontier"
    spec = next(s for s in CONFIG.runs([suite]) if s.engine == "lowband" and s.scheme.name == "zero3")
    spec = spec.model_copy(update={"overlap": False})
    time, memory = {}, {}
    for pattern in ("hops", "flat", "joined"):
        run = spec.model_copy(update={"collectives": pattern})
        one = workload_of(run)
        found = Network(one.machine, one.stack, own=one.collectives)
        parts = [
            t for t in transfers(10**6 * spec.ranks, False, one.scheme, one.levels, "fp32", "fp32")
            if t.collective.name == "forward_gather"
        ]  # fmt: skip
        hops = [t.hop for t in sorted(parts, key=lambda t: t.hop.stride)]
        sent = sum(t.sent_bytes for t in parts)
        by_hand = {
            "flat": found.ring_s(hops, sent),
            "hops": sum(found.hop_s(t.hop, t.sent_bytes) for t in parts),
            "joined": found.joined_s(Joined(tuple(hops)), sent),
        }
        assert found.collective_s(parts) == pytest.approx(by_hand[pattern], rel=1e-12)
        memory[pattern] = predict(one).memory_bytes["buffers"]
        time[pattern] = box_step_s(run) if box else predict(one).communication_s["forward_gather"]
    assert len(set(time.values())) == 3
    assert memory["flat"] == memory["joined"] > memory["hops"]


def test_without_overlap_every_lane_second_is_exposed() -> None:
    """Frontier's stack hides nothing: exposed time is the lane's, collective by collective."""
    step = step_time(job("zero3"))
    assert {name for name, seconds in step.lane.items() if seconds} == {
        "forward_gather", "backward_gather", "grad_reduce",
    }  # fmt: skip
    for name, seconds in step.lane.items():
        assert step.items[f"exposed_{name}"] == pytest.approx(seconds)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    level=st.sampled_from(["package", "node", "world"]),
    factor=st.floats(1, 50),
    overlap=st.floats(0, 1),
    ranks=st.sampled_from([8, 16, 64, 384]),
    tensor=st.sampled_from([1, 2, 8]),
)
def test_more_bandwidth_is_never_slower(
    scheme: str, level: str, factor: float, overlap: float, ranks: int, tensor: int
) -> None:
    stack = ZERO.model_copy(update={"overlap": Fact(value=overlap, source="drawn")})
    base = job(scheme, FRONTIER, stack, ranks=ranks, axes=Ways(tensor=tensor))
    before = step_time(base).total
    assert step_time(replace(base, faster={level: factor})).total <= before * (1 + 1e-12)


@pytest.mark.parametrize("scheme", ["zero3", "hier3"])
def test_a_grid_is_its_points(scheme: str) -> None:
    batches, passes = np.array([1, 2, 8]), np.array([4, 1, 2])
    grid = predict(job(scheme, micro_batch=batches, accumulation=passes))
    for i in range(3):
        one = predict(job(scheme, micro_batch=int(batches[i]), accumulation=int(passes[i])))
        assert grid.step_time_s[i] == pytest.approx(float(one.step_time_s), rel=1e-12)
        assert grid.peak_memory_bytes[i] == pytest.approx(float(one.peak_memory_bytes), rel=1e-12)
        assert one.step_time_fast_s <= one.step_time_s <= one.step_time_slow_s


def test_pipeline_bubble_by_hand() -> None:
    """(p - 1) / (v m) of the blocks' time, where nothing is sent (Narayanan et al., section 2.2)."""
    machine = Machine.model_validate(
        {
            "name": "bare", "description": "peak only",
            "device": {"name": "d", "peak_tflops": {"bf16": 100}, "source": "made up"},
            "levels": [{"name": "world", "link": {"gigabytes_per_s": 1e9, "source": "made up"}}],
        }
    )  # fmt: skip
    axes = Ways(pipeline=4, chunks=11)
    step = step_time(job("ddp", machine, OURS, ranks=4, axes=axes, accumulation=8, recompute="none"))
    head = 3 * 2048 * 2 * 6144 * 50432 / 100e12 * 8
    blocks = step.items["forward"] + step.items["backward"] - head
    assert step.items["bubble"] == pytest.approx(3 / (11 * 8) * blocks, rel=1e-6)


@pytest.mark.parametrize(
    ("tensor", "pipelines"), [([1], [1]), pytest.param([1, 2], [1, 2], marks=pytest.mark.wide)]
)
def test_the_planner_equals_brute_force(tensor: list[int], pipelines: list[int]) -> None:
    """Over all schemes. In stages with few of them: test_plan_axes.py."""
    model = CONFIG.model("gpt-1m")
    axes = axes_to_try(FRONTIER, model, tensor, pipelines)
    found = plan(FRONTIER, ZERO, model, 16, 128, 64, axes, [1, 4], within=np.inf)
    brute = []
    for batches in jobs(FRONTIER, ZERO, model, 16, 128, 64, axes, [1, 4]):
        for b, a in zip(batches.micro_batch, batches.accumulation, strict=True):
            p = predict(replace(batches, micro_batch=int(b), accumulation=int(a)), interval=False)
            if p.fits:
                brute.append(float(p.step_time_s))
    assert found.ranked[0].step_time_s == pytest.approx(min(brute), rel=1e-12)
    assert len(found.ranked) == len(brute)
    # What it claims to cover: every ordered placement of 4 levels, and both ways to recompute.
    placements = {c.knobs[:4] for c in found.ranked if c.job.levels.world == 16}
    names = [SELF, "package", "node", WORLD]
    assert placements == {
        (names[i], inner, names[j], names[k])
        for i in range(4)
        for j in range(i, 4)
        for k in range(j, 4)
        for inner in (None, *names[:i])
    }
    assert {c.knobs[KNOBS.index("recompute")] for c in found.ranked} == set(RECOMPUTE) - {"selective"}


@pytest.mark.parametrize("stack", [OURS, ZERO], ids=lambda stack: stack.name)
def test_each_row_of_a_plan_is_what_is_predicted_in_its_order(
    stack: Stack, request: pytest.FixtureRequest
) -> None:
    """Of every third, with --wide of all."""
    model = CONFIG.model("gpt-1m")
    found = plan(FRONTIER, stack, model, 16, 128, 64, [Ways()], recompute=["full"], within=np.inf)
    assert {(one.job.order, one.accumulation) for one in found.ranked} == {
        ("depth", 1), ("depth", 2), ("depth", 4), ("breadth", 2), ("breadth", 4)
    }  # fmt: skip
    for one in found.ranked[:: 1 if request.config.getoption("--wide") else 3]:
        knobs = dict(zip(KNOBS, one.knobs, strict=True))
        direct = Workload(
            FRONTIER, stack, model, one.job.scheme, 16, knobs["micro_batch"], 128, 4 // knobs["micro_batch"],
            axes=Ways(schedule=knobs["schedule"]), recomputed=knobs["recomputed"], beyond=knobs["beyond"],
        )  # fmt: skip
        p = predict(direct, interval=False)
        assert one.step_time_s == pytest.approx(float(p.step_time_s), rel=1e-12)
        assert p.peak_memory_bytes == predict(one.job, interval=False).peak_memory_bytes


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    text = (ROOT / "slurm" / "frontier" / "machine.yaml").read_text()
    for good, bad, words in (
        ("gigabytes_per_s: 12.5", "gigabytes_per_s: -12.5", "gigabytes_per_s"),
        ('source: "OLCF Frontier user guide: 1.6 TB/s per GCD"', "", "source"),
        ("low: 0.6, high: 0.9", "low: 0.8, high: 0.9", "low <= value <= high"),
    ):
        file = tmp_path / "machine.yaml"
        file.write_text(text.replace(good, bad, 1))
        with pytest.raises(UserError, match=words):
            CONFIG.given_machine(str(file))
    with pytest.raises(UserError, match=r"GiB short per rank \(optim"):
        plan(FRONTIER, ZERO, CONFIG.model("gpt-1t"), 16, 2048, 64, [Ways()], [1], ["full"])
    with pytest.raises(UserError, match="no multiple of tensor 3"):
        job(axes=Ways(tensor=3))


def test_one_json_object() -> None:
    [record] = Grid(
        CONFIG, "frontier", ["gpt-20b"], ["hier3"], [384], [1], [4], [2048], ["full"]
    ).records()  # fmt: skip
    assert {"step_time_s", "tflops_per_gpu", "hfu_tflops_per_gpu", "tokens_per_s_per_gpu", "fits"} <= set(
        record
    )
    assert sum(record["time_s"].values()) == pytest.approx(record["step_time_s"])
    assert record["interval"]["step_time_s"][0] <= record["step_time_s"]


def test_a_box_without_links_to_wait_for_takes_its_products_time() -> None:
    spec = next(spec for spec in CONFIG.runs(["box"]) if spec.scheme.name == "hier3")
    levels = [
        level.model_copy(update={"link": level.link.model_copy(update={"gigabytes_per_s": 1e12})})
        for level in spec.machine.levels
    ]
    fast = spec.model_copy(update={"machine": spec.machine.model_copy(update={"levels": tuple(levels)})})
    model, box = spec.model, spec.machine.box
    block = block_matmul_flops_per_token(model) + attention_flops_per_token(model, spec.seq_len)
    flop = 3 * (model.layers * block + head_flops_per_token(model)) * spec.tokens_per_step / spec.ranks
    assert box_step_s(fast) == pytest.approx(flop / (box.tflops * 1e12) * box.scale)
    # On the real links it takes longer, without overlap longer still; a machine has no such prediction.
    serial = spec.model_copy(update={"overlap": False})
    assert box_step_s(fast) < box_step_s(spec) < box_step_s(serial)
    assert box_step_s(next(iter(CONFIG.runs(["smoke"])))) is None


def test_a_sequence_is_at_most_the_models() -> None:
    model = CONFIG.model("gpt-20b")
    assert [sequence(model, given) for given in (None, 1, model.seq_len)] == [model.seq_len, 1, model.seq_len]
    with pytest.raises(UserError, match="seq 2049 is longer than the longest of 'gpt-20b'") as refused:
        sequence(model, model.seq_len + 1)
    assert refused.value.allowed == "2048 at most"


def test_a_too_long_sequences_refusal_names_a_longer_model_of_the_same_shape() -> None:
    model, own = CONFIG.model("llama-3-8b"), CONFIG.model("llama-3-8b").model_copy(update={"name": "mine"})
    for one in model, own:
        with pytest.raises(UserError) as refused:
            sequence(one, 131072)
        assert refused.value.allowed == "8192 at most, or --model llama-3.1-8b"
    with pytest.raises(UserError) as refused:
        sequence(model, 131073)
    assert refused.value.allowed == "8192 at most"


def test_the_runs_own_tensor_ranks_divide_the_tokens_where_it_says_so() -> None:
    """Then each of them holds its part of what lies between the products."""
    run = CONFIG.runs(["frontier"])[0].model_copy(update={"tensor": 2})
    one, divided = (workload_of(run.model_copy(update={"sequence_parallel": sp})) for sp in (False, True))
    assert one.axes.outside == 1
    assert divided.axes.outside == 2
    activations = [predict(job).memory_bytes["activations"] for job in (one, divided)]
    assert activations[1] < activations[0]
