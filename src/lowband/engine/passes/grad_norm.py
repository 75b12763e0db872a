"""The 2-norm of all gradients, over all ranks, and the factor that clips them."""

import torch

from lowband.engine.passes.engine import Engine
from lowband.engine.units.shard_sums import sum_over_replica
from lowband.engine.units.waiting import check_reduced
from lowband.errors import UserError
from lowband.spec.activations import STAGES_NORM, TENSOR_NORM


def grad_norm(engine: Engine) -> tuple[torch.Tensor, dict[torch.device, list[torch.Tensor]]]:
    """The norm, an fp64 scalar on the module's device, and this rank's gradients by where they lie.

    Every rank must call it. Raises UserError if gradients of backwards under `no_sync` wait for one outside
    of it, and inside of a step of lowband.Matrices or behind one, which takes their gradients.
    """
    engine.put_shards()
    if engine.at_owners or engine.passes.backward.are_taken:
        raise UserError(
            "clip_grad_norm_ inside of `with matrices` or behind it, where their gradients are taken",
            where="Matrices",
            allowed="clip_grad_norm_ before it",
        )
    check_reduced(engine.shards, "clip_grad_norm_", "the norm would leave out")
    # Gradients by how many of the replica's ranks hold each, and the device on which they lie.
    copied: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
    tensor_ranks = engine.tensor_ranks
    with torch._C.DisableTorchFunctionSubclass():  # the sum over ranks is what shards ask for
        for unit in engine.units:
            levels = unit.levels
            copies = levels.size(unit.scheme.level("replica")) // levels.size(unit.scheme.optim)
            for p in unit.shards:
                own = p.shard_of.stop - p.shard_of.start  # without what is written in the padding behind
                if p.grad is not None and own:
                    of = p.shard_of.slice_of
                    on_tensor = tensor_ranks if of is None or of.axis == "expert" else 1
                    on_stages = 1 if unit.tied is None else len(unit.tied.places)
                    held = copies * on_tensor * on_stages, p.grad.device
                    copied.setdefault(held, []).append(p.grad.as_subclass(torch.Tensor)[:own])
    mine = torch.zeros(1, dtype=torch.float64, device=engine.device)
    grads: dict[torch.device, list[torch.Tensor]] = {}
    for (copies, device), part in copied.items():
        squares = torch.stack(torch._foreach_norm(part, 2, dtype=torch.float64)).square().sum()
        mine += squares / copies
        grads.setdefault(device, []).extend(part)
    squares = sum_over_replica(engine.collectives, mine)
    for along, row in ((engine.tensor, TENSOR_NORM), (engine.pipeline, STAGES_NORM)):
        if along is not None:
            squares = along.gathered(squares.view(1), row, 0, "norm").sum()
    return squares.sqrt(), grads


def factor_of(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """By which gradients of this norm are multiplied, fp32 scalar; not a number if the norm is none."""
    return torch.where(norm <= max_norm, 1.0, max_norm / norm).float()
