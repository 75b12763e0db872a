"""Ranges of the files of a checkpoint, as a load under another scheme reads them: values of any width."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lowband.engine.checkpoint.logical_tensors import Piece
from lowband.engine.checkpoint.rank_file import read_range, write_rank_file

NUMEL, CUTS = 20, (0, 7, 20)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_any_range_of_values_of_any_width(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(NUMEL).to(dtype)
    chunks = ()
    for rank, (start, stop) in enumerate(pairwise(CUTS)):
        pieces = {
            "before": Piece(torch.zeros(3), 0, (3,), sharded=False, writes=True),
            "state": Piece(whole[start:stop], start, (4, 5), sharded=True, writes=True),
        }
        _, entries = write_rank_file(tmp_path, rank, pieces, lambda: None)
        chunks += entries["state"].chunks
    saved = entries["state"].model_copy(update={"chunks": chunks})
    for start in range(NUMEL):
        for stop in range(start, NUMEL + 1):
            found = read_range(tmp_path, saved, start, stop - start, lambda: None)
            assert torch.equal(found, whole[start:stop])
