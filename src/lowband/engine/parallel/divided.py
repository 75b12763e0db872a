"""What a plan for sequence parallelism may say wrongly of where tokens are divided.

Tokens that nobody divided are the same on all tensor ranks, which add their gradients as if they were others;
a module that divides them, called twice on one sequence, leaves some out. Both train, wrongly, and nothing
fails. Warned of, once, as there are programs that are right: other tokens may be equal, or half as many.
"""

import warnings

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowband.spec.activations import TOKENS


class Divided:
    """Of one module that is cut: what its forwards did to tokens."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._ranks = ranks
        self._is_compared = self._is_told = self._runs = False
        self._left: dict[str, int] = {}  # by name, on how many tokens of a rank the forward that runs goes on
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: object) -> None:
        self._runs = True

    def _end(self, *_: object) -> None:
        self._runs = False
        self._left.clear()

    def split(self, name: str, tokens: int) -> None:
        """A module divides the tokens of its input, so many."""
        if self._runs and self._left.get(name) == tokens and not self._is_told:
            self._is_told = True
            _warn(f"'{name}' divides the {tokens} tokens that it left: Split is for what is called once")
        if self._runs:
            self._left[name] = tokens // self._ranks

    def gathered(self, whole: torch.Tensor, name: str) -> None:
        """A Column got the tokens of all ranks; the first ones are compared."""
        if self._is_compared or torch.compiler.is_compiling() or isinstance(whole, FakeTensor):
            return
        self._is_compared = True
        first, *others = whole.detach().chunk(self._ranks, TOKENS)
        if any(not torch.equal(first, other) for other in others):
            return
        if not torch.equal(first, first.narrow(TOKENS, 0, 1).expand_as(first)):  # padding may be alike
            _warn(f"'{name}' was given the same tokens on all ranks: a Split says where they are divided")


def _warn(what: str) -> None:
    warnings.warn(f"lowband.parallelize, sequence_parallel: {what}", UserWarning, stacklevel=4)
