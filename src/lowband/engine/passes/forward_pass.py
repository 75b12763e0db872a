"""The facts of a forward pass that its backward, and the next forward, need."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn


@dataclass
class Pass:
    """One forward pass of the module: the facts that its backward needs.

    trains:       whether gradients were enabled when it began
    begun, ended: owners of units, in the order in which their forwards began and ended
    is_reentrant: whether it has layers with reentrant activation checkpointing
    is_over:      whether it has ended without an exception
    is_spent:     whether there was a backward since it began
    """

    trains: bool
    begun: list[nn.Module] = field(default_factory=list)
    ended: list[nn.Module] = field(default_factory=list)
    is_reentrant: bool = False
    is_over: bool = False
    is_spent: bool = False
    place: int = 0  # index of the next owner in the order of the running pass, forward or backward

    def after(self, owner: nn.Module, order: list[nn.Module]) -> nn.Module | None:
        """The module after `owner` in an order, searched from the place reached so far; else None."""
        if owner not in order[self.place :]:
            return None
        self.place = order.index(owner, self.place) + 1
        return order[self.place] if self.place < len(order) else None


class MicroBatches(Protocol):
    """Several forwards of the module that run unit by unit, in turns; the engine's hooks leave them to it."""

    @property
    def runs_here(self) -> bool:
        """Whether the calling code belongs to one of these forwards."""

    def before_forward(self, owner: nn.Module, inputs: Any) -> None:
        """Before a unit's owner computes; inputs: its positional and keyword arguments"""

    def after_forward(self, owner: nn.Module, output: Any) -> Any:
        """After it has computed. Returns what takes the output's place, or None."""
