"""Graphs that reach out of a stage: what its modules keep for a loss, and what a loss takes beside outputs.

A module may keep a side loss in an attribute or a list, and the program's loss adds all of them up. In stages
the loss is computed on the rank of the last one, where the others' modules never run: their side losses would
be missing, without an error. So after the first step this looks for graphs of earlier stages that are still
alive although their backward is over.
"""

import gc
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lowband.engine.passes.nested import replaced


class KeptGraphs:
    """Of one step, the graphs of all stages but the last."""

    def __init__(self) -> None:
        self._nodes: list[weakref.ref[Any]] = []

    def watch(self, node: Any) -> None:
        """A node at the beginning of a stage's graph, which lives as long as what was computed from it."""
        self._nodes.append(weakref.ref(node))

    def watched(self, value: Any) -> Any:
        """The output of the pipeline's first module, of which the rest of its stage is computed."""
        return replaced(value, lambda each: _Watched.apply(each, self) if each.requires_grad else each)

    def check(self) -> None:
        """After all backwards. Warns if a graph is still there."""
        if self._alive():
            gc.collect()  # cycles are nobody's
        if self._alive():
            text = (
                "a pipeline: modules keep what they have computed, with its graph, after the backward. A "
                "side loss in an attribute or a list does not reach the last stage's loss: hand it on with "
                "the output, and detach() what is only looked at"
            )
            warnings.warn(text, UserWarning, stacklevel=2)
        self._nodes.clear()

    def _alive(self) -> bool:
        return any(node() is not None for node in self._nodes)


class _Watched(torch.autograd.Function):
    """The same values, of the same memory and version."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, kept: KeptGraphs) -> torch.Tensor:
        kept.watch(ctx)
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def leaves_beside(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Leaves of a loss's graph that it does not reach through the outputs."""
    seen = {output.grad_fn for output in outputs}
    found = [loss.grad_fn]
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        found += [each for each, _ in node.next_functions]
