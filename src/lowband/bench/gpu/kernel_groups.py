"""The groups of `lowband bench-kernel` as items, all compiled in parallel before the first is timed."""

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch

from lowband.bench.gpu.families import FAMILIES
from lowband.bench.gpu.queue import Item
from lowband.bench.kernels import PARTS
from lowband.bench.kernels.measure import KernelCase, forget, measure
from lowband.spec.kernel_rows import KernelRow

FIRST = (4096, 16384)  # lengths of attention that are worth most: what is quoted, and the longest
FIRST_IS_WORTH = 5.0
# Parts that compile; models of training fit one at a time.
COMPILED = ("block_quant", "softmax", "attention", "attention_kinds")
MOST_PROCESSES = 12  # each has a context and its inputs on the device


def groups(device: torch.device, families: list[str]) -> Iterator[tuple[str, str, list[KernelCase]]]:
    """Name, part and cases of each group of these parts."""
    for part in PARTS:
        if part in families:
            for group in import_module(f"lowband.bench.kernels.{part}").groups(device):
                yield name_of([case.row for case in group]), part, group


def name_of(rows: list[KernelRow]) -> str:
    """Part, operation and sizes of a group's first row; its implementation where it is alone."""
    first = rows[0]
    mask = None if first.causal is None else "causal" if first.causal else "full"
    sizes = (first.model, first.seq_len, first.head_dim, mask, first.rows, first.inner, first.columns)
    words = [first.part, first.operation, *([first.implementation] if len(rows) == 1 else [])]
    return " ".join([*words, *(str(size) for size in sizes if size not in (None, ""))])


def items(device: torch.device, families: list[str]) -> Iterator[Item]:
    for name, part, group in groups(device, families):
        value, seconds, _ = FAMILIES[part]
        is_first = part == "attention" and group[0].row.seq_len in FIRST
        yield Item(
            name=name, family=part, value=value * (FIRST_IS_WORTH if is_first else 1), seconds=seconds,
            run=partial(_run, group, device), not_run=partial(_not_run, group),
        )  # fmt: skip


def _run(
    group: list[KernelCase], device: torch.device, _left_s: float
) -> tuple[str, str, list[dict[str, Any]]]:
    rows = list(measure(group, device, lambda: True))
    forget(device)  # the next item may be a program of its own, which needs the memory
    bad = [row for row in rows if row.outcome in ("wrong", "error", "not run")]
    outcome = "not run" if bad and bad[0].outcome == "not run" else "error" if bad else "ok"
    return outcome, bad[0].reason if bad else "", [dataclasses.asdict(row) for row in rows]


def _not_run(group: list[KernelCase], reason: str) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(dataclasses.replace(case.row, outcome="not run", reason=reason)) for case in group
    ]


def compile_all(
    device: torch.device,
    families: list[str],
    is_wanted: Callable[[str, str], bool],
    most: int = MOST_PROCESSES,
) -> int:
    """Run the cases of the wanted groups once, many at a time: Triton's and Inductor's caches then have them.

    What fails here fails again, and is told, when its group is measured. Returns how many cases did not fail.
    """
    names = [name for name, part, _ in groups(device, families) if part in COMPILED and is_wanted(name, part)]
    count = min(most, os.cpu_count() or 1, len(names))
    if not count:
        return 0
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(_compile, device, families, set(names[i::count])) for i in range(count)]
        return sum(share.result() for share in shares if share.exception() is None)


def _compile(device: torch.device, families: list[str], names: set[str]) -> int:
    torch.set_num_threads(1)
    well = 0
    for name, _, group in groups(device, families):
        for case in group if name in names else []:
            if case.row.implementation.startswith(("triton", "torch.compile")):
                with suppress(Exception):
                    case.make()()
                    well += 1
    return well
