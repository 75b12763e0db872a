"""Tables in docs/testing.md and docs/reliability.md, of what the tests were tried with: mutants, faults."""

from pathlib import Path

import pandas as pd

from lowband.report.writers import filled, markdown
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
