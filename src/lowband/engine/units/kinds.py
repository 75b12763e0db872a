"""Which parameters can be cut into shards: plain ones of a real floating-point type."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowband.errors import UserError


def check_kinds(module: nn.Module) -> None:
    """Raises UserError for a parameter that another library has divided, or whose values fp32 cannot hold,
    and where torch makes no tensors that train.
    """
    where = type(module).__name__
    if torch.is_inference_mode_enabled():
        what = "torch.inference_mode() makes shards that cannot be trained"
        raise UserError(what, where=where, allowed="lowband.shard outside of it; forwards inside")
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise UserError(
                f"'{name}' is compiled by torch.jit, whose code keeps its own parameters",
                where=where,
                allowed="modules of Python; torch.compile",
            )
    for name, parameter in module.named_parameters():
        if is_traceable_wrapper_subclass(parameter):  # without importing DTensor, which takes long
            kind = type(parameter).__name__
            by = ", divided by fully_shard or parallelize_module" if kind == "DTensor" else ""
            raise UserError(
                f"'{name}' is a {kind}{by}",
                where=where,
                allowed="plain parameters; for lowband.shard, DTensors of parallelize_module alone",
            )
        if is_lazy(parameter):
            raise UserError(
                f"'{name}' has no shape before a first forward",
                where=where,
                allowed="lowband.shard after that; modules that are not lazy",
            )
        tensors = [key for key, value in vars(parameter).items() if isinstance(value, torch.Tensor)]
        if tensors:
            raise UserError(
                f"'{name}' has a tensor as its attribute '{tensors[0]}', which no shard would be a part of",
                where=where,
                allowed="buffers of modules",
            )
        if nn.Parameter in type(parameter).__mro__[1:]:  # what its class says would not be said of shards
            raise UserError(
                f"'{name}' is a {type(parameter).__name__}, a class of its own",
                where=where,
                allowed="nn.Parameter; attributes set on it are those of its shards, too",
            )
        if not parameter.is_floating_point():
            raise UserError(
                f"'{name}' is of {parameter.dtype}, and shards are fp32",
                where=where,
                allowed="floating-point parameters; others as buffers, which stay whole",
            )
