"""The benchmarks of a machine: from an entry follow its command, its rule and where its tables come from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lowband.spec.softmax import Setup, Time

if TYPE_CHECKING:
    from lowband.spec.machine import Machine  # needs pydantic; `bench-kernel` works without it


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


@dataclass(frozen=True)
class Kernels:
    """The benchmark of kernels on a cluster, as one job on one of its nodes.

    command: a verb; raw: the tables that it writes to its --out; tables: what is made of them
    minutes: that it takes at most
    """

    command: str
    raw: tuple[str, ...]
    tables: tuple[str, ...]
    minutes: int


ON_GPUS = Kernels("bench-kernel", ("kernels",), ("attention", "training_speed", "kernel_rates"), 10)
ON_CPUS = Kernels("bench-softmax", ("softmax_times", "softmax_setup"), ("softmax",), 10)


def kernels_of(machine: "Machine") -> Kernels:
    """Triton's kernels where there are GPUs; in a box and on CPUs those in C."""
    has_gpus = machine.box is None and machine.device.memory_gib is not None
    return ON_GPUS if has_gpus else ON_CPUS
