"""Detection of changes to the optimizer's parameters, and of parameters that the engine did not make.

[Note: versions] An optimizer step changes `master` in place, which increments the shards' version counters.
Fused optimizers do not increment them, so steps of torch's optimizers are counted too (units.steps).

[Note: uncounted writes] Writes through NumPy or from C++ do not increment any counter. Where a copy of the
weights is kept, the module would keep computing with the old values. So a sample of `master` is compared
before the copy is used again.
"""

from collections.abc import Sequence
from typing import NoReturn, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowband.engine.units.on_disk import OnDisk
from lowband.engine.units.unusable import ReplacedParameter
from lowband.errors import UserError

SAMPLES = 64  # values compared per unit, besides the first one of each parameter
_CHANGES = "_lowband_changes"  # attribute of a shard: its unit's Changes


class Watcher(Protocol):
    """What must know of optimizers' steps: an optimizer may have shards of several units."""

    def before_step(self) -> None:
        """An optimizer with some of the watched units' shards is about to step."""

    def after_step(self, shards: list[nn.Parameter]) -> None:
        """An optimizer has stepped these shards."""


class Changes:
    """Changes to one unit's shards since they were made.

    has_all_layers: whether its module has no layers on other stages of a pipeline
    """

    has_all_layers = True

    def __init__(
        self, unit: str, master: torch.Tensor, shards: Sequence[nn.Parameter], disk: OnDisk | None = None
    ) -> None:
        """master: 1D, fp32; shards: views that cover it; disk: where these have their memory, or None"""
        self.disk = disk
        self._unit, self._master, self._shards = unit, master, shards
        with torch._C.DisableTorchFunctionSubclass():
            self._with_values = [shard for shard in shards if shard.numel()]
            # A shard without values has no memory to tell its place by; other ranks refuse the same change.
            self._empty = [shard for shard in shards if not shard.numel()]
        self._trains = shards[0].requires_grad
        self._steps = 0
        self._places: torch.Tensor | None = None
        self._sample: torch.Tensor | None = None
        self.watcher: Watcher | None = None
        for shard in shards:
            setattr(shard, _CHANGES, self)

    @property
    def version(self) -> int:
        """A number that grows with every optimizer step and every in-place change."""
        return self._steps + self._master._version  # its views, the shards, share its counter

    def count_step(self) -> None:
        self._steps += 1

    def check_shards(self, trains: bool) -> None:
        """Raises UserError if a shard has been moved or cast since it was made, or, before a forward that
        trains, frozen or unfrozen.
        """
        storage = self._master.untyped_storage()._cdata
        is_changed = is_moved = False
        with torch._C.DisableTorchFunctionSubclass():  # quicker, and these facts need no check
            for shard in self._shards:
                is_changed |= shard.requires_grad != self._trains
            for shard in self._with_values:
                is_moved |= shard.untyped_storage()._cdata != storage
            for shard in self._empty:
                is_moved |= shard.dtype != self._master.dtype or shard.device != self._master.device
        if is_changed and trains:
            self.refuse_frozen()
        if is_moved:
            raise UserError(
                f"parameters of '{self._unit}' were moved or cast after lowband.shard",
                allowed="module.to(...) before lowband.shard; its compute_dtype",
            )

    def refuse_frozen(self) -> NoReturn:
        raise UserError(
            f"requires_grad of '{self._unit}' was changed after lowband.shard",
            allowed="freezing before lowband.shard; torch.no_grad() for single passes",
        )

    def take_sample(self) -> None:
        """Remember some values of `master`. See [Note: uncounted writes]."""
        if isinstance(self._master, FakeTensor):
            return
        if self._places is None:
            starts = [s.storage_offset() for s in self._shards if s.numel()]
            last, count = len(self._master) - 1, min(SAMPLES, len(self._master))
            spread = [i * last // max(1, count - 1) for i in range(count)]
            self._places = torch.tensor(starts + spread, dtype=torch.long, device=self._master.device)
        self._sample = self._bits()

    def check_sample(self) -> None:
        """Raises UserError after writes that no counter shows; on a GPU a device assert fails later."""
        if self._sample is None:
            return
        same = (self._bits() == self._sample).all()
        what = f"parameters of '{self._unit}' were written through NumPy or from C++"
        if same.is_cuda:
            torch._assert_async(same, what)
        elif not same:
            raise UserError(what, allowed="writes to the parameters themselves, under torch.no_grad()")

    def _bits(self) -> torch.Tensor:
        """The bits of the sample; 1D, int32."""
        assert self._places is not None
        return self._master.detach().view(torch.int32)[self._places]


def changes_of(parameter: nn.Parameter) -> Changes | None:
    """Those of a shard's unit; None for a parameter that is no shard."""
    found: Changes | None = getattr(parameter, _CHANGES, None)
    return found


def check_own(module: nn.Module) -> None:
    """Raises UserError for a parameter that another module has, and whose place a part of it has taken."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, ReplacedParameter):
            raise UserError(
                f"'{name}' is shared with a module that is already sharded or cut, where it is "
                f"'{parameter.place}'",
                where=type(module).__name__,
                allowed="one lowband.parallelize, or shard, around all modules that share a parameter",
            )


def check_unsharded(module: nn.Module) -> None:
    """Raises UserError if some of the module's parameters are already sharded."""
    check_own(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if hasattr(parameter, _CHANGES):
            raise UserError(f"'{name}' is already a shard", where=type(module).__name__)
        check_no_hooks(name, parameter, type(module).__name__)


def check_no_hooks(name: str, parameter: nn.Parameter, where: str) -> None:
    """Raises UserError if hooks were set on a parameter in whose place another will be."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        what = f"a hook on '{name}' would not run any more"
        raise UserError(what, where=where, allowed="hooks on modules; p.grad after the backward")
