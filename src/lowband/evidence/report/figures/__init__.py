"""Tables -> figures, by name: entries of figures.yaml, each with a file of this folder that draws it."""

import json
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lowband.errors import UserError
from lowband.evidence.tables.build import tables_of_runs
from lowband.evidence.tables.entries import COLLECTED, code_at
from lowband.evidence.tables.view import View
from lowband.spec.csv_tables import made_of, read_table, sha256, write_csv
from lowband.spec.files import write_whole
from lowband.spec.yaml_model import Strict, read_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PNG_DPI = 300
CLAIMS = "claims"  # the table of graded claims, which `lowband claims` writes
READING = "hier3 and hier3-exact are our reading of the abstract of arXiv 2501.04266."


class Entry(Strict):
    """A figure. Its keys: figures.yaml."""

    name: str
    table: str
    data: View | None = None
    caption: str
    drawn_by: str = ""

    @property
    def file(self) -> str:
        """The file of this folder that draws the figure."""
        return (self.drawn_by or self.name).partition(":")[0]

    def code(self, name: str) -> Any:
        """`draw` or `data` of what draws it. Raises UserError if that is not there."""
        module, where = f"report.figures.{self.file}", f"figures.yaml: {self.name}"
        if not self.drawn_by:
            return code_at(module, name, where)
        return getattr(code_at(module, self.drawn_by.partition(":")[2], where), name)

    def caption_of(self, rows: pd.DataFrame) -> str:
        """The caption of these rows, which says whose scheme hier3 is if it is among them."""
        is_drawn = rows.select_dtypes(exclude="number").map(lambda cell: "hier3" in str(cell))
        is_named = any("hier3" in column for column in rows.columns)
        return self.worded(shows_hier3=is_named or bool(is_drawn.to_numpy().any()))

    def worded(self, shows_hier3: bool) -> str:
        """The caption, where figures have hier3 and where they do not."""
        reading = READING if shows_hier3 or "hier3" in self.caption else ""
        return self.caption.replace("{reading}", reading).rstrip()

    def rows(self, table: pd.DataFrame) -> pd.DataFrame:
        """Exactly the drawn rows of its table."""
        rows: pd.DataFrame = self.code("data")(table) if self.data is None else self.data.rows(table)
        return rows


FIGURES: dict[str, Entry] = read_entries(Entry, Path(__file__).with_name("figures.yaml"), "name")


def own_figures(suites: Collection[str]) -> list[str]:
    """The figures that the runs of these suites give alone, without shipped measurements or predictions."""
    own = {CLAIMS, *COLLECTED, *tables_of_runs(suites)}
    return [name for name, entry in FIGURES.items() if entry.table in own]


def write_figure(name: str, tables_dir: Path, out_dir: Path) -> None:
    """Write `name`.pdf, .svg, .png, .csv (exactly the drawn data) and .json (its origin).

    The same table gives the same bytes. Raises UserError for a name that is not in FIGURES, and
    for the tables' own folder.
    """
    if name not in FIGURES:
        raise UserError(f"no figure '{name}'", allowed=FIGURES)
    if out_dir.resolve() == tables_dir.resolve():
        raise UserError("a figure's data would overwrite its table", where=out_dir, allowed="another folder")
    from lowband.evidence.report.figures.style import nothing_to_draw, paper_style

    entry = FIGURES[name]
    source = tables_dir / f"{entry.table}.csv"
    draw, table = entry.code("draw"), read_table(source)
    with made_of(source):
        data = entry.rows(table)
    out_dir.mkdir(parents=True, exist_ok=True)
    with paper_style(), made_of(source):
        drawn = draw(data) if len(data) else nothing_to_draw(source.name)
        lay_out(drawn)
        # Without its date, a PDF of the same figure has the same bytes.
        drawn.savefig(out_dir / f"{name}.pdf", metadata={"CreationDate": None})
        drawn.savefig(out_dir / f"{name}.svg", metadata={"Date": None})
        drawn.savefig(out_dir / f"{name}.png", dpi=PNG_DPI)
    write_csv(data, out_dir / f"{name}.csv")
    origin = _origin(name, entry.caption_of(data), source, out_dir)
    write_whole(out_dir / f"{name}.json", json.dumps(origin, indent=2) + "\n")


def lay_out(figure: "Figure") -> None:
    """Once, as it takes longer than drawing; rounded, as the last bits of a solution depend on addresses."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    for axes in figure.axes:
        left, bottom, width, height = (round(edge, 9) for edge in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))


def read_caption(folder: Path, name: str) -> str:
    """That of a figure which `write_figure` has written there."""
    return str(json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["caption"])


def _origin(name: str, caption: str, source: Path, out_dir: Path) -> dict[str, str]:
    return {
        "figure": name,
        "caption": caption,
        "table": source.as_posix(),
        "table_sha256": sha256(source),
        "commit": commit(),
        "command": f"lowband figure {name} --tables {source.parent.as_posix()} --out {out_dir.as_posix()}",
    }


def commit() -> str:
    """Commit of the drawing code; "unknown" outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
