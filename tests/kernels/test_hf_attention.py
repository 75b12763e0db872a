"""examples/hf_attention.py: losses and gradients of a Gemma 2 are eager attention's; what it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowband.errors import UserError
from lowband.kernels.huggingface import Attention, of_documents, of_real_keys
from lowband.kernels.spans import spans

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_attention.py"
LINE = r"(\w+): loss ([\d.]+), with lowband's attention ([\d.]+); gradients differ by (\S+)"


def test_a_model_has_the_losses_and_gradients_of_eager_attention() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(LINE, done.stdout)
    assert [name for name, *_ in found] == ["whole", "documents", "padding"]
    for _, loss, ours, off in found:
        assert float(loss) == pytest.approx(float(ours), abs=2e-6)
        assert 0 < float(off) < 1e-5


def test_documents_are_where_positions_begin_again() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]])
    found = of_documents(positions, 7, 7, True, None)
    assert [torch.equal(a, b) for a, b in zip(found, spans([[3, 2, 2], [7, 0, 0]]), strict=True)] == [
        True
    ] * 2
    for given in (None, torch.arange(7)[None], torch.arange(5)[None]):
        assert torch.equal(of_documents(given, 7, 7, True, None).mask(), spans([[7]]).mask())
    assert of_documents(positions[:, :1], 1, 7, True, 2).mask().tolist() == [[[False] * 4 + [True] * 3]]


@pytest.mark.parametrize("queries", [1, 3, 5, 8])
@pytest.mark.parametrize("near", [None, 0, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_what_is_no_padding_is_seen(queries: int, near: int | None, is_causal: bool) -> None:
    """By each query, the last of which has the last key; also of another sequence, as a decoder's."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    apart = torch.arange(5) - torch.arange(5 - queries, 5).unsqueeze(1)  # keys after a query's own
    seen = mask.bool().unsqueeze(1).expand(-1, queries, -1)
    if near is not None:
        seen = seen & (apart >= -near) & (apart <= near)
    if is_causal:
        seen = seen & (apart <= 0)
    assert torch.equal(of_real_keys(mask.bool(), queries, is_causal, near).mask(), seen)


@pytest.mark.parametrize("row", [[1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 0, 1]])
def test_padding_between_tokens_is_refused(row: list[int]) -> None:
    with pytest.raises(UserError, match="padding inside a sequence"):
        of_real_keys(torch.tensor([row]).bool(), 4, True, None)


def test_a_mask_of_queries_and_keys_is_refused() -> None:
    with pytest.raises(UserError, match=r"a mask of shape \[1, 1, 4, 4\] .*allowed: \[B, keys\]"):
        of_real_keys(torch.zeros(1, 1, 4, 4), 4, True, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dropout": 0.1}, "dropout 0.1 .*attention_dropout 0"),
        ({"s_aux": torch.zeros(2)}, "s_aux in attention"),
        ({"position_bias": torch.zeros(2)}, "position_bias in attention"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(given: dict[str, Any], message: str) -> None:
    q = torch.zeros(1, 2, 4, 32)
    with pytest.raises(UserError, match=message):
        Attention()(SimpleNamespace(training=True), q, q, q, None, **given)


def test_spans_are_made_once_for_the_layers_of_a_batch() -> None:
    """And anew where positions were written to in place."""
    attend, q = Attention(), torch.zeros(1, 2, 4, 32)
    positions = torch.tensor([[0, 1, 0, 1]])
    first = attend._spans(q, q, None, positions, None, True)
    assert attend._spans(q, q, None, positions, None, True) is first
    near = attend._spans(q, q, None, positions, 1, True)
    assert near.mask().sum() == 4 and first.mask().sum() == 6
    assert attend._spans(q, q, None, positions, None, True) is first
    positions[0, 2:] += 2
    assert attend._spans(q, q, None, positions, None, True).mask().sum() == 10
    assert attend._spans(q, q, None, positions, None, False).mask().all()
    with torch.inference_mode():  # where torch counts no writes
        positions = torch.tensor([[0, 1, 0, 1]])
        assert attend._spans(q, q, None, positions, None, True).mask().sum() == 6
        positions[0, 2:] += 2
        assert attend._spans(q, q, None, positions, None, True).mask().sum() == 10
