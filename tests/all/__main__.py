"""`make test-all`: every test, those that `make test` leaves out too, and the campaigns; a row for each part.

python -m tests.all --out results/reference/all
python -m tests.all --out results/reference/all --only random "a process beside the others"

Parts that the folder has of today's commit are not run again: what was cut goes on.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import campaign_rows
from tests.all.parts import CAMPAIGNS, TESTS, Campaign
from tests.junit import counted

COLUMNS = ["part", "tests", "skipped", "failed", "which", "seconds", "commit"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.all", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of parts.csv and the campaigns' files"
    )
    parser.add_argument("--only", nargs="+", choices=[*TESTS, *CAMPAIGNS], help="these parts")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "parts.csv"
    commit = campaign_rows.commit()
    rows = {row["part"]: row for row in campaign_rows.read(file)}
    for part in options.only or [*TESTS, *CAMPAIGNS]:
        if rows.get(part, {}).get("commit") == commit:
            continue
        start = time.monotonic()
        made = (
            counted(["--wide", *TESTS[part]])
            if part in TESTS
            else tried(CAMPAIGNS[part], options.out, commit)
        )
        rows[part] = {"part": part, **made, "seconds": f"{time.monotonic() - start:.0f}", "commit": commit}
        print(*rows[part].values(), sep=" | ", flush=True)
        campaign_rows.write(file, COLUMNS, rows.values())
    return int(any(int(row["failed"]) for row in rows.values()))


def tried(campaign: Campaign, out: Path, commit: str) -> dict[str, Any]:
    """Counts of a campaign's cases, by the file that it writes; one of another commit is removed."""
    made = out / campaign.file
    if any(row["commit"] != commit for row in campaign_rows.read(made)):
        made.unlink()
    given = made.parent if campaign.takes_folder else made
    ended = subprocess.run([sys.executable, "-m", *campaign.command, "--out", given], check=False)
    rows = campaign_rows.read(made)
    wrong = [row[campaign.name] for row in rows if row[campaign.wrong] not in ("", "0")]
    if not wrong and (ended.returncode or not rows):
        wrong = [f"exit code {ended.returncode}" if rows else "it did not begin"]
    return {
        "tests": sum(int(row[campaign.counts]) for row in rows) if campaign.counts else len(rows),
        "skipped": 0,
        "failed": len(wrong),
        "which": " ".join(wrong),
    }


if __name__ == "__main__":
    sys.exit(main())
