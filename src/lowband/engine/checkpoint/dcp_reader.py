"""Checkpoints of torch.distributed.checkpoint (FSDP2, torchtitan), read by ranges without running code.

`.metadata` is a pickle that names every tensor, its chunks and where each chunk lies; a chunk is a file of
torch.save inside of a `.distcp` file (torch/distributed/checkpoint/filesystem.py). Names are those of the
module's state dict behind one prefix, `model.` or `app.model.`; the optimizer's are `state.NAME.KEY` and
`param_groups.GROUP.KEY` behind another, as `get_state_dict` writes them, flattened or not.
"""

import io
import re
from collections.abc import Collection
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from lowband.engine.checkpoint.manifest import Number
from lowband.engine.checkpoint.stored import HasObjects, Reader, Stored, load_plain, load_tensors
from lowband.engine.transport.everyone import warn
from lowband.errors import UserError

METADATA = ".metadata"
_BY_NUMBER = re.compile(r"(^|\.)(state|param_groups)\.\d+\.")  # of an optimizer that names no parameters
_CLASSES: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, kind): getattr(metadata, kind) for kind in metadata.__all__},
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
    ("pathlib", "PosixPath"): PurePosixPath,
    **{("torch", name): kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
}


class DcpReader(Reader):
    """
    names: of all parameters; they tell the prefix of the weights
    tied:  their other names
    Raises UserError for a checkpoint that has no weights, or several, of these names.
    """

    def __init__(self, folder: Path, names: list[str], tied: Collection[str] = ()) -> None:
        self.folder = folder
        found = load_plain(folder / METADATA, _CLASSES)
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise UserError("is not the metadata of a checkpoint", where=folder / METADATA)
        self._tensors, self._places = found.state_dict_metadata, found.storage_data
        self._model, self._asked = self._prefix(names), set(tied)
        self._optimizer, self._states = self._find_states(set(names))
        self.has_states = self._optimizer is not None
        self._groups = self._group_options()

    def tensor(self, name: str) -> Stored | None:
        self._asked.add(self._model + name)
        return self._stored(self._model + name)

    def states(self, name: str) -> dict[str, Stored | Number]:
        names = self._states.get(name, {})
        return {key: self._stored(full) or self._object(full) for key, full in names.items()}

    def options(self, name: str) -> dict[str, Any]:
        return self._groups.get(name, {})

    def extra(self) -> dict[str, Any]:
        """Of tensors only counts and random states: others may be as large as the model, on every rank. Where
        the weights' names have no prefix, theirs are those that `tensor` was asked for, and tied ones."""
        found, left = dict[str, Any](), []
        for name, of in self._tensors.items():
            if self._is_own(name):
                continue
            if isinstance(of, metadata.BytesStorageMetadata):
                try:
                    found[name] = self._object(name)
                except HasObjects:
                    left.append(name)
            elif (count := prod(of.size)) == 1 or of.properties.dtype == torch.uint8:
                found[name] = self._range(name, of, 0, count).reshape(tuple(of.size))
            else:
                left.append(name)
        if left:
            what = "tensors, and objects that need code to be read, are left out of what is returned"
            warn(f"{self.folder}: {what}: {len(left)}, as '{left[0]}'")
        return found

    def _is_own(self, name: str) -> bool:
        """Whether it is of the model or of the optimizer."""
        own = tuple(filter(None, (self._model, self._optimizer)))
        of_bare = self._optimizer == "" and name.startswith(("state.", "param_groups."))
        return name in self._asked or name.startswith(own or "\0") or of_bare or bool(_BY_NUMBER.search(name))

    def _prefix(self, names: list[str]) -> str:
        first = names[0]
        ends = [n for n in self._tensors if n == first or n.endswith(f".{first}")]
        prefixes = [end.removesuffix(first) for end in ends]
        whole = [prefix for prefix in prefixes if all(prefix + name in self._tensors for name in names)]
        if len(whole) != 1:
            missing = [n for n in names if not any(p + n in self._tensors for p in prefixes)]
            raise UserError(
                f"has weights of these names as {' and as '.join(whole)}" if whole else
                f"has no weights of '{(missing or names)[0]}' beside the others", where=self.folder,
                allowed="the module's own names behind one prefix",
            )  # fmt: skip
        return whole[0]

    def _find_states(self, names: set[str]) -> tuple[str | None, dict[str, dict[str, str]]]:
        """The prefix of the optimizer's names, None without one; by parameter and key the states' names."""
        found: dict[str, dict[str, dict[str, str]]] = {}
        for full in self._tensors:
            before, _, key = full.rpartition(".")
            for at in re.finditer(r"(?:^|(?<=\.))state\.", before):
                if (name := before[at.end() :]) in names:
                    found.setdefault(before[: at.start()], {}).setdefault(name, {})[key] = full
        if len(found) > 1:
            raise UserError(f"has states of {len(found)} optimizers", where=self.folder, allowed="one")
        return next(iter(found.items()), (None, {}))

    def _group_options(self) -> dict[str, dict[str, Any]]:
        """By parameter. A group is told by its number, and lists its parameters, or by each parameter."""
        if self._optimizer is None:
            return {}
        start, by_group = f"{self._optimizer}param_groups.", {}  # type: ignore[var-annotated]
        for full in self._tensors:
            group, _, key = full.removeprefix(start).rpartition(".")
            if full.startswith(start) and group:
                by_group.setdefault(group, {})[key] = self._value(full)
        found = {}
        for group, options in by_group.items():
            members = options.pop("params", None)
            for name in members if isinstance(members, list) else [group]:
                found[str(name)] = options
        return found

    def _value(self, full: str) -> Any:
        stored = self._stored(full)
        return stored.read(0, 1).item() if stored is not None and stored.shape == () else self._object(full)

    def _object(self, full: str) -> Any:
        """What DCP has kept as bytes."""
        path, data = self._bytes(metadata.MetadataIndex(full))
        return load_tensors(io.BytesIO(data), path)

    def _bytes(self, index: metadata.MetadataIndex) -> tuple[Path, bytes]:
        place = self._places.get(index)
        if not isinstance(place, filesystem._StorageInfo):
            raise UserError(f"has no place of '{index.fqn}'", where=self.folder / METADATA)
        if Path(str(place.relative_path)).name != place.relative_path or "\0" in place.relative_path:
            raise UserError(f"file {place.relative_path!r}", where=self.folder / METADATA)
        if place.transform_descriptors:
            raise UserError(f"'{index.fqn}' is compressed", where=self.folder, allowed="plain values")
        path = self.folder / place.relative_path
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=path) from None
        return path, data

    def _stored(self, full: str) -> Stored | None:
        of = self._tensors.get(full)
        if not isinstance(of, metadata.TensorStorageMetadata):
            return None

        def read(start: int, count: int) -> torch.Tensor:
            return self._range(full, of, start, count)

        return Stored(of.properties.dtype, tuple(of.size), read)

    def _range(self, full: str, of: metadata.TensorStorageMetadata, start: int, count: int) -> torch.Tensor:
        """Whole rows are put together from the chunks that have a part of them."""
        if not count:
            return torch.empty(0, dtype=of.properties.dtype)
        shape = tuple(of.size) or (1,)
        width = prod(shape[1:])
        first, last = start // width, -(-(start + count) // width)
        rows = torch.empty((last - first, *shape[1:]), dtype=of.properties.dtype)
        filled = 0
        for chunk in of.chunks:
            offsets, sizes = tuple(chunk.offsets) or (0,), tuple(chunk.sizes) or (1,)
            low, high = max(first, offsets[0]), min(last, offsets[0] + sizes[0])
            if low >= high or not prod(sizes):
                continue
            path, data = self._bytes(metadata.MetadataIndex(full, chunk.offsets))
            values = load_tensors(io.BytesIO(data), path)
            if not isinstance(values, torch.Tensor) or values.shape != chunk.sizes:
                raise UserError(f"a chunk of '{full}' has another shape than its metadata", where=path)
            part = values.reshape(sizes)[low - offsets[0] : high - offsets[0]]
            within = [slice(a, a + n) for a, n in zip(offsets[1:], sizes[1:], strict=True)]
            rows[(slice(low - first, high - first), *within)] = part
            filled += part.numel()
        if filled != rows.numel():
            raise UserError(f"'{full}' is not covered exactly once", where=self.folder / METADATA)
        return rows.reshape(-1)[start - first * width : start - first * width + count]
