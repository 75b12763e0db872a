"""The generator of mutants: every file that it may mutate has tests, and little code gives few mutants."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.checkout import ROOT
from tests.mutants import which
from tests.mutants.draw import draw


def test_every_mutated_file_has_tests() -> None:
    for folder in which.COUNTS:
        mutated = [file for file in which.files(ROOT, folder) if file.name != "__init__.py"]
        assert mutated, folder
        for file in mutated:
            tests = which.tests_of(file.as_posix())
            assert tests, file
            for test in tests:
                path, _, name = test.partition("::")
                assert (ROOT / path).exists(), (file, test)
                if name:
                    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), (file, test)


def test_every_mutant_is_of_a_folder_that_can_be_asked_for() -> None:
    assert {which.folder_of(mutant.file) for mutant in draw(ROOT)} == {*which.COUNTS}


def test_tests_of_the_engine_are_about_its_files() -> None:
    """One of them imports the file, or uses what it defines, or what is made of that in up to three steps.

    Every step's tests are enough for what the engine imports.
    """
    trees = {path: _tree(ROOT / path) for path in which.files(ROOT, "engine") if path.stem != "__init__"}
    path_of = {".".join(path.with_suffix("").parts[1:]): path for path in trees}
    of_step, left = set(), [path_of["lowband.engine.passes.engine"]]
    while left:
        of_step.add(path := left.pop())
        left += {path_of[name] for name in _imported(trees[path].body) & path_of.keys()} - of_step
    made_of = {node.name: _names(node) for tree in trees.values() for node in _definitions(tree)}
    del made_of["Engine"]  # it is made of nearly everything
    for name, path in path_of.items():
        about = {name, *(node.name for node in _definitions(trees[path]))}
        for _ in range(3):
            about |= {other for other, names in made_of.items() if names & about}
        tests = which.tests_of(path.as_posix())
        used = set().union(*(_used(ROOT / test.partition("::")[0]) for test in tests))
        assert used & about or (path in of_step and {*which.EVERY_STEP} <= {*tests}), path


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _definitions(tree: ast.Module) -> list[ast.ClassDef | ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def _imported(nodes: Iterable[ast.AST]) -> set[str]:
    return {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def _names(tree: ast.AST) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    return {node.id if isinstance(node, ast.Name) else node.attr for node in nodes}


@cache
def _used(test: Path) -> set[str]:
    """Modules that a test file imports, and names that it or a helper beside it uses."""
    found = _imported(ast.walk(_tree(test)))
    helpers = [test.with_name(f"{name.rpartition('.')[2]}.py") for name in found]
    return found.union(*(_names(_tree(path)) for path in (test, *filter(Path.exists, helpers))))


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
