"""Which tests run, and the order in which processes that share them (pytest-xdist) take the files."""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wide", action="store_true", help="also the cases that `make test` leaves to `make test-all`"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--wide"):
        wide = [item for item in items if item.get_closest_marker("wide")]
        config.hook.pytest_deselected(items=wide)
        items[:] = [item for item in items if not item.get_closest_marker("wide")]
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
