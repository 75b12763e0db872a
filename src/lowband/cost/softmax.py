"""Memory traffic of softmax of one vector: the passes over memory of each algorithm (arXiv 2001.04438).

Every pass reads all N values, writes all N values, or both. Traffic in elements, according to the paper's own
benchmark code (results/reported/04_two_pass_softmax_2001.04438.csv):

    two-pass              sum of pairs: read; output: read, write                            3 N
    three-pass recompute  max: read; sum: read; output: read, write                          4 N
    three-pass reload     max: read; exponentials: read, write; scale: read, write in place  5 N

The kernels for GPUs (`kernels/softmax.py`) make the same passes over rows too long for any cache; one more
of them computes maximum and sum in one pass (arXiv 1805.02867).
"""

from collections.abc import Sequence

FP32_BYTES = 4

# Passes that only move data, and their elements of traffic per value
READ, SCALE, SCALE_IN_PLACE = "read", "scale", "scale in place"
PASSES = {READ: 1, SCALE: 2, SCALE_IN_PLACE: 2}

# algorithm -> its passes, in order
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "two-pass": (READ, SCALE),
    "three-pass recompute": (READ, READ, SCALE),
    "three-pass reload": (READ, SCALE, SCALE_IN_PLACE),
}
TWO_PASS = "two-pass"
GPU_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "recompute": ALGORITHMS["three-pass recompute"],
    "reload": ALGORITHMS["three-pass reload"],
    "online": (READ, SCALE),
    "two_pass": ALGORITHMS[TWO_PASS],
}
# Elements of traffic per value. Backward: the sum of y dy, then y (dy - sum); two read twice, one written.
BACKWARD_TRAFFIC = 5
LEAST_TRAFFIC = {
    "forward": 2,
    "backward": 3,
}  # lower bound for any algorithm: the row stays on chip between passes


def passes(name: str) -> Sequence[str]:
    """The passes of the algorithm called `name`, or only the pass of that name."""
    return {**ALGORITHMS, **GPU_ALGORITHMS}.get(name, (name,))


def traffic_bytes(name: str, elements: int) -> int:
    """Bytes that an algorithm or a pass reads and writes for `elements` fp32 values.

    Most processors read a line that is not in a cache before they store to it; as in the paper, that is not
    counted.
    """
    return FP32_BYTES * elements * sum(PASSES[each] for each in passes(name))
