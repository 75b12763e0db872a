"""What a save writes, copied while training stands still."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowband.engine.checkpoint.json_values import check_json
from lowband.engine.checkpoint.logical_tensors import Logical, Piece, random_states
from lowband.engine.checkpoint.manifest import MOST_STEPS, Content, of_slice
from lowband.engine.checkpoint.names import of_replica
from lowband.engine.passes.engine import engine_of
from lowband.engine.units.waiting import check_reduced
from lowband.errors import UserError


@dataclass(frozen=True)
class Snapshot:
    """A copy of the pieces that this rank writes, and the content on which all ranks must agree."""

    content: Content
    extra: dict[str, Any]
    pieces: dict[str, Piece]

    @classmethod
    def of(
        cls, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any]
    ) -> "Snapshot":
        """Call `check` first. Raises UserError for a state that cannot be saved."""
        here = Logical.of(module, optimizer)
        check_json("extra", extra)
        for i, group in enumerate(here.groups):
            check_json(f"param group {i}", group.options)
        written = {
            of_slice(of_replica(name, here.replica), 0 if piece.slice is None else piece.slice.place): piece
            for name, piece in here.pieces.items()
            if piece.writes
        }
        pieces = {name: piece.to_cpu() for name, piece in (written | random_states(module)).items()}
        # Copied through JSON, so that later changes by the caller are not saved.
        return cls(here.content(step), json.loads(json.dumps(extra)), pieces)

    @staticmethod
    def check(step: int, module: nn.Module) -> None:
        """Raises UserError for a step that is none, or while gradients wait."""
        if type(step) is not int or not 0 <= step <= MOST_STEPS:
            raise UserError(f"step is {step!r}", where="Checkpointer.save", allowed=f"int, 0 to {MOST_STEPS}")
        check_reduced(
            engine_of(module).shards,
            "Checkpointer.save",
            "a checkpoint would leave out",
            allowed="a save behind optimizer.step(); zero_grad() to discard them",
        )
