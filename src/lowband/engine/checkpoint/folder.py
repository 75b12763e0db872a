"""The folder of checkpoints: list them, begin one and finish one. Only rank 0 changes the folder.

[Note: left] A checkpoint of a later step than the one that is saved is of a training that was left: this one
has loaded an earlier checkpoint, or none. `load_newest` would go back to it, so it gets another name.
"""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowband.engine.checkpoint.manifest import (
    MANIFEST,
    Content,
    File,
    Saved,
    folder_name,
    replaced_name,
    write_manifest,
)
from lowband.engine.checkpoint.rank_file import naming
from lowband.engine.transport.meeting import Tick

KEPT = 2  # the newest checkpoints; older ones are removed
LEFT = ".left"  # behind the name of a checkpoint, see [Note: left]
# The second is of a checkpoint that was about to be replaced, and counts where the new one never came.
_NAME = re.compile(r"(step-[0-9]{8})|\.(step-[0-9]{8})\.replaced")


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints, without leftovers of interrupted writes and without copies under other names."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    names = {path.name for path in found}
    return sorted(
        (path for path in found if path.name == _step_of(path) or _step_of(path) not in names),
        key=_step_of,
        reverse=True,
    )


def _step_of(checkpoint: Path) -> str:
    found = _NAME.fullmatch(checkpoint.name)
    assert found is not None
    return found[1] or found[2]


def begin(writing: Path, tick: Tick) -> None:
    """Make an empty folder to write into, after removing the leftovers of unfinished writes."""
    with naming(writing):
        writing.parent.mkdir(parents=True, exist_ok=True)
        for left_over in writing.parent.glob(".step-*.writing"):
            _remove(left_over, tick)
        writing.mkdir()


def finish(
    writing: Path,
    content: Content,
    extra: dict[str, Any],
    written: list[tuple[File, dict[str, Saved]]],
    tick: Tick,
) -> None:
    """Make a checkpoint of the files that all ranks have written, and remove those that are too old. Those of
    later steps are renamed, with a line on stderr: see [Note: left].

    written: the results of `write_rank_file`, by rank
    """
    tensors = dict(content.tensors)
    for _, entries in written:
        for name, entry in entries.items():
            before = tensors[name].chunks if name in tensors else ()
            tensors[name] = entry.model_copy(update={"chunks": (*before, *entry.chunks)})
    files = [file for file, _ in written]
    final = writing.parent / folder_name(content.step)
    replaced = writing.parent / replaced_name(content.step)
    with naming(writing / MANIFEST):
        write_manifest(writing, content.model_copy(update={"tensors": tensors}), extra, files)
    with naming(final):
        if final.exists():
            _remove(replaced, tick)
            final.replace(replaced)
        for later in (path for path in newest_first(writing.parent) if _step_of(path) > final.name):
            left = later.with_name(_step_of(later) + LEFT)
            _remove(left, tick)
            later.replace(left)
            what = f"training went on from an earlier step, and has saved {content.step}; renamed {left.name}"
            sys.stderr.write(f"lowband: {later}: {what}\n")
        writing.replace(final)
    for path in (replaced, *newest_first(writing.parent)[KEPT:]):
        with suppress(OSError):  # e.g. a file still open on NFS; the new checkpoint is complete anyway
            _remove(path, tick)


def _remove(folder: Path, tick: Tick) -> None:
    """Remove a checkpoint, with a tick per file: with thousands of ranks this takes a while."""
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
            tick()
        folder.rmdir()
