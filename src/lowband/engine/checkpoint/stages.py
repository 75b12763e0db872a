"""Checkpoints of a pipeline: each stage writes what it holds, and the manifest has all of it.

A parameter has the name that it has in the whole model, so a checkpoint does not depend on the stages.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from lowband.engine.checkpoint import extra_states
from lowband.engine.checkpoint.logical_tensors import buffers, names_of
from lowband.engine.checkpoint.manifest import Content, Group, Manifest
from lowband.engine.checkpoint.names import state_of
from lowband.engine.passes.engine import Engine
from lowband.engine.transport.everyone import warn
from lowband.engine.transport.meeting import Meeting
from lowband.errors import UserError

T = TypeVar("T")


def agreed(meeting: Meeting, content: Content, engine: Engine, where: object) -> Content:
    """The content of all stages together. Every rank must call it.

    Raises UserError, on every rank, if ranks of one stage differ, or stages in step or optimizer. Warns of a
    buffer that differs between ranks which have parts of layers or of sequences: it is saved once.
    """
    place = 0 if engine.pipeline is None else engine.pipeline.place
    replica = engine.axis.place // engine.axis.levels.size(engine.collectives.scheme.level("replica"))
    in_stages = engine.pipeline is not None and engine.is_first
    mine = content.sum(), content if in_stages else None, (replica, _sums_of_buffers(engine))
    all_ = meeting.everyone((place, *mine))
    first_of: dict[int, int] = {}
    first_in: dict[tuple[int, int], int] = {}  # by stage and replica, which has buffers of its own
    for rank, (stage, sum_, _, (replica, buffers_)) in enumerate(all_):
        first = first_of.setdefault(stage, rank)
        if sum_ != all_[first][1]:
            raise UserError(
                f"rank {rank} saves a different step or state from rank {first}",
                where=str(where),
                allowed="on all ranks the same step, states and options of param groups (as lr)",
            )
        first = first_in.setdefault((stage, replica), rank)
        for name in (name for name, each in buffers_.items() if each != all_[first][3][1].get(name)):
            warn(
                f"a checkpoint has one '{name}', rank {first}'s, and rank {rank}'s is another (a buffer of a "
                "rank's own: persistent=False, and made with the module)"
            )
            break
    if engine.pipeline is None:
        return content
    return _joined([found for _, _, found, _ in all_ if found is not None], where)


def _sums_of_buffers(engine: Engine) -> dict[str, str]:
    """Of ranks along axes on which a module may make its own; between others they differ as under DDP."""
    if not any(name in engine.axis.beside for name in ("tensor", "context")):
        return {}
    return {
        name: hashlib.sha256(buffer.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, buffer in buffers(engine.module).items()
    }


def _joined(contents: Sequence[Content], where: object) -> Content:
    first = contents[0]
    for other in contents:
        options = [[group.options for group in content.groups] for content in (first, other)]
        if (other.step, other.optimizer) != (first.step, first.optimizer) or options[0] != options[1]:
            raise UserError(
                "stages of a pipeline save different steps, optimizers or param groups",
                where=str(where),
                allowed="the same on all ranks, but for the parameters in a group, which may be empty",
            )
    groups = [
        Group(
            parameters=tuple(dict.fromkeys(chain.from_iterable(group.parameters for group in alike))),
            options=alike[0].options,
        )
        for alike in zip(*(content.groups for content in contents), strict=True)
    ]
    return first.model_copy(
        update={
            "groups": tuple(groups),
            "tensors": _union([content.tensors for content in contents]),
            "numbers": _union([content.numbers for content in contents]),
        }
    )


def _union(mappings: Sequence[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for mapping in mappings for name, value in mapping.items()}


def names_elsewhere(meeting: Meeting, module: nn.Module, engine: Engine) -> set[str]:
    """Names in a manifest of parameters, buffers and extra states that other stages have. Every rank must
    call it."""
    if engine.pipeline is None:
        return set()
    mine = {f"model.{name}" for name in names_of(engine)} | buffers(module).keys()
    mine |= extra_states.names(module)
    return set[str]().union(*meeting.everyone(mine)) - mine


def without(manifest: Manifest, elsewhere: set[str]) -> Manifest:
    """The manifest as a stage sees it: without what other stages have."""
    if not elsewhere:
        return manifest

    def is_here(name: str) -> bool:
        state = state_of(name)
        return (f"model.{state[1]}" if state else name) not in elsewhere

    groups = tuple(
        group.model_copy(update={"parameters": tuple(p for p in group.parameters if is_here(f"model.{p}"))})
        for group in manifest.groups
    )
    tensors = {name: saved for name, saved in manifest.tensors.items() if is_here(name)}
    numbers = {name: number for name, number in manifest.numbers.items() if is_here(name)}
    return manifest.model_copy(update={"groups": groups, "tensors": tensors, "numbers": numbers})
