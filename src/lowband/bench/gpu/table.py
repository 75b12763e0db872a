"""The last lines of a call: every kernel and step beside the last shipped rows of the same device."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowband.bench.gpu.families import ROOT
from lowband.spec.csv_tables import read_benchmark

WORSE = 1.05
KEYS = [
    "part", "operation", "implementation", "dtype", "model", "batch", "heads", "seq_len", "head_dim",
    "causal", "rows", "columns", "inner", "partners",
]  # fmt: skip


def reference_of(device: str, root: Path = ROOT) -> Path | None:
    """The shipped folder of a device of this name, if there is one."""
    for path in sorted((root / "results" / "reference").glob("*/environment.json")):
        if json.loads(path.read_text(encoding="utf-8")).get("device") == device:
            return path.parent
    return None


def lines(folder: Path, reference: Path | None) -> Iterator[str]:
    """A line for each operation and implementation: median over the sizes that both have, and the worst."""
    yield f"{'what':<52} {'sizes':>5} {'this / last':>12} {'worst':>7}"
    ours = _times(folder / "kernels.csv")
    last = _times(reference / "kernels.csv") if reference else {}
    by_name: dict[str, list[float]] = {}
    for key, seconds in ours.items():
        ratios = by_name.setdefault(" ".join(key[:3]), [])
        if key in last:
            ratios.append(seconds / last[key])
    for name, ratios in by_name.items():
        if not ratios:
            yield f"{name:<52} {0:>5} {'-':>12} {'-':>7}"
            continue
        mark = "  worse" if max(ratios) > WORSE else ""
        yield f"{name:<52} {len(ratios):>5} {statistics.median(ratios):>12.3f} {max(ratios):>7.3f}{mark}"


def _times(path: Path) -> dict[tuple[Any, ...], float]:
    rows = read_benchmark(path)
    timed = rows[rows["time_s"].notna()]
    keys = timed[KEYS].astype(object).where(timed[KEYS].notna(), None)
    return dict(zip(map(tuple, keys.to_numpy().tolist()), timed["time_s"], strict=True))
