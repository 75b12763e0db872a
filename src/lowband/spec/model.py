"""A GPT's shape: parameter names and shapes, and their exact count, without building it."""

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from lowband.spec.strict import Strict, read_named


class ModelSpec(Strict):
    """A decoder-only GPT as in GPT-NeoX and Megatron-LM: pre-norm, MLP of 4 x hidden, biases everywhere."""

    name: str
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    vocab: PositiveInt
    seq_len: PositiveInt = Field(description="longest sequence; also the number of learned positions")
    positions: Literal["learned", "rotary"] = "learned"
    tied_head: bool = Field(default=True, description="whether the output layer is the embedding")
    source: str = Field(min_length=1, description="where the shape stands, or 'ours'")

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelSpec":
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) is no multiple of heads ({self.heads})")
        if self.positions == "rotary" and self.hidden // self.heads % 2:
            raise ValueError(f"rotary positions need an even head size, not {self.hidden // self.heads}")
        return self

    def root_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters outside the blocks, under the names of `model.gpt.GPT`, in its order."""
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, h)}
        if self.positions == "learned":
            shapes["positions.weight"] = (self.seq_len, h)
        shapes |= {"final_norm.weight": (h,), "final_norm.bias": (h,)}
        if not self.tied_head:
            shapes["head.weight"] = (self.vocab, h)
        return shapes

    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters of one transformer block, likewise."""
        h = self.hidden
        return {
            "attention_norm.weight": (h,),
            "attention_norm.bias": (h,),
            "attention.qkv.weight": (3 * h, h),
            "attention.qkv.bias": (3 * h,),
            "attention.out.weight": (h, h),
            "attention.out.bias": (h,),
            "mlp_norm.weight": (h,),
            "mlp_norm.bias": (h,),
            "mlp.up.weight": (4 * h, h),
            "mlp.up.bias": (4 * h,),
            "mlp.down.weight": (h, 4 * h),
            "mlp.down.bias": (h,),
        }

    def unit_shapes(self) -> list[list[tuple[int, ...]]]:
        """Shapes per unit as the engine gathers them: the root's, then each block's."""
        block = list(self.block_shapes().values())
        return [list(self.root_shapes().values()), *[block] * self.layers]

    @property
    def parameters(self) -> int:
        """Exact number of parameters; a tied head counts once."""
        return sum(math.prod(shape) for unit in self.unit_shapes() for shape in unit)


def read_model(path: Path, name: str) -> ModelSpec:
    model: ModelSpec = read_named(ModelSpec, path, name)
    return model
