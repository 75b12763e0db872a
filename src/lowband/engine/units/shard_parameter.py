"""A parameter of the optimizer: this rank's shard, which answers for the whole where the whole is meant
(units.seen_whole), and refuses what is not computed element by element (units.shard_grad).
"""

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.units.absent import Lies, check_present, refuse_absent
from lowband.engine.units.seen_whole import SeenWhole
from lowband.engine.units.shard_grad import ShardValues, on_part
from lowband.engine.units.shard_init import NotDrawn
from lowband.errors import UserError

# What holds all shards of a unit, by their storage.
_masters: WeakValueDictionary[int, object] = WeakValueDictionary()
_DETACH = (torch.Tensor.detach, torch.detach)
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class CountedParameter(nn.Parameter):
    """One whose version counter sees all writes: torch's own `.data` has a counter of its own."""

    # By identity, as every tensor's; dictionaries ask it of each parameter several times a step.
    __hash__ = object.__hash__

    @property
    def data(self) -> torch.Tensor:
        """Its values, outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.set_data(values)

    def set_data(self, values: torch.Tensor) -> None:
        """Have these values from now on."""
        torch.Tensor.data.__set__(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with its values, as a running average starts from."""
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


class ShardParameter(NotDrawn, SeenWhole, CountedParameter):
    """A shard, 1D, fp32, padded, possibly empty. What would be silently wrong on a part raises UserError.

    collectives: of its unit, which reach the ranks that share the parameter
    on_disk:     where its values lie but while they are used, if that is a disk
    """

    collectives: Collectives
    on_disk: Lies | None = None
    _given: WeakValueDictionary[int, torch.Tensor] | None = None  # what `.data` and `detach` gave, by id
    _was_set = False

    def set_data(self, values: torch.Tensor) -> None:
        """Copy the values, as running averages swap them in and out. What `.data` and `detach` gave before
        keeps the values that it has, in memory of its own.

        Of another type or device they take the shard out of its unit, whose next forward refuses it. Raises
        UserError for another shape, or for a view, because later changes of what it is a view of would be
        the shard's in a plain module.
        """
        if values.shape != self.shape:
            raise UserError(
                f".data of a shard was set to a tensor of shape {list(values.shape)}",
                where=self.shard_of.name,
                allowed="values of this rank's part; whole ones before lowband.shard, or by its init=",
            )
        if values.dtype != self.dtype or values.device != self.device:
            super().set_data(values)
            return
        refuse_absent([self, values])
        with torch._C.DisableTorchFunctionSubclass():
            mine, theirs = self.untyped_storage(), values.untyped_storage()
            is_mine = (mine._cdata, self.storage_offset()) == (theirs._cdata, values.storage_offset())
            if is_mine and (not self._was_set or values is (self._given or {}).get(id(values))):
                return
            if theirs.nbytes() > values.nbytes or theirs._cdata in _masters:
                raise UserError(
                    ".data of a shard was set to a view",
                    where=self.shard_of.name,
                    allowed="p.data.copy_(values); a clone of them",
                )
            self._was_set = True
            own = torch.Tensor.detach(self)
            self._keep_given(own)
            own.copy_(values.detach())

    def _keep_given(self, own: torch.Tensor) -> None:
        """Before the memory `own` gets other values: what was given of it keeps the present ones."""
        kept = None
        for given in list((self._given or {}).values()):
            given._fix_weakref()
            if given.untyped_storage()._cdata == own.untyped_storage()._cdata:
                kept = own.clone() if kept is None else kept
                torch.Tensor.data.__set__(given, kept)
        self._given = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _AUTOGRAD:
            raise UserError(
                "autograd is asked for gradients of shards, but it computes with whole parameters",
                allowed="loss.backward(), then p.grad",
            )
        check_present(func, args, kwargs or {})
        result = on_part(ShardValues, func, args, kwargs or {})
        if func in _DETACH:
            shard = args[0] if args else kwargs["input"]
            if shard._given is None:
                shard._given = WeakValueDictionary()
            shard._given[id(result)] = result
        return result

    def set_(self, *_: Any, **__: Any) -> NoReturn:  # torch does not ask __torch_function__
        raise UserError(
            "set_ of a shard would take it out of its unit",
            where=self.shard_of.name,
            allowed="p.copy_(values) of this rank's part; whole ones before lowband.shard, or by its init=",
        )

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of any tensor. Raises UserError for a memory format of more dimensions than a shard has."""
        if (layout := kwargs.get("memory_format")) in (torch.channels_last, torch.channels_last_3d):
            raise UserError(
                f"a shard is 1D, and has no {layout}",
                where=self.shard_of.name,
                allowed="inputs in that format",
            )
        return super().to(*args, **kwargs)

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

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UserError(
            "a shard cannot be pickled: it is this rank's part only",
            where=self.shard_of.name,
            allowed="lowband.full_state_dict, lowband.Checkpointer; p.detach() for this rank's values",
        )

    def __repr__(self) -> str:
        of = self.shard_of
        values = repr(self.detach().as_subclass(torch.Tensor)[: of.stop - of.start])
        return f"Values {of.start} to {of.stop} of '{of.name}', shape {tuple(of.shape)}:\n{values}"


class Leaf(CountedParameter):
    """A weight that a unit computes with: whole, and dropped with what is written to it.

    place: its unit's name
    """

    place: str

    def set_data(self, values: torch.Tensor) -> None:
        raise UserError(
            ".data of a weight was set in a forward, and would be dropped with it",
            where=self.place,
            allowed="what is computed from the weight; parameters changed outside of a forward",
        )


def note_master(master: torch.Tensor, holder: object) -> None:
    """Know the memory of a unit's shards, for as long as there is who holds it."""
    _masters[master.untyped_storage()._cdata] = holder


# Without this torch's optimizers would loop over such parameters on a GPU, where they group plain ones.
torch_optimizer._foreach_supported_types.append(ShardParameter)
