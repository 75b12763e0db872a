"""What the training loop asks of an engine: ours and every peer answer the same calls."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import nn

from lowband.spec.run import RunSpec


class Trainer(ABC):
    """A model that an engine has made ready, and its optimizer. The bodies are those of plain torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    notes: str = ""  # what a reader of the run must know

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Context of the forward and backward passes before an accumulation boundary."""

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a scalar loss, a share of the step's loss."""
        loss.backward()

    def step(self, max_norm: float) -> float:
        """Clip the gradients by their global norm, step, forget the gradients; returns the norm before."""
        norm = self._clip_grad_norm(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)  # read last: on a GPU it waits for all of the step

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    @abstractmethod
    def full_state(self) -> dict[str, torch.Tensor]:
        """Logical fp32 tensors under the module's own names on rank 0; elsewhere {}."""


def adamw(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    """The optimizer of every engine; on a GPU one kernel, without whole-model temporaries."""
    parameters = list(model.parameters())
    is_fused = all(parameter.device.type == "cuda" for parameter in parameters)
    return torch.optim.AdamW(
        parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=is_fused or None
    )
