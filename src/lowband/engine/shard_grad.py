"""The gradient of an optimizer shard: a plain tensor to optimizers, but not to functions that take norms.

torch.nn.utils.clip_grad_norm_ would give each rank the norm of its own shards, and each rank would scale by a
different factor. A GradScaler would find infinities on some ranks only, and only those would skip their step.
"""

from collections.abc import Callable
from typing import Any

import torch

from lowband.errors import UserError

_OF_ALL_RANKS = {
    torch._foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_,
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    torch.Tensor.norm,
}


class ShardGrad(torch.Tensor):
    """Behaves as torch.Tensor, but raises UserError in functions that are meaningful only over all ranks."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_ALL_RANKS:
            raise UserError(
                f"{func.__name__} of a shard's gradient covers this rank's part only",
                allowed="lowband.clip_grad_norm_(module, max_norm), which returns the norm over all ranks",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
