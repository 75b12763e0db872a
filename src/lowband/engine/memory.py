"""Bytes that the engine holds, by kind, now and at the peak."""

import threading
from collections import Counter

import torch


class MemoryMeter:
    """Counts the states, gathered units and gradients on their way; not what a collective holds meanwhile.

    Kinds: weights, secondary, grads, optim (states), gathered (whole units in use), buffers (in transit).
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._lock = threading.Lock()  # the lane counts too

    def hold(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's bytes from now on; returns it."""
        with self._lock:
            self.now[kind] += tensor.numel() * tensor.element_size()
            self.peak[kind] = max(self.peak[kind], self.now[kind])
        return tensor

    def release(self, kind: str, tensor: torch.Tensor) -> None:
        with self._lock:
            self.now[kind] -= tensor.numel() * tensor.element_size()
