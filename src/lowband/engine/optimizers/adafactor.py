"""Adafactor on shards: Shazeer and Stern, arXiv 1804.04235, as torch.optim.Adafactor computes it.

A shard is a range of the flattened parameter, so of a matrix it holds some rows, the first and the last of
them in part. Sums over rows and columns are completed by the other ranks (units.shard_sums).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from lowband.engine.units.shard_of import ShardOf
from lowband.engine.units.shard_parameter import ShardParameter
from lowband.engine.units.shard_sums import norms, part_of, step_begun, sum_parts


@dataclass(frozen=True)
class Rows:
    """The rows that a rank's range of a parameter of shape (..., rows, columns) touches.

    first, count: of them, among all rows of all matrices
    lead:         values of the first one that lie before the range
    """

    rows: int
    columns: int
    first: int
    count: int
    lead: int

    @classmethod
    def of(cls, of: ShardOf) -> "Rows":
        *_, rows, columns = of.shape
        first, lead = divmod(of.start, columns)
        return cls(rows, columns, first, -(-(lead + of.stop - of.start) // columns), lead)

    @property
    def places(self) -> slice:
        """Their places among all rows of all matrices."""
        return slice(self.first, self.first + self.count)

    def matrices(self) -> Iterator[tuple[int, slice]]:
        """Each matrix that they belong to, and its rows, counted from the first row of the range."""
        for matrix in range(self.first // self.rows, -(-self.places.stop // self.rows)):
            start = matrix * self.rows - self.first
            yield matrix, slice(max(start, 0), start + self.rows)

    def fill(self, part: torch.Tensor) -> torch.Tensor:
        """[count, columns] from the range's values, 1D, with zeros for those of other ranks."""
        after = self.count * self.columns - self.lead - len(part)
        return pad(part, (self.lead, after)).view(self.count, self.columns)


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor's step, arguments and names of states.

    params: shards: `module.parameters()` after lowband.shard, or groups of them
    eps:    added to the denominator (None: fp32's epsilon), and the least root mean square of a parameter

    For a parameter of two dimensions or more, every rank keeps the running means of its squared gradients'
    rows, (..., rows, 1), and columns, (..., 1, columns); of others, the variances of its part, all in fp32.
    `lowband.Checkpointer` saves them. Every rank must step it at the same time. A step raises UserError for a
    parameter that is no shard.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; returns what `closure` returns, which is called first, with gradients enabled."""
        loss, pairs = step_begun(self, closure)
        shards = [shard for _, shard in pairs]
        self._add_squares(pairs)
        weights = norms(shards)
        updates = norms(shards, [self._update(group, shard) for group, shard in pairs])
        for (group, shard), weight, update in zip(pairs, weights, updates, strict=True):
            root = shard.shard_of.shape.numel() ** 0.5
            size = (weight / root).clamp(min=group["eps"][1])
            rate = min(group["lr"], self.state[shard]["step"] ** -0.5)
            scale = rate * size / (update / (root * group["d"])).clamp(min=1.0)
            own = _own(shard, part_of(shard))
            own.mul_(1 - group["lr"] * group["weight_decay"]).sub_(self._update(group, shard) * scale)
        return loss

    def _add_squares(self, pairs: list[tuple[dict[str, Any], ShardParameter]]) -> None:
        """Bring the running means of squared gradients up to date."""
        factored = [shard for _, shard in pairs if shard.ndim > 1]
        sums = dict(zip(factored, sum_parts(factored, [_sums(shard) for shard in factored]), strict=True))
        for group, shard in pairs:
            state = self.state[shard]
            state["step"] = state.get("step", 0) + 1
            new = state["step"] ** group["beta2_decay"]  # 1 in the first step
            if shard in sums:
                *batch, rows, columns = shard.shard_of.shape
                of_rows, of_columns = sums[shard].float().split(_lengths(shard.shard_of.shape))
                for name, mean, shape in (
                    ("row_var", of_rows / columns, (*batch, rows, 1)),
                    ("col_var", of_columns / rows, (*batch, 1, columns)),
                ):
                    state.setdefault(name, mean.new_zeros(shape)).lerp_(mean.view(shape), new)
            else:
                variance = state.setdefault("variance", torch.zeros_like(part_of(shard)))
                _own(shard, variance).lerp_(_gradient(shard).square(), new)

    def _update(self, group: dict[str, Any], shard: ShardParameter) -> torch.Tensor:
        """The gradient over its root mean square, 1D, of this rank's range."""
        state, gradient = self.state[shard], _gradient(shard)
        least = torch.finfo(torch.float32).eps if group["eps"][0] is None else group["eps"][0]
        if shard.ndim > 1:
            rows = Rows.of(shard.shard_of)
            of_rows, of_columns = state["row_var"], state["col_var"]
            estimate = of_rows.view(-1)[rows.places].view(-1, 1).repeat(1, rows.columns)
            means = of_rows.mean(dim=-2).view(-1).clamp(min=least)
            for matrix, inside in rows.matrices():
                estimate[inside] *= of_columns.view(-1, rows.columns)[matrix]
                estimate[inside] /= means[matrix]
            estimate = estimate.view(-1)[rows.lead : rows.lead + len(gradient)]
        else:
            estimate = _own(shard, state["variance"]).clone()
        return estimate.clamp_(min=least * least).rsqrt_().mul_(gradient)


def _sums(shard: ShardParameter) -> torch.Tensor:
    """The squared gradient of this rank's range summed over all rows and all columns: 1D, fp64."""
    rows = Rows.of(shard.shard_of)
    squares = rows.fill(_gradient(shard).square())
    numel = sum(_lengths(shard.shard_of.shape))
    sums = torch.zeros(numel, dtype=torch.float64, device=squares.device)
    of_rows, of_columns = sums.split(_lengths(shard.shard_of.shape))
    of_rows[rows.places] = squares.sum(1, dtype=torch.float64)
    for matrix, inside in rows.matrices():
        of_columns.view(-1, rows.columns)[matrix] = squares[inside].sum(0, dtype=torch.float64)
    return sums


def _lengths(shape: torch.Size) -> list[int]:
    """How many rows and how many columns all matrices have."""
    *_, rows, columns = shape
    return [shape.numel() // columns, shape.numel() // rows]


def _own(shard: ShardParameter, values: torch.Tensor) -> torch.Tensor:
    """Values that are sharded as a shard, without the padding behind."""
    return values[: shard.shard_of.stop - shard.shard_of.start]


def _gradient(shard: ShardParameter) -> torch.Tensor:
    assert shard.grad is not None
    return _own(shard, shard.grad.as_subclass(torch.Tensor))
