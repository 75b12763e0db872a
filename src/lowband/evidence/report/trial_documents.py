"""Tables in docs/testing.md and docs/reliability.md of campaigns: mutants, faults, stragglers, bits twice."""

from pathlib import Path

import pandas as pd

from lowband.evidence.report.writers import filled, markdown
from lowband.spec.csv_tables import read_table


def mutants(root: Path) -> list[str]:
    """By folder: mutants tried and killed; then the survivors, with the finding about each."""
    tried = read_table(root / "results" / "reference" / "mutants" / "mutants.csv").fillna("").astype(str)
    tried["folder"] = "`" + tried["file"].str.removeprefix("src/lowband/").str.split("/").str[0] + "/`"
    counts = pd.crosstab(tried["folder"], tried["outcome"]).reindex(
        index=tried["folder"].unique(), columns=["killed", "timeout", "survived"], fill_value=0
    )
    counts["all"] = counts.sum(axis=1)
    counts["same"] = tried["verdict"].str.startswith("equivalent").groupby(tried["folder"]).sum()
    counts.loc["all"] = counts.sum()
    counts["share"] = 100 * (counts["killed"] + counts["timeout"]) / counts["all"]
    rates = {
        "code": "{folder}", "mutants": "{all}", "killed by a test": "{killed}", "endless": "{timeout}",
        "survived": "{survived}", "of these equivalent": "{same}", "killed": "{share:.0f} %",
    }  # fmt: skip
    left = tried[tried["outcome"] == "survived"].replace({"verdict": ""}, "open")
    cells = {"survivor": "{file}:{line}", "before": "`{before}`", "after": "`{after}`", "": "{verdict}"}
    return [*markdown(filled(counts.reset_index(), rates)), "", *markdown(filled(left, cells))]


def faults(root: Path) -> list[str]:
    """By kind of fault: cases, those that were right, the time until detection; then those not right."""
    cases = read_table(root / "results" / "reference" / "faults" / "injected.csv")
    cases["is_right"] = cases["wrong"].isna()
    by_kind = cases.groupby("kind", sort=False)
    rows = pd.DataFrame({
        "cases": by_kind.size(), "right": by_kind["is_right"].sum(),
        "same": by_kind[["same_weights", "same_steps"]].min().all(axis=1),
        "median": by_kind["detected_s"].median(), "longest": by_kind["detected_s"].max(),
    })  # fmt: skip
    rows.loc["all"] = [
        len(cases), cases["is_right"].sum(), cases[["same_weights", "same_steps"]].all().all(),
        cases["detected_s"].median(), cases["detected_s"].max(),
    ]  # fmt: skip
    times = zip(rows["median"], rows["longest"], strict=True)
    rows["detected"] = ["-" if pd.isna(middle) else f"{middle:.1f} ({most:.1f})" for middle, most in times]
    rows["same"] = rows["same"].map({True: "all", False: "not all"})
    cells = {
        "fault": "{kind}", "cases": "{cases}", "right": "{right}",
        "final weights and records as undisturbed": "{same}",
        "detected after (s), median (longest)": "{detected}",
    }  # fmt: skip
    wrong = cases[~cases["is_right"]]
    listed = [f"- seed {row.seed}, {row.kind}: {row.wrong}" for row in wrong.itertuples()]
    return [*markdown(filled(rows.reset_index(), cells)), *(["", *listed] if listed else [])]


def anchors(root: Path) -> list[str]:
    """By fault and system: the time until detection, what was printed, what was lost."""
    rows = read_table(root / "results" / "reference" / "anchors" / "anchor_faults.csv")
    table = rows.groupby(["fault", "system"]).agg(
        trials=("told", "size"), median=("detected_s", "median"), longest=("detected_s", "max"),
        hung=("detected_s", lambda values: values.isna().sum()), told=("told", "sum"),
        lines=("lines", "median"), lost=("lost_steps", "max"), same=("same_end", "sum"),
    ).reset_index()  # fmt: skip
    times = zip(table["median"], table["longest"], table["hung"], strict=True)
    table["detected"] = [_until(*each) for each in times]
    cells = {
        "fault": "{fault}", "system": "{system}", "trials": "{trials}",
        "ended after (s), median (longest)": "{detected}",
        "names rank and cause": "{told} of {trials}",
        "lines printed": "{lines:.0f}", "steps lost, most": "{lost}",
        "end as undisturbed": "{same} of {trials}",
    }  # fmt: skip
    return markdown(filled(table, cells))


def _until(median: float, longest: float, hung: int) -> str:
    if pd.isna(median):
        return "hung"
    return f"{median:.1f} ({longest:.1f})" + (f", {hung} hung" if hung else "")


def checkpoint_costs(root: Path) -> list[str]:
    """By method and size: how long training stood still, when the checkpoint was whole, and at what rate."""
    rows = read_table(root / "results" / "reference" / "anchors" / "anchor_checkpoints.csv")
    rows = rows[rows["checkpoint"] > 1]  # the first one of a process makes what later ones use again
    rows["rate"] = rows["written_bytes"] / rows["durable_s"] / 1e6
    table = rows.groupby(["state_bytes", "method"], sort=False).agg(
        stall=("stall_s", "median"), cpu=("stall_cpu_s", "median"), durable=("durable_s", "median"),
        rate=("rate", "median"), steps=("steps", "median"), extra=("extra_bytes", "max"),
    ).reset_index()  # fmt: skip
    table["mb"], table["extra_mb"] = table["state_bytes"] / 1e6, table["extra"] / 1e6
    cells = {
        "state (MB a rank)": "{mb:.1f}", "method": "{method}", "stall (s)": "{stall:.3f}",
        "of it processor time (s)": "{cpu:.3f}", "whole after (s)": "{durable:.2f}", "MB/s": "{rate:.0f}",
        "steps meanwhile": "{steps:.0f}", "memory besides (MB a rank)": "{extra_mb:.1f}",
    }  # fmt: skip
    return markdown(filled(table, cells))


def fuzzed(root: Path) -> list[str]:
    """By group of parsers: inputs, and those that were accepted, refused, or a defect."""
    rows = read_table(root / "results" / "reference" / "fuzz" / "inputs.csv")
    counts = ["inputs", "accepted", "refused"]
    groups = rows.groupby("group", sort=False)
    table = groups[counts].sum()
    table.insert(0, "parsers", groups.size())
    table.loc["all"] = table.sum()
    table["defects"] = table["inputs"] - table["accepted"] - table["refused"]
    cells = {
        "group": "{group}", "parsers": "{parsers}", "inputs": "{inputs:,}", "accepted": "{accepted:,}",
        "refused in one line": "{refused:,}", "defects": "{defects}",
    }  # fmt: skip
    return markdown(filled(table.reset_index(), cells))


def twice(root: Path) -> list[str]:
    """How many runs and commands made twice were the same; then each comparison of two different runs."""
    rows = read_table(root / "results" / "reference" / "twice" / "twice.csv").fillna("")
    again = rows[rows["against"] == "itself"]
    is_command = again["what"].str.contains("lowband|tables")
    counts = [
        f"{kind.capitalize()} made twice: {len(found)}, the same bit by bit: {int(found['same'].sum())}."
        for kind, found in (("runs", again[~is_command]), ("commands", again[is_command]))
    ]
    shown = rows[(rows["against"] != "itself") | ~rows["same"]].copy()
    shown["promised"] = shown["is_promised"].map({True: "yes", False: "no"})
    texts = zip(shown["same"], shown["first_difference"].astype(str), shown["why"].astype(str), strict=True)
    shown["parts"] = ["-" if same else first + (f": {why}" if why else "") for same, first, why in texts]
    cells = {
        "run": "{what}", "beside": "{against}", "promised the same": "{promised}",
        "first difference": "{parts}",
    }  # fmt: skip
    return [*counts, "", *markdown(filled(shown, cells))]


_SLOW = {
    "rank": "a rank computes slowly", "link": "a rank's link is slow",
    "path": "messages between two ranks are slow", "none": "nothing is slow",
}  # fmt: skip


def stragglers(root: Path) -> list[str]:
    """By what was slow: trials, those that were right; then those not right."""
    trials = read_table(root / "results" / "reference" / "stragglers" / "trials.csv")
    by_kind = trials.groupby("kind")
    rows = pd.DataFrame({
        "trials": by_kind.size(), "right": by_kind["is_right"].sum(),
        "least": by_kind["factor"].min(), "most": by_kind["factor"].max(),
        "nothing": by_kind["named"].apply(lambda named: named.isna().sum()),
    }).loc[[kind for kind in _SLOW if kind in by_kind.groups]]  # fmt: skip
    rows["slow"] = rows.index.map(_SLOW)
    rows["times"] = [
        "-" if kind == "none" else f"{least:.1f} to {most:.1f}"
        for kind, least, most in zip(rows.index, rows["least"], rows["most"], strict=True)
    ]
    cells = {
        "what was slow": "{slow}", "times slower": "{times}", "trials": "{trials}",
        "named, and nothing else": "{right}", "nothing named": "{nothing}",
    }  # fmt: skip
    wrong = trials[~trials["is_right"]].fillna("").astype(str)
    listed = [
        f"- seed {row['seed']}, {_SLOW[row['kind']]} ({row['victim'].replace(' ', ' and ') or '-'}, "
        f"{row['factor']} times, {row['scheme']} on {row['ranks']} ranks): {row['named'] or 'nothing named'}"
        for row in wrong.to_dict("records")
    ]
    return [*markdown(filled(rows, cells)), *(["", "Not right:", "", *listed] if listed else [])]
