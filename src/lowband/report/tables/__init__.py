"""One derived table per file: `build(raw tables) -> table`, pure, never reads or writes a file."""

from lowband.report.points import EXPERIMENT as EXPERIMENT  # by which claims are graded
