"""A `python` whose commands are forked from a process with imported packages; with --wide the interpreter."""

from collections.abc import Iterator

import pytest
import trees
from trees import PLAIN

from tests.interpreter import Warm


@pytest.fixture(scope="session", autouse=True)
def warm(request: pytest.FixtureRequest) -> Iterator[Warm | None]:
    if request.config.getoption("--wide"):
        yield None
        return
    with Warm() as program:

        def python() -> str:
            program.serve("plain", *PLAIN)
            return str(program.path)

        trees.python = python
        yield program


@pytest.fixture(scope="module")
def warm_training(warm: Warm | None) -> None:
    """`lowband train` too."""
    if warm is not None:
        warm.serve("torch", *PLAIN, "torch._dynamo")
