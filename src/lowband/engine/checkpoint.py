"""Checkpoints that fit any scheme, rank count and level sizes.

What is saved are logical tensors, under the module's own names: every parameter and every per-element
optimizer state, flattened, each rank writing the ranges that it owns. torch.distributed.checkpoint (DCP) cuts
them anew when they are loaded into other ranges. Of persistent buffers (running statistics and the like)
rank 0's are saved, and every rank gets them. The states of the random number generators, of the CPU and of
the rank's device, follow the ranks: they are restored where the number of ranks is the same.

A checkpoint is a folder `step-00000010`. It is written as `.step-00000010.writing`, gets a manifest with the
sha256 of every file, and is renamed when it is whole: an interrupted write never harms an earlier one.
"""

import hashlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from lowband.engine.api import engine_of
from lowband.engine.logical import LogicalSlice
from lowband.errors import UserError
from lowband.spec.partition import intersect

MANIFEST = "manifest.json"
KEPT = 2  # the newest whole checkpoints; older ones are removed


class Checkpointer:
    """Saves and loads a sharded module and its optimizer. Every rank must make the same calls.

    folder:    on a file system that all ranks see
    timeout_s: how long a rank waits for the others to write or to hash
    """

    def __init__(self, folder: Path, timeout_s: float = 1800) -> None:
        self.folder = folder
        # Of its own, so that a save in the background never meets the training's messages.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.stall_s = 0.0  # time that the last `save` kept its caller

    def save(
        self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]
    ) -> None:
        """Copy the state, then write it in the background; `wait` returns when it is whole.

        extra: anything that JSON can hold, e.g. the place in the data
        """
        start = time.perf_counter()
        self.wait()
        state = {name: _copy(value) for name, value in _state(module, optimizer)}
        if dist.get_rank() == 0:
            state |= {name: _copy(buffer) for name, buffer in _buffers(module)}
        state |= _rng(module)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        manifest = {
            "step": step,
            "ranks": dist.get_world_size(),
            "optimizer_groups": groups,
            "extra": extra,
        }
        json.dumps(manifest)  # raises here, on every rank, what JSON cannot hold
        self._writer = threading.Thread(target=self._write, args=(step, state, manifest), daemon=True)
        self._writer.start()
        self.stall_s = time.perf_counter() - start

    def wait(self) -> None:
        """Return when the last save is whole. Raises what it raised."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        return max(self.folder.glob("step-*"), default=None)

    def load(self, path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Fill module and optimizer in place; returns the `extra` that was saved.

        The optimizer may be new: its states are made as the checkpoint has them.
        Raises UserError, naming the file, if one is missing or damaged or fits another model.
        """
        manifest = self._on_first(lambda: _verify(path))
        reader = dcp.FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {}
        buffers = dict(_buffers(module))
        for name, value in [*_state(module, None), *((name, _copy(b)) for name, b in buffers.items())]:
            entry = stored.get(name)
            if not isinstance(entry, TensorStorageMetadata) or entry.size != value.size():
                found = "it is not there" if entry is None else f"it has {list(entry.size)} values"  # type: ignore[union-attr]
                here = math.prod(value.size())
                raise UserError(f"'{name}' has {here} values, in the checkpoint {found}", where=path)
            state[name] = value
        states = list(_new_optimizer_states(module, optimizer, stored))
        state |= {name: piece for name, _, _, piece in states}
        if manifest["ranks"] == dist.get_world_size():  # random numbers follow the ranks
            state |= {name: value for name, value in _rng(module).items() if name in stored}
        dcp.load(state, storage_reader=reader, process_group=self._group)
        for name, shard, key, piece in states:
            if not isinstance(piece, LogicalSlice):
                optimizer.state[shard][key] = state[name]
        for group, saved in zip(optimizer.param_groups, manifest["optimizer_groups"], strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        for name, buffer in buffers.items():
            buffer.copy_(state[name])
        _set_rng(module, state)
        extra: dict[str, Any] = manifest["extra"]
        return extra

    def _write(self, step: int, state: dict[str, Any], manifest: dict[str, Any]) -> None:
        final = self.folder / f"step-{step:08d}"
        writing = self.folder / f".{final.name}.writing"

        def begin() -> None:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)

        def finish() -> None:
            files = sorted(p for p in writing.iterdir() if p.is_file())
            whole = manifest | {"sha256": {p.name: _sha256(p) for p in files}}
            (writing / MANIFEST).write_text(json.dumps(whole, indent=2), encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            writing.replace(final)
            for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)

        try:
            self._on_first(begin)
            dcp.save(state, storage_writer=dcp.FileSystemWriter(writing), process_group=self._group)
            self._on_first(finish)
        except BaseException as error:  # told by the next `wait`
            self._failure = error

    def _on_first(self, work: Callable[[], Any]) -> Any:
        """What `work` returns on rank 0, which alone does it; what it raises there, every rank raises."""
        told: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                told[0] = work()
            except Exception as error:  # the others wait to hear of it
                is_sent_whole = isinstance(error, (UserError, OSError))
                told[1] = error if is_sent_whole else RuntimeError(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list(told, src=0, group=self._group)
        result, failure = told
        if failure is not None:
            raise failure
        return result


def _state(
    module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, "LogicalSlice | Any"]]:
    """(name, value) of what this rank holds: of every parameter, and of each of its optimizer states."""
    for name, shard, piece in _pieces(module):
        yield f"model.{name}", piece
        for key, value in optimizer.state.get(shard, {}).items() if optimizer is not None else ():
            full = f"optimizer.{name}.{key}"
            if isinstance(value, torch.Tensor) and value.shape == shard.shape:
                yield full, _like(piece, value)
            else:
                yield full, value  # a counter: the same on every rank


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of every persistent buffer."""
    kept = module.state_dict()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in kept:
            yield f"buffer.{name}", buffer


def _rng(module: nn.Module) -> dict[str, torch.Tensor]:
    """States of this rank's random number generators."""
    device, rank = engine_of(module).device, dist.get_rank()
    states = {f"rng.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.{device.type}.{rank}"] = torch.cuda.get_rng_state(device)
    return states


def _set_rng(module: nn.Module, states: dict[str, Any]) -> None:
    device, rank = engine_of(module).device, dist.get_rank()
    if f"rng.{rank}" in states:
        torch.set_rng_state(states[f"rng.{rank}"])
    if f"rng.{device.type}.{rank}" in states:
        torch.cuda.set_rng_state(states[f"rng.{device.type}.{rank}"], device)


def _copy(value: Any) -> Any:
    """What the training may change while the copy is written."""
    if isinstance(value, LogicalSlice):
        local = value._plain().to("cpu", copy=True)
        return LogicalSlice.of(local, value._start, value._numel, value._writes)
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _pieces(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, LogicalSlice]]:
    """(name, optimizer shard, logical slice of it) for every parameter."""
    engine = engine_of(module)
    engine.put_shards()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    levels = engine.topology.levels
    # Beyond the optimizer's level ranks hold copies: those of the first group write.
    writes = engine.topology.rank < levels.size(engine.scheme.optim)
    for unit in engine.units:
        first, last = unit.optim_range
        for shard, (start, stop) in zip(unit.shards, unit.layout.ranges(), strict=True):
            a, b = intersect((start, stop), (first, last))
            local = shard.detach()[: b - a]  # without the padding behind
            yield names[id(shard)], shard, LogicalSlice.of(local, a - start, stop - start, writes)


def _like(piece: LogicalSlice, values: torch.Tensor) -> LogicalSlice:
    """The same range of another tensor that is sharded as the parameter is."""
    return LogicalSlice.of(values[: piece._plain().numel()], piece._start, piece._numel, piece._writes)


def _new_optimizer_states(
    module: nn.Module, optimizer: torch.optim.Optimizer, stored: dict[str, Any]
) -> Iterator[tuple[str, nn.Parameter, str, Any]]:
    """(name, shard, key, value to load into) for every optimizer state that the checkpoint has.

    States of a shard's shape are made here, padding included; DCP fills the part that is the parameter's.
    """
    by_name = {name: (shard, piece) for name, shard, piece in _pieces(module)}
    group_of = {id(shard): group for group in optimizer.param_groups for shard in group["params"]}
    for full, entry in stored.items():
        if not full.startswith("optimizer."):
            continue
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        if name not in by_name:
            continue
        shard, piece = by_name[name]
        if isinstance(entry, BytesStorageMetadata):
            yield full, shard, key, None
        elif entry.size == piece.size():
            values = torch.zeros_like(shard, dtype=entry.properties.dtype)
            optimizer.state[shard][key] = values
            yield full, shard, key, _like(piece, values)
        else:
            # A step count, which fused and capturable optimizers keep on the device.
            group = group_of.get(id(shard), {})
            is_on_device = group.get("fused") or group.get("capturable")
            device = shard.device if is_on_device else torch.device("cpu")
            yield full, shard, key, torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _verify(path: Path) -> dict[str, Any]:
    """The manifest, if every file is as it was written."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        raise UserError("is missing or damaged", where=path / MANIFEST) from None
    for name, expected in manifest["sha256"].items():
        file = path / name
        if not file.is_file() or _sha256(file) != expected:
            raise UserError("is missing or damaged: its sha256 is not the manifest's", where=file)
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
