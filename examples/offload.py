"""Optimizer states in another memory than the device: the same training, checked, with less on the device.

    torchrun --nproc-per-node 2 examples/offload.py

Trains a small transformer with and without, under zero1 and zero3, in fp32 and bf16, and prints how far
losses and weights are apart: not at all on a CPU, by the rounding of two AdamWs where the device is a GPU.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import lowband

STEPS, RATE, WIDTH = 5, 1e-3, 128
SCHEMES = {
    "zero1": {"weights": "self", "grads": "self", "optim": "world"},
    "zero3": {"weights": "world", "grads": "world", "optim": "world"},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def train(
    scheme: lowband.Scheme, dtype: torch.dtype, device: torch.device
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, final weights on rank 0, and the most bytes on the device."""
    torch.manual_seed(1)
    model = Model().to(device)
    lowband.shard(model, scheme, lowband.Topology({}), nn.TransformerEncoderLayer, compute_dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)  # where the shards lie
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(4, 32, WIDTH, device=device))
        loss.backward()
        lowband.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return losses, lowband.full_state_dict(model), most


def main() -> None:
    is_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    for name, levels in SCHEMES.items():
        for dtype in (torch.float32, torch.bfloat16):
            plain = lowband.Scheme(name=name, **levels)
            tiered = lowband.Scheme(name=f"{name}-host", **{**levels, "optim": "world@host"})
            (losses, weights, most), (also, others, fewer) = (
                train(scheme, dtype, device) for scheme in (plain, tiered)
            )
            if dist.get_rank() != 0:
                continue
            loss_apart = max(abs(a - b) for a, b in zip(losses, also, strict=True))
            apart = torch.cat([(weights[key] - others[key]).abs().flatten() for key in weights])
            print(
                f"{name} {str(dtype).removeprefix('torch.')}: losses apart {loss_apart:.1e}, weights at most "
                f"{apart.max():.1e}, in the mean {apart.mean():.1e}; on the device {most / 2**20:.0f} MiB, "
                f"with the optimizer on the host {fewer / 2**20:.0f} MiB",
                flush=True,
            )
            # Adam's first steps are as large as the rate, whatever the gradient: rounding may turn one over.
            limit = (1e-2 if dtype == torch.bfloat16 else 1e-4) * abs(losses[0]) if is_gpu else 0.0
            assert loss_apart <= limit and apart.mean() <= (RATE / 100 if is_gpu else 0.0)
            assert not is_gpu or fewer < most
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
