"""Weights and Adam's states out of checkpoints of FSDP2 (DCP) and of DeepSpeed's ZeRO, into shards.

The reader's tensors are brought into the form of a manifest, and go the way of a checkpoint of our own: all
is checked and read before anything is changed.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowband.engine.checkpoint.dcp_reader import METADATA, DcpReader
from lowband.engine.checkpoint.deepspeed_reader import DeepSpeedReader, is_deepspeed
from lowband.engine.checkpoint.fit import check_fit, check_replicas
from lowband.engine.checkpoint.logical_tensors import Logical, buffers
from lowband.engine.checkpoint.manifest import FORMAT, Group, Manifest, Number, Saved
from lowband.engine.checkpoint.restore import check_none_waits, in_memory, new_states, overwrite, ranges
from lowband.engine.checkpoint.stored import Reader, Stored, read_as_damaged
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport.axis import world_timeout
from lowband.engine.transport.lane import outside_of_modes
from lowband.engine.transport.meeting import Meeting, Tick
from lowband.errors import UserError

ADAM = (torch.optim.Adam, torch.optim.AdamW)
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
# Options that a loaded group takes over, and those that must be the same already.
TAKEN = ("lr", "betas", "eps", "weight_decay", "initial_lr")
SAME = ("amsgrad", "maximize", "decoupled_weight_decay")
_EXACT = (torch.float32, torch.bfloat16, torch.float16)  # fp32 holds each of their values


@outside_of_modes()
def load_peer_checkpoint(
    folder: str | Path, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Fill a sharded module and its Adam from a checkpoint of FSDP2 (DCP) or of DeepSpeed's ZeRO 1 to 3.

    folder:    of `dcp.save`, or of DeepSpeed's `save_checkpoint`, on a file system that all ranks see
    optimizer: torch's Adam or AdamW; its groups take over learning rate, betas, eps and weight decay. None:
               only the weights are read

    Weights are exactly those of the checkpoint (DeepSpeed's: of its fp32 copy), whatever ranks wrote it and
    read it. Returns what was saved beside model and optimizer: counters, random states, the client's state;
    of DCP's other tensors, and objects that only code reads, there is a warning. Every rank must call it. No
    code in a checkpoint is ever run, and DeepSpeed need not be installed.
    Raises UserError on a topology with other axes than data, and for a checkpoint that is damaged, does not
    fit the module, or has an optimizer's states that are not Adam's. In that case nothing is changed, on any
    rank.
    """
    engine = engine_of(module)
    meeting = Meeting(world_timeout().total_seconds())
    path = meeting.everyone(Path(folder))[0]
    used = torch.optim.SGD(module.parameters(), lr=0.0) if optimizer is None else optimizer

    def check() -> tuple[Reader, Logical, Manifest, dict[str, Any]]:
        check_none_waits(module, "load_peer_checkpoint")
        if optimizer is not None and type(optimizer) not in ADAM:
            raise UserError(
                f"is {type(optimizer).__name__}", where="optimizer", allowed="torch's Adam or AdamW, or None"
            )
        engine.axis.check_alone("load_peer_checkpoint")
        if engine.experts is not None:
            what = "experts are spread over ranks, and a peer's checkpoint has all of a layer in one tensor"
            raise UserError(what, where="load_peer_checkpoint", allowed="a module without spread_experts")
        here = Logical.of(module, used)
        with read_as_damaged(path):
            tied = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            reader = _reader(path, list(here.shards), tied)
            manifest = _manifest(reader, here, list(buffers(module)), has_optimizer=optimizer is not None)
            extra = reader.extra()
        check_replicas(manifest, path, here)
        check_fit(manifest, path, here, {})
        if engine.replicas is not None:
            engine.replicas.check_alone("a checkpoint is loaded after it was made", "before lowband.Quorum")
        return reader, here, manifest, extra

    def read(tick: Tick) -> dict[str, torch.Tensor]:
        values = {}
        for name, wanted in ranges(manifest, here, {}).items():
            with read_as_damaged(path):
                found = _stored(reader, name).read(wanted.start, wanted.count)
                values[name] = found.to(manifest.tensors[name].torch_dtype)
            tick()
        return values

    if optimizer is None and engine.on_disk():
        what = "states are on a disk, with the weights, between an optimizer's steps"
        raise UserError(what, where="load_peer_checkpoint", allowed="the optimizer, too")
    with in_memory(meeting, module, used, writes=True):
        reader, here, manifest, extra = meeting.agree(check)
        values = meeting.together(f"reading {path}", read)
        made = meeting.agree(lambda: new_states(manifest, here))
        with torch.no_grad():
            overwrite(manifest, values, made, here, {}, module, used, engine.device)
    return extra


def is_peers(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint that `load_peer_checkpoint` reads."""
    return (folder / METADATA).is_file() or is_deepspeed(folder)


def _reader(folder: Path, names: list[str], tied: list[str]) -> Reader:
    if (folder / METADATA).is_file():
        return DcpReader(folder, names, tied)
    if is_deepspeed(folder):
        return DeepSpeedReader(folder)
    raise UserError(
        "no checkpoint", where=folder, allowed="a folder of dcp.save or of DeepSpeed's save_checkpoint"
    )


def _manifest(reader: Reader, here: Logical, kept: list[str], has_optimizer: bool) -> Manifest:
    """The checkpoint as one of ours would have it. kept: the module's buffers, by name in a manifest"""
    if has_optimizer and not reader.has_states:
        what = "has no optimizer's states under the parameters' names, as `get_state_dict` gives them"
        raise UserError(what, where=reader.folder, allowed="optimizer=None for the weights alone")
    tensors, numbers = {}, dict[str, Number]()
    for name, piece in here.parameters.items():
        tensors[f"model.{name}"] = _saved(_tensor(reader, name), piece.shape, True, name, reader.folder)
        for key, value in _states(reader, name, has_optimizer).items():
            full = f"optimizer.{key}.{name}"
            if not isinstance(value, Stored):
                tensors[full] = Saved(dtype="float32", shape=(), sharded=False)
                continue
            shape = () if key == "step" else piece.shape
            tensors[full] = _saved(value, shape, key != "step", full, reader.folder)
    for name in kept:
        mine = here.pieces[name].saved
        found = _tensor(reader, name.removeprefix("buffer."))
        tensors[name] = _saved(found, mine.shape, False, name, reader.folder, mine.torch_dtype)
    return Manifest(
        step=0, optimizer=here.optimizer, groups=_groups(reader, here, has_optimizer), tensors=tensors,
        numbers=numbers, format=FORMAT, extra={}, files=(), sha256="",
    )  # fmt: skip


def _saved(
    found: Stored, shape: tuple[int, ...], sharded: bool, name: str, folder: Path,
    dtype: torch.dtype = torch.float32,
) -> Saved:  # fmt: skip
    if found.shape != shape and found.shape != (1,) * (not shape):  # a step count may be a tensor of one
        raise UserError(f"'{name}' has shape {list(found.shape)}", where=folder, allowed=str(list(shape)))
    if found.dtype != dtype and not (dtype == torch.float32 and found.dtype in _EXACT):
        raise UserError(
            f"'{name}' is {found.dtype}", where=folder, allowed=f"{dtype}, or what it holds exactly"
        )
    return Saved(dtype=str(dtype).removeprefix("torch."), shape=shape, sharded=sharded)


def _tensor(reader: Reader, name: str) -> Stored:
    found = reader.tensor(name)
    if found is None:
        raise UserError(f"has no values of '{name}'", where=reader.folder, allowed="one for every parameter")
    return found


def _states(reader: Reader, name: str, has_optimizer: bool) -> dict[str, Stored | Number]:
    """Adam's states of a parameter; {} if it has none yet."""
    found = reader.states(name) if has_optimizer else {}
    if found and not set(STATES[:2]) <= found.keys() <= set(STATES):
        raise UserError(
            f"the optimizer's states of '{name}' are not Adam's: {', '.join(sorted(found))}",
            where=reader.folder,
            allowed=f"{', '.join(STATES)}; optimizer=None for the weights alone",
        )
    if found and "step" not in found:
        raise UserError(f"has no step count of '{name}'", where=reader.folder)
    return found


def _stored(reader: Reader, full: str) -> Stored:
    """A tensor by its name in a manifest."""
    kind, _, rest = full.partition(".")
    if kind != "optimizer":
        return _tensor(reader, rest)
    key, _, name = rest.partition(".")
    value = reader.states(name)[key]
    if isinstance(value, Stored):
        return value
    number = torch.tensor([float(value or 0)], dtype=torch.float32)  # whatever torch's default is
    return Stored(number.dtype, (), lambda start, count: number[start : start + count])


def _groups(reader: Reader, here: Logical, has_optimizer: bool) -> tuple[Group, ...]:
    """Our groups, with the checkpoint's options of their parameters. Raises UserError if those differ."""
    if not has_optimizer:
        return here.groups
    groups = []
    for number, group in enumerate(here.groups):
        options = dict(group.options)
        for key in (key for key in (*TAKEN, *SAME) if key in options):
            saved = [reader.options(name)[key] for name in group.parameters if key in reader.options(name)]
            if any(value != saved[0] for value in saved):
                raise UserError(
                    f"parameters of param group {number} have several values of {key}",
                    where=reader.folder, allowed="param groups as they were saved",
                )  # fmt: skip
            if saved and key in SAME and saved[0] != options[key]:
                raise UserError(
                    f"{key} is {options[key]}", where=f"param group {number}", allowed=f"{saved[0]}, as saved"
                )
            options[key] = saved[0] if saved else options[key]
        groups.append(Group(parameters=group.parameters, options=options))
    return tuple(groups)
