"""A program: one more collective in a step is one row. Run by test_step.py in a process of its own."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lowband.spec import step

ROW = step.Collective(
    "again_reduce", "all_reduce", "optim", "world", "gradients", "step", "backward", coded="int8"
)
step.STEP = (*step.STEP, ROW)

# Only now, so that everything that reads the rows finds this one.
import lowband  # noqa: E402
from lowband.cost.buffers import buffer_bytes  # noqa: E402
from lowband.cost.bytes import sent_bytes  # noqa: E402
from lowband.engine.api import engine_of  # noqa: E402
from lowband.predict.search.candidates import WIRES  # noqa: E402
from lowband.predict.time import ITEMS, step_time  # noqa: E402
from lowband.predict.workload import Workload  # noqa: E402
from lowband.run.on_ranks import on_ranks  # noqa: E402
from lowband.spec.config import Config  # noqa: E402
from lowband.spec.mesh import Levels  # noqa: E402
from lowband.spec.scheme import Scheme  # noqa: E402
from lowband.spec.stack import OURS  # noqa: E402

ROOT = Path(__file__).parents[2]
RANKS, INNER = 4, {"node": 2}
SCHEME = Scheme(name="with-row", weights="self", grads="self", optim="self", again_reduce="int8")


def counted() -> list[list]:
    torch.manual_seed(0)
    module = lowband.shard(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), SCHEME, lowband.Topology(INNER), wrap=nn.Linear,
        compute_dtype=torch.float32,
    )  # fmt: skip
    engine, optimizer = engine_of(module), torch.optim.AdamW(module.parameters())
    for _ in range(2):
        engine.ledger.take()
        module(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_world_size() == RANKS
    units = [unit.layout.numel for unit in engine.units]
    return [units, [[s.level, s.collective, s.wire, s.bytes] for s in engine.ledger.take()]]


def main() -> None:
    levels = Levels.fit(INNER, RANKS)
    units, ledger = on_ranks(RANKS, counted)[0]
    without = SCHEME.model_copy(update={"again_reduce": "native"})
    machine = Config(ROOT).machine("frontier")
    model = Config(ROOT).model("gpt-10b")
    job = Workload(machine, OURS, model, on_frontier(SCHEME), ranks=16, micro_batch=1, seq_len=2048)
    print(
        json.dumps(
            {
                "ledger": sorted(ledger),
                "closed form": sorted(
                    [*key, size]
                    for key, size in sent_bytes(units, SCHEME, levels, "fp32", "fp32", 1, False).items()
                    if size
                ),
                "buffers": [
                    buffer_bytes(units[:1], s, levels, "fp32", "fp32", "nccl") for s in (without, SCHEME)
                ],
                "seconds": float(step_time(job).lane["again_reduce"]),
                "has item": "exposed_again_reduce" in ITEMS,
                "plan": WIRES.get("again_reduce"),
            }
        )
    )


def on_frontier(scheme: Scheme) -> Scheme:
    """The same on Frontier, whose levels have other names."""
    return scheme.model_copy(update={"grads": "package", "optim": "package"})


if __name__ == "__main__":
    main()
