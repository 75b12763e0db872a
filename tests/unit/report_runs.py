"""Run folders without training: specs of a real suite, records made up so that every number is known."""

import shutil
from pathlib import Path

import pandas as pd

from lowband.cost.contents import step_bytes
from lowband.cost.held import held_bytes
from lowband.evidence.validation.frontier_maps import frontier_map
from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.config import Config
from lowband.spec.csv_tables import write_csv
from lowband.spec.files import write_whole
from lowband.spec.records import Environment, Outcome, Sent, StateBytes, StepRecord
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.spec.softmax import ANY_ISA, TORCH, Setup, Time
from tests.checkout import CONFIG, REFERENCE


def predictions_as_shipped(config: Config, out: Path) -> None:
    """What the predictor says, as it is shipped; tests/workflow/test_shipped.py makes it anew."""
    for name in {*PREDICTED} - {"frontier_map"}:
        shutil.copy(REFERENCE / "predicted" / f"{name}.csv", out)
    write_csv(frontier_map(config), out / "frontier_map.csv")  # is not shipped


def smoke_specs() -> list[RunSpec]:
    """zero3 on 1, 4 and 8 ranks; hpz, hsdp and hier3-exact on 4 and 8. 6 steps, 2 of them warm-up."""
    return CONFIG.runs(["smoke"])


def write_run(folder: Path, spec: RunSpec, step_time_s: float, loss: float) -> Path:
    """A run that ended ok, whatever was there.

    Warm-up steps take ten times as long; bytes and states are the closed forms.
    """
    run = RunFolder(folder / spec.run_id)
    write_whole(run.spec, spec.to_json())
    run.steps.unlink(missing_ok=True)
    run.outcome.unlink(missing_ok=True)
    run.write_environment(
        Environment(
            commit="c0ffee",
            dirty=False,
            hosts=("here",),
            device="made up",
            versions={},
            variables={},
            data={},
        )
    )
    for step in range(1, spec.steps + 1):
        time = step_time_s * (10 if step <= spec.warmup_steps else 1)
        run.append_step(
            StepRecord(
                step=step,
                step_time_s=time,
                compute_time_s=0.75 * time,
                exposed_comm_time_s=0.25 * time,
                hidden_comm_time_s=0,
                tokens=spec.tokens_per_step,
                loss=loss,
                grad_norm=1,
                sent=(),
            )
        )
    run.write_outcome(ok_outcome(spec))
    return run.path


def ok_outcome(spec: RunSpec) -> Outcome:
    sent, states = step_bytes(spec), held_bytes(spec, "gloo")
    return Outcome(
        status="ok",
        steps=spec.steps,
        sent=tuple(
            Sent(level=level, collective=collective, wire=wire, bytes=count)
            for (level, collective, wire), count in sent.items()
            if count
        ),
        states=tuple(StateBytes(kind=kind, bytes=held) for kind, held in {**states, "other": 7}.items()),
        weights_sha256=f"{spec.ranks:064x}",
    )


def write_failure(folder: Path, spec: RunSpec, outcome: Outcome | None) -> Path:
    """A run that ended with this outcome, or that left none."""
    run = RunFolder(folder / spec.run_id)
    write_whole(run.spec, spec.to_json())
    if outcome is not None:
        run.write_outcome(outcome)
    return run.path


def write_softmax(
    folder: Path, times_s: dict[tuple[str, int], list[float]], isa: str = "AVX2", device: str = "made up"
) -> None:
    """Raw tables of `bench-softmax`: `isa` ran with these times, by algorithm and elements, if there are any.

    The last cache holds 1 MiB. The other instruction set did not run.
    """
    times = [
        Time(ANY_ISA if name == TORCH else isa, name, elements, repeat, time_s)
        for (name, elements), several in times_s.items()
        for repeat, time_s in enumerate(several)
    ]
    absent = {"AVX512": "no AVX-512 here", "AVX2": "no AVX2 here"}
    causes = {name: cause if times else "no C compiler" for name, cause in absent.items()}
    causes |= {isa: ""} if times else {}
    setups = [
        Setup(
            isa=name, status="not run" if cause else "ok", cause=cause, device=device, l1_bytes=2**15,
            l2_bytes=2**18, last_bytes=2**20, compiler="cc", flags="", torch="2", commit="c0ffee",
            dirty=False,
        )
        for name, cause in causes.items()
    ]  # fmt: skip
    write_csv(pd.DataFrame(times, columns=Time._fields), folder / "softmax_times.csv")
    write_csv(pd.DataFrame(setups, columns=Setup._fields), folder / "softmax_setup.csv")
