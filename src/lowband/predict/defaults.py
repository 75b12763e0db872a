"""Defaults for constants that neither machine nor stack states: no device is perfect, no stack free.

Each interval admits what the shipped machines and stacks have shown (`tests/unit/test_defaults.py`), so a
prediction that rests on defaults has a wide one. A constant that is left out on purpose stays so: attention
as fast as products, gathers in one piece, nothing hidden of tensor parallelism.
"""

from lowband.spec.machine import Level, Machine, Tier, TierName
from lowband.spec.mesh import WORLD
from lowband.spec.sourced import DEFAULT, Fact
from lowband.spec.stack import Stack


def _default(value: float, low: float, high: float, source: str) -> Fact:
    return Fact(value=value, low=low, high=high, source=f"{DEFAULT}: {source}")


DEVICE = {
    "matmul_efficiency": _default(
        0.7, 0.42, 0.83, "the median of nine fitted devices, from the least of them (MI250X) to the fastest "
        "product measured on an H100",
    ),
    "attention_efficiency": _default(
        0.3, 0.16, 0.62, "FlashAttention-2 in whole steps on A100 and H100; cuDNN's on an H100"
    ),
    "memory_efficiency": _default(
        0.7, 0.36, 0.9, "the least and the most that fits found; 0.9 is an H100's copy"
    ),
    "kernel_us": _default(6.9, 5, 10, "fits 280 products on an H100"),
    "speed_spread": _default(
        0.015, 0, 0.041, "devices of one type differ by 8 %, at most 22 % (arXiv 2208.11035: ranges without "
        "outliers, which are 5.4 standard deviations)",
    ),
    "framework_gib": _default(
        3, 0.3, 4, "an empty CUDA context, to 5 % of 80 GiB; 3.03 was fitted on an H100 under torchtitan"
    ),
}  # fmt: skip

# 10^9 bytes/s for each 10^12 FLOP/s of the 16-bit peak: H100 3.4, A100 5 to 6.5, V100 7.5, MI250X 8.4.
BYTES_PER_KILOFLOP = (5.0, 3.3, 8.5)

LINK = {
    "efficiency": _default(
        0.78, 0.34, 0.9, "large collectives reach 0.74 to 0.8 of a link in micro-benchmarks; with all 8 "
        "cards of a DGX-2 in use, 0.34 was fitted",
    ),
}  # fmt: skip
LATENCY_US = {
    True: _default(3.5, 1, 16, "tuners of NCCL and RCCL: ring step in a node; a message on MI250X takes 16"),
    False: _default(14, 2.5, 20, "NCCL's and RCCL's tuners: ring step between nodes"),
}  # by whether the level is inside a node

STACK = {
    "overlap": _default(0.874, 0, 1, "a collective slows computation 1.126 times, if all of it hides"),
    "collective_us": _default(17, 8.4, 38, "NCCL's and RCCL's tuners: base latency; 33 measured on A100"),
    "unit_us": _default(500, 0, 1000, "a hook of FSDP2 takes 1 ms of the host; the device may wait"),
}  # fmt: skip


# The host's memory, as Adam goes through it.
UPDATE = {
    "update_gigabytes_per_s": _default(
        61, 18, 250, "one rank alone on a node of Polaris; from one core of a server to what all ranks of a "
        "node of four faster devices reach (offload_constants.csv)"
    ),
    "node_update_gigabytes_per_s": _default(
        127, 61, 250, "the middle one of three nodes of four devices (offload_constants.csv); from one rank "
        "alone to the fastest of them"
    ),
}  # fmt: skip


def with_defaults(machine: Machine, stack: Stack) -> tuple[Machine, Stack]:
    """Both with a default in place of each constant that the prediction needs and neither file states."""
    device = machine.device
    missing = {key: fact for key, fact in DEVICE.items() if getattr(device, key) is None}
    if device.matmul_efficiency is not None:
        missing.pop("attention_efficiency", None)
        if device.matmul_efficiency.calibrated_on:
            missing.pop("speed_spread", None)  # fitted to whole steps, which waited for the slowest
    if device.memory_gib is None:  # ranks share the host: its memory holds no such runtime
        missing.pop("framework_gib", None)
        missing.pop("speed_spread", None)
    peak = device.peak_tflops.get("bf16")
    if device.memory_gigabytes_per_s is None and peak is not None:
        rate, low, high = (peak * factor for factor in BYTES_PER_KILOFLOP)
        missing["memory_gigabytes_per_s"] = _default(
            rate, low, high, "from the peak, as H100, A100, V100 and MI250X have it"
        )
    levels = tuple(_level(level) for level in machine.levels)
    software = {key: fact for key, fact in STACK.items() if getattr(stack, key) is None}
    return (
        machine.model_copy(
            update={
                "device": device.model_copy(update=missing),
                "levels": levels,
                "tiers": {name: _tier(name, tier) for name, tier in machine.tiers.items()},
            }
        ),
        stack.model_copy(update=software),
    )


def _tier(name: TierName, tier: Tier) -> Tier:
    missing = {key: fact for key, fact in UPDATE.items() if getattr(tier, key) is None}
    return tier.model_copy(update=missing if name == "host" else {})


def _level(level: Level) -> Level:
    link = level.link
    if link is None:
        return level
    missing: dict[str, Fact] = {}
    if link.latency_us is None:
        missing["latency_us"] = LATENCY_US[level.name != WORLD]
    if link.efficiency is None and not link.efficiency_by_cards:
        missing |= LINK
    return level.model_copy(update={"link": link.model_copy(update=missing)})


def constants(machine: Machine, stack: Stack) -> dict[str, Fact]:
    """The constants that decide a prediction, by their paths; storage and tiers are no part of it."""
    found, apart = machine.facts | stack.facts, ("storage.", "tiers.")
    return {path: fact for path, fact in found.items() if not path.startswith(apart)}
