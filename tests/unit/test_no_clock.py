"""No test depends on a clock: none but those marked `timed` sleeps for long or compares what a clock said."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LONGEST_SLEEP_S = 1.0
CLOCKS = {
    "time",
    "monotonic",
    "perf_counter",
    "process_time",
    "thread_time",
    "monotonic_ns",
    "perf_counter_ns",
}


def is_clock(node: ast.AST) -> bool:
    """A call such as time.monotonic()."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name)):
            return name in CLOCKS
        case ast.Call(func=ast.Name(id=name)):
            return name in CLOCKS - {"time"}
    return False


def is_timed(node: ast.AST) -> bool:
    """Has the mark `timed`, as a decorator or in the module's `pytestmark`."""
    decorators = getattr(node, "decorator_list", [])
    marks = [ast.unparse(each) for each in decorators]
    if isinstance(node, ast.Module):
        marks = [ast.unparse(each) for each in node.body if isinstance(each, ast.Assign)]
        marks = [mark for mark in marks if mark.startswith("pytestmark")]
    return any("mark.timed" in mark for mark in marks)


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in it that is not timed."""
    left = [node]
    while left:
        inner = [child for child in ast.iter_child_nodes(left.pop()) if not is_timed(child)]
        yield from inner
        left += inner


def faults(source: str) -> list[str]:
    tree = ast.parse(source)
    if is_timed(tree):
        return []
    nodes = list(parts(tree))
    assigned = [(node, node.targets[0]) for node in nodes if isinstance(node, ast.Assign)]
    numbers = {
        to.id: node.value.value
        for node, to in assigned
        if isinstance(to, ast.Name) and isinstance(node.value, ast.Constant)
    }
    clocked = {  # names whose value a clock gave
        to.id
        for node, to in assigned
        if isinstance(to, ast.Name) and any(map(is_clock, ast.walk(node.value)))
    }
    found = []
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep"), args=[for_s]):
                value = for_s.value if isinstance(for_s, ast.Constant) else numbers.get(ast.unparse(for_s), 0)
                if isinstance(value, int | float) and value > LONGEST_SLEEP_S:
                    found.append(f"line {node.lineno}: sleeps {value} s")
            case ast.Compare():
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                if names & clocked or any(map(is_clock, ast.walk(node))):
                    found.append(f"line {node.lineno}: compares times: {ast.unparse(node)}")
    return found


def test_no_test_depends_on_a_clock() -> None:
    """tests/waiting.py alone compares times: the deadline after which a wait is a hang."""
    files = {
        *TESTS.rglob("test_*.py"),
        *(
            path
            for folder in ("dist", "unit", "workflow", "kernels")
            for path in (TESTS / folder).rglob("*.py")
        ),
    }
    found = {path.relative_to(TESTS).as_posix(): faults(path.read_text()) for path in files}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("time.sleep(2)", ["line 1: sleeps 2 s"]),
        ("LATE_S = 2.0\ntime.sleep(LATE_S)", ["line 2: sleeps 2.0 s"]),
        ("sleep(0.5)", []),
        ("start = time.monotonic()\nassert time.monotonic() - start < 60", ["line 2: compares"]),
        (
            "start = time.time()\ntook = time.time() - start\nassert took < 5",
            ["line 3: compares times: took < 5"],
        ),
        ('@pytest.mark.timed("links")\ndef test() -> None:\n    time.sleep(9)', []),
        ('pytestmark = pytest.mark.timed("links")\ntime.sleep(9)', []),
        ("@pytest.mark.slow\ndef test() -> None:\n    time.sleep(9)", ["line 3: sleeps 9 s"]),
    ],
)
def test_what_is_noticed(source: str, says: list[str]) -> None:
    found = faults(source)
    assert len(found) == len(says)
    assert all(line.startswith(part) for line, part in zip(found, says, strict=True))
