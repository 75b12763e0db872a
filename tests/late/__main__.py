"""`python -m tests.late`: losses of runs whose updates in host memory are one step late, and in their step.

python -m tests.late --out results/reference/late

The runs of suite `delay` under data parallelism: 400 steps of real text, three seeds. A row per run; rows
that the folder has already are kept.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from lowband.run.train import train
from lowband.spec.offload import Offload
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.campaign_rows import Rows, write_environment
from tests.checkout import CONFIG

LAST = 50  # steps whose mean loss counts
COLUMNS = ("is_late", "seed", "steps", "loss", "commit")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.late")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_environment(options.out)
    rows = Rows(options.out / "losses.csv", COLUMNS, ("is_late", "seed"))
    host = CONFIG.scheme("zero1-host")
    late = host.model_copy(update={"name": "zero1-host-late", "offload": Offload(late=True)})
    for spec in CONFIG.runs(["delay"]):
        for scheme in (host, late) if spec.scheme.name == "hsdp" else ():
            if not rows.has(scheme.is_late, spec.repeat):
                losses = trained(spec.model_copy(update={"scheme": scheme}))
                row = {"is_late": scheme.is_late, "seed": spec.repeat, "steps": len(losses)}
                print(
                    *rows.add({**row, "loss": statistics.mean(losses[-LAST:])}).values(),
                    sep=" | ",
                    flush=True,
                )
    return 0


def trained(spec: RunSpec) -> list[float]:
    """Its losses, step by step."""
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.spec.write_text(spec.to_json())
        outcome = train(folder.spec)
        if outcome.status != "ok":
            sys.exit(f"{spec.scheme.name}: {outcome.status}, {outcome.cause}")
        return [step.loss for step in folder.whole_steps()]


if __name__ == "__main__":
    sys.exit(main())
