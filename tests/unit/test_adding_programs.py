"""The programs of docs/adding.md: one more schedule, row and axis, and what each prints."""

import re
import sys

from tests.called import called
from tests.checkout import ROOT

PROGRAM = re.compile(r"```python program\n(.*?)```", re.DOTALL)
PRINTS = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def test_programs_print_what_they_say() -> None:
    programs = PROGRAM.findall((ROOT / "docs" / "adding.md").read_text(encoding="utf-8"))
    said = [PRINTS.findall(program) for program in programs]
    assert [len(lines) for lines in said] == [1, 1, 1]
    # The row's program changes the rows that other modules read when they are imported: it comes first.
    schedule, row, axis = programs
    done = called(sys.executable, "-c", "\n".join([row, schedule, axis]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [lines[0] for lines in (said[1], said[0], said[2])]
