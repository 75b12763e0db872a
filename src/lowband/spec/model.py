"""A GPT's shape: parameter names and shapes, and their exact count, without building it."""

import math
from collections.abc import Collection
from typing import ClassVar, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lowband.spec.attention import Latent
from lowband.spec.yaml_model import Younger

AttentionKernel = Literal["sdpa", "flash2"]
Attention = Literal["softmax", "linear"]

CHUNK: Final = 64  # tokens of linear attention at once: products inside and with states take equally long

# Each far beyond any model known: a layer is a unit in memory, and numbers of parameters fit into 64 bits.
MOST_LAYERS, MOST_WIDTH, MOST_VOCAB, MOST_POSITIONS = 10_000, 2**20, 2**28, 2**31

PREDICTED = (  # with any of these other than its default, a model can only be predicted
    "head_dim", "qk_norm", "window", "full_every", "chunked", "latent", "sinks", "parallel_block",
    "post_norms", "dense_layers", "shared_gate",
)  # fmt: skip


class ModelSpec(Younger):
    """A decoder-only transformer. The defaults are the GPT of GPT-NeoX and Megatron-LM: pre-norm, MLP of
    4 x hidden, biases everywhere. Only that can be trained here (`model.gpt`); other shapes are predicted."""

    younger: ClassVar = (
        "attention", "softmax_every", "experts", "top_k", "expert_hidden", "shared_experts", "balance",
        *PREDICTED,
    )  # fmt: skip

    name: str
    layers: PositiveInt = Field(le=MOST_LAYERS)
    hidden: PositiveInt = Field(le=MOST_WIDTH)
    heads: PositiveInt = Field(le=MOST_WIDTH)
    vocab: PositiveInt = Field(le=MOST_VOCAB)
    seq_len: PositiveInt = Field(
        le=MOST_POSITIONS, description="longest sequence; also the number of learned positions"
    )
    positions: Literal["learned", "rotary"] = "learned"
    tied_head: bool = Field(default=True, description="whether the output layer is the embedding")
    kv_heads: PositiveInt | None = Field(default=None, description="none: as heads")
    mlp_hidden: PositiveInt | None = Field(default=None, le=16 * MOST_WIDTH, description="none: 4 x hidden")
    gated: bool = Field(default=False, description="whether the MLP has a third matrix, its gate (SwiGLU)")
    biases: bool | Literal["qkv", "attention", "matrices"] = Field(
        default=True,
        description="false: none in matrices and norms (Llama); qkv: there alone (Qwen2); attention: there "
        "and in its output; matrices: not in norms (GPT-OSS)",
    )
    source: str = Field(min_length=1, description="where the shape comes from, or 'ours'")
    attention: Attention = Field(
        default="softmax",
        description="linear: queries meet a sum of what came before, not every key (engine.parallel.linear)",
    )
    softmax_every: PositiveInt | None = Field(
        default=None,
        description="every so many-th layer is one of softmax after all (LASP-2H); none: none is",
    )
    experts: PositiveInt | None = Field(
        default=None,
        description="of every layer, in place of its MLP (engine.parallel.experts); none: an MLP",
    )
    top_k: PositiveInt = Field(default=2, description="experts that a token goes to")
    expert_hidden: PositiveInt | None = Field(
        default=None, le=16 * MOST_WIDTH, description="width of an expert; none: as mlp_hidden"
    )
    shared_experts: NonNegativeInt = Field(default=0, description="as wide, which every token goes to")
    balance: Literal["none", "bias"] = Field(
        default="bias",
        description="of experts' loads: by a bias that moves after each step (arXiv 2408.15664)",
    )

    head_dim: PositiveInt | None = Field(
        default=None, le=MOST_WIDTH, description="width of a head; none: hidden / heads"
    )
    qk_norm: bool = Field(default=False, description="each head's queries and keys are normed (Qwen3)")
    window: PositiveInt | None = Field(
        default=None, description="tokens that a query sees, its own the last; none: all before it"
    )
    full_every: PositiveInt | None = Field(
        default=None, description="every so many-th layer sees all after all (Gemma 3: 6); none: none does"
    )
    chunked: bool = Field(
        default=False, description="windows do not slide: chunks of so many tokens (Llama 4)"
    )
    latent: Latent | None = Field(default=None, description="keys and values of a latent; none: of heads")
    sinks: bool = Field(default=False, description="a weight a head in the softmax's sum (GPT-OSS)")
    parallel_block: bool = Field(
        default=False, description="attention and MLP have the same input, behind one norm (Command R)"
    )
    post_norms: bool = Field(default=False, description="the outputs of both are normed, too (Gemma 2)")
    dense_layers: NonNegativeInt = Field(
        default=0, description="layers with an MLP of mlp_hidden in place of experts (DeepSeek: the first)"
    )
    shared_gate: bool = Field(default=False, description="shared experts have a gate of one row (Qwen2-MoE)")

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelSpec":
        free = self.head_dim is not None or self.latent is not None
        if self.hidden % self.heads and not free:
            raise ValueError(f"hidden ({self.hidden}) is not a multiple of heads ({self.heads})")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})")
        if self.positions == "rotary" and self.rotated % 2:
            raise ValueError(f"rotary positions need an even head size, not {self.rotated}")
        if self.latent is not None and (
            self.kv_heads is not None or self.head_dim is not None or self.qk_norm
        ):
            raise ValueError("latent attention has no kv_heads, head_dim or qk_norm")
        if self.window is None and (self.full_every is not None or self.chunked):
            raise ValueError("full_every and chunked are for layers with a window")
        if self.full_every is not None and not 2 <= self.full_every <= self.layers:
            raise ValueError(f"full_every ({self.full_every}) is not from 2 to layers ({self.layers})")
        if self.attention == "linear" and (free or self.window is not None):
            raise ValueError("linear attention has no head_dim, latent or window")
        if self.dense_layers and (self.experts is None or self.dense_layers >= self.layers):
            raise ValueError(f"dense_layers ({self.dense_layers}) are some of layers with experts")
        if self.softmax_every is not None and self.attention == "softmax":
            raise ValueError(f"softmax_every ({self.softmax_every}) is for attention linear, not softmax")
        if self.experts is not None and self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) is more than experts ({self.experts})")
        of_experts = self.top_k != 2, self.expert_hidden is not None, self.shared_experts > 0
        if self.experts is None and any(of_experts):
            raise ValueError("top_k, expert_hidden and shared_experts are for layers with experts")
        if self.softmax_every is not None and not 2 <= self.softmax_every <= self.layers:
            raise ValueError(f"softmax_every ({self.softmax_every}) is not from 2 to layers ({self.layers})")
        return self

    def root_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters outside the blocks, under the names of `model.gpt.GPT`, in its order."""
        h = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, h)}
        if self.positions == "learned":
            shapes["positions.weight"] = (self.seq_len, h)
        shapes |= _affine("final_norm", (h,), self.biases is True)
        if not self.tied_head:
            shapes["head.weight"] = (self.vocab, h)
        return shapes

    def block_shapes(self, dense: bool = False) -> dict[str, tuple[int, ...]]:
        """Parameters of one transformer block, named and ordered as in `model.gpt.GPT`. dense: of one of the
        `dense_layers`"""
        h, dense = self.hidden, dense or self.experts is None
        sizes = [*self._attention(), ("attention.out", (h, self.out_hidden))]
        norms = [] if self.parallel_block else [("mlp_norm", (h,))]
        norms += [("attention_post_norm", (h,)), ("mlp_post_norm", (h,))] if self.post_norms else []
        of_mlp = self._mlp("mlp", self.mlp_width) if dense else []
        found = self._affines(("attention_norm", (h,)), *sizes, *norms, *of_mlp)
        found |= {"attention.sinks": (self.heads,)} if self.sinks else {}
        if dense:
            return found
        shared = self._affines(*self._mlp("mlp.shared", self.shared_experts * self.expert_width))
        gate = {"mlp.shared_gate.weight": (1, h)} if self.shared_gate else {}
        return found | self.expert_shapes() | shared | gate

    def _attention(self) -> list[tuple[str, tuple[int, ...]]]:
        """Matrices and norms up to the products of attention."""
        if self.latent is not None:
            return self.latent.shapes(self.hidden, self.heads)
        each: tuple[int, ...] = (self.head_size,)
        norms = [("attention.q_norm", each), ("attention.k_norm", each)] if self.qk_norm else []
        return [("attention.qkv", (self.query_hidden + 2 * self.kv_hidden, self.hidden)), *norms]

    def _has_bias(self, name: str) -> bool:
        if isinstance(self.biases, bool):
            return self.biases
        if self.biases == "matrices":
            return not name.endswith("_norm")
        attention = ("attention.qkv", "attention.out")
        return name in (attention if self.biases == "attention" else attention[:1])

    def _affines(self, *named: tuple[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in named:
            shapes |= _affine(name, shape, self._has_bias(name))
        return shapes

    def _mlp(self, name: str, width: int) -> list[tuple[str, tuple[int, ...]]]:
        """Matrices of an MLP; of width 0: none."""
        up, down = (width, self.hidden), (self.hidden, width)
        gate = [(f"{name}.gate", up)] if self.gated else []
        return [*gate, (f"{name}.up", up), (f"{name}.down", down)] if width else []

    def expert_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of a block's router and of all of its experts, whose biases are rows of their own."""
        if self.experts is None:
            return {}
        up = (self.experts, self.expert_width, self.hidden)
        gate = {"mlp.experts.gate": up} if self.gated else {}
        matrices = {"mlp.experts.up": up, **gate, "mlp.experts.down": (up[0], up[2], up[1])}
        biased = self.biases == "matrices"
        biases = {f"{name}.bias": shape[:2] for name, shape in matrices.items()} if biased else {}
        return {**_affine("mlp.router", (self.experts, self.hidden), biased), **matrices, **biases}

    @property
    def is_gpt(self) -> bool:
        """Whether `model.gpt` can build this model."""
        return (
            self.kv_hidden == self.hidden
            and self.mlp_width == 4 * self.hidden
            and not self.gated
            and self.biases is True
            and all(getattr(self, key) == type(self).model_fields[key].default for key in PREDICTED)
        )

    def attention_of(self, layer: int) -> Attention:
        """layer: from 0"""
        is_softmax = self.softmax_every is not None and (layer + 1) % self.softmax_every == 0
        return "softmax" if is_softmax else self.attention

    @property
    def linear_layers(self) -> int:
        """Layers whose attention is linear."""
        if self.attention == "softmax":
            return 0
        return self.layers - (0 if self.softmax_every is None else self.layers // self.softmax_every)

    @property
    def mlp_width(self) -> int:
        return 4 * self.hidden if self.mlp_hidden is None else self.mlp_hidden

    @property
    def idle_elements(self) -> int:
        """Weights of a block's experts that a token does not meet."""
        if self.experts is None:
            return 0
        matrices = (shape for name, shape in self.expert_shapes().items() if ".experts." in name)
        return sum(math.prod(shape) // self.experts * (self.experts - self.top_k) for shape in matrices)

    @property
    def expert_width(self) -> int:
        return self.mlp_width if self.expert_hidden is None else self.expert_hidden

    @property
    def head_size(self) -> int:
        """Width of a head's values; of its queries and keys, too, where they are no latent's."""
        if self.latent is not None:
            return self.latent.value
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def rotated(self) -> int:
        """Of a head's queries and keys, what has positions."""
        return self.head_size if self.latent is None else self.latent.rope

    @property
    def query_hidden(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * (self.head_size if self.latent is None else self.latent.query)

    @property
    def out_hidden(self) -> int:
        """Width of all heads' outputs."""
        return self.heads * self.head_size

    @property
    def kv_hidden(self) -> int:
        """Width of the keys, and of the values; of a latent's, as heads see them, half of both."""
        if self.latent is not None:
            return (self.query_hidden + self.out_hidden) // 2
        return self.head_size * (self.heads if self.kv_heads is None else self.kv_heads)

    @property
    def dense_share(self) -> float:
        """Of the layers, those that have an MLP and no experts."""
        return 1.0 if self.experts is None else self.dense_layers / self.layers

    def unit_shapes(self, without: Collection[str] = ()) -> list[list[tuple[int, ...]]]:
        """Shapes per unit as the engine gathers them: the root's, then each block's.

        without: parameters of a block by name, that are units of their own
        """
        dense, block = (
            [shape for name, shape in self.block_shapes(kind).items() if name not in without]
            for kind in (True, False)
        )
        mixed = self.layers - self.dense_layers
        return [list(self.root_shapes().values()), *[dense] * self.dense_layers, *[block] * mixed]

    @property
    def parameters(self) -> int:
        """Exact number of parameters; a tied head counts once."""
        root, dense, block = (
            sum(math.prod(shape) for shape in shapes.values())
            for shapes in (self.root_shapes(), self.block_shapes(dense=True), self.block_shapes())
        )
        return root + self.dense_layers * dense + (self.layers - self.dense_layers) * block


def _affine(name: str, weight: tuple[int, ...], bias: bool) -> dict[str, tuple[int, ...]]:
    """A weight and, if `bias`, a bias of its first dimension."""
    return {f"{name}.weight": weight, **({f"{name}.bias": weight[:1]} if bias else {})}
