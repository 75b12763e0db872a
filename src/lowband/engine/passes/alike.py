"""What ranks along an axis other than data must have in common: inputs, random numbers, some gradients.

Ranks along tensor compute one batch together, those along pipeline one after the other. If a program gives
each of them a batch of its own, as a sampler of all ranks does, losses fall and mean nothing. The same holds
for tensor ranks that drop different values of activations which all of them have. Neither is an error by
itself, so it is looked for: inputs once, random numbers in every step of a module that draws some.

[Note: gradients] Tensor ranks compute the gradient of a parameter that all of them have whole, and which the
plan does not call partial, from the same values, so it is the same up to what atomic sums on a GPU round
otherwise. Where it is not, the program has gone around an exchange: a module between a Column and its Row is
not named, a cut weight is used by another function than its layer's forward, or a penalty sees a rank's part.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowband.engine.collectives.activations import Along
from lowband.engine.transport.consistency import is_alone
from lowband.errors import UserError
from lowband.spec.activations import ALIKE_GATHER

STEPS = 10
# Of a gradient's norm, what is no rounding; of the norm of all, what one may have that is zero but for it.
APART, NOISE = 0.05, 1e-6


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
            sums.append(sum(map(_sum, compared)) if compared else None)
        self._compare("inputs", sums, "the same batch on all of them; None where it is not used")

    def begin(self) -> None:
        """A forward begins, or a step."""
        self._before = [state.clone() for state in self._states()]

    def end(self) -> None:
        """It has ended. Raises UserError, on every rank of the axis, if ranks that draw begin differently."""
        before, self._before = self._before, []
        changed = any(not torch.equal(a, b) for a, b in zip(before, self._states(), strict=False))
        self._draws |= changed
        if self._draws:
            sums: list[int | None] = [sum(map(_sum, before))]
            self._compare("states of random numbers", sums, "the same seed on all of them, or no dropout")

    def check_gradients(self, parts: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Compare each gradient in the first step in which it is not zero, in the first STEPS of them.

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
        differs = (apart > APART * norms) & (apart > NOISE * norms.norm())
        for rank, place in differs.nonzero().tolist():
            ranks, name = self._along.axis.ranks, parts[place][0]
            raise UserError(
                f"the gradient of '{name}' on rank {ranks[rank]} is not that on rank {ranks[0]}",
                where=self._where,
                allowed="Partial() for modules with parameters between a Column and its Row; what was cut in "
                "the forwards of its own modules alone, and in no penalty",
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


def _sum(tensor: torch.Tensor) -> int:
    """Of its bits, at any order; different values may have the same sum."""
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    weights = torch.arange(1, len(flat) + 1, device=flat.device) % 65521
    return int((flat.to(torch.int64) * weights).sum())


def _measures(values: torch.Tensor) -> torch.Tensor:
    """[2] fp64: the 2-norm, and a sum with weights whose mean square is 1, which knows signs and places."""
    flat = values.detach().as_subclass(torch.Tensor).double()
    weights = (torch.arange(len(flat), device=flat.device) % 2 * 2 - 1).double()
    return torch.stack([flat.norm(), flat @ weights])
