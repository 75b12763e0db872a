"""Bytes that the engine holds, by kind, now and at the peak."""

import threading
from collections import Counter

import torch


class MemoryMeter:
    """Counts tensors from the line that makes them to the line that lets them go.

    Kinds: weights, secondary, grads, optim (states), gathered (whole units in use), buffers (gradients on
    their way; what collectives send and receive). Not counted: activations and the leaves' gradients, which
    are autograd's, and what encoding and decoding hold of one piece (engine.wire).
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._lock = threading.Lock()  # the lane counts too

    def hold(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's bytes from now on; returns it."""
        with self._lock:
            self.now[kind] += tensor.nbytes
            self.peak[kind] = max(self.peak[kind], self.now[kind])
        return tensor

    def release(self, kind: str, count: int) -> None:
        """Bytes that are let go."""
        with self._lock:
            self.now[kind] -= count
