"""A machine file -> a drawing of its levels: nested boxes, each with the link that joins its contents."""

from dataclasses import dataclass
from math import ceil, sqrt

import pandas as pd

from lowband.evidence.report.page.svg import CHARACTER_PX, FONT_PX, drawing, rect, text
from lowband.spec.machine import Level, Machine
from lowband.spec.mesh import WORLD

RANK, GAP = 26, 9  # side of a rank's square, distance between boxes
NODES = 2  # drawn at the outermost level, one below the other: a phone is narrow
COLORS = ("#0173b2", "#de8f05", "#d55e00", "#cc78bc", "#949494")  # links, inner to outer


@dataclass(frozen=True)
class Frame:
    """A part of the drawing at the origin; `parts` is moved into place by its parent."""

    width: float
    height: float
    parts: str


def draw_machine(machine: Machine) -> str:
    """The drawing as SVG. A link's bar is as thick as the square root of its rate."""
    box = Frame(RANK, RANK, rect(0, 0, RANK, RANK, rx=4, class_="rank"))
    inner = 1
    for place, level in enumerate(machine.levels):
        count = NODES if level.size is None else level.size // inner
        box = _around(box, count, level, COLORS[place % len(COLORS)])
        inner = level.size or inner
    return drawing(box.width, box.height, f"Levels and links of {machine.description}", [box.parts])


def _around(child: Frame, count: int, level: Level, color: str) -> Frame:
    """`count` children in a box, above the bar of the link that joins them."""
    columns = 1 if level.name == WORLD else ceil(sqrt(count))
    rows = ceil(count / columns)
    label = _label(level)
    width = max(columns * child.width + (columns + 1) * GAP, len(label) * CHARACTER_PX + 2 * GAP)
    left = (width - columns * child.width - (columns - 1) * GAP) / 2
    copies = [
        f'<g transform="translate({left + (i % columns) * (child.width + GAP):g} '
        f'{GAP + (i // columns) * (child.height + GAP):g})">{child.parts}</g>'
        for i in range(count)
    ]
    top = GAP + rows * (child.height + GAP)
    thick = _thickness(level)
    bar = rect(GAP, top, width - 2 * GAP, thick, rx=thick / 2, fill=color)
    baseline = top + thick + FONT_PX + 3
    height = baseline + 6
    outline = rect(0.5, 0.5, width - 1, height - 1, rx=7, class_="group")
    words = text(width / 2, baseline, label, text_anchor="middle")
    return Frame(width, height, outline + "".join(copies) + bar + words)


def _label(level: Level) -> str:
    name = "between nodes" if level.name == WORLD else level.name
    return f"{name}: {level.link.gigabytes_per_s:g} GB/s" if level.link is not None else f"{name}: no rate"


def _thickness(level: Level) -> float:
    return max(2, sqrt(level.link.gigabytes_per_s)) if level.link is not None else 2


def links(machine: Machine) -> pd.DataFrame:
    """A row per link, inner to outer: ranks in a group, rate, slowdown from the first, source; as text."""
    rated = [(level, level.link) for level in machine.levels if level.link is not None]
    return pd.DataFrame(
        {
            "level": level.name,
            "ranks": "all" if level.size is None else str(level.size),
            "GB/s per rank": f"{link.gigabytes_per_s:g}",
            "slower": f"{rated[0][1].gigabytes_per_s / link.gigabytes_per_s:g} x",
            "source": link.source,
        }
        for level, link in rated
    )
