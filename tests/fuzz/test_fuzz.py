"""A sample of the campaign; that it notices what it looks for, and has a target for all that is read."""

import ast
import csv
import subprocess
import sys
from pathlib import Path

import pytest

from lowband.__main__ import command_line
from lowband.errors import UserError
from lowband.evidence.importers import FORMATS
from lowband.evidence.tables.entries import TABLES
from tests.called import called
from tests.checkout import ROOT
from tests.fuzz import arguments, campaign, judge, of_config, of_peers, of_tables
from tests.fuzz.readers import OWN, READERS
from tests.fuzz.target import Target

SOURCE = ROOT / "src" / "lowband"
READS = {
    "read_text", "read_lines", "read_bytes", "read_yaml", "read_json", "read_entries", "parse_json",
    "parse_yaml", "loads", "read_csv", "read_table", "read_benchmark", "read_published", "read_graded",
    "open", "getenv", "safe_open", "model_validate_json", "frombuffer", "safe_load", "parse_args",
}  # fmt: skip


# The campaign; then the packages of which a module was imported while a call's limit of time ran.
WATCHED = """
import sys
from contextlib import contextmanager
from tests.fuzz import __main__, judge

limited, late = judge._within_limit, set()

@contextmanager
def watched():
    before = set(sys.modules)
    with limited():
        yield
    late.update(name.partition(".")[0] for name in set(sys.modules) - before)

judge._within_limit = watched
code = __main__.main()
print("imported late:", *sorted(late))
sys.exit(code)
"""


@pytest.mark.parametrize("inputs", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_no_input_is_a_defect(inputs: int, tmp_path: Path) -> None:
    """Nor is what takes seconds to import left to a call, where the limit of time could end it."""
    out = tmp_path / "inputs.csv"
    done = called(sys.executable, "-c", WATCHED, "--inputs", str(inputs), "--out", out, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = _rows(tmp_path)
    assert len(rows) > 80
    assert {row["edges"] for row in rows} == {""}  # not guided
    [late] = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("imported late:")]
    assert not {"lowband", "torch", "matplotlib", "deepspeed"} & set(late)


def test_coverage_leads(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    asked = ["--guided", "--inputs", "60", "--target", "lock", "own scheme"]
    out = ["--out", tmp_path / "inputs.csv"]
    done = called(sys.executable, "-m", "tests.fuzz", *asked, *out, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = _rows(tmp_path)
    assert [row["parser"] for row in rows] == ["own scheme", "lock"]
    assert all(int(row["edges"]) > 2 for row in rows)


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "inputs.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _fails(_: Path) -> None:
    raise KeyError("x")


def _hangs(_: Path) -> None:
    while True:
        pass


class _Finalized:
    def __del__(self) -> None:
        _hangs(Path())


def _hangs_where_errors_are_dropped(_: Path) -> None:
    _Finalized()
    _hangs(Path())


def _talks(_: Path) -> None:
    raise UserError("x " * 700, where="file", allowed="y " * 3000)


def _names_no_file(_: Path) -> None:
    raise UserError("is wrong")


def _takes_all(_: Path) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (_fails, "traceback"), (_hangs, "hang"), (_talks, "refused"), (str, "accepted"),
        (_hangs_where_errors_are_dropped, "hang"), (_takes_all, "memory"), (_names_no_file, "no place"),
    ],
)  # fmt: skip
def test_defects_are_noticed(call, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if expected == "hang":  # any limit ends it; what ends by itself must not meet a short one
        monkeypatch.setattr(judge, "TIME_LIMIT_S", 0.2)
    target = Target("t", "file", "yaml", "a: 1", call)
    assert judge.outcome(target, b"a: 2", tmp_path)[0] == expected
    tally = campaign.Tally()
    for _ in range(2):
        tally.add(target, *judge.outcome(target, b"a: 2", tmp_path), b"a: 2")
    assert tally.counts[expected] == 2
    assert len(tally.examples) == (expected in judge.DEFECTS)


def test_memory_is_bounded(tmp_path: Path) -> None:
    target = Target("t", "file", "yaml", "a: 1", lambda _: bytearray(3 * 2**30))
    with judge.limit_memory():
        assert judge.outcome(target, b"a: 2", tmp_path)[0] == "memory"


@pytest.mark.parametrize(
    "words", ["--out ../elsewhere", "--out /nowhere/x", "--root . --suite mine --out sub"]
)
def test_a_command_writes_only_where_it_is_told_to(words: str, tmp_path: Path) -> None:
    """Both are refused to a fuzzed command; only what nobody asked for is a defect."""
    root = tmp_path / "a" / "root"
    root.mkdir(parents=True)
    with arguments._inside(root, words.split()) as elsewhere:
        with pytest.raises(PermissionError):
            (tmp_path / "stray").write_text("x")
        with pytest.raises(PermissionError):
            (root.parent / "elsewhere").mkdir()
        (root / "sub").mkdir()
        with pytest.raises(arguments.Started):
            subprocess.run(["true"])
    named = "elsewhere" in words
    assert elsewhere == [f"open {tmp_path / 'stray'}"] + [f"os.mkdir {root.parent / 'elsewhere'}"] * (
        not named
    )


def names() -> set[str]:
    """Of the targets that need no sound run to be listed; those that do are named by their own file."""
    found = {target.name for target in [*of_config.targets("{}"), *of_peers.targets(), *of_tables.targets()]}
    of_runs = (Path(__file__).parent / "of_runs.py").read_text(encoding="utf-8")
    texts = {node.value for node in ast.walk(ast.parse(of_runs)) if isinstance(node, ast.Constant)}
    return found | {f"lowband {verb}" for verb in arguments.VECTORS} | {str(text) for text in texts}


def test_every_module_that_reads_text_has_a_target() -> None:
    reading = {
        path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")
        if any(_reads(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    }  # fmt: skip
    assert reading == set(READERS)
    known = names()
    for module, tried in READERS.items():
        if isinstance(tried, str):
            assert tried.startswith(OWN), module
            continue
        for beginning in tried:
            assert any(name.startswith(beginning.removesuffix("spec.json").removesuffix("outcome.json"))
                       for name in known), (module, beginning)  # fmt: skip


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "environ"
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in READS


def test_every_verb_format_table_and_folder_of_configuration_has_a_target() -> None:
    assert set(arguments.VECTORS) == set(command_line()[1])
    known = names()
    assert {f"log: {form}" for form in FORMATS} <= known
    assert {f"table: {name}" for name in TABLES} <= known
    files = {path.name for path in (ROOT / "config").glob("*.yaml")}
    assert files <= known
