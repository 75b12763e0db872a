"""The longest sequence in each way: at the edge of the memory, and by hand where the loss decides."""

from dataclasses import replace

import pytest

from lowband.evidence.validation.longest import LOSSES, MIXED, RANKS, STEP, longest
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from tests.checkout import CONFIG


@pytest.fixture(scope="module")
def rows():
    return longest(CONFIG)


def _tokens(rows, **where) -> list[int]:
    for column, value in where.items():
        rows = rows[rows[column] == value]
    assert rows["ranks"].tolist() == list(RANKS)
    return rows["tokens"].tolist()


@pytest.mark.parametrize(("loss", "way", "ranks"), [("whole", "ring", 8), ("in pieces", "gather", 16)])
def test_it_fits_and_a_longer_one_does_not(rows, loss: str, way: str, ranks: int) -> None:
    machine, stack = setting(CONFIG, "frontier", "ours")
    axes = Ways.of_options(cp=ranks).model_copy(update={"context_attention": way})
    [tokens] = rows.query(
        "cluster == 'frontier' and model == 'llama-3-8b' and logits == @loss and way == @way"
        " and ranks == @ranks"
    )["tokens"]
    stack = stack.model_copy(update=LOSSES[loss])
    model, scheme = CONFIG.model("llama-3-8b"), CONFIG.scheme("zero3")
    job = Workload(machine, stack, model, scheme, ranks, 1, tokens, axes=axes)
    assert predict(job, interval=False).fits
    assert not predict(replace(job, seq_len=tokens + STEP), interval=False).fits


def test_more_ranks_have_room_for_longer_ones_and_ways_differ(rows) -> None:
    of = {"cluster": "dgx-h100", "model": "llama-3.2-1b", "logits": "in pieces"}
    ways = {way: _tokens(rows, way=way, **of) for way in ("ring", "gather", "heads", MIXED, "state")}
    for way in ("ring", MIXED, "state"):
        assert ways[way] == sorted(ways[way])
    assert ways["heads"][-1] == 0  # 32 heads on 64 ranks
    assert ways["gather"][-1] < ways["ring"][-1] / 4  # a rank holds all keys
    assert all(a >= b for a, b in zip(ways[MIXED], ways["ring"], strict=True))
    whole = _tokens(rows, way="ring", **{**of, "logits": "whole"})
    assert all(a < b / 5 for a, b in zip(whole, ways["ring"], strict=True))
    refused = rows[(rows["way"] == "heads") & (rows["ranks"] == 64)]["refused"]
    assert refused.str.contains("32 heads with 8 of keys cannot be divided").all()
