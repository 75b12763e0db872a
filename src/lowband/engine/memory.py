"""Bytes that the engine holds, by kind, now and at the peak."""

import threading
from collections import Counter

import torch


class MemoryMeter:
    """Counts tensors from the line that makes them to the line that frees them.

    Kinds: weights, secondary, grads, optim (states), gathered (whole units in use), buffers (gradients on
    their way; what collectives send and receive; the peak is the largest of one submission, for how many
    submissions meet is a matter of timing). Not counted: activations and the leaves' gradients, which are
    autograd's, and what encoding and decoding hold of one piece (engine.wire).
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._lock = threading.Lock()  # the lanes count too

    def hold(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's bytes from now on; returns it."""
        with self._lock:
            self.now[kind] += tensor.nbytes
            self.peak[kind] = max(self.peak[kind], self.now[kind])
        return tensor

    def release(self, kind: str, count: int) -> None:
        """Bytes that are about to be freed."""
        with self._lock:
            self.now[kind] -= count

    def reach(self, kind: str, count: int) -> None:
        """Bytes that were held for a while and counted elsewhere."""
        with self._lock:
            self.peak[kind] = max(self.peak[kind], count)
