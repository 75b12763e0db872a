"""Long tests of kernels are skipped only where they passed on the same files with the same Triton."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.passed import FILE, LONG, Recorder, passed, state

TEST, OTHER = f"{LONG[0]}test_a", f"{LONG[1]}test_b"
KERNEL = "src/lowband/kernels/a_triton.py"


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"triton": "3.7.1"}[name])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {
        KERNEL: "a = 1\n",
        "src/lowband/kernels/softmax_cpu.c": "int a;\n",
        "src/lowband/bench/kernels/main.py": "b = 1\n",
        "src/lowband/bench/gpu/main.py": "b = 2\n",
        "tests/kernels/cases/softmax.py": "c = 1\n",
        "tests/gpu/test_kernels_gpu.py": "d = 1\n",
        "results/reference/kernels/compiled.csv": "kernel\n",
        "docs/kernels.md": "Text.\n```\nexport PYTHONPATH=src\nfirst\n```\nMore.\n",
        "envs/constraints.txt": "torch==2.13.0\ntriton==3.7.1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    ran(Recorder(tmp_path), {TEST: "passed"})
    return tmp_path


def ran(recorder: Recorder, outcomes: dict[str, str]) -> None:
    """As pytest tells it of tests, each by what became of its call."""
    for test, outcome in outcomes.items():
        for when, what in (("setup", "passed"), ("call", outcome), ("teardown", "passed")):
            told = {"passed": what == "passed", "failed": what == "failed"}
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=test, when=when, **told))
    recorder.pytest_sessionfinish()


def change(name: str, text: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(text)


def test_where_nothing_changed_what_passed_need_not_run(root: Path) -> None:
    assert passed(root) == {TEST}
    change("docs/kernels.md", "Other text.\n```\nexport PYTHONPATH=src\nfirst\n```\n")(root)
    change("src/lowband/kernels/a_triton.pyc", "bytecode")(root)
    change("src/lowband/bench/predictor.py", "e = 1\n")(root)
    assert passed(root) == {TEST}


@pytest.mark.parametrize(
    "what",
    [
        *(change(name, "changed\n") for name in (KERNEL, "src/lowband/kernels/softmax_cpu.c")),
        *(
            change(f"{folder}/new.py", "")
            for folder in ("src/lowband/bench/gpu", "tests/kernels", "tests/gpu")
        ),
        change("docs/kernels.md", "```\nexport PYTHONPATH=src\nsecond\n```\n"),
        change("results/reference/kernels/compiled.csv", "changed\n"),
        change("envs/constraints.txt", "torch==2.13.0\ntriton==3.8.0\n"),
        change("envs/constraints.txt", "torch==2.13.0\n"),
        lambda root: (root / KERNEL).unlink(),
        lambda root: (root / "docs/kernels.md").unlink(),
        lambda root: (root / "envs/constraints.txt").unlink(),
        lambda root: (root / FILE).unlink(),
        *(change(FILE, text) for text in ("", "{", "[]", "null", "{}", '{"tests": ["a"]}')),
    ],
)
def test_in_doubt_all_run(root: Path, what: Callable[[Path], object]) -> None:
    what(root)
    assert passed(root) == set()


@pytest.mark.parametrize("tests", [None, 1, TEST, [[TEST]]])
def test_a_list_of_tests_that_is_none(root: Path, tests: object) -> None:
    (root / FILE).write_text(json.dumps({**state(root), "tests": tests}))
    assert TEST not in passed(root)


def test_another_triton_than_the_pinned_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (root / FILE).read_text()
    monkeypatch.setattr(metadata, "version", lambda name: "3.8.0")
    assert passed(root) == set()
    ran(Recorder(root), {TEST: "passed", OTHER: "passed"})
    assert (root / FILE).read_text() == before


def test_without_triton(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert passed(root) == set()


def test_a_run_in_which_one_failed_writes_nothing(root: Path) -> None:
    before = (root / FILE).read_text()
    change(KERNEL, "changed\n")(root)
    ran(Recorder(root), {TEST: "passed", OTHER: "failed"})
    assert (root / FILE).read_text() == before
    ran(Recorder(root), {TEST: "skipped", "tests/unit/test_c.py::test_c": "passed"})
    assert (root / FILE).read_text() == before


def test_what_passed_on_other_files_is_forgotten(root: Path) -> None:
    ran(Recorder(root), {OTHER: "passed", "tests/unit/test_c.py::test_c": "failed"})
    assert passed(root) == {TEST, OTHER}
    change(KERNEL, "changed\n")(root)
    ran(Recorder(root), {OTHER: "passed"})
    assert passed(root) == {OTHER}


def test_a_file_that_changed_during_the_run(root: Path) -> None:
    recorder = Recorder(root)
    change(KERNEL, "changed\n")(root)
    ran(recorder, {OTHER: "passed"})
    assert passed(root) == set()
