"""The records of several points as a table for a terminal, and the best way of each job among them."""

from collections.abc import Callable, Sequence
from typing import Any

from lowband.cost.numbers import GIB
from lowband.predict.show.point_text import constant_lines, fits, no_evidence, recomputed
from lowband.spec.columns import aligned

# Heading -> the cell of a record, for a table of several.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda row: str(row["model"]),
    "scheme": lambda row: str(row["scheme"]),
    "gpus": lambda row: str(row["gpus"]),
    "batch": lambda row: f"{row['micro_batch']} x {row['accumulation']}",
    "seq": lambda row: str(row["seq_len"]),
    "recompute": lambda row: f"{row['recompute']}{recomputed(row)}",
    "cp": lambda row: str(_cp(row)),
    "ways": lambda row: row["context"]["ways"] if "context" in row else "",
    "ep": lambda row: str(row["experts"]["ep"]) if "experts" in row else "1",
    "route": lambda row: row["experts"]["route"] if "experts" in row else "",
    "copies": lambda row: str(row["experts"].get("copies", 0)) if "experts" in row else "",
    "step (s)": lambda row: f"{row['step_time_s']:.4g}",
    "interval": lambda row: "{:.4g} to {:.4g}".format(*row["interval"]["step_time_s"]),
    "tokens/s/GPU": lambda row: f"{row['tokens_per_s_per_gpu']:.4g}",
    "TFLOPS": lambda row: f"{row['tflops_per_gpu']:.4g}",
    "GiB": lambda row: f"{row['peak_memory_bytes'] / GIB:.4g}",
    "headroom": lambda row: "?" if row["fits"] is None else f"{row['headroom_bytes'] / GIB:.3g} {fits(row)}",
}


_OF_A_JOB = ("model", "scheme", "gpus", "batch", "seq", "recompute", "cp", "ep", "route", "copies")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Several points of one machine and stack as a table, one line each, and what they stand on."""
    first = rows[0]
    capacity = "" if first["capacity_bytes"] is None else f", {first['capacity_bytes'] / GIB:g} GiB a rank"
    left_out = _left_out(rows)
    columns = {heading: cell for heading, cell in _COLUMNS.items() if heading not in left_out}
    cells = [[*columns], *([cell(row) for cell in columns.values()] for row in rows)]
    title = f"predicted on {first['cluster']}, stack {first['stack']}{capacity}"
    short = sum(row["fits"] is False for row in rows)
    title += f"; {short} of {len(rows)} do not fit" if short else ""
    title = "\n".join([*no_evidence(first), title])
    return "\n".join([title, "", *aligned(cells), "", *_best_ways(rows), *constant_lines(first["constants"])])


def _left_out(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Columns of axes along which no ranks lie in any row."""
    columns = {"context": ("cp", "ways"), "experts": ("ep", "route")}
    left_out = [
        name for key, names in columns.items() if not any(key in row for row in rows) for name in names
    ]
    return left_out if any("copies" in row.get("experts", {}) for row in rows) else [*left_out, "copies"]


def _cp(row: dict[str, Any]) -> int:
    return int(row["context"]["cp"]) if "context" in row else 1


def _best_ways(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The fastest way along context of each job that is predicted in several, of those that fit if any does,
    and by how much the next is slower; no lines if there are none."""
    names = [name for name in _COLUMNS if name in _OF_A_JOB and name not in _left_out(rows)]
    jobs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        jobs.setdefault(tuple(_COLUMNS[name](row) for name in names), []).append(row)
    lines = []
    for job, found in jobs.items():
        if len(found) < 2 or any("context" not in row for row in found):
            continue
        best, second = sorted(found, key=lambda row: (row["fits"] is False, row["step_time_s"]))[:2]
        slower = f"{100 * (second['step_time_s'] / best['step_time_s'] - 1):+.1f} %"
        room = " (does not fit)" if second["fits"] is False else ""
        ways = [row["context"]["ways"] for row in (best, second)]
        lines.append([*job, ways[0], f"{best['step_time_s']:.4g}", f"{ways[1]} {slower}{room}"])
    if not lines:
        return []
    return [*aligned([[*names, "best way", "step (s)", "next"], *lines]), ""]
