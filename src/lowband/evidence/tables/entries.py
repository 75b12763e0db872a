"""Every derived table: its sources, and the view that it is of them or the function that builds it."""

from typing import NamedTuple

from lowband.cost.tcp import WIRE_BYTES_PER_BYTE
from lowband.evidence.tables.points import POINT
from lowband.evidence.tables.view import Other, View

REPORTED = "reported/"  # a source with this prefix is a file of results/reported/: numbers from papers
SHIPPED = "shipped/"  # and with this one, all such files of results/reference/; of any folder without one

OF_GPUS = f"{SHIPPED}kernels"  # rows of `lowband bench-kernel`, of every device shipped
COLLECTED = ("runs", "steps", "bytes", "states", "outside")  # written by `lowband collect`


class Table(NamedTuple):
    """A derived table.

    sources  tables, in the order of the parameters of what builds it
    suite    a suite or benchmark that a reproduction may leave out: the table is then made from its shipped
             raw tables in results/reference/
    view     of its only source
    build    without a view: the function that builds it, `module:function` below lowband.evidence; by default
             `build` of the file of `derived/` that has the table's name
    """

    sources: tuple[str, ...]
    suite: str | None = None
    view: View | None = None
    build: str | None = None


_MEASURED = {"provenance": "'measured'"}
_FOLDS = (f"{SHIPPED}folds", f"{SHIPPED}held_out")
_FLASH2 = "reported/03_flashattention2_2307.08691"


def _all(statistic: str, *columns: str) -> dict[str, str]:
    """The same statistic of each column, under its own name."""
    return {column: f"{statistic} {column}" for column in columns}


TABLES: dict[str, Table] = {
    "scaling": Table(("runs", "steps")),
    "communication": Table(("bytes",)),
    "memory": Table(("states",), build="tables.derived.bytes_of_points:build"),
    "loss": Table(("runs", "steps")),
    "parity": Table(("runs", "loss")),
    "convergence": Table(("runs", "steps"), "convergence"),
    "convergence_curves": Table(("runs", "steps"), "convergence"),
    "peers": Table(("runs", "steps", "outside"), "peers"),
    # Whether each engine sent the bytes of its scheme: per rank and step, counted and in closed form. One row
    # per point and engine that was counted; all repeats send the same bytes. Schemes with quantized wires
    # have no closed form here: engines differ in their scales.
    # ratio: counted over closed form; difference_bytes: absolute difference of the two
    "peer_bytes": Table(("runs",), "peers", View(
        where="outside_bytes.notna()",
        by=(*POINT, "is_quantized"),
        of=_all("max", "outside_bytes", "closed_form_outside_bytes"),
        then={
            "ratio": "outside_bytes / closed_form_outside_bytes",
            "difference_bytes": "(outside_bytes - closed_form_outside_bytes).abs()",
        },
    )),
    "box": Table(("runs",), "box"),
    "box_hops": Table(("runs", "bytes"), "box"),
    "box_ratios": Table(("runs", "reported/01_frontier_low_bandwidth_2501.04266"), "box"),
    # Collectives alone on a box's shaped links: time over the closed form's, counted bytes over the ledger's.
    # is_long: the closed form is a second or more, so that a hop's start-up and end cost little
    # ..._min, _max: least and largest over repeats; without a suffix the median
    # ..._error_percent: absolute deviation of the median from 1, or from cost.tcp.WIRE_BYTES_PER_BYTE
    "box_links": Table(("comm",), "box-bench", View(
        add={
            "time_over_closed_form": "took_s / closed_form_s",
            "interface_over_ledger": "interface_bytes / bytes", **_MEASURED,
        },
        by=("provenance", "cluster", "ranks", "level", "collective", "partners", "bytes", "closed_form_s"),
        of={
            "repeats": "size",
            **{
                f"{column}{suffix}": f"{statistic} {column}"
                for column in ("time_over_closed_form", "interface_over_ledger")
                for suffix, statistic in (("", "median"), ("_min", "min"), ("_max", "max"))
            },
        },
        then={
            "is_long": "closed_form_s >= 1",
            "time_error_percent": "100 * (time_over_closed_form - 1).abs()",
            "interface_error_percent": f"100 * (interface_over_ledger / {WIRE_BYTES_PER_BYTE!r} - 1).abs()",
        },
    )),
    # Time that Slurm and Snakemake add to a run in a box: medians over jobs of the parts of box.jobs.JobTime.
    "box_jobs": Table(("jobs",), "box-bench", View(
        add=_MEASURED, by=("provenance", "ranks", "nodes"), sort=("ranks", "nodes"),
        of={**_all("median", "waited_s", "before_s", "after_s", "added_s", "wall_s"), "jobs": "size"},
    )),
    # Published rows, each left out of the fit that predicts it: kind and left_out say with which others.
    # factor: published over predicted or the reverse, at least 1. interval_factor: of the 80 % interval, from
    # other folds of this kind; of kind machine, from other machines. inside: whether the row lies in it;
    # empty if there is none. Ratios are not among the rows: they say nothing of a time.
    "left_out": Table(_FOLDS, build="validation.intervals:covered"),
    # Sources of times left out whole, each counting alike. factor: of the 80 % interval, from the others.
    "source_intervals": Table(("validation", *_FOLDS), build="validation.intervals:by_source"),
    "coverage": Table(_FOLDS),
    "intervals": Table(_FOLDS),
    "products": Table((f"{SHIPPED}products/products",)),
    "accuracy": Table(("validation", "constants", *_FOLDS)),
    # Steps of pipelines on paced ranks and links beside their timelines, medians over steps
    # (`lowband bench-schedules`). bubble_off: in points; step_off_percent: of the predicted step
    "schedules": Table((f"{SHIPPED}schedules/steps",), view=View(
        add=_MEASURED, by=("provenance", "ranks", "micro_batches", "send_over_forward", "schedule", "memory"),
        of={
            "steps": "size",
            **_all("median", "step_s", "predicted_step_s", "bubble", "predicted_bubble", "load"),
            "least_step_s": "min step_s",
        },
        then={
            "bubble_percent": "100 * bubble",
            "predicted_percent": "100 * predicted_bubble",
            "bubble_off": "bubble_percent - predicted_percent",
            "step_off_percent": "100 * (step_s / predicted_step_s - 1)",
            "least_off_percent": "100 * (least_step_s / predicted_step_s - 1)",
        },
    )),
    # Processor time of a step by one stage of `lowband.Pipeline`, by `lowband.shard` and, on one rank, by
    # bare modules, medians over steps (`lowband bench-pipeline`).
    "pipeline_overhead": Table((f"{SHIPPED}pipeline/steps",), view=View(
        add=_MEASURED, by=("provenance", "ranks", "micro_batches"), across="way",
        of={"cpu_s": "median cpu_s"},
        then={
            "over_modules": "cpu_s_pipeline / cpu_s_modules", "over_shard": "cpu_s_pipeline / cpu_s_shard",
        },
    )),
    # Every action of the middle step by time: when it ended, and when it should have.
    "schedule_ends": Table((f"{SHIPPED}schedules/ends",), view=View(add=_MEASURED)),
    "pipeline_errors": Table(("pipelines", "validation")),
    # Share of the ideal that attention along context can reach by its balance, beside printed ones.
    # off: in points
    "context_errors": Table(("context_balance",), view=View(
        add={"distance": "off.abs()"}, by=("provenance", "source", "system", "api"),
        of={"rows": "size", "mean_off": "mean distance", "max_off": "max distance"},
    )),
    "published_context_errors": Table(("published_context", f"{SHIPPED}published_lengths")),
    # What papers on experts print beside what is predicted. off: in % of what was printed
    "published_experts_errors": Table(("published_experts",), view=View(
        add={"distance": "off_percent.abs()"}, by=("provenance", "source", "quantity", "use"),
        of={"rows": "size", "median_off": "median distance", "max_off": "max distance"},
    )),
    # What papers on states beyond the device print beside what is predicted. off: in % of what was printed
    "published_tiers_errors": Table(("published_tiers",), view=View(
        add={"distance": "off_percent.abs()", "near": "distance <= 15"},
        by=("provenance", "source", "quantity", "use"),
        of={
            "rows": "size", "median_off": "median distance", "max_off": "max distance",
            "within_15": "sum near",
        },
    )),
    # Raw logs of Deep Optimizer States beside predictions. signs: where the gain has the logs' sign
    "offload_errors": Table(("offload_logs",), view=View(
        add={
            "with_it": "(published_gain_percent > 0) == (predicted_gain_percent > 0)",
            "with_async": "(published_gain_over_async_percent > 0)"
            " == (predicted_gain_over_async_percent > 0)",
            "wrong": "~(with_it & with_async)",
            "near": "distance_percent <= 10",
        },
        by=("provenance", "setting", "model", "use"),
        of={
            "rows": "size", "median_off": "median distance_percent",
            "max_off": "max distance_percent", "within_10": "sum near", "wrong_signs": "sum wrong",
        },
    )),
    # Forwards of a layer of experts with and without copies of the four most popular (`bench-routes`).
    "expert_copies": Table((f"{SHIPPED}routes",), view=View(
        add=_MEASURED, where="top_k == 2", by=("provenance", "cluster", "ranks", "skew"), across="copies",
        of={"took_s": "median took_s", "load": "median load", "slow_rows": "median slow_rows"},
        then={"gain": "took_s_0 / took_s_4"},
    )),
    "context_ways": Table(("runs",)),
    "softmax": Table(
        ("softmax_times", "softmax_setup", "reported/04_two_pass_softmax_2001.04438"), "softmax"
    ),
    "attention": Table((OF_GPUS, _FLASH2)),
    "training_speed": Table((OF_GPUS, _FLASH2)),
    "kernel_rates": Table((OF_GPUS,)),
    # Resources of each Triton kernel on each of the papers' machines, from cross-compilation: nothing was
    # run. A row per kernel, configuration and target: registers and spilled bytes per thread, share of the
    # shared memory that a block may use, matrix-unit instructions in its code, notes that these wait for each
    # other.
    "kernel_resources": Table(("compiled",), "kernels", View(
        add={"provenance": "'compiled'", "shared_share": "shared_bytes / shared_limit_bytes"},
        sort=("kernel", "target", "config"),
        columns=(
            "provenance", "kernel", "config", "target", "registers", "spilled_bytes", "shared_share",
            "matrix_instructions", "serialized", "triton",
        ),
    )),
    # Faults injected into real runs, one row each (`make faults`).
    # detected_s: from the fault to the end of the run or the refusal; empty where a run must survive it
    # is_right: whether all was as promised: exit code, line, outcome, and in the end the results of an
    #           undisturbed run; where it was not, `wrong` says what was not
    "faults": Table((f"{SHIPPED}injected",), view=View(
        add={**_MEASURED, "is_right": "wrong.isna()"}, sort=("seed",),
        columns=(
            "provenance", "seed", "kind", "scheme", "ranks", "step", "detected_s", "resumed_from",
            "same_weights", "same_steps", "is_right", "wrong", "commit",
        ),
    )),
    "wan_losses": Table(("runs", "steps"), "wan"),
    "wan_curves": Table(("runs", "steps", f"{SHIPPED}wan_steps"), "wan"),
    "wan": Table(("runs", "steps", f"{SHIPPED}wan_steps"), "wan"),
    "partners": Table(("runs", "steps", "bytes"), "decentralised"),
    "delays": Table(("runs", "states"), "delay"),
    "seldom_peers": Table((f"{SHIPPED}seldom-peers/runs", f"{SHIPPED}seldom-peers/steps")),
    # Processor time of a step in both orders of its passes, medians over steps (`lowband bench-orders`).
    "orders": Table((f"{SHIPPED}orders/steps",), view=View(
        add=_MEASURED, by=("provenance", "ranks", "passes"), across="order", sort=("ranks", "passes"),
        of={"cpu_s": "median cpu_s"}, then={"breadth_over_depth": "cpu_s_breadth / cpu_s_depth"},
    )),
    # Parts of a step by optimizer, and the step over AdamW's in the same turn (`lowband bench-optimizers`).
    "optimizers": Table((f"{SHIPPED}optimizers/steps",), view=View(
        add={**_MEASURED, "step_s": "passes_s + exchange_s + update_s"},
        other=Other(where="optimizer == 'adamw'", on=("ranks", "step"), columns=("step_s",)),
        then={"over_adamw": "step_s / step_s_other"},
    )),
    # A step with eager and with compiled blocks, medians without the first; first_s: the first, which
    # compiles (`lowband bench-compile`). folder: that of results/reference/compile/
    "compiled_steps": Table((f"{SHIPPED}compile/*/steps",), view=View(
        add={**_MEASURED, "later_s": "step_s.where(step > 0)", "first_s": "step_s.where(step == 0)"},
        by=("provenance", "folder", "device", "ranks", "engine"), across="blocks",
        of={"step_s": "median later_s", "first_s": "first first_s"},
        then={"compiled_over_eager": "step_s_compiled / step_s_eager"},
    )),
    # Each step, hop by hop or on joined hops, over the peer's in the same turn (`lowband bench-joined`); the
    # peer's columns end with _other, and its own rows are among these.
    "joined": Table((f"{SHIPPED}joined/steps",), view=View(
        add=_MEASURED,
        other=Other(
            where="engine in ['DDP', 'FSDP2']", on=("ranks", "scheme", "step"),
            columns=("engine", "step_s", "cpu_s", "held_bytes"),
        ),
        then={"step_over_peer": "step_s / step_s_other", "cpu_over_peer": "cpu_s / cpu_s_other"},
    )),
    "load": Table((f"{SHIPPED}load",)),
    # Runs and commands made twice, and runs beside those whose bits they must have (`python -m tests.twice`).
    # against: `itself`, made again in new processes, or the run that it is compared with
    # is_promised: whether the bits must be the same
    # first_difference: step and value, or file; `why` states the reason
    "twice": Table((f"{SHIPPED}twice",), view=View(
        add=_MEASURED,
        columns=(
            "provenance", "what", "against", "is_promised", "same", "first_difference", "why", "commit",
        ),
    )),
    # The same faults in jobs of lowband and of its peers, one row each (`python -m tests.anchors faults`).
    # detected_s: until the job had ended, or went on by itself; empty if it still hung after 120 s
    # told: whether what is printed names the victim and the cause; lines: printed after the fault
    # lost_steps: between the last recorded step and the checkpoint from which the job went on
    # same_end: whether losses and final weights are, bit by bit, those of an undisturbed run of the system
    "anchors": Table((f"{SHIPPED}anchor_faults",), view=View(
        add=_MEASURED, sort=("fault", "system", "ranks", "repeat"),
        columns=(
            "provenance", "system", "fault", "ranks", "repeat", "detected_s", "told", "lines", "lost_steps",
            "same_end", "commit",
        ),
    )),
    # Runs with a slow rank or link, and as many without, one row each (`python -m tests.stragglers`).
    # named: what the run's outcome named as slow; empty if nothing
    # is_right: whether it named what was slow and nothing else
    "stragglers": Table((f"{SHIPPED}trials",), view=View(
        add={**_MEASURED, "is_faulty": "kind != 'none'"}, sort=("seed", "is_faulty"),
        columns=(
            "provenance", "seed", "kind", "is_faulty", "victim", "level", "factor", "scheme", "ranks", "node",
            "named", "is_right", "real_share", "commit",
        ),
    )),
}  # fmt: skip
