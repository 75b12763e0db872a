"""Tables inside documents, written from results: between `<!-- name:begin -->` and `<!-- name:end -->`."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from lowband.cost.softmax import ALGORITHMS, TWO_PASS
from lowband.errors import UserError
from lowband.report import box_documents, suite_documents
from lowband.report.build_tables import read_sources
from lowband.report.claim_views import (
    HEADLINES,
    by_kind,
    headlines,
    markdown,
    markdown_table,
    read_graded,
)
from lowband.report.claims import read_claims
from lowband.report.findings import findings
from lowband.report.needs import needs
from lowband.report.shipped import write_shipped_tables
from lowband.report.tables import peers, softmax
from lowband.spec.csv_tables import read_table
from lowband.spec.files import write_if_changed
from lowband.spec.peers import PEER_NAMES, PEERS, TABLE, Has
from lowband.spec.softmax import TORCH
from lowband.spec.yaml_model import read_text


def write_documents(root: Path) -> None:
    """Write every block of BLOCKS into its document. Raises UserError for a document without the block."""
    built = {name: build(root) for name, (_, build) in BLOCKS.items()}  # all of them, before any is written
    for name, (document, _) in BLOCKS.items():
        path = root / document
        text = read_text(path)
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise UserError(f"no block '{name}'", where=path, allowed=f"{begin.strip()} ... {end}")
        block = begin + "\n".join(built[name]) + "\n" + end
        before, after = text.split(begin)[0], text.split(end)[1]
        write_if_changed(path, before + block + after)


def _counterparts(_root: Path) -> list[str]:
    rows = []
    for form, row in TABLE.items():
        cells = []
        for peer in PEERS:
            cell = row[peer]
            if isinstance(cell, Has):
                said = ", ".join(f"`{key}: {value}`" for key, value in cell.arguments.items())
                cells.append(said.replace("'", "") or "yes")
            else:
                cells.append(f"none: {cell.reason}")
        rows.append([f"`{form}`" if form != "other" else "all others, as `hier3`", *cells])
    return markdown_table(["placement", *(PEER_NAMES[peer] for peer in PEERS)], rows)


def _faults(root: Path) -> list[str]:
    faults = read_table(root / "results/reference/peers/faults.csv").fillna("").astype(str)
    faults.insert(0, "of", faults.pop("peer") + " " + faults.pop("version"))
    rows = faults.to_numpy(dtype=str).tolist()
    return markdown_table(["peer", "fault", "condition", "quantity", "should be", "found", ""], rows)


@cache  # two documents show the claims
def _graded(root: Path) -> pd.DataFrame:
    """Every claim, graded on the shipped results."""
    with tempfile.TemporaryDirectory() as folder:
        write_shipped_tables(root, Path(folder))
        return read_graded(Path(folder) / "claims.csv")


def _claims(root: Path) -> list[str]:
    return markdown(_graded(root))


def _found(root: Path) -> list[str]:
    """The findings, in sentences."""
    return [f"{i}. **{finding.lead}**{finding.rest}" for i, finding in enumerate(findings(root), 1)]


def _headlines(root: Path) -> list[str]:
    """The verdicts by kind of claim, then the claims that are marked as headlines."""
    graded = _graded(root)
    claims = read_claims(root / "config" / "claims.yaml")
    names = {claim.id: claim.headline for claim in claims if claim.headline}
    return [*markdown_table(*by_kind(graded)), "", *markdown_table(HEADLINES, headlines(graded, names))]


def _accuracy(root: Path) -> list[str]:
    accuracy = read_table(root / "results" / "reference" / "predicted" / "accuracy.csv")
    rows = [
        [
            f"{row['source']}", f"{row['use']}", f"{row['rows']}", f"{row['mean_error_percent']:.1f}",
            f"{row['max_error_percent']:.1f}",
        ]
        for _, row in accuracy.iterrows()
    ]  # fmt: skip
    return markdown_table(["source", "rows are", "rows", "mean error (%)", "largest (%)"], rows)


def _peers(root: Path) -> list[str]:
    folder = root / "results" / "reference" / "peers"
    table = peers.build(*(read_table(folder / f"{name}.csv") for name in ("runs", "steps", "outside")))
    rows = [_peer_row(row) for _, row in table.iterrows()]
    columns = [
        "peer", "scheme", "on", "ranks", "dtype", "ours (ms)", "peer (ms)", "step ratio", "memory ratio",
        "sent, ours (MB)", "sent, peer (MB)", "loss difference", "",
    ]  # fmt: skip
    return markdown_table(columns, rows)


def _peer_row(row: "pd.Series[Any]") -> list[str]:
    keys = ("scheme", "cluster", "ranks", "compute_dtype")
    point = [PEER_NAMES[row["peer"]], *(str(row[key]) for key in keys)]
    if row["status"] != "ok":
        return [*point, *[""] * 7, f"{row['status']}: {row['cause']}"]
    return [
        *point,
        f"{1e3 * row['step_time_s_ours']:.0f}",
        f"{1e3 * row['step_time_s_peer']:.0f}",
        f"{row['step_time_ratio']:.2f}",
        f"{row['memory_ratio']:.2f}",
        *(_sent(row, whose) for whose in ("ours", "peer")),
        f"{row['loss_difference']:.1e}",
        "" if pd.isna(row["notes"]) else str(row["notes"]),
    ]


def _sent(row: "pd.Series[Any]", whose: str) -> str:
    """MB per rank and step, as counted in the process or, in a box, by the interface."""
    counted = row[f"outside_bytes_{whose}"]
    if pd.notna(counted):
        return f"{counted / 1e6:.2f}"
    return f"{row[f'interface_bytes_{whose}'] / 1e6:.2f} (interface)"


def _softmax(root: Path) -> list[str]:
    """By machine and size, for every instruction set measured: two-pass, and the others relative to it."""
    times, setup, reported = read_sources("softmax", root / "results" / "reference" / "softmax", root)
    table = softmax.build(times, setup, reported)
    lines = []
    measured = table[(table["provenance"] == "measured") & (table["status"] == "ok")]
    for cluster, rows in measured.groupby("cluster"):
        made = setup[setup["cluster"] == cluster].iloc[0]
        title = f"{made['device']}, {made['compiler']}, commit {made['commit'][:7]}."
        lines += [title, "", *_softmax_machine(rows), ""]
    return lines[:-1]


def _softmax_machine(measured: pd.DataFrame) -> list[str]:
    columns = [
        "", "input", "regime", "n", "two-pass (ns per value)", "GB/s", "of limit", "recompute / two-pass",
        "reload / two-pass", "gain", "torch.softmax (ns per value)",
    ]  # fmt: skip
    rows = [
        _softmax_row(row, measured[measured["elements"] == row["elements"]])
        for _, row in measured[measured["algorithm"] == TWO_PASS].iterrows()
    ]
    return markdown_table(columns, rows)


def _softmax_row(two_pass: "pd.Series[Any]", at_size: pd.DataFrame) -> list[str]:
    others = at_size[at_size["isa"] == two_pass["isa"]].set_index("algorithm")
    torch = at_size.set_index("algorithm").loc[TORCH]
    return [
        str(two_pass["isa"]), f"{two_pass['array_bytes'] / 2**10:,.0f} KiB", str(two_pass["regime"]),
        f"{two_pass['n']:.0f}", f"{1e9 * two_pass['time_s'] / two_pass['elements']:.2f}",
        f"{two_pass['bytes_per_s'] / 1e9:.1f}", f"{two_pass['of_limit']:.2f}",
        *(
            f"{row['over_two_pass']:.2f} ({row['over_two_pass_q20']:.2f} to {row['over_two_pass_q80']:.2f})"
            for row in (others.loc[name] for name in ALGORITHMS if name != TWO_PASS)
        ),
        f"{two_pass['gain_percent']:.0f} %", f"{1e9 * torch['time_s'] / torch['elements']:.2f}",
    ]  # fmt: skip


def _mutants(root: Path) -> list[str]:
    """By folder: mutants tried and killed; then the survivors, with the finding about each."""
    tried = read_table(root / "results" / "reference" / "mutants" / "mutants.csv").fillna("").astype(str)
    tried["folder"] = tried["file"].str.removeprefix("src/lowband/").str.split("/").str[0]
    groups = [(f"`{folder}/`", rows) for folder, rows in tried.groupby("folder", sort=False)]
    rates = []
    for name, rows in [*groups, ("all", tried)]:
        counts = [int((rows["outcome"] == outcome).sum()) for outcome in ("killed", "timeout", "survived")]
        equivalent = int(rows["verdict"].str.startswith("equivalent").sum())
        share = 100 * (counts[0] + counts[1]) / len(rows)
        rates.append([name, *map(str, (len(rows), *counts, equivalent)), f"{share:.0f} %"])
    columns = ["code", "mutants", "killed by a test", "endless", "survived", "of these equivalent", "killed"]
    survived = tried[tried["outcome"] == "survived"]
    left = [
        [f"{row['file']}:{row['line']}", f"`{row['before']}`", f"`{row['after']}`", row["verdict"] or "open"]
        for _, row in survived.iterrows()
    ]
    return [*markdown_table(columns, rates), "", *markdown_table(["survivor", "before", "after", ""], left)]


# block -> its document and the function that builds it
BLOCKS: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "counterparts": ("docs/peers.md", _counterparts),
    "faults": ("docs/peers.md", _faults),
    "peers": ("docs/benchmarks.md", _peers),
    "box": ("docs/scale-model.md", box_documents.core),
    "sent": ("docs/scale-model.md", box_documents.sent),
    "sweep": ("docs/scale-model.md", box_documents.sweep),
    "comm": ("docs/scale-model.md", box_documents.links),
    "jobs": ("docs/scale-model.md", box_documents.jobs),
    "accuracy": ("docs/predictor.md", _accuracy),
    "softmax": ("docs/softmax-cpu.md", _softmax),
    "suites": ("config/README.md", suite_documents.suites),
    "needs": ("docs/running.md", needs),
    "headlines": ("README.md", _headlines),
    "found": ("docs/claims.md", _found),
    "claims": ("docs/claims.md", _claims),
    "mutants": ("docs/testing.md", _mutants),
}
