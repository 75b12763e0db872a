"""Run folders -> raw tidy tables. The only reader of run folders.

    runs.csv    one row per run, even if it failed or left nothing; with every option of the run
    steps.csv   one row per optimizer step
    bytes.csv   one row per run, level and collective: bytes sent per rank and step, counted and closed form
    states.csv  one row per run and state: bytes per rank, measured and closed form
    outside.csv one row per run, level, collective and dtype: bytes sent per rank and step, counted
                outside the engine, in the same way for ours and for peers

The last four hold runs that ended ok. Times are in seconds. `provenance` is `predicted` for a run on fake
tensors, whose bytes and states the engine counted without computing anything; such a run has no steps.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lowband.box.network import kind_of
from lowband.cost.contents import step_bytes
from lowband.cost.flops import model_flops_per_token
from lowband.cost.held import held_bytes
from lowband.cost.peers import peer_sent_bytes
from lowband.errors import UserError
from lowband.evidence.tables.points import NO_CONDITION, POINT, identity
from lowband.evidence.validation.scale_model import box_step_s
from lowband.spec.csv_tables import write_csv
from lowband.spec.files import writing_whole
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.records import CONTROL, Environment, Outcome, by_row
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.spec.step_columns import NO_STEPS, Columns, floats, read_columns
from lowband.spec.step_columns import sent_bytes as sent_in
from lowband.spec.tiers import TIERS

Row = dict[str, Any]

# The run, point and experiment that a row belongs to; the first columns of every raw table.
KEYS = ["run_id", *POINT, "repeat", "is_quantized"]
TIMES = ["step_time_s", "compute_time_s", "exposed_comm_time_s", "hidden_comm_time_s"]
# The other columns of each table; of runs.csv those of a row.
COLUMNS = {
    "steps": ["step", "is_warmup", "tokens", "loss", "grad_norm", *TIMES],
    "bytes": ["level", "collective", "wire", "counted_bytes", "closed_form_bytes", "difference_bytes"],
    "states": ["state", "held_bytes", "closed_form_bytes", "difference_bytes"],
    "outside": ["level", "collective", "wire", "outside_bytes"],
}


def collect(runs: list[Path], out: Path) -> None:
    """Write the raw tables of the run folders into `out`, in the order given.

    The steps of one run at a time are in memory. Raises UserError for a folder without a spec.json, which is
    not a run, for a run that is there twice, for one that ended ok but lacks the record of a step, whose
    spec has changed since, which had another text of the same name than an earlier run, or other devices or
    links than its repeat; then no table is written.
    """
    tables: dict[str, list[Any]] = {"runs": [], "bytes": [], "states": [], "outside": []}
    folders: dict[str, Path] = {}  # by the id of their runs
    alike: dict[Any, tuple[Any, Path]] = {}  # what several runs have in common, and the first one of them
    closed: dict[Any, Any] = {}  # closed forms, which repeats of a point share
    with writing_whole(out / "steps.csv") as file:
        file.write(_csv([*KEYS, *COLUMNS["steps"]]))
        for path in runs:
            folder = RunFolder(path)
            spec = RunSpec.read_json(folder.spec)
            options, outcome = identity(spec), _outcome(folder, spec)
            keys = _keys(spec, options["point"])
            if (earlier := folders.setdefault(spec.run_id, path)) is not path:
                raise UserError(f"run {spec.run_id} again", where=path, allowed=f"once: it is in {earlier}")
            is_ok = outcome.status == "ok"
            steps = _whole_steps(folder, outcome) if is_ok and spec.device != "fake" else NO_STEPS
            environment = _environment(folder)
            if is_ok:
                _check_alike(spec, options["point"], folder, alike)
            tables["runs"].append(keys | options | _run(spec, outcome, steps) | environment)
            file.writelines(_step_lines(spec, outcome, _csv(keys.values()).rstrip("\n"), steps))
            found: dict[str, Iterator[Row]] = {}
            if is_ok:
                found["outside"] = _outside(outcome)
            if is_ok and spec.engine == "lowband":  # the engine's own counts, which peers lack
                point, held = options["point"], {state.kind: state.bytes for state in outcome.states}
                states_of = point, Environment.read_json(folder.env).backend, "start" in held
                if point not in closed:
                    closed[point] = _closed_bytes(spec)
                if states_of not in closed:
                    closed[states_of] = held_bytes(spec, *states_of[1:])
                found["bytes"] = _bytes(spec, outcome, closed[point])
                if held:  # an attempt that took no step has measured none
                    found["states"] = _states(held, closed[states_of])
            for name, rows in found.items():  # tuples, which take a fifth of a dictionary's memory
                tables[name] += [(*keys.values(), *map(row.__getitem__, COLUMNS[name])) for row in rows]
    for name, whole in tables.items():
        columns = [*KEYS, *COLUMNS[name]] if name in COLUMNS else None
        write_csv(pd.DataFrame(whole, columns=columns), out / f"{name}.csv")


def _check_alike(spec: RunSpec, point: str, folder: RunFolder, alike: dict[Any, tuple[Any, Path]]) -> None:
    """Losses are compared on one text, and repeats on one kind of devices and links."""
    if spec.device == "fake" or not folder.env.exists():
        return
    env = Environment.read_json(folder.env)
    text, on = env.data.get("sha256", ""), (env.backend, kind_of(env.links))
    for of, value, what, remedy in (
        (spec.text, text, f"is of another text: {spec.text} has changed", "runs of the earlier one have"),
        (point, on, f"has other devices or links than a repeat: {', '.join(on)}", "one of both has"),
    ):
        expected, first = alike.setdefault(of, (value, folder.path))
        if value != expected:
            allowed = f"as {first}; {remedy} to be trained again"
            raise UserError(what, where=folder.path, allowed=allowed)


def _csv(values: Iterable[object]) -> str:
    """A line of CSV, as pandas writes it."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


def _outcome(folder: RunFolder, spec: RunSpec) -> Outcome:
    if not folder.outcome.exists():
        return Outcome(status="error", cause="no outcome written", steps=0)
    outcome = Outcome.read_json(folder.outcome)
    if outcome.of not in ("", spec.training_sum):
        if outcome.status != "ok":
            return Outcome(status="error", cause="no outcome of this spec", steps=0)
        allowed = "to be trained again; or the spec as it was"
        raise UserError("is of a run under another spec", where=folder.outcome, allowed=allowed)
    return outcome


def _whole_steps(folder: RunFolder, outcome: Outcome) -> Columns:
    """All steps of a run that ended ok. Raises UserError if a record is missing."""
    steps = read_columns(folder)
    if len(steps["step"]) != outcome.steps:
        raise UserError(
            f"has the records of {len(steps['step'])} steps", where=folder.steps,
            allowed=f"{outcome.steps}, as the outcome has it; the run has to be taken again",
        )  # fmt: skip
    return steps


def run_keys(spec: RunSpec) -> Row:
    return _keys(spec, identity(spec)["point"])


def _keys(spec: RunSpec, point: str) -> Row:
    inside = {
        "point": point,
        "provenance": "predicted" if spec.device == "fake" else "measured",
        "cluster": spec.machine.name,
        "model": spec.model.name,
        "condition": spec.condition or NO_CONDITION,
        "scheme": spec.scheme.name,
        "is_quantized": spec.scheme.is_quantized,
    }
    return {key: inside[key] if key in inside else getattr(spec, key) for key in KEYS}


def _run(spec: RunSpec, outcome: Outcome, steps: Columns) -> Row:
    """The run's row of runs.csv. Times are quantiles over the steps that are no warm-up; of replicas that
    meet seldom, over the means of whole periods, each of which has the exchange."""
    is_measured = [not is_one for is_one in _warmup(spec, outcome, len(steps["step"]))]
    measured = {name: floats(tuple(compress(steps[name], is_measured))) for name in TIMES}
    times = {name: means_of(values, spec.scheme.period) for name, values in measured.items()}
    with np.errstate(invalid="ignore"):  # a stranger's times may be infinite
        medians = {name: np.median(values) if values else None for name, values in times.items()}
        q20, q80 = (
            np.quantile(times["step_time_s"], [0.2, 0.8]).tolist() if times["step_time_s"] else [None, None]
        )
    peak_tflops = spec.machine.device.peak_tflops.get(spec.compute_dtype)
    scale = spec.machine.box.scale if spec.machine.box is not None else 1.0
    outer = spec.machine.levels[-1].link
    shares = floats(tuple(compress(steps["real_share"], is_measured)))
    return {
        "parameters": spec.model.parameters,
        "seed": spec.seed,
        "tokens_per_step": spec.tokens_per_step,
        "model_flop_per_token": model_flops_per_token(spec.model, spec.seq_len),
        "peak_flop_per_s_per_rank": None if peak_tflops is None else peak_tflops * 1e12 / scale,
        "scale": scale,
        "outer_link_bytes_per_s": None if outer is None else outer.gigabytes_per_s * 1e9 / scale,
        "status": outcome.status,
        "cause": outcome.cause,
        "steps": outcome.steps,
        "measured_steps": sum(is_measured),
        "period": spec.scheme.period,
        "step_time_s": medians["step_time_s"],
        "predicted_step_time_s": box_step_s(spec),
        "step_time_q20_s": q20,
        "step_time_q80_s": q80,
        **{name: medians[name] for name in TIMES[1:]},
        "final_loss": next(iter(floats(steps["loss"][-1:])), None),
        "peak_memory_bytes_max": outcome.peak_memory_bytes_max or None,
        "peak_memory_bytes_min": outcome.peak_memory_bytes_min or None,
        "real_share": max(shares, default=None),
        "interface_bytes": outcome.interface_bytes,
        "ledger_bytes": sent_in(steps) or None,
        "outside_bytes": sum(s.bytes for s in outcome.outside if s.collective != CONTROL) or None,
        "closed_form_outside_bytes": peer_sent_bytes(spec) if _is_comparable(spec) else None,
        "consensus_distance": outcome.consensus_distance,
        "notes": outcome.notes,
        "weights_sha256": outcome.weights_sha256,
        "wall_s": outcome.wall_s,
        "measurement_version": outcome.measurement_version,
    }


def means_of(values: list[float], count: int) -> list[float]:
    """Means of so many values that follow each other, and of all where they are fewer."""
    if count == 1 or not values:
        return values
    whole = range(0, len(values) - count + 1, count)
    return [sum(values[i : i + count]) / count for i in whole] or [sum(values) / len(values)]


def _is_comparable(spec: RunSpec) -> bool:
    """Whether each step sends what a peer's step must send."""
    is_exact = not spec.scheme.is_quantized and spec.scheme.sync is None
    return is_exact and not spec.has_other_axes and spec.context == 1


def _environment(folder: RunFolder) -> Row:
    if not folder.env.exists():
        texts = ("commit", "dirty", "hosts", "device", "links", "torch", "data_sha256")
        return {**dict.fromkeys(texts, ""), "dirty": None}
    env = Environment.read_json(folder.env)
    return {
        "commit": env.commit,
        "dirty": env.dirty,
        "hosts": " ".join(env.hosts),
        "device": env.device,
        "links": env.links,
        "torch": env.versions.get("torch", ""),
        "data_sha256": env.data.get("sha256", ""),
    }


def _warmup(spec: RunSpec, outcome: Outcome, count: int) -> list[bool]:
    """By step: the first ones of the run; and of its last attempt, whose processes were new, if others are
    left to measure."""

    def behind(*begins: int) -> list[bool]:
        return [any(begin <= step < begin + spec.warmup_steps for begin in begins) for step in range(count)]

    found = behind(*(outcome.begins or (0, outcome.resumed_from)))
    return behind(0) if all(found) else found


def _step_lines(spec: RunSpec, outcome: Outcome, keys: str, steps: Columns) -> Iterator[str]:
    """Lines of steps.csv. keys: the run's cells, the same in each line"""
    columns = {**steps, "is_warmup": [*map(str, _warmup(spec, outcome, len(steps["step"])))]}
    for line in zip(*(columns[name] for name in COLUMNS["steps"]), strict=True):
        yield f"{keys},{','.join(line)}\n"


def _closed_bytes(spec: RunSpec) -> Counter[tuple[str, str, str]]:
    """Level, collective and wire -> bytes of a step."""
    return Counter(step_bytes(spec))


def _bytes(spec: RunSpec, outcome: Outcome, closed: Counter[tuple[str, str, str]]) -> Iterator[Row]:
    """Every level that ranks talk over x every collective of the run; 0 is a row too. Copies to and from a
    tier are rows of it.

    Bytes are those of the last step, a steady one: the first gathers no updated weights. Where replicas meet
    seldom, they are the mean over the last period.
    """
    counted = Counter(by_row(outcome.sent))
    found = sorted({*counted, *closed})
    collectives = sorted({(collective, wire) for level, collective, wire in found if level not in TIERS})
    levels = [hop.level for hop in spec.job_levels.hops(SELF, WORLD)]
    copies = [key for key in found if key[0] in TIERS]
    for key in [*((level, *which) for level in levels for which in collectives), *copies]:
        yield {
            **dict(zip(("level", "collective", "wire"), key, strict=True)),
            "counted_bytes": counted[key],
            "closed_form_bytes": closed[key],
            "difference_bytes": abs(counted[key] - closed[key]),
        }


def _outside(outcome: Outcome) -> Iterator[Row]:
    for sent in outcome.outside:
        yield {**sent.model_dump(exclude={"bytes"}), "outside_bytes": sent.bytes}


def _states(measured: Mapping[str, int], closed: Mapping[str, int]) -> Iterator[Row]:
    """The states of the closed form, then the engine's other memory (its closed form is empty)."""
    for state in [*closed, *sorted(set(measured) - set(closed))]:
        held = measured.get(state, 0)
        should = closed.get(state)
        yield {
            "state": state,
            "held_bytes": held,
            "closed_form_bytes": should,
            "difference_bytes": None if should is None else abs(held - should),
        }
