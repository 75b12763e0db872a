"""PyTorch FSDP2 (`fully_shard`) as a peer, perhaps beside its `parallelize_module`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule

from lowband.engine.transport.everyone import speaks_for_all
from lowband.model.gpt import GPT
from lowband.spec.run import RunSpec
from lowband.trainers.torch_axes import Mesh, clip_over_axes, cut_along_tensor, whole_tensors
from lowband.trainers.trainer import Trainer, adamw


class Fsdp2(Trainer):
    """A GPT under `fully_shard`, one unit per block, in a scheme's placement."""

    def __init__(self, model: GPT, spec: RunSpec) -> None:
        """Raises UserError for a scheme without a counterpart in FSDP2."""
        mesh = Mesh(spec, model.embed.weight.device)
        self._tensor = spec.tensor
        if mesh.tensor is not None:
            cut_along_tensor(model, mesh.tensor)
        mesh.shard(model, reshard_part=None)
        self._is_on_host = mesh.is_on_host
        self.model = model
        self.optimizer = adamw(model, spec)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        if self._tensor > 1 or self._is_on_host:
            return clip_over_axes(self.model.parameters(), max_norm, self._tensor)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        full: torch.Tensor = norm.full_tensor()  # type: ignore[attr-defined] - a DTensor
        return full

    def full_state(self) -> dict[str, torch.Tensor]:
        full = whole_tensors(self.model.state_dict().items(), self._tensor)
        return full if speaks_for_all() else {}
