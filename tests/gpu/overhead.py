"""What the engine costs on one rank: `python tests/gpu/overhead.py` measures, on a GPU.

It prints one JSON line: step times of a GPT under the engine (zero3) and of the bare module in the same
dtype, taken in turns in one process; medians and their ratio. Both keep fp32 weights and moments, clip the
gradients' norm and step by the same fused AdamW. It needs torch, numpy, pydantic and PyYAML. `--device cpu`
only tries the program out.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

import lowband  # noqa: E402
from lowband.model.gpt import GPT, Block  # noqa: E402
from lowband.run.environment import code_version  # noqa: E402
from lowband.spec.config import Config  # noqa: E402
from lowband.spec.files import write_whole  # noqa: E402
from lowband.spec.model import ModelSpec  # noqa: E402

WARMUP, TURNS, STEPS_A_TURN = 5, 8, 5
CLIP = 1.0
# On a CPU only whether it runs.
SHAPES = {
    "cuda": ({"layers": 12, "hidden": 1536, "heads": 12, "seq_len": 1024, "vocab": 32768}, 8),
    "cpu": ({"layers": 1, "hidden": 32, "heads": 2, "seq_len": 16, "vocab": 64}, 1),
}


def stepper(spec: ModelSpec, batch: int, device: torch.device, dtype: torch.dtype, is_sharded: bool):
    """One training step of the bare module, or of the sharded one."""
    with device:
        model = GPT(spec, seed=1)
        tokens = torch.randint(0, spec.vocab, (batch, spec.seq_len))
    if is_sharded:
        zero3 = Config(ROOT).scheme("zero3")
        model = lowband.shard(model, zero3, lowband.Topology({}), Block, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            model(tokens, tokens).backward()
            lowband.clip_grad_norm_(model, CLIP)
            optimizer.step()
            optimizer.zero_grad()

        return step
    return mixed_precision_stepper(model, tokens, dtype)


def mixed_precision_stepper(model: GPT, tokens: torch.Tensor, dtype: torch.dtype):
    """Weights in `dtype`, and fp32 ones that the optimizer keeps."""
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    weights = list(model.to(dtype).parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step() -> None:
        model(tokens, tokens).backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        optimizer.zero_grad()
        model.zero_grad()

    return step


def seconds(step: Callable[[], None], device: torch.device, steps: int) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - start) / steps


def measure(device: torch.device, dtype: torch.dtype) -> dict[str, float | str]:
    shape, batch = SHAPES[device.type]
    spec = ModelSpec(name="overhead", source="ours", **shape)
    steps = {name: stepper(spec, batch, device, dtype, name == "engine") for name in ("bare", "engine")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        seconds(step, device, WARMUP)
    for _ in range(TURNS):
        for name, step in steps.items():
            times[name].append(seconds(step, device, STEPS_A_TURN))
    bare, ours = statistics.median(times["bare"]), statistics.median(times["engine"])
    row = {"dtype": str(dtype), "parameters": spec.parameters, "bare_s": bare, "engine_s": ours}
    return row | {"engine_over_bare": ours / bare}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SHAPES, default="cuda")
    parser.add_argument("--out", type=Path, help="a file to write the line to")
    options = parser.parse_args()
    device = torch.device(options.device, 0)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    rows = [measure(device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    line = json.dumps(
        {"device": name, "torch": torch.__version__, "commit": code_version()[0], "overhead": rows}
    )
    print(line)
    if options.out:
        write_whole(options.out, line + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
