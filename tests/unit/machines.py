"""A machine of round numbers, for times by hand."""

from typing import Any

from lowband.spec.machine import Device, Level, Link, Machine
from lowband.spec.sourced import Fact

SIZES = {"package": 2, "node": 4}


def fact(value: float) -> Fact:
    return Fact(value=value, source="test")


def machine(latency_us: float = 0.0, rate: float = 1.0, **device: Any) -> Machine:
    """Links of 4, 2 and 1 times a rate, in 10^9 bytes per second."""
    levels = [
        Level(
            name=name, size=SIZES.get(name),
            link=Link(gigabytes_per_s=factor * rate, latency_us=fact(latency_us), source="test"),
        )
        for name, factor in (("package", 4), ("node", 2), ("world", 1))
    ]  # fmt: skip
    made = Device(name="device", peak_tflops={"bf16": 1.0, "fp32": 1.0}, source="test", **device)
    return Machine(name="made", description="test", device=made, levels=tuple(levels))
