"""Tables in docs/scale-model.md, from results/reference/box and box-bench."""

from pathlib import Path

import pandas as pd

from lowband.report.claim_views import markdown_table
from lowband.report.points import same_but
from lowband.report.tables import box, box_jobs, box_links
from lowband.spec.csv_tables import read_table

_CORE, _SWEEPS = ("box", "box-dgx2"), ("box-sweep", "box-accumulation")
_SHOWN = {"zero3": "ZeRO-3", "zeropp": "ZeRO++", "hier3": "hier3"}
_PAIRS = (("zeropp", "zero3"), ("hier3", "zero3"), ("hier3", "zeropp"))  # (scheme, scheme to divide by)
_RANKS = 16  # for the table of bytes


def core(root: Path) -> list[str]:
    """Table of the core experiments; rates at the machine's scale."""
    rows = [
        [
            f"{row['suite']}", f"{row['outer_link_gigabytes_per_s']:g}", f"{row['ranks']}",
            f"{row['scheme']}", f"{row['repeats']}",
            f"{row['step_time_s']:.2f} ({row['step_time_min_s']:.2f} to {row['step_time_max_s']:.2f})",
            f"{row['predicted_step_time_s']:.2f}", f"{row['exposed_comm_time_s']:.2f}",
            f"{row['model_flop_per_s_per_rank_at_scale'] / 1e12:.1f}",
            f"{row['over_zero3']:.2f}", f"{row['efficiency']:.2f}", f"{row['real_share']:.2f}",
            f"{row['interface_over_ledger']:.3f}",
        ]
        for _, row in _points(root, _CORE).iterrows()
    ]  # fmt: skip
    columns = [
        "suite", "outer link, at scale (GB/s a rank)", "ranks", "scheme", "n", "step (s)", "predicted (s)",
        "of it waiting", "TFLOPS per rank, at scale", "over zero3", "efficiency", "real share",
        "interface / ledger",
    ]  # fmt: skip
    return markdown_table(columns, rows)


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
            [
                f"{suite}", f"{tokens:g}", f"{passes:g}", "yes" if overlap else "no", f"{share:g}",
                *(f"{seconds:.2f}" for seconds in steps["step_time_s"]),
                *(f"{steps[f'over_{other}'][scheme]:.2f}" for scheme, other in _PAIRS),
                f"{off.min():.2f} to {off.max():.2f}",
            ]
        )  # fmt: skip
    columns = ["suite", "tokens per rank", "passes", "overlap", "outer link"]
    columns += [f"{name} (s)" for name in _SHOWN.values()]
    columns += [f"{_SHOWN[scheme]} / {_SHOWN[other]}" for scheme, other in _PAIRS]
    return markdown_table([*columns, "measured / predicted"], rows)


def sent(root: Path) -> list[str]:
    """Bytes that a rank sends over each level per step of the core experiment, counted and in closed form."""
    rows = read_table(root / "results" / "reference" / "box" / "bytes.csv")
    rows = rows[(rows["suite"] == "box") & (rows["ranks"] == _RANKS) & (rows["repeat"] == 1)]
    by_level = rows.pivot_table("counted_bytes", "scheme", "level", aggfunc="sum", sort=False) / 1e3
    off = rows.groupby("scheme", sort=False)["difference_bytes"].apply(lambda bytes: bytes.abs().sum())
    levels = ("package", "node", "world")
    table = [
        [scheme, *(f"{by_level[level][scheme]:,.1f}" for level in levels), f"{off[scheme]:g}"]
        for scheme in map(str, by_level.index)
    ]
    return markdown_table(
        ["scheme", *(f"{level} (kB)" for level in levels), "off the closed form (B)"], table
    )


def links(root: Path) -> list[str]:
    """Table of collectives on shaped links: seconds and counted bytes over those of the closed form."""
    table = box_links.build(read_table(root / "results" / "reference" / "box-bench" / "comm.csv"))
    rows = [
        [
            f"{row['cluster']}", f"{row['ranks']}", f"{row['level']}", f"{row['collective']}",
            f"{row['partners']}", f"{row['bytes'] / 1e3:,.0f}", f"{row['repeats']}",
            *(
                f"{row[ratio]:.3f} ({row[f'{ratio}_min']:.3f} to {row[f'{ratio}_max']:.3f})"
                for ratio in ("time_over_closed_form", "interface_over_ledger")
            ),
        ]
        for _, row in table.iterrows()
    ]  # fmt: skip
    columns = ["box", "ranks", "level", "collective", "partners", "sent per rank (kB)", "n"]
    return markdown_table([*columns, "time / closed form", "interface / ledger"], rows)


def jobs(root: Path) -> list[str]:
    """Table of the time that Slurm and Snakemake add to a run."""
    table = box_jobs.build(read_table(root / "results" / "reference" / "box-bench" / "jobs.csv"))
    rows = [
        [
            f"{row['ranks']}", f"{row['nodes']}", f"{row['jobs']}",
            *(f"{row[part]:.1f}" for part in box_jobs.PARTS),
        ]
        for _, row in table.iterrows()
    ]  # fmt: skip
    parts = ["waited (s)", "before the run (s)", "after it (s)", "added (s)", "the run (s)"]
    return markdown_table(["ranks", "nodes", "jobs", *parts], rows)


def _points(root: Path, suites: tuple[str, ...]) -> pd.DataFrame:
    points = box.build(read_table(root / "results" / "reference" / "box" / "runs.csv"))
    return points[points["suite"].isin(suites)]
