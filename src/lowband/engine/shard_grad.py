"""The gradient of an optimizer shard: a plain tensor to optimizers, but not to functions that reduce it.

torch.nn.utils.clip_grad_norm_ would give each rank the norm of its own shards, and each rank would scale by a
different factor. A GradScaler would find infinities on some ranks only, and only those would skip their step.
The same holds for norms written by hand, such as `p.grad.detach().pow(2).sum()`.
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
    *(
        getattr(owner, name)
        for owner in (torch, torch.Tensor)
        for name in ("norm", "sum", "mean", "max", "min", "amax", "amin", "std", "var", "any", "all", "dot")
    ),
}
# What a norm by hand applies before it reduces. The result of any other function is a plain tensor, so that
# optimizers keep no states of this class.
_ON_THE_WAY = {
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.detach,
    *(getattr(torch.Tensor, name) for name in ("float", "double", "to", "cpu", "view", "mul", "__mul__")),
    *(getattr(torch.Tensor, name) for name in ("__pow__", "__abs__")),
    *(
        getattr(owner, name)
        for owner in (torch, torch.Tensor)
        for name in ("pow", "square", "abs", "isnan", "isinf", "isfinite", "reshape", "flatten", "ravel")
    ),
    torch.cat,
    torch.stack,
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
                allowed="lowband.clip_grad_norm_(module, max_norm), which returns the norm over all ranks; "
                "p.grad.as_subclass(torch.Tensor) for this rank's part",
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(ShardGrad) if func in _ON_THE_WAY else result
