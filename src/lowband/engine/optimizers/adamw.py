"""AdamW in one pass over a sharded module's shards (kernels/adamw.py), instead of five.

It takes gradients in the reduce dtype, so they are never widened; its clipping is a factor of the step; and
where a rank keeps a 16-bit copy of its own shard, as one that trains alone does, it writes that, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from lowband.engine.passes.engine import engine_of
from lowband.engine.passes.grad_norm import factor_of, grad_norm
from lowband.engine.units.shard_sums import part_of, step_begun
from lowband.engine.units.steps import TAKES_REDUCED
from lowband.engine.units.unit import Unit
from lowband.errors import UserError
from lowband.kernels.adamw import adamw
from lowband.kernels.adamw_scalars import Scalars
from lowband.spec.tiers import DEVICE


class AdamW(torch.optim.Optimizer):
    """torch's AdamW, rounded in another order, on a module after lowband.shard.

        optimizer = lowband.AdamW(model, lr=3e-4)
        ...
        loss.backward(); norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()

    module: whose only axis is data, under schemes without sync and with states on the device. From now on
            its gradients have the reduce dtype, `p.grad` of 16 bits beside fp32 parameters, where the ranks
            over which they are averaged are a power of two (else the average is taken in fp32)

    States are sharded as the parameters are; `lowband.Checkpointer` saves them. Raises UserError for other
    modules, and for a torch without gradients of another dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._engine = engine_of(module)
        engine = self._engine
        is_elsewhere = any(unit.scheme.optim_tier != DEVICE for unit in engine.units)
        if (
            engine.other_ranks > 1
            or engine.experts is not None
            or engine.replicas is not None
            or is_elsewhere
        ):
            what = "the module has another axis than data, replicas that meet seldom or states off the device"
            raise UserError(what, where="lowband.AdamW", allowed="none of them; torch.optim.AdamW")
        if not hasattr(torch.Tensor, "grad_dtype"):
            what = f"torch {torch.__version__} has no gradients of another dtype than their parameter's"
            raise UserError(what, where="lowband.AdamW", allowed="a newer torch; torch.optim.AdamW")
        setattr(self, TAKES_REDUCED, True)
        self._factor: torch.Tensor | None = None  # of the gradients, in the next step
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._engine.put_shards()
        super().__init__(module.parameters(), defaults)
        self.register_load_state_dict_pre_hook(lambda _, state: _check_options(state["param_groups"]))
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._engine.units:
                unit.grads.takes_reduced = True
                unit.grads.before = WeakMethod(self._before_gradients)
                for shard in unit.shards:
                    shard.grad_dtype = None  # any

    def add_param_group(self, group: dict[str, Any]) -> None:
        """As torch's. Raises UserError for parameters of another module, which no step would reach, and for
        options of torch's AdamW that this one has not."""
        _check_options([group])
        super().add_param_group(group)
        mine = {shard for unit in self._engine.units for shard in unit.shards}
        other = next((p for p in self.param_groups[-1]["params"] if p not in mine), None)
        if other is not None:
            self.param_groups.pop()
            raise UserError(
                "a parameter of another module", where="lowband.AdamW", allowed="its own module's"
            )

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As `lowband.clip_grad_norm_`, but `p.grad` stays, and the next step scales what it reads."""
        norm, _ = grad_norm(self._engine)
        if self._factor is None:
            self._factor = factor_of(norm, max_norm)
        else:  # clipped before
            norm = norm * self._factor
            self._factor = self._factor * factor_of(norm, max_norm)
        if self._has_others():  # their optimizers read what is there
            self._before_gradients()
        return norm

    def _has_others(self) -> bool:
        """Whether some of the module's gradients are another optimizer's."""
        shards = [shard for unit in self._engine.units for shard in unit.shards]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(mine) == len(shards):
            return False
        own = set(mine)
        with torch._C.DisableTorchFunctionSubclass():
            return any(shard.grad is not None and shard not in own for shard in shards)

    @torch.no_grad()
    def _before_gradients(self) -> None:
        """What was clipped is scaled before more is added to it; if it is gone, so is the factor."""
        factor, self._factor = self._factor, None
        if factor is None or all(unit.grads.are_unset for unit in self._engine.units):
            return
        with torch._C.DisableTorchFunctionSubclass():
            for shard in (shard for unit in self._engine.units for shard in unit.shards):
                if shard.grad is not None:
                    shard.grad.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; the clipping of gradients that no step has used is gone with them."""
        super().zero_grad(set_to_none)
        self._factor = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; returns what `closure` returns, which is called first, with gradients enabled."""
        loss, pairs = step_begun(self, closure)
        group_of = {shard: group for group, shard in pairs}
        # A tensor's value, which a scheduler changes in place; on a GPU each read of it waits.
        rates = {id(group): float(group["lr"]) for group in self.param_groups}
        for unit in self._engine.units:
            if unit.own_copy is not None:
                unit.check_unchanged()
        for unit in self._engine.units:
            copy, runs = unit.own_copy, list(_joined(self._values(unit, group_of, rates)))
            for run in runs:
                start = run.master.storage_offset()
                own = None if copy is None else copy[start : start + len(run.master)]
                adamw(run.master, run.grad, run.first, run.second, run.scalars, self._factor, own)
            if runs and copy is not None:
                unit.copy_is_written(copy)
        self._factor = None
        return loss

    def _values(
        self, unit: Unit, group_of: dict[Any, dict[str, Any]], rates: dict[int, float]
    ) -> Iterator["_Values"]:
        """Of each of the unit's shards that has a gradient."""
        shards = [shard for shard in unit.shards if shard in group_of]
        if shards and not any(self.state[shard] for shard in shards):
            self._begin(shards)
        for shard in shards:
            state, group = self.state[shard], group_of[shard]
            if not state:
                self._begin([shard])
            state["step"] = int(state["step"]) + 1  # a tensor, where torch's AdamW has made the states
            decay = float(group["weight_decay"])
            of = (
                rates[id(group)],
                tuple(map(float, group["betas"])),
                float(group["eps"]),
                decay,
                state["step"],
            )
            assert shard.grad is not None
            grad = shard.grad.as_subclass(torch.Tensor)
            yield _Values(
                Scalars.of(*of), part_of(shard), grad, state["exp_avg"].as_subclass(torch.Tensor),
                state["exp_avg_sq"].as_subclass(torch.Tensor),
            )  # fmt: skip

    def _begin(self, shards: Sequence[nn.Parameter]) -> None:
        """Make states of some of a unit's shards, one behind the other, so that they are stepped at once."""
        sizes = [shard.numel() for shard in shards]
        like = {"dtype": torch.float32, "device": shards[0].device}  # whatever torch's default dtype is
        moments = [torch.zeros(sum(sizes), **like).split(sizes) for _ in range(2)]
        for shard, first, second in zip(shards, *moments, strict=True):
            self.state[shard] |= {"step": 0, "exp_avg": first, "exp_avg_sq": second}


def _check_options(groups: Iterable[dict[str, Any]]) -> None:
    for group in groups:
        for option, own in (("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", True)):
            if bool(group.get(option, own)) != own:
                what = f"{option} {group[option]} in a param group"
                raise UserError(what, where="lowband.AdamW", allowed=f"{own}; torch.optim.AdamW")


@dataclass(frozen=True)
class _Values:
    """What a call of the kernel updates."""

    scalars: Scalars
    master: torch.Tensor
    grad: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.master, self.grad, self.first, self.second

    def goes_on_in(self, other: "_Values") -> bool:
        """Whether the other's values lie behind these, of all tensors, and are updated alike."""
        return self.scalars == other.scalars and all(map(_is_behind, self.tensors, other.tensors))


def _is_behind(a: torch.Tensor, b: torch.Tensor) -> bool:
    is_shared = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return is_shared and a.dtype == b.dtype and a.storage_offset() + len(a) == b.storage_offset()


def _joined(values: Iterator[_Values]) -> Iterator[_Values]:
    """Those that lie behind each other as one."""
    run: list[_Values] = []
    for before, each in pairwise((None, *values)):
        assert each is not None
        if run and not (before is not None and before.goes_on_in(each)):
            yield _as_one(run)
            run = []
        run.append(each)
    if run:
        yield _as_one(run)


def _as_one(run: Sequence[_Values]) -> _Values:
    total = sum(len(each.master) for each in run)
    return _Values(run[0].scalars, *(t.as_strided((total,), (1,)) for t in run[0].tensors))
