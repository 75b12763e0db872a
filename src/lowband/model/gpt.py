"""A decoder-only GPT for one device, and `on_ranks`, which cuts it along the axes of a job.

It is also a chain: `chain` lists its modules, of which each takes the output of the one before.

Shape letters: B batch, T sequence, H hidden, V vocabulary, N heads, D head size.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowband.engine.api import shard
from lowband.engine.parallel.context import Context
from lowband.engine.parallel.experts import MixtureOfExperts, spread_experts
from lowband.engine.parallel.linear import linear_attention, normalized
from lowband.engine.parallel.pipeline import Pipeline
from lowband.engine.parallel.tensor import parallelize
from lowband.engine.transport.topology import Topology
from lowband.engine.units.initial import fill
from lowband.errors import UserError
from lowband.kernels import flash_attention
from lowband.model.loss import linear_cross_entropy, of_logits
from lowband.spec.model import AttentionKernel, ModelSpec
from lowband.spec.routing import Routing
from lowband.spec.schedules import Name
from lowband.spec.scheme import Scheme
from lowband.spec.stages import blocks_of, stage_modules
from lowband.spec.tensor import gpt_plan

Recompute = Literal["none", "full"]
INIT_STD = 0.02  # GPT-2 and Megatron-LM; residual outputs are scaled down by sqrt(2 x layers)
RESIDUAL = ("attention.out.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")


class Attention(nn.Module):
    """Causal self-attention, by torch's kernels (sdpa) or ours (flash2), or linear."""

    def __init__(self, spec: ModelSpec, kernel: AttentionKernel, is_linear: bool = False) -> None:
        super().__init__()
        self.kernel: AttentionKernel = kernel
        self.is_linear = is_linear
        self.head_size, self.rotary = spec.head_size, spec.positions == "rotary"
        self.qkv = nn.Linear(spec.hidden, 3 * spec.hidden)
        self.out = nn.Linear(spec.hidden, spec.hidden)
        self.context: Context | None = None

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        qkv_BTX = self.qkv(x_BTH)
        B, T, _ = qkv_BTX.shape
        qkv_B3NTD = qkv_BTX.view(B, T, 3, -1, self.head_size).permute(0, 2, 3, 1, 4)
        q_BNTD, k_BNTD, v_BNTD = qkv_B3NTD.unbind(1)
        if self.rotary:
            places = None if self.context is None else self.context.places(x_BTH)
            q_BNTD, k_BNTD = rotate(q_BNTD, places), rotate(k_BNTD, places)
        if self.is_linear:
            attend = linear_attention if self.context is None else self.context.linear_attention
            y_BNTD = normalized(q_BNTD, k_BNTD, v_BNTD, attend)
        elif self.context is not None:
            y_BNTD = self.context.attention(q_BNTD, k_BNTD, v_BNTD, kernel=self.kernel)
        elif self.kernel == "flash2":
            y_BNTD = flash_attention.attention(q_BNTD, k_BNTD, v_BNTD, is_causal=True)
        else:
            y_BNTD = F.scaled_dot_product_attention(q_BNTD, k_BNTD, v_BNTD, is_causal=True)
        return self.out(y_BNTD.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        return self.down(gelu(self.up(x_BTH)))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def mlp_of(spec: ModelSpec) -> nn.Module:
    """A block's MLP, or its layer of experts."""
    if spec.experts is None:
        return MLP(spec.hidden, spec.mlp_width)
    routing = Routing(spec.experts, spec.top_k, normalized=True, balance=spec.balance)
    shared = MLP(spec.hidden, spec.shared_experts * spec.expert_width) if spec.shared_experts else None
    return MixtureOfExperts(spec.hidden, spec.expert_width, routing, activation=gelu, shared=shared)


class Positions(nn.Embedding):
    """Learned positions, added to what they are given."""

    context: Context | None = None

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        if self.context is None:
            return x_BTH + self.weight[: x_BTH.shape[1]]
        places = self.context.places(x_BTH).clamp(max=self.num_embeddings - 1)  # of tokens added: any
        return x_BTH + self.weight[places]


class Block(nn.Module):
    """One transformer block, pre-norm. The unit that partition schemes gather at a time."""

    def __init__(
        self, spec: ModelSpec, kernel: AttentionKernel, recompute: Recompute = "none", is_linear: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.LayerNorm(spec.hidden)
        self.attention = Attention(spec, kernel, is_linear)
        self.mlp_norm = nn.LayerNorm(spec.hidden)
        self.mlp = mlp_of(spec)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        if self.recompute == "full":
            return checkpoint(self._computed, x_BTH, use_reentrant=False)  # type: ignore[no-any-return]
        return self._computed(x_BTH)

    def _computed(self, x_BTH: torch.Tensor) -> torch.Tensor:
        x_BTH = x_BTH + self.attention(self.attention_norm(x_BTH))
        return x_BTH + self.mlp(self.mlp_norm(x_BTH))


class GPT(nn.Module):
    """tokens [B, T] int64 -> logits [B, T, V]; with targets [B, T] int64: mean cross-entropy, fp32 scalar.

    With ranks along context it takes whole sequences, as without: it computes with this rank's tokens, whose
    logits it returns, and its losses average over ranks to the mean.
    """

    def __init__(
        self,
        spec: ModelSpec,
        seed: int = 0,
        attention: AttentionKernel = "sdpa",
        recompute: Recompute = "none",
        loss_chunks: int = 1,
        recomputed: Collection[int] | None = None,
    ) -> None:
        """Initial values depend on the seed and the kind of device alone; on meta there are none.

        recompute:   full: blocks keep their inputs alone, and the backward computes them again
        loss_chunks: pieces of the tokens whose logits are made one after the other (model.loss); several only
                     on one device and along data
        recomputed:  the blocks, by number, that `recompute` is about; None: all
        Raises UserError for flash2 without a layer of softmax.
        """
        super().__init__()
        if attention == "flash2" and spec.linear_layers == spec.layers:
            what = "flash2 is of softmax, and all layers are linear"
            raise UserError(what, where=f"model '{spec.name}'", allowed="attention sdpa")
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.hidden)
        self.positions = Positions(spec.seq_len, spec.hidden) if spec.positions == "learned" else None
        are_linear = [spec.attention_of(layer) == "linear" for layer in range(spec.layers)]
        every = range(spec.layers) if recomputed is None else recomputed
        kinds: list[Recompute] = [recompute if i in every else "none" for i in range(spec.layers)]
        self.blocks = nn.ModuleList(
            Block(spec, attention, kind, linear) for kind, linear in zip(kinds, are_linear, strict=True)
        )
        self.final_norm = nn.LayerNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.logits, self.loss = nn.Identity(), nn.CrossEntropyLoss()
        self.loss_chunks, self._of_logits = loss_chunks, of_logits
        self.context: Context | None = None
        if spec.tied_head:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                fill(name, parameter, self.init, seed)

    def init(self, name: str, parameter: torch.Tensor) -> None:
        """Fill a parameter with initial values; also the `init` of `lowband.shard`."""
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            is_residual = name.endswith(RESIDUAL)
            parameter.normal_(0.0, INIT_STD / (2 * self.spec.layers) ** 0.5 if is_residual else INIT_STD)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        x, targets_BT = self.split(tokens_BT, targets_BT)
        *body, head = self.chain().values()
        for module in body:
            x = module(x)
        if targets_BT is not None and self.loss_chunks > 1:
            rows = x.flatten(0, 1), self.head.weight, targets_BT.flatten()
            return linear_cross_entropy(*rows, self.loss_chunks, self._of_logits)
        x = head(x)
        return self.logits(x) if targets_BT is None else self.loss_of(x, targets_BT)

    def compile_parts(self, backend: str = "inductor") -> None:
        """Have torch compile each block on its own, and what the loss computes from a piece's logits."""
        for block in self.blocks:
            block.compile(backend=backend)
        self._of_logits = torch.compile(of_logits, backend=backend, dynamic=False)

    def split(
        self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the chain and its loss take: along context this rank's part of whole sequences."""
        if self.context is None:
            return tokens_BT, targets_BT
        if targets_BT is not None:
            targets_BT = self.context.split(targets_BT, fill=self.loss.ignore_index)
        return self.context.split(tokens_BT), targets_BT

    def chain(self) -> dict[str, nn.Module]:
        """Its modules by their names in it, from tokens to logits: each takes what the one before returns."""
        positions = {} if self.positions is None else {"positions": self.positions}
        blocks = {f"blocks.{i}": block for i, block in enumerate(self.blocks)}
        return {"embed": self.embed, **positions, **blocks, "final_norm": self.final_norm, "head": self.head}

    def loss_of(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of what the chain returns, fp32 scalar; along context this rank's part of it."""
        dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
        loss = self.loss(logits_BTV.flatten(0, 1).to(dtype), targets_BT.flatten())
        if self.context is None:
            return loss
        return self.context.mean(loss, targets_BT != self.loss.ignore_index)  # the loss is a sum


def on_ranks(
    model: GPT,
    scheme: Scheme,
    topology: Topology,
    micro_batches: int = 1,
    schedule: Name | None = None,
    chunks: int = 1,
    layers: Sequence[int] = (),
    **options: Any,
) -> GPT | Pipeline:
    """The model on a job's ranks: a line for each axis, from the inside.

    model:   whole, best on the meta device
    scheme:  of the data axis
    micro_batches, schedule, chunks: of a step, where ranks lie along pipeline; its losses are parts of the
             mean over micro-batches, which are what `split` returns. Without a schedule each of these ranks
             has all blocks
    layers:  blocks of each stage; none: equally many
    options: of `lowband.shard`, of a pipeline without `collectives`
    """
    parallelize(model, gpt_plan(model.spec), topology)  # tensor: a part of each matrix
    if model.spec.experts is not None:
        spread_experts(model, topology)  # expert: some of each layer's experts
    if topology.axes.context > 1:  # context: a part of the tokens
        attend_along(model, Context(topology))
    if schedule is None or (ranks := topology.axes.pipeline) == 1:  # data: its states over levels
        shard(model, scheme, topology, wrap=Block, init=model.init, **options)
        return model
    modules = stage_modules(model.spec, blocks_of(model.spec, ranks * chunks, layers))
    part = lambda logits, targets: model.loss_of(logits, targets) / micro_batches  # noqa: E731
    # pipeline: some of its blocks, and the rest as above
    of_step = micro_batches, schedule, chunks, [*map(len, modules)]
    return Pipeline(model, part, scheme, topology, *of_step, init=model.init, **options)


def attend_along(model: GPT, context: Context) -> None:
    """Have the model's attention and loss know the ranks along context.

    Raises UserError for layers that cannot attend in the context's ways.
    """
    linear = model.spec.linear_layers
    context.layout.check_layers(softmax=linear < model.spec.layers, linear=linear > 0)
    context.bind(model)
    model.context, model.loss.reduction = context, "sum"
    if model.positions is not None:
        model.positions.context = context
    for module in model.modules():
        if isinstance(module, Attention):
            module.context = context


def rotate(x_BNTD: torch.Tensor, places_T: torch.Tensor | None = None) -> torch.Tensor:
    """Rotary position embedding over the whole head size (arXiv 2104.09864, eq. 34), angles in fp32.

    places_T: positions of the tokens; default: 0, 1, ...
    """
    T, D = x_BNTD.shape[-2:]
    device = x_BNTD.device
    rate = 10000.0 ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    places_T = torch.arange(T, device=device) if places_T is None else places_T
    angle_TD = torch.outer(places_T.float(), rate).repeat(1, 2)
    a, b = x_BNTD.chunk(2, dim=-1)
    turned_BNTD = torch.cat((-b, a), dim=-1)
    return (x_BNTD * angle_TD.cos() + turned_BNTD * angle_TD.sin()).to(x_BNTD.dtype)
