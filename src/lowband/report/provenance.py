"""A finished reproduction -> an RO-Crate (Workflow Run Crate) in one zip, with the checksum of every file.

The crate holds the workflow, its inputs (config, machine files, published and shipped tables) and its outputs
(run folders with their environments, tables, figures, page, notebooks, appendices), under their own paths. No
network is needed. Unknown facts (an author, a start time) are left out, not made up.
"""

import json
import mimetypes
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lowband.errors import UserError
from lowband.report.figures import commit
from lowband.spec.csv_tables import sha256

METADATA = "ro-crate-metadata.json"
PROFILES = (
    "https://w3id.org/ro/wfrun/process/0.5",
    "https://w3id.org/ro/wfrun/workflow/0.5",
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0",
)
WORKFLOW = "workflow/Snakefile"

# Globs from the root. Weights and job logs are not part of the crate.
INPUTS = (
    "Snakefile", "workflow/**/*", "config/**/*", "envs/*", "slurm/*/machine.yaml", "results/reported/*.csv",
    "results/reference/**/*.csv", "CITATION.cff", "LICENSE",
)  # fmt: skip
OUTPUTS = (
    "results/{name}/runs/*/*.json*", "results/{name}/tables/*", "results/{name}/notebooks/*",
    "results/{name}/appendix/*", "results/{name}/page.html", "figures/{name}/*",
)  # fmt: skip

_DATE = (1980, 1, 1, 0, 0, 0)  # of every file in the zip: the same files give the same zip

Entity = dict[str, Any]


def write_crate(root: Path, name: str, out: Path) -> None:
    """Write the crate of the reproduction results/`name` to the zip `out`.

    Raises UserError if the reproduction is not finished.
    """
    claims = root / "results" / name / "tables" / "claims.csv"
    if not claims.is_file():
        raise UserError("no such reproduction", where=claims, allowed="one that `snakemake` has finished")
    inputs, outputs = _found(root, INPUTS), _found(root, [glob.format(name=name) for glob in OUTPUTS])
    ended = datetime.fromtimestamp(claims.stat().st_mtime, UTC).isoformat(timespec="seconds")
    graph = _graph(root, name, inputs, outputs, ended)
    document = {"@context": "https://w3id.org/ro/crate/1.1/context", "@graph": graph}
    temporary = out.with_name(f".{out.name}.tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as crate:
        _add(crate, METADATA, (json.dumps(document, indent=2) + "\n").encode())
        for path in (*inputs, *outputs):
            _add(crate, path, (root / path).read_bytes())
    temporary.replace(out)


def _add(crate: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    crate.writestr(entry, content)


def _found(root: Path, globs: Iterable[str]) -> list[str]:
    paths = {path for glob in globs for path in root.glob(glob) if path.is_file()}
    return sorted(path.relative_to(root).as_posix() for path in paths if "__pycache__" not in path.parts)


def _graph(root: Path, name: str, inputs: list[str], outputs: list[str], ended: str) -> list[Entity]:
    files = [_file(root, path) for path in (*inputs, *outputs)]
    return [
        {
            "@id": METADATA,
            "@type": "CreativeWork",
            "conformsTo": [{"@id": "https://w3id.org/ro/crate/1.1"}, {"@id": PROFILES[2]}],
            "about": {"@id": "./"},
        },
        {
            "@id": "./",
            "@type": "Dataset",
            "name": f"lowband: the reproduction '{name}'",
            "description": "Partitioning the state of LLM training over levels of a machine: what was run, "
            "on what, and which claims hold.",
            "datePublished": ended,
            "license": {"@id": "LICENSE"},
            "conformsTo": [{"@id": profile} for profile in PROFILES],
            "hasPart": [{"@id": file["@id"]} for file in files],
            "mainEntity": {"@id": WORKFLOW},
            "mentions": [{"@id": "#run"}],
        },
        *({"@id": profile, "@type": "CreativeWork", "name": profile} for profile in PROFILES),
        {
            "@id": "#snakemake",
            "@type": "ComputerLanguage",
            "name": "Snakemake",
            "version": version("snakemake"),
            "url": "https://snakemake.github.io",
        },
        {"@id": "#lowband", "@type": "SoftwareApplication", "name": "lowband", "softwareVersion": commit()},
        {
            "@id": "#run",
            "@type": "CreateAction",
            "name": f"snakemake, results in results/{name}",
            "instrument": {"@id": WORKFLOW},
            "object": [{"@id": path} for path in inputs],
            "result": [{"@id": path} for path in outputs],
            "endTime": ended,
            "actionStatus": {"@id": "http://schema.org/CompletedActionStatus"},
        },
        *files,
    ]


def _file(root: Path, path: str) -> Entity:
    entity: Entity = {
        "@id": path,
        "@type": "File",
        "contentSize": str((root / path).stat().st_size),
        "sha256": sha256(root / path),
    }
    kind = mimetypes.guess_type(path)[0]
    if kind is not None:
        entity["encodingFormat"] = kind
    if path == WORKFLOW:
        entity["@type"] = ["File", "SoftwareSourceCode", "ComputationalWorkflow"]
        entity |= {"name": "lowband", "programmingLanguage": {"@id": "#snakemake"}}
        entity["softwareRequirements"] = {"@id": "#lowband"}
    return entity
