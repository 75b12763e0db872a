"""Which tests run, and the order in which processes that share them (pytest-xdist) take the files."""

import contextlib
import gc
import math
import os
import shutil
from collections import Counter
from collections.abc import Generator, Sequence

import pytest

from tests import huge_pages, passed, seconds, timed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="also what `make test` leaves to `make test-all`")
    parser.addoption("--one-try", action="store_true", help="no second try for tests that time messages")
    parser.addoption(
        "--record-seconds", action="store_true", help="write what each took to tests/seconds.csv"
    )
    parser.addoption(
        "--record-processor-seconds", action="store_true", help="only these: on a machine that is busy"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:  # Linux, none was chosen
        # A process that a message wakes must not take the core from its sender, here and in all that is
        # forked: gloo sends under a lock, for which a thread of the sender's own spins meanwhile.
        with contextlib.suppress(OSError):  # a sandbox may forbid it; the tests are slower then
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    records = config.getoption("--record-seconds") or config.getoption("--record-processor-seconds")
    if records:
        config.pluginmanager.register(seconds.Meter())
    if hasattr(config, "workerinput"):
        return  # the process that shares out the tests hears of each
    if not config.getoption("--one-try"):
        config.pluginmanager.register(timed.SecondTry())
    if records:
        columns = seconds.COLUMNS if config.getoption("--record-seconds") else ("processor_s",)
        config.pluginmanager.register(seconds.Recorder(columns))
    if config.getoption("--wide"):
        config.pluginmanager.register(passed.Recorder())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: looking for garbage in it takes seconds, now and again in each forked rank.

    In huge pages it costs each fork less.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        huge_pages.collapse()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    took = seconds.recorded()
    for item in items:
        if took.get(item.nodeid, 0.0) > seconds.SLOW_S:
            item.add_marker("slow")
    if not config.getoption("--wide"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("wide")])
        items[:] = [item for item in items if not item.get_closest_marker("wide")]
        needless = passed.passed()
        for item in items:
            if item.nodeid in needless:
                item.add_marker(pytest.mark.skip(reason=passed.REASON))
    if "PYTEST_XDIST_WORKER" in os.environ:
        waited = seconds.waited()
        files = longest_first([(str(item.path), waited.get(item.nodeid, 0.0)) for item in items])
        items.sort(key=lambda item: files.index(str(item.path)))


@pytest.fixture
def needs_git() -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git")


def longest_first(tests: Sequence[tuple[str, float]]) -> list[str]:
    """Files of tests, given the file and the seconds of each: a long one begun last would leave the other
    processes idle. One of which nothing is recorded may be long."""
    of_file: Counter[str] = Counter()
    for file, seconds_ in tests:
        of_file[file] += seconds_
    return sorted(of_file, key=lambda file: -(of_file[file] or math.inf))
