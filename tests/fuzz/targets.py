"""Every parser of text that a stranger may write, with a sound text to begin from."""

from pathlib import Path

from tests.fuzz import arguments, of_config, of_peers, of_runs, of_tables
from tests.fuzz.target import Target


def targets(sound_run: Path, manifest: str) -> list[Target]:
    """sound_run: the folder of a run that has ended; manifest: a checkpoint's"""
    return [
        *of_config.targets((sound_run / "spec.json").read_text(encoding="utf-8")),
        *of_peers.targets(),
        *of_runs.targets(sound_run, manifest),
        *of_tables.targets(),
        *arguments.targets(sound_run),
    ]
