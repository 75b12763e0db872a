"""Where the Triton kernels run: on a CUDA or ROCm device, or on the CPU under Triton's interpreter.

The interpreter is for tests. It is chosen by TRITON_INTERPRET=1 before the first kernel is imported.
"""

import os
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_HIP = torch.version.hip is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # that the kernels compute with
_IS_INSTALLED = find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels accept tensors on this device."""
    return _IS_INSTALLED and (device.type == "cuda" or (IS_INTERPRETED and device.type == "cpu"))


def on_its_device(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch on the GPU that its first tensor is on: Triton takes the current one, whatever the tensors."""

    @wraps(launch)
    def launched(first: torch.Tensor, *others: Any) -> None:
        with torch.cuda.device_of(first):
            launch(first, *others)

    return launched
