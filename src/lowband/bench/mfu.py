"""Steps of a whole GPT on one device, a way at a time, in rounds: the bare module, ours and FSDP2's, with the
share of the peak that they reach and the memory that they take.

bench.compile keeps all its models in memory, so they are small. Here each way builds the model, does its
steps and frees it, which leaves room for as many tokens as a run would have; a second round shows what else
the machine did meanwhile. A step is forward, backward, clipping and AdamW, with fp32 weights and moments. The
bare module computes under autocast, as plain torch does.
"""

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowband
from lowband.bench.compile import SCHEME, use_nccl
from lowband.bench.turns import timed
from lowband.cost.flops import model_flops_per_token
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.clock import peak_memory_bytes, reset_peak_memory
from lowband.run.on_ranks import on_ranks
from lowband.spec.benchmarks import GPU_MODELS
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme

ROUNDS, WARMUP, STEPS = 2, 2, 8
CLIP, LEARNING_RATE = 1.0, 1e-4
LIMIT_S = 100  # nothing is built that would end after this
JOB_LIMIT_S = 600


class Setup(NamedTuple):
    """backend: of torch.compile; on a CPU one that needs no C++ compiler, only to try the program"""

    models: tuple[str, ...]
    sequences: int
    seq_len: int
    backend: str


SETUPS = {
    "cuda": Setup(GPU_MODELS, 8, 2048, "inductor"),
    "cpu": Setup(("gpt-200k",), 2, 32, "aot_eager"),
}


class Way(NamedTuple):
    """reshard: FSDP2's reshard_after_forward; on one rank its gathers are mere copies"""

    engine: str
    blocks: str
    loss_chunks: int = 1
    optimizer: str = "torch"
    reshard: bool = True


WAYS = (
    Way("module", "compiled"),
    Way("lowband", "eager"),
    Way("lowband", "compiled"),
    Way("lowband", "compiled", loss_chunks=4, optimizer="one pass"),
    Way("fsdp2", "compiled"),
    Way("fsdp2", "compiled", reshard=False),
)


class Step(NamedTuple):
    """mfu:  of a GPU of which a machine file states the peak in bf16, model FLOPs (cost.flops) over it
    outcome: ok | oom | the error, of these without a time
    """

    device: str
    model: str
    tokens: int
    engine: str
    blocks: str
    loss_chunks: int
    optimizer: str
    reshard: bool
    round: int
    step: int
    step_s: float | None
    mfu: float | None
    peak_bytes: int
    outcome: str


def bench(root: Path, model: str | None = None) -> list[Step]:
    """All steps after the warm-up, of as many ways and rounds as fit into LIMIT_S.

    Raises UserError for another model than a setup's.
    """
    device = "cuda" if torch.cuda.device_count() else "cpu"  # does not initialise CUDA: the rank is forked
    setup, config = SETUPS[device], Config(root)
    if model not in (None, *setup.models):
        raise UserError(f"'{model}' on this device ({device})", where="--model", allowed=setup.models)
    spec = config.model(model or setup.models[0]).model_copy(update={"seq_len": setup.seq_len})
    tokens = setup.sequences * setup.seq_len
    peak = peak_of(on_ranks(1, torch.cuda.get_device_name)[0], config) if device == "cuda" else None
    flops = model_flops_per_token(spec, setup.seq_len) * tokens
    [found] = on_ranks(1, _measured, device, config.scheme(SCHEME), spec, time_limit_s=JOB_LIMIT_S)
    rows = []
    for turn, way, seconds, outcome, peak_bytes in found:
        for step, each in enumerate(seconds or [None], 1):
            mfu = flops / each / peak if each and peak else None
            rows.append(Step(device, spec.name, tokens, *way, turn, step, each, mfu, peak_bytes, outcome))
    return rows


def peak_of(gpu: str, config: Config) -> float | None:
    """FLOP/s in bf16 of a GPU, by the machine files; None if none is of such a device."""
    for cluster in config.clusters:
        device = config.machine(cluster).device
        if device.is_of(gpu) and "bf16" in device.peak_tflops:
            return device.peak_tflops["bf16"] * 1e12
    return None


def _measured(device: str, scheme: Scheme, spec: ModelSpec) -> list[tuple[int, Way, list[float], str, int]]:
    """By round and way, seconds of its steps, the outcome and peak bytes."""
    if device == "cuda":
        use_nccl()
    begun, longest, found = time.monotonic(), 0.0, []
    for turn in range(1, ROUNDS + 1):
        for way in WAYS:
            before = time.monotonic()
            if before - begun + longest > LIMIT_S:
                return found
            seconds, outcome = _seconds(way, torch.device(device), scheme, spec)
            found.append((turn, way, seconds, outcome, peak_memory_bytes(torch.device(device))))
            longest = max(longest, time.monotonic() - before)
    return found


def _seconds(way: Way, device: torch.device, scheme: Scheme, spec: ModelSpec) -> tuple[list[float], str]:
    """Of the steps after the warm-up, and the outcome: a way that fails does not end the others.

    What was built before is freed first.
    """
    gc.collect()  # models are reference cycles
    torch.compiler.reset()
    reset_peak_memory(device)
    try:
        return list(_steps(way, device, scheme, spec)), "ok"
    except torch.OutOfMemoryError:
        return [], "oom"
    except Exception as error:
        traceback.print_exc()
        return [], f"{type(error).__name__}: {error}".splitlines()[0]


def _steps(way: Way, device: torch.device, scheme: Scheme, spec: ModelSpec) -> Iterator[float]:
    setup = SETUPS[device.type]
    with torch.device("meta") if way.engine == "lowband" else device:
        model = GPT(spec, seed=1, loss_chunks=way.loss_chunks)
    with device:
        torch.manual_seed(0)
        tokens = torch.randint(spec.vocab, (setup.sequences, setup.seq_len))
    if way.blocks == "compiled":
        model.compile_parts(setup.backend)
    prepared = _prepared(way, model, device, scheme)
    call = timed(
        _stepper(way, prepared, tokens), torch.cuda.synchronize if device.type == "cuda" else lambda: None
    )
    for step in range(WARMUP + STEPS):
        seconds, _ = call()
        if step >= WARMUP:
            yield seconds


def _prepared(way: Way, model: GPT, device: torch.device, scheme: Scheme) -> nn.Module:
    bf16 = torch.bfloat16
    if way.engine == "module":
        return model
    if way.engine == "lowband":
        topology = lowband.Topology({})
        return lowband.shard(model, scheme, topology, Block, bf16, bf16, init=model.init, device=device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=way.reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _stepper(way: Way, model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    optimizer: torch.optim.Optimizer
    if way.optimizer == "one pass":
        optimizer = ours = lowband.AdamW(model, LEARNING_RATE)
        clip: Callable[[float], object] = ours.clip_grad_norm_
    else:
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=tokens.is_cuda or None)
        clip = lambda norm: (  # noqa: E731
            lowband.clip_grad_norm_(model, norm)
            if way.engine == "lowband"
            else nn.utils.clip_grad_norm_(model.parameters(), norm)
        )
    is_bare = way.engine == "module"

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=is_bare):
            loss = model(tokens, tokens)
        loss.backward()
        clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step
