"""`lowband bench-mfu` on a CPU: every way makes its steps in both rounds, and one that fails is told."""

import pytest
import torch

from lowband.bench import mfu
from lowband.bench.mfu import Way
from lowband.errors import UserError
from lowband.spec.config import Config
from tests.checkout import ROOT


def test_ways_take_turns_and_one_that_fails_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = mfu._steps

    def failing(way: Way, *given: object):
        if way == mfu.WAYS[0]:
            raise torch.OutOfMemoryError("full")
        if way == mfu.WAYS[4]:
            raise ValueError("a bug\nof it")
        return steps(way, *given)

    monkeypatch.setattr(mfu, "_steps", failing)
    monkeypatch.setattr(mfu, "LIMIT_S", float("inf"))  # however slow this machine is
    monkeypatch.setattr(mfu, "WARMUP", 0)
    monkeypatch.setattr(mfu, "STEPS", 2)
    rows = mfu.bench(ROOT)
    order = list(dict.fromkeys((row.round, Way(*row[3:8])) for row in rows))
    assert order == [(turn, way) for turn in (1, 2) for way in mfu.WAYS]
    outcomes = {"oom": mfu.WAYS[0], "ValueError: a bug": mfu.WAYS[4]}
    for row in rows:
        way = Way(*row[3:8])
        assert outcomes.get(row.outcome) == (way if way in outcomes.values() else None), row
        assert (row.step_s is None) == (row.outcome != "ok") and row.mfu is None
    assert len(rows) == 2 * (2 + 4 * mfu.STEPS)


def test_a_model_of_no_setup_is_refused() -> None:
    with pytest.raises(UserError, match=r"--model: 'gpt-9b' on this device \(cpu\) \(allowed: gpt-200k\)"):
        mfu.bench(ROOT, "gpt-9b")


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM-64GB", 354),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_the_gpus_own(gpu: str, tflops: float | None) -> None:
    assert mfu.peak_of(gpu, Config(ROOT)) == (tflops and tflops * 1e12)


def test_nothing_is_built_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))  # each build takes 10 s, and so does each look at the clock
    monkeypatch.setattr(mfu.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(mfu, "_seconds", lambda *_: ([1.0], "ok"))
    found = mfu._measured("cpu", None, None)
    assert [way for _, way, *_ in found] == list(mfu.WAYS[:5])
