"""torch's layers with this tensor rank's part of their parameters. A plain layer becomes one in place.

Their forwards' arguments have the names of torch's, by which a program may give them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowband.engine.collectives.activations import Along, vocabulary_losses
from lowband.engine.parallel.divided import Divided
from lowband.errors import UserError
from lowband.spec.activations import ENTER, ENTER_TOKENS, JOIN, LEAVE, LEAVE_TOKENS, SPLIT, Exchange

LOOKS = 10  # forwards in which a cut loss looks whether it was given a part of the logits


@dataclass
class Entered:
    """The last input of a module's column products: queries, keys and values of one input send it once.

    Held until the module's forward ends, as a forward hook. Not reused: what was sent without a graph for a
    product that has one, and tensors whose values can change unseen: parameters, those of inference mode.
    """

    last: tuple[torch.Tensor, tuple[int, bool, bool], torch.Tensor] | None = None

    def through(self, x: torch.Tensor, cut: "Cut") -> torch.Tensor:
        if x.is_inference() or isinstance(x, nn.Parameter):
            return cut(x)
        state = x._version, x.requires_grad, torch.is_grad_enabled()
        if self.last is None or self.last[0] is not x or self.last[1] != state:
            self.last = x, state, cut(x)
        return self.last[2]

    def __call__(self, *_: object) -> None:
        self.last = None


@dataclass(frozen=True)
class Cut:
    """How a cut layer exchanges. name: the layer's; entered: shared by the column products of one module;
    divided: shared by all layers of the module that was cut, with sequence parallelism"""

    along: Along
    exchange: Exchange
    name: str
    entered: Entered = field(default_factory=Entered)
    divided: Divided | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.exchange in (ENTER_TOKENS, LEAVE_TOKENS):
            _check_tokens(x, self.name, self.along.ranks if self.exchange is LEAVE_TOKENS else 1)
        passed = self.along.pass_through(x, self.exchange, self.name)
        if self.divided is not None and self.exchange is ENTER_TOKENS:
            self.divided.gathered(passed, self.name)
        return passed


def _check_tokens(x: torch.Tensor, name: str, ranks: int) -> None:
    """With sequence parallelism dimension 1 is the tokens', of which each rank has its own."""
    if x.ndim < 3:
        raise UserError(
            f"activations {list(x.shape)}", where=f"'{name}'",
            allowed="[sequences, tokens, ..., features] with sequence parallelism",
        )  # fmt: skip
    if x.shape[1] % ranks:
        raise UserError(f"{x.shape[1]} tokens cannot be divided over tensor {ranks}", where=f"'{name}'")


class ColumnLinear(nn.Linear):
    cut: Cut
    exchanges: ClassVar = (ENTER, ENTER_TOKENS)
    divided: ClassVar = "out_features"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(self.cut.entered.through(input, self.cut), self.weight, self.bias)


class RowLinear(nn.Linear):
    cut: Cut
    exchanges: ClassVar = (LEAVE, LEAVE_TOKENS)
    divided: ClassVar = "in_features"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        summed = self.cut(F.linear(input, self.weight))
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)  # autocast's


class PartEmbedding(nn.Embedding):
    """Of all tokens, also with sequence parallelism."""

    cut: Cut
    exchanges: ClassVar = (LEAVE, LEAVE)
    divided: ClassVar = "num_embeddings"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows, along = self.weight.shape[0], self.cut.along
        if _outside(input, rows * along.ranks) is not None:
            raise IndexError("index out of range in self")  # as torch's on a CPU
        local = input - along.place * rows
        is_elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self.cut(found.masked_fill(is_elsewhere.unsqueeze(-1), 0))


def _outside(indices: torch.Tensor, size: int) -> int | None:
    """One of the indices that are outside of 0 to size - 1; on a GPU a device assert fails later."""
    if isinstance(indices, FakeTensor) or not indices.numel():
        return None
    if indices.device.type == "cuda":
        torch._assert_async(((indices >= 0) & (indices < size)).all(), f"index outside of 0 to {size - 1}")
    if indices.device.type != "cpu":
        return None
    return next((end for end in (int(indices.min()), int(indices.max())) if not 0 <= end < size), None)


class PartLoss(nn.CrossEntropyLoss):
    """Of logits [tokens, vocabulary / ranks]."""

    cut: Cut
    exchanges: ClassVar = (JOIN, JOIN)  # none of them passes: it sends three numbers a token
    looked = 0  # forwards in which it has looked whether ranks have parts of the logits
    divided: ClassVar = ""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if input.ndim > 2 or target.is_floating_point() or target.shape != input.shape[:-1]:
            raise UserError(
                f"logits {list(input.shape)} with targets {list(target.shape)}",
                where=f"Vocabulary of '{self.cut.name}'",
                allowed="[tokens, vocabulary / ranks] with the numbers of classes [tokens]",
            )
        if torch.is_autocast_enabled(input.device.type):  # as torch's, which autocast computes in fp32
            input = input.to(torch.promote_types(input.dtype, torch.float32))
        counted = target.masked_fill(target == self.ignore_index, 0)
        if (wrong := _outside(counted, input.shape[-1] * self.cut.along.ranks)) is not None:
            raise IndexError(f"Target {wrong} is out of bounds.")  # as torch's on a CPU
        looks = self.looked < LOOKS and not (torch.compiler.is_compiling() or isinstance(input, FakeTensor))
        if looks:
            self.looked += 1
        losses = vocabulary_losses(input, target, self.cut.along, self.ignore_index, self.cut.name, looks)
        total = losses.sum()
        if self.reduction == "mean":
            total = total / (target != self.ignore_index).sum()
        return total.to(input.dtype)


class Exchanging(nn.Identity):
    """An identity whose input, or gradient, is exchanged."""

    cut: Cut
    divided: ClassVar = ""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.cut(input)


class Joined(Exchanging):
    exchanges: ClassVar = (JOIN, JOIN)
    parts = 1

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        joined = super().forward(input)
        if self.parts == 1:
            return joined
        pieces = self.cut.along.ranks * self.parts
        if joined.shape[-1] % pieces:
            what = f"{joined.shape[-1]} features in {self.parts} parts on {self.cut.along.ranks} ranks"
            raise UserError(what, where=f"Join of '{self.cut.name}'", allowed="the parts of its Column")
        of_ranks = joined.unflatten(-1, (self.cut.along.ranks, self.parts, -1))  # each has some of every part
        return of_ranks.transpose(-3, -2).flatten(-3)


class Entering(Exchanging):
    exchanges: ClassVar = (ENTER, ENTER_TOKENS)


CutLayer = type[ColumnLinear] | type[RowLinear] | type[PartEmbedding] | type[PartLoss] | type[Exchanging]

# By the name of a rule and the type of a layer, what it becomes.
CUT: Final[Mapping[str, Mapping[type[nn.Module], CutLayer]]] = {
    "Column": {nn.Linear: ColumnLinear},
    "Row": {nn.Linear: RowLinear},
    "Vocabulary": {nn.Embedding: PartEmbedding, nn.Linear: ColumnLinear, nn.CrossEntropyLoss: PartLoss},
    "Join": {nn.Identity: Joined},
    "Enter": {nn.Identity: Entering},
}


@dataclass(frozen=True)
class Splitting:
    """A forward pre-hook that divides the first input by tokens."""

    along: Along
    name: str
    divided: Divided

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not inputs:
            what = "with sequence parallelism a module that splits tokens takes them by position"
            raise UserError(what, where=f"'{self.name}'", allowed="its first input, [sequences, tokens, ...]")
        first, *others = inputs
        tokens, ranks = first.shape[SPLIT.dim], self.along.ranks
        if tokens % ranks:
            raise UserError(f"{tokens} tokens cannot be divided over tensor {ranks}", where=f"'{self.name}'")
        self.divided.split(self.name, tokens)
        return self.along.pass_through(first, SPLIT, self.name), *others
