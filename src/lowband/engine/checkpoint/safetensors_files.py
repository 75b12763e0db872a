"""Checkpoints of Hugging Face's layout: read by ranges into shards, and written unit by unit.

A checkpoint is a folder with `model.safetensors`, or with several files and `model.safetensors.index.json`,
whose "weight_map" names the file of each tensor (huggingface.co/docs/safetensors). The files are mapped into
memory, so a rank reads the rows that its shards need and nothing else.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.passes.engine import Engine, engine_of
from lowband.engine.passes.whole import units_gathered
from lowband.engine.transport.everyone import everyones, speaks_for_all
from lowband.engine.transport.lane import outside_of_modes
from lowband.engine.units.state_dict import own_buffers, refuse_sparse
from lowband.errors import UserError
from lowband.spec.files import write_whole
from lowband.spec.plain_data import parse_json, read_text

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Safetensors:
    """The `init` of `lowband.shard` for a module on the meta device, from the files of a checkpoint.

    folder:  of the checkpoint
    name_of: maps a parameter's name in the module to its name in the files; default: the same
    Raises UserError for a folder without a checkpoint, and in `lowband.shard` for a tensor that is missing or
    has another shape.
    """

    def __init__(self, folder: Path | str, name_of: Callable[[str], str] = str) -> None:
        self._folder, self._name_of = Path(folder), name_of
        index = self._folder / INDEX
        if index.is_file():
            self._file_of = _weight_map(index)
        elif (self._folder / SINGLE).is_file():
            with _opened(self._folder / SINGLE) as file:
                self._file_of = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise UserError("no checkpoint", where=self._folder, allowed=f"{SINGLE} or {INDEX}")

    @contextmanager
    def flat(self, name: str, shape: torch.Size) -> Iterator["FlatTensor"]:
        """The flattened tensor of a parameter, of which ranges can be read."""
        stored = self._name_of(name)
        if stored not in self._file_of:
            raise UserError(f"no tensor '{stored}'", where=self._folder, allowed="one for every parameter")
        path = self._folder / self._file_of[stored]
        with _opened(path) as file:
            rows = file.get_slice(stored)
            if tuple(rows.get_shape()) != tuple(shape):
                raise UserError(
                    f"'{stored}' has shape {tuple(rows.get_shape())}", where=path, allowed=str(tuple(shape))
                )
            yield FlatTensor(rows, shape)


class FlatTensor:
    """A tensor of a file, read by ranges of its flattened values: `flat[start:stop]`."""

    def __init__(self, rows: Any, shape: torch.Size) -> None:
        self._rows, self._width = rows, max(1, shape[1:].numel())
        self._is_scalar = not shape

    def __getitem__(self, part: slice) -> torch.Tensor:
        if self._is_scalar:
            return self._rows[...].reshape(1)[part]
        first, last = part.start // self._width, -(-part.stop // self._width)
        start = first * self._width
        return self._rows[first:last].reshape(-1)[part.start - start : part.stop - start]


@outside_of_modes()
def save_safetensors(
    module: nn.Module,
    folder: Path | str,
    dtype: torch.dtype = torch.float32,
    name_of: Callable[[str], str] = str,
) -> None:
    """Write the whole parameters and the persistent buffers as a checkpoint, a file per unit.

    dtype:   of the parameters in the files
    name_of: maps a parameter's name in the module to its name in the files; default: the same

    Every rank must call it; no rank holds more than a unit. Of a pipeline, a rank of each stage writes its
    files. A parameter with several names is written under its first. Raises UserError, on every rank, if the
    folder has a checkpoint already, if two tensors get one name, or if a file cannot be written; then those
    that were are removed.
    """
    engine, folder = engine_of(module), Path(folder)
    engine.axis.check_alone("save_safetensors", known=engine.other_ranks)
    is_writer = engine.is_first  # of a stage, in a pipeline
    taken = [is_writer and any((folder / name).exists() for name in (INDEX, SINGLE))]
    dist.broadcast_object_list(taken)
    if taken[0]:
        raise UserError("there is a checkpoint already", where=folder, allowed="a new folder")
    engine.put_shards()
    units = [unit for unit in engine.units if unit.tied is None or unit.tied.is_first]  # whose it writes
    names = {id(shard): name_of(shard.shard_of.name) for unit in units for shard in unit.shards}  # type: ignore[attr-defined]
    kept = own_buffers(module)
    buffers = {name_of(name): buffer for name, buffer in module.named_buffers() if name in kept}
    of_writers = everyones([*names.values(), *buffers] if is_writer else [])
    stored = Counter(name for of_writer in of_writers for name in of_writer)
    if twice := [name for name, count in stored.items() if count > 1]:
        raise UserError(f"two tensors are named '{twice[0]}'", where="name_of", allowed="a name for each")
    weight_map, failures, size = dict[str, str](), list[UserError](), 0
    has_buffers_alone = bool(is_writer and buffers and not units)  # a stage that has only others' parameters
    files_of = everyones(len(units) + has_buffers_alone if is_writer else 0)
    files, before = sum(files_of), sum(files_of[: engine.axis.rank])
    parts = _by_unit(engine, names if is_writer else {}, dtype)
    for i, tensors in enumerate(chain(parts, [{}] if has_buffers_alone else [])):
        path = folder / (SINGLE if files == 1 else f"model-{before + i + 1:05d}-of-{files:05d}.safetensors")
        if not failures:  # else it only takes the other units, which every rank must
            with _noting(failures, path):
                for name, buffer in buffers.items() if i == 0 else ():
                    refuse_sparse(name, buffer, where="save_safetensors")
                    tensors[name] = buffer.to("cpu", copy=True).contiguous()
                _save(tensors, path)
                weight_map |= dict.fromkeys(tensors, path.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    written = everyones((size, weight_map, failures))
    failures = [failure for _, _, of_writer in written for failure in of_writer]
    if speaks_for_all() and files > 1 and not failures:  # last: without it the folder is no checkpoint
        whole = {name: file for _, of_writer, _ in written for name, file in of_writer.items()}
        index = {"metadata": {"total_size": sum(size for size, _, _ in written)}, "weight_map": whole}
        with _noting(failures, folder / INDEX):
            write_whole(folder / INDEX, json.dumps(index, indent=2))
    if failures := [failure for of_rank in everyones(failures) for failure in of_rank]:
        for name in set(weight_map.values()):
            (folder / name).unlink(missing_ok=True)
        raise failures[0]


def _by_unit(engine: Engine, names: dict[int, str], dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Whole parameters, copied, of each unit that has any of these shards. names: by the shards' ids"""
    for parameters in units_gathered(engine):
        tensors = {
            names[id(shard)]: whole.to("cpu", dtype, copy=True)
            for shard, whole in parameters
            if id(shard) in names
        }
        if tensors:
            yield tensors


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file, which appears whole or not at all."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    try:
        save_file(tensors, unfinished, {"format": "pt"})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _noting(failures: list[UserError], path: Path) -> Iterator[None]:
    """Take note of an error in writing a file, which is raised later, on every rank."""
    from safetensors import SafetensorError

    try:
        yield
    except UserError as error:
        failures.append(error)
    except (SafetensorError, OSError, KeyError) as error:  # KeyError: of a dtype that the format has not
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        failures.append(UserError(f"cannot be written: {cause}", where=path))


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file, from an index. Files must lie in the index's own folder."""
    try:
        found = parse_json(read_text(index), index)["weight_map"]
        names = {str(name): str(file) for name, file in found.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not an index: {error}", where=index, allowed='{"weight_map": {...}}') from None
    for file in names.values():
        if Path(file).name != file or "\0" in file:
            raise UserError(f"file '{file}'", where=index, allowed="names of files in its folder")
    return names


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot be read: {error}", where=path, allowed="a safetensors file") from None
