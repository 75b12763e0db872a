"""Damaged checkpoints are found, named and passed over; those of strangers run no code."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoints import bag, change_manifest, everything

import lowband
from lowband.engine.checkpoint import checkpointer as checkpoint_module
from lowband.engine.checkpoint.manifest import (
    MANIFEST,
    Content,
    Damaged,
    File,
    Group,
    Manifest,
    Saved,
    write_manifest,
)
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.run.training_loop import _resume


def save_steps(folder: str, *steps: int) -> None:
    checkpointer = lowband.Checkpointer(folder)
    for step in steps:
        checkpointer.save(step, *bag(steps=step), {"step": step, "outside": []})
    checkpointer.wait()


def load_newest(folder: str) -> tuple[str, tuple[str, ...], bool]:
    """(step or error, what was skipped, whether the state is as saved at that step, or untouched)"""
    checkpointer = lowband.Checkpointer(folder)
    here = bag(steps=0)
    torch.manual_seed(3)
    before = everything(*here)
    try:
        extra = checkpointer.load_newest(*here)
    except UserError as error:
        return str(error), checkpointer.skipped, everything(*here) == before
    if extra is None:
        return "none", checkpointer.skipped, everything(*here) == before
    torch.manual_seed(3)
    after = everything(*here)
    expected = bag(steps=extra["step"])
    torch.manual_seed(3)
    return str(extra["step"]), checkpointer.skipped, after == everything(*expected)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _write(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text)  # type: ignore[return-value]


DAMAGE = [
    ("rank-00001.bin", flip_a_bit),
    ("rank-00001.bin", cut),
    ("rank-00000.bin", Path.unlink),
    (MANIFEST, flip_a_bit),
    (MANIFEST, cut),
    (MANIFEST, Path.unlink),
    *((MANIFEST, _write(text)) for text in ("", "{}", "[]", "null", "7", '"x"', "[" * 100_000, "9" * 5000)),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("two")
    on_ranks(2, save_steps, str(folder), 1, 2)
    return folder


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_named(
    tmp_path: Path, two: Path, capfd, name: str, damage
) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "step-00000002" / name)
    for step, skipped, is_right in on_ranks(2, load_newest, str(tmp_path)):
        assert step == "1"
        assert is_right
        [line] = skipped
        assert line.startswith(str(tmp_path / "step-00000002" / name))
        assert len(line) < 400
    assert capfd.readouterr().err == f"lowband: checkpoint skipped: {line}\n"  # of rank 0 alone


def test_if_none_is_whole_the_newest_is_named_and_nothing_changed(tmp_path: Path, two: Path) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    for step in (1, 2):
        flip_a_bit(tmp_path / f"step-0000000{step}" / "rank-00000.bin")
    for error, skipped, is_untouched in on_ranks(2, load_newest, str(tmp_path)):
        assert error.startswith(str(tmp_path / "step-00000002" / "rank-00000.bin"))
        assert "every checkpoint in this folder is damaged; remove it to start over" in error
        assert len(skipped) == 2
        assert is_untouched


def test_stray_and_left_over_folders_are_no_checkpoints(tmp_path: Path) -> None:
    assert on_ranks(2, load_newest, str(tmp_path / "none")) == [("none", (), True)] * 2
    on_ranks(2, save_steps, str(tmp_path), 1, 2)
    for stray in ("step-old-copy", "step-00000003.bak", "step-3", ".step-00000099.writing", "step-000000009"):
        (tmp_path / stray).mkdir()
    assert on_ranks(2, load_newest, str(tmp_path)) == [("2", (), True)] * 2
    on_ranks(2, save_steps, str(tmp_path), 3)
    assert {"step-00000002", "step-00000003", "step-old-copy"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "step-00000001").exists()


def test_a_copy_under_another_step_is_damaged(tmp_path: Path) -> None:
    on_ranks(2, save_steps, str(tmp_path), 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000005")
    for step, skipped, _ in on_ranks(2, load_newest, str(tmp_path)):
        assert step == "1"
        assert skipped == (
            f"{tmp_path / 'step-00000005' / MANIFEST}: belongs to step 1 (allowed: folder step-00000001)",
        )


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, two: Path) -> None:
    """And not skipped: its training would silently begin earlier."""
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    change_manifest(tmp_path / "step-00000002", lambda content: content.update(format=3))
    for error, _, _ in on_ranks(2, load_newest, str(tmp_path)):
        assert error == (
            f"{tmp_path / 'step-00000002' / MANIFEST}: has format 3: another version of lowband wrote it "
            "(allowed: 2)"
        )


def test_the_format_before_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    before = {"step": 1, "ranks": 2, "optimizer_groups": [], "extra": {}, "sha256": {".metadata": "ab" * 32}}
    (folder / MANIFEST).write_text(json.dumps(before, indent=2))
    with pytest.raises(Damaged, match="an earlier version of lowband wrote it"):
        Manifest.read(folder)


def small_manifest(folder: Path) -> Manifest:
    content = Content(
        step=7,
        optimizer="torch.optim.adamw.AdamW",
        groups=(
            Group(
                parameters=("a",), options={"lr": 0.001, "betas": [0.9, 0.999], "fused": None, "most": inf}
            ),
        ),
        tensors={"model.a": Saved(dtype="float32", shape=(2, 3), sharded=True, chunks=((0, 0, 0, 6),))},
        numbers={"optimizer.step.a": 7},
    )
    write_manifest(folder, content, {"next": 8}, [File(bytes=24, sha256="ab" * 32)])
    return Manifest.read(folder)


def test_every_single_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    expected = small_manifest(folder)
    path = folder / MANIFEST
    assert expected.groups[0].options == {"lr": 0.001, "betas": [0.9, 0.999], "fused": None, "most": inf}
    content = path.read_bytes()
    refused = 0
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert Manifest.read(folder) == expected  # another space
        except Damaged as error:
            refused += 1
            assert str(error).startswith(str(path))
            assert "\n" not in str(error)
            assert len(str(error)) < 300 + len(str(path))
    assert refused > 7 * len(content)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.update(step="seven"), "step: "),
        (lambda c: c.update(step=10**400), "step: "),
        (lambda c: c.update(hook="os.system"), "unknown key 'hook'"),
        (lambda c: c.pop("groups"), "key 'groups' is missing"),
        (lambda c: c["tensors"]["model.a"].update(dtype="load"), "is not a dtype of torch"),
        (lambda c: c["tensors"]["model.a"].update(shape=[2, 4]), "'model.a' is not covered exactly once"),
        (
            lambda c: c["tensors"]["model.a"].update(chunks=[[0, 0, 0, 5]]),
            "'model.a' is not covered exactly once",
        ),
        (
            lambda c: c["tensors"]["model.a"].update(chunks=[[0, 0, 0, 4], [0, 0, 3, 3]]),
            "is not covered exactly once",
        ),
        (lambda c: c["tensors"]["model.a"].update(chunks=[[1, 0, 0, 6]]), "is not covered exactly once"),
        (lambda c: c["tensors"]["model.a"].update(chunks=[[0, 4, 0, 6]]), "extends beyond rank-00000.bin"),
        (lambda c: c["tensors"]["model.a"].update(shape=[9**9], chunks=[[0, 0, 0, 9**9]]), "extends beyond"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_in_one_line(tmp_path: Path, change, expected: str) -> None:
    """Though its own sum is right."""
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    small_manifest(folder)
    (folder / "rank-00000.bin").write_bytes(bytes(24))
    change_manifest(folder, change)
    with pytest.raises(Damaged) as raised:
        Manifest.read(folder)
    assert str(raised.value).startswith(str(folder / MANIFEST))
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


class Bomb:
    """What a stranger puts into a pickle."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_strangers_checkpoint_runs_no_code(tmp_path: Path) -> None:
    """Pickles in the place of values and, as torch's own format has them, of metadata: with right sums."""
    marker = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.exists()
    marker.unlink()
    on_ranks(2, save_steps, str(tmp_path / "ck"), 1)
    checkpoint = tmp_path / "ck" / "step-00000001"
    data = checkpoint / "rank-00000.bin"
    data.write_bytes(bomb + data.read_bytes()[len(bomb) :])
    torch.save(Bomb(marker), checkpoint / "__0_0.distcp")
    (checkpoint / ".metadata").write_bytes(bomb)
    change_manifest(checkpoint, lambda content: None)
    assert [step for step, _, _ in on_ranks(2, load_newest, str(tmp_path / "ck"))] == ["1", "1"]
    for name in ("rank-00001.bin", MANIFEST):
        (checkpoint / name).write_bytes(bomb)
        for error, _, is_untouched in on_ranks(2, load_newest, str(tmp_path / "ck")):
            assert name in error
            assert is_untouched
    assert not marker.exists()


def resume(folder: str) -> tuple[int, int]:
    model, optimizer = bag(steps=0)
    trainer = SimpleNamespace(model=model, optimizer=optimizer, replicas=None)
    return _resume(0, lowband.Checkpointer(folder), trainer)[0][-1], _resume(0, None, trainer)[0][-1]


def test_a_run_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert on_ranks(2, resume, str(tmp_path)) == [(0, 0)] * 2
    on_ranks(2, save_steps, str(tmp_path), 1, 2)
    assert on_ranks(2, resume, str(tmp_path)) == [(2, 0)] * 2
    cut(tmp_path / "step-00000002" / "rank-00000.bin")
    assert on_ranks(2, resume, str(tmp_path)) == [(1, 0)] * 2


def files_verified(folder: str) -> list[int]:
    verified, verify = [], checkpoint_module.verify_rank_file
    checkpoint_module.verify_rank_file = lambda path, rank, *more: (
        verified.append(rank) or verify(path, rank, *more)
    )
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.load_newest(*bag(steps=0))
    return verified


def test_each_file_is_verified_by_one_rank(tmp_path: Path) -> None:
    on_ranks(4, save_steps, str(tmp_path), 1)
    assert on_ranks(4, files_verified, str(tmp_path)) == [[0], [1], [2], [3]]
    assert on_ranks(3, files_verified, str(tmp_path)) == [[0, 3], [1], [2]]


def files_written(folder: str) -> tuple[list[tuple[int, int]], list[str]]:
    """(file, rank) of the files that this rank writes and sums, and the sums in the manifest."""
    written, write = [], checkpoint_module.write_rank_file

    def note(path: Path, rank: int, *more):
        written.append((rank, dist.get_rank()))
        return write(path, rank, *more)

    checkpoint_module.write_rank_file = note
    save_steps(folder, 1)
    manifest = json.loads((Path(folder) / "step-00000001" / MANIFEST).read_text())
    return written, [file["sha256"] for file in manifest["files"]]


def test_each_rank_writes_and_sums_its_own_file(tmp_path: Path) -> None:
    found = on_ranks(3, files_written, str(tmp_path))
    assert [written for written, _ in found] == [[(rank, rank)] for rank in range(3)]
    for _, sums in found:
        assert sums == [
            hashlib.sha256((tmp_path / "step-00000001" / f"rank-0000{rank}.bin").read_bytes()).hexdigest()
            for rank in range(3)
        ]
