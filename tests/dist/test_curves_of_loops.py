"""Training curves of a loop of one's own: rank 0 writes them, with the bytes that it has sent."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks

RANKS, STEPS = 2, 3
NUMEL = 2 * 256  # of the one unit, no padding


def train(folder: Path) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False))
    lowband.shard(model, "zero3", lowband.Topology({}), wrap=nn.Conv1d, compute_dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with lowband.Curves("tensorboard", folder, f"rank-{dist.get_rank()}") as curves:
        for step in range(1, STEPS + 1):
            loss = model(torch.ones(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            curves.add(step, {"loss": loss.item()}, model)
    return losses


def test_rank_0_writes_them(tmp_path: Path) -> None:
    losses, _ = on_ranks(RANKS, train, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0"]
    reader = EventAccumulator(str(tmp_path / "rank-0")).Reload()
    assert [(p.step, p.value) for p in reader.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses, 1)
    ]
    gathered, reduced = NUMEL // RANKS * 4, NUMEL // RANKS * 4  # to the one other rank, in fp32
    assert [p.value for p in reader.Scalars("sent_bytes/world")] == [gathered + reduced] * STEPS


@pytest.mark.parametrize(
    ("tool", "run", "words"),
    [
        ("tensorbord", "a", "Curves: unknown tool 'tensorbord' (allowed: tensorboard, wandb, mlflow)"),
        ("tensorboard", "a/b", "the run's name: 'a/b' (allowed: letters, digits and any of . _ = + -)"),
        ("tensorboard", "..", "the run's name: '..' (allowed: letters, digits and any of . _ = + -)"),
    ],
)
def test_a_wrong_tool_or_name_is_refused(tool: str, run: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(lowband.UserError) as refused:
        lowband.Curves(tool, tmp_path, run)
    assert str(refused.value) == words
    assert not [*tmp_path.iterdir()]
