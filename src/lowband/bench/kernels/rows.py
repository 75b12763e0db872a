"""Files that a benchmark writes: one row per case, at full precision, and the environment of all."""

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd
import torch

from lowband.errors import UserError
from lowband.kernels.device import IS_INTERPRETED
from lowband.spec.files import write_whole
from lowband.spec.kernel_rows import STAMP, KernelRow

# Incremented when the way of measuring changes, so that rows measured differently are never mixed unnoticed.
MEASUREMENT_VERSION = 3
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
TOOL_TIME_LIMIT_S = 20
PREFIXES = ("TORCH", "PYTORCH", "TRITON", "CUDA")  # of the environment variables recorded


def write_rows(rows: list[KernelRow], environment: dict[str, object], path: Path, kept: pd.DataFrame) -> None:
    """Write the rows as a CSV, after the `kept` ones; each row has its device, versions and commit."""
    stamp = {key: environment[key] for key in STAMP}
    found = [{**dataclasses.asdict(row), **stamp} for row in rows]
    names = [*(field.name for field in dataclasses.fields(KernelRow)), *STAMP]
    # dtype object: otherwise a column of counts with missing ones would become floats.
    written = pd.concat([kept.reindex(columns=names), pd.DataFrame(found, columns=names, dtype=object)])
    write_whole(path, written.to_csv(index=False, lineterminator="\n"))


def kept_rows(folder: Path, found: dict[str, object], parts: list[str]) -> pd.DataFrame:
    """A folder's rows of parts not in `parts`, cells as text; none if device, versions or source changed.

    Raises UserError for files that this benchmark did not write.
    """
    table, made = folder / "kernels.csv", folder / "environment.json"
    if not (table.exists() and made.exists()):
        return pd.DataFrame(dtype=object)
    try:
        before = json.loads(made.read_text(encoding="utf-8"))
        if any(before.get(key) != found[key] for key in ("device", "torch", "triton", "source_sha256")):
            return pd.DataFrame(dtype=object)
        rows = pd.read_csv(table, dtype=object, keep_default_na=False)
        return rows[~rows["part"].isin(parts)]
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise UserError(
            "kernels.csv or environment.json is damaged",
            where=folder,
            allowed="a new folder, or rows as written",
        ) from None


def environment(device: torch.device) -> dict[str, object]:
    """The host, device and software versions that the rows are measured with."""
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
            "clocks": clocks_of(device),
        }
    return found


def clocks_of(device: torch.device) -> dict[str, str] | None:
    """The present clocks and power of a CUDA device."""
    return clocks(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def clocks(device: str) -> dict[str, str] | None:
    """A device's clocks and power, as nvidia-smi reports them; None if it is missing or fails."""
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
