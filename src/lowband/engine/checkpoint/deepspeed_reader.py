"""Checkpoints of DeepSpeed's ZeRO stages 1 to 3, read by ranges without running code.

A rank's optimizer file has its part of each param group's fp32 values and moments, flattened; a model file
has the parameters' shapes in their order. Under stages 1 and 2 a group's parts joined are its parameters, one
after the other; under stage 3 each parameter is cut into equal parts, one for each rank, and a rank's part of
the group are its parts of all of them (deepspeed/utils/zero_to_fp32.py).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch

from lowband.engine.checkpoint.manifest import Number
from lowband.engine.checkpoint.stored import Reader, Stored, load_tensors, whole
from lowband.errors import UserError
from lowband.spec.partition import intersect
from lowband.spec.plain_data import read_text

OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_00_optim_states\.pt")
# Objects among the tensors of which nothing is needed.
_INERT = tuple(
    f"deepspeed.{name}"
    for name in (
        "runtime.zero.config.ZeroStageEnum", "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler", "utils.tensor_fragment.fragment_address",
    )
)  # fmt: skip
_OWN_KEYS = (
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments "
    "lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps global_samples "
    "dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version autoep_layers"
)


def is_deepspeed(folder: Path) -> bool:
    return (folder / "latest").is_file() or any(OPTIMIZER_FILE.fullmatch(p.name) for p in _files(folder))


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in its group.

    offset: of its first value in the joined parts; under stage 3 in each rank's part
    part:   under stage 3 its values in each rank's part, else None
    """

    group: int
    offset: int
    shape: tuple[int, ...]
    part: int | None


class DeepSpeedReader(Reader):
    """
    folder: that of `save_checkpoint`, whose file `latest` names the newest, or that of one checkpoint
    Raises UserError for what is no checkpoint of ZeRO 1 to 3, or one of tensor, expert or pipeline ranks.
    """

    def __init__(self, folder: Path) -> None:
        latest = folder / "latest"
        if latest.is_file():
            tag = read_text(latest).strip()
            if Path(tag).name != tag or "\0" in tag:
                raise UserError(f"names '{tag}'", where=latest, allowed="a folder beside it")
            folder = folder / tag
        self.folder = folder
        paths = _optimizer_files(folder)
        self._parts = [_of_zero(load_tensors(path, path, _INERT), path) for path in paths]
        count = self._parts[0].get("partition_count")
        ranks = max(count) if isinstance(count, list) and count else count
        if ranks != len(paths):
            raise UserError(f"has the optimizer files of {len(paths)} of {ranks} ranks", where=folder)
        is_stage3 = "fp32_flat_groups" in self._parts[0]
        name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if is_stage3 else "mp_rank_00_model_states.pt"
        self._model_file = folder / name
        self._model = load_tensors(self._model_file, self._model_file, _INERT)
        try:
            self._fp32 = [part["fp32_flat_groups" if is_stage3 else _JOINED] for part in self._parts]
            self._adam = [part["optimizer_state_dict" if is_stage3 else _BASE] for part in self._parts]
            self._places = dict(self._placed(is_stage3))
            self._groups = {
                index: {key: value for key, value in group.items() if key != "params"}
                for group in self._adam[0]["param_groups"]
                for index in group["params"]
            }
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            what = f"is not as ZeRO's stages save it: {type(error).__name__} {error}"
            raise UserError(what, where=folder) from None

    def tensor(self, name: str) -> Stored | None:
        shared = self._model.get("shared_params") or {}
        place = self._places.get(name) or self._places.get(shared.get(name, ""))
        if place is not None:
            return self._flat(place, [part[place.group] for part in self._fp32])
        if name in self._model.get("buffer_names", ()):
            return whole(self._model["module"][name])
        return None

    def states(self, name: str) -> dict[str, Stored | Number]:
        shared = self._model.get("shared_params") or {}
        place = self._places.get(name) or self._places.get(shared.get(name, ""))
        if place is None or place.group not in self._adam[0]["state"]:
            return {}
        found: dict[str, Stored | Number] = {}
        for key, first in self._adam[0]["state"][place.group].items():
            if isinstance(first, torch.Tensor) and first.ndim:
                found[key] = self._flat(place, [part["state"][place.group][key] for part in self._adam])
            else:
                found[key] = whole(first) if isinstance(first, torch.Tensor) else first
        if "step" not in found and isinstance(steps := self._groups[place.group].get("step"), int):
            found["step"] = steps  # FusedAdam's, one for a group
        return found

    def options(self, name: str) -> dict[str, Any]:
        place = self._places.get(name)
        return {} if place is None else self._groups.get(place.group, {})

    def extra(self) -> dict[str, Any]:
        """The client's state, and `global_steps`."""
        return {key: value for key, value in self._model.items() if key not in _OWN_KEYS.split()}

    def _placed(self, is_stage3: bool) -> Iterator[tuple[str, _Place]]:
        """Where each parameter lies, by name."""
        ranks, shapes = len(self._parts), self._model["param_shapes"]
        paddings = self._parts[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        for index, group in enumerate(shapes):
            offset = 0
            for (name, size), padding in zip(
                group.items(), [0] * len(group) if is_stage3 else paddings[index], strict=True
            ):
                shape = tuple(size)
                part = -(-prod(shape) // ranks) if is_stage3 else None
                yield name, _Place(index, offset, shape, part)
                offset += prod(shape) + padding if part is None else part
            held = [fp32[index].numel() for fp32 in self._fp32]
            # Of joined parts the padding is left out, but for what aligns them.
            is_whole = set(held) == {offset} if is_stage3 else 0 <= sum(held) - offset < 4 * ranks
            if not is_whole:
                raise ValueError(f"group {index} has {held} values for {offset}")

    def _flat(self, place: _Place, parts: list[torch.Tensor]) -> Stored:
        """parts: each rank's flat values of the group"""
        if any(part.ndim != 1 or part.dtype != parts[0].dtype for part in parts):
            raise UserError("ranks have values of several kinds", where=self.folder)
        # Under stage 3 only the parameter's part of each rank counts; joined parts follow each other whole.
        first = 0 if place.part is None else place.offset
        begin = place.offset if place.part is None else 0
        sizes = [part.numel() if place.part is None else place.part for part in parts]
        if first + max(sizes) > min(part.numel() for part in parts) and place.part is not None:
            raise UserError("an optimizer's state is too short", where=self.folder)

        def read(start: int, count: int) -> torch.Tensor:
            values, filled = torch.empty(count, dtype=parts[0].dtype), 0
            for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
                a, b = intersect((end - size, end), (begin + start, begin + start + count))
                if a < b:
                    own = first + a - (end - size)
                    values[a - begin - start : b - begin - start] = part[own : own + b - a]
                    filled += b - a
            if filled != count:
                raise UserError("an optimizer's state is too short", where=self.folder)
            return values

        return Stored(parts[0].dtype, place.shape, read)


_JOINED, _BASE = "single_partition_of_fp32_groups", "base_optimizer_state"


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt"))


def _optimizer_files(folder: Path) -> list[Path]:
    """One for each rank, in their order."""
    names = [path.name for path in _files(folder)]
    if other := next(
        (n for n in names if "expert" in n or n.startswith("layer_") or "mp_rank_01" in n), None
    ):
        raise UserError(f"has '{other}', of other ranks than data-parallel ones", where=folder)
    found = {int(m[1]): folder / m[0] for m in map(OPTIMIZER_FILE.fullmatch, names) if m}
    if not found:
        raise UserError("has no optimizer files", where=folder, allowed="a checkpoint of ZeRO 1, 2 or 3")
    if sorted(found) != list(range(len(found))):
        missing = next(rank for rank in range(len(found)) if rank not in found)
        raise UserError(f"has no optimizer file of rank {missing}", where=folder)
    return [found[rank] for rank in sorted(found)]


def _of_zero(content: Any, path: Path) -> dict[str, Any]:
    """A rank's part of ZeRO's state."""
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not {"fp32_flat_groups", _JOINED} & state.keys():
        raise UserError("has no values of ZeRO 1, 2 or 3", where=path)
    return state
