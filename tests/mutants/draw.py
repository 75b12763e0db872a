"""The generator: sources to single mutants. Pure; the same sources and seed give the same mutants.

A mutant replaces one expression or statement. Docstrings, annotations, decorators, messages (f-strings, what
is raised, descriptions of fields) and patterns stay as they are.
"""

import ast
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from textwrap import shorten
from typing import NamedTuple

from tests.mutants.which import COUNTS, files

SEED = 14
_LONGEST = 200  # characters of code in a row

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_CHANGED = (ast.Compare, ast.BoolOp, ast.Constant, ast.UnaryOp, ast.BinOp, ast.Call)
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list"}
_TEXT = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict)  # what + joins and * repeats


class Mutant(NamedTuple):
    """`text` in place of bytes `start` to `end` of `file`, a path relative to the tree's root.

    before, after: the lines from `line` on that this changes, on one line, cut where they are long
    """

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def draw(root: Path, seed: int = SEED) -> list[Mutant]:
    """COUNTS mutants of each folder, one kind after the other, so that rare kinds are drawn as often."""
    found = []
    for folder, count in COUNTS.items():
        random = Random(f"{seed} {folder}")
        sources = {path: (root / path).read_bytes() for path in files(root, folder)}
        by_kind: dict[str, list[Mutant]] = {}
        for path, source in sources.items():
            for mutant in mutants(path.as_posix(), source):
                by_kind.setdefault(mutant.kind, []).append(mutant)
        drawn = []
        while len(drawn) < count and any(by_kind.values()):
            for kind in sorted(kind for kind, left in by_kind.items() if left):
                left = by_kind[kind]
                drawn.append(left.pop(random.randrange(len(left))))
        found += sorted(drawn[:count])
    return found


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every single mutant of a source."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for kind, node, after in _changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = f"({after})" if isinstance(node, ast.expr) else after
        first, last = starts[node.lineno - 1], starts[node.end_lineno]
        before, changed = source[first:last], source[first:start] + text.encode() + source[end:last]
        found.append(Mutant(file, node.lineno, kind, _line(before), _line(changed), start, end, text))
    return found


def _line(code: bytes) -> str:
    return shorten(code.decode(), _LONGEST, placeholder=" ...")


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Kind, what is replaced, and by what, in `node` and below."""
    if isinstance(node, ast.JoinedStr | ast.pattern) or _is_description(node):
        return
    yield from _here(node)
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _is_description(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "description"


def _here(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    yield from _expressions(node)
    yield from _statements(node)
    for test in _tests(node):
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield "condition negated", test, f"not {ast.unparse(test)}"


def _expressions(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    if not isinstance(node, _CHANGED):
        return  # a copy of each file, class and function would take most of the time
    changed = deepcopy(node)
    match changed:
        case ast.Compare(ops=operators):
            for place, operator in enumerate(operators):
                operators[place] = _COMPARISONS[type(operator)]()
                yield "comparison", node, ast.unparse(changed)
                operators[place] = operator
        case ast.BoolOp():
            changed.op = ast.And() if isinstance(changed.op, ast.Or) else ast.Or()
            yield "boolean", node, ast.unparse(changed)
        case ast.Constant(value=bool() as value):
            yield "boolean", node, str(not value)
        case ast.Constant(value=(int() | float()) as value):
            yield "constant", node, repr(value + 1)
        case ast.UnaryOp(op=ast.Not()):
            yield "not dropped", node, ast.unparse(changed.operand)
        case ast.BinOp() if type(changed.op) in _ARITHMETIC and not _is_text(changed.left, changed.right):
            changed.op = _ARITHMETIC[type(changed.op)]()
            yield "arithmetic", node, ast.unparse(changed)
        case ast.Call(func=ast.Name(id=name) as function) if name in _CALLS:
            function.id = _CALLS[name]
            yield "min, max, any, all", node, ast.unparse(changed)


def _statements(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    match node:
        case ast.AugAssign() if type(node.op) in _ARITHMETIC and not _is_text(node.value):
            changed = deepcopy(node)
            changed.op = _ARITHMETIC[type(node.op)]()
            yield "arithmetic", node, ast.unparse(changed)
        case ast.Return(value=ast.expr()) if not _is_none(node.value):
            yield "return dropped", node, "return None"
        case ast.Expr(value=ast.Call()):
            yield "call deleted", node, "pass"
        case ast.Raise():
            yield "raise deleted", node, "pass"


def _tests(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _is_text(*operands: ast.expr) -> bool:
    return any(
        isinstance(each, _TEXT) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in operands
    )


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
