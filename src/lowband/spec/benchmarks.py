"""The benchmarks of a machine: from an entry follow its command, its rule and where its tables come from."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from lowband.spec.softmax import Setup, Time


class Measured(NamedTuple):
    """What a benchmark's `bench()` returns.

    tables:      raw table -> rows, each a tuple of the table's columns
    environment: written as <name>_env.json
    lines:       a summary for the terminal
    """

    tables: dict[str, list[Any]]
    environment: dict[str, Any]
    lines: list[str]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """`lowband bench-<name>`, measured by `bench()` of `lowband.bench.<name>`.

    tables:  raw table -> the class of its rows
    setup:   the raw table that names the device and the commit
    suite:   a reproduction of this suite runs the benchmark; others use the shipped tables, which are in
             results/reference/<name>/<machine>/
    sources: files whose change calls for a new measurement
    """

    help: str
    tables: dict[str, type[Any]]
    setup: str
    suite: str
    sources: tuple[str, ...]


BENCHMARKS = {
    "softmax": Benchmark(
        help="time three softmax algorithms over vector sizes, on one core",
        tables={"softmax_times": Time, "softmax_setup": Setup},
        setup="softmax_setup",
        suite="default",
        sources=("src/lowband/kernels/softmax_cpu.c",),
    ),
}
