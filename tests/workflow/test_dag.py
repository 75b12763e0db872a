"""The DAG: what it would run, and that it runs. Always in a copy of the tree: nothing is written here."""

import json
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pandas as pd
import pytest
import trees
import yaml
from trees import copy_tree, planned, snakemake

from lowband.evidence.report.figures import FIGURES, own_figures
from lowband.evidence.tables.build import write_table
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_benchmark, read_table
from tests.called import called
from tests.checkout import REFERENCE, ROOT

SUITES = sorted(path.stem for path in (ROOT / "config" / "suites").glob("*.yaml"))
MEASURED = ("box", "peers", "convergence")  # families whose results are shipped where no suite measures them
# Suites that are planned at once: of a family, `default`, and all others.
GROUPS = {
    name: [suite for suite in SUITES if suite.partition("-")[0] == name] for name in (*MEASURED, "default")
}
GROUPS["others"] = sorted({*SUITES}.difference(*GROUPS.values()))

TINY = """
purpose: two runs of a few steps
cluster: local
fixed: {model: gpt-200k, global_batch: 4, seq_len: 32, steps: 3, warmup_steps: 1}
axes:
  scheme: [zero3, hpz]
  ranks: [2]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy_tree(tmp_path)
    (tmp_path / "config" / "suites" / "tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=[pytest.mark.wide] * (group in MEASURED)) for group in GROUPS],
)
def test_every_suite_can_be_planned(tree: Path, group: str) -> None:
    suites = GROUPS[group]
    result = snakemake(tree, "-n", "--config", f"suites=[{','.join(suites)}]", "scope=all")
    jobs, config = planned(result), Config(tree)
    assert all(config.runs([suite]) for suite in suites)
    runs = config.runs(suites)
    shared = [
        (cluster, job.nodes, len(job.runs))
        for cluster in {spec.machine.name for spec in runs}
        for job in config.job(cluster).allocations([s for s in runs if s.machine.name == cluster])
    ]
    assert jobs["train"] == len(runs) - sum(number for *_, number in shared) > 0
    assert {name for name in jobs if name.startswith("train_")} == {
        f"train_{cluster}_{nodes}_nodes" for cluster, nodes, _ in shared
    }
    assert jobs["spec"] == len(runs)
    assert jobs["figure"] >= 4
    assert {"collect", "table", "claims", "notebook"} <= set(jobs)
    assert ("bench_softmax" in jobs) == (group == "default")  # else the shipped results are shown
    for family in MEASURED:
        assert (f"results/reference/{family}/" in result.stdout + result.stderr) != (group == family)
    assert sorted(path.name for path in (tree / "results").iterdir()) == ["reference", "reported"]


def test_a_suite_alone(tree: Path) -> None:
    """Its runs, their tables and claims; nothing that is shipped, predicted or drawn.

    No command grows with the runs: the kernel takes at most 128 KiB of one argument, and Snakemake gives the
    shell a command as one.
    """
    result = snakemake(tree, "-n", "-p", "tables", "--config", "suites=[tiny]", "results=tiny")
    jobs = planned(result)
    steps = {"spec", "train", "list_runs", "collect", "table", "own_claims", "tables"}
    assert set(jobs) == steps | {"total"}
    assert jobs["spec"] == jobs["train"] == 2
    assert "results/reference" not in result.stdout + result.stderr
    commands = [line for line in result.stdout.splitlines() if "lowband collect" in line]
    assert ["@results/tiny/tables/runs.txt" in line and "zero3" not in line for line in commands] == [True]


def test_of_a_suite_s_own_runs_nothing_shipped_is_made(tree: Path) -> None:
    """Without asking for more: its tables, claims, figures and a page; training comes first."""
    jobs = planned(snakemake(tree, "-n", "--config", "suites=[tiny]", "results=tiny"))
    steps = {"spec", "train", "list_runs", "collect", "table", "own_claims", "figure", "own_page", "all"}
    assert set(jobs) == steps | {"total"}
    assert jobs["figure"] == len(own_figures(["tiny"])) < len(FIGURES)
    shown = snakemake(tree, "-n", "--config", "suites=[tiny]", "results=tiny", "scope=all").stdout
    for rule in ("spec", "train", "collect"):
        assert "priority: 100" in shown.split(f"rule {rule}:")[1].split("\n\n")[0], rule


def test_kernels_measured_on_a_site_are_put_together_as_the_shipped_ones_are(tree: Path) -> None:
    """The H100's rows stand for a site's: of it the tables have the shipped ones' rows, and no others."""
    measured = tree / "results" / "own" / "kernels" / "cuda" / "kernels.csv"
    measured.parent.mkdir(parents=True)
    shutil.copy(REFERENCE / "h100" / "kernels.csv", measured)
    asked = ["kernels", "--config", "suites=[cuda]", "results=own"]
    result = snakemake(tree, *asked, "--rerun-triggers", "mtime")
    assert result.returncode == 0, result.stderr
    [device] = set(read_benchmark(measured)["device"])
    for name in ("attention", "training_speed", "kernel_rates"):
        shipped, ours = built(name), read_table(measured.parents[1] / f"{name}.csv")
        expected = shipped[(shipped["provenance"] != "measured") | (shipped["device"] == device)]
        assert set(ours.loc[ours["provenance"] == "measured", "device"]) == {device}
        pd.testing.assert_frame_equal(ours, expected.reset_index(drop=True), check_dtype=False)
    assert set(read_table(measured.parents[1] / "quantized_hops.csv")["device"]) == {device}
    jobs = planned(snakemake(tree, "-n", "kernels", "--config", "suites=[box,default]", "results=new"))
    assert jobs == {
        "kernels_frontier_box": 1,
        "kernels_local": 1,
        "kernels_softmax": 1,
        "kernels": 1,
        "total": 4,
    }


def built(name: str) -> pd.DataFrame:
    """A table from what is shipped, as it is read from a file."""
    with tempfile.TemporaryDirectory() as folder:
        write_table(name, REFERENCE / "local" / "tables", Path(folder), ROOT)
        return read_table(Path(folder, f"{name}.csv"))


@pytest.mark.wide
def test_the_workflows_own_file_can_be_named(tree: Path) -> None:
    assert (
        planned(snakemake(tree, "-n", "-s", "workflow/Snakefile", "--config", "suites=[tiny]"))["train"] == 2
    )


def test_from_another_folder(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    result = snakemake(
        tree, "-n", "-s", str(tree / "Snakefile"), "-d", str(tree), "--config", "suites=[tiny]", cwd=elsewhere
    )
    assert planned(result)["train"] == 2


def test_shipped_measurements_train_nothing(tree: Path) -> None:
    jobs = planned(snakemake(tree, "-n", "--config", "measurements=shipped", "results=shipped"))
    assert not {"train", "spec", "collect"} & set(jobs)
    assert {"shipped", "page", "appendix", "provenance"} <= set(jobs)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("suites=[nope]", ("no suite 'nope'", "allowed: ", "smoke")),
        pytest.param("colour=red", ("config/config.yaml", "colour"), marks=pytest.mark.wide),
        pytest.param("results=reported", ("config/config.yaml", "reported"), marks=pytest.mark.wide),
        pytest.param("results=a b", ("config/config.yaml", "results", "a b"), marks=pytest.mark.wide),
        pytest.param("results=../a", ("config/config.yaml", "results", "../a"), marks=pytest.mark.wide),
        pytest.param("measurements=some", ("config/config.yaml", "some"), marks=pytest.mark.wide),
    ],
)
def test_bad_configuration_is_one_line(tree: Path, setting: str, words: tuple[str, ...]) -> None:
    result = snakemake(tree, "--config", setting)
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]
    assert line.startswith("lowband: ")
    assert all(word in line for word in words), line
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in (tree / "results").iterdir()) == ["reference", "reported"]


def test_names_are_quoted_and_escaped(tree: Path) -> None:
    """A cluster and an axis value with spaces, quotes and characters of regular expressions."""
    cluster = "it's (mine) + x.y"
    shutil.copytree(tree / "slurm" / "local", tree / "slurm" / cluster)
    suite = yaml.safe_load(TINY)
    suite["cluster"] = cluster
    suite["axes"] = {"scheme": ["zero3"], "ranks": [2], "learning_rate": [1e-3, 1e20], "text": ["a'b *.txt"]}
    (tree / "config" / "suites" / "t+y.yaml").write_text(yaml.safe_dump(suite))
    result = snakemake(tree, "-n", "-p", "tables", "--config", "suites=[t+y]", "results=tiny")
    assert planned(result)["train"] == 2
    lines = (result.stdout + result.stderr).splitlines()
    launched = [shlex.split(line[line.index("slurm/") :]) for line in lines if "slurm/launch.sh" in line]
    assert [words[:8] for words in launched] == [
        ["slurm/launch.sh", cluster, "1", "1", "", "python", "-m", "lowband"]
    ] * 2
    specs = [words[words.index("train") + 1] for words in launched]
    assert all(re.fullmatch(r"results/tiny/runs/t\+y-[\w.+-]*/spec.json", spec) for spec in specs), specs


OF_TINY = ("--config", "suites=[tiny]", "results=tiny")


@pytest.mark.usefixtures("warm_training")
def test_a_tiny_dag_for_real(tree: Path) -> None:
    """Its runs, their tables and claims, and a figure."""
    asked = ("tables", "figure_scaling", *OF_TINY)
    first = snakemake(tree, *asked)
    assert first.returncode == 0, first.stderr
    assert "2 runs: 2 ok" in first.stdout
    assert re.search(r"^This run: \d+ met", first.stdout, re.MULTILINE)

    folder = tree / "results" / "tiny"
    assert len(list(folder.glob("runs/*/outcome.json"))) == 2
    claims = read_table(folder / "tables" / "claims.csv").set_index("id")["verdict"]
    assert claims["bytes-closed-form"] == claims["weights-bit-equal"] == "met"
    drawn = {path.name for path in (tree / "figures" / "tiny").iterdir()}
    assert drawn == {f"scaling.{kind}" for kind in ("pdf", "svg", "png", "csv", "json")}

    assert planned(snakemake(tree, "-n", *asked)) == {}  # a second run has nothing to do

    for code in ("evidence/tables/collect.py", "engine/passes/engine.py", "run/train.py"):
        with (tree / "src" / "lowband" / code).open("a") as file:
            file.write("# a comment\n")
    assert "train" not in planned(snakemake(tree, "-n", *asked))  # a comment trains nothing again

    suite = tree / "config" / "suites" / "tiny.yaml"
    suite.write_text(TINY.replace("[zero3, hpz]", "[zero3, hpz, hsdp]"))
    assert planned(snakemake(tree, "-n", *asked))["train"] == 1  # a new point trains alone
    suite.write_text(TINY.replace("steps: 3", "steps: 4"))
    assert planned(snakemake(tree, "-n", *asked))["train"] == 2


@pytest.mark.wide
def test_all_of_a_tiny_dag(tree: Path) -> None:
    """test_shipped makes as much without runs, most of it in one process."""
    everything = (*OF_TINY, "scope=all")
    done = snakemake(tree, *everything)
    assert done.returncode == 0, done.stderr
    folder = tree / "results" / "tiny"
    claims = read_table(folder / "tables" / "claims.csv").set_index("id")["verdict"]
    assert claims["bytes-closed-form"] == claims["weights-bit-equal"] == "met"
    suffixes = {path.suffix for path in (tree / "figures" / "tiny").iterdir()}
    assert suffixes == {".pdf", ".svg", ".png", ".csv", ".json"}
    cells = json.loads((folder / "notebooks" / "scaling.ipynb").read_text())["cells"]
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    assert planned(snakemake(tree, "-n", *everything)) == {}  # a second run has nothing to do


@pytest.mark.wide
def test_each_order_examines_the_nodes(tree: Path) -> None:
    assert snakemake(tree, "preflight", *OF_TINY).returncode == 0
    assert planned(snakemake(tree, "-n", "preflight", *OF_TINY))["preflight_run"] == 1


@pytest.mark.wide
@pytest.mark.usefixtures("warm_training")
def test_runs_that_share_a_job(tree: Path) -> None:
    """One fails and keeps no other from running; the same command again runs it alone."""
    (tree / "slurm" / "local" / "job.yaml").write_text("tasks: node\njob_of: nodes\ncpus_per_rank: 1\n")
    text = tree / "text.txt"
    (tree / "config" / "suites" / "tiny.yaml").write_text(
        TINY.replace("[zero3, hpz]", "[zero3]") + "  text: [text.txt, stdlib]\n"
    )
    text.write_text("x")  # too short
    first = snakemake(tree, "tables", *OF_TINY)
    assert first.returncode != 0
    runs = {path.name: path for path in (tree / "results" / "tiny" / "runs").iterdir()}
    bad, good = (next(path for name, path in runs.items() if part in name) for part in ("text.txt", "stdlib"))
    assert (good / "outcome.json").exists()
    ended = (good / "outcome.json").read_bytes()
    assert not (bad / "outcome.json").exists()
    logs = tree / "logs" / "tiny" / "train"
    assert "text.txt" in (logs / f"{bad.name}.log").read_text()
    assert f"{bad.name}: exit code 2" in (logs / "local_1_nodes.log").read_text()

    text.write_text((ROOT / "src" / "lowband" / "__main__.py").read_text() * 10)
    again = snakemake(tree, "tables", *OF_TINY)
    assert again.returncode == 0, again.stderr
    assert "2 runs: 2 ok" in again.stdout
    assert (good / "outcome.json").read_bytes() == ended
    assert planned(snakemake(tree, "-n", "tables", *OF_TINY)) == {}


@pytest.mark.usefixtures("warm_training")
def test_a_run_that_cannot_start_says_why(tree: Path) -> None:
    (tree / "empty.txt").write_text("x")
    (tree / "config" / "suites" / "tiny.yaml").write_text(
        TINY.replace("steps: 3", "steps: 3, text: empty.txt").replace("[zero3, hpz]", "[zero3]")
    )
    result = snakemake(tree, "table_scaling", "--config", "suites=[tiny]", "results=tiny")
    assert result.returncode != 0
    logs = (tree / "logs" / "tiny" / "train").glob("*.log")
    assert any("empty.txt" in log.read_text() for log in logs)
    assert list((tree / "results" / "tiny").glob("runs/*/spec.json"))  # what was asked for stays
    assert not list((tree / "results" / "tiny").glob("runs/*/trained"))


def test_no_output_is_tracked(tree: Path, needs_git: None) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    summary = snakemake(tree, "--summary", "--config", "suites=[default,smoke]")
    assert summary.returncode == 0, summary.stderr
    outputs = {line.split("\t")[0] for line in summary.stdout.splitlines()[1:]}
    assert "results/local/tables/claims.csv" in outputs
    assert not outputs & set(tracked.stdout.splitlines())


def test_what_the_planner_writes_can_be_run(tree: Path) -> None:
    job = [
        "--cluster",
        "frontier-box",
        "--model",
        "gpt-600k",
        "--gpus",
        "4",
        "--seq",
        "64",
        "--tp",
        "1",
        "--pp",
        "1",
    ]
    tracked = (tree / "config" / "schemes.yaml").read_text()
    done = called(trees.python(), "-m", "lowband", "plan", *job, "--write", "found", cwd=tree, tree=tree)
    assert done.returncode == 0, done.stderr
    assert (tree / "config" / "schemes.yaml").read_text() == tracked
    assert (tree / "config" / "schemes" / "found.yaml").exists()
    assert planned(snakemake(tree, "-n", "--config", "suites=[found]"))["train"] == 1
