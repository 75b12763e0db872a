"""Where the Triton kernels run: on a CUDA or ROCm device, or on the CPU under Triton's interpreter.

The interpreter is for tests. It is chosen by TRITON_INTERPRET=1 before the first kernel is imported.
"""

import os
from importlib.util import find_spec

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_HIP = torch.version.hip is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # that the kernels compute with
_IS_INSTALLED = find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels accept tensors on this device."""
    return _IS_INSTALLED and (device.type == "cuda" or (IS_INTERPRETED and device.type == "cpu"))
