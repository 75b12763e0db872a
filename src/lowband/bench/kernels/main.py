"""The whole benchmark: parts in order, rows written after each group, within a time limit."""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from lowband.bench.kernels.measure import measure
from lowband.bench.kernels.rows import environment, kept_rows, write_environment, write_rows
from lowband.errors import UserError
from lowband.spec.kernel_rows import KernelRow


def bench(
    out: Path, device_type: str, parts: list[str], limit_s: float, print_line: Callable[[str], None]
) -> list[KernelRow]:
    """Write kernels.csv and environment.json to `out`. Groups that would begin after `limit_s` are not run.

    Rows of other parts in `out`, made on the same device by the same source, are kept.
    Raises UserError if there is no such device.
    """
    start = time.monotonic()
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA or ROCm device", where="--device", allowed="cpu")
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found = environment(device)
    kept = kept_rows(out, found, parts)
    write_environment(found, out / "environment.json")
    rows: list[KernelRow] = []
    for part in parts:
        for group in import_module(f"lowband.bench.kernels.{part}").groups(device):
            for row in measure(group, device, lambda: time.monotonic() - start < limit_s):
                rows.append(row)
                print_line(f"{time.monotonic() - start:6.1f} s  {_line(row)}")
            write_rows(rows, found, out / "kernels.csv", kept)
    if device.type == "cuda":  # the clocks of a device that was just under load
        write_environment(found | {"clocks_after": environment(device)["clocks"]}, out / "environment.json")
    return rows


def _line(row: KernelRow) -> str:
    what = f"{row.part} {row.operation} {row.implementation}"
    sizes = (row.model, row.seq_len, row.head_dim, row.causal and "causal", row.rows, row.inner, row.columns)
    size = " ".join(str(value) for value in sizes if value not in (None, "", False))
    if row.time_s is None:
        return f"{what}, {size}: {row.outcome} {row.reason}"
    rates = []
    if row.flops:
        rates.append(f"{row.flops / row.time_s / 1e12:.1f} TFLOPS")
    if row.bytes or row.least_bytes:
        rates.append(f"{(row.bytes or row.least_bytes or 0) / row.time_s / 1e9:.0f} GB/s")
    return f"{what}, {size}: {row.time_s * 1e6:.1f} us {' '.join(rates)} error {row.error:.1e}"
