"""A parameter of the optimizer: this rank's shard, which answers for the whole where the whole is meant.

In memory it is 1D. `ndim` and `dim()` are those of the whole parameter, because decay groups are chosen by
them. `shape`, `size()` and `numel()` are the shard's own, because optimizers allocate and launch by them.
Functions that are not computed element by element refuse it (units.shard_grad).
"""

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.units.by_element import Kind, kind_of
from lowband.engine.units.shard_grad import ShardValues, on_part
from lowband.engine.units.shard_init import NotDrawn
from lowband.engine.units.shard_of import ShardOf
from lowband.errors import UserError

_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class ShardParameter(NotDrawn, nn.Parameter):
    """A shard, 1D, fp32, padded, possibly empty. What would be silently wrong on a part raises UserError.

    shard_of:    the whole parameter
    collectives: of its unit, which reach the ranks that share the parameter
    hand_data:   called before `.data` is handed out, because no version counter shows writes through it
    """

    shard_of: ShardOf
    collectives: Collectives
    hand_data: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _AUTOGRAD:
            raise UserError(
                "autograd is asked for gradients of shards, but it computes with whole parameters",
                allowed="loss.backward(), then p.grad",
            )
        return on_part(ShardValues, func, args, kwargs or {})

    def __hash__(self) -> int:
        return id(self)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the whole parameter."""
        return len(self.shard_of.shape)

    def dim(self) -> int:
        """Number of dimensions of the whole parameter."""
        return self.ndim

    @property
    def data(self) -> torch.Tensor:
        """The shard's values, outside of autograd and of its version counter."""
        self.hand_data()
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)

    def register_hook(self, hook: Callable[..., Any]) -> NoReturn:
        self._refuse_hook()

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> NoReturn:
        self._refuse_hook()

    def _refuse_hook(self) -> NoReturn:
        raise UserError(
            "a hook on a shard would never run, because autograd computes with the gathered parameter",
            where=self.shard_of.name,
            allowed="hooks on modules; p.grad after the backward",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with this rank's values, as a running average starts from."""
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UserError(
            "a shard cannot be pickled: it is this rank's part only",
            where=self.shard_of.name,
            allowed="lowband.full_state_dict, lowband.Checkpointer; p.detach() for this rank's values",
        )

    def __create_write_items__(self, _fqn: str, _object: Any) -> NoReturn:
        """What torch.distributed.checkpoint calls to save it."""
        raise UserError(
            "torch.distributed.checkpoint would keep one rank's part",
            where=self.shard_of.name,
            allowed="lowband.Checkpointer, lowband.save_safetensors, lowband.full_state_dict",
        )

    def __repr__(self) -> str:
        of = self.shard_of
        values = repr(self.detach().as_subclass(torch.Tensor)[: of.stop - of.start])
        return f"Values {of.start} to {of.stop} of '{of.name}', shape {tuple(of.shape)}:\n{values}"


class Leaf(nn.Parameter):
    """A weight that a unit computes with: whole, and dropped with what is written to it.

    place:     its unit's name
    hand_data: called before `.data` is handed out, because no version counter shows writes through it
    """

    place: str
    hand_data: Callable[[], None]

    @property
    def data(self) -> torch.Tensor:
        """Its values, outside of autograd and of its version counter."""
        self.hand_data()
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        raise UserError(
            ".data of a weight was set in a forward, and would be dropped with it",
            where=self.place,
            allowed="what is computed from the weight; parameters changed outside of a forward",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __hash__(self) -> int:
        return id(self)


class UnusableParameter(nn.Parameter):
    """A parameter whose values must not be used any more; facts about it may be asked for.

    place: where it belongs to
    """

    what: ClassVar[str]
    allowed: ClassVar[str]
    place: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if kind_of(func) is not Kind.FACT:
            found = (value.place for value in args if isinstance(value, cls))
            raise UserError(f"{func.__name__} of {cls.what}", where=next(found, ""), allowed=cls.allowed)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __hash__(self) -> int:
        return id(self)


class ReplacedParameter(UnusableParameter):
    """A whole parameter from before sharding: whoever still refers to it would see its old values."""

    what = "a parameter from before lowband.shard, which has kept its old values"
    allowed = "the module's own attribute, read in its forward"


class DroppedParameter(UnusableParameter):
    """A gathered parameter that a forward has kept and whose unit was dropped: it has no memory."""

    what = "a weight that was dropped after its unit's forward"
    allowed = "what is computed from it in that forward; a copy of it (.clone()) made there"


# Without this torch's optimizers would loop over such parameters on a GPU, where they group plain ones.
torch_optimizer._foreach_supported_types.append(ShardParameter)
