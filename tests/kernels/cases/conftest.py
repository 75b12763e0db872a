import numpy as np
import pytest
import torch
from common import ON_GPU
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

torch.set_num_threads(1)


def fma(_builder: object, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """Round once, as a device does; the interpreter rounds the product too. In fp64 the product is exact."""
    total = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


InterpreterBuilder.create_fma = fma


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")
