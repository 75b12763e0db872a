"""What a search leaves out by: below the floor of every job, and so near that few floors are worked out."""

from pathlib import Path

import pytest

from lowband.predict.request import setting
from lowband.predict.search.bounded import Bounds, _floor
from lowband.predict.search.degrees import axes_to_try, possible
from lowband.predict.search.plan import RECOMPUTE, _bases
from lowband.spec.config import Config

CONFIG = Config(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("cluster", "model", "ranks", "seq", "nearest"),
    [
        ("frontier", "llama-3-405b", 4096, 131072, 0.98),
        ("dgx-h100", "gpt-20b", 64, 2048, 0.95),
        ("dgx-h100", "qwen3-30b-a3b", 64, 4096, 0.85),
    ],
)
def test_bounds_are_below_floors_and_near(
    cluster: str, model: str, ranks: int, seq: int, nearest: float
) -> None:
    machine, stack = setting(CONFIG, cluster, None)
    spec = CONFIG.model(model)
    axes = axes_to_try(machine, spec, context=None, expert=None, seq_len=seq)
    tried = possible(machine, spec, ranks, axes, seq, ("all",), ())
    some = tried[:: len(tried) // 40]
    bounds, ratios = Bounds(), []
    for base in _bases(machine, stack, spec, ranks, seq, 4 * ranks, some, None, RECOMPUTE):
        ratios.append(bounds.of(base) / float(_floor(base).min()))
    assert max(ratios) <= 1
    assert sorted(ratios)[len(ratios) // 2] > nearest
