"""The interface between the training loop and an engine: our engine and every peer implement it."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from lowband.engine.passes.whole import sha256
from lowband.engine.replicas.replicas import Replicas
from lowband.engine.transport.lane import Lanes
from lowband.engine.transport.meeting import Meeting, Tick
from lowband.spec.records import Sent
from lowband.spec.run import RunSpec

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, int64 [sequences, tokens]


class Trainer(ABC):
    """A model that an engine has prepared, and its optimizer. Default methods are those of plain torch.

    notes:    caveats for readers of the run
    lanes:    where communication runs beside the computation; None for a peer's engine, which does not say
    replicas: those that meet seldom; None if there are none, or if a peer's engine keeps them to itself
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    notes: str = ""
    lanes: Lanes | None = None
    replicas: Replicas | None = None

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Context for the forward and backward passes before an accumulation boundary."""

    def accumulate(self, passes: int, batch_of: Callable[[int], Batch]) -> list[torch.Tensor]:
        """All forward and backward passes of a step; returns each one's part of the mean loss, detached.

        batch_of: maps a pass's number to its micro-batch
        """
        losses = []
        for i in range(passes):
            with nullcontext() if i == passes - 1 else self.no_sync():
                loss = self.model(*batch_of(i)) / passes
                self.backward(loss)
            losses.append(loss.detach())
        return losses

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a scalar loss, already divided by the step's number of backward passes."""
        loss.backward()

    def step(self, max_norm: float) -> float:
        """Clip the gradients to a global norm, step, clear them; returns the norm before clipping."""
        norm = self._clip_grad_norm(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)  # read last: on a GPU this waits for the whole step

    def finish(self) -> None:  # noqa: B027  most engines have nothing to do
        """After the last step: make all ranks agree on the weights, if they do not."""

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    # ---- what an engine counts of itself; a peer's counts nothing

    def take_sent(self) -> list[Sent]:
        """Bytes that this rank has sent since the last call, by level, collective and wire."""
        return []

    def take_message_s(self) -> dict[int, float]:
        """By partner: seconds that messages have taken since the last call, where they are timed."""
        return {}

    def state_peaks(self) -> dict[str, int]:
        """Peak bytes of this rank by kind of state."""
        return {}

    @abstractmethod
    def full_state(self) -> dict[str, torch.Tensor]:
        """Logical fp32 tensors under the module's own names on rank 0; elsewhere {}."""

    def fingerprint(self, meeting: Meeting) -> str:
        """One sha256 over names and values of the whole fp32 state, on rank 0. Every rank must call it.

        meeting: the ranks, for work that takes rank 0 longer than the others wait for a message
        """
        state = self.full_state()
        return meeting.first("hashing the final weights", lambda tick: fingerprint_of(_digests(state, tick)))


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """The sha256 of a state whose entries have these sha256 sums, in this order."""
    lines = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def _digests(state: Mapping[str, torch.Tensor], tick: Tick) -> dict[str, str]:
    digests = {}
    for name, tensor in state.items():
        digests[name] = sha256(tensor)
        tick()
    return digests


def adamw(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    """The optimizer of every engine; on a GPU it is fused and needs no temporaries of the model's size, and
    so it is where a CPU updates for the device, several times as fast as torch's default."""
    parameters = list(model.parameters())
    is_fused = spec.scheme.copies or all(parameter.device.type == "cuda" for parameter in parameters)
    return torch.optim.AdamW(
        parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=bool(is_fused) or None
    )
