"""What a benchmark writes: one row per case, at full precision, and the environment of all."""

import csv
import dataclasses
import io
import json
import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lowband.kernels.device import IS_INTERPRETED
from lowband.spec.files import write_whole

# Raised when the way of measuring changes, so that rows of different ways are never mixed unseen.
MEASUREMENT_VERSION = 2
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
TOOL_TIME_LIMIT_S = 20
PREFIXES = ("TORCH", "PYTORCH", "TRITON", "CUDA")  # of variables on record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation of one operation on one size. What does not apply is empty.

    outcome: ok | wrong (error over the tolerance: not timed) | unsupported | oom | error | not run
    time_s:  median over `runs`; time_20_s and time_80_s the 20 % and 80 % quantiles
    bytes:   moved between device memory and chip by this algorithm, by its formula; least_bytes: by any
    """

    part: str
    operation: str
    implementation: str
    dtype: str
    model: str = ""
    batch: int | None = None
    heads: int | None = None
    seq_len: int | None = None
    head_dim: int | None = None
    causal: bool | None = None
    rows: int | None = None
    columns: int | None = None
    partners: int | None = None
    outcome: str = "ok"
    reason: str = ""
    runs: int | None = None
    time_s: float | None = None
    time_20_s: float | None = None
    time_80_s: float | None = None
    flops: int | None = None
    paper_flops: int | None = None
    bytes: int | None = None
    least_bytes: int | None = None
    error: float | None = None
    tolerance: float | None = None


def write_rows(
    rows: list[Row], environment: dict[str, object], path: Path, kept: list[dict[str, str]]
) -> None:
    """The rows as a CSV, after what is kept of it; each names its device, versions and commit."""
    stamp = {key: environment[key] for key in ("device", "torch", "triton", "commit", "measurement_version")}
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(Row)]
    writer = csv.DictWriter(text, [*names, *stamp], lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    writer.writerows({**dataclasses.asdict(row), **stamp} for row in rows)
    write_whole(path, text.getvalue())


def kept_rows(folder: Path, found: dict[str, object], parts: list[str]) -> list[dict[str, str]]:
    """A folder's rows of parts not run again; none if anything else made them."""
    table, made = folder / "kernels.csv", folder / "environment.json"
    if not (table.exists() and made.exists()):
        return []
    before = json.loads(made.read_text(encoding="utf-8"))
    if any(before.get(key) != found[key] for key in ("device", "torch", "triton", "source_sha256")):
        return []
    with table.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["part"] not in parts]


def environment(device: torch.device) -> dict[str, object]:
    """Where and with what the rows are made."""
    from lowband.run.environment import code_version, cpu_name, host, source_sha256

    commit, is_dirty = code_version()
    is_gpu = device.type == "cuda"
    found: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if is_gpu else cpu_name(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if is_gpu else None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": host(),
        "is_interpreted": IS_INTERPRETED,
        "commit": commit,
        "dirty": is_dirty,
        "source_sha256": source_sha256(),
        "measurement_version": MEASUREMENT_VERSION,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
    }
    if is_gpu:
        facts = torch.cuda.get_device_properties(device)
        found |= {
            "memory_bytes": facts.total_memory,
            "multiprocessors": facts.multi_processor_count,
            "clocks": clocks(f"GPU-{facts.uuid}"),
        }
    return found


def clocks(device: str) -> dict[str, str] | None:
    """A device's clocks and power by NVIDIA's tool; None where there is no such tool or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, f"--id={device}", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=TOOL_TIME_LIMIT_S, check=False)
    values = done.stdout.strip().split(", ")
    return dict(zip(CLOCKS, values, strict=True)) if len(values) == len(CLOCKS) else None


def write_environment(environment: dict[str, object], path: Path) -> None:
    write_whole(path, json.dumps(environment, indent=2) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
