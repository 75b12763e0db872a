"""The manifest of a checkpoint: its content, where each part is, and the checksums that reveal damage.

A checkpoint is a folder with one file of plain values per rank, `rank-00003.bin`, and `manifest.json`. The
manifest lists every logical tensor with its dtype, its shape and the chunks of its flattened values, the
checksum of every file, and a checksum of its own content. Nothing in a checkpoint is code, and nothing is
unpickled: a checkpoint from an untrusted source can be refused, but it cannot run anything.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from lowband.engine.units.slice_of import SliceOf
from lowband.errors import UserError
from lowband.spec.yaml_model import Strict

MANIFEST = "manifest.json"
FORMAT = 2  # format 1 was written by torch.distributed.checkpoint
EXTRA = "extra."  # before the name of a module whose extra state it is
MOST_STEPS = 99_999_999  # eight digits: names of folders sort as their steps do

Number = bool | int | float | None


class Damaged(UserError):
    """A file of a checkpoint is missing or damaged. An older checkpoint may be undamaged."""


class Chunk(NamedTuple):
    """A contiguous range of a flattened tensor: elements `start` to `start + length`.

    The elements are in the file of `rank`, from byte `offset` on.
    """

    rank: NonNegativeInt
    offset: NonNegativeInt
    start: NonNegativeInt
    length: NonNegativeInt


class Cut(Strict):
    """How tensor ranks divide a parameter: units.slice_of.SliceOf, without whose slice it is."""

    shape: tuple[NonNegativeInt, ...]
    dim: NonNegativeInt
    parts: PositiveInt
    ranks: PositiveInt

    def of(self, place: int) -> SliceOf:
        return SliceOf(torch.Size(self.shape), self.dim, self.parts, place, self.ranks)


class Saved(Strict):
    """A logical tensor, or one of several slices that make it up.

    sharded: whether each rank holds its parameter's range; otherwise every rank holds the whole tensor
    cut:     what it is a slice of; those of other tensor ranks have names of their own, see `of_slice`
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    sharded: bool
    chunks: tuple[Chunk, ...] = ()
    cut: Cut | None = None

    @model_serializer(mode="wrap")
    def _without_cut(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `cut` where there is none, as earlier versions wrote and read it."""
        values: dict[str, Any] = handler(self)
        return values if self.cut is not None else {k: v for k, v in values.items() if k != "cut"}

    @model_validator(mode="after")
    def _has_slices_shape(self) -> "Saved":
        cut = self.cut
        if cut is not None and not self.sharded:
            raise ValueError("is cut, and not sharded")
        if cut is not None and (cut.dim >= len(cut.shape) or cut.shape[cut.dim] % (cut.parts * cut.ranks)):
            raise ValueError("is cut along a dimension that cannot be divided so")
        if cut is not None and self.shape != tuple(
            n // cut.ranks if i == cut.dim else n for i, n in enumerate(cut.shape)
        ):
            raise ValueError("does not have the shape of a slice")
        return self

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the logical tensor."""
        return self.shape if self.cut is None else self.cut.shape

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


def of_slice(name: str, place: int) -> str:
    """The name of a tensor rank's slice, given that of the first one's, which is the logical tensor's."""
    return f"{name}@{place}" if place else name


class Group(Strict):
    """A param group of the optimizer: its parameters' names and its options, e.g. `lr`.

    An optimizer of `named_parameters()` has their names among its options, which are of its stage alone.
    """

    parameters: tuple[str, ...]
    options: dict[str, Any]

    @field_validator("options")
    @classmethod
    def _without_names(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key != "param_names"}


class Content(Strict):
    """The part of a manifest that all ranks must agree on before they write.

    optimizer: full name of the optimizer's class
    numbers:   optimizer states that are Python numbers, under the same kind of names as tensors
    """

    model_config = ConfigDict(allow_inf_nan=True)  # of `numbers`: an optimizer may keep an infinite minimum

    step: int = Field(ge=0, le=MOST_STEPS)
    optimizer: str
    groups: tuple[Group, ...]
    tensors: dict[str, Saved]
    numbers: dict[str, Number]

    def sum(self) -> str:
        """A checksum, but of how long extra states are: rank 0's are saved; others may have noted more."""
        any_length = {
            name: each.model_copy(update={"shape": ()}) if name.startswith(EXTRA) else each
            for name, each in self.tensors.items()
        }
        return _sum(self.model_copy(update={"tensors": any_length}).model_dump())


class File(Strict):
    """Size and checksum of one rank's file."""

    bytes: NonNegativeInt
    sha256: str


class Manifest(Content):
    """The whole manifest.

    Tensors are named `model.NAME`, `optimizer.KEY.NAME`, `buffer.NAME`, `extra.NAME` and `rng.DEVICE.RANK`,
    with the degrees of axes beside data behind it (`rng.cpu.0.tensor2`); of replicas that meet seldom,
    `replica.1.model.NAME` and so on, `sync.anchor.NAME`, `sync.outer.NAME`, `sync.update.NAME` and
    `sync.steps`. Of a parameter that tensor ranks divide, `model.NAME` is the first one's slice,
    `model.NAME@1` the second one's, and so on.

    files:  size and checksum of each rank's file, by rank
    extra:  the caller's own data, as JSON reads it back
    sha256: checksum of everything else in the manifest
    """

    format: Literal[2]
    extra: dict[str, Any]
    files: tuple[File, ...]
    sha256: str

    @property
    def firsts(self) -> dict[str, Saved]:
        """The tensors without the slices of any but the first tensor rank."""
        others = {
            of_slice(name, place)
            for name, saved in self.tensors.items()
            if saved.cut is not None
            for place in range(1, saved.cut.ranks)
        }
        return {name: saved for name, saved in self.tensors.items() if name not in others}

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a checkpoint.

        Raises Damaged if it is missing, damaged or in the folder of another step, UserError if another
        version of lowband wrote it.
        """
        path = folder / MANIFEST
        try:
            plain = json.loads(path.read_bytes())
            return cls._checked(plain, folder)
        except OSError as error:
            raise Damaged(f"cannot be read: {error.strerror}", where=path) from None
        except (ValueError, RecursionError) as error:  # not UTF-8 or JSON, too deep, too many digits
            raise Damaged(f"is damaged: {str(error).splitlines()[0][:100]}", where=path) from None

    @classmethod
    def _checked(cls, plain: Any, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        if not isinstance(plain, dict) or not isinstance(plain.get("sha256"), str):  # format 1: a dict
            raise Damaged(
                "is damaged, or an earlier version of lowband wrote it: it has no checksum", where=path
            )
        if plain.pop("sha256") != (expected := _sum(plain)):
            raise Damaged("is damaged: its content does not match its checksum", where=path)
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
        if folder.name not in (folder_name(manifest.step), replaced_name(manifest.step)):
            raise Damaged(
                f"belongs to step {manifest.step}", where=path, allowed=f"folder {folder_name(manifest.step)}"
            )
        for name, saved in manifest.tensors.items():
            manifest._check_chunks(name, saved, path)
            if saved.cut is not None and saved.cut.ranks > len(manifest.tensors):  # `firsts` would list them
                raise Damaged(f"'{name}' has more slices than there are tensors", where=path)
        for name, saved in manifest.firsts.items():
            for place in range(1 if saved.cut is None else saved.cut.ranks):
                other = manifest.tensors.get(of_slice(name, place))
                if other is None or (other.cut, other.dtype) != (saved.cut, saved.dtype):
                    raise Damaged(f"'{name}' lacks slice {place}", where=path)
        return manifest

    def _check_chunks(self, name: str, saved: Saved, path: Path) -> None:
        """Raise Damaged unless the chunks cover the tensor exactly once and are within their files."""
        end = 0
        for chunk in sorted(saved.chunks, key=lambda chunk: chunk.start):
            if chunk.start != end or chunk.rank >= len(self.files):
                raise Damaged(f"'{name}' is not covered exactly once", where=path)
            end += chunk.length
            if chunk.offset + chunk.length * saved.torch_dtype.itemsize > self.files[chunk.rank].bytes:
                raise Damaged(f"'{name}' extends beyond {file_name(chunk.rank)}", where=path)
        if end != saved.numel:
            raise Damaged(f"'{name}' is not covered exactly once", where=path)


def write_manifest(folder: Path, content: Content, extra: dict[str, Any], files: list[File]) -> None:
    """Write `manifest.json` and sync it. extra: must be representable in JSON."""
    plain = {"format": FORMAT, **content.model_dump(), "extra": extra}
    plain["files"] = [file.model_dump() for file in files]
    with (folder / MANIFEST).open("w", encoding="ascii") as file:
        json.dump(plain | {"sha256": _sum(plain)}, file)
        file.flush()
        os.fsync(file.fileno())


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def replaced_name(step: int) -> str:
    """Of a checkpoint that another one of its step is about to replace."""
    return f".{folder_name(step)}.replaced"


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def _sum(plain: dict[str, Any]) -> str:
    """sha256 of the content, independent of whitespace and of the order of keys."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode("ascii")).hexdigest()
