"""Days, GPU-hours and energy of a whole run: by hand, at Young's interval, and beside a published run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.optimize import minimize_scalar

from lowband.__main__ import main
from lowband.errors import UserError
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.show.whole_text import lines
from lowband.predict.whole import HOUR_S, Conditions, whole_run
from lowband.predict.workload import Workload
from lowband.spec.machine import Power
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by

JOB = Workload(
    *setting(CONFIG, "dgx-a100", None), CONFIG.model("llama-7b"), CONFIG.scheme("zero3"), 64, 4, 2048
)
FOUND = predict(JOB)


def test_a_run_by_hand() -> None:
    run = whole_run(JOB, FOUND, Conditions(1e12))
    step = float(FOUND.step_time_s)
    assert run.steps == 1e12 / (64 * 4 * 2048)
    assert run.days == pytest.approx(run.steps * step / 86400)
    assert run.gpu_hours == pytest.approx(64 * 24 * run.days)
    assert run.days_fast < run.days < run.days_slow
    assert (run.checkpoint_every_s, run.failures, run.lost) == (None, 0, 0)
    busy = sum(float(FOUND.time_s[name]) for name in ("forward", "recompute", "backward", "optimizer")) / step
    assert run.megawatt_hours == pytest.approx([run.gpu_hours * (400 * busy + 83.64 * (1 - busy)) / 1e6] * 2)


def test_checkpoints_come_as_often_as_costs_least() -> None:
    given = Conditions(1e12, 50_000 * HOUR_S, restart_s=600, checkpoint_s=30)
    mean = 50_000 * HOUR_S / 64
    least = minimize_scalar(lambda t: 30 / t + (t / 2 + 600) / mean, bounds=(1, mean), method="bounded")
    run = whole_run(JOB, FOUND, given)
    assert run.checkpoint_every_s == pytest.approx(least.x, rel=1e-3)
    assert run.lost == pytest.approx(least.fun, rel=1e-6)
    assert run.days == pytest.approx(whole_run(JOB, FOUND, Conditions(1e12)).days / (1 - least.fun))
    assert run.failures == pytest.approx(run.days * 86400 / mean)
    with pytest.raises(UserError, match="more is lost than done"):
        whole_run(JOB, FOUND, replace(given, between_failures_s=3600))


def test_a_device_of_unknown_power_has_no_energy() -> None:
    device = JOB.machine.device.model_copy(update={"power": None})
    job = replace(JOB, machine=JOB.machine.model_copy(update={"device": device}))
    assert whole_run(job, FOUND, Conditions(1e12)).megawatt_hours is None


def test_a_device_that_waits_takes_no_more_than_its_peak() -> None:
    watts: dict[str, Any] = {
        "peak_watts": {"value": 400, "source": "x"},
        "idle_watts": {"value": 401, "source": "y"},
    }
    with pytest.raises(UserError, match="a file: idle_watts 401 is above peak_watts 400") as caught:
        Power.parse(watts, "a file")
    assert "\n" not in str(caught.value)
    watts["idle_watts"] |= {"value": 60, "high": 70}
    with pytest.raises(UserError, match="a file: idle_watts has no interval"):
        Power.parse(watts, "a file")


def test_energies_that_are_written_alike_are_one() -> None:
    run = replace(whole_run(JOB, FOUND, Conditions(1e12)), megawatt_hours=(2.9, 3.1))
    assert "energy of the devices: 3 MWh at most" in lines(run, Conditions(1e12))[-1]


def test_one_device_has_one_power_in_every_machine_file_that_states_one() -> None:
    """A site sets that of its GH200 itself: JUPITER's is not Alps'."""
    powers: dict[str, set[str]] = {}
    for cluster in CONFIG.clusters:
        machine = CONFIG.machine(cluster)
        if machine.box is None and machine.device.power is not None:
            powers.setdefault(machine.device.name, set()).add(str(machine.device.power))
    assert {name: len(found) for name, found in powers.items()} == dict.fromkeys(powers, 1)
    assert len(powers) == 12


def test_the_command_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = ["plan", "--cluster", "dgx-a100", "--model", "llama-7b", "--gpus", "64", "--micro-batch", "1"]
    failing = ["--hours-between-failures", "50700", "--restart-minutes", "10", "--checkpoint-seconds", "30"]
    out = printed_by(capsys, *job, "--tokens", "1e12", *failing)
    assert "1e+12 tokens: " in out
    assert "failures and in checkpoints, one every" in out
    assert "MWh at most (the limit that nvidia-smi shows of an A100 SXM4" in out
    assert main([*job, *failing[:2]]) == 2
    assert "--hours-between-failures is for a run of --tokens" in capsys.readouterr().err
    for alone in (failing[:2], failing[2:4], failing[4:]):
        assert f"{alone[0]} is not alone" in printed_by(capsys, *job, "--tokens", "1e12", *alone, code=2)
    for form in ("--json", "--csv"):
        assert main([*job, "--tokens", "1e12", form]) == 2
        assert "--tokens is without --json and --csv" in capsys.readouterr().err
    for other in (["--largest", "zero3"], ["--outer-gbps", "10"], ["--lengths", "lengths.txt"]):
        assert main([*job, "--tokens", "1e12", *other]) == 2
        assert f"--tokens is without {other[0]}" in capsys.readouterr().err


def test_a_prediction_says_it_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plan's first row does of the same job."""
    monkeypatch.chdir(ROOT)
    job = ["--cluster", "dgx-a100", "--model", "llama-7b", "--gpus", "64"]
    given = ["--tokens", "1e12", "--hours-between-failures", "50700", "--checkpoint-seconds", "30"]
    point = ["predict", *job, "--scheme", "zero3", "--micro-batch", "4", "--recompute", "none"]
    step = printed_by(capsys, *point)
    out = printed_by(capsys, *point, *given)
    workload = replace(JOB, recompute="none")
    conditions = Conditions(1e12, 50_700 * HOUR_S, 0.0, 30.0)
    expected = lines(whole_run(workload, predict(workload), conditions), conditions)
    assert out.splitlines() == [*step.splitlines(), "", *expected]
    for wrong, message in (
        ([*given, "--json"], "--tokens is without --json and --csv"),
        ([*given, "--micro-batch", "1", "2"], "--tokens is of one job, and these are 2"),
        (given[2:4], "--hours-between-failures is for a run of --tokens"),
        (given[:4], "--hours-between-failures is not alone"),
        ([*given[:2], "--hours-between-failures", "0.1", *given[4:]], "more is lost than done"),
    ):
        assert main([*point, *wrong]) == 2
        printed = capsys.readouterr()
        assert message in printed.err and printed.out == ""


def test_what_cannot_end_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = ["plan", "--cluster", "dgx-a100", "--model", "llama-7b", "--gpus", "64", "--micro-batch", "1"]
    often = ["--tokens", "1e12", "--hours-between-failures", "1", "--checkpoint-seconds", "30"]
    assert main([*job, *often, "--software", "megatron-lm", "--write", "mine"]) == 2
    assert "more is lost than done" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
