"""A scheme on a machine -> a picture: nested levels, and the slice of each state that each rank holds."""

from pathlib import Path

from lowband.evidence.report.page.schemes import MACHINE, NODES, STATES, part
from lowband.evidence.report.page.svg import FONT_PX, drawing, element, rect, text
from lowband.spec.config import Config
from lowband.spec.files import write_if_changed
from lowband.spec.machine import Machine
from lowband.spec.mesh import SELF, Levels
from lowband.spec.scheme import Scheme

CELL, TALL = 26, 48  # width and height of a rank's cell
GAP, PAD = 4, 7  # distance between cells; margin inside a frame
LABEL = 92  # width of the words on either side of the machine
LINE, ROW = FONT_PX + 4, TALL + 10  # heights of a line of words and of a row of cells
INK, QUIET, EDGE, PAPER = "#222222", "#666666", "#9a9a9a", "#ffffff"
FRAMES = ("#f7f7f7", "#eeeeee", "#e2e2e2")  # of levels, from the outermost in; further ones as the last

PICTURE = "docs/figures/hier3.svg"

Edges = tuple[float, float]  # left and right


def write_picture(root: Path) -> None:
    """README's picture: the scheme hier3 on the core paper's machine."""
    config = Config(root)
    write_if_changed(root / PICTURE, draw_placement(config.scheme("hier3"), config.machine(MACHINE)) + "\n")


def draw_placement(scheme: Scheme, machine: Machine) -> str:
    """The picture as SVG, with two nodes of the machine.

    Raises UserError if the machine lacks a level of the scheme, or the rate of a link.
    """
    levels = Levels.fit(machine.sizes, NODES * max(machine.sizes.values(), default=1))
    cells, frames = _places(levels)
    states = {state: level for state in STATES if (level := getattr(scheme, state)) is not None}
    head = (len(frames) + 1) * LINE + PAD
    height = head + len(states) * ROW + len(frames) * PAD + 1
    width = max(right for edges in frames.values() for _, right in edges) + LABEL
    parts = [rect(0, 0, width, height, fill=PAPER)]
    for depth, (level, edges) in enumerate(frames.items()):
        rate = f"{machine.link(level).gigabytes_per_s:g} GB/s"
        words = [level, rate] if depth == len(frames) - 1 else [f"{level}: {rate}"]  # the innermost is narrow
        for left, right in edges:
            parts += _frame(left, right, height, depth, words)
    for row, (state, level) in enumerate(states.items()):
        parts += _row(head + row * ROW, cells, state, level, levels, width - LABEL)
    slices = ", ".join(f"{state} over {level}" for state, level in states.items())
    title = f"{scheme.name} on {NODES} nodes of {machine.name}, {levels.world} ranks: {slices}"
    return drawing(width, height, title, [element("g", "".join(parts), font_family="sans-serif")])


def _places(levels: Levels) -> tuple[list[float], dict[str, list[Edges]]]:
    """Left edge of each rank's cell; level -> edges of its groups' frames, from the outermost level in."""
    outer_to_inner = [name for name in reversed(levels.names) if name != SELF]
    x, cells, begun = float(LABEL), [], dict.fromkeys(outer_to_inner, 0.0)
    frames: dict[str, list[Edges]] = {name: [] for name in outer_to_inner}
    for rank in range(levels.world):
        x += GAP if rank else 0
        for name in outer_to_inner:
            if rank % levels.size(name) == 0:
                begun[name] = x
                x += PAD
        cells.append(x)
        x += CELL
        for name in reversed(outer_to_inner):
            if (rank + 1) % levels.size(name) == 0:
                x += PAD
                frames[name].append((begun[name], x))
    return cells, frames


def _frame(left: float, right: float, height: float, depth: int, words: list[str]) -> list[str]:
    """A group of a level: its box, and its words at the top."""
    top = depth * LINE + 0.5
    fill = FRAMES[min(depth, len(FRAMES) - 1)]
    box = rect(left, top, right - left, height - 1 - depth * PAD - top, rx=5, fill=fill, stroke=EDGE)
    middle = (left + right) / 2
    return [
        box,
        *(
            text(middle, top + line * LINE - 3, each, text_anchor="middle", fill=INK)
            for line, each in enumerate(words, 1)
        ),
    ]


def _row(top: float, cells: list[float], state: str, level: str, levels: Levels, right: float) -> list[str]:
    """A state: its name, each rank's cell with the slice that the rank holds, and how large that is."""
    size = levels.size(level)
    first, second = top + TALL / 2 - 2, top + TALL / 2 + FONT_PX + 1
    parts = [
        text(4, first, state, fill=STATES[state], font_weight="bold"),
        text(4, second, f"over {level}", fill=QUIET),
        text(right + 8, first, "all of it" if size == 1 else f"1/{size} of it", fill=INK),
        text(right + 8, second, "in each rank", fill=QUIET),
    ]
    for rank, left in enumerate(cells):
        parts.append(rect(left, top, CELL, TALL, fill=PAPER, stroke=EDGE, stroke_width=0.5))
        start, height = part(levels, level, rank, TALL)
        parts.append(rect(left, top + start, CELL, height, fill=STATES[state]))
    return parts
