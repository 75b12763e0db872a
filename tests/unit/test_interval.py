"""The interval of a predicted step time, against the widths that it is made of."""

from dataclasses import replace

import pytest

from lowband.evidence.validation.intervals import MEMORY, calibrated_factors
from lowband.predict.interval import ELSEWHERE, KNOWN, LAUNCH_US, step_interval
from lowband.predict.request import setting
from lowband.predict.room import MEMORY_ERROR
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.csv_tables import read_table
from lowband.spec.sourced import Fact
from tests.checkout import CONFIG, REFERENCE


def workload(model: str, cluster: str = "selene-2021", stack: str = "megatron-lm-2021") -> Workload:
    machine, software = setting(CONFIG, cluster, stack)
    return Workload(machine, software, CONFIG.model(model), CONFIG.scheme("ddp"), 8, 1, 2048)


def ends(job: Workload) -> tuple[float, float]:
    """Of the interval, over the predicted time: the fast one's inverse, and the slow one."""
    step_s = step_time(job).total
    fast, slow = step_interval(job, step_s)
    return float(step_s / fast), float(slow / step_s)


def test_an_interval_is_as_wide_as_other_sources_show() -> None:
    """selene-2021's own ten rows lie within a factor of 1.037, but they are of one source."""
    job = workload("gpt-20b")
    assert job.stack.error_factor is not None
    assert job.stack.error_factor.value < KNOWN < ELSEWHERE
    assert ends(job) == pytest.approx((KNOWN, KNOWN))
    wider = job.stack.model_copy(update={"error_factor": Fact(value=1.2, source="made up")})
    assert ends(replace(job, stack=wider)) == pytest.approx((1.2, 1.2))
    assert min(ends(replace(job, stack=job.stack.model_copy(update={"error_factor": None})))) >= ELSEWHERE


def test_room_is_as_sure_as_the_rows_of_the_one_publisher_of_peaks() -> None:
    """With three of them publishers can be left out whole, as of step times."""
    shipped = REFERENCE / "predicted"
    factors = calibrated_factors(read_table(shipped / "folds.csv"), read_table(shipped / "held_out.csv"))
    of_memory = {key: value for key, value in factors.items() if key[-1] == "memory"}
    assert of_memory == {("dgx-h100", "fsdp2", "memory"): pytest.approx(MEMORY_ERROR, abs=5e-4)}
    rows = read_table(shipped / "validation.csv")
    assert set(rows["reported_in"][rows["quantity"] == MEMORY]) == {"torchtitan.csv"}


def test_a_host_of_which_nothing_is_known_may_be_slow() -> None:
    """Where the device computes a block's pass faster than the host may launch it; not where the stack says
    how long it takes, nor where ranks compute on the host."""
    job = workload("gpt-5m")
    slowest = job.stack.model_copy(update={"launch_us": LAUNCH_US})
    longer = step_time(replace(job, stack=slowest)).total / step_time(job).total
    assert longer > 2
    assert ends(job) == pytest.approx((KNOWN, KNOWN * longer))
    stated = job.stack.model_copy(update={"launch_us": Fact(value=0, source="made up")})
    assert ends(replace(job, stack=stated)) == pytest.approx((KNOWN, KNOWN))
    device = job.machine.device.model_copy(update={"memory_gib": None})
    on_host = replace(job, machine=job.machine.model_copy(update={"device": device}))
    assert ends(on_host) == pytest.approx((KNOWN, KNOWN))


def test_the_slowest_host_is_one_that_was_measured() -> None:
    """24 blocks, forward and backward, and whatever else the steps took; the device needs less than half."""
    runs = read_table(REFERENCE / "h100" / "runs.csv")
    runs = runs[(runs["engine"] == "lowband") & (runs["recompute"] == "none") & (runs["model"] == "gpt-1.3b")]
    assert (runs["micro_batch"] * runs["seq_len"] == 4096).all()
    passes = 2 * CONFIG.model("gpt-1.3b").layers
    assert LAUNCH_US.value == pytest.approx(runs["step_time_s"].median() * 1e6 / passes, rel=0.01)
