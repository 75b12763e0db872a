"""The campaign in a small repository, whose `lowband` and whose cases are a few lines of Python."""

import fcntl
import os
import signal
from collections.abc import Iterator
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowband.evidence.claims.experiments import read_experiments
from lowband.evidence.report.verify import verify, write_sums
from lowband.evidence.tables.points import identity
from tests.campaign import measuring
from tests.campaign.__main__ import main
from tests.campaign.landing import CAMPAIGN, IN_TREE, _default
from tests.campaign.measuring import WORK
from tests.campaign.parts import PARTS, Part, Step
from tests.campaign_rows import read
from tests.checkout import CONFIG, ROOT
from tests.named_commits import git

# Each training and each case is a line of the file `did`; one that the file `stops` names stops the campaign.
STOP = """
import os, pathlib, signal, subprocess, sys
did, stops = (pathlib.Path(os.getcwd().split("/build/")[0], name) for name in ("did", "stops"))
def now(what):
    with did.open("a") as file: print(what, file=file)
    if stops.exists() and stops.read_text() == what:
        stops.unlink()
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
"""
LOWBAND = (
    STOP
    + """
verb, *words = sys.argv[1:]
out = pathlib.Path(words[-1])
if verb == "spec":
    for name in words[1:-2]:
        for run in ("r1", "r2"):
            (out / f"{name}-{run}").mkdir(parents=True)
elif verb == "train":
    now(out.parent.name)
    (out.parent / "outcome.json").write_text('{"status": "ok", "steps": 1}')
else:
    out.mkdir(exist_ok=True)
    names = [pathlib.Path(word).name for word in words[:-2]]
    rows = [f"{n},{n[:-3]},2,ok,{commit},1,\\n" for n in names]
    (out / "runs.csv").write_text("run_id,suite,wall_s,status,commit,tensor,printed\\n" + "".join(rows))
    steps = [f"{n},{n[:-3]},{i},0.5,9.0\\n" for n in names for i in (1, 2)]
    (out / "steps.csv").write_text("run_id,suite,step,loss,step_time_s\\n" + "".join(steps))
    for other in ("bytes", "states", "outside"): (out / f"{other}.csv").write_text("run_id,suite\\n")
"""
)
CASES = (
    STOP
    + """
out, first = pathlib.Path(sys.argv[3]), int(sys.argv[1])
now(f"case {first}")
with (out / "cases.csv").open("a") as file:
    if not file.tell(): print("seed,seconds,wrong,commit", file=file)
    print(f"{first},1,{'late' * first},{commit}", file=file)
(out / "env.json").write_text("{}")
"""
)
SHIPPED = {
    "box/runs.csv": "run_id,suite,wall_s,status,commit\nother-r1,other,1.50,ok,old\none-r1,one,7,ok,old\n"
    "one-r9,one,,not run,\nother-r2,other,1e-3,ok,old\n",
    "box/faults.csv": "peer,fault\nsomebody's,of another kind than the table faults\n",
    "box/steps.csv": "run_id,suite,step,loss\none-r1,one,1,0.25\nother-r1,other,1,0.1250\n",
    "cases/cases.csv": "seed,seconds,wrong,commit\n0,3600,,old\n",
    "cases/env.json": "{...}",
}
STEPS = tuple(Step(("cases", str(i), "--out", "{out}"), "cases.csv", 1, range(i, i + 1)) for i in (0, 1))
FAKE = {
    "one": Part("box", True, ("one",), left_out=("step_time_s",)),
    "cases": Part("cases", False, steps=STEPS, table="cases.csv", is_wrong=lambda row: bool(row["wrong"])),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_git: None) -> Iterator[Path]:
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "a")
        monkeypatch.setenv(f"{name}_EMAIL", "a@b")
    here = {"processor": "a processor", "boot_id": "boot 1", "host": "a host"}
    monkeypatch.setattr(measuring, "place", lambda: here)
    files = {
        "src/lowband/__init__.py": "",
        "src/lowband/__main__.py": LOWBAND,
        "cases.py": CASES,
        ".gitignore": "build/\ndid\nstops\n",
    }
    files |= {f"{IN_TREE}/{name}": text for name, text in SHIPPED.items()}
    for name, text in {**files, "results/reported/a.csv": "a\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_sums(tmp_path)
    git("init", "--quiet", root=tmp_path)
    git("add", ".", root=tmp_path)
    git("commit", "--quiet", "-m", "first", root=tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell ignores
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def begin(root: Path, *words: str, parts: dict[str, Part] = FAKE) -> int:
    return main(words, root, parts)


def did(root: Path) -> list[str]:
    return (root / "did").read_text().splitlines() if (root / "did").exists() else []


def test_rows_of_a_part_are_replaced_and_committed_alone(root: Path) -> None:
    first = git("rev-parse", "HEAD", root=root)
    (root / "left").write_text("untracked\n")
    assert begin(root) == 0
    assert (root / IN_TREE / "box/runs.csv").read_text() == (
        f"run_id,suite,wall_s,status,commit\nother-r1,other,1.50,ok,old\none-r1,one,2,ok,{first}\n"
        f"one-r2,one,2,ok,{first}\nother-r2,other,1e-3,ok,old\n"
    )
    assert (root / IN_TREE / "box/steps.csv").read_text().splitlines() == [
        "run_id,suite,step,loss", "one-r1,one,1,0.5", "one-r1,one,2,0.5", "one-r2,one,1,0.5",
        "one-r2,one,2,0.5", "other-r1,other,1,0.1250",
    ]  # fmt: skip
    assert (root / IN_TREE / "box/faults.csv").read_text() == SHIPPED["box/faults.csv"]
    assert [row["wrong"] for row in read(root / IN_TREE / "cases/cases.csv")] == ["", "late"]
    assert (root / IN_TREE / "cases/env.json").read_text() == "{}"
    assert verify(root)[1] == []
    rows = read(root / CAMPAIGN)
    assert [(row["part"], row["commit"], row["boot_id"]) for row in rows] == [
        ("one", first, "boot 1"), ("cases", first, "boot 1"),
    ]  # fmt: skip
    said = git("log", "--format=%s", "--name-only", "-2", root=root)
    assert "one at" in said and "2 rows, 0 of them wrong" in said and "2 rows, 1 of them wrong" in said
    assert set(said.split()) & {"left", "cases.py"} == set()
    assert git("status", "--porcelain", root=root) == "?? left"
    before = git("rev-parse", "HEAD", root=root)
    assert begin(root) == 0  # the campaign under way is the recorded one
    assert git("rev-parse", "HEAD", root=root) == before and len(did(root)) == 4


def test_each_repeat_may_be_a_part(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured after the machine was started again: the other repeat's rows stay."""
    parts = {f"one-{n}": FAKE["one"]._replace(repeat=n) for n in (1, 2)}
    assert begin(root, "--only", "one-1", parts=parts) == 0
    assert did(root) == ["one-r1"]
    assert [row["run_id"] for row in read(root / IN_TREE / "box/runs.csv")] == [
        "other-r1", "one-r1", "one-r9", "other-r2"
    ]  # fmt: skip
    monkeypatch.setattr(measuring, "place", lambda: {"processor": "b", "boot_id": "boot 2", "host": "h"})
    assert begin(root, parts=parts) == 0
    assert did(root) == ["one-r1", "one-r2"]
    assert [(row["part"], row["boot_id"]) for row in read(root / CAMPAIGN)] == [
        ("one-1", "boot 1"), ("one-2", "boot 2"),
    ]  # fmt: skip


@pytest.mark.parametrize("stops", ["one-r2", "case 1"])
def test_what_was_cut_goes_on(root: Path, stops: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = git("rev-parse", "HEAD", root=root)
    (root / "stops").write_text(stops)
    assert begin(root) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "tests.campaign: interrupted; the same command goes on\n"
    assert did(root)[-1] == stops
    git("commit", "--quiet", "--allow-empty", "-m", "later", root=root)
    assert begin(root) == 0
    assert sorted(did(root)) == sorted(["one-r1", "one-r2", "case 0", "case 1", stops])
    assert {row["commit"] for row in read(root / CAMPAIGN)} == {first}


def test_what_ended_as_the_campaign_was_killed_is_put(root: Path) -> None:
    (root / "cases.py").write_text(f"{CASES}os.kill(os.getppid(), signal.SIGKILL)\n")
    git("commit", "--quiet", "-a", "-m", "kills", root=root)
    parts = {"cases": FAKE["cases"]._replace(steps=STEPS[:1])}
    killed = get_context("fork").Process(target=begin, args=(root,), kwargs={"parts": parts})
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and did(root) == ["case 0"]
    with (root / WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the case has ended, too
    assert begin(root, parts=parts) == 0
    assert did(root) == ["case 0"] and len(read(root / CAMPAIGN)) == 1


def test_what_a_killed_campaign_left_running_keeps_the_next_from_beginning(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on = 'pathlib.Path("pid").write_text(str(os.getpid()))\nos.kill(os.getppid(), signal.SIGKILL)\n'
    (root / "cases.py").write_text(f"{CASES}os.chdir(did.parent)\n{goes_on}signal.pause()\n")
    git("commit", "--quiet", "-a", "-m", "kills", root=root)
    killed = get_context("fork").Process(target=begin, args=(root, "--only", "cases"))
    killed.start()
    killed.join()
    try:
        assert begin(root, "--only", "one") == 2
        assert capsys.readouterr().err.endswith("build/campaign/lock: another campaign runs in this tree\n")
    finally:
        os.kill(int((root / "pid").read_text()), signal.SIGKILL)


def test_sides_of_a_ratio_are_of_one_boot(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stops in ("one-r2", "case 1"):
        (root / "stops").write_text(stops)
        assert begin(root, "--only", "one" if stops == "one-r2" else "cases") == 128 + signal.SIGINT
    after = {"processor": "a processor", "boot_id": "boot 2", "host": "a host"}
    monkeypatch.setattr(measuring, "place", lambda: after)
    assert begin(root) == 0
    assert did(root) == ["one-r1", "one-r2", "case 0", "case 1", "one-r1", "one-r2", "case 1"]
    assert [row["boot_id"] for row in read(root / CAMPAIGN)] == ["boot 2", "boot 1 / boot 2"]


def test_nothing_is_begun_that_takes_longer(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert begin(root, "--list") == 0
    assert "left: 1.0 h\n" in capsys.readouterr().out
    steps = (STEPS[0]._replace(goes_on=False), STEPS[1])
    assert begin(root, "--minutes", "1", parts=FAKE | {"cases": FAKE["cases"]._replace(steps=steps)}) == 1
    assert did(root) == ["one-r1", "one-r2", "case 1"]
    assert "cases: 1 of 2 left: no time" in capsys.readouterr().out


def test_what_has_no_time_left_is_cut(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "cases.py").write_text("import signal; signal.pause()\n")
    git("commit", "--quiet", "-a", "-m", "waits", root=root)
    for module in ("__main__", "measuring"):  # no time passes until the step has begun
        monkeypatch.setattr(f"tests.campaign.{module}.time", SimpleNamespace(monotonic=lambda: 0.0))
    parts = {"cases": FAKE["cases"]._replace(steps=STEPS[:1])}
    assert begin(root, "--minutes", "0.001", parts=parts) == 1
    assert "cases: cases 0: cut: it goes on when it is begun again" in capsys.readouterr().out
    assert not (root / CAMPAIGN).exists()


def test_a_part_that_fails_keeps_no_other_from_running(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "src/lowband/__main__.py").write_text(LOWBAND.replace('"status": "ok"', '"status": "overloaded"'))
    git("commit", "--quiet", "-a", "-m", "slow", root=root)
    assert begin(root) == 1
    assert [row["part"] for row in read(root / CAMPAIGN)] == ["cases"]
    assert "one: one-r1: exit code 0" in capsys.readouterr().out


def test_columns_must_agree_before_anything_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert begin(root, parts={"one": FAKE["one"]._replace(left_out=("step_time_s", "loss"))}) == 1
    assert "box/steps.csv: columns that the new rows lack (allowed: loss)" in capsys.readouterr().out
    (root / "src/lowband/__main__.py").write_text(LOWBAND.replace("{commit},1,", "{commit},2,new"))
    git("commit", "--quiet", "-a", "-m", "new columns", root=root)
    assert begin(root, "--commit", "HEAD", "--only", "one") == 1
    assert "box/runs.csv: new columns: tensor, printed" in capsys.readouterr().out
    assert did(root) == []


@pytest.mark.parametrize("cell", ["a" * 40, "{commit}-dirty"])
def test_rows_of_another_commit_are_refused(
    root: Path, cell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "cases.py").write_text(CASES.replace("{commit}", cell))
    git("commit", "--quiet", "-a", "-m", "strange", root=root)
    assert begin(root, "--only", "cases") == 1
    assert "cases: rows of " in capsys.readouterr().out
    assert git("status", "--porcelain", root=root) == "" and read(root / CAMPAIGN) == []


def test_what_cannot_be_committed_is_put_later(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = root / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho no >&2; exit 1\n")
    hook.chmod(0o755)
    assert begin(root, "--only", "cases") == 2
    assert capsys.readouterr().err == "tests.campaign: commit --quiet: no\n"
    assert git("status", "--porcelain", root=root) == "" and not (root / CAMPAIGN).exists()
    hook.unlink()
    assert begin(root, "--only", "cases") == 0
    assert did(root) == ["case 0", "case 1"] and len(read(root / CAMPAIGN)) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "two"], "--only: no part 'two' (allowed: one, cases)"),
        (["--commit", "nothing"], "--commit: no commit 'nothing' (allowed: one of this history)"),
        (["--commit", "aside"], "is no ancestor of HEAD (allowed: a commit that has landed)"),
        (["changed"], "cases.py: changed (allowed: a tree without changes)"),
        (["new"], "results/reference/new.csv: changed, or new (allowed: commit or restore it first)"),
        (["locked"], "build/campaign/lock: another campaign runs in this tree"),
    ],
)
def test_a_refusal_is_one_line(
    root: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    git("checkout", "--quiet", "-b", "aside", root=root)
    git("commit", "--quiet", "--allow-empty", "-m", "aside", root=root)
    git("checkout", "--quiet", "-", root=root)
    (root / WORK).mkdir(parents=True)
    with (root / WORK / "lock").open("w") as lock:
        match words:
            case ["changed"]:
                (root / "cases.py").write_text("")
            case ["new"]:
                (root / IN_TREE / "new.csv").write_text("")
            case ["locked"]:
                fcntl.flock(lock, fcntl.LOCK_EX)
        assert begin(root, *(word for word in words if len(words) > 1)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith(f"{told}\n")
    assert did(root) == []


def test_every_fault_is_of_one_part() -> None:
    rows = read(ROOT / IN_TREE / "faults" / "injected.csv")
    parts = [part for part in PARTS.values() if part.table == "injected.csv"]
    assert [sum(map(part.has, rows)) for part in parts] == [part.steps[0].rows for part in parts]
    assert all(sum(part.has(row) for part in parts) == 1 for row in rows)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_there_and_its_columns_fit(name: str) -> None:
    """Every suite and module is there, and no option of a run would be lost in a shipped table."""
    part = PARTS[name]
    folder = ROOT / IN_TREE / part.folder
    for step in part.steps:
        module, *words = step.command
        path = ROOT / module.replace(".", "/")
        source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))
        assert len(read(folder / part.table)) > 0 and step.command[-1].startswith("{out}")
    shipped = read(folder / "runs.csv") if part.suites else []
    others = [row for row in shipped if not part.has(row)]
    for spec in CONFIG.runs(part.suites) if others else []:
        added = {column: str(value) for column, value in identity(spec).items() if column not in shipped[0]}
        assert {column: "" if value == "None" else value for column, value in added.items()} == {
            column: _default(column) for column in added
        }


def test_an_experiment_names_the_day_of_its_rows() -> None:
    """Of rows that the campaign measured again, that it did: `shipped` of config/experiments.yaml."""
    begun = {row["part"]: date.fromisoformat(row["begun"][:10]) for row in read(ROOT / CAMPAIGN)}
    days = dict[str, date]()
    for name, day in begun.items():
        days |= {suite: max(day, days.get(suite, day)) for suite in PARTS[name].suites}
    found = [
        (name, each.shipped, max(days[suite] for suite in each.measured.suites if suite in days))
        for name, each in read_experiments(ROOT / "config").items()
        if each.measured is not None and days.keys() & set(each.measured.suites)
    ]
    assert found and all(shipped is not None and shipped >= day for _, shipped, day in found), found
