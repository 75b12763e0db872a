"""torch.distributed.pipelining with FSDP2 in each stage, as a peer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from lowband.engine.transport.everyone import everyones, speaks_for_all
from lowband.errors import UserError
from lowband.model.gpt import GPT
from lowband.spec.peers import TORCH_SCHEDULES, TORCH_WRONG
from lowband.spec.run import RunSpec
from lowband.spec.stages import stage_modules
from lowband.trainers.torch_axes import Mesh, clip_over_axes, cut_along_tensor, whole_tensors
from lowband.trainers.trainer import Batch, Trainer, adamw


class _Stage(nn.Module):
    """Modules of a chain, under their names in it, without dots."""

    def __init__(self, chain: dict[str, nn.Module], names: list[str]) -> None:
        super().__init__()
        self.names = {name.replace(".", "_"): name for name in names}
        for short, name in self.names.items():
            self.add_module(short, chain[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x

    def named_state(self) -> list[tuple[str, torch.Tensor]]:
        """By their names in the whole model."""
        found = [(name.split(".", 1), value) for name, value in self.state_dict().items()]
        return [(f"{self.names[first]}.{rest}", value) for (first, rest), value in found]


class TorchPipeline(Trainer):
    """A GPT in stages; the stages of this rank are `model`."""

    def __init__(self, model: GPT, spec: RunSpec) -> None:
        """Raises UserError for a scheme without a counterpart in FSDP2, or numbers that torch refuses."""
        device = model.embed.weight.device
        mesh = Mesh(spec, device)
        self._names, self._tensor = list(model.state_dict()), spec.tensor
        self._is_first_of_stage = mesh.is_first_of_stage
        if mesh.tensor is not None:
            cut_along_tensor(model, mesh.tensor)
        here = {action.stage for action in spec.lists[mesh.pipeline.get_local_rank()]}
        names = stage_modules(spec.model, spec.blocks(spec.model))
        parts: list[_Stage] = []
        stages: list[PipelineStage] = []
        for number in sorted(here):
            part = _Stage(model.chain(), names[number])
            mesh.shard(part, reshard_part=mesh.reshard)
            parts.append(part)
            stages.append(PipelineStage(part, number, spec.stages, device, group=mesh.pipeline.get_group()))
        self._parts, self.model = parts, nn.ModuleList(parts)
        kind = getattr(schedules, (TORCH_SCHEDULES | TORCH_WRONG)[spec.schedule])
        is_single = issubclass(kind, schedules.PipelineScheduleSingle)
        try:
            self._schedule = kind(
                stages[0] if is_single else stages,
                spec.accumulation,
                loss_fn=lambda logits, targets: model.loss_of(logits, targets) / spec.accumulation,
                scale_grads=False,
            )
        except ValueError as error:
            raise UserError(f"no counterpart: {error}", where=f"torch's schedule {spec.schedule}") from None
        self._has_first, self._has_last = 0 in here, spec.stages - 1 in here
        self.optimizer = adamw(self.model, spec)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # a step is all of its micro-batches

    def accumulate(self, passes: int, batch_of: Callable[[int], Batch]) -> list[torch.Tensor]:
        of_step = zip(*(batch_of(i) for i in range(passes)), strict=True)
        tokens, targets = (torch.cat(each) for each in of_step)
        losses: list[torch.Tensor] = []
        of_last: dict[str, Any] = {"target": targets, "losses": losses} if self._has_last else {}
        self._schedule.step(*([tokens] if self._has_first else []), **of_last)
        return [loss.detach() for loss in losses]

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return clip_over_axes(self.model.parameters(), max_norm, self._tensor)

    def full_state(self) -> dict[str, torch.Tensor]:
        mine = [named for part in self._parts for named in part.named_state()]
        full = whole_tensors(mine, self._tensor)
        of_stages = everyones(full if self._is_first_of_stage else {})
        found = {name: value for of_stage in of_stages for name, value in of_stage.items()}
        return {name: found[name] for name in self._names} if speaks_for_all() else {}
