"""Tables and figures of a reproduction -> one self-contained page for any browser, offline.

The text is in page.html.j2; every number on the page comes from a table, every drawing from a machine
file or config/schemes.yaml.
"""

import re
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup, escape

from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.evidence.report.badges import badges, contribution_table
from lowband.evidence.report.claim_views import (
    by_kind,
    by_paper,
    ended,
    headed,
    not_run,
    read_graded,
    tally,
    tally_apart,
)
from lowband.evidence.report.documents import read_blocks
from lowband.evidence.report.figures import FIGURES, commit, own_figures, read_caption
from lowband.evidence.report.findings import findings
from lowband.evidence.report.page.machine import draw_machine, links
from lowband.evidence.report.page.schemes import MACHINE, STATES, draw_scheme, exchanges, wires
from lowband.evidence.report.writers import HTML, filled
from lowband.evidence.tables.build import SUITE_OF, is_made_by
from lowband.evidence.tables.points import at_most_ranks
from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_table, sha256
from lowband.spec.files import write_whole
from lowband.spec.plain_data import read_text

PX_PER_POINT, ENLARGED, SHRUNK = 4 / 3, 1.35, 0.9  # figures are drawn for print

_FOLDER = Path(__file__).parent


def write_page(root: Path, tables: Path, figures: Path, out: Path) -> None:
    """Write the page to the file `out`. Raises UserError for a figure that was not drawn."""
    config = Config(root)
    machine = config.machine(MACHINE)
    claims = read_graded(tables / "claims.csv")
    schemes, not_drawn = _schemes(config, config.schemes, MACHINE)
    page = HTML.get_template("page.html.j2").render(
        style=Markup(read_text(_FOLDER / "page.css")),
        figure=lambda name: _figure(name, tables, figures),
        machine=machine,
        machine_svg=Markup(draw_machine(machine)),
        links=links(machine),
        schemes=schemes,
        not_drawn=not_drawn,
        at_scale=_at_scale(tables),
        alternatives=_alternatives(root, tables),
        readings=_block(root, tables, "readings"),
        unable=_unable(tables),
        reading_costs=_block(root, tables, "reading_costs"),
        between_nodes=_between_nodes(tables),
        in_force=config.given_stack(None, machine),
        badges=badges(claims, root),
        contributions=contribution_table(claims, root / "config"),
        findings=findings(root),
        papers=by_paper(claims),
        kinds=by_kind(claims),
        groups=headed(claims),
        not_run=not_run(claims),
        tally=tally_apart(claims),
        claim_count=len(claims),
        runs=_runs(root, tables),
        sources=_sources(tables),
        commit=commit(),
    )
    write_whole(out, page)


def write_own_page(root: Path, tables: Path, figures: Path, out: Path) -> None:
    """Write a page of a reproduction's own runs to the file `out`: nothing of it is shipped or predicted.

    Raises UserError for a figure that was not drawn.
    """
    config, claims, runs = Config(root), read_graded(tables / "claims.csv"), read_table(tables / "runs.csv")
    suites = list(dict.fromkeys(runs["suite"]))
    machines = [config.machine(name) for name in dict.fromkeys(runs["cluster"])]
    schemes, _ = _schemes(config, list(dict.fromkeys(runs["scheme"])), machines[0].name)
    drawn = [name for name in own_figures(suites) if len(read_table(figures / f"{name}.csv"))]
    page = HTML.get_template("own.html.j2").render(
        style=Markup(read_text(_FOLDER / "page.css")),
        name=tables.resolve().parent.name,
        suites={name: config.suite(name).purpose for name in suites},
        groups=headed(claims),
        not_run=not_run(claims),
        tally=tally(claims),
        machines=[(each, Markup(draw_machine(each)), links(each)) for each in machines],
        schemes=schemes,
        figures=[(name, _figure(name, tables, figures)) for name in drawn],
        runs=_table_of_runs(runs),
        ended=ended(runs),
        sources=_sources(tables),
        commit=commit(),
    )
    write_whole(out, page)


def _schemes(config: Config, names: list[str], cluster: str) -> tuple[list[dict[str, Any]], list[str]]:
    """A card per placement, on the cluster or else on a machine that has its levels; schemes that none has.

    Schemes that place their states alike share a card: what tells them apart is said below its drawing.
    """
    cards: dict[tuple[str, ...], dict[str, Any]] = {}
    left_out = []
    for scheme in map(config.scheme, names):
        machine = config.machine_for(scheme, cluster)
        if machine is None:
            left_out.append(f"{scheme.name} ({', '.join(sorted(scheme.machine_levels))})")
            continue
        placed = (machine.name, *(str(getattr(scheme, state)) for state in STATES))
        drawn = {
            "machine": machine.name,
            "groups": list(machine.sizes)[-1],
            "svg": Markup(draw_scheme(scheme, machine.sizes)),
            "schemes": [],
        }
        cards.setdefault(placed, drawn)["schemes"].append((scheme, wires(scheme), exchanges(scheme)))
    return list(cards.values()), left_out


def _figure(name: str, tables: Path, figures: Path) -> Markup:
    """A figure with its caption and the kinds of evidence in it."""
    path = figures / f"{name}.svg"
    for file in (path, path.with_suffix(".json")):
        if not file.is_file():
            raise UserError("no such figure", where=file, allowed=f"what `lowband figure {name}` draws")
    entry = FIGURES[name]
    kinds = _evidence(entry.table, tables, figures / f"{name}.csv")
    badges = "".join(f'<b class="badge {kind}">{kind}</b> ' for kind in kinds)
    return Markup(
        f'<figure id="figure-{name}"><div class="wide">{_inline(path, name)}</div>'
        f"<figcaption>{badges}{escape(read_caption(figures, name))}</figcaption></figure>"
    )


def _evidence(table: str, tables: Path, drawn: Path) -> list[str]:
    """Kinds of evidence: those of the drawn rows if they have any, else those of the table."""
    data = read_table(drawn)
    if table in PREDICTED:
        return ["predicted", "reported"] if "published" in data else ["predicted"]
    rows = data if "provenance" in data else read_table(tables / f"{table}.csv")
    return sorted(set(rows["provenance"].dropna()))


def _inline(path: Path, name: str) -> str:
    """The SVG element alone, with unique names (a page has many figures) and coordinates to two decimals.

    On a narrow screen it shrinks by at most a tenth, to stay readable, and scrolls in its frame.
    """
    svg = read_text(path)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' d="[^"]*"', lambda line: re.sub(r"(\.\d\d)\d+", r"\1", line[0]), svg)
    [points] = re.findall(r'<svg[^>]* width="([\d.]+)pt"', svg)
    pixels = float(points) * PX_PER_POINT
    svg = re.sub(r'(width|height)="[\d.]+pt"', "", svg, count=2)
    size = f"width:{pixels * ENLARGED:.0f}px;min-width:{pixels * SHRUNK:.0f}px"
    label = name.replace("_", " ")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}" style="{size}"', 1)


def _alternatives(root: Path, tables: Path) -> dict[str, pd.DataFrame]:
    """The alternatives that give the paper's numbers (`yes`), and those that do not (`no`)."""
    frame = read_blocks(root)["alternatives"].frame(read_table(tables / "alternatives.csv"))
    verdicts = frame.pop("gives the numbers")
    return {verdict: frame[verdicts == verdict] for verdict in ("yes", "no")}


def _block(root: Path, tables: Path, name: str) -> pd.DataFrame:
    """A table of predictions as the documents show it."""
    return read_blocks(root)[name].frame(read_table(tables / f"{name}.csv"))


def _unable(tables: Path) -> list[str]:
    """The readings to which no alternative gives the paper's numbers."""
    gives = read_table(tables / "readings.csv").groupby("reading", sort=False)["gives"].any()
    return list(gives.index[~gives])


def _between_nodes(tables: Path) -> dict[str, dict[int, str]]:
    """GiB that a rank sends over the outermost link, by reading or baseline, and passes per step."""
    costs = read_table(tables / "reading_costs.csv")
    found: dict[str, dict[int, str]] = {}
    for name, passes, sent in zip(costs["reading"], costs["passes"], costs["world_bytes"], strict=True):
        found.setdefault(name, {})[passes] = f"{sent / GIB:.2f}"
    return found


def _at_scale(tables: Path) -> pd.DataFrame:
    """Bytes that a rank sends over each level per step and holds, by scheme, for the most ranks of MACHINE.

    Empty if no run had that scale.
    """
    sent, held = (read_table(tables / f"{name}.csv") for name in ("communication", "memory"))
    sent, held = (at_most_ranks(df[df["cluster"] == MACHINE]) for df in (sent, held))
    if sent.empty:
        return pd.DataFrame()
    table = sent.pivot_table("counted_bytes", "scheme", "level", aggfunc="sum", sort=False) / GIB
    levels = {f"over {level} (GiB)": f"{{{level}:.2f}}" for level in table}
    table["held"] = held.groupby("scheme")["held_bytes"].sum() / GIB
    cells = {"scheme": "{scheme}", **levels, "held per rank (GiB)": "{held:.1f}"}
    return filled(table.reset_index(), cells)


def _runs(root: Path, tables: Path) -> dict[str, Any]:
    """How the runs ended, and the devices of these runs and of the shipped ones shown with them."""
    runs = read_table(tables / "runs.csv")
    shipped = sorted(suite for suite in set(SUITE_OF.values()) if not is_made_by(set(runs["suite"]), suite))
    files = [root / "results" / "reference" / suite / "runs.csv" for suite in shipped]
    beside = [read_table(file) for file in files if file.is_file()]  # a benchmark has no runs.csv
    everything = pd.concat([runs, *beside])
    return {"ended": ended(runs), "table": _table_of_runs(everything)}


def _table_of_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """How many runs each suite has, by the commit and the device that made them."""
    where = ["suite", "commit", "dirty", "device", "links", "torch"]
    runs = runs.fillna(dict.fromkeys(where, "-"))  # of a run that failed before it had an environment
    table = runs.groupby(where, sort=False).size().reset_index(name="runs").astype(str)
    return table.rename(columns={"dirty": "uncommitted changes"})


def _sources(tables: Path) -> pd.DataFrame:
    paths = sorted(tables.glob("*.csv"))
    rows = [f"{len(pd.read_csv(path, low_memory=False)):,}" for path in paths]
    names, sums = [path.name for path in paths], [sha256(path) for path in paths]
    return pd.DataFrame({"table": names, "rows": rows, "sha256": sums})
