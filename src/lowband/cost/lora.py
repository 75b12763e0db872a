"""Adapters of low rank beside frozen matrices (LoRA, arXiv 2106.09685, section 4.1), in closed form.

Beside a frozen matrix of m x n come A of r x n and B of m x r, and it computes W x + (alpha / r) B A x. Of a
block's matrices each that is adapted has, per token,

    parameters   r (m + n), which alone have gradients and states of an optimizer
    products     2 r (m + n) FLOPs forward, twice as many backward; of frozen matrices the backward has only
                 the gradient of the input, as many FLOPs as the forward
    memory       A and B read and write n + 2 r + m values, scaling 2 m and adding 3 m: 4 kernels
    kept         A's output, r values, beside the input

A frozen matrix keeps no input, because nothing but its own gradient needs it: h less of queries, keys and
values if none of them is adapted, h less of the MLP's gate and up likewise, and less what an output has: f of
an MLP's down (of a gated one whose product is computed again it was not kept), o of attention's behind plain
attention (a fused kernel keeps it for itself). Norms, attention and activation functions keep what they do.
Embeddings and head are frozen. Adapters compute in the compute dtype, from fp32 masters, without dropout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowband.errors import UserError
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.step import Attention

MATRICES = ("q", "k", "v", "out", "gate", "up", "down")
OF_PAPER = ("q", "v")  # section 5.1
KERNELS = 4
HALF = 2  # bytes of a 16-bit value


@dataclass(frozen=True)
class Lora:
    """Adapters of one rank on some of a block's matrices, by the names of MATRICES."""

    rank: int
    on: Sequence[str] = OF_PAPER

    def check(self, model: ModelSpec) -> None:
        """Raises UserError for a model whose matrices are others, or that lacks one."""
        if model.experts is not None or model.latent is not None or model.linear_layers:
            what = "adapters of models with experts, a latent or linear layers are not predicted"
            raise UserError(what, where=f"model '{model.name}'")
        has = [name for name in MATRICES if model.gated or name != "gate"]
        if unknown := [name for name in self.on if name not in has]:
            raise UserError(f"no matrix '{unknown[0]}'", where=f"model '{model.name}'", allowed=has)

    def shapes(self, model: ModelSpec) -> list[tuple[int, int]]:
        """Of a block's adapters: A and B of each matrix in turn."""
        h, q, k, o, f = (
            model.hidden, model.query_hidden, model.kv_hidden, model.out_hidden, model.mlp_width,
        )  # fmt: skip
        sizes = {
            "q": (q, h), "k": (k, h), "v": (k, h), "out": (h, o),
            "gate": (f, h), "up": (f, h), "down": (h, f),
        }  # fmt: skip
        of_matrices = [sizes[name] for name in MATRICES if name in self.on]
        return [shape for m, n in of_matrices for shape in ((self.rank, n), (m, self.rank))]

    def parameters(self, model: ModelSpec) -> int:
        """Of a block."""
        return sum(rows * columns for rows, columns in self.shapes(model))

    def moved(self, model: ModelSpec) -> tuple[int, int]:
        """Bytes per token and block that A and B read and write, forward, and those of scaling and adding."""
        parts = self.shapes(model)
        wide = sum(shape[0] for shape in parts[1::2])
        return HALF * sum(map(sum, parts)), HALF * 5 * wide

    def kept_more(self, model: ModelSpec, attention: Attention, gated_kept: int) -> int:
        """Bytes per token and block that are kept beside those of a block that is trained; mostly less."""
        h, on = model.hidden, set(self.on)
        at_attention, at_mlp = bool(on & {"q", "k", "v"}), bool(on & {"gate", "up"})
        less = 0
        if model.parallel_block:  # one input
            less += 0 if at_attention or at_mlp else h
        else:
            less += h * (not at_attention) + h * (not at_mlp)
        if attention == "plain" and "out" not in on:
            less += model.out_hidden
        if "down" not in on and (not model.gated or gated_kept > 2):
            less += model.mlp_width
        return HALF * (self.rank * len(on) - less)


def of_frozen(scheme: Scheme) -> Scheme:
    """Where weights that never change lie: no states beside them, and no new ones to gather."""
    placed = {"grads": scheme.weights, "optim": scheme.weights}
    return scheme.model_copy(update=placed)
