"""bench-kernel: kernels measured on a device, or compiled for devices that are not present."""

import argparse
from pathlib import Path
from typing import Any

from lowband.bench.kernels import PARTS
from lowband.commands import add_verb
from lowband.errors import UserError

MOST_S = 24 * 60 * 60


def add(commands: Any) -> None:
    bench = add_verb(
        commands, _bench_kernel, "bench-kernel",
        "check every kernel and time it against torch's, or compile all",
        "--out results/kernels --only block_quant",
        "--compile compiles all kernels for devices that are not present.",
    )  # fmt: skip
    bench.add_argument("--out", type=Path, required=True, help="folder of kernels.csv or compiled.csv")
    bench.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, to try out the program"
    )
    bench.add_argument(
        "--only", nargs="+", help="parts to run (default: all)",
        choices=PARTS,
    )  # fmt: skip
    bench.add_argument("--limit-s", type=float, default=420, help="nothing new is started after this (420)")
    bench.add_argument(
        "--compile", nargs="*", metavar="TARGET", dest="targets",
        help="compile, without a GPU, for sm_80, sm_90, gfx90a, gfx942 (default: all): registers and spills",
    )  # fmt: skip


def _bench_kernel(options: argparse.Namespace) -> int:
    if options.targets is not None:
        return _compile(options)
    if not 0 < options.limit_s <= MOST_S:
        raise UserError(
            f"{options.limit_s:g}", where="--limit-s", allowed=f"above 0, at most {MOST_S} seconds"
        )
    from lowband.bench.kernels.main import bench

    rows = bench(
        options.out, options.device, options.only or list(PARTS), options.limit_s,
        lambda line: print(line, flush=True),
    )  # fmt: skip
    print("written: kernels.csv")  # without its folder: a shipped log names no machine's paths
    return int(any(row.outcome in ("wrong", "error") for row in rows))


def _compile(options: argparse.Namespace) -> int:
    from lowband.kernels.device import IS_INTERPRETED

    if IS_INTERPRETED:
        raise UserError("the interpreter does not compile", where="TRITON_INTERPRET=1", allowed="unset")
    from lowband.kernels.compile import TARGETS, compile_all

    unknown = sorted(set(options.targets) - set(TARGETS))
    if unknown:
        raise UserError(f"unknown target '{unknown[0]}'", where="--compile", allowed=TARGETS)
    path = options.out / "compiled.csv"
    compile_all(options.targets or list(TARGETS), path, lambda line: print(line, flush=True))
    print(f"written: {path}")
    return 0
