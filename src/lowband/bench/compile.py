"""Steps with blocks as they are and compiled by torch: of the bare module, ours and FSDP2's, in turns.

On a GPU one rank over NCCL, else ranks over gloo on this machine's cores. A step is forward, backward and
AdamW. The bare module has its weights in the compute dtype and sends nothing: each rank trains its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowband
from lowband.bench.turns import by_step, in_turns, timed
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme

MACHINE, SCHEME = "local", "zero3"
WARMUP, STEPS = 2, 10
TIME_LIMIT_S = 900


class Setup(NamedTuple):
    """layers: of the model's shape; sequences: per rank and step"""

    ranks: tuple[int, ...]
    model: str
    layers: int
    sequences: int
    seq_len: int
    dtype: torch.dtype


SETUPS = {
    "cpu": Setup((1, 4), "gpt-5m", 6, 4, 128, torch.float32),
    "cuda": Setup((1,), "gpt-1.3b", 8, 4, 2048, torch.bfloat16),  # six models of 0.5 B fit beside each other
}


class Step(NamedTuple):
    """step_s: of the slowest rank; step: 0 is the first one, in which the compiler runs"""

    device: str
    ranks: int
    parameters: int
    engine: str
    blocks: str
    step: int
    step_s: float


def bench(root: Path) -> list[Step]:
    """Steps of every engine, eager and compiled, for each number of ranks."""
    device = "cuda" if torch.cuda.device_count() else "cpu"  # does not initialise CUDA: the ranks are forked
    setup, config = SETUPS[device], Config(root)
    sizes, scheme = config.machine(MACHINE).sizes, config.scheme(SCHEME)
    spec = config.model(setup.model).model_copy(update={"layers": setup.layers, "seq_len": setup.seq_len})
    rows = []
    for ranks in setup.ranks:
        by_rank = on_ranks(ranks, _train, device, sizes, scheme, spec, time_limit_s=TIME_LIMIT_S)
        for (engine, blocks), step, times in by_step(by_rank, first=0):
            slowest = max(seconds for seconds, _ in times)
            rows.append(Step(device, ranks, spec.parameters, engine, blocks, step, slowest))
    return rows


def _train(
    device: str, sizes: dict[str, int], scheme: Scheme, spec: ModelSpec
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Per engine, eager and compiled, seconds and processor seconds of the first step and of each step after
    WARMUP."""
    if device == "cuda":
        use_nccl()
    setup, topology = SETUPS[device], lowband.Topology(sizes)
    steps = {}
    for engine in ("module", "lowband", "fsdp2"):
        for blocks in ("eager", "compiled"):
            with torch.device(device):
                model = GPT(spec, seed=1)
                tokens = torch.randint(spec.vocab, (setup.sequences, setup.seq_len))
            step = _stepper(
                _prepared(engine, model, blocks == "compiled", topology, scheme, setup.dtype), tokens
            )
            steps[engine, blocks] = timed(step, torch.cuda.synchronize if device == "cuda" else lambda: None)
    return in_turns(steps, WARMUP, STEPS, keeps_first=True)


def use_nccl() -> None:
    """Have the only rank of `on_ranks` a group over NCCL in place of the helper's over gloo."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def _prepared(
    engine: str, model: GPT, compiled: bool, topology: lowband.Topology, scheme: Scheme, dtype: torch.dtype
) -> nn.Module:
    """The model under an engine, each block one unit, compiled on its own."""
    if compiled:
        for block in model.blocks:
            block.compile()
    if engine == "lowband":
        return lowband.shard(model, scheme, topology, Block, dtype)
    if engine == "module":
        return model.to(dtype)
    mesh = init_device_mesh(model.embed.weight.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _stepper(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=tokens.is_cuda or None)

    def step() -> None:
        model(tokens, tokens).backward()
        adamw.step()
        adamw.zero_grad()

    return step
