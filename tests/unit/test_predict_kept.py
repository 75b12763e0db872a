"""Activations in the host's memory, in a prediction: bytes, seconds, room, and the planner's choice."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lowband.__main__ import main
from lowband.cost.activations import kept_bytes_per_token, to_host_bytes
from lowband.cost.numbers import GIB
from lowband.cost.tiers import Rates
from lowband.errors import UserError
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.search.plan import plan
from lowband.predict.search.software import OURS, SOFTWARE, runners
from lowband.predict.show.point_text import text
from lowband.predict.show.record import record
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.machine import Machine
from tests.checkout import CONFIG
from tests.printed import printed_by

MODEL = CONFIG.model("gpt-10b")
TOKENS, RANKS = 2048, 4


def job(recompute: str = "host", ranks: int = RANKS, cluster: str = "polaris", **more: object) -> Workload:
    machine, stack = setting(CONFIG, cluster, "ours")
    scheme = CONFIG.scheme("zero3").on(list(machine.sizes))
    values = {"micro_batch": 1, "seq_len": TOKENS, "recompute": recompute} | more
    return Workload(machine, stack, MODEL, scheme, ranks, **values)  # type: ignore[arg-type]


def with_rate(machine: Machine, factor: float) -> Machine:
    """The machine with links to the host so many times as fast."""
    host = machine.tier("host")
    rates = ("fetch", "stash", "node_fetch", "node_stash")
    facts = {f"{name}_gigabytes_per_s": getattr(host, f"{name}_gigabytes_per_s") for name in rates}
    faster = {
        name: fact.model_copy(update={end: factor * fact.at(end) for end in ("low", "value", "high")})
        for name, fact in facts.items()
    }
    return machine.model_copy(update={"tiers": {"host": host.model_copy(update=faster)}})


def test_bytes_are_those_that_a_run_copies() -> None:
    """The predictor's form counts no norms' statistics, four values of a token, and no rotary angles."""
    model = MODEL.model_copy(update={"positions": "learned"})
    a_token = kept_bytes_per_token(model, TOKENS, "host", "flash").host
    assert to_host_bytes(model, 3, TOKENS, "bf16") == 3 * TOKENS * (a_token + 4 * 2)


def test_items_by_hand() -> None:
    a_token = kept_bytes_per_token(MODEL, TOKENS, "host", "flash")
    for accumulation in (1, 4):
        of_host, of_none = (job(way, accumulation=accumulation) for way in ("host", "none"))
        kept, plain = predict(of_host), predict(of_none)
        rates = Rates.of(of_host.machine.tier("host"), RANKS)
        held = TOKENS * MODEL.layers * a_token.host
        assert kept.memory_bytes["activations@host"] == pytest.approx(held, rel=1e-12)
        assert kept.memory_bytes["activations"] == pytest.approx(TOKENS * a_token.working, rel=1e-12)
        assert kept.memory_bytes["activations"] < plain.memory_bytes["activations"] / (MODEL.layers - 1)
        assert kept.tier_bytes == {"host": pytest.approx(RANKS * held, rel=1e-12)} and not plain.tier_bytes
        assert kept.time_s["stash"] == pytest.approx(accumulation * held / rates.stash / 1e9, rel=1e-12)
        assert kept.time_s["fetch"] == pytest.approx(accumulation * held / rates.fetch / 1e9, rel=1e-12)
        assert kept.time_s["recompute"] == 0 and kept.hfu_tflops_per_gpu == kept.tflops_per_gpu
        assert kept.step_time_s == pytest.approx(sum(kept.time_s.values()), rel=1e-12)


def test_nothing_hides_the_copies_and_they_hide_gathers() -> None:
    for ranks in (1, 16 * RANKS):
        kept, plain = (predict(job(way, ranks=ranks)) for way in ("host", "none"))
        copies = kept.time_s["stash"] + kept.time_s["fetch"]
        longer = kept.step_time_s - plain.step_time_s
        assert longer == pytest.approx(copies, rel=1e-9) if ranks == 1 else longer < copies


def test_breadth_first_all_micro_batches_wait_there() -> None:
    """And a block's outputs on the device, where the graph is cut."""
    depth, breadth = (
        predict(job(accumulation=4, axes=Ways(schedule=schedule)))
        for schedule in ("1f1b", "breadth-first")
    )  # fmt: skip
    on_host, here = (
        [float(p.memory_bytes[kind]) for p in (depth, breadth)]
        for kind in ("activations@host", "activations")
    )
    assert on_host[1] == pytest.approx(4 * on_host[0], rel=1e-12)
    outputs = 4 * TOKENS * MODEL.layers * 2 * MODEL.hidden
    assert here[1] == pytest.approx(here[0] + outputs, rel=1e-12)


def test_a_grid_is_its_points_and_layers_that_stay_are_left_out() -> None:
    grid = predict(job(micro_batch=np.array([1, 2]), accumulation=np.array([1, 4])))
    for i, (b, a) in enumerate(((1, 1), (2, 4))):
        one = predict(job(micro_batch=b, accumulation=a))
        assert grid.step_time_s[i] == pytest.approx(float(one.step_time_s), rel=1e-12)  # type: ignore[index]
    whole, half = predict(job()), predict(job(recomputed=0.5))
    for items in ("memory_bytes", "time_s"):
        kind = "activations@host" if items == "memory_bytes" else "stash"
        assert getattr(half, items)[kind] == pytest.approx(getattr(whole, items)[kind] / 2, rel=1e-12)


def test_a_full_host_does_not_fit() -> None:
    small = job()
    host = small.machine.tier("host").model_copy(update={"capacity_gib": 1})
    full = replace(small, machine=small.machine.model_copy(update={"tiers": {"host": host}}))
    said = text(record(full, predict(full)))
    assert "beyond the device activations@host; of a node: host" in said and "of 1 GiB: does not fit" in said
    assert not predict(full).fits


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cluster": "perlmutter"}, "tier 'host' has no rates"),
        ({"axes": Ways(tensor=2)}, "activations on the host with other axes than data"),
        ({"axes": Ways(pipeline=2), "accumulation": 2}, "activations on the host with other axes than data"),
    ],
)
def test_what_is_not_predicted_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        job(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("factor", "best"), [(1, "full"), (1000, "host")])
def test_the_planner_keeps_there_where_that_is_faster_than_recomputing(factor: float, best: str) -> None:
    """In a batch whose activations the devices have no room for."""
    machine, stack = setting(CONFIG, "polaris", "ours")
    machine = with_rate(machine, factor)
    room = machine.device.model_copy(update={"memory_gib": 80})
    machine = machine.model_copy(update={"device": room})
    search = {"axes": [Ways()], "micro_batches": [4], "exact": True, "software": (OURS,), "within": np.inf}
    found = plan(machine, stack, MODEL, RANKS, TOKENS, 16, **search)  # type: ignore[arg-type]
    assert found.ranked[0].job.recompute == best
    kept = next(one for one in found.ranked if one.job.recompute == "host")
    assert float(predict(kept.job, interval=False).step_time_s) == pytest.approx(kept.step_time_s, rel=1e-12)


def test_only_our_engine_runs_it() -> None:
    machine, stack = setting(CONFIG, "polaris", "ours")
    assert runners(job()) == ("lowband",)
    others = tuple(row for row in SOFTWARE if row is not OURS)
    search = {"axes": [Ways()], "micro_batches": [1], "exact": True, "software": others}
    found = plan(machine, stack, MODEL, 16, TOKENS, 16, **search)  # type: ignore[arg-type]
    assert "host" not in {one.job.recompute for one in found.candidates.values()}


JOB = ["--cluster", "polaris", "--model", "gpt-10b", "--gpus", "4", "--root", str(CONFIG.root)]


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", *JOB, "--scheme", "zero3", "--seq", str(TOKENS), "--recompute", "host", "--json"]
    main(words)
    row = json.loads(capsys.readouterr().out)
    assert row["recompute"] == row["tiers"]["activations"] == "host"
    assert row["tiers"]["host_node_bytes"] > GIB and row["tiers"]["optim"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recompute", "host", "--cluster", "perlmutter"], "tier 'host' has no rates"),
        (["--recompute", "host", "--tp", "2"], "no candidate that divides the batch could keep its"),
        (["--recompute", "host", "--lengths", "FILE"], "--lengths is without --recompute host"),
    ],
)
def test_a_plan_that_cannot_is_refused_in_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in printed_by(capsys, "plan", *JOB, *words, code=2)
