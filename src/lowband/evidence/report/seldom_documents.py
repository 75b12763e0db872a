"""Tables in docs/low-communication-measured.md and docs/jobs-that-join.md."""

from pathlib import Path

import pandas as pd

from lowband.evidence.report.writers import filled, markdown
from lowband.evidence.tables.build import read_sources
from lowband.evidence.tables.derived import partners as partners_table
from lowband.evidence.tables.derived import wan
from lowband.spec.csv_tables import read_table
from lowband.spec.peers import PEER_NAMES

STEP_OF_GRID = 1.21  # between neighbouring rates of the published table


def published(root: Path) -> list[str]:
    """By paper and system: rows, and by how much predicted and published numbers differ."""
    table = read_table(root / "results" / "reference" / "predicted" / "low_communication.csv")
    factors = table.groupby(["arxiv", "system"], sort=False)["factor"]
    rows = factors.agg(["size", "median", "max"])
    rows["close"] = factors.apply(lambda values: (values <= STEP_OF_GRID).sum())
    cells = {
        "arXiv": "{arxiv}", "system": "{system}", "rows": "{size}", "factor, median": "{median:.3f}",
        "largest": "{max:.3f}", "within 1.21": "{close}",
    }  # fmt: skip
    return markdown(filled(rows.reset_index(), cells))


def slow_links(root: Path) -> list[str]:
    """By rate, the first to reach a loss first: step time, loss at equal tokens and at equal time."""
    table = wan.build(*read_sources("wan", root / "results" / "reference" / "wan", root))
    table = table.sort_values(["outer_link_bits_per_s", "over_first"], ascending=[False, True], kind="stable")
    table["link"] = [f"{rate / 1e6:,.0f}" for rate in table["outer_link_bits_per_s"]]
    table["late"] = [_or(value, "{:.2f}", "no 20 steps") for value in table["equal_time_loss"]]
    table["until"] = [_or(value, "{:,.0f}", "not reached") for value in table["target_s"]]
    table["over"] = [_or(value, "{:,.1f}", "-") for value in table["over_first"]]
    cells = {
        "link (Mbit/s)": "{link}", "scheme": "{scheme}", "step (s)": "{step_time_s:.3g}", "": "{provenance}",
        "computes": "{utilization:.1%}", "loss, equal tokens": "{final_loss:.3f}",
        "less hsdp's": "{difference:+.3f}", f"time to {wan.TARGET} nats (s)": "{until}",
        "over the first": "{over}", "loss, equal time": "{late}",
    }  # fmt: skip
    return markdown(filled(table, cells))


def partners(root: Path) -> list[str]:
    """By scheme: loss at the end, beside data parallel and beside the average of all; distance; bytes."""
    shipped = root / "results" / "reference" / partners_table.SUITE
    table = partners_table.build(*read_sources("partners", shipped, root))
    rows = table.groupby("scheme", sort=False).agg(
        loss=("final_loss", "mean"), low=("final_loss", "min"), high=("final_loss", "max"),
        difference=("difference", "mean"), over=("over_averaged", "mean"),
        distance=("consensus_distance", "mean"), sent=("sent_bytes", "mean"),
    )  # fmt: skip
    rows["apart"] = [_or(value, "{:.3f}", "-") for value in rows["distance"]]
    cells = {
        "scheme": "{scheme}", "loss, last 50 of 400 steps": "{loss:.3f} ({low:.3f} to {high:.3f})",
        "less hsdp's": "{difference:+.3f}", "less averaged-adam's": "{over:+.4f}",
        "distance at the end": "{apart}", "sent per rank and step (bytes)": "{sent:,.0f}",
    }  # fmt: skip
    return markdown(filled(rows.reset_index(), cells))


def delays(root: Path) -> list[str]:
    """By scheme of the suite `delay`: loss at the end, beside data parallel; memory for exchanges."""
    runs = read_table(root / "results" / "reference" / "delay" / "runs.csv")
    states = read_table(root / "results" / "reference" / "delay" / "states.csv")
    exchanged = states[states["state"].isin(["anchor", "outer", "in_flight"])]
    held = exchanged.groupby("run_id")["held_bytes"].sum()
    runs["held"] = runs["run_id"].map(held).fillna(0) / runs["parameters"]
    data_parallel = runs[runs["scheme"] == "hsdp"].set_index("repeat")["final_loss"]
    runs["difference"] = runs["final_loss"] - runs["repeat"].map(data_parallel)
    rows = runs.groupby("scheme", sort=False).agg(
        loss=("final_loss", "mean"), low=("final_loss", "min"), high=("final_loss", "max"),
        difference=("difference", "mean"), least=("difference", "min"), most=("difference", "max"),
        held=("held", "mean"),
    )  # fmt: skip
    cells = {
        "scheme": "{scheme}", "loss, last 50 of 400 steps": "{loss:.3f} ({low:.3f} to {high:.3f})",
        "less hsdp's": "{difference:+.3f} ({least:+.3f} to {most:+.3f})",
        "held for exchanges (bytes per parameter)": "{held:.1f}",
    }  # fmt: skip
    return markdown(filled(rows.sort_values("difference").reset_index(), cells))


def one_byte(root: Path) -> list[str]:
    """By method: loss before, half way and after, over seeds; what a worker sends in a step."""
    rows = read_table(root / "results" / "reference" / "one-byte" / "rounds.csv")
    last = rows["round"].max()
    at = rows[rows["round"].isin([0, last // 2, last])]
    losses = at.groupby(["method", "round"], sort=False)["loss"].agg(["mean", "min", "max"]).reset_index()
    losses["loss"] = [f"{row.mean:.3f} ({row.min:.3f} to {row.max:.3f})" for row in losses.itertuples()]
    losses["after"] = "after_" + losses["round"].astype(str)
    table = losses.pivot_table("loss", "method", "after", aggfunc="first", sort=False).reset_index()
    ends = rows[rows["round"] == last].groupby("method")
    table["sent"] = table["method"].map(ends["sent_bytes"].mean() / last)
    same, runs = ends["same_weights"].sum().get("one byte", 0), ends.size().get("one byte", 0)
    cells = {
        "method": "{method}", "sent per worker and step (bytes)": "{sent:,.0f}",
        **{f"loss after {round_} steps": f"{{after_{round_}}}" for round_ in (0, last // 2, last)},
    }  # fmt: skip
    sentence = (
        f"Runs in which the workers that were left ended with the same weights, bit by bit: {same} of {runs}."
    )
    return [*markdown(filled(table, cells)), "", sentence]


LAST_STEPS = 16  # of which a loss is the mean


def beside_torch(root: Path) -> list[str]:
    """By ranks, scheme and engine: loss of the last steps, bytes of a step with an exchange, step time."""
    folder = root / "results" / "reference" / "seldom-peers"
    runs, steps = read_table(folder / "runs.csv"), read_table(folder / "steps.csv")
    late = steps[steps["step"] > steps["step"].max() - LAST_STEPS].groupby("run_id")["loss"].mean()
    runs["loss"] = runs["run_id"].map(late)
    by = ["ranks", "scheme", "engine"]
    ours = runs[runs["engine"] == "lowband"].set_index(["ranks", "scheme", "repeat"])["loss"]
    keys = zip(runs["ranks"], runs["scheme"], runs["repeat"], strict=True)
    runs["difference"] = (runs["loss"] - ours.loc[[*keys]].to_numpy()).abs()
    rows = runs.groupby(by, sort=False).agg(
        loss=("loss", "mean"), difference=("difference", "max"), sent=("outside_bytes", "max"),
        step_ms=("step_time_s", lambda values: 1e3 * values.median()),
    )  # fmt: skip
    rows = rows.reset_index()
    rows["engine"] = rows["engine"].map({"lowband": "lowband", **PEER_NAMES})
    is_local = (rows["engine"] == "DDP") & (rows["scheme"] == "local-sgd")
    rows.loc[is_local, "engine"] = "DDP + PostLocalSGDOptimizer"
    cells = {
        "ranks": "{ranks}", "scheme": "{scheme}", "engine": "{engine}", "loss, last 16 steps": "{loss:.4f}",
        "largest difference to ours": "{difference:.1e}", "sent per rank in that step (bytes)": "{sent:,.0f}",
        "step (ms)": "{step_ms:.0f}",
    }  # fmt: skip
    return markdown(filled(rows, cells))


def beside_torchft(root: Path) -> list[str]:
    """By system and case: losses; how long the other replicas waited, and what they lost; what is equal."""
    rows = read_table(root / "results" / "reference" / "rejoin" / "rejoin.csv")
    rows["case"] = ["undisturbed" if pd.isna(step) else "killed" for step in rows["dies_at"]]
    rows["lost"] = rows["others_steps"] - rows["steps"]
    by = rows.groupby(["case", "system"], sort=False)
    table = by.agg(
        cases=("seed", "size"), loss=("loss", "mean"), low=("loss", "min"), high=("loss", "max"),
        wait=("longest_wait_s", "median"), longest=("longest_wait_s", "max"), lost=("lost", "max"),
        without=("exchanges_without", "max"), weights=("same_weights", "sum"), outer=("same_outer", "sum"),
    )  # fmt: skip
    cells = {
        "replica 1": "{case}", "system": "{system}", "cases": "{cases}",
        "loss of the others, last 40 of 160 steps": "{loss:.4f} ({low:.4f} to {high:.4f})",
        "their longest wait (s), median (longest)": "{wait:.1f} ({longest:.1f})",
        "steps they lost": "{lost}", "exchanges without it, most of a case": "{without}",
        "same weights, momentum in the end": "{weights}, {outer}",
    }  # fmt: skip
    return markdown(filled(table.reset_index(), cells))


def _or(value: float, form: str, otherwise: str) -> str:
    return otherwise if pd.isna(value) else form.format(value)
