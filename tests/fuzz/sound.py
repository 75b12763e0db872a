"""A sound run folder and a sound checkpoint's manifest, made by a real run of two ranks."""

import subprocess
import sys
from pathlib import Path

from lowband.engine.checkpoint.manifest import MANIFEST
from tests.checkout import CONFIG


def sound_run(folder: Path) -> tuple[Path, str]:
    """Run two steps; returns the run's folder, and the manifest's text of its checkpoint."""
    [spec, *_] = CONFIG.runs(["smoke"])
    spec = spec.model_copy(update={"steps": 2, "warmup_steps": 1, "checkpoint_every": 1, "ranks": 2})
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(spec.to_json())
    done = subprocess.run(
        [sys.executable, "-m", "lowband", "train", str(folder / "spec.json")],
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return read_sound(folder)


def read_sound(folder: Path) -> tuple[Path, str]:
    """What `sound_run` returned when it made the folder."""
    [manifest, *_] = sorted(folder.rglob(MANIFEST))
    return folder, manifest.read_text()
