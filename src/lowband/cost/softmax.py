"""What softmax of one vector costs: passes over memory, of which each algorithm is made (arXiv 2001.04438).

A vector of N values is read and written whole in every pass. Traffic in elements, as the paper's own
benchmark code shows it (results/reported/04_two_pass_softmax_2001.04438.csv):

    two-pass              sum of pairs: read; output: read, write                            3 N
    three-pass recompute  max: read; sum: read; output: read, write                          4 N
    three-pass reload     max: read; exponentials: read, write; scale: read, write in place  5 N

The kernels for GPUs (`kernels/softmax.py`) make the same passes over rows that no cache holds; one more of
them takes maximum and sum in one pass (arXiv 1805.02867).
"""

from collections.abc import Sequence

FP32_BYTES = 4

# A pass that only moves data, and the elements of traffic per value
READ, SCALE, SCALE_IN_PLACE = "read", "scale", "scale in place"
PASSES = {READ: 1, SCALE: 2, SCALE_IN_PLACE: 2}

# algorithm -> its passes, in their order
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
LEAST_TRAFFIC = {"forward": 2, "backward": 3}  # of any algorithm, the row kept between its passes


def passes(name: str) -> Sequence[str]:
    """The passes of an algorithm, or of a pass: itself."""
    return {**ALGORITHMS, **GPU_ALGORITHMS}.get(name, (name,))


def traffic_bytes(name: str, elements: int) -> int:
    """Bytes that an algorithm or a pass reads and writes for `elements` fp32 values.

    A store to a line that is not in a cache makes most processors read it first; that is not counted, as in
    the paper.
    """
    return FP32_BYTES * elements * sum(PASSES[each] for each in passes(name))
