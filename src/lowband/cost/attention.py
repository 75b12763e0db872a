"""FLOPs and bytes of attention on one device, with no score matrix in memory (arXiv 2307.08691)."""


def flops(
    batch: int, heads: int, queries: int, keys: int, head_size: int, is_causal: bool
) -> tuple[int, int]:
    """FLOPs of the forward and of the backward (section 4.1 of the paper); `queries` and `keys` are lengths.

    4 Tq Tk D per head forward; 10 Tq Tk D backward, its five products counted once each; half if causal.
    """
    return flops_of_pairs(batch * heads * queries * keys // (2 if is_causal else 1), head_size)


def flops_of_pairs(pairs: int, head_size: int) -> tuple[int, int]:
    """The same, by how many pairs of a query and a key that it sees there are in all sequences and heads."""
    return 4 * pairs * head_size, 10 * pairs * head_size


def bytes_moved(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, head_size: int, element: int
) -> tuple[int, int]:
    """Minimum bytes of forward and of backward: each tensor read or written once, `element` bytes a value."""
    q = batch * heads * queries * head_size * element
    kv = 2 * batch * kv_heads * keys * head_size * element
    logsumexp = 4 * batch * heads * queries
    return 2 * q + kv + logsumexp, 4 * q + 2 * kv + logsumexp
