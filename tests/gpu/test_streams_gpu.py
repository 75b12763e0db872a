"""The engine on streams of one device, with collectives that come late: what no wait protects is wrong.

Only here does the lane run apart from the computation: one rank over NCCL gathers nothing, and gloo waits for
the lane in every collective. `tests/dist/test_streams.py` shows the same without a device, in a model.
"""

import pytest
import torch

pytest.importorskip("pydantic", reason="specs are read with pydantic; the kernels' tests do without")
from alike import train
from test_parity import SCHEMES

from lowband.run.on_ranks import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]
GPU = torch.device("cuda", 0)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_late_lane_gives_the_same_values(scheme: str, dtype: torch.dtype) -> None:
    [expected] = on_ranks(1, train, scheme, dtype, GPU, False)
    [found] = on_ranks(1, train, scheme, dtype, GPU, True)
    assert found == pytest.approx(expected, rel=TOLERANCE[dtype])


def test_a_forgotten_wait_shows() -> None:
    [expected] = on_ranks(1, train, "zero3", torch.float32, GPU, False)
    [found] = on_ranks(1, train, "zero3", torch.float32, GPU, True, False)
    assert found != pytest.approx(expected, rel=TOLERANCE[torch.float32])


if torch.version.hip is None:  # the sanitizer watches CUDA

    @pytest.mark.parametrize("scheme", ["zero1", "hier3-exact"])
    def test_torchs_sanitizer_of_streams_finds_nothing(scheme: str) -> None:
        on_ranks(1, train, scheme, torch.bfloat16, GPU, True, True, True)
