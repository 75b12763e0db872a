"""The order of the items, and the cut: worth most per second first, and nothing that will not end in time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lowband.bench.gpu.folder import Entry, Folder


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to measure.

    seconds:     expected
    run:         given the seconds that it may take, returns (outcome, reason, rows of kernels.csv)
    not_run:     its rows of kernels.csv if it is not run, by the reason
    """

    name: str
    family: str
    value: float
    seconds: float
    run: Callable[[float], tuple[str, str, list[dict[str, Any]]]]
    not_run: Callable[[str], list[dict[str, Any]]] = lambda _reason: []


def work(
    items: Iterable[Item],
    folder: Folder,
    end_s: float,
    now: Callable[[], float],
    print_line: Callable[[str], None],
) -> None:
    """Run what the folder does not have until the clock `now` reads `end_s`; it is written after each."""
    for item in sorted(items, key=lambda item: -item.value / item.seconds):
        if folder.has(item.name, item.family):
            continue
        begun = now()
        left = end_s - begun
        if item.seconds > left:
            reason = f"takes about {item.seconds:.0f} s, {max(0.0, left):.0f} s were left"
            folder.keep(item.name, Entry.of(item.family, "not run", reason, 0.0, item.not_run(reason)))
            continue
        outcome, reason, rows = item.run(left)
        took = now() - begun
        folder.keep(item.name, Entry.of(item.family, outcome, reason, took, rows))
        print_line(f"{begun:6.1f} s  {item.name}: {' '.join(filter(None, (outcome, reason)))}, {took:.1f} s")
