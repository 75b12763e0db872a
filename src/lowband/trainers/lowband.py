"""Our engine as a trainer."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from lowband.engine.api import (
    accumulate,
    clip_grad_norm_,
    full_state_dict,
    no_sync,
    sync_replicas,
)
from lowband.engine.collectives.wire import TORCH_DTYPE
from lowband.engine.passes.engine import engine_of
from lowband.engine.passes.whole import state_digests
from lowband.engine.transport.meeting import Meeting
from lowband.engine.transport.topology import Topology
from lowband.model.gpt import GPT, on_ranks
from lowband.spec.axes import Axes
from lowband.spec.records import Sent
from lowband.spec.run import RunSpec
from lowband.trainers.trainer import Trainer, adamw, fingerprint_of


class Lowband(Trainer):
    """A GPT under our engine."""

    def __init__(self, model: GPT, spec: RunSpec, device: torch.device) -> None:
        """model: on the meta device; it is made on `device`, one parameter at a time"""
        self.model = on_ranks(
            model,
            spec.scheme,
            Topology(spec.machine.sizes, Axes.of(spec)),
            compute_dtype=TORCH_DTYPE[spec.compute_dtype],
            reduce_dtype=TORCH_DTYPE[spec.reduce_dtype],
            overlap=spec.overlap,
            seed=spec.seed,
            device=device,
            collectives=spec.collectives,
        )
        self.optimizer = adamw(self.model, spec)
        self._engine, self._order = engine_of(self.model), spec.order
        self.lanes, self.replicas = self._engine.lanes, self._engine.replicas

    def no_sync(self) -> AbstractContextManager[None]:
        return no_sync(self.model)

    def accumulate(self, passes: int, loss_of: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        if self._order == "breadth":
            return accumulate(self.model, range(passes), loss_of)
        return super().accumulate(passes, loss_of)

    def finish(self) -> None:
        if self.replicas is None:
            return
        sync = self.replicas.sync
        if sync.delay or sync.fragments > 1 or not sync.has_anchor:
            sync_replicas(self.model)

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return clip_grad_norm_(self.model, max_norm)

    def take_sent(self) -> list[Sent]:
        return self._engine.ledger.take()

    def take_message_s(self) -> dict[int, float]:
        return self._engine.axis.message_times.take()

    def state_peaks(self) -> dict[str, int]:
        """The engine's, plus the optimizer's moments under `optim`."""
        peaks = dict(self._engine.meter.peak)
        peaks["optim"] += sum(
            value.numel() * value.element_size()
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim > 0  # the step counters are scalars
        )
        return dict(sorted(peaks.items()))

    def full_state(self) -> dict[str, torch.Tensor]:
        return full_state_dict(self.model)

    def fingerprint(self, meeting: Meeting) -> str:
        return fingerprint_of(state_digests(self.model, self._engine))
