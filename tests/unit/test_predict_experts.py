"""What the predictor says of experts: bytes and states of a run, times by hand, limits."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from machines import SIZES, fact, machine

from lowband.cost.activations import kept_bytes_per_token
from lowband.cost.bytes import sent_bytes
from lowband.cost.collectives import Network
from lowband.cost.compute import Computer, work
from lowband.cost.contents import step_bytes
from lowband.cost.experts import hit
from lowband.cost.flops import block_matmul_flops_per_token, expert_elements, uncut_flops_per_token
from lowband.cost.held import held_bytes
from lowband.errors import UserError
from lowband.evidence.validation.scale_model import box_step_s
from lowband.predict.experts import experts_sent, route_waits
from lowband.predict.footprint import memory_items
from lowband.predict.place import alike, places
from lowband.predict.prediction import predict
from lowband.predict.time import step_time
from lowband.predict.workload import Workload, workload_of
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.spec.stack import OURS
from tests.checkout import CONFIG

MODEL = ModelSpec(
    name="small", layers=4, hidden=64, heads=8, vocab=128, seq_len=4096, experts=8, top_k=2, expert_hidden=96,
    shared_experts=1, source="none",
)  # fmt: skip
RUN = CONFIG.runs(["context"])[0]
ROUTES = ["flat", "hops", "merged"]


def job(expert: int = 8, route: str = "merged", scheme: str = "ddp", **changes: Any) -> Workload:
    given = {"model": MODEL, "machine": machine(), "ranks": 8, "micro_batch": 1, "seq_len": 256} | changes
    axes = given.pop("axes", Ways(expert=expert, route=route))
    return Workload(stack=OURS, scheme=CONFIG.scheme(scheme).on(list(SIZES)), axes=axes, **given)


def run(**changes: Any) -> RunSpec:
    given = {"model": MODEL.model_dump(), "ranks": 8, "context": 1, "seq_len": 256, "micro_batch": 2}
    given["machine"] = machine().model_dump()
    return RunSpec.parse({**RUN.model_dump(), "context_attention": "ring", **given, **changes}, "test")


# ---- bytes and states


@pytest.mark.parametrize("scheme", ["ddp", "zero3", "hier3"])
@pytest.mark.parametrize(("expert", "route"), [(1, "merged"), (4, "flat"), (4, "merged"), (8, "hops")])
def test_bytes_and_states_are_those_of_a_run(scheme: str, expert: int, route: str) -> None:
    """`step_bytes` is what the engine counts (tests/dist)."""
    placed = CONFIG.scheme(scheme).on(list(SIZES))
    of = {"scheme": placed.model_dump(), "recompute": "full", "accumulation": 3, "compute_dtype": "bf16"}
    spec = run(expert=expert, route=route, **of)
    one = workload_of(spec)
    place, sent = alike(one), Counter(experts_sent(one))
    units = (place.numels, one.levels, True), (place.expert_numels, one.levels_alike, False)
    for numels, levels, is_clipped in units:
        if numels:
            sent.update(
                sent_bytes(
                    numels, placed, levels, "bf16", spec.reduce_dtype, 3, is_clipped, spec.collectives,
                    order=spec.order,
                )
            )  # fmt: skip
    assert {key: n for key, n in sent.items() if n} == pytest.approx(step_bytes(spec))
    found, closed = memory_items(one), held_bytes(spec, "nccl", with_start=True)
    assert {kind: found[kind] for kind in closed} == closed


@pytest.mark.parametrize("route", ROUTES)
def test_bytes_of_copies_are_those_of_a_run(route: str) -> None:
    spec = run(expert=8, route=route, copies=3, recompute="full")
    routes = {key: n for key, n in step_bytes(spec).items() if key[1].startswith(("route", "expert"))}
    assert experts_sent(workload_of(spec)) == routes
    assert any(row == "expert_copies" for _, row, _ in routes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_layers_with_experts_are_sent_to(ranks: int) -> None:
    """Three of four have experts; the mean rank of a pipeline sends its part of what all have."""
    model = MODEL.model_copy(update={"dense_layers": 1, "mlp_hidden": 96})
    whole, part = (
        sum(experts_sent(job(8, model=model, ranks=8 * p, axes=Ways(pipeline=p, expert=8))).values())
        for p in (1, ranks)
    )
    assert part == pytest.approx(whole / ranks) and whole > 0


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("stages", [{}, {"layers": (3, 1)}])
def test_bytes_of_routes_in_stages_are_those_of_a_run(stages: dict[str, Any], tensor: int) -> None:
    spec = run(
        pipeline=2, expert=2, tensor=tensor, sequence_parallel=tensor > 1, accumulation=4, schedule="1f1b",
        recompute="full", model={**MODEL.model_dump(), "tied_head": False}, **stages,
    )  # fmt: skip
    one = workload_of(spec)
    routes = {key: n for key, n in step_bytes(spec).items() if key[1].startswith(("route", "experts"))}
    assert experts_sent(one) == routes
    assert routes
    parts = places(one) if stages else [alike(one)]
    assert all(place.experts == 4 * 2 * 64 * 96 for place in parts)


# ---- time


def waits(one: Workload, products_s: float = 0.0) -> Any:
    return route_waits(one, alike(one), Network(one.machine, one.stack, shards=False), products_s)


def test_routes_by_hand() -> None:
    """Eight ranks, an expert each, two of them a token; rates of 4, 2 and 1 GB/s, 256 tokens of 128 bytes."""
    slow, tokens = machine(latency_us=5), 256
    flat = waits(job(8, "flat", machine=slow, recompute="none"))
    # Of 7 partners one is in the package, two in the node, four beyond.
    exchange = 7 * 5e-6 + (tokens * 2 * 128 / 8) * (1 / 4e9 + 2 / 2e9 + 4 / 1e9)
    assert flat.lane["route_out"] == pytest.approx(4 * exchange)
    assert flat.backward == pytest.approx(2 * exchange)
    counts = 7 * 5e-6 + 8 * (1 / 4e9 + 2 / 2e9 + 4 / 1e9)
    pairs = 7 * 5e-6 + (tokens * 2 * 4 / 8) * (1 / 4e9 + 2 / 2e9 + 4 / 1e9)
    assert flat.forward == pytest.approx(2 * exchange + counts + pairs)
    hops = waits(job(8, "hops", machine=slow, recompute="none"))
    by_hop = 3 * 5e-6 + (tokens * 2 * 128 / 2) * (1 / 4e9 + 1 / 2e9 + 1 / 1e9)
    assert hops.backward == pytest.approx(2 * by_hop)
    merged = waits(job(8, "merged", machine=slow, recompute="none"))
    rows = [n * hit(8, 2, 2 * n) for n in (1, 2, 4)]
    assert rows == [1 - Fraction(6, 28), 2 * (1 - Fraction(15, 28)), 4 * (1 - Fraction(21, 28))]
    once = 3 * 5e-6 + tokens * 128 * sum(float(r) / v for r, v in zip(rows, (1e9, 2e9, 4e9), strict=True))
    weights = 3 * 5e-6 + (tokens * 2 * 4 / 2) * (1 / 4e9 + 1 / 2e9 + 1 / 1e9)
    assert merged.backward == pytest.approx(2 * once + weights)
    assert once < by_hop


def test_in_parts_only_the_first_way_and_the_last_are_waited_for() -> None:
    """Behind experts that take long; each part has a start-up of its own, in the backward, too."""
    slow = {"machine": machine(latency_us=5), "recompute": "none"}
    whole, parts = (waits(job(axes=Ways(expert=8, route="flat", route_parts=n), **slow), 9.0) for n in (1, 4))
    started = (whole.forward + 3 * 4 * 7 * 5e-6 + 3 * 8 * (1 / 4e9 + 2 / 2e9 + 4 / 1e9)) / 4
    assert parts.forward == pytest.approx(started)
    assert parts.backward == pytest.approx((whole.backward + 3 * 2 * 7 * 5e-6) / 4)
    assert parts.lane["route_out"] == pytest.approx(whole.lane["route_out"] + 4 * 3 * 7 * 5e-6)
    # Where experts take no time, parts only cost.
    idle = waits(job(axes=Ways(expert=8, route="flat", route_parts=4), **slow))
    assert idle.forward == pytest.approx(4 * started)


def test_a_recomputed_forward_travels_again() -> None:
    alone, again = waits(job(recompute="none")), waits(job(recompute="full"))
    assert again.forward == alone.forward
    assert again.backward == pytest.approx(alone.backward + alone.forward)
    assert again.lane["route_out"] == pytest.approx(2 * alone.lane["route_out"])
    assert again.lane["route_out_grad"] == alone.lane["route_out_grad"]
    found = step_time(job(recompute="full", accumulation=3)).items["experts"]
    assert found == pytest.approx(3 * 4 * (again.forward + again.backward) + again.once)


def test_experts_at_home_wait_for_nothing() -> None:
    """But for the loads, which all ranks sum."""
    one = waits(job(1))
    assert (one.forward, one.backward) == (0, 0)
    assert one.once > 0
    assert step_time(job(1)).items["experts"] == one.once
    assert waits(job(1, ranks=1)).once == 0


def test_products_are_of_what_a_token_meets() -> None:
    """Without links and memory time is FLOPs: two experts of eight, a shared one and the router."""
    computer = Computer(machine(), "bf16")
    found = work(computer, MODEL, 1, 256, "none", "flash", Ways(expert=8))
    met = 4 * 64 * 64 + 3 * 2 * 64 * 96 + 8 * 64
    assert block_matmul_flops_per_token(MODEL) == 2 * met
    assert found.weight == pytest.approx(256 * 2 * met / 1e12)
    assert uncut_flops_per_token(MODEL) == (2 * (2 * 64 * 96 + 8 * 64), 2 * 2 * 2 * 64 * 96)
    cut = work(computer, MODEL, 1, 256, "none", "flash", Ways(tensor=2, expert=4, sequence_parallel=False))
    assert cut.weight == pytest.approx(256 * 2 * (met - 2 * 64 * 64) / 1e12)


def test_few_rows_wait_for_weights() -> None:
    """Of one token a rank reads its experts whole: an eighth of them, or all."""
    rate = {"memory_gigabytes_per_s": fact(1.0)}
    computer = Computer(machine(**rate), "bf16")
    read = {ep: work(computer, MODEL, 1, 1, "none", "flash", Ways(expert=ep)).weight for ep in (1, 8)}
    one = 2 * expert_elements(MODEL) / 1e9
    assert read[1] - read[8] == pytest.approx(7 * one)
    many = work(computer, MODEL, 1, 2**16, "none", "flash", Ways(expert=8)).weight
    assert many == pytest.approx(2**16 * block_matmul_flops_per_token(MODEL) / 1e12)


def test_rows_of_the_fullest_rank_move_through_its_memory() -> None:
    computer = Computer(machine(memory_gigabytes_per_s=fact(1.0)), "bf16")
    even, full = (
        work(computer, MODEL, 1, 2**16, "none", "flash", Ways(expert=8), load=load) for load in (1.0, 2.0)
    )
    beside = full.forward - full.experts - even.forward + even.experts
    assert beside == pytest.approx(2**16 * 2 * (4 * 96 + 8 * 64) / 1e9)


def test_the_fullest_rank_sets_the_pace() -> None:
    even, uneven = job(recompute="none"), job(recompute="none", imbalance=2.5)
    _, met = uncut_flops_per_token(MODEL)
    more = step_time(uneven).items["forward"] - step_time(even).items["forward"]
    assert more == pytest.approx(4 * 1.5 * 256 * met / 1e12)
    assert waits(uneven).lane["route_out"] == pytest.approx(2.5 * waits(even).lane["route_out"])
    assert waits(uneven).lane["route_counts"] == waits(even).lane["route_counts"]
    a_pair = 2 * (64 + 96)  # with an expert a rank each comes in a row of its own
    a_pair += 4 + 4 * 8 + 3 * 8  # its weight, and places: at the end, and in two hops behind the first
    a_row = 8 * 4 * (1 - 15 / 28)  # and of rows in the hop between
    kept = float(memory_items(uneven)["activations"]) - float(memory_items(even)["activations"])
    assert kept == pytest.approx(4 * 256 * 1.5 * (2 * a_pair + a_row))
    whole = job(1, recompute="none", imbalance=2.5)
    assert step_time(whole) == step_time(replace(whole, imbalance=1.0))
    most = job(8, imbalance=100.0)
    assert most.load == 8


def test_with_one_expert_activations_are_an_mlps_but_for_its_rows() -> None:
    dense = MODEL.model_copy(
        update={"experts": None, "expert_hidden": None, "shared_experts": 0, "mlp_hidden": 96}
    )
    only = MODEL.model_copy(update={"experts": 1, "top_k": 1, "shared_experts": 0})
    of = 256, "none", "flash"
    found, expected = (kept_bytes_per_token(model, *of).block for model in (only, dense))
    places = 4 + 3 * 8  # of a pair, and its weight
    assert found - expected == (2 + 4) * 64 + 12 + places - 2 * 96
    apart = {route: kept_bytes_per_token(MODEL, *of, Ways(expert=4, route=route)).block for route in ROUTES}
    assert apart["flat"] == apart["hops"]
    assert apart["flat"] - kept_bytes_per_token(MODEL, *of).block == 2 * (2 * 64 + 2 * 8)
    rows = 4 * (1 - Fraction(15, 28))  # of 28 pairs 15 avoid a quarter of the experts
    of_rows = float(rows) * (2 * 64 + 8) + 2 * (4 + 5 * 8)
    assert apart["flat"] - apart["merged"] == pytest.approx(2 * (4 * 64 + places + 2 * 8) - of_rows)


# ---- limits


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match="8 experts of model 'small' cannot be divided"):
        job(16, ranks=16)
    with pytest.raises(UserError, match="8 ranks along data are no multiple of expert 3"):
        job(3)
    with pytest.raises(UserError, match="no experts of model 'gpt-1m' cannot be divided"):
        job(2, model=CONFIG.model("gpt-1m"))
    with pytest.raises(UserError, match="replicas that meet seldom would sum experts' load at every step"):
        job(2, scheme="local-sgd")
    for wrong in (0.5, float("nan")):
        with pytest.raises(UserError, match="imbalance"):
            job(imbalance=wrong)


def test_a_run_in_a_box_is_predicted() -> None:
    box = CONFIG.machine("frontier-box").model_dump()
    found = {route: box_step_s(run(machine=box, expert=8, route=route)) for route in ROUTES}
    assert all(found.values())
    assert len(set(found.values())) == 3


def test_tokens_are_counted_once() -> None:
    found = predict(job(4, micro_batch=2, accumulation=3))
    assert float(found.tokens_per_s_per_gpu * found.step_time_s) * 8 == pytest.approx(2 * 256 * 3 * 8)
