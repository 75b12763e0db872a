"""Tables -> figures, by name. A figure is an entry here, and a file of this folder that draws it.

What draws it has `data(table)`, which returns exactly the drawn rows, and `draw(data)`, which draws them.
"""

import json
import subprocess
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from lowband.errors import UserError
from lowband.evidence.tables.build import tables_of_runs
from lowband.evidence.tables.entries import COLLECTED
from lowband.spec.csv_tables import made_of, read_table, sha256, write_csv
from lowband.spec.files import write_whole

PNG_DPI = 300
CLAIMS = "claims"  # the table of graded claims, which `lowband claims` writes


class Entry(NamedTuple):
    """The table that a figure is drawn from, its caption, and what draws it.

    drawn_by: `file:object` for one of several figures of a file; by default the file of the figure's name
    """

    table: str
    caption: str
    drawn_by: str = ""


# Closes every caption: schemes appear in all of them.
_READING = " hier3 and hier3-exact are our reading of the abstract of arXiv 2501.04266."

FIGURES: dict[str, Entry] = {
    "reported": Entry(
        CLAIMS,
        "Our value (filled) beside what a paper reports (open), for every graded claim with a reported "
        "number, in the claim's unit.",
    ),
    "scaling": Entry(
        "scaling",
        "Time of a step at equal numbers of ranks, measured. Points: median over the measured steps of all "
        "repeats; bars: 20 % and 80 % quantiles. Where each rank has a device of its own, throughput and "
        "efficiency against the number of ranks come first (dotted: ideal; base: named on the axis); ranks "
        "that share a host's cores scale as the host does, so that is not shown for them." + _READING,
    ),
    "communication": Entry(
        "communication",
        "Predicted time that the links of each level need for what one rank sends in a steady step, by "
        "collective: bytes over the level's published rate, without latency, one level at a time. Bars: "
        "bytes counted in the engine where the collective is called; markers: total of the closed form. "
        "Rates are those of the machine named on the axis, of Frontier where the run's own states none."
        + _READING,
    ),
    "memory": Entry(
        "memory",
        "Bytes that the fullest rank holds, by state, as the engine holds them; markers: total of the "
        "closed form, which covers weights, secondary, grads and optim. Weights count 0 where the fp32 "
        "master weights (in optim) serve." + _READING,
    ),
    "loss": Entry(
        "loss",
        "Top: training loss of every run. Bottom: largest absolute difference of each scheme's runs from the "
        "reference run; 0 is exactly 0. Markers shrink from scheme to scheme, so that curves that coincide "
        "are all seen." + _READING,
    ),
    "convergence": Entry(
        "convergence_curves",
        "Top: training loss under exact and quantized schemes on 8 ranks, mean over seeds; bands: least and "
        "largest. Bottom: the same less the loss of zero3 with the same seed. Shipped measurements."
        + _READING,
    ),
    "box": Entry(
        "box",
        "Scale model of Frontier, measured: every rate is the machine's divided by one factor, links are "
        "shaped, computation is paced. Left: model TFLOPS per GCD, times the factor; points: median over "
        "repeats, bars: least and largest. Right: efficiency, pale where the ranks are too many for two CPU "
        "cores: part of what is lost there is lost to that. Shipped measurements." + _READING,
    ),
    "step_time": Entry(
        "box",
        "Where a step's time goes, measured in the scale model of Frontier at nominal link rates; medians "
        "over n repeats, black: least and largest. Upper bars: computing, and waiting for communication. "
        "Lower bars: communication that went on behind the computation. On 32 ranks two CPU cores are short, "
        "and part of the waiting is for them. Shipped measurements." + _READING,
    ),
    "box_ratios": Entry(
        "box_ratios",
        "Ratio of TFLOPS per GCD between schemes against the rate of the link between nodes, measured in the "
        "scale model of Frontier on 2 nodes (16 ranks), as a share of the nominal rate; dotted: what the "
        "paper reports for 384 GCDs. One repeat each. Shipped measurements." + _READING,
        "box_ratios:SWEEP",
    ),
    "box_accumulation": Entry(
        "box_ratios",
        "The same ratios against the number of backward passes per optimizer step, of 256 tokens per rank "
        "each, at nominal links: hier3 crosses nodes once per step, the others in every pass. Measured on 2 "
        "nodes (16 ranks) of the scale model of Frontier; dotted: as the paper reports for 384 GCDs. Bars, "
        "where there are repeats: slowest of one over fastest of the other. Shipped measurements." + _READING,
        "box_ratios:ACCUMULATION",
    ),
    "box_attained": Entry(
        "box_ratios",
        "Ratio of TFLOPS per GCD between schemes in the scale model whose links have the rates that the "
        "paper's stack reached: flat rings, no overlap, four passes of 2,048 tokens per rank and optimizer "
        "step, blocks recomputed; dotted: as the paper reports for 384 GCDs; bars: slowest repeat of one "
        "scheme over the fastest of the other. A fit: the rates were fitted to the paper's ratios, nothing "
        "to these runs. Shipped measurements." + _READING,
        "box_ratios:ATTAINED",
    ),
    "box_order": Entry(
        "box",
        "TFLOPS per GCD against backward passes of 256 tokens per optimizer step, in depth-first order "
        "(dotted: a unit is gathered and reduced in every pass) and in breadth-first order (solid: once per "
        "step). Measured on 2 nodes (16 ranks) of the scale model of Frontier at nominal links. Shipped "
        "measurements." + _READING,
    ),
    "box_hops": Entry(
        "box",
        "Step time on flat rings and hops, with and without overlap. Bars: "
        "measured, with the range of repeats; lines: predicted, nothing fitted. 2 nodes (16 ranks) of the "
        "scale model whose links have the rates that the paper's stack reached, one pass of 2,048 tokens per "
        "rank and step. Shipped measurements." + _READING,
    ),
    "box_predicted": Entry(
        "box",
        "Every point of the scale model: measured step time over the predictor's, which knows the box's "
        "rates and has nothing fitted to them. Grey band: 5 %. Medians over repeats. Shipped measurements."
        + _READING,
    ),
    "peers": Entry(
        "peers",
        "Step time and peak resident memory of our engine over a peer's on the same model, data, ranks and "
        "clock; medians over repeats, gloo. local: plain loopback; frontier-box: shaped links. Below 1 ours "
        "is ahead. DeepSpeed's zeropp runs with a torch quantizer in the place of its own, which has no CPU "
        "code. Shipped measurements.",
    ),
    "softmax": Entry(
        "softmax",
        "Softmax of one fp32 vector on one core, measured; a row for each instruction set of each machine. "
        "Left: median time per value. Right: time of the three-pass algorithms over two-pass's in the same "
        "repeat; bands: 20 % and 80 % quantiles. Above 1 two-pass is ahead. Star, right of all sizes: the "
        "largest gain out of cache that the paper reports, on its processor; its abstract states no size. "
        "Dotted: where caches end.",
    ),
    "attention": Entry(
        "attention",
        "Attention TFLOPS, forward and backward together, against sequence length; 16k tokens, hidden size "
        "2048, fp16. FLOPs as arXiv 2307.08691 counts them, half with causal masking. Thin: as it reports; "
        "thick: measured by `lowband bench-kernel`, for each device whose kernels.csv is shipped.",
    ),
    "schedules": Entry(
        "schedule_ends",
        "One step of a pipeline under three schedules that need the same memory: four processes on one "
        "machine whose stages compute for stated times, and whose sends take a quarter of a forward. Wide: "
        "measured, from the end of each action; narrow: predicted from the lists; grey: idle. `searched` is "
        "a list made for such sends. The middle one of three steps by time. Shipped measurements.",
    ),
    "validation": Entry(
        "validation",
        "Predicted over published, for every published row, by source. Open: rows on which a constant of the "
        "machine file was fitted; filled: held out. Grey band: 5 %. Predicted, not measured." + _READING,
    ),
    "left_out": Entry(
        "left_out",
        "Predicted over published, every row left out of the fit that predicts it: with all rows of its "
        "size, of its scale, or of its machine. Bars: 80 % intervals from the other folds, medians over "
        "folds. Predicted, not measured." + _READING,
    ),
    "faults": Entry(
        "faults",
        "Faults injected into real runs on 4 and 8 ranks, by kind (`make faults`). Left: seconds until the "
        "run ended or the fault was refused, one point each; dotted: what is promised. Faults that a run "
        "must survive, or finds when it is started again, have no such time. Right: cases. As promised: "
        "exit code, message and outcome, and in the end the weights and records of an undisturbed run. "
        "Shipped measurements.",
    ),
    "wan": Entry(
        "wan_curves",
        "Training loss against time for four rates of the link between two nodes, at scale: gradients are "
        "averaged in every step (hsdp), or weights exchanged seldom. Losses are measured, mean over seeds, "
        "bands: least and largest; each method's time of a step is measured in the scale model (solid) or "
        "predicted for it (dotted). Where a line ends, its run has taken 400 steps. Shipped measurements.",
    ),
    "load": Entry(
        "load",
        "Growth of four commands (`python -m tests.load`): Snakemake plans a suite, and does one of runs of "
        "three steps; `lowband collect` reads run folders; `lowband import-log` reads another project's log. "
        "Left: processor time; right: peak resident memory of the largest process. Bars: what each may take "
        "at its largest size. Shipped measurements.",
    ),
    "calibration": Entry(
        "coverage",
        "Share of the rows left out of a fit that lie in the interval which other folds give them. Left: all "
        "rows, against the share that the interval states. Right: 80 % intervals by machine; grey: the aim, "
        "75 to 85 %. Predicted, not measured." + _READING,
    ),
    "frontier_map": Entry(
        "frontier_map",
        "Where the ratios of arXiv 2501.04266 hold (both within 5 %: hatched), over the batch per GCD and "
        "what a node's cards reach, without overlap and with the fitted rate in a node. Colours: the ratios; "
        "lines: the reported ones. Cross: the point used. With published rates in a node, or with full "
        "overlap, they hold nowhere. Predicted, not measured." + _READING,
    ),
    "scale": Entry(
        "scale",
        "Predicted TFLOPS per GCD of the 20B model on 8 to 75,264 GCDs of Frontier, with its links between "
        "nodes and with ten times slower ones. Bands: 80 % intervals, as wide as for a "
        "machine without fitted runs. What does not fit the memory is left out." + _READING,
    ),
    "strong_scaling": Entry(
        "strong_scaling",
        "Predicted strong scaling of two models of arXiv 2312.12705 on Frontier, with tensor and pipeline "
        "degrees and the batch of the first author's scripts, by schedule: TFLOPS per GCD over those on the "
        "fewest GCDs. Ranks along data grow, so that each pipeline has fewer micro-batches to fill it. "
        "Dotted: what the paper prints, without the batch and the GCDs that it is of. What does not fit the "
        "memory is left out: split schedules, which keep what is recomputed. Predicted, not measured.",
    ),
    "tier_efficiency": Entry(
        "tier_efficiency",
        "Which state may live where: the share of a device's speed that is left when weights, the "
        "optimizer's states or activations lie in the host's memory or on a disk and nothing hides their "
        "way, on 32 nodes, by the batch of a device (ZeRO-Infinity's form, arXiv 2104.07857, section 4). "
        "Weights and the optimizer's states are sharded over all ranks. Predicted from the rates of machine "
        "files, not measured.",
    ),
    "pareto": Entry(
        "pareto",
        "Predicted TFLOPS per GCD of the 20B model on 384 GCDs of Frontier against peak memory per GCD: "
        "every placement, with its fastest wires, in depth-first (open) and breadth-first order (filled); "
        "micro-batch 1, accumulation 4, sequence 2,048, full recomputation. Left: links at the rates fitted "
        "to the paper's ratios, no overlap; right: published rates, full overlap. On the Pareto line, "
        "breadth-first: level of the weights / of secondary weights. Take the planner's choice in "
        "breadth-first order: on the left 23 % over hier3 depth-first, in 32 GiB, and within the predictor's "
        "error of the fastest; on the right level with all. Predicted, not measured." + _READING,
    ),
}


def own_figures(suites: Collection[str]) -> list[str]:
    """The figures that the runs of these suites give alone, without shipped measurements or predictions."""
    own = {CLAIMS, *COLLECTED, *tables_of_runs(suites)}
    return [name for name, entry in FIGURES.items() if entry.table in own]


def file_of(name: str) -> str:
    """The file of this folder that draws the figure."""
    return (FIGURES[name].drawn_by or name).split(":")[0]


def write_figure(name: str, tables_dir: Path, out_dir: Path) -> None:
    """Write `name`.pdf, .svg, .png, .csv (exactly the drawn data) and .json (its origin).

    The same table gives the same bytes. Raises UserError for a name that is not in FIGURES, and
    for the tables' own folder.
    """
    if name not in FIGURES:
        raise UserError(f"no figure '{name}'", allowed=FIGURES)
    if out_dir.resolve() == tables_dir.resolve():
        raise UserError("a figure's data would overwrite its table", where=out_dir, allowed="another folder")
    from lowband.evidence.report.figures.style import nothing_to_draw, paper_style

    entry, figure = FIGURES[name], import_module(f"lowband.evidence.report.figures.{file_of(name)}")
    if ":" in entry.drawn_by:
        figure = getattr(figure, entry.drawn_by.split(":")[1])
    source = tables_dir / f"{entry.table}.csv"
    table = read_table(source)
    with made_of(source):
        data = figure.data(table)
    out_dir.mkdir(parents=True, exist_ok=True)
    with paper_style(), made_of(source):
        drawn = figure.draw(data) if len(data) else nothing_to_draw(source.name)
        drawn.draw_without_rendering()  # lays it out: once, as that takes longer than drawing
        drawn.set_layout_engine(None)
        # Without its date, a PDF of the same figure has the same bytes.
        drawn.savefig(out_dir / f"{name}.pdf", metadata={"CreationDate": None})
        drawn.savefig(out_dir / f"{name}.svg", metadata={"Date": None})
        drawn.savefig(out_dir / f"{name}.png", dpi=PNG_DPI)
    write_csv(data, out_dir / f"{name}.csv")
    write_whole(out_dir / f"{name}.json", json.dumps(_origin(name, entry, source, out_dir), indent=2) + "\n")


def _origin(name: str, entry: Entry, source: Path, out_dir: Path) -> dict[str, str]:
    return {
        "figure": name,
        "caption": entry.caption,
        "table": source.as_posix(),
        "table_sha256": sha256(source),
        "commit": commit(),
        "command": f"lowband figure {name} --tables {source.parent.as_posix()} --out {out_dir.as_posix()}",
    }


def commit() -> str:
    """Commit of the drawing code; "unknown" outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
