"""Functions for the notebooks: a table, a figure with its caption, the claims.

A notebook without folders shows the shipped measurements: their tables and figures are made in a temporary
folder.
"""

import tempfile
from pathlib import Path

import pandas as pd

from lowband.errors import UserError
from lowband.evidence.report.claim_views import not_run, tally_apart, tried
from lowband.evidence.report.figures import read_caption, write_figure
from lowband.evidence.report.shipped import write_shipped_tables
from lowband.evidence.report.writers import markdown
from lowband.spec.csv_tables import read_table

WIDTH_PX = 900


class Report:
    """One reproduction. tables_dir, figures_dir: its folders; empty: the shipped measurements."""

    def __init__(self, tables_dir: str = "", figures_dir: str = "") -> None:
        self._root = _root()
        self._temporary = tempfile.TemporaryDirectory()
        self._own = Path(self._temporary.name)
        self._tables = self._root / tables_dir if tables_dir else self._own / "tables"
        self._figures = self._root / figures_dir if figures_dir else None
        if not tables_dir:
            write_shipped_tables(self._root, self._tables)

    def table(self, name: str, *columns: str) -> pd.DataFrame:
        """The table `name`, or only these columns of it."""
        table = read_table(self._tables / f"{name}.csv")
        return table[list(columns)] if columns else table

    def show(self, name: str) -> None:
        """Display a figure and its caption."""
        from IPython.display import Image, Markdown, display

        folder = self._figures or self._own / "figures"
        if self._figures is None:
            write_figure(name, self._tables, folder)
        display(Image(folder / f"{name}.png", width=WIDTH_PX), Markdown(read_caption(folder, name)))

    def claims(self, *experiments: str) -> None:
        """Display the graded claims of these experiments (of config/experiments.yaml), or of all."""
        from IPython.display import Markdown, display

        claims = self.table("claims")
        mine = claims[claims["experiment"].isin(experiments)] if experiments else claims
        lines = [f"{len(mine)} claims. {tally_apart(mine)}.", "", *markdown(tried(mine))]
        if (mine["verdict"] == "not run").any():
            lines += ["", *markdown(not_run(mine))]
        display(Markdown("\n".join(lines)))


def _root() -> Path:
    """The repository that contains the current folder: Jupyter starts a notebook in the notebook's folder."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "config" / "claims.yaml").is_file():
            return folder
    raise UserError("no config/claims.yaml here or above", where=here, allowed="inside the repository")
