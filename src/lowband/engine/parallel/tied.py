"""What stages on several ranks share: gradients of parameters are summed over these ranks, once a step.

Each rank adds the same parts in the same order, from the last rank of the chain to the first, as a backward
comes to them. So the copies stay equal, provided that each rank's optimizer does the same to its own: with
its gradient each sends a checksum of its copy. Of buffers each rank has a copy, too, so they must not change.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lowband.engine.parallel.plan import Cut, Plan
from lowband.engine.passes.alike import bits_of
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.messages import Messages
from lowband.engine.units.tied_to import TiedTo, tie, tied_to
from lowband.engine.units.unit import Unit
from lowband.errors import UserError
from lowband.spec.activations import TIED_REDUCE


def tie_copies(chain: Mapping[str, nn.Module], cuts: Sequence[Cut], plan: Plan, place: int) -> None:
    """Let what stages on several ranks share know of its copies: parameters, buffers. place: of this rank

    Raises UserError if a rank has no parameters.
    """
    named = list(chain.items())
    users: dict[torch.Tensor, tuple[str, dict[int, None]]] = {}  # its first name, and ranks in order
    for stage, of_it in enumerate(cuts):
        for at, module in named[slice(*of_it)]:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                users.setdefault(tensor, (f"{at}.{name}", {}))[1][plan.rank_of[stage]] = None
    used = {rank for of, (_, ranks) in users.items() if isinstance(of, nn.Parameter) for rank in ranks}
    if without := sorted(set(plan.rank_of.values()) - used):
        raise UserError(
            f"ranks {without} of the axis have no parameters", where="a pipeline", allowed="other layers"
        )
    for tensor, (name, ranks) in users.items():
        if len(ranks) > 1:
            tie(tensor, TiedTo(name, tuple(ranks), place))


class Tied:
    """The exchanges of one rank of a pipeline."""

    def __init__(self, axis: Axis, messages: Messages, ledger: Ledger, where: str) -> None:
        """where: the pipeline's name"""
        self._axis, self._messages, self._ledger, self._where = axis, messages, ledger, where

    @contextmanager
    def same_buffers(self, module: nn.Module) -> Iterator[None]:
        """Raises UserError if a shared buffer of the module, this rank's stages, changes in this context."""
        shared = {
            at: (of.name, bits_of(buffer).clone())
            for at, buffer in module.named_buffers()
            if (of := tied_to(buffer)) is not None
        }
        yield
        for at, (name, before) in shared.items():
            if not torch.equal(bits_of(module.get_buffer(at)), before):  # also by another in its place
                raise UserError(
                    f"a forward changed the buffer '{name}', of which several stages have copies",
                    where=self._where,
                    allowed="several stages share no module with such buffers, as BatchNorm in training",
                )

    def sum_over_copies(self, parts: Sequence[tuple[Unit, torch.Tensor]]) -> None:
        """Add to this rank's shards of gradients those of the other copies, in place.

        Raises UserError, on all ranks that have one, if copies differ.
        """
        moving = []
        for unit, part in parts:
            assert unit.tied is not None
            unit.clear_padding()
            values = unit.master if unit.held.disk is None else unit.held.disk.rounded.float()
            mine = torch.cat([part, _checksum(values)]).to(unit.collectives.device)
            others = [place for place in unit.tied.places if place != unit.tied.place]
            sent = [self._messages.send(mine, to, self._name(unit.tied)) for to in others]
            arriving = {
                source: self._messages.receive(
                    tuple(mine.shape), mine.dtype, mine.device, source, self._name(unit.tied)
                )
                for source in others
            }
            for to in others:
                level = self._axis.levels.common(self._axis.rank, self._axis.ranks[to])
                self._ledger.add(level, TIED_REDUCE.name, "native", mine.nbytes)
            moving.append((unit.tied, part, mine, sent, arriving))
        for tied, part, mine, sent, arriving in moving:
            found = {place: message.wait().to(mine.device) for place, message in arriving.items()}
            for message in sent:
                message.wait()
            self._add(tied, part, {**found, tied.place: mine})

    def _add(self, tied: TiedTo, part: torch.Tensor, by_place: dict[int, torch.Tensor]) -> None:
        """by_place: each copy's gradient, with its checksum behind"""
        *rest, total = (by_place[place] for place in tied.places)
        sums = [each[-2:].view(torch.int32) for each in (*rest, total)]
        if any(not torch.equal(each, sums[-1]) for each in sums):
            raise UserError(
                f"the copies of '{tied.name}' on ranks {sorted(tied.places)} of the axis differ",
                where=self._where,
                allowed="the same values at the start, the same optimizer and options for all of them",
            )
        part.copy_(total[:-2])
        for each in reversed(rest):
            part += each[:-2]

    def _name(self, tied: TiedTo) -> str:
        return f"the gradient of '{tied.name}' ({self._where})"


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """[2] of fp32's bits: the sum of the values' bits, which has one value whatever the order."""
    return values.view(torch.int32).sum(dtype=torch.int64).view(1).view(torch.float32)
