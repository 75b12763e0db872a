"""What runs leave and read: records, checkpoints' manifests, locks, a launcher's environment."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

from lowband.engine.checkpoint.manifest import MANIFEST, Manifest
from lowband.engine.checkpoint.manifest import _sum as checksum
from lowband.evidence.tables.collect import collect
from lowband.run.ranks import from_environment, is_first_process, job_id
from lowband.spec.lock import job_of
from lowband.spec.run_folder import RunFolder
from lowband.spec.slurm_task import is_slurm_task
from tests.fuzz.target import Target, put, run, sound

KINDS = {".json": "json", ".jsonl": "lines"}
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "7", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip


def in_a_run(folder: Path) -> Callable[[Path], None]:
    """Puts a sound run into the folder, in which one file is then a stranger's."""

    def prepare(root: Path) -> None:
        (root / "run").mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_file() and path.suffix in KINDS:
                shutil.copy(path, root / "run" / path.name)

    return prepare


def _restart(root: Path) -> None:
    folder = RunFolder(root / "run")
    folder.start()
    folder.go_back_to(len(folder.whole_steps()))


def _status(sound_run: Path) -> Callable[[Path], None]:
    """`lowband status` of a results folder whose one run is the sound one."""
    run_id = json.loads((sound_run / "spec.json").read_text())["run_id"]

    def prepare(root: Path) -> None:
        put(root, "config/suites/smoke.yaml", sound("config/suites/smoke.yaml"))
        folder = root / "results" / "local" / "runs" / run_id
        folder.mkdir(parents=True, exist_ok=True)
        for path in sound_run.iterdir():
            if path.is_file() and path.suffix in KINDS:
                shutil.copy(path, folder / path.name)

    return prepare


def _environment(root: Path) -> None:
    """A launcher's variables. A system lets no variable have NUL, or a name with `=`."""
    given = json.loads((root / "environment").read_bytes())
    clean = {
        name: value for name, value in given.items()
        if isinstance(value, str) and name and "\0" not in name + value and "=" not in name
    }  # fmt: skip
    with patch.dict(os.environ, clean):
        from_environment(4)
        is_first_process()
        is_slurm_task()
        job_id()


def _plain_mapping(data: bytes) -> bytes:
    """The data if it is a JSON mapping of text, which an environment is, else an empty one."""
    try:
        found = json.loads(data)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
        return data if isinstance(found, dict) else b"{}"
    except (ValueError, RecursionError):
        return b"{}"


def _sealed(data: bytes) -> bytes:
    """A changed manifest with the checksum that belongs to it."""
    try:
        plain = json.loads(data)
        plain.pop("sha256", None)
        return json.dumps(plain | {"sha256": checksum(plain)}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


def targets(sound_run: Path, manifest: str) -> list[Target]:
    at = partial(Target, group="runs and checkpoints")
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in sorted(sound_run.iterdir())
        if path.suffix in KINDS
    }  # fmt: skip
    run_id = json.loads(texts["spec.json"])["run_id"]
    of_checkpoint = (
        f"step-00000001/{MANIFEST}", "json", manifest, lambda root: Manifest.read(root / "step-00000001"),
    )  # fmt: skip
    return [
        at("checkpoint's manifest", *of_checkpoint),
        at("manifest with its checksum", *of_checkpoint, _sealed),
        *(
            at(f"collect: {name}", f"run/{name}", KINDS[Path(name).suffix], text,
               lambda root: collect([root / "run"], root / "tables"), prepare=in_a_run(sound_run))
            for name, text in texts.items()
        ),
        at("restart: steps.jsonl", "run/steps.jsonl", "lines", texts["steps.jsonl"], _restart,
           prepare=in_a_run(sound_run), is_fresh=True),
        at("status: outcome.json", f"results/local/runs/{run_id}/outcome.json", "json", texts["outcome.json"],
           lambda root: run("status", "--root", root, "--suite", "smoke"), prepare=_status(sound_run)),
        at("lock", "run/run.lock", "lines", "process 7 on node1\nSLURM_JOB_ID=7\n",
           lambda root: job_of(root / "run" / "run.lock")),
        at("environment", "environment", "json", json.dumps(TORCHRUN), _environment, _plain_mapping,
           more=(json.dumps(SRUN),), group="environment"),
    ]  # fmt: skip
