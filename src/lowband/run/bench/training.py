"""Whole training steps of the GPTs of FlashAttention-2's table 1 (arXiv 2307.08691) on one device.

fp32 weights under bf16 autocast, fused AdamW, no recomputation, blocks through torch's compiler (on a GPU);
16k tokens a step. The model's FLOPs are counted as `cost.flops` does; `paper_flops` as the paper does, with
all weights: 6 N T + 12 L H T^2 a sequence.
"""

import math
from collections.abc import Callable, Iterator

import torch

from lowband.run.bench.measure import Case
from lowband.run.bench.rows import Row

TOKENS = {"cuda": 16384, "cpu": 32}
LENGTHS = {"cuda": (2048, 8192), "cpu": (32,)}
# Layers, hidden, heads: as in config/models.yaml, which a GPU machine may lack the packages to read.
MODELS = {
    "cuda": {"gpt-1.3b": (24, 2048, 16), "gpt-2.7b": (32, 2560, 20)},
    "cpu": {"tiny": (1, 64, 2)},
}
VOCAB = {"cuda": 50304, "cpu": 256}
ATTENTION = ("sdpa", "flash2")
LOSS_TOLERANCE = 0.02  # of the first loss against ln(vocab): weights are fresh


def groups(device: torch.device) -> Iterator[list[Case]]:
    for name, shape in MODELS[device.type].items():
        for length in LENGTHS[device.type]:
            for attention in ATTENTION:
                yield [_case(device, name, shape, length, attention)]


def _case(
    device: torch.device,
    name: str,
    shape: tuple[int, int, int],
    length: int,
    attention: str,
) -> Case:
    _, hidden, heads = shape
    batch = TOKENS[device.type] // length
    counted = _flops(device, name, shape, length)
    row = Row(
        part="training", operation="step", dtype="bfloat16", model=name, batch=batch, heads=heads,
        implementation=attention, seq_len=length,
        head_dim=hidden // heads, causal=True,
        flops=counted and counted[0] * batch * length, paper_flops=counted and counted[1] * batch * length,
    )  # fmt: skip

    def make() -> Callable[[], float]:
        from lowband.model.gpt import GPT

        torch.compiler.reset()
        with device:
            model = GPT(_spec(device, name, shape, length), attention=attention)  # type: ignore[arg-type]
            torch.manual_seed(0)
            tokens = torch.randint(0, VOCAB[device.type], (batch, length + 1))
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
        expected = math.log(VOCAB[device.type])
        return abs(float(loss) - expected) / expected

    return Case(row=row, make=make, error_of=error_of, tolerance=LOSS_TOLERANCE)


def _spec(device: torch.device, name: str, shape: tuple[int, int, int], length: int):
    from lowband.spec.model import ModelSpec

    layers, hidden, heads = shape
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=VOCAB[device.type],
        seq_len=length,
        source="as named",
    )


def _flops(
    device: torch.device, name: str, shape: tuple[int, int, int], length: int
) -> tuple[int, int] | None:
    """Per token, by our convention and by the paper's; none where the model cannot be described."""
    try:
        from lowband.cost.flops import model_flops_per_token

        spec = _spec(device, name, shape, length)
    except ImportError:  # pydantic is missing: the case says so when it is made
        return None
    layers, hidden, _ = shape
    return model_flops_per_token(spec, length), 6 * spec.parameters + 12 * layers * hidden * length
