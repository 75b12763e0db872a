"""Bytes that the engine holds, by kind, now and at the peak."""

import threading
from collections import Counter

import torch


class MemoryMeter:
    """Counts tensors from the line that makes them to the line that frees them.

    Kinds, those in another tier than the device with its name behind (`optim@host`, spec.tiers): weights,
    secondary, grads, optim (states), gathered (whole units in use), sums (of whole units'
    gradients over micro-batches, breadth-first), buffers (gradients being reduced; send and receive buffers;
    the peak is the largest of one submission, because timing decides how many submissions overlap),
    activations@host (what units keep there for the backward). Not counted: activations on the device and the
    leaves' gradients, which belong to autograd, and the temporaries of encoding and decoding one piece
    (collectives.wire).
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._lock = threading.Lock()  # the lanes count too

    def hold(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's bytes from now on; returns it."""
        self.add(kind, tensor.nbytes)
        return tensor

    def add(self, kind: str, count: int) -> None:
        """Count bytes from now on."""
        with self._lock:
            self.now[kind] += count
            self.peak[kind] = max(self.peak[kind], self.now[kind])

    def release(self, kind: str, count: int) -> None:
        """Stop counting bytes that are about to be freed."""
        with self._lock:
            self.now[kind] -= count

    def reach(self, kind: str, count: int) -> None:
        """Raise the peak to bytes that were held temporarily and counted elsewhere."""
        with self._lock:
            self.peak[kind] = max(self.peak[kind], count)
