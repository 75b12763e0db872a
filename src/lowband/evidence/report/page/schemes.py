"""config/schemes.yaml -> one drawing per scheme: the slice of each state that each rank holds."""

from lowband.evidence.report.page.svg import FONT_PX, drawing, rect, text
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.partition import shard_range
from lowband.spec.scheme import Scheme
from lowband.spec.tiers import at

STATES = {"weights": "#0173b2", "secondary": "#56b4e9", "grads": "#de8f05", "optim": "#029e73"}
CELL, TALL, LABEL = 14, 30, 66  # width and height of a rank's cell, room for a state's name
ROW = TALL + 8
NODES = 2  # nodes drawn
MACHINE = "frontier"  # the core paper's machine: drawn, and meant by "at scale"


def draw_scheme(scheme: Scheme, inner: dict[str, int]) -> str:
    """The drawing as SVG. A cell stands for a rank and the whole state; its filled part is the rank's slice.

    inner: sizes of the levels inside world, inner to outer
    """
    levels = Levels.fit(inner, NODES * max(inner.values(), default=1))
    offsets = _offsets(levels)
    width = LABEL + offsets[-1] + CELL + 1
    parts: list[str] = []
    for row, (state, color) in enumerate(STATES.items()):
        level = getattr(scheme, state)
        top = row * ROW + 1
        parts.append(text(0, top + TALL / 2, state))
        parts.append(text(0, top + TALL / 2 + FONT_PX + 1, "-" if level is None else level, class_="quiet"))
        for rank, offset in enumerate(offsets):
            left = LABEL + offset
            parts.append(rect(left, top, CELL, TALL, class_="cell"))
            if level is not None:
                start, height = part(levels, level, rank, TALL)
                parts.append(rect(left, top + start, CELL, height, fill=color))
    placed = {state: getattr(scheme, state) for state in STATES if getattr(scheme, state)}
    placed |= {
        "weights": at(scheme.weights, scheme.weights_tier),
        "optim": at(scheme.optim, scheme.optim_tier),
    }
    slices = ", ".join(f"{state} over {place}" for state, place in placed.items())
    return drawing(width, len(STATES) * ROW, f"{scheme.name}: {slices}", parts)


def part(levels: Levels, level: str, rank: int, height: float) -> tuple[float, float]:
    """Top and height of a rank's slice of a state over `level`, in a cell of `height` for the whole state."""
    size = levels.size(level)
    start, stop = shard_range(size, levels, level, rank)
    return start * height / size, (stop - start) * height / size


def exchanges(scheme: Scheme) -> str:
    """How replicas exchange weights, where they do: what the drawing does not show."""
    sync = scheme.sync
    if sync is None:
        return ""
    given = [name for name in type(sync).model_fields if name in sync.model_fields_set - {"beyond", "every"}]
    more = "".join(f", {name.replace('_', ' ')} {getattr(sync, name)}" for name in given)
    often = "step" if sync.every == 1 else f"{sync.every} steps"
    return f"Replicas beyond {sync.beyond} exchange weights every {often}{more}."


def _offsets(levels: Levels) -> list[float]:
    """Left edge of each rank's cell, with a gap where a group of any level begins, wider for outer levels."""
    left, found = 0.0, []
    for rank in range(levels.world):
        begins = sum(
            1 for name in levels.names if name not in (SELF, WORLD) and rank % levels.size(name) == 0
        )
        if rank:
            left += CELL - 1 + 3 * begins
        found.append(left)
    return found


def wires(scheme: Scheme) -> str:
    """A description of the collectives whose wire is not native."""
    collectives = [name for name in type(scheme).model_fields if name.endswith(("gather", "reduce"))]
    quantized = {name: getattr(scheme, name) for name in collectives if getattr(scheme, name) != "native"}
    return ", ".join(f"{name.replace('_', ' ')} {wire}" for name, wire in quantized.items()) or "all native"
