"""A finished reproduction -> an RO-Crate (Workflow Run Crate) in one zip, with the checksum of every file.

The crate holds the workflow, its inputs (config, machine files, published and shipped tables) and its outputs
(run folders with their environments, tables, figures, page, notebooks, appendices), under their own paths.
The code that computed them, src/lowband, is the run's second instrument. No network is needed.

Authors are those of CITATION.cff; the agent is the account that writes the crate. The run's start is the time
of the first of the files that it left, its end that of the graded claims. Unknown facts are left out.
"""

import getpass
import mimetypes
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rocrate.model import ContextEntity, File, Person
from rocrate.rocrate import ROCrate

from lowband.errors import UserError
from lowband.evidence.report.figures import commit
from lowband.spec.csv_tables import sha256
from lowband.spec.plain_data import read_yaml

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
    "results/reference/**/*.csv", "CITATION.cff", "LICENSE", "pyproject.toml",
)  # fmt: skip
CODE = ("src/lowband/**/*",)
OUTPUTS = (
    "results/{name}/runs/*/*.json*", "results/{name}/tables/*", "results/{name}/notebooks/*",
    "results/{name}/appendix/*", "results/{name}/page.html", "figures/{name}/*",
)  # fmt: skip


def write_crate(root: Path, name: str, out: Path) -> None:
    """Write the crate of the reproduction results/`name` to the zip `out`. The same files give the same zip.

    Raises UserError if the reproduction is not finished.
    """
    claims = root / "results" / name / "tables" / "claims.csv"
    if not claims.is_file():
        raise UserError("no such reproduction", where=claims, allowed="one that `snakemake` has finished")
    ended = _time(claims)
    crate = ROCrate(version="1.1")  # the version that the profiles extend
    crate.name = f"lowband: the reproduction '{name}'"
    crate.description = (
        "Partitioning the state of LLM training over levels of a machine: what was run, on what, and which "
        "claims hold."
    )
    crate.datePublished = ended
    inputs = [_add(crate, root, path) for path in _found(root, INPUTS)]
    code = [_add(crate, root, path) for path in _found(root, CODE)]
    left = _found(root, [glob.format(name=name) for glob in OUTPUTS])
    outputs = [_add(crate, root, path) for path in left]
    crate.license = crate.get("LICENSE")
    authors = [
        crate.add(ContextEntity(crate, f"#author-{number}", _named(author)))
        for number, author in enumerate(read_yaml(root / "CITATION.cff")["authors"], 1)
    ]
    crate.root_dataset["author"] = authors
    about = {
        "@type": "SoftwareSourceCode", "name": "lowband: src/", "description": "What the rules run.",
        "author": authors, "license": crate.license, "programmingLanguage": "Python", "version": commit(),
        "hasPart": code,
    }  # fmt: skip
    sources = crate.add(ContextEntity(crate, "#src", about))
    crate.root_dataset["conformsTo"] = [
        crate.add(ContextEntity(crate, profile, {"@type": "CreativeWork", "name": profile}))
        for profile in PROFILES
    ]
    run = {
        "name": f"snakemake, results in results/{name}",
        "startTime": min(_time(root / path) for path in left),
        "endTime": ended,
        "agent": crate.add(Person(crate, "#agent", {"name": getpass.getuser()})),
        "actionStatus": {"@id": "http://schema.org/CompletedActionStatus"},
    }
    action = crate.add_action(crate.mainEntity, "#run", object=inputs, result=outputs, properties=run)
    action["instrument"] = [crate.mainEntity, sources]
    crate.root_dataset["mentions"] = action
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    crate.write_zip(temporary)
    temporary.replace(out)


def _time(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")


def _named(author: dict[str, Any]) -> dict[str, str]:
    """An author of CITATION.cff: a person, or an entity that has a name alone."""
    if "name" in author:
        return {"@type": "Organization", "name": author["name"]}
    return {"@type": "Person", "name": f"{author.get('given-names', '')} {author['family-names']}".strip()}


def _found(root: Path, globs: Iterable[str]) -> list[str]:
    paths = {path for glob in globs for path in root.glob(glob) if path.is_file()}
    return sorted(path.relative_to(root).as_posix() for path in paths if "__pycache__" not in path.parts)


def _add(crate: ROCrate, root: Path, path: str) -> File:
    kind = mimetypes.guess_type(path)[0]
    about: dict[str, Any] = {
        "sha256": sha256(root / path),
        **({} if kind is None else {"encodingFormat": kind}),
    }
    if path != WORKFLOW:
        return crate.add_file(root / path, path, record_size=True, properties=about)
    package = {"@type": "SoftwareApplication", "name": "lowband", "softwareVersion": commit()}
    about |= {"name": "lowband", "softwareRequirements": {"@id": "#lowband"}}
    crate.add(ContextEntity(crate, "#lowband", package))
    return crate.add_workflow(
        root / path, path, main=True, lang="snakemake", lang_version=version("snakemake"), record_size=True,
        properties=about,
    )  # fmt: skip
