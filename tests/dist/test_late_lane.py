"""A lane far behind the computation gives the values of one that is never behind. tests/gpu: on streams."""

import math
from itertools import product

import pytest
import torch
from alike import train
from named import SCHEMES

from lowband.run.on_ranks import on_ranks
from tests.pairwise import pairwise

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("scheme", "dtype"), pairwise(product(SCHEMES, (torch.float32, torch.bfloat16)), size=1), ids=str
)
def test_on_a_cpu(scheme: str, dtype: torch.dtype) -> None:
    [expected] = on_ranks(1, train, scheme, dtype, CPU, False)
    [found] = on_ranks(1, train, scheme, dtype, CPU, True)
    assert found == expected
    assert all(math.isfinite(value) for value in found)
