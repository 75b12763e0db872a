"""A lane far behind the computation gives the values of one that is never behind. tests/gpu: on streams."""

import math

import pytest
import torch
from alike import train
from named import SCHEMES

from lowband.run.on_ranks import on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_cpu(scheme: str, dtype: torch.dtype) -> None:
    [expected] = on_ranks(1, train, scheme, dtype, CPU, False)
    [found] = on_ranks(1, train, scheme, dtype, CPU, True)
    assert found == expected
    assert all(math.isfinite(value) for value in found)
