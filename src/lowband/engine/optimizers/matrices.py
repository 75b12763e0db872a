"""Whole matrices for optimizers that need them, such as Muon and Shampoo.

Ranks agree on the owner of each matrix (optimizers.matrix_owners). Before a step, pieces of its gradient
travel to the owner from the ranks that share its shards: 4 (P - own) bytes for a matrix of P elements, of
which the owner's shard has `own`. After it, pieces of its new value travel to every rank among which it was
dealt: with r replicas of the shards among them, 4 (r P - own) bytes.

[Note: values at the owner] The owner keeps the values of its matrices, in fp32. They are fetched again where
a shard has changed between two steps (a checkpoint was loaded). Checksums find that out, because all shards
of a unit share one version counter; the ranks exchange what they found, as only some may see a change.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowband.cost.matrices import update_cost
from lowband.engine.optimizers.matrix_owners import Matrix, deal
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport.axis import BoundHop
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Work
from lowband.engine.units.shard_of import ShardOf
from lowband.engine.units.steps import check_unmarked, mark_whole
from lowband.engine.units.unit import Unit
from lowband.engine.units.waiting import check_reduced
from lowband.engine.units.zero_grad import mark_updated
from lowband.errors import UserError
from lowband.spec.mesh import SELF
from lowband.spec.tiers import DEVICE

GATHER, RETURN = "matrix_gather", "matrix_return"


class Matrices:
    """The whole matrices of a sharded module that this rank owns.

        matrices = lowband.Matrices(model)
        muon = torch.optim.Muon(matrices.parameters(), lr=0.02)
        adamw = torch.optim.AdamW(matrices.others(), lr=3e-4)
        ...
        loss.backward(); lowband.clip_grad_norm_(model, 1.0)
        with matrices:  # gradients come in, new values go out
            muon.step()
        adamw.step(); adamw.zero_grad()

    select: maps a parameter's name and shape to whether it is updated as a whole matrix; default: those with
            two dimensions inside of the wrapped modules, and of no nn.Embedding, so no heads; in a pipeline
            not of its first and its last module, unless that is of the class of the one beside it
    cost:   of the update of a shape, in any unit, by which matrices are dealt out; default: Muon's
    over:   level among whose ranks they are dealt out; default: the optimizer's, so that every replica of the
            shards updates all of them again, and sends nothing to the others. "world": each is updated once

    Every rank must make one, and enter it before each step: a step outside is refused, and one whose closure
    makes gradients. Entering takes the gradients away from the shards; `zero_grad()` of an optimizer that has
    some of the matrices discards those of all of them. Owners keep fp32 values and, inside, gradients of
    their matrices. An optimizer's state belongs to its rank: save `muon.state_dict()` on each, and load it
    on as many ranks under the same scheme. If the step inside raises, the shards keep their values and lose
    their gradients. Raises UserError if nothing is selected, what another one updates, or for a level inside
    the optimizer's.
    """

    def __init__(
        self,
        module: nn.Module,
        select: Callable[[str, tuple[int, ...]], bool] | None = None,
        cost: Callable[[tuple[int, ...]], float] = update_cost,
        over: str | None = None,
    ) -> None:
        self._engine = engine_of(module)
        if self._engine.replicas is not None:
            raise UserError(
                "Matrices cannot train replicas that meet seldom",
                where="Matrices",
                allowed="schemes without sync",
            )
        in_root, ends = self._engine.units_of.get(module, []), self._engine.ends
        found = []
        for unit in self._engine.units:
            for i, shard in enumerate(unit.shards if unit.requires_grad else []):
                of: ShardOf = shard.shard_of  # type: ignore[attr-defined]
                is_inner = len(of.shape) == 2 and unit not in in_root and unit.name not in ends
                is_inner = is_inner and not any(isinstance(m, nn.Embedding) for m, _ in unit.slots[i])
                if is_inner if select is None else select(of.name, tuple(of.shape)):
                    found.append(Matrix(unit, i, of, _level(unit, over)))
        if not found and self._engine.pipeline is None:  # other stages have some
            raise UserError(
                "no matrices are selected", where="Matrices", allowed="select=, on name and shape"
            )
        for name, cut in ((matrix.of.name, matrix.of.slice_of) for matrix in found):
            if cut is None:
                continue
            what = f"'{name}' is cut over {cut.axis} ranks, none of which has the whole matrix"
            raise UserError(what, where="Matrices", allowed="select=, of parameters that are not cut")
        shards = [matrix.shard for matrix in found]
        check_unmarked(shards)
        costs = [cost(tuple(matrix.of.shape)) for matrix in found]  # the user's: it may raise
        mark_whole(shards)
        deal(found, costs)
        by_unit = [(unit, [m for m in found if m.unit is unit]) for unit in self._engine.units]
        if self._engine.pipeline is not None:  # a stage may have no matrices, and every rank makes the groups
            self._engine.axis.ring(SELF, _level(self._engine.units[0], over))
        self._shares = [_Share(unit, matrices) for unit, matrices in by_unit if matrices]
        idle = nn.Parameter(torch.empty(0, 0, device=self._engine.device))
        self._owned = [matrix.whole for matrix in found if matrix.is_owned] or [idle]
        mark_updated(self._owned, shards)

    def parameters(self) -> list[nn.Parameter]:
        """The matrices that this rank owns; on a rank that owns none, an empty one that has no gradient."""
        return list(self._owned)

    def others(self) -> list[nn.Parameter]:
        """The shards of all other parameters, for an optimizer that works element by element."""
        taken = {matrix.shard for share in self._shares for matrix in share.matrices}
        return [p for unit in self._engine.units for p in unit.shards if p not in taken]

    def __enter__(self) -> "Matrices":
        self._engine.put_shards()
        for unit in self._engine.units:
            unit.grads.settle()
        shards = [m.shard for share in self._shares for m in share.matrices]
        check_reduced(shards, "Matrices", "this step would leave out")
        self._moved = [share for share in self._shares if share.has_gradients]
        for share in self._moved:
            share.begin()
        self._engine.passes.backward.are_taken = True
        for handle in [share.submit(GATHER, share.fetch) for share in self._moved]:
            handle.wait()
        self._engine.at_owners += 1
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        moved, self._moved = self._moved, []
        self._engine.at_owners -= 1
        if error is None:
            for handle in [share.submit(RETURN, share.give_back) for share in moved]:
                handle.wait()
        for share in moved:  # after an error the owners' values are not those of the shards
            share.finish(is_returned=error is None)


class _Share:
    """The matrices of one unit, and their way to the owners and back."""

    def __init__(self, unit: Unit, matrices: list[Matrix]) -> None:
        """Every rank with matrices of the unit must do this at once, because it may create process groups."""
        self.unit, self.matrices = unit, matrices
        ring = unit.collectives.axis.ring(SELF, matrices[0].level)
        self._bound: BoundHop | None = ring[0] if ring else None
        self._sharing = matrices[0].of.ranks  # those whose shards make up a whole with this rank's
        self._ranks = self._bound.hop.partners(unit.rank) if self._bound else [unit.rank]
        self._moving: list[Matrix] = []  # those that have gradients, inside a step
        self._gradients: list[torch.Tensor] = []  # this rank's pieces of these
        self._seen: list[list[int]] | None = None  # checksums of what the owners' values agree with

    @property
    def has_gradients(self) -> bool:
        return any(matrix.shard.grad is not None for matrix in self.matrices)

    def begin(self) -> None:
        """Take the gradients from the shards, and make room for them at the owners."""
        self._moving = [matrix for matrix in self.matrices if matrix.shard.grad is not None]
        self._gradients = [self._gradient(matrix) for matrix in self._moving]
        for matrix in self._moving:
            matrix.shard.grad = None
        for matrix in _owned(self._moving):
            matrix.whole.grad = self.unit.meter.hold("grads", torch.empty_like(matrix.whole))

    def submit(self, name: str, work: Callable[[Call, str], Work]) -> Any:
        levels = [self._bound.hop.level] if self._bound else []
        work = partial(work, name=name)
        return self.unit.collectives.submit(self.unit.name, levels, work, uses=self._gradients)

    def fetch(self, call: Call, name: str) -> Work:
        """Bring gradients, and values that have changed, to the owners."""
        yield from ()
        if self._agree(call, self._checksums() != self._seen):
            pieces = [matrix.piece for matrix in self.matrices]
            self._bring(call, name, self.matrices, pieces, lambda whole: whole.data)
        self._bring(call, name, self._moving, self._gradients, lambda whole: whole.grad)

    def give_back(self, call: Call, name: str) -> Work:
        """Bring the new values back to the shards."""
        yield from ()
        mine = _owned(self.matrices)
        sent = [self._flat(mine, rank) for rank in self._ranks]
        back = [self._empty([m for m in self.matrices if m.owner == rank]) for rank in self._ranks]
        self._swap(call, name, sent, back)
        for rank, values in zip(self._ranks, back, strict=True):
            source = self._flat(mine, rank) if rank == self.unit.rank else values
            theirs = [matrix for matrix in self.matrices if matrix.owner == rank]
            for matrix, part in zip(theirs, _cut(source, theirs, self.unit.rank), strict=True):
                matrix.piece.copy_(part)

    def finish(self, is_returned: bool) -> None:
        """Free the gradients. is_returned: whether the owners' values are now those of the shards"""
        for matrix in _owned(self._moving):
            self.unit.meter.release("grads", matrix.whole.nbytes)
            matrix.whole.grad = None
        self._moving, self._gradients = [], []
        self._seen = self._checksums() if is_returned else None

    def _checksums(self) -> list[list[int]]:
        """Of the bits of this rank's pieces, and of their places."""
        return [_checksum(matrix.piece.view(torch.int32)) for matrix in self.matrices]

    def _gradient(self, matrix: Matrix) -> torch.Tensor:
        gradient = matrix.shard.grad
        assert gradient is not None
        part = gradient.as_subclass(torch.Tensor)[: matrix.of.stop - matrix.of.start]
        return part.float()  # beside a lowband.AdamW it has the reduce dtype

    def _bring(
        self, call: Call, name: str, matrices: Sequence[Matrix], pieces: Sequence[torch.Tensor],
        into: Callable[[nn.Parameter], torch.Tensor | None],
    ) -> None:  # fmt: skip
        """Fill the owners' whole tensors of some matrices from all ranks' pieces, given by matrix."""
        mine = _owned(matrices)
        by_owner: dict[int, list[torch.Tensor]] = {rank: [] for rank in self._ranks}
        for matrix, piece in zip(matrices, pieces, strict=True):
            if self.unit.rank in matrix.givers:
                by_owner[matrix.owner].append(piece)
        sent = [torch.cat(parts) if parts else self._empty([]) for parts in by_owner.values()]
        received = [self._empty(mine if r in self._sharing else [], r) for r in self._ranks]
        self._swap(call, name, sent, received)
        for rank, out, arrived in zip(self._ranks, sent, received, strict=True):
            if rank not in self._sharing:
                continue
            parts = _cut(out if rank == self.unit.rank else arrived, mine, rank)
            for matrix, part in zip(mine, parts, strict=True):
                whole = into(matrix.whole)
                assert whole is not None
                whole.view(-1)[matrix.range_of(rank)] = part

    def _flat(self, matrices: list[Matrix], rank: int) -> torch.Tensor:
        """The pieces that a rank holds of whole matrices."""
        parts = [matrix.whole.detach().view(-1)[matrix.range_of(rank)] for matrix in matrices]
        return torch.cat(parts) if parts else self._empty([])

    def _empty(self, matrices: list[Matrix], rank: int | None = None) -> torch.Tensor:
        """Room for the pieces of `matrices` that a rank holds, by default this one."""
        numel = sum(_length(matrix, self.unit.rank if rank is None else rank) for matrix in matrices)
        return self.unit.master.new_empty(numel)

    def _agree(self, call: Call, changed: bool) -> bool:
        """Whether any of the ranks has `changed`. See [Note: values at the owner]."""
        flag = torch.tensor([changed], dtype=torch.uint8, device=self.unit.master.device)
        flags = [torch.zeros_like(flag) for _ in self._ranks]
        self._swap(call, "matrix_changed", [flag] * len(self._ranks), flags)
        return changed or any(bool(each) for each in flags)

    def _swap(self, call: Call, name: str, sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
        """Send sent[i] to the i-th rank and receive received[i] from it; this rank's own are not moved."""
        bound, here = self._bound, self._ranks.index(self.unit.rank)
        if bound is None:
            return
        for tensor in (*sent, *received):
            call.hold(tensor)
        if bound.back is not None:
            messages = [[each if each.numel() else None for each in tensors] for tensors in (sent, received)]
            bound.exchange(*messages, call.name(name))
        else:
            own = sent[here].new_empty(0)
            sent, received = ([*t[:here], own, *t[here + 1 :]] for t in (sent, received))
            dist.all_to_all(received, sent, group=bound.group)
        for rank, tensor in zip(self._ranks, sent, strict=True):
            if rank != self.unit.rank:
                level = self.unit.levels.common(rank, self.unit.rank)
                self.unit.collectives.ledger.add(level, name, "fp32", tensor.nbytes)
        for tensor in (*sent, *received):
            call.release(tensor)


def _checksum(bits: torch.Tensor) -> list[int]:
    """Sums over rows and columns of a square, and what is left of it, each times its place. Another value
    changes them, and so do two that change places. bits: 1D, int32
    """
    side = isqrt(len(bits))
    square, left = bits[: side * side].view(side, side), bits[side * side :]
    places = torch.arange(1, len(left) + side + 1, device=bits.device)
    by_place = [(sums * places[: len(sums)]).sum() for sums in (square.sum(0), square.sum(1), left)]
    return [int(each) for each in torch.stack(by_place).tolist()]


def _owned(matrices: Sequence[Matrix]) -> list[Matrix]:
    return [matrix for matrix in matrices if matrix.is_owned]


def _length(matrix: Matrix, rank: int) -> int:
    held = matrix.range_of(rank)
    return int(held.stop - held.start)


def _cut(flat: torch.Tensor, matrices: list[Matrix], rank: int) -> Iterator[torch.Tensor]:
    """A message's parts: the pieces that a rank holds of the matrices."""
    return iter(flat.split([_length(matrix, rank) for matrix in matrices]))


def _level(unit: Unit, over: str | None) -> str:
    """The level that a unit's matrices are dealt out over."""
    if unit.scheme.optim_tier != DEVICE:
        what = f"optim in {unit.scheme.optim_tier} of '{unit.name}': owners update matrices on the device"
        raise UserError(what, where="Matrices", allowed=f"optim {unit.scheme.optim}")
    optim, names = unit.scheme.optim, unit.levels.names
    allowed = names[unit.levels.index(optim) :]
    if over is not None and over not in allowed:
        raise UserError(f"over='{over}' of '{unit.name}'", where="Matrices", allowed=allowed)
    return optim if over is None else over
