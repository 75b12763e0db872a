"""Tables: what `lowband table` derives others from, graded claims, checksums, published numbers."""

import dataclasses
import json
import shutil
import tempfile
from functools import cache, partial
from pathlib import Path

from lowband.bench.gpu.folder import Entry, Folder
from lowband.bench.kernels.rows import kept_rows
from lowband.evidence.report.claim_views import write_claims
from lowband.evidence.report.verify import FOLDERS, SUMS, verify
from lowband.evidence.tables.build import raw_dir, source_paths, write_table
from lowband.evidence.tables.entries import REPORTED, SHIPPED, TABLES
from lowband.spec.kernel_rows import KernelRow
from tests.checkout import REFERENCE, ROOT
from tests.fuzz.target import Target, put, sound, table

ROWS = {"softmax_times.csv": 20, "products.csv": 107, "routes.csv": 40}  # of one size, one round, with copies
LOCAL = REFERENCE / "local" / "tables"


def _files(name: str) -> dict[str, Path]:
    """Where a table's sources lie under the target's folder -> the shipped file. The first is changed."""
    folder = raw_dir(name, [], LOCAL, ROOT)
    found: dict[str, Path] = {}
    for source in TABLES[name].sources:
        paths = source_paths(source, folder, ROOT)
        for path in paths or []:
            if not path.is_file():
                path = LOCAL / path.name
            if not path.is_file():
                path = next(iter(sorted((REFERENCE).rglob(path.name))))
            is_in_place = source.startswith((REPORTED, SHIPPED))
            found[str(path.relative_to(ROOT)) if is_in_place else f"tables/{path.name}"] = path
    return found


def _text(file: str, path: Path) -> str:
    """What is reported whole, because its first rows may be of another table; of other rows the first."""
    if file.startswith("results/reported"):
        return path.read_text(encoding="utf-8")
    return table(path, ROWS.get(path.name, 12))


def _target(name: str) -> Target:
    files = _files(name)
    first, *_ = files

    def prepare(root: Path) -> None:
        for file, path in files.items():
            if file != first:
                put(root, file, _text(file, path))

    return Target(
        f"table: {name}", first, "csv", _text(first, files[first]),
        lambda root: write_table(name, root / "tables", root / "out", root), prepare=prepare, group="tables",
    )  # fmt: skip


def _grade(root: Path) -> None:
    write_claims(root / "config" / "claims.yaml", root / "tables", root / "out", root=root)


def gradable(root: Path) -> None:
    put(root, "config/experiments.yaml", sound("config/experiments.yaml"))
    for name in ("runs", "bytes", "states", "scaling"):
        put(root, f"tables/{name}.csv", table(LOCAL / f"{name}.csv"))
    for path in (REFERENCE).rglob("runs.csv"):
        put(root, str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    for path in (ROOT / "results" / "reported").glob("*.csv"):
        put(root, f"results/reported/{path.name}", path.read_text(encoding="utf-8"))
    for path in (ROOT / "config" / "suites").glob("*.yaml"):
        put(root, f"config/suites/{path.name}", path.read_text(encoding="utf-8"))


CLAIM = """
sent-bytes:
  short: bytes sent
  sentence: Counted bytes equal the closed form.
  paper_element: "none: checks the engine of this artifact"
  kind: artifact
  experiment: reproduce
  expects: {suite: smoke}
  ours: {table: bytes, where: {suite: [smoke, core]}, column: difference_bytes, aggregate: max}
  unit: bytes
  relation: "=="
  target: 0
  tolerance: 0.5
ratio:
  short: tokens per second
  sentence: One over the other.
  paper_element: Fig. 1
  kind: relation
  paper: "2501.04266"
  experiment: reproduce
  expects: {}
  reported:
    - csv: ../results/reported/01_frontier_low_bandwidth_2501.04266.csv
      where: {metric: TFLOPS per GPU ratio}
  ours: {table: runs, where: {scheme: hier3}, column: step_time_s, aggregate: mean}
  per: {table: runs, where: {scheme: zero3}, column: step_time_s, aggregate: median}
  divided_by: 2
  relation: ">="
  target: 1.5
"""


@cache
def graded() -> str:
    """The sound claims, graded."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        put(root, "config/claims.yaml", CLAIM)
        gradable(root)
        _grade(root)
        return (root / "out" / "claims.csv").read_text(encoding="utf-8")


def _kernel_rows(root: Path) -> None:
    kept_rows(root / "kernels", json.loads(sound("results/reference/h100/environment.json")), ["block_quant"])


def _kernel_files(root: Path) -> None:
    put(root, "kernels/kernels.csv", table(ROOT / "results/reference/h100/kernels.csv"))
    put(root, "kernels/environment.json", sound("results/reference/h100/environment.json"))


def _gpu_files(root: Path) -> None:
    put(root, "gpu/environment.json", sound("results/reference/h100/environment.json"))
    put(root, "gpu/items.json", _items())


def _items() -> str:
    """Two items of `lowband gpu`, one with a row."""
    blank = dict.fromkeys(field.name for field in dataclasses.fields(KernelRow))
    row = blank | {"part": "softmax", "operation": "forward", "outcome": "ok", "time_s": 0.1, "rows": 8}
    entries = {
        "softmax forward": Entry("softmax", "ok", "", 1.5, "0" * 64, [row]),
        "overhead": Entry("overhead", "not run", "takes about 40 s, 3 s were left", 0.0, "0" * 64, []),
    }
    return json.dumps({name: dataclasses.asdict(entry) for name, entry in entries.items()})


def _gpu_folder(root: Path) -> None:
    environment = json.loads(sound("results/reference/h100/environment.json"))
    shutil.rmtree(root / "next", ignore_errors=True)
    Folder.begin(root / "next", environment, root / "gpu")


def targets() -> list[Target]:
    at = partial(Target, group="tables")
    kernels = table(ROOT / "results/reference/h100/kernels.csv")
    environment = sound("results/reference/h100/environment.json")
    return [
        *map(_target, TABLES),
        at("claims.yaml, graded", "config/claims.yaml", "yaml", CLAIM, _grade, prepare=gradable),
        at("bench-kernel's rows", "kernels/kernels.csv", "csv", kernels, _kernel_rows, prepare=_kernel_files),
        at("bench-kernel's rows, environment", "kernels/environment.json", "json", environment, _kernel_rows,
           prepare=_kernel_files),
        at("lowband gpu's items", "gpu/items.json", "json", _items(), _gpu_folder, prepare=_gpu_files),
        at("lowband gpu's environment", "gpu/environment.json", "json", environment, _gpu_folder,
           prepare=_gpu_files),
        at("SHA256SUMS", f"{FOLDERS[0]}/{SUMS}", "lines", sound(f"{FOLDERS[0]}/{SUMS}")[:600],
           verify, prepare=lambda root: put(root, f"{FOLDERS[1]}/{SUMS}", "")),
    ]  # fmt: skip
