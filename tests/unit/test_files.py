"""Whole files, whoever else writes them."""

import errno
import json
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowband.spec.files import create_whole, write_if_changed, write_whole, writing_whole

WRITERS = 8


def texts() -> list[str]:
    return [json.dumps([number] * 20_000) for number in range(WRITERS)]


def test_writers_with_one_process_number_never_tear_a_file(tmp_path: Path) -> None:
    """As processes of two nodes may have it; here threads."""
    path = tmp_path / "outcome.json"
    for _ in range(10):
        with ThreadPoolExecutor(WRITERS) as threads:
            list(threads.map(lambda text: write_whole(path, text), texts()))
        assert path.read_text() in texts()
    assert [p.name for p in tmp_path.iterdir()] == ["outcome.json"]


def test_what_is_refused_halfway_leaves_neither_file_nor_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for folder in ("kept", "new", "new/inner"):
        with (
            pytest.raises(ValueError, match="refused"),
            writing_whole(tmp_path / folder / "steps.csv") as file,
        ):
            file.write("half")
            raise ValueError("refused")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_bytes(b"\xff\xfe")
    write_if_changed(file, "é\n")
    assert file.read_text(encoding="utf-8") == "é\n"


def test_the_first_of_several_writers_wins(tmp_path: Path) -> None:
    for attempt in range(10):
        path = tmp_path / f"{attempt}.json"
        with ThreadPoolExecutor(WRITERS) as threads:
            won = list(threads.map(create_whole, [path] * WRITERS, texts()))
        assert won.count(True) == 1
        assert path.read_text() == texts()[won.index(True)]
    assert len(list(tmp_path.iterdir())) == 10


def test_without_hard_links_the_first_writer_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert create_whole(tmp_path / "file", "first")
    assert not create_whole(tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    """The limit on a file's size fails a write as a full disk does."""
    program = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from lowband.spec.files import write_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n"
        "    write_whole(Path(sys.argv[1]), 'x' * 2_000_000)\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    path = tmp_path / "file"
    write_whole(path, "old")
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == f"[Errno {errno.EFBIG}] File too large: '{path}'\n", done.stderr
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
