"""The generator of mutants: every file that it may mutate has tests, and little code gives few mutants."""

from pathlib import Path

from tests.mutants import which
from tests.mutants.draw import draw

ROOT = Path(__file__).parents[2]


def test_every_mutated_file_has_tests() -> None:
    for folder in which.COUNTS:
        mutated = which.files(ROOT, folder)
        assert mutated, folder
        for file in mutated:
            if file.name != "__init__.py":
                named = [test.partition("::")[0] for test in which.tests_of(file.as_posix())]
                assert all((ROOT / test).exists() for test in named), file


def test_fewer_mutants_than_asked_for(tmp_path: Path) -> None:
    for folder in which.COUNTS:
        (tmp_path / "src" / "lowband" / folder).mkdir(parents=True)
    source = "def f(a):\n    return a < 2\n"
    (tmp_path / "src" / "lowband" / "cost" / "one.py").write_text(source)
    drawn = draw(tmp_path)
    changed = sorted(mutant.apply(source.encode()).decode() for mutant in drawn)
    assert changed == [
        "def f(a):\n    return (a <= 2)\n",
        "def f(a):\n    return None\n",
        "def f(a):\n    return a < (3)\n",
    ]
