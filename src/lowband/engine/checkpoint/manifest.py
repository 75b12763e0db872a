"""The manifest of a checkpoint: what it holds, where, and the sums by which damage is found.

A checkpoint is a folder with one file of plain values per rank, `rank-00003.bin`, and `manifest.json`. The
manifest lists every logical tensor with its dtype, its shape and the chunks of its flattened values, the sum
of every file, and a sum of its own content. Nothing in a checkpoint is code, and nothing is unpickled: one
from a stranger can be refused, but it cannot run anything.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, field_validator

from lowband.errors import UserError
from lowband.spec.yaml_model import Strict

MANIFEST = "manifest.json"
FORMAT = 2  # 1 was written by torch.distributed.checkpoint
MOST_STEPS = 99_999_999  # eight digits: names of folders sort as their steps do

Number = bool | int | float | None


class Damaged(UserError):
    """A file of a checkpoint is missing or not as it was written. An older checkpoint may be whole."""


class Chunk(NamedTuple):
    """A contiguous range of a flattened tensor: elements `start` to `start + length`.

    They lie in the file of `rank`, from the byte `offset` on.
    """

    rank: NonNegativeInt
    offset: NonNegativeInt
    start: NonNegativeInt
    length: NonNegativeInt


class Saved(Strict):
    """A logical tensor.

    sharded: whether ranks hold ranges of it, those of the parameter; otherwise every rank holds all of it
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    sharded: bool
    chunks: tuple[Chunk, ...] = ()

    @field_validator("dtype")
    @classmethod
    def _is_dtype(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError("is not a dtype of torch")
        return name

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Group(Strict):
    """A param group of the optimizer: its parameters' names and its options, e.g. `lr`."""

    parameters: tuple[str, ...]
    options: dict[str, Any]


class Content(Strict):
    """The part of a manifest that all ranks must agree on before they write.

    optimizer: full name of its class
    numbers:   optimizer states that are Python numbers, named as tensors are
    """

    step: int = Field(ge=0, le=MOST_STEPS)
    optimizer: str
    groups: tuple[Group, ...]
    tensors: dict[str, Saved]
    numbers: dict[str, Number]

    def sum(self) -> str:
        return _sum(self.model_dump())


class File(Strict):
    """Bytes and sum of one rank's file."""

    bytes: NonNegativeInt
    sha256: str


class Manifest(Content):
    """The whole manifest.

    Tensors are named `model.NAME`, `optimizer.KEY.NAME`, `buffer.NAME` and `rng.DEVICE.RANK`.

    files:  by rank
    extra:  the caller's own data, as JSON reads it back
    sha256: of everything else in the manifest
    """

    format: Literal[2]
    extra: dict[str, Any]
    files: tuple[File, ...]
    sha256: str

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a checkpoint.

        Raises Damaged if it is missing, is not as it was written, or lies in the folder of another step;
        UserError if another version of lowband wrote it.
        """
        path = folder / MANIFEST
        try:
            plain = json.loads(path.read_bytes())
            return cls._checked(plain, folder)
        except OSError as error:
            raise Damaged(f"cannot be read: {error.strerror}", where=path) from None
        except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, too deep, too many digits
            raise Damaged(f"is damaged: {str(error).splitlines()[0][:100]}", where=path) from None

    @classmethod
    def _checked(cls, plain: Any, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        if not isinstance(plain, dict) or not isinstance(plain.get("sha256"), str):  # of format 1: a dict
            raise Damaged("is damaged, or an earlier version of lowband wrote it: it has no sum", where=path)
        if plain.pop("sha256") != (expected := _sum(plain)):
            raise Damaged("is damaged: its content does not have its sum", where=path)
        if plain.get("format") != FORMAT:
            raise UserError(
                f"has format {plain.get('format')!r:.20}: another version of lowband wrote it",
                where=path,
                allowed=str(FORMAT),
            )
        try:
            manifest = cls.parse(plain | {"sha256": expected}, path)
        except UserError as error:
            raise Damaged(error.what, where=path) from None
        if folder.name != folder_name(manifest.step):
            raise Damaged(
                f"is of step {manifest.step}", where=path, allowed=f"in a folder {folder_name(manifest.step)}"
            )
        for name, saved in manifest.tensors.items():
            manifest._check_chunks(name, saved, path)
        return manifest

    def _check_chunks(self, name: str, saved: Saved, path: Path) -> None:
        """Raise Damaged unless the chunks are the whole tensor, none of it twice, and within the files."""
        end = 0
        for chunk in sorted(saved.chunks, key=lambda chunk: chunk.start):
            if chunk.start != end or chunk.rank >= len(self.files):
                raise Damaged(f"'{name}' is not whole", where=path)
            end += chunk.length
            if chunk.offset + chunk.length * saved.torch_dtype.itemsize > self.files[chunk.rank].bytes:
                raise Damaged(f"'{name}' reaches beyond {file_name(chunk.rank)}", where=path)
        if end != saved.numel:
            raise Damaged(f"'{name}' is not whole", where=path)


def write_manifest(folder: Path, content: Content, extra: dict[str, Any], files: list[File]) -> None:
    """extra: as JSON can hold it."""
    plain = {"format": FORMAT, **content.model_dump(), "extra": extra}
    plain["files"] = [file.model_dump() for file in files]
    with (folder / MANIFEST).open("w", encoding="ascii") as file:
        json.dump(plain | {"sha256": _sum(plain)}, file)
        file.flush()
        os.fsync(file.fileno())


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def _sum(plain: dict[str, Any]) -> str:
    """sha256 of the content; spaces and the order of keys do not change it."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode("ascii")).hexdigest()
