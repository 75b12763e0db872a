"""What ranks along an axis other than data must have in common: inputs, random numbers, some values.

Ranks along tensor compute one batch together, those along pipeline one after the other. If a program gives
each of them a batch of its own, as a sampler of all ranks does, losses fall and mean nothing. The same holds
for tensor ranks that drop different values of activations which all of them have. Neither is an error by
itself, so it is looked for: inputs once, random numbers in every step of a module that draws some in one of
the first STEPS.

[Note: gradients] Tensor ranks compute the gradient of a parameter that all of them have whole, and which the
plan does not call partial, from the same values, so it is the same up to what atomic sums on a GPU round
otherwise. Where it is not, the program has gone around an exchange: a module between a Column and its Row is
not named, a cut weight is used by another function than its layer's forward, or a penalty sees a rank's part.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowband.engine.collectives.activations import Along
from lowband.engine.transport.consistency import dense_parts, is_alone
from lowband.engine.units.slice_of import is_of_expert, slice_of
from lowband.errors import UserError
from lowband.spec.activations import ALIKE_GATHER

STEPS = 10
# Of a gradient's norm, what is no rounding, in fp32; of the norm of all, what one may have that is zero but
# for rounding.
APART, NOISE = 1e-4, 1e-6


class Alike:
    """Compares ranks along an axis; what that sends is not counted. Every rank of the axis makes the same
    calls."""

    def __init__(self, along: Along, device: torch.device) -> None:
        self._along, self._device = Along(along.axis), device
        self._where = f"ranks {list(along.axis.ranks)} along {along.axis.name}"
        self._whole_numbers_only = along.cuts_tokens  # then others may be a rank's own
        self._is_checked = self._draws = False
        self._before: list[torch.Tensor] = []
        self._compared: set[str] = set()  # parameters whose gradients were
        self._steps = 0  # in which some were
        self._asked = 0  # forwards behind which ranks have told each other whether they drew

    def watch(self, module: nn.Module) -> None:
        """Compare at each forward of the module."""

        @torch._disable_dynamo
        def begins(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.check_inputs((args, kwargs))
            self.begin()

        @torch._disable_dynamo
        def ends(*_: object) -> None:
            self.end()

        module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
        module.register_forward_hook(ends)

    def check_inputs(self, *parts: Any) -> None:
        """The first call compares the tensors in each part; a rank may have none in it.

        Raises UserError, on every rank of the axis, if they differ.
        """
        if self._is_checked:
            return
        self._is_checked = True
        sums: list[int | None] = []
        for part in parts:
            tensors = [each for each in tree_leaves(part) if isinstance(each, torch.Tensor)]
            compared = [t for t in tensors if not (self._whole_numbers_only and t.is_floating_point())]
            sums.append(sum(_sum(of) for t in compared for of in dense_parts(t)) if compared else None)
        self._compare("inputs", sums, "the same batch on all of them; None where it is not used")

    def begin(self) -> None:
        """A forward begins, or a step."""
        self._before = [state.clone() for state in self._states()]

    def end(self) -> None:
        """It has ended. Raises UserError, on every rank of the axis, if ranks that draw begin differently."""
        before, self._before = self._before, []
        changed = any(not torch.equal(a, b) for a, b in zip(before, self._states(), strict=False))
        if not self._draws and torch.is_grad_enabled() and self._asked < STEPS:
            self._asked += 1
            mine = torch.tensor([[changed]], dtype=torch.int64, device=self._device)
            # Of all: one rank may draw alone, and must not compare alone.
            self._draws = bool(self._along.gathered(mine, ALIKE_GATHER, 0, "draws").any())
        if self._draws:
            sums: list[int | None] = [sum(map(_sum, before))]
            self._compare("states of random numbers", sums, "the same seed on all of them, or no dropout")

    def check_gradients(self, dtype: torch.dtype, parts: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Compare each gradient in the first step in which it is not zero, in the first STEPS of them.

        dtype: the widest in which they may have been computed
        parts: by name, of the same parts of parameters on all ranks. See [Note: gradients]. Raises UserError,
        on every rank of the axis, if one differs.
        """
        parts = [(name, part) for name, part in parts if name not in self._compared]
        if not parts or self._steps == STEPS:
            return
        self._steps += 1
        mine = torch.stack([_measures(part) for _, part in parts]).to(self._device)
        of_ranks = self._along.gathered(mine.unsqueeze(0), ALIKE_GATHER, 0, "gradients").cpu()
        norms = of_ranks[:, :, 0].max(0).values
        apart = (of_ranks - of_ranks[0]).abs().max(-1).values
        rounding = max(APART, 4 * torch.finfo(dtype).eps)
        differs = (apart > rounding * norms) & (apart > NOISE * norms.norm())
        for rank, place in differs.nonzero().tolist():
            ranks, name = self._along.axis.ranks, parts[place][0]
            raise UserError(
                f"the gradient of '{name}' on rank {ranks[rank]} is not that on rank {ranks[0]}",
                where=self._where,
                allowed="Partial() for modules with parameters between a Column and its Row; Enter() for "
                "what heads share; what was cut in the forwards of its own modules alone, and in no penalty",
            )
        self._compared.update(name for (name, _), norm in zip(parts, norms, strict=True) if norm)

    def _states(self) -> list[torch.Tensor]:
        on_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    def _compare(self, what: str, mine: Sequence[int | None], allowed: str) -> None:
        numbers = [each for one in mine for each in (int(one is not None), (one or 0) % 2**62)]
        sent = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        rows = self._along.gathered(sent.unsqueeze(0), ALIKE_GATHER, 0, what).tolist()
        for place in range(0, len(numbers), 2):
            all_ = zip(self._along.axis.ranks, rows, strict=True)
            given = [(rank, row[place + 1]) for rank, row in all_ if row[place]]
            for rank, value in given:
                if value != given[0][1]:
                    raise UserError(
                        f"rank {rank} has other {what} than rank {given[0][0]}",
                        where=self._where,
                        allowed=allowed,
                    )


def along_tensor(tensor: Along | None, device: torch.device) -> Alike | None:
    """What compares a module's tensor ranks.

    None where nothing is compared: on one rank; and of what torch's parallelize_module has cut, which may
    divide its inputs, and whose random numbers torch keeps in step.
    """
    is_ours = tensor is not None and not tensor.ledger.not_counted
    return Alike(tensor, device) if tensor is not None and is_ours and not is_alone() else None


def with_initial(module: nn.Module, along: Along | None) -> Along | None:
    """A module's tensor axis, before sharding: what all ranks have whole is the same on them, slices are not.

    Values drawn after lowband.parallelize are wrong in one way or the other: with a seed for each rank those
    that all have whole differ, and with one seed slices are the same and so would stay. Slices of one
    parameter may be, such as repeated heads. Raises UserError, on every rank of the axis.
    """
    named = [(name, p) for name, p in module.named_parameters() if not p.is_meta and p.numel()]
    if along is None or along.ledger.not_counted or is_alone() or not named:
        return along
    mine = torch.stack([_fingerprint(p) for _, p in named])
    of_ranks = Along(along.axis).gathered(mine.unsqueeze(0), ALIKE_GATHER, 0, "initial weights").cpu()
    is_same = (of_ranks == of_ranks[0]).all(-1)
    slices, where = [], f"ranks {list(along.axis.ranks)} along tensor"
    allowed = "values from before lowband.parallelize, or init= of lowband.shard"
    for place, (name, parameter) in enumerate(named):
        of = slice_of(parameter)
        if of is not None and of.axis == "tensor":
            is_constant = bool((of_ranks[:, place, 2] != 0).any())
            slices += [] if is_constant else [is_same[1:, place]]
        elif (differs := of_ranks[:, place, 0] != of_ranks[0, place, 0]).any():
            other = along.axis.ranks[int(differs.int().argmax())]
            what = f"'{name}' on rank {other} has other values than on rank {along.axis.ranks[0]}"
            raise UserError(what, where=where, allowed=allowed)
    if slices and torch.stack(slices).all(0).any():
        raise UserError("all slices of two ranks have the same values", where=where, allowed=allowed)
    return along


def check_drawn(module: nn.Module, experts: Along | None) -> None:
    """Experts drawn after spread_experts with one seed are the same on each rank, and would stay so.

    Warns of it, before sharding: a program may mean it. Nothing is said of copies of one expert, as where all
    begin with the weights of a dense layer. Every rank of the axis makes the call.
    """
    named = [(name, p.detach()) for name, p in module.named_parameters() if is_of_expert(p)]
    named = [(name, p) for name, p in named if not p.is_meta and p.numel()]
    if experts is None or is_alone() or not named:
        return
    mine = torch.stack([_fingerprint(p) for _, p in named]).unsqueeze(0)
    of_ranks = Along(experts.axis).gathered(mine, ALIKE_GATHER, 0, "initial experts").cpu()
    is_same = (of_ranks[1:] == of_ranks[0]).all(-1)
    for place, (name, p) in enumerate(named):
        is_copied = len(p) > 1 and (p == p[:1]).all()
        if is_same[:, place].any() and not of_ranks[0, place, 2] and not is_copied:
            first, *others = experts.axis.ranks
            other = others[int(is_same[:, place].int().argmax())]
            warnings.warn(
                f"lowband: '{name}' on rank {other} has the values of that on rank {first}, of others: "
                "draw them before lowband.spread_experts, or by init= of lowband.shard",
                UserWarning,
                stacklevel=4,
            )
            return


def _fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    """[3] int64: a sum of its bits, at any order; one that knows their places; whether all values are one."""
    flat = parameter.detach().reshape(-1)
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)
    ramp = torch.linspace(-1, 1, len(flat), dtype=torch.float32, device=flat.device)
    placed = (flat.float() @ ramp).double().view(torch.int64)
    return torch.stack([bits.sum(dtype=torch.int64), placed, (flat == flat[0]).all().long()])


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes] of a strided tensor. A NaN equals itself by them."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _sum(tensor: torch.Tensor) -> int:
    """Of its bits, at any order; different values may have the same sum."""
    flat = bits_of(tensor)
    weights = torch.arange(1, len(flat) + 1, device=flat.device) % 65521
    return int((flat.to(torch.int64) * weights).sum())


def _measures(values: torch.Tensor) -> torch.Tensor:
    """[2] fp64: the 2-norm, and a sum with weights whose mean square is 1, which knows signs and places."""
    flat = values.detach().as_subclass(torch.Tensor).double()
    weights = (torch.arange(len(flat), device=flat.device) % 2 * 2 - 1).double()
    return torch.stack([flat.norm(), flat @ weights])
