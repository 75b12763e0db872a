"""The worked example of docs/parallel.md: eight ranks in every view, from their mesh and scheme."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from lowband.evidence.report.writers import markdown
from lowband.spec.axes import Axes
from lowband.spec.config import Config
from lowband.spec.context import Layout, ways_of
from lowband.spec.mesh import SELF, WORLD, Mesh
from lowband.spec.schedules import lists
from lowband.spec.scheme import Scheme
from lowband.spec.stages import blocks_of, stage_modules

RANKS, INNER, AXES, SCHEME = 8, {"package": 2, "node": 4}, Axes(tensor=2), "hpz"
TOKENS = 16  # of the sequence shown
MODEL, MICRO_BATCHES = "gpt-240k", 4  # of the pipeline shown
SHOWN = 5  # the rank whose partners are shown


def _mesh() -> Mesh:
    return Mesh.fit(INNER, AXES.degrees(RANKS))


def parallel_places(_tables: Path, _root: Path) -> list[str]:
    """By rank: its group of each level, and its number along each axis."""
    mesh, degrees = _mesh(), AXES.degrees(RANKS)
    axes = [axis for axis, degree in degrees.items() if degree > 1]
    rows = [
        {
            "rank": rank,
            **{level: rank // size for level, size in reversed(INNER.items())},
            **{axis: mesh.group(axis, rank).index(rank) for axis in axes},
        }
        for rank in range(RANKS)
    ]
    return markdown(pd.DataFrame(rows))


def parallel_tokens(_tables: Path, _root: Path) -> list[str]:
    """By rank: which sequences it has, its tokens of them, and with whom it exchanges heads and keys."""
    axes = Axes(context=4)
    mesh = Mesh.fit(INNER, axes.with_context(RANKS))
    levels = mesh.levels("context")
    layout = Layout(levels, ways_of({"package": "heads", "node": "ring"}, levels), zigzag=True)
    rows = []
    for rank in range(RANKS):
        group = mesh.group("context", rank)
        place = group.index(rank)
        partners = {
            f"{way} with": " ".join(str(each) for each in hop.partners(rank) if each != rank)
            for way, hop in zip(layout.ways.values(), levels.hops(SELF, WORLD), strict=True)
        }
        tokens = " ".join(map(str, layout.positions(place, TOKENS)))
        sequences = mesh.group("data", rank).index(rank)
        rows.append({"rank": rank, "sequences": sequences, "tokens": tokens, **partners})
    return markdown(pd.DataFrame(rows))


def parallel_groups(_tables: Path, _root: Path) -> list[str]:
    """By axis and level: who has a group with whom, and the levels as the ranks along the axis see them."""
    mesh, rows = _mesh(), []
    for axis in dict.fromkeys(digit.axis for digit in mesh.digits):
        levels = mesh.levels(axis)
        seen = ", ".join(f"{name} {levels.size(name)}" for name in (*INNER, WORLD))
        for hop in levels.hops(SELF, WORLD):
            found = dict.fromkeys(tuple(hop.partners(rank)) for rank in range(RANKS))
            named = ", ".join("{" + " ".join(map(str, group)) + "}" for group in found)
            rows.append({"axis": axis, "its levels": seen, "links": hop.level, "groups": named})
    return markdown(pd.DataFrame(rows))


def parallel_rows(_tables: Path, root: Path) -> list[str]:
    """By row of the step that sends anything: how often, and with whom a rank exchanges on which links."""
    scheme, levels = Config(root).scheme(SCHEME), _mesh().levels("data")
    found = [
        {
            "row": f"`{row.name}`",
            "kind": row.kind,
            "of each unit": f"once per {row.every}",
            "from the shard of": scheme.span(row)[row.kind == "gather"],
            "to that of": scheme.span(row)[row.kind != "gather"],
            f"rank {SHOWN} exchanges with": ", then ".join(_partners(scheme, row.name)),
        }
        for row in scheme.rows
        if levels.hops(*scheme.span(row))
    ]
    return markdown(pd.DataFrame(found))


def parallel_stages(_tables: Path, root: Path) -> list[str]:
    """By rank, with two stages: which modules it has, whom it sends to, and in which order it computes."""
    axes = Axes(tensor=2, pipeline=2)
    mesh = Mesh.fit(INNER, axes.degrees(RANKS))
    model = Config(root).model(MODEL)
    modules = stage_modules(model, blocks_of(model, axes.pipeline))
    orders = lists("1f1b", axes.pipeline, MICRO_BATCHES, chunks=1)
    rows = []
    for rank in range(RANKS):
        along = mesh.group("pipeline", rank)
        stage = along.index(rank)
        places: dict[str, int] = {axis: mesh.group(axis, rank).index(rank) for axis in axes.degrees(RANKS)}
        rows.append(
            {
                "rank": rank,
                **places,
                "modules": " ".join(modules[stage]),
                "outputs to": "" if along[-1] == rank else along[stage + 1],
                "gradients to": "" if stage == 0 else along[stage - 1],
                "computes": " ".join(f"{kind[0].upper()}{i}" for kind, _, i in orders[stage]),
            }
        )
    return markdown(pd.DataFrame(rows))


def _partners(scheme: Scheme, name: str) -> Iterator[str]:
    [row] = [row for row in scheme.rows if row.name == name]
    hops = list(_mesh().levels("data").hops(*scheme.span(row)))
    for hop in reversed(hops) if row.kind == "gather" else hops:
        others = [rank for rank in hop.partners(SHOWN) if rank != SHOWN]
        yield f"{', '.join(map(str, others))} ({hop.level})"
