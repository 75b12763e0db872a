"""FLOPs and bytes of attention on one device, with no score matrix in memory (arXiv 2307.08691)."""


def flops(
    batch: int, heads: int, queries: int, keys: int, head_size: int, is_causal: bool
) -> tuple[int, int]:
    """FLOPs of the forward and of the backward (section 4.1 of the paper); `queries` and `keys` are lengths.

    4 Tq Tk D per head forward; 10 Tq Tk D backward, its five products counted once each; half if causal.
    """
    products = batch * heads * queries * keys * head_size // (2 if is_causal else 1)
    return 4 * products, 10 * products


def bytes_moved(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, head_size: int, element: int
) -> tuple[int, int]:
    """Minimum bytes of forward and of backward: each tensor read or written once, `element` bytes a value."""
    q = batch * heads * queries * head_size * element
    kv = 2 * batch * kv_heads * keys * head_size * element
    logsumexp = 4 * batch * heads * queries
    return 2 * q + kv + logsumexp, 4 * q + 2 * kv + logsumexp
