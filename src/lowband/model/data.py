"""Real text without a download, in batches that do not depend on the number of ranks."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lowband.errors import UserError

STDLIB = "stdlib"  # the name of the default text: the Python standard library's own sources
TRAIN_SHARE = 0.9  # fixed split: the first 90 % of tokens are for training, the rest for validation
# Left out, because Linux distributions move, strip or extend these folders.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """A stream of tokens.

    train, validation: 1D uint8 (bytes) or uint16 (a `.bin` file of tokens)
    vocab:             smallest vocabulary that contains every token
    facts:             source, tokens, sha256, split; recorded in env.json
    """

    train: npt.NDArray[np.unsignedinteger]
    validation: npt.NDArray[np.unsignedinteger]
    vocab: int
    facts: dict[str, str | int | float]


def read_corpus(text: str) -> Corpus:
    """Read `stdlib`, a text file (as bytes), or a nanoGPT-style `.bin` file of little-endian uint16 tokens.

    Raises UserError if the file is missing or too short to split.
    """
    if text == STDLIB:
        source, tokens = f"Python standard library {sysconfig.get_python_version()}", _stdlib_bytes()
    else:
        path = Path(text)
        if not path.is_file():
            raise UserError(
                f"no text file '{text}'", where="text", allowed=f"{STDLIB}, a text file, a .bin file"
            )
        source, raw = path.name, path.read_bytes()
        if path.suffix == ".bin" and len(raw) % 2:
            raise UserError("does not hold a whole number of 2-byte tokens", where=path)
        tokens = np.frombuffer(raw, dtype="<u2" if path.suffix == ".bin" else np.uint8)
    cut = int(len(tokens) * TRAIN_SHARE)
    if cut < 2 or len(tokens) - cut < 2:
        raise UserError(f"{len(tokens)} tokens are too few to split", where=text)
    facts: dict[str, str | int | float] = {
        "source": source,
        "tokens": len(tokens),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "train_share": TRAIN_SHARE,
    }
    vocab = 256 if tokens.dtype == np.uint8 else int(tokens.max()) + 1
    return Corpus(tokens[:cut], tokens[cut:], vocab, facts)


def _stdlib_bytes() -> npt.NDArray[np.uint8]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in root.rglob("*.py") if _SKIPPED.isdisjoint(p.relative_to(root).parts))
    ordered = sorted(files, key=lambda p: p.relative_to(root).as_posix())
    return np.frombuffer(b"".join(p.read_bytes() for p in ordered), dtype=np.uint8)


def batch(
    tokens: npt.NDArray[np.unsignedinteger],
    seed: int,
    step: int,
    first: int,
    count: int,
    of: int,
    seq_len: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sequences `first` to `first + count` of the `of` sequences in the global batch of `step`.

    A step's sequences depend on seed and step only, so any split over ranks trains on the same data.
    Returns inputs and targets (inputs shifted by one), each [count, seq_len] int64.
    Raises UserError if the tokens are too few for one sequence.
    """
    if len(tokens) <= seq_len:
        raise UserError(
            f"{len(tokens)} tokens are too few for a sequence of {seq_len} and its target", where="text"
        )
    starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - seq_len, size=of)
    rows = starts[first : first + count, None] + np.arange(seq_len + 1)
    sequences = tokens[rows].astype(np.int64)
    return sequences[:, :-1], sequences[:, 1:]
