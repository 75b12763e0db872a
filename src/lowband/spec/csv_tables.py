"""How the report reads and writes its tables: CSV at full precision, whole files."""

import hashlib
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from lowband.errors import UserError
from lowband.spec.files import write_whole
from lowband.spec.kernel_rows import TEXT

# Columns whose type cannot be inferred from a table without rows, or from one with an unlucky hash.
_TYPES = {
    **dict.fromkeys(("is_quantized", "is_warmup"), bool),
    **dict.fromkeys(("seq_len", "global_batch", "repeat", "ranks", "step"), int),
    **dict.fromkeys(
        ("counted_bytes", "closed_form_bytes", "held_bytes", "difference_bytes", "outside_bytes"), float
    ),
    **dict.fromkeys(("step_time_s", "exposed_comm_time_s", "hidden_comm_time_s", "tokens_per_s"), float),
    **dict.fromkeys(("loss", "loss_difference"), float),
    **dict.fromkeys(
        ("weights_sha256", "data_sha256", "commit", "notes", "cause", "paper", "printed", "values"), str
    ),
    **dict.fromkeys(("device", "compiler", "flags", "torch"), str),
    **dict.fromkeys(("point", "point_ours", "point_peer", "machine_sum", "model_sum", "scheme_sum"), str),
}


_OF_BENCHMARKS = dict.fromkeys(TEXT, str)
_kept: list[dict[tuple[Path, int], pd.DataFrame]] = []  # of each `read_once` that lasts


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, each table is read at most once, however often it is asked for: no file may change meanwhile.

    Each time it is a frame of its own, whose values are copied when it is changed (pandas' copy on write).
    """
    _kept.append({})
    try:
        yield
    finally:
        _kept.pop()


def read_table(path: Path) -> pd.DataFrame:
    """The table, with floats as they were written. Raises UserError if the file does not exist.

    Only an empty field is a missing value: `nan` is one of the ways in which a run can end.
    """
    return _read(path, _TYPES)


def read_benchmark(path: Path) -> pd.DataFrame:
    """The rows of a kernels.csv; fields that do not apply to a kernel are empty."""
    return _read(path, _OF_BENCHMARKS)


def read_published(path: Path) -> pd.DataFrame:
    """A table of results/reported/ with every cell as text, which keeps each number as it was printed."""
    return _read(path, str).fillna("")


def _read(path: Path, types: Any) -> pd.DataFrame:
    if not _kept:
        return _parsed(path, types)
    kept, key = _kept[-1], (path, id(types))
    if key not in kept:
        kept[key] = _parsed(path, types)
    return kept[key].copy(deep=False)


def _parsed(path: Path, types: Any) -> pd.DataFrame:
    if not os.path.isfile(path):  # noqa: PTH113  False, too, for a name that no system takes
        raise UserError(
            "no such table", where=path, allowed="what `lowband collect` and `lowband table` write"
        )
    try:
        return pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=types)
    except (ValueError, OverflowError) as error:  # pandas' ParserError is a ValueError
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"no such table: {reason}", where=path, allowed="CSV with a header") from None


# What pandas raises for a table that lacks a column or has another kind of value in it.
_UNFIT = (
    KeyError, NameError, ValueError, TypeError, IndexError, AttributeError, ArithmeticError,
    NotImplementedError, SyntaxError, pd.errors.DataError, pd.errors.InvalidIndexError,
)  # fmt: skip


@contextmanager
def made_of(tables: Path) -> Iterator[None]:
    """Work on the tables of a folder, or on one: what they lack for it is a UserError with the line at fault.

    Tables have no schema but the code that reads them: whatever it raises on rows is about the rows.
    """
    try:
        yield
    except _UNFIT as error:
        last = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in last if "lowband" in Path(frame.filename).parts] or last
        reason = (str(error).strip().splitlines() or [""])[0]
        line = f"{Path(mine[-1].filename).name}:{mine[-1].lineno}"
        raise UserError(
            f"cannot be used: {type(error).__name__}: {reason} ({line})",
            where=tables,
            allowed="tables that lowband wrote",
        ) from error


def write_csv(df: pd.DataFrame, path: Path) -> None:
    write_whole(path, df.to_csv(index=False, lineterminator="\n"))


def sha256(path: Path) -> str:
    """SHA-256 of the file's bytes, as `sha256sum` prints it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
