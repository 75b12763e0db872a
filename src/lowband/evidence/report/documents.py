"""Tables inside documents, written from results: between `<!-- name:begin -->` and `<!-- name:end -->`."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from lowband.cost.softmax import TWO_PASS
from lowband.errors import UserError
from lowband.evidence.claims.claim import read_claims
from lowband.evidence.report import (
    benchmark_documents,
    box_documents,
    parallel_example,
    predictor_documents,
    seldom_documents,
    suite_documents,
    trial_documents,
)
from lowband.evidence.report.claim_views import by_kind, claims_markdown, headlines, read_graded
from lowband.evidence.report.findings import findings
from lowband.evidence.report.needs import needs
from lowband.evidence.report.shipped import write_shipped_tables
from lowband.evidence.report.writers import filled, markdown
from lowband.evidence.tables.build import read_sources
from lowband.evidence.tables.derived import peers, softmax
from lowband.spec.csv_tables import read_table
from lowband.spec.files import write_if_changed
from lowband.spec.peers import PEER_NAMES, PEERS, TABLE, Has, Lacks
from lowband.spec.plain_data import read_text
from lowband.spec.softmax import TORCH


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
    rows = [
        {
            "placement": f"`{form}`" if form != "other" else "all others, as `hier3`",
            **{PEER_NAMES[peer]: _counterpart(row[peer]) for peer in PEERS},
        }
        for form, row in TABLE.items()
    ]
    return markdown(pd.DataFrame(rows))


def _counterpart(cell: Has | Lacks) -> str:
    if not isinstance(cell, Has):
        return f"none: {cell.reason}"
    options = ", ".join(f"`{key}: {value}`" for key, value in cell.arguments.items())
    return options.replace("'", "") or "yes"


def _faults(root: Path) -> list[str]:
    faults = read_table(root / "results/reference/peers/faults.csv").fillna("").astype(str)
    faults.insert(0, "of", faults.pop("peer") + " " + faults.pop("version"))
    faults.columns = pd.Index(["peer", "fault", "condition", "quantity", "should be", "found", ""])
    return markdown(faults)


@cache  # two documents show the claims
def _graded(root: Path) -> pd.DataFrame:
    """Every claim, graded on the shipped results."""
    with tempfile.TemporaryDirectory() as folder:
        write_shipped_tables(root, Path(folder))
        return read_graded(Path(folder) / "claims.csv")


def _claims(root: Path) -> list[str]:
    return claims_markdown(_graded(root))


def _found(root: Path) -> list[str]:
    """The findings, in sentences."""
    return [f"{i}. **{finding.lead}**{finding.rest}" for i, finding in enumerate(findings(root), 1)]


def _headlines(root: Path) -> list[str]:
    """The verdicts by kind of claim, then the claims that are marked as headlines."""
    graded = _graded(root)
    claims = read_claims(root / "config" / "claims.yaml")
    names = {claim.id: claim.headline for claim in claims if claim.headline}
    return [*markdown(by_kind(graded)), "", *markdown(headlines(graded, names))]


_PEER = {
    "peer": "{name}", "scheme": "{scheme}", "on": "{cluster}", "ranks": "{ranks}", "dtype": "{compute_dtype}",
}  # fmt: skip
_COMPARED = {
    "ours (ms)": "{ours_ms:.0f}", "peer (ms)": "{peer_ms:.0f}", "step ratio": "{step_time_ratio:.2f}",
    "memory ratio": "{memory_ratio:.2f}", "sent, ours (MB)": "{sent_ours}", "sent, peer (MB)": "{sent_peer}",
    "loss difference": "{loss_difference:.1e}", "": "{notes}",
}  # fmt: skip


def _peers(root: Path) -> list[str]:
    """A row per peer and point; for a run that did not end ok its cause alone."""
    folder = root / "results" / "reference" / "peers"
    table = peers.build(*(read_table(folder / f"{name}.csv") for name in ("runs", "steps", "outside")))
    table = table.assign(name=table["peer"].map(PEER_NAMES), notes=table["notes"].fillna(""))
    for whose in ("ours", "peer"):
        table[f"{whose}_ms"] = 1e3 * table[f"step_time_s_{whose}"]
        table[f"sent_{whose}"] = [_sent(row, whose) for _, row in table.iterrows()]
    rows = filled(table, {**_PEER, **_COMPARED})
    failed = table["status"] != "ok"
    rows.loc[failed, list(_COMPARED)] = ""
    rows.loc[failed, ""] = table["status"] + ": " + table["cause"]
    return markdown(rows)


def _sent(row: "pd.Series[Any]", whose: str) -> str:
    """MB per rank and step, as counted in the process or, in a box, by the interface."""
    counted = row[f"outside_bytes_{whose}"]
    if pd.notna(counted):
        return f"{counted / 1e6:.2f}"
    return f"{row[f'interface_bytes_{whose}'] / 1e6:.2f} (interface)"


_OVER = "{{over_two_pass_{0}:.2f}} ({{over_two_pass_q20_{0}:.2f}} to {{over_two_pass_q80_{0}:.2f}})"
_SOFTMAX = {
    "": "{isa}", "input": "{kib:,.0f} KiB", "regime": "{regime}", "n": "{n:.0f}",
    "two-pass (ns per value)": "{ns:.2f}", "GB/s": "{rate:.1f}", "of limit": "{of_limit:.2f}",
    "recompute / two-pass": _OVER.format("recompute"), "reload / two-pass": _OVER.format("reload"),
    "gain": "{gain_percent:.0f} %", "torch.softmax (ns per value)": "{ns_torch:.2f}",
}  # fmt: skip


def _softmax(root: Path) -> list[str]:
    """By machine and size, for every instruction set measured: two-pass, and the others relative to it."""
    times, setup, reported = read_sources("softmax", root / "results" / "reference" / "softmax", root)
    table = softmax.build(times, setup, reported)
    table["ns"] = 1e9 * table["time_s"] / table["elements"]
    table = table.assign(kib=table["array_bytes"] / 2**10, rate=table["bytes_per_s"] / 1e9)
    lines = []
    measured = table[(table["provenance"] == "measured") & (table["status"] == "ok")]
    for cluster, rows in measured.groupby("cluster"):
        made = setup[setup["cluster"] == cluster].iloc[0]
        title = f"{made['device']}, {made['compiler']}, commit {made['commit'][:7]}."
        at_size = rows[rows["algorithm"] == TWO_PASS]
        for name in ("recompute", "reload"):
            others = rows[rows["algorithm"] == f"three-pass {name}"]
            at_size = at_size.merge(others, on=["isa", "elements"], suffixes=("", f"_{name}"))
        torch = rows[rows["algorithm"] == TORCH]
        at_size = at_size.merge(torch, on="elements", suffixes=("", "_torch"))
        lines += [title, "", *markdown(filled(at_size, _SOFTMAX)), ""]
    return lines[:-1]


# block -> its document and the function that builds it
BLOCKS: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "parallel_places": ("docs/parallel.md", parallel_example.places),
    "parallel_groups": ("docs/parallel.md", parallel_example.groups),
    "parallel_rows": ("docs/parallel.md", parallel_example.rows),
    "counterparts": ("docs/peers.md", _counterparts),
    "faults": ("docs/peers.md", _faults),
    "peers": ("docs/benchmarks.md", _peers),
    "box": ("docs/scale-model.md", box_documents.core),
    "sent": ("docs/scale-model.md", box_documents.sent),
    "sweep": ("docs/scale-model.md", box_documents.sweep),
    "order": ("docs/scale-model.md", box_documents.order),
    "hops": ("docs/scale-model.md", box_documents.hops),
    "comm": ("docs/scale-model.md", box_documents.links),
    "jobs": ("docs/scale-model.md", box_documents.jobs),
    "accuracy": ("docs/predictor.md", predictor_documents.accuracy),
    "left_out": ("docs/predictor.md", predictor_documents.left_out),
    "at_scale": ("docs/predictor.md", predictor_documents.at_scale),
    "products": ("docs/predictor.md", predictor_documents.products),
    "beyond": ("docs/predictor.md", predictor_documents.beyond),
    "intervals": ("docs/predictor.md", predictor_documents.intervals),
    "alternatives": ("docs/predictor.md", predictor_documents.alternatives),
    "pareto": ("docs/predictor.md", predictor_documents.pareto),
    "published": ("docs/low-communication.md", seldom_documents.published),
    "slow_links": ("docs/low-communication.md", seldom_documents.slow_links),
    "beside_torch": ("docs/low-communication.md", seldom_documents.beside_torch),
    "partners": ("docs/low-communication.md", seldom_documents.partners),
    "delays": ("docs/low-communication.md", seldom_documents.delays),
    "torchft": ("docs/low-communication.md", seldom_documents.beside_torchft),
    "one_byte": ("docs/low-communication.md", seldom_documents.one_byte),
    "softmax": ("docs/softmax-cpu.md", _softmax),
    "suites": ("config/README.md", suite_documents.suites),
    "needs": ("docs/running.md", needs),
    "start": ("docs/benchmarks.md", benchmark_documents.start),
    "orders": ("docs/benchmarks.md", benchmark_documents.orders),
    "optimizers": ("docs/benchmarks.md", benchmark_documents.optimizers),
    "compiled": ("docs/benchmarks.md", benchmark_documents.compiled),
    "joined": ("docs/benchmarks.md", benchmark_documents.joined),
    "load": ("docs/benchmarks.md", benchmark_documents.load),
    "headlines": ("README.md", _headlines),
    "found": ("docs/claims.md", _found),
    "claims": ("docs/claims.md", _claims),
    "mutants": ("docs/testing.md", trial_documents.mutants),
    "anchors": ("docs/reliability.md", trial_documents.anchors),
    "fuzzed": ("docs/testing.md", trial_documents.fuzzed),
    "checkpoint_costs": ("docs/reliability.md", trial_documents.checkpoint_costs),
    "campaign": ("docs/reliability.md", trial_documents.faults),
    "twice": ("docs/reliability.md", trial_documents.twice),
    "stragglers": ("docs/reliability.md", trial_documents.stragglers),
}
