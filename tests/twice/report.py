"""`python -m tests.twice.report FOLDER`: tables, figures, claims and page from the shipped measurements."""

import sys
from pathlib import Path

from lowband.evidence.report.figures import FIGURES, write_figure
from lowband.evidence.report.page import write_page
from lowband.evidence.report.shipped import write_shipped_tables

out = Path(sys.argv[1])
write_shipped_tables(Path(), out / "tables")
for name in FIGURES:
    write_figure(name, out / "tables", out / "figures")
write_page(Path(), out / "tables", out / "figures", out / "page.html")
