"""Tables in docs/scale-model.md, from results/reference/box and box-bench."""

from pathlib import Path

import pandas as pd

from lowband.evidence.report.writers import filled, markdown
from lowband.evidence.tables.build import builder
from lowband.evidence.tables.derived import box
from lowband.evidence.tables.points import same_but
from lowband.spec.csv_tables import read_table
from lowband.spec.mesh import WORLD

_CORE, _SWEEPS = ("box", "box-dgx2", "box-attained"), ("box-sweep", "box-accumulation")
_SHOWN = {"zero3": "ZeRO-3", "zeropp": "ZeRO++", "hier3": "hier3"}
_PAIRS = (("zeropp", "zero3"), ("hier3", "zero3"), ("hier3", "zeropp"))  # (scheme, scheme to divide by)
_RANKS = 16  # for the table of bytes

_POINTS = {
    "suite": "{suite}", "outer link, at scale (GB/s a rank)": "{outer_link_gigabytes_per_s:g}",
    "ranks": "{ranks}", "scheme": "{scheme}", "n": "{repeats}",
    "step (s)": "{step_time_s:.2f} ({step_time_min_s:.2f} to {step_time_max_s:.2f})",
    "predicted (s)": "{predicted_step_time_s:.2f}", "of it waiting": "{exposed_comm_time_s:.2f}",
    "TFLOPS per rank, at scale": "{tflops:.1f}", "over zero3": "{over_zero3:.2f}",
    "efficiency": "{efficiency:.2f}", "real share": "{real_share:.2f}",
    "interface / ledger": "{interface_over_ledger:.3f}",
}  # fmt: skip
_RATIO = "{{{0}:.3f}} ({{{0}_min:.3f}} to {{{0}_max:.3f}})"
_LINKS = {
    "box": "{cluster}", "ranks": "{ranks}", "level": "{level}", "collective": "{collective}",
    "partners": "{partners}", "sent per rank (kB)": "{kilobytes:,.0f}", "n": "{repeats}",
    "time / closed form": _RATIO.format("time_over_closed_form"),
    "interface / ledger": _RATIO.format("interface_over_ledger"),
}  # fmt: skip
_JOBS = {
    "ranks": "{ranks}", "nodes": "{nodes}", "jobs": "{jobs}", "waited (s)": "{waited_s:.1f}",
    "before the run (s)": "{before_s:.1f}", "after it (s)": "{after_s:.1f}", "added (s)": "{added_s:.1f}",
    "the run (s)": "{wall_s:.1f}",
}  # fmt: skip


def core(root: Path) -> list[str]:
    """Table of the core experiments; rates at the machine's scale."""
    points = _points(root, _CORE)
    points["tflops"] = points["model_flop_per_s_per_rank_at_scale"] / 1e12
    return markdown(filled(points, _POINTS))


def sweep(root: Path) -> list[str]:
    """Table of the sweeps, one row per condition: steps, throughput ratios and prediction errors."""
    points = _points(root, _SWEEPS)
    conditions = ["suite", "micro_batch", "tokens_per_rank", "overlap", "accumulation", "outer_link_share"]
    points = points.sort_values(conditions[1:], ascending=False)
    rows = []
    for _, schemes in points.groupby(same_but(points, "scheme"), sort=False, dropna=False):
        suite, _, tokens, overlap, passes, share = schemes.iloc[0][conditions]
        steps = schemes.set_index("scheme").reindex(list(_SHOWN))
        off = steps["measured_over_predicted"]
        rows.append(
            {
                "suite": suite, "tokens per rank": f"{tokens:g}", "passes": f"{passes:g}",
                "overlap": "yes" if overlap else "no", "outer link": f"{share:g}",
                **{f"{name} (s)": f"{steps['step_time_s'][scheme]:.2f}" for scheme, name in _SHOWN.items()},
                **{
                    f"{_SHOWN[scheme]} / {_SHOWN[other]}": f"{steps[f'over_{other}'][scheme]:.2f}"
                    for scheme, other in _PAIRS
                },
                "measured / predicted": f"{off.min():.2f} to {off.max():.2f}",
            }
        )  # fmt: skip
    return markdown(pd.DataFrame(rows))


_ORDERS = {
    "suite": "{suite}", "passes": "{accumulation}", "scheme": "{scheme}",
    "depth-first (s)": "{step_time_s_depth:.2f}",
    "predicted": "{predicted_step_time_s_depth:.2f}", "breadth-first (s)": "{step_time_s_breadth:.2f}",
    " predicted": "{predicted_step_time_s_breadth:.2f}", "gain": "{over_depth_breadth:.2f}",
    "gain predicted": "{gain:.2f}",
}  # fmt: skip


def order(root: Path) -> list[str]:
    """Table of the suites in both orders of the passes, one row per scheme and number of passes."""
    points = _points(root, ("box-order", "box-attained-order"))
    depth, breadth = (points[points["order"] == name] for name in ("depth", "breadth"))
    keys = [*same_but(points, "order"), "scheme"]
    table = depth.merge(breadth, on=keys, suffixes=("_depth", "_breadth"))
    table["gain"] = table["predicted_step_time_s_depth"] / table["predicted_step_time_s_breadth"]
    return markdown(filled(table, _ORDERS))


_HOPS = {
    "overlap": "{overlaps}", "scheme": "{scheme}", "flat rings (s)": "{step_time_s_flat:.2f}",
    "predicted": "{predicted_step_time_s_flat:.2f}", "level by level (s)": "{step_time_s_hops:.2f}",
    " predicted": "{predicted_step_time_s_hops:.2f}", "throughput, hops / rings": "{over_flat_hops:.2f}",
    "predicted ": "{gain:.2f}", "bytes between nodes, hops / rings": "{sent_ratio:.2f}",
}  # fmt: skip


def hops(root: Path) -> list[str]:
    """Table of flat rings against level-by-level collectives, one row per scheme and overlap."""
    points = _points(root, ("box-hops",))
    flat, hops = (points[points["collectives"] == name] for name in ("flat", "hops"))
    keys = [*same_but(points, "collectives"), "scheme"]
    table = flat.merge(hops, on=keys, suffixes=("_flat", "_hops"))
    table["gain"] = table["predicted_step_time_s_flat"] / table["predicted_step_time_s_hops"]
    rows = read_table(root / "results" / "reference" / "box" / "bytes.csv")
    sent = rows[rows["level"] == WORLD].groupby("point")["counted_bytes"].sum()
    table["sent_ratio"] = table["point_hops"].map(sent) / table["point_flat"].map(sent)
    table["overlaps"] = table["overlap"].map({True: "yes", False: "no"})
    return markdown(filled(table, _HOPS))


def sent(root: Path) -> list[str]:
    """Bytes that a rank sends over each level per step of the core experiment, counted and in closed form."""
    rows = read_table(root / "results" / "reference" / "box" / "bytes.csv")
    rows = rows[(rows["suite"] == "box") & (rows["ranks"] == _RANKS) & (rows["repeat"] == 1)]
    table = rows.pivot_table("counted_bytes", "scheme", "level", aggfunc="sum", sort=False) / 1e3
    table["off"] = rows["difference_bytes"].abs().groupby(rows["scheme"]).sum()
    levels = {f"{level} (kB)": f"{{{level}:,.1f}}" for level in ("package", "node", "world")}
    cells = {"scheme": "{scheme}", **levels, "off the closed form (B)": "{off:g}"}
    return markdown(filled(table.reset_index(), cells))


def links(root: Path) -> list[str]:
    """Table of collectives on shaped links: seconds and counted bytes over those of the closed form."""
    table = builder("box_links")(read_table(root / "results" / "reference" / "box-bench" / "comm.csv"))
    return markdown(filled(table.assign(kilobytes=table["bytes"] / 1e3), _LINKS))


def jobs(root: Path) -> list[str]:
    """Table of the time that Slurm and Snakemake add to a run."""
    table = builder("box_jobs")(read_table(root / "results" / "reference" / "box-bench" / "jobs.csv"))
    return markdown(filled(table, _JOBS))


def _points(root: Path, suites: tuple[str, ...]) -> pd.DataFrame:
    points = box.build(read_table(root / "results" / "reference" / "box" / "runs.csv"))
    return points[points["suite"].isin(suites)].copy()
