"""A small GPT that torch's `parallelize_module` cuts: alone, under lowband, and under FSDP2."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import lowband

VOCAB, D, HEADS, T, B = 32, 16, 4, 8, 2
STEPS, MICRO_BATCHES, CLIP, LR = 2, 2, 0.1, 0.5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = nn.LayerNorm(D), Attention(), nn.LayerNorm(D), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Net(nn.Module):
    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, D), nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(self.norm(x))


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(5)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.to(dtype)


def cut(model: nn.Module, mesh: Any, sequence: bool) -> nn.Module:
    """As torchtitan does; each input is gathered once."""
    outside = Shard(1) if sequence else Replicate()
    gathers = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    of_root = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "head": ColwiseParallel(input_layouts=outside, output_layouts=Replicate()),
    }
    of_layer = {
        "attn": gathers, "mlp": gathers, "mlp.up": ColwiseParallel(),
        **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
        **{name: RowwiseParallel(output_layouts=outside) for name in ("attn.o", "mlp.down")},
    }  # fmt: skip
    if sequence:
        of_root["norm"] = SequenceParallel()
        of_layer |= {"n1": SequenceParallel(), "n2": SequenceParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, of_layer)
    return parallelize_module(model, mesh, of_root)


def batch(step: int, micro: int, data: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + data)
    return torch.randint(VOCAB, (B, T + 1), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES


def run(model: nn.Module, data: int, step_of: Callable[[int, list[torch.Tensor]], float], clip: Any) -> tuple:
    """Losses and norms by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(step_of(step, [batch(step, micro, data) for micro in range(MICRO_BATCHES)]))
        norms.append(float(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def tensor_mesh(topology: lowband.Topology) -> Any:
    mesh = topology.device_mesh("cpu")
    [name] = [name for name in mesh.mesh_dim_names if name.startswith("tensor_")]
    return mesh[name]


def under_lowband(
    scheme: str, sequence: bool, dtype: torch.dtype, way: str = "loop", inner: dict | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """way: loop, breadth or recompute"""
    topology = lowband.Topology(inner or {}, lowband.Axes(tensor=2))
    model = cut(net(dtype), tensor_mesh(topology), sequence)
    model.recomputes = way == "recompute"
    lowband.shard(model, scheme, topology, Layer, compute_dtype=dtype)

    def step_of(step: int, batches: list[torch.Tensor]) -> float:
        if way == "breadth":
            return float(sum(lowband.accumulate(model, batches, lambda tokens: loss_of(model, tokens))))
        total = 0.0
        for micro, tokens in enumerate(batches):
            with nullcontext() if micro == len(batches) - 1 else lowband.no_sync(model):
                loss = loss_of(model, tokens)
                loss.backward()
            total += float(loss)
        return total

    place = topology.along("data").place
    losses, norms = run(model, place, step_of, lambda model: lowband.clip_grad_norm_(model, CLIP))
    return losses, norms, lowband.full_state_dict(model)


def under_fsdp2(sequence: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    mesh = topology.device_mesh("cpu")
    data, tensor = mesh.mesh_dim_names
    model = cut(net(torch.float32), mesh[tensor], sequence)
    for each in (*model.layers, model):
        fully_shard(each, mesh=mesh[data], mp_policy=MixedPrecisionPolicy())

    def step_of(step: int, batches: list[torch.Tensor]) -> float:
        total = 0.0
        for tokens in batches:
            loss = loss_of(model, tokens)
            loss.backward()
            total += float(loss)
        return total

    def clip(model: nn.Module) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    losses, norms = run(model, topology.along("data").place, step_of, clip)
    state = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return losses, norms, state if dist.get_rank() == 0 else {}


def alone(dtype: torch.dtype, data: int) -> tuple[list[list[float]], list[float], dict[str, torch.Tensor]]:
    """One process on all ranks' batches; losses by rank along data."""
    model, losses, norms = net(dtype), [[] for _ in range(data)], []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        for rank in range(data):
            total = 0.0
            for micro in range(MICRO_BATCHES):
                loss = loss_of(model, batch(step, micro, rank))
                (loss / data).backward()
                total += float(loss)
            losses[rank].append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()
