"""Our engine as a trainer."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from lowband.engine.api import (
    accumulate,
    clip_grad_norm_,
    full_state_dict,
    no_sync,
    sync_replicas,
)
from lowband.engine.collectives.wire import TORCH_DTYPE
from lowband.engine.optimizers.adamw import AdamW
from lowband.engine.parallel.experts import balance_experts
from lowband.engine.parallel.pipeline import Pipeline
from lowband.engine.passes.engine import engine_of
from lowband.engine.passes.whole import state_digests
from lowband.engine.transport.everyone import everyones
from lowband.engine.transport.meeting import Meeting
from lowband.engine.transport.topology import Topology
from lowband.model.gpt import GPT, on_ranks
from lowband.spec.axes import Axes
from lowband.spec.records import Sent
from lowband.spec.run import RunSpec
from lowband.spec.tiers import DEVICE, DISK, HOST, at
from lowband.trainers.trainer import Batch, Trainer, adamw, fingerprint_of


class Lowband(Trainer):
    """A GPT under our engine."""

    def __init__(self, model: GPT, spec: RunSpec, device: torch.device, disk: Path | None = None) -> None:
        """model: on the meta device; it is made on `device`, one parameter at a time
        disk:  folder for states that the scheme places there
        """
        self._names, self._split = list(model.state_dict()), model.split
        of_step: dict[str, Any] = {"collectives": spec.collectives}
        if DISK in spec.scheme.tiers:
            of_step["disk"] = disk
        if spec.recompute == "host":
            kept = {model.blocks[i] for i in spec.recomputed}
            of_step["activations"] = lambda block: HOST if block in kept else DEVICE
        if spec.is_in_stages:
            of_step = {"schedule": spec.schedule, "chunks": spec.chunks_each, "layers": spec.layers}
        self.model = on_ranks(
            model,
            spec.scheme,
            Topology(spec.machine.sizes, Axes.of(spec)),
            spec.accumulation,
            compute_dtype=TORCH_DTYPE[spec.compute_dtype],
            reduce_dtype=TORCH_DTYPE[spec.reduce_dtype],
            overlap=spec.overlap,
            seed=spec.seed,
            device=device,
            **of_step,
        )
        self.optimizer = (
            AdamW(self.model, spec.learning_rate, weight_decay=spec.weight_decay)
            if spec.fused_adamw
            else adamw(self.model, spec)
        )
        self._has_experts = spec.model.experts is not None
        self._engine, self._order = engine_of(self.model), spec.order
        self.lanes, self.replicas = self._engine.lanes, self._engine.replicas

    def no_sync(self) -> AbstractContextManager[None]:
        return no_sync(self.model)

    def accumulate(self, passes: int, batch_of: Callable[[int], Batch]) -> list[torch.Tensor]:
        if isinstance(self.model, Pipeline):
            return self.model.step([self._split(*batch_of(i)) for i in range(passes)])
        if self._order == "breadth":
            return accumulate(self.model, range(passes), lambda i: self.model(*batch_of(i)) / passes)
        return super().accumulate(passes, batch_of)

    def finish(self) -> None:
        for disk, _ in self._engine.on_disk():
            disk.finish_update()
        if self.replicas is None:
            return
        sync = self.replicas.sync
        if sync.delay or sync.fragments > 1 or not sync.has_anchor:
            sync_replicas(self.model)

    def step(self, max_norm: float) -> float:
        norm = super().step(max_norm)
        if self._has_experts:
            balance_experts(self.model)
        return norm

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        if isinstance(self.optimizer, AdamW):
            return self.optimizer.clip_grad_norm_(max_norm)
        return clip_grad_norm_(self.model, max_norm)

    def take_sent(self) -> list[Sent]:
        return self._engine.ledger.take()

    def take_message_s(self) -> dict[int, float]:
        return self._engine.axis.message_times.take()

    def state_peaks(self) -> dict[str, int]:
        """The engine's, plus the optimizer's moments under `optim`, where each unit's lie."""
        peaks = dict(self._engine.meter.peak)
        tiers = {shard: unit.scheme.optim_tier for unit in self._engine.units for shard in unit.shards}
        for parameter, state in self.optimizer.state.items():
            peaks[at("optim", tiers[parameter])] += sum(
                value.numel() * value.element_size()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.ndim > 0  # the step counters are scalars
            )
        return dict(sorted(peaks.items()))

    def full_state(self) -> dict[str, torch.Tensor]:
        return full_state_dict(self.model)

    def fingerprint(self, meeting: Meeting) -> str:
        mine = state_digests(self.model, self._engine)
        if self._engine.pipeline is None:
            return fingerprint_of(mine)
        found = everyones(mine)  # of each rank's stages
        digests = {name: digest for of_rank in found for name, digest in of_rank.items()}
        return fingerprint_of({name: digests[name] for name in self._names})
