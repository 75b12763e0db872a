"""Step times and peak memory of this rank."""

import math
import resource
import time
from dataclasses import dataclass

import torch

from lowband.engine.transport.lane import Lanes


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on this rank.

    step_s:    from the first batch to the end of the optimizer step
    exposed_s: part of step_s in which the computation waited for collectives; NaN if unknown
    hidden_s:  time of collectives, copies, sums and quantization that ran behind the computation
    exchange_s: part of exposed_s that was for exchanges between replicas
    """

    step_s: float
    exposed_s: float
    hidden_s: float
    exchange_s: float


class StepClock:
    """Reads the clock and the lanes around each step; a peer has no lanes."""

    def __init__(self, lanes: Lanes | None, device: torch.device) -> None:
        self._lanes, self._device = lanes, device
        self._start = 0.0

    def start(self) -> None:
        self._synchronize()
        if self._lanes is not None:
            self._lanes.take_times()
        self._start = time.perf_counter()

    def stop(self) -> StepTimes:
        self._synchronize()
        step_s = time.perf_counter() - self._start
        if self._lanes is None:
            return StepTimes(step_s, math.nan, math.nan, math.nan)
        times = self._lanes.take_times()
        return StepTimes(step_s, times.exposed_s, times.busy_s - times.exposed_s, times.exchange_s)

    def _synchronize(self) -> None:
        """Wait for the computation, which waits for all that it needs of the lanes; an exchange between
        replicas may go on. A peer has other streams, so the whole device is waited for."""
        if self._device.type != "cuda":
            return
        if self._lanes is None:
            torch.cuda.synchronize(self._device)
        else:
            torch.cuda.current_stream(self._device).synchronize()


def reset_peak_memory(device: torch.device) -> None:
    """Measure the device's peak from here on: building the whole model is not part of training.

    The model's memory blocks are returned to the device: gathered units do not fit into them, and NCCL
    allocates outside of torch's allocator.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak device memory of tensors since the reset; on a CPU the process's peak resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Peak bytes that torch's allocator held since the reset, fragments included; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
