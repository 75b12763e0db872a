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
from lowband.kernels.huggingface import Attention, documents

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


def test_documents_are_where_positions_begin_again_or_padding_does() -> None:
    assert documents(None, None, 7) == documents(None, torch.arange(7)[None], 7) == [[7]]
    assert documents(None, torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]]), 7) == [
        [3, 2, 2],
        [7, 0, 0],
    ]
    padded = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]).bool()
    assert documents(padded, None, 5) == [[3, 2, 0], [2, 3, 0], [1, 2, 2]]
    with pytest.raises(UserError, match="padding inside a sequence"):
        documents(torch.tensor([[1, 0, 1, 0]]).bool(), None, 4)


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


def test_a_generated_token_sees_its_sequence_without_the_padding() -> None:
    q, k = torch.zeros(2, 2, 1, 32), torch.zeros(2, 2, 5, 32)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    seen = Attention()._spans(q, k, mask, None, None, True)
    assert torch.equal(seen.mask()[:, 0], mask)
    seen = Attention()._spans(q, k, mask, None, 2, True)
    assert seen.mask()[:, 0].tolist() == [[False, False, False, True, True]] * 2


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
