"""What users' code has set on a parameter, such as Mamba's `_no_weight_decay`: who builds param groups by it
finds it on the shard, and who computes with it on the leaf.
"""

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

# Attributes that the engine sets itself; others of its own begin with `_lowband`.
_OURS = frozenset({"slice_of", "is_partial_sum", "seen_as", "tied_to", "place", "shard_of", "collectives"})
_DTENSORS = frozenset({"_spec", "_local_tensor"})


def keep_attributes(of: nn.Parameter, on: nn.Parameter) -> None:
    """Set on one parameter what others than the engine have set on another."""
    if isinstance(of, FakeTensor):  # of a counted run; its own are torch's: its device, its mode
        return
    for name, value in vars(of).items():
        if name not in _OURS | _DTENSORS and not name.startswith("_lowband"):
            setattr(on, name, value)
