"""Whole training steps of the GPTs of FlashAttention-2's table 1 (arXiv 2307.08691) on one device.

fp32 weights under bf16 autocast, fused AdamW, no recomputation, blocks compiled with torch.compile (on a
GPU). 16k tokens per step, or 8k for the larger model: with 16k its activations do not fit beside its fp32
states on 80 GB. (The paper shards the states over 8 GPUs.)
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from lowband.bench.kernels.measure import KernelCase
from lowband.spec.kernel_rows import KernelRow

if TYPE_CHECKING:  # needs pydantic, which a GPU machine may lack
    from lowband.spec.model import ModelSpec

LENGTHS = {"cuda": (2048, 8192), "cpu": (32,)}
MODELS = {"cuda": {"gpt-1.3b": 16384, "gpt-2.7b": 8192}, "cpu": {"gpt-1m": 32}}  # tokens per step
ATTENTION = ("sdpa", "flash2")
LOSS_TOLERANCE = 0.02  # of the first loss, whose value follows from fresh weights


def groups(device: torch.device) -> Iterator[list[KernelCase]]:
    for name, tokens in MODELS[device.type].items():
        for length in LENGTHS[device.type]:
            for attention in ATTENTION:
                try:
                    yield [_case(device, _read(name, length), tokens, attention)]
                except ImportError as error:
                    yield [_missing(name, length, attention, error)]


def _read(name: str, length: int) -> "ModelSpec":
    from lowband.spec.config import Config

    return Config().model(name).model_copy(update={"seq_len": length})


def _missing(name: str, length: int, attention: str, error: ImportError) -> KernelCase:
    """A case that is not run because a package is missing; its row names the package."""

    def make() -> Callable[[], float]:
        raise error

    row = KernelRow(
        part="training", operation="step", implementation=attention, dtype="bfloat16", model=name,
        seq_len=length,
    )  # fmt: skip
    return KernelCase(row=row, make=make, error_of=float, tolerance=LOSS_TOLERANCE)


def _case(device: torch.device, spec: "ModelSpec", tokens_per_step: int, attention: str) -> KernelCase:
    from lowband.cost.conventions import flash_attention_flops_per_token
    from lowband.cost.flops import model_flops_per_token

    length = spec.seq_len
    batch = tokens_per_step // length
    row = KernelRow(
        part="training", operation="step", dtype="bfloat16", model=spec.name, batch=batch, heads=spec.heads,
        implementation=attention, seq_len=length, head_dim=spec.hidden // spec.heads, causal=True,
        flops=model_flops_per_token(spec, length) * batch * length,
        paper_flops=flash_attention_flops_per_token(spec, length) * batch * length,
    )  # fmt: skip

    def make() -> Callable[[], float]:
        from lowband.model.gpt import GPT

        torch.compiler.reset()
        with device:
            # Billions of values: one CPU core would take longer to draw them than the steps take.
            model = GPT(spec, attention=attention, draw_on=device.type)  # type: ignore[arg-type]
            torch.manual_seed(0)
            tokens = torch.randint(0, spec.vocab, (batch, length + 1))
        if device.type == "cuda":
            for block in model.blocks:
                block.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

        def step() -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def error_of(loss: torch.Tensor) -> float:
        from lowband.model.gpt import INIT_STD

        # Logits of normalized states and fresh weights are normal with this variance.
        variance = spec.hidden * INIT_STD**2
        expected = math.log(spec.vocab) + variance / 2
        return abs(float(loss) - expected) / expected

    return KernelCase(row=row, make=make, error_of=error_of, tolerance=LOSS_TOLERANCE)
