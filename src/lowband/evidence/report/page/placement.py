"""A scheme on a machine -> a picture: nested levels, and the slice of each state that each rank holds."""

from lowband.evidence.report.page.schemes import NODES, STATES
from lowband.evidence.report.page.svg import FONT_PX, drawing, rect, text
from lowband.spec.machine import Machine
from lowband.spec.mesh import SELF, Levels
from lowband.spec.scheme import Scheme

CELL, TALL, GAP, PAD = (
    26,
    48,
    4,
    7,
)  # width and height of a rank's cell, distance between cells, a frame's margin
LABEL, LINE, ROW = (
    92,
    FONT_PX + 4,
    TALL + 10,
)  # width of the words beside the machine; heights of a line and a row
INK, QUIET, EDGE, PAPER = "#222222", "#666666", "#9a9a9a", "#ffffff"
FRAMES = {0: "#f7f7f7", 1: "#eeeeee", 2: "#e2e2e2"}  # by depth, from the outermost level in


def draw_placement(scheme: Scheme, machine: Machine) -> str:
    """The picture as SVG, with two nodes of the machine. Raises UserError if a level or a rate lacks."""
    levels = Levels.fit(machine.sizes, NODES * max(machine.sizes.values(), default=1))
    outer_to_inner = [name for name in reversed(levels.names) if name != SELF]
    lefts, frames, right = _places(levels, outer_to_inner)
    states = {state: getattr(scheme, state) for state in STATES if getattr(scheme, state) is not None}
    head = (len(outer_to_inner) + 1) * LINE + PAD
    foot = head + len(states) * ROW + len(outer_to_inner) * PAD
    parts = [rect(0, 0, right + LABEL, foot + 1, fill=PAPER)]
    for depth, name in enumerate(outer_to_inner):
        for left, end in frames[name]:
            top = depth * LINE + 0.5
            box = {"fill": FRAMES.get(depth, PAPER), "stroke": EDGE}
            parts.append(rect(left, top, end - left, foot - depth * PAD - top, rx=5, **box))
            words = f"{machine.link(name).gigabytes_per_s:g} GB/s"
            lines = [f"{name}: {words}"] if depth < len(outer_to_inner) - 1 else [name, words]
            for i, line in enumerate(lines):
                middle = {"text_anchor": "middle", "fill": INK}
                parts.append(text((left + end) / 2, top + (i + 1) * LINE - 3, line, **middle))
    for row, (state, level) in enumerate(states.items()):
        top, size = head + row * ROW, levels.size(level)
        parts.append(text(4, top + TALL / 2 - 2, state, fill=STATES[state], font_weight="bold"))
        parts.append(text(4, top + TALL / 2 + FONT_PX + 1, f"over {level}", fill=QUIET))
        share = "all of it" if size == 1 else f"1/{size} of it"
        parts.append(text(right + 8, top + TALL / 2 - 2, share, fill=INK))
        parts.append(text(right + 8, top + TALL / 2 + FONT_PX + 1, "in each rank", fill=QUIET))
        for rank, left in enumerate(lefts):
            parts.append(rect(left, top, CELL, TALL, fill=PAPER, stroke=EDGE, stroke_width=0.5))
            parts.append(rect(left, top + rank % size * TALL / size, CELL, TALL / size, fill=STATES[state]))
    slices = ", ".join(f"{state} over {level}" for state, level in states.items())
    title = f"{scheme.name} on {NODES} nodes of {machine.name}, {levels.world} ranks: {slices}"
    return drawing(right + LABEL, foot + 1, title, parts).replace("<svg", '<svg font-family="sans-serif"', 1)


def _places(
    levels: Levels, outer_to_inner: list[str]
) -> tuple[list[float], dict[str, list[tuple[float, float]]], float]:
    """Left edge of each cell; by level, the left and right edges of its groups' frames; the last of these."""
    x, lefts = float(LABEL), []
    begun: dict[str, float] = {}
    frames: dict[str, list[tuple[float, float]]] = {name: [] for name in outer_to_inner}
    for rank in range(levels.world):
        x += GAP if rank else 0
        for name in outer_to_inner:
            if rank % levels.size(name) == 0:
                begun[name] = x
                x += PAD
        lefts.append(x)
        x += CELL
        for name in reversed(outer_to_inner):
            if (rank + 1) % levels.size(name) == 0:
                x += PAD
                frames[name].append((begun[name], x))
    return lefts, frames, x
