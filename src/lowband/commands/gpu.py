"""gpu: every row that needs a GPU by one command, and its rows put among the shipped ones."""

import argparse
import time
from pathlib import Path
from typing import Any

from lowband.bench.gpu.families import FAMILIES
from lowband.commands import add_verb, root
from lowband.errors import UserError


def add(commands: Any) -> None:
    gpu = add_verb(
        commands, _gpu, "gpu", "all tests and rows of a GPU, what is worth most first",
        "--out build/gpu --minutes 9.5",
        "Ends within the minutes; a further call with --from continues. On another machine, --install puts a "
        "folder's rows among the shipped ones.",
    )  # fmt: skip
    gpu.add_argument("--out", type=Path, help="folder to write")
    gpu.add_argument("--from", type=Path, dest="earlier", help="folder of a call before, to continue")
    gpu.add_argument("--minutes", type=float, default=9.5, help="nothing goes on after this (9.5)")
    gpu.add_argument("--only", nargs="+", choices=FAMILIES, help="these families alone (default: all)")
    gpu.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, to try out the program"
    )
    gpu.add_argument(
        "--base", type=Path, metavar="TREE",
        help="instead, our kernels and those of another copy of the tree in turns: base.csv",
    )  # fmt: skip
    gpu.add_argument(
        "--install",
        type=Path,
        metavar="FOLDER",
        help="put the rows of --from into this folder of results/reference",
    )
    gpu.add_argument(
        "--root", type=root, default=Path(), help="with --install: the folder that holds results/"
    )


def _gpu(options: argparse.Namespace) -> int:
    if options.install is not None:
        if options.earlier is None:
            raise UserError("is missing", where="--from", allowed="a folder of `lowband gpu --out`")
        from lowband.evidence.report.gpu_rows import install

        for line in install(options.earlier, options.install, options.root, options.only or FAMILIES):
            print(line, flush=True)
        return 0
    if options.out is None:
        raise UserError("is missing", where="--out", allowed="a folder")
    begun = time.monotonic()
    from lowband.bench.gpu.main import gpu, gpu_beside

    asked = (
        options.minutes, options.only or list(FAMILIES), options.device,
        lambda line: print(line, flush=True), lambda: time.monotonic() - begun,
    )  # fmt: skip
    if options.base is not None:
        gpu_beside(options.base, options.out, *asked)
        return 0
    return int(not gpu(options.out, options.earlier, *asked))
