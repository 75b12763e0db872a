"""No test depends on a clock: none but those marked `timed` sleeps for long or compares what a clock said."""

import ast
from collections.abc import Iterable, Iterator
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
}
# Files that may compare times, by reason.
EXCEPTIONS = {
    "a deadline after which a wait is a hang": [
        "waiting.py",
        "anchors/running.py",
        "box/faults_job.py",
        "faults/running.py",
        "mutants/trial.py",
        "stragglers/trial.py",
    ],
    "a campaign that measures times, or ends in time": [
        "anchors/trial.py",
        "campaign/measuring.py",
        "faults/kinds.py",
        "faults/of_replicas.py",
        "fuzz/guided.py",
    ],
}


def is_clock(node: ast.AST) -> bool:
    """The name of a clock, such as time.monotonic, whether it is called or not."""
    match node:
        case ast.Attribute(value=ast.Name(id="time"), attr=name):
            return name.removesuffix("_ns") in CLOCKS
        case ast.Attribute(attr="now" | "utcnow" | "today", value=value):
            return ast.unparse(value).split(".")[-1] in ("datetime", "date")
        case ast.Name(id=name):
            return name.removesuffix("_ns") in CLOCKS - {"time"}
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


def assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets with their values."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[to], value=value):
                yield to, value
            case ast.AnnAssign(target=to, value=ast.expr() as value) | ast.NamedExpr(target=to, value=value):
                yield to, value


def faults(source: str) -> list[str]:
    tree = ast.parse(source)
    if is_timed(tree):
        return []
    nodes = list(parts(tree))
    assigned = [(to.id, value) for to, value in assignments(nodes) if isinstance(to, ast.Name)]
    numbers = {name: value.value for name, value in assigned if isinstance(value, ast.Constant)}
    clocked = {name for name, value in assigned if any(map(is_clock, ast.walk(value)))}
    found = []
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep"), args=[for_s]):
                values = [each.value for each in ast.walk(for_s) if isinstance(each, ast.Constant)]
                values += [numbers.get(each.id) for each in ast.walk(for_s) if isinstance(each, ast.Name)]
                if any(isinstance(value, int | float) and value > LONGEST_SLEEP_S for value in values):
                    found.append(f"line {node.lineno}: sleeps {ast.unparse(for_s)} s")
            case ast.Compare():
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                if names & clocked or any(map(is_clock, ast.walk(node))):
                    found.append(f"line {node.lineno}: compares times: {ast.unparse(node)}")
    return found


def test_no_test_depends_on_a_clock() -> None:
    found = {path.relative_to(TESTS).as_posix(): faults(path.read_text()) for path in TESTS.rglob("*.py")}
    named = {path for paths in EXCEPTIONS.values() for path in paths}
    assert not {path: lines for path, lines in found.items() if lines and path not in named}
    assert all(found[path] for path in named), "an exception that is none"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("time.sleep(2)", ["line 1: sleeps 2 s"]),
        ("LATE_S = 2.0\ntime.sleep(LATE_S)", ["line 2: sleeps LATE_S s"]),
        ("time.sleep(5 - took)", ["line 1: sleeps 5 - took s"]),
        ("clock = time.monotonic\nassert clock() < 60", ["line 2: compares"]),
        ("assert (took := time.time_ns()) and took < 5", ["line 1: compares"]),
        ("assert datetime.datetime.now() < then", ["line 1: compares"]),
        ("sleep(0.5)", []),
        ("start = time.monotonic()\nassert time.monotonic() - start < 60", ["line 2: compares"]),
        (
            "start = time.time()\ntook: float = time.time() - start\nassert took < 5",
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
