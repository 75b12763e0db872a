"""Constants that no file states are defaults with intervals; the room in a device's memory."""

import math
from pathlib import Path

import pandas as pd
import pytest

from lowband.cost.numbers import GIB
from lowband.evidence.validation import SOURCES
from lowband.predict.defaults import DEVICE, LATENCY_US, LINK, STACK, with_defaults
from lowband.predict.request import Grid, setting
from lowband.predict.search.rehearsal import rehearse
from lowband.predict.show.point_text import constant_lines, text
from lowband.predict.show.record import flat
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.mesh import WORLD
from lowband.spec.sourced import Fact
from tests.checkout import CONFIG, REFERENCE, ROOT

PREDICTABLE = [c for c in CONFIG.clusters if CONFIG.machine(c).device.peak_tflops]
MEMORY_ONLY = ("torchtitan-h100-memory", "torchtitan-h200-memory")


def workload(cluster: str, stack: str | None, model: str = "gpt-20b", ranks: int = 64) -> Workload:
    machine, software = setting(CONFIG, cluster, stack)
    scheme = CONFIG.scheme("zero3")
    return Workload(machine, software, CONFIG.model(model), scheme, ranks, 1, 2048)


@pytest.mark.parametrize("cluster", CONFIG.clusters)
def test_every_stated_constant_lies_in_its_default_s_interval(cluster: str) -> None:
    machine = CONFIG.machine(cluster)

    def admits(default: Fact, stated: Fact | None) -> bool:
        return stated is None or default.at("low") <= stated.value <= default.at("high")

    assert all(admits(fact, getattr(machine.device, key)) for key, fact in DEVICE.items())
    for level in machine.levels:
        if level.link is not None:
            assert admits(LATENCY_US[level.name != WORLD], level.link.latency_us)
            by_cards = level.link.efficiency_by_cards.values()
            assert all(admits(LINK["efficiency"], fact) for fact in (level.link.efficiency, *by_cards) if (
                fact is None or fact.value != 1  # one card alone
            ))  # fmt: skip
    for name in CONFIG.stacks:
        stack = CONFIG.stack_on(name, cluster)
        own = {key: getattr(stack, key) for key in STACK if key != "unit_us"}  # DeepSpeed has six hooks
        assert all(admits(STACK[key], fact) for key, fact in own.items())


def test_lumi_s_share_of_the_peak_is_frontier_s() -> None:
    """As its source says; Frontier's is fitted again now and then."""
    lumi, frontier = (CONFIG.machine(name).device.matmul_efficiency for name in ("lumi", "frontier"))
    assert lumi is not None
    assert frontier is not None
    assert frontier.bounds is not None
    bounds = frontier.bounds
    assert (lumi.value, lumi.low, lumi.high) == (frontier.value, bounds.low, bounds.high)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in MEMORY_ONLY])
def test_defaults_change_no_fitted_prediction(name: str) -> None:
    """A validated pair states all that its step time needs; FSDP2 was never fitted."""
    machine, stack = SOURCES[name].on(CONFIG)
    ranks = 8 if name == "vtrain" else 64
    bare, full = (
        Workload(m, s, CONFIG.model("gpt-2.7b"), CONFIG.scheme("zero3"), ranks, 1, 2048)
        for m, s in ((machine, stack), with_defaults(machine, stack))
    )
    same = all(
        step_time(bare, case).total == step_time(full, case).total for case in ("slow", "value", "fast")
    )
    assert same == (stack.name not in ("fsdp2", "fsdp2-2025"))


@pytest.mark.parametrize("stack", [None, *CONFIG.stacks])
@pytest.mark.parametrize("cluster", PREDICTABLE)
def test_no_prediction_is_certain_or_perfect(cluster: str, stack: str | None) -> None:
    ranks = math.lcm(32, CONFIG.machine(cluster).node_size)
    one = workload(cluster, stack, "gpt-2.7b", ranks)
    [record] = Grid(
        CONFIG, cluster, ["gpt-2.7b"], ["zero3"], [ranks], [1], [1], [2048], ["full"], stack=stack
    ).records()
    fast, slow = record["interval"]["step_time_s"]
    assert fast < record["step_time_s"] <= slow
    assert record["hfu_tflops_per_gpu"] < 0.85 * one.machine.device.peak_tflops["bf16"]
    assert {record["cluster"], record["stack"]} == {cluster, one.stack.name}
    defaults = [name for name, one in record["constants"].items() if one["kind"] == "default"]
    if "device.matmul_efficiency" in defaults:
        assert slow > 1.5 * fast
    # Each default is in the text, with its interval and its reason; each other constant under its kind.
    lines = text(record)
    for name, constant in record["constants"].items():
        assert name in lines
        assert constant["kind"] != "default" or constant["source"].removeprefix("default: ") in lines
    assert defaults == flat(record)["constants.default"].split()


def test_deepspeed_without_constants_of_a_machine_is_not_optimistic() -> None:
    """Where it was not measured, its collectives may be as slow as where it was."""
    known = step_time(workload("dgx-a100", "fsdp")).lane["forward_gather"]
    step = {
        case: step_time(workload("dgx-a100", "deepspeed-zero"), case) for case in ("slow", "value", "fast")
    }
    assert step["fast"].lane["forward_gather"] < 1.2 * known < step["value"].lane["forward_gather"]
    assert step["slow"].lane["forward_gather"] > 5 * known


def test_defaults_are_near_an_h100_s_measured_steps() -> None:
    """slurm/cuda states rates only; the suite one-gpu was measured there (results/reference/h100)."""
    measured = pd.read_csv(REFERENCE / "h100" / "runs.csv").set_index("run_id")
    rows = [row for row in rehearse(CONFIG.runs(["one-gpu"]), None) if f"{row.run}-r1" in measured.index]
    assert len(rows) == 2  # of ours, those of 4,096 tokens
    for row in rows:
        for repeat in (1, 2):
            found = measured.loc[f"{row.run}-r{repeat}"]
            assert row.fast_s < found["step_time_s"] < row.slow_s
            assert row.step_s == pytest.approx(found["step_time_s"], rel=0.15)
            # The run counted its tensors; the runtime comes on top.
            assert 0 < row.peak_gib - found["peak_memory_bytes_max"] / GIB < 4


def test_room_by_hand() -> None:
    [record] = Grid(
        CONFIG, "dgx-a100-40gb", ["gpt-2.7b"], ["zero3"], [8], [1], [1], [2048], ["full"]
    ).records()
    assert record["capacity_bytes"] == 40 * GIB
    assert record["runtime_bytes"] == 3 * GIB
    assert record["headroom_bytes"] == record["capacity_bytes"] - record["peak_memory_bytes"]
    low, high = record["interval"]["headroom_bytes"]
    assert low == record["headroom_bytes"] - 1 * GIB
    assert high == pytest.approx(record["headroom_bytes"] + 2.7 * GIB, abs=1)
    held = sum(record["memory_bytes"].values())
    assert record["peak_memory_bytes"] <= held
    lines = constant_lines(record["constants"])
    assert not [line for line in lines if line.rstrip().endswith(":")]  # a kind without constants
    assert not [line for line in lines if line.startswith("  default:")]  # they have lines of their own


@pytest.mark.parametrize(
    ("capacity", "words"),
    [(40, ") fits"), (9, "fits, but not surely: short at the low end"), (8, "does not fit: 0.85")],
)
def test_the_verdict_knows_the_runtime_s_interval(capacity: float, words: str, tmp_path: Path) -> None:
    """2.7B under ZeRO-3 on 8 holds 5.85 GiB, and the runtime 3 (0.3 to 4)."""
    shipped = (ROOT / "slurm" / "cuda" / "machine.yaml").read_text()
    file = tmp_path / "small.yaml"
    file.write_text(shipped.replace("memory_gib: 80", f"memory_gib: {capacity}"))
    [record] = Grid(CONFIG, str(file), ["gpt-2.7b"], ["zero3"], [8], [1], [1], [512], ["full"]).records()
    assert words in text(record)
