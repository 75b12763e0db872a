"""Two runs that differ in any option are never one row, and only what differs in one option is compared."""

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from report_runs import ok_outcome, write_run

from lowband.errors import UserError
from lowband.evidence.report.figures.style import paper_style
from lowband.evidence.tables.build import write_table
from lowband.evidence.tables.collect import KEYS, collect
from lowband.evidence.tables.derived import parity, scaling
from lowband.evidence.tables.entries import COLLECTED, TABLES
from lowband.evidence.tables.points import COLUMNS, identity
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_table, write_csv
from lowband.spec.records import Sent
from lowband.spec.run import OPTIONS, RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.spec.yaml_model import Strict
from tests.checkout import CONFIG, REFERENCE, ROOT

QUICK = settings(deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.filter_too_much])
OF_RUNS = [name for name, table in TABLES.items() if set(table.sources) & set(COLLECTED)]
LOOKED_AT = (
    "scaling", "communication", "memory", "loss", "parity", "convergence", "convergence_curves", "peers",
    "peer_bytes", "box",
)  # fmt: skip
_FIRST = CONFIG.runs(["links"])[0]  # zero3 on 16 ranks in a box
BASE = _FIRST.model_copy(
    update={"run_id": "a", "steps": 24, "model": _FIRST.model.model_copy(update={"tied_head": False})}
)


def base_of(option: str) -> RunSpec:
    """BASE; in stages, with experts or with recomputation where the option is of them."""
    in_stages = {"pipeline": 2, "model": BASE.model.model_copy(update={"layers": 4})}
    expert = 16 if option == "route_parts" else 2  # none of which zero3 divides
    mixed = {"expert": expert, "model": BASE.model.model_copy(update={"experts": 2 * expert})}
    of_experts = mixed if option in ("expert", "route", "route_parts", "copies") else {}
    recomputing = {"recompute": "full"} if option == "recompute_layers" else of_experts
    return BASE.model_copy(update=in_stages if option in ("schedule", "chunks", "layers") else recomputing)


# What tables compare runs by, so that these are looked at alone.
COMPARED_BY = ("engine", "device", "scheme", "ranks", "scaling", "micro_batch", "accumulation")


def is_alike(option: str) -> bool:
    """Whether runs that differ from BASE in this option are compared with no run that differs in another."""
    return base_of(option) == BASE and option not in COMPARED_BY


def valid(base: RunSpec = BASE, **changes: Any) -> RunSpec | None:
    try:
        return RunSpec.model_validate({**base.model_dump(), **changes})
    except ValidationError:
        return None


def values(option: str) -> st.SearchStrategy[Any]:
    """Other values of an option, by its type: nothing to add here when an option is added."""
    kind = RunSpec.model_fields[option].annotation
    by_option: dict[str, st.SearchStrategy[Any]] = {
        "ranks": st.sampled_from([4, 8, 32]),
        "layers": st.sampled_from([(1, 3), (3, 1)]),
        "expert": st.sampled_from([1, 4]),
        "copies": st.integers(1, 4),
        "recompute_layers": st.integers(1, BASE.model.layers - 1),
        "context_attention": st.sampled_from(["gather", "heads"]),
        "machine": st.sampled_from(
            [BASE.machine.with_outer_link(2), BASE.machine.model_copy(update={"name": "other"})]
        ),
        "model": st.integers(1, 3).map(lambda layers: BASE.model.model_copy(update={"layers": layers})),
        "scheme": st.sampled_from(
            [
                CONFIG.scheme("hpz"),
                BASE.scheme.model_copy(update={"block_size": 64}),  # the same name
            ]
        ),
    }
    by_type: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(0, 32),
        float: st.floats(0.1, 10),
        str: st.text("abc", min_size=1),
    }
    if option in by_option:
        return by_option[option]
    if get_origin(kind) is not None:
        return st.sampled_from(get_args(kind))  # a Literal
    return by_type[kind]


def other_by(option: str, data: st.DataObject) -> RunSpec:
    """A spec that differs from `base_of(option)` in this option alone."""
    value, base = data.draw(values(option)), base_of(option)
    assume(value != getattr(base, option))
    other = valid(base, run_id="b", **{option: value.model_dump() if isinstance(value, Strict) else value})
    assume(other is not None)
    return other


def write(folder: Path, spec: RunSpec, factor: int, slower: float = 1) -> list[Path]:
    """A run whose every measurement is `factor` times what it should be."""
    path = write_run(folder, spec, step_time_s=factor * slower, loss=float(factor))
    closed = ok_outcome(spec)
    sent = tuple(part.model_copy(update={"bytes": factor * part.bytes}) for part in closed.sent)
    outside = Sent(level="world", collective="all_gather", wire="native", bytes=1000 * factor)
    states = tuple(part.model_copy(update={"bytes": factor * part.bytes}) for part in closed.states)
    changes = {"sent": sent, "outside": (outside,), "states": states, "weights_sha256": f"{factor:064x}"}
    run = RunFolder(path)
    run.outcome.unlink()  # the first outcome of an attempt stays
    run.write_outcome(closed.model_copy(update=changes))
    return [path]


def write_twin(folder: Path, spec: RunSpec, factor: int) -> list[Path]:
    """The same under FSDP2, twice as slow; nothing where the peer cannot run it."""
    twin = valid(**{**spec.model_dump(), "engine": "fsdp2", "run_id": f"{spec.run_id}-fsdp2"})
    return [] if twin is None else write(folder, twin, factor, slower=2)


@pytest.mark.parametrize("option", [option for option in OPTIONS if not is_alike(option)])
def test_no_table_pools_two_runs_that_differ_in_one_option(option: str) -> None:
    assert_not_pooled(option, examples(option, 1), LOOKED_AT)


def test_no_table_pools_runs_that_differ_in_an_option_each() -> None:
    others = [other for option in OPTIONS if is_alike(option) for other in examples(option, 1)]
    assert len(others) > 20
    assert_not_pooled("", others, LOOKED_AT)


@pytest.mark.wide
@pytest.mark.parametrize("option", OPTIONS)
def test_no_table_at_all_pools_them(option: str) -> None:
    for other in examples(option, 4):
        assert_not_pooled(option, [other], OF_RUNS)


def examples(option: str, count: int) -> list[RunSpec]:
    found: list[RunSpec] = []

    @settings(QUICK, max_examples=count)
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        found.append(other_by(option, data))

    draw()
    return found


def assert_not_pooled(option: str, others: Sequence[RunSpec], tables: Sequence[str]) -> None:
    """option: that in which all of the others differ from its base; "": each in one of its own"""
    base = base_of(option)
    specs = {"a": base} | {f"b{i}": o.model_copy(update={"run_id": f"b{i}"}) for i, o in enumerate(others)}
    factors = {run_id: 2 * i + 1 for i, run_id in enumerate(specs)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [path for run_id, spec in specs.items() for path in write(folder, spec, factors[run_id])]
        if option != "engine":
            for run_id, spec in specs.items():
                runs += write_twin(folder, spec, factors[run_id])
        collect(runs, folder)
        for table in tables:
            write_table(table, folder, root=ROOT)
        read = {table: read_table(folder / f"{table}.csv") for table in ("runs", *tables)}
    points = read["runs"].set_index("run_id")["point"]
    assert points.nunique() == len(points)
    ours = pd.Series({points[run]: factor for run, factor in factors.items()})
    factor = pd.concat([ours, pd.Series({points.get(f"{run}-fsdp2"): f for run, f in factors.items()})])

    by_point = read["scaling"].set_index("point")
    assert sorted(by_point.index) == sorted(points)
    assert (by_point["runs"] == 1).all()
    timed = by_point["step_time_s"].dropna()
    assert len(by_point) - len(timed) == (option == "device")  # a run that only counts is not timed
    assert all(timed[point] == factor[point] for point in ours.index if point in timed and option != "engine")
    if option != "ranks":
        assert (by_point["efficiency"][timed.index] == 1).all()  # each its own base
    box = read["box"].set_index("point")
    assert sorted(box.index) == sorted(points)
    assert (box["repeats"] == 1).all()
    if option not in ("ranks", "engine"):
        assert (box["efficiency"][timed.index] == 1).all()

    for table, counted in (("communication", "counted_bytes"), ("memory", "held_bytes")):
        rows = read[table].dropna(subset=["closed_form_bytes"])
        closed = rows["closed_form_bytes"] * rows["point"].map(factor)
        assert rows[counted].tolist() == pytest.approx(closed.tolist(), rel=1e-9, abs=0)  # of means: rounded
    assert (read["peer_bytes"]["outside_bytes"] == 1000 * read["peer_bytes"]["point"].map(factor)).all()
    curves = read["convergence_curves"]
    assert (curves["seeds"] == 1).all()
    assert (curves["loss"] == curves["point"].map(factor)).all()
    assert (read["peers"]["step_time_ratio"].round(6) == 0.5).all() or option == "engine"
    assert len(read["peers"]) == sum(run.endswith("fsdp2") for run in points.index) or option == "engine"

    if option not in ("scheme", "engine"):
        assert (read["parity"]["distinct_weights"] == 1).all()
        assert (read["convergence"]["difference"] == 0).all()
        assert (box["over_zero3"][timed.index] == 1).all()
    if option not in ("scheme", "ranks", "scaling", "micro_batch", "accumulation"):
        assert (read["loss"]["loss_difference"] == 0).all()


@pytest.mark.parametrize("option", OPTIONS)
@settings(QUICK, max_examples=20)
@given(data=st.data())
def test_specs_that_differ_in_one_option_are_two_points(option: str, data: st.DataObject) -> None:
    mine, its = identity(base_of(option)), identity(other_by(option, data))
    assert {column for column in mine if mine[column] != its[column]} == {"point", COLUMNS[option]}


def test_repeats_are_one_point() -> None:
    specs = CONFIG.runs(["convergence"])
    by_point = pd.DataFrame([identity(spec) | {"repeat": spec.repeat, "seed": spec.seed} for spec in specs])
    groups = by_point.groupby("point")
    assert (groups.size() == 3).all()
    assert (groups["seed"].nunique() == 3).all()
    assert len(groups) == len(specs) / 3


def test_an_options_column_is_no_column_of_what_the_run_found(tables: Path) -> None:
    """Else one of the two would overwrite the other."""
    runs = list(read_table(tables / "runs.csv"))
    assert len(runs) == len(set(runs))
    found = runs[runs.index("parameters") :]
    assert set(KEYS) | {"point", *COLUMNS.values()} == set(runs) - set(found)


def test_the_shipped_sweeps_conditions_are_points() -> None:
    runs, steps = (read_table(REFERENCE / "box" / f"{name}.csv") for name in ("runs", "steps"))
    sweep = runs[runs["suite"] == "box-sweep"]
    # From columns that are no part of the point, as the suite's axes were.
    axes = ["outer_link_bytes_per_s", "tokens_per_step", "compute_time_s", "scheme"]
    assert sweep[axes].drop_duplicates().shape[0] == len(sweep) == 60
    df = scaling.build(runs, steps)
    df = df[df["suite"] == "box-sweep"]
    assert (len(df), set(df["runs"])) == (60, {1})
    one = sweep.set_index("point")
    assert (df.set_index("point")["step_time_s"] == one["step_time_s"]).all()
    # All on 16 ranks: with nothing to compare, no condition is efficient or not.
    assert set(df["efficiency"]) == {1.0}
    assert set(df["condition"]) == {
        f"outer_link {link}, micro_batch {batch}, overlap {overlap}"
        for link in (1, 0.5, 0.25, 0.125, 0.0625)
        for batch in (4, 16)
        for overlap in (True, False)
    }


@pytest.mark.parametrize("name", ["scaling", "loss", "communication"])
def test_every_condition_has_a_place_of_its_own(name: str, tmp_path: Path) -> None:
    """A panel, or a row for each scheme. `communication` used to add up the bytes of all conditions."""
    for raw in ("runs", "steps", "bytes"):
        rows = read_table(REFERENCE / "box" / f"{raw}.csv")
        write_csv(rows[rows["suite"] == "box-accumulation"], tmp_path / f"{raw}.csv")
    write_table(name, tmp_path)
    figure = import_module(f"lowband.evidence.report.figures.{name}")
    with paper_style(), warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a layout that does not fit
        drawn = figure.draw(figure.data(read_table(tmp_path / f"{name}.csv")))
        drawn.savefig(tmp_path / "drawn.svg")
    conditions = [f"accumulation {passes}" for passes in (1, 2, 4, 8)]
    if name == "loss":
        titles = [axes.get_title(loc="left") for axes in drawn.axes]
        assert [title.splitlines()[-1] for title in titles if title.strip()] == conditions
    else:
        rows = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
        assert sorted(rows) == sorted(
            f"{scheme}, {condition}" for scheme in ("zero3", "zeropp", "hier3") for condition in conditions
        )


def test_every_shipped_run_has_a_point_of_its_own_and_its_repeats() -> None:
    for folder in (REFERENCE / name for name in ("box", "convergence", "peers", "local/tables")):
        runs = read_table(folder / "runs.csv")
        assert not runs.duplicated(["point", "repeat"]).any()
        point_of = runs.set_index("run_id")["point"]
        for name in COLLECTED:
            if (folder / f"{name}.csv").exists():
                rows = read_table(folder / f"{name}.csv")
                assert (rows["point"] == rows["run_id"].map(point_of)).all()


@pytest.mark.parametrize(("kept", "scaling_is"), [("micro_batch", "weak"), ("global_batch", "strong")])
def test_efficiency_names_how_the_batch_grows(kept: str, scaling_is: str, tmp_path: Path) -> None:
    """Two batches on 4 and on 8 ranks: each is compared with the one that its suite keeps."""
    root = copy_config(tmp_path)
    write_suite(root, f"fixed: {{{FIXED}}}", f"axes: {{scheme: [zero3], ranks: [4, 8], {kept}: [8, 16]}}")
    specs = Config(root).runs(["mine"])
    # Seconds of a step by (ranks, batch that is kept): on 8 ranks half and all of the throughput per rank.
    seconds = {(4, 8): 1.0, (8, 8): 2.0, (4, 16): 10.0, (8, 16): 10.0}
    if scaling_is == "strong":
        seconds = {(4, 8): 1.0, (8, 8): 1.0, (4, 16): 10.0, (8, 16): 5.0}
    batches = {spec.run_id: getattr(spec, kept) for spec in specs}
    folders = [write_run(tmp_path, s, seconds[s.ranks, batches[s.run_id]], loss=1) for s in specs]
    collect(folders, tmp_path)
    write_table("scaling", tmp_path)
    df = read_table(tmp_path / "scaling.csv")
    assert set(df["scaling"]) == {scaling_is}
    assert set(df["base_ranks"]) == {4}
    efficiency = df.set_index(["ranks", kept])["efficiency"]
    assert dict(efficiency) == {(4, 8): 1, (8, 8): 0.5, (4, 16): 1, (8, 16): 1}


def test_raw_tables_without_points_are_refused(tables: Path, tmp_path: Path) -> None:
    """As an older `lowband collect` wrote them: what would be pooled nobody could see."""
    for name in ("runs", "steps"):
        read_table(tables / f"{name}.csv").drop(columns="point").to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(UserError, match=r"no column 'point'.*collect the run folders again"):
        write_table("scaling", tmp_path)
    assert not (tmp_path / "scaling.csv").exists()


def test_an_option_without_a_value_loses_no_row(tables: Path) -> None:
    runs, loss = (read_table(tables / f"{name}.csv") for name in ("runs", "loss"))
    assert len(parity.build(runs.assign(text=None), loss)) == len(parity.build(runs, loss)) == 3


FIXED = "model: gpt-200k, seq_len: 64, steps: 3, warmup_steps: 1"
NEW_OPTION = "    dropout: NonNegativeFloat = 0.0\n"
WITH_NEW_OPTION = """
import sys
from pathlib import Path
import lowband
from report_runs import write_run
from lowband.evidence.tables.collect import collect
from lowband.evidence.tables.build import write_table
from lowband.spec.config import Config

root, reference = Path(sys.argv[1]), Path(sys.argv[2])
assert Path(lowband.__file__).is_relative_to(root)
specs = Config(root).runs(["mine"])
collect([write_run(root, spec, 1 + 10 * spec.dropout, 5) for spec in specs], root)
write_table("scaling", root)
write_table("box", reference, root / "shipped")  # raw tables of before
"""


def test_adding_an_option_is_one_line(tmp_path: Path) -> None:
    """It is read from a suite, is in the spec, is a column, and two of its values are two points."""
    root = copy_config(tmp_path)
    shutil.copytree(ROOT / "src", root / "src")
    source = root / "src" / "lowband" / "spec" / "run_options.py"
    before = source.read_text()
    anchor = "    grad_clip: PositiveFloat = 1.0\n"
    assert before.count(anchor) == 1
    source.write_text(before.replace(anchor, anchor + NEW_OPTION))
    write_suite(
        root,
        f"fixed: {{{FIXED}, micro_batch: 1}}",
        "axes: {scheme: [zero3], ranks: [4, 8], dropout: [0, 0.1]}",
    )
    subprocess.run(
        [sys.executable, "-c", WITH_NEW_OPTION, str(root), str(REFERENCE / "box")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(ROOT / "tests" / "unit")])},
        check=True,
    )
    df = read_table(root / "scaling.csv")
    assert list(df["runs"]) == [1, 1, 1, 1]
    assert dict(df.set_index(["ranks", "dropout"])["step_time_s"]) == {
        (ranks, dropout): 1 + 10 * dropout for ranks in (4, 8) for dropout in (0, 0.1)
    }
    assert set(df["base_ranks"]) == {4}
    shipped = read_table(root / "shipped" / "box.csv")
    assert len(shipped) == shipped["point"].nunique() > 60


def copy_config(folder: Path) -> Path:
    for part in ("config", "slurm"):
        shutil.copytree(ROOT / part, folder / part)
    return folder


def write_suite(root: Path, *lines: str) -> None:
    text = "\n".join(["purpose: a test", "cluster: local", *lines, ""])
    (root / "config" / "suites" / "mine.yaml").write_text(text)


def test_the_order_of_a_definitions_entries_makes_no_point() -> None:
    device = BASE.machine.device
    rates = {"bf16": 2.0, "fp32": 1.0}
    points = set()
    for peak in (rates, dict(reversed(rates.items()))):
        machine = BASE.machine.model_copy(update={"device": device.model_copy(update={"peak_tflops": peak})})
        points.add(identity(BASE.model_copy(update={"machine": machine}))["point"])
    assert len(points) == 1


def test_a_point_depends_on_the_machines_hardware_alone() -> None:
    """A better source, another constant of the predictor or its default stack parts no repeats."""
    machine = BASE.machine
    level = machine.levels[0]
    assert level.link is not None
    link = level.link.model_copy(update={"source": "elsewhere", "efficiency": None, "latency_us": None})
    levels = (level.model_copy(update={"link": link}), *machine.levels[1:])
    same = machine.model_copy(
        update={"levels": levels, "stack": "fsdp2", "storage": None, "description": "the same"}
    )
    assert identity(BASE.model_copy(update={"machine": same})) == identity(BASE)
    faster = link.model_copy(update={"gigabytes_per_s": 2 * link.gigabytes_per_s})
    levels = (level.model_copy(update={"link": faster}), *machine.levels[1:])
    other = machine.model_copy(update={"levels": levels})
    assert identity(BASE.model_copy(update={"machine": other}))["point"] != identity(BASE)["point"]


@pytest.mark.parametrize(
    "folder", [path.parent.relative_to(REFERENCE) for path in sorted(REFERENCE.rglob("runs.csv"))], ids=str
)
def test_shipped_runs_are_those_of_their_suites(folder: Path) -> None:
    """A new repeat of a shipped run joins its point: no option has changed since."""
    runs = read_table(REFERENCE / folder / "runs.csv")
    now = {spec.run_id: identity(spec) for spec in CONFIG.runs(sorted(set(runs["suite"])))}
    for run in runs.to_dict("records"):
        assert run["point"] == now[run["run_id"]]["point"], run["run_id"]
