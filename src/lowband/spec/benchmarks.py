"""The benchmarks of a machine: from an entry follow its command, its rule and where its tables come from."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lowband.spec.softmax import Setup, Time

if TYPE_CHECKING:
    from lowband.spec.machine import Machine  # needs pydantic; `bench-kernel` works without it


GPU_MODELS = ("gpt-1.3b", "gpt-2.7b")  # whose steps bench-mfu times on a GPU; the first is the default


class Measured(NamedTuple):
    """What a part returns that describes its machine itself.

    tables:      raw table -> rows, each a tuple of the table's columns
    environment: written as <name>_env.json
    lines:       a summary for the terminal
    """

    tables: dict[str, list[Any]]
    environment: dict[str, Any]
    lines: list[str]


class Part(NamedTuple):
    """by: "module:function", which returns the rows of one table, a tuple of several's, or `Measured`

    tables: raw tables, written as <table>.csv
    takes: what it is given: options of the command, or `folder`, an empty one on the file system of --out
    """

    tables: tuple[str, ...]
    by: str
    takes: tuple[str, ...] = ("root",)


class Medians(NamedTuple):
    """Shown on the terminal: a table's medians by some columns. of: other columns (none: all seconds)"""

    by: tuple[str, ...]
    of: tuple[str, ...] = ()
    digits: str = "%.3f"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A benchmark that a reproduction of a suite runs; others use the shipped tables, which are in
    results/reference/<name>/<machine>/.

    rows:    table -> the class of its rows, of which there may be none
    setup:   the raw table that names the device and the commit
    sources: files whose change calls for a new measurement
    """

    rows: dict[str, type[Any]]
    setup: str
    suite: str
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """`lowband bench-<name> --out`, which writes the parts' tables, and describes the machine beside them.

    help, more: in `lowband --help`, and besides in its own help
    shows:      table -> its summary for the terminal
    summary:    or "module:function" that makes one of the first table
    """

    help: str
    more: str = ""
    parts: tuple[Part, ...]
    shows: dict[str, Medians] = field(default_factory=dict)
    summary: str = ""
    rule: Rule | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(table for part in self.parts for table in part.tables)

    @property
    def takes(self) -> tuple[str, ...]:
        """Its options beside --out."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.takes if name != "folder"))


def _in_turns(name: str, help: str, more: str, *by: str) -> Benchmark:
    """Several ways of a step in turns (bench/turns.py)."""
    parts = (Part(("steps",), f"bench.{name}:bench"),)
    return Benchmark(help=help, more=more, parts=parts, shows={"steps": Medians(by)})


BENCHMARKS = {
    "softmax": Benchmark(
        help="time three softmax algorithms over vector sizes, on one core",
        parts=(Part(("softmax_times", "softmax_setup"), "bench.softmax:bench", ()),),
        rule=Rule(
            rows={"softmax_times": Time, "softmax_setup": Setup}, setup="softmax_setup", suite="default",
            sources=("src/lowband/kernels/softmax_cpu.c",),
        ),
    ),
    "start": Benchmark(
        help="time starting 8 to 64 ranks, and reading a checkpoint of 1 GiB",
        more="Takes two minutes.",
        parts=(Part(("start",), "bench.start:start"), Part(("read",), "bench.start:read", ("folder",))),
        shows={
            "start": Medians(("ranks",), ("sharded_s", "cpu_s"), "%.2f"),
            "read": Medians(("what",), ("bytes_per_s",), "%.3g"),
        },
    ),
    "optimizers": _in_turns(
        "optimizers", "time steps: AdamW on shards, Muon and Shampoo on matrices", "Takes five minutes.",
        "ranks", "optimizer",
    ),
    "orders": _in_turns(
        "orders", "processor time of a step, depth-first and breadth-first", "Takes two minutes.",
        "passes", "order",
    ),
    "compile": _in_turns(
        "compile", "time steps: blocks as they are, and compiled by torch",
        "Uses the GPU if there is one. Takes three minutes.", "ranks", "engine", "blocks",
    ),
    "mfu": Benchmark(
        help="time steps of a whole GPT, and the share of a GPU's peak",
        more="The bare module, ours and FSDP2's, each alone, twice. Takes two minutes.",
        parts=(Part(("mfu",), "bench.mfu:bench", ("root", "model")),),
        shows={
            "mfu": Medians(
                ("engine", "blocks", "loss_chunks", "optimizer", "reshard", "round"),
                ("step_s", "mfu", "peak_bytes"), "%.4g",
            )
        },
    ),
    "joined": _in_turns(
        "joined", "time steps: hops, joined hops, DDP and FSDP2, in turns", "Takes two minutes.",
        "ranks", "scheme", "engine",
    ),
    "saved": _in_turns(
        "saved", "time steps with saved weights looked after, and without, in turns", "Takes six minutes.",
        "ranks", "scheme", "weights",
    ),
    "products": Benchmark(
        help="time 100 matrix products on one core beside their predictions",
        more="fp32, numpy's OpenBLAS. Takes half a minute.",
        parts=(Part(("products",), "bench.products:bench"),),
        summary="evidence.validation.products:summary",
    ),
    "schedules": Benchmark(
        help="time pipelines' schedules on paced ranks and links",
        more="4 processes compute and send for stated times; each schedule's steps in turns, beside its "
        "timeline. Takes ten minutes.",
        parts=(Part(("steps", "ends"), "run.paced_pipelines:measure", ("forward", "send")),),
        shows={
            "steps": Medians(
                ("send_over_forward", "schedule"),
                ("step_s", "predicted_step_s", "bubble", "predicted_bubble", "load"),
            )
        },
    ),
    "pipeline": Benchmark(
        help="processor time of a pipeline of one stage, and of its parts",
        more="Bare modules, lowband.shard, lowband.Pipeline, in turns. Takes a minute.",
        parts=(Part(("steps",), "run.pipeline_overhead:overhead", ()),),
        shows={"steps": Medians(("ranks", "micro_batches", "way"), ("cpu_s",), "%.4f")},
    ),
    "experts": Benchmark(
        help="train a GPT with experts beside a dense one of equal FLOPs",
        more="Two ranks, three seeds; loads balanced by a bias, and not. Takes at most six minutes.",
        parts=(Part(("losses", "loads", "ends"), "run.expert_losses:measure", ("steps",)),),
        shows={
            "ends": Medians(("way",), ("flops_per_token", "parameters", "validation_loss"), "%.4f"),
            "loads": Medians(("way", "layer"), ("max_over_mean", "of_window")),
        },
    ),
    "disk": Benchmark(
        help="time steps with states on a disk, and what of its traffic they hide",
        more="One rank; steps beside their computing and their traffic alone, in turns. Takes five minutes.",
        parts=(Part(("steps",), "run.disk_steps:measure", ("folder",)),),
        shows={
            "steps": Medians(
                ("tokens", "direct"),
                ("compute_s", "update_s", "traffic_s", "together_s", "waited_s", "overlap"),
            )
        },
    ),
    "padding": Benchmark(
        help="count and time what padding of experts' rows wastes",
        more="Grouped products, a loop, and padded ones by capacity and skew, in turns. Takes two minutes.",
        parts=(Part(("rows", "times"), "run.padded_experts:measure", ()),),
        shows={
            "rows": Medians(("experts", "skew", "way"), ("rows", "padding", "dropped")),
            "times": Medians(("experts", "skew", "way")),
        },
    ),
}  # fmt: skip
RULES = {name: benchmark.rule for name, benchmark in BENCHMARKS.items() if benchmark.rule is not None}


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


ON_GPUS = Kernels(
    "bench-kernel", ("kernels",), ("attention", "training_speed", "kernel_rates", "quantized_hops"), 10
)
ON_CPUS = Kernels("bench-softmax", ("softmax_times", "softmax_setup"), ("softmax",), 10)


def kernels_of(machine: "Machine") -> Kernels:
    """Triton's kernels where there are GPUs; in a box and on CPUs those in C."""
    has_gpus = machine.box is None and machine.device.memory_gib is not None
    return ON_GPUS if has_gpus else ON_CPUS
