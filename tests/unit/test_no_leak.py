"""No test changes what the next one in its process sees: nothing imported is assigned to but by monkeypatch.

A function that a forked rank runs may: the rank ends with it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OWN_PROCESS = {  # imported there alone, by a command of its own or by ranks that end with it
    "anchors/train_deepspeed.py",
    "dist/added_collective.py",
    "kernels/cases/conftest.py",
}


def root_of(target: ast.AST) -> str | None:
    """`a` of a.b.c and of a.b[0]; None of a plain name."""
    if not isinstance(target, ast.Attribute | ast.Subscript):
        return None
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All of them, in loops and branches too, but not those of functions and classes inside."""
    for each in body:
        yield each
        if not isinstance(each, ast.FunctionDef | ast.ClassDef):
            for part in (each, *getattr(each, "handlers", [])):
                for name in ("body", "orelse", "finalbody"):
                    yield from statements(getattr(part, name, []))


def faults(source: str) -> list[str]:
    """Assignments to what is imported, as the module is read or by a test itself."""
    module = ast.parse(source)
    functions = [each for each in module.body if isinstance(each, ast.FunctionDef)]
    imported, found = set[str](), []
    for body in (module.body, *(each.body for each in functions if each.name.startswith("test_"))):
        own = set(imported)
        for each in statements(body):
            match each:
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    own |= {(name.asname or name.name).split(".")[0] for name in names}
                    continue
                case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                    pass
                case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                    targets = [target]
                case _:
                    continue
            single = [one for target in targets for one in getattr(target, "elts", [target])]
            own -= {one.id for one in single if isinstance(one, ast.Name)}
            if any(root_of(one) in own for one in single):
                found.append(f"line {each.lineno}: {ast.unparse(each)}")
        imported = imported or own
    return found


def test_no_test_changes_what_is_imported() -> None:
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    found = {name: faults(path.read_text()) for name, path in files.items() if name not in OWN_PROCESS}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("from m import A\nA.f = 1", ["line 2: A.f = 1"]),
        ("import os\nos.environ['A'] = 'b'", ["line 2: os.environ['A'] = 'b'"]),
        ("import m\ndef test_x():\n    m.n.LIMIT += 1", ["line 3: m.n.LIMIT += 1"]),
        ("import m\nm.a, b = 1, 2", ["line 2: m.a, b = (1, 2)"]),
        ("import m\ntry:\n    pass\nexcept ValueError:\n    m.a: int = 1", ["line 5: m.a: int = 1"]),
        ("import m\ndef on_rank():\n    m.LIMIT = 1", []),
        ("import m\ndef test_x(monkeypatch):\n    monkeypatch.setattr(m, 'LIMIT', 1)", []),
        ("from m import A\nB = {}\nB['x'] = A", []),
        ("from m import A\ndef test_x():\n    A = {}\n    A['x'] = 1", []),
        ("import m\ndef test_x():\n    def prepare():\n        m.f = 1\n    forked(prepare)", []),
        ("def test_x():\n    import m\n    with a:\n        m.f = 1", ["line 4: m.f = 1"]),
    ],
)
def test_what_is_noticed(source: str, says: list[str]) -> None:
    assert faults(source) == says
