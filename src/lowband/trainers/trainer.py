"""The interface between the training loop and an engine: our engine and every peer implement it."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import nn

from lowband.spec.run import RunSpec


class Trainer(ABC):
    """A model that an engine has prepared, and its optimizer. Default methods are those of plain torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    notes: str = ""  # caveats for readers of the run

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Context for the forward and backward passes before an accumulation boundary."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a scalar loss, already divided by the step's number of backward passes."""
        loss.backward()

    def step(self, max_norm: float) -> float:
        """Clip the gradients to a global norm, step, clear them; returns the norm before clipping."""
        norm = self._clip_grad_norm(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)  # read last: on a GPU this waits for the whole step

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    @abstractmethod
    def full_state(self) -> dict[str, torch.Tensor]:
        """Logical fp32 tensors under the module's own names on rank 0; elsewhere {}."""


def adamw(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    """The optimizer of every engine; on a GPU it is fused and needs no temporaries of the model's size."""
    parameters = list(model.parameters())
    is_fused = all(parameter.device.type == "cuda" for parameter in parameters)
    return torch.optim.AdamW(
        parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=is_fused or None
    )
