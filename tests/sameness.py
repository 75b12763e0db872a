"""Sums of what the program computes, so that a change of structure can be shown to change nothing.

    python -m tests.sameness > before.json      at one commit
    python -m tests.sameness > after.json       at another; `diff before.json after.json`

Covered: every table and figure's data made from the shipped measurements, the graded claims, every suite's
run ids and spec files, 10,000 predictions of drawn jobs, bytes and memory of every scheme at
384 and 3,072 ranks. Sums are of exact values: floats by their 64 bits.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from lowband.cost.bytes import sent_bytes, stage_numels
from lowband.cost.memory import state_bytes
from lowband.errors import UserError
from lowband.evidence.report.figures import FIGURES, write_figure
from lowband.evidence.report.shipped import write_shipped_tables
from lowband.predict.prediction import predict
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.mesh import Levels
from lowband.spec.plain_data import read_yaml
from tests.checkout import CONFIG, ROOT

PREDICTIONS = 10_000


def _sum(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def _reports() -> dict[str, str]:
    """Tables, claims and figures' data from the shipped measurements."""
    sums = {}
    with tempfile.TemporaryDirectory() as folder:
        tables, figures = Path(folder) / "tables", Path(folder) / "figures"
        write_shipped_tables(ROOT, tables)
        for name in FIGURES:
            write_figure(name, tables, figures)
        for path in sorted([*tables.iterdir(), *figures.glob("*.csv")]):
            sums[f"{path.parent.name}/{path.name}"] = _sum(path.read_bytes())
    return sums


def _specs() -> dict[str, str]:
    suites = sorted(path.stem for path in (ROOT / "config" / "suites").glob("*.yaml"))
    return {
        suite: _sum("".join(spec.run_id + spec.to_json() for spec in CONFIG.runs([suite])))
        for suite in suites
    }


def _schemes() -> list[str]:
    return sorted(read_yaml(ROOT / "config" / "schemes.yaml"))


def _predictions() -> str:
    """One sum over 10,000 jobs drawn over machines, models, schemes, axes, batches, and over the messages of
    those that were refused on the way.
    """
    draw = np.random.default_rng(15)
    clusters = sorted(path.parent.name for path in ROOT.glob("slurm/*/machine.yaml"))
    machines = [CONFIG.machine(name) for name in clusters]
    stacks = {machine.name: CONFIG.given_stack(None, machine) for machine in machines}
    names = sorted(read_yaml(ROOT / "config" / "models.yaml"))
    models = [CONFIG.model(name) for name in names]
    schemes = [CONFIG.scheme(name) for name in _schemes()]
    total, predicted, refused = hashlib.sha256(), 0, 0

    def one(choices):
        return choices[draw.integers(len(choices))]

    while predicted < PREDICTIONS:
        arguments = {
            "machine": one(machines), "model": one(models), "scheme": one(schemes),
            "ranks": int(one([1, 2, 4, 8, 16, 32, 64, 128, 384, 1024, 3072])),
            "micro_batch": int(one([1, 2, 4, 8])), "seq_len": int(one([64, 512, 2048])),
            "accumulation": int(one([1, 2, 4, 8])), "recompute": one(["none", "selective", "full"]),
            "attention": one(["flash", "plain"]), "dropout": bool(one([False, True])),
            "axes": Ways(
                tensor=one([1, 1, 1, 2, 4, 8]), pipeline=one([1, 1, 1, 2, 4]), chunks=one([1, 1, 2]),
                schedule=one(["1f1b", "breadth-first"]), sequence_parallel=one([False, True]),
            ),
            "compute_dtype": one(["bf16", "fp32"]), "reduce_dtype": one(["bf16", "fp32"]),
            "faster": {"world": float(one([1.0, 2.0, 8.0]))},
        }  # fmt: skip
        try:
            total.update(
                _exact(vars(predict(Workload(stack=stacks[arguments["machine"].name], **arguments)))).encode()
            )
            predicted += 1
        except UserError as error:
            refused += 1
            total.update(str(error).replace(str(ROOT), "").encode())
    return f"{total.hexdigest()[:16]} ({predicted} predicted, {refused} refused)"


def _exact(value) -> str:
    if isinstance(value, dict):
        return "".join(f"{key}:{_exact(value[key])};" for key in sorted(value))
    if isinstance(value, (float, np.floating, np.ndarray)):
        return np.asarray(value, dtype=np.float64).tobytes().hex()
    return repr(value)


def _counts() -> dict[str, str]:
    """Bytes sent and held by the 20B model of the paper on Frontier, by ranks and scheme."""
    machine = CONFIG.machine("frontier")
    model = CONFIG.model("gpt-20b")
    sums = {}
    for ranks in (384, 3072):
        levels = Levels.fit(machine.sizes, ranks)
        units = stage_numels(model, levels)
        for name in _schemes():
            scheme = CONFIG.scheme(name)
            values = [
                (sent_bytes(units, scheme, levels, dtype, dtype, accumulation, True),
                 state_bytes(units, scheme, levels, dtype, dtype, accumulation, backend))
                for dtype in ("bf16", "fp32") for accumulation in (1, 4) for backend in ("gloo", "nccl")
            ]  # fmt: skip
            sums[f"{ranks} {name}"] = _sum(_exact(dict(enumerate(map(str, values)))))
    return sums


def main() -> None:
    sums = {
        "reports": _reports(),
        "specs": _specs(),
        "predictions": _predictions(),
        "bytes and memory": _counts(),
    }
    json.dump(sums, sys.stdout, indent=2, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
