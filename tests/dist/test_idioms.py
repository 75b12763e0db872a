"""What loops written for a whole module do, on a sharded one: the same numbers, or an error in one line.

All idioms of a number of ranks run in one process group. docs/library.md has a row for each.
"""

import copy
import functools
import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from modules import Adapted, Tower, inputs, is_layer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim.optimizer import _foreach_supported_types

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.refused import refusal

ZERO1 = Scheme(name="zero1", weights="self", grads="self", optim="world")
ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")
Backward = Callable[[int], None]  # adds the gradient of a step's loss, averaged over all ranks
Program = Callable[[nn.Module, Backward], object]


class Used(Tower):
    """Every parameter has a gradient; two have a mark for who makes param groups, as Mamba's have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale._no_weight_decay = self.layers[0][0].bias._no_weight_decay = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.unused.sum()


# ---- right: the weights, and what a program returns, are those of one process


def decay_groups_by_ndim(model: nn.Module, backward: Backward) -> object:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    steps(torch.optim.AdamW(groups, lr=0.01), backward)
    return len(matrices)


def a_decay_for_each_parameter(model: nn.Module, backward: Backward) -> object:
    decays = {name: 0.5 * (p.ndim > 1 and "layers" in name) for name, p in model.named_parameters()}
    groups = [{"params": [p], "weight_decay": decays[name]} for name, p in model.named_parameters()]
    steps(torch.optim.AdamW(groups, lr=0.01), backward)
    return decays


def decay_groups_by_marks(model: nn.Module, backward: Backward) -> object:
    kept = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
    others = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
    groups = [{"params": others, "weight_decay": 0.5}, {"params": kept, "weight_decay": 0.0}]
    steps(torch.optim.AdamW(groups, lr=0.01), backward)
    return len(kept)


def several_optimizers(model: nn.Module, backward: Backward) -> None:
    first = torch.optim.Adam(model.layers.parameters(), lr=0.01)
    rest = [p for name, p in model.named_parameters() if not name.startswith("layers")]
    second = torch.optim.SGD(rest, lr=0.01, momentum=0.9)
    for step in range(4):
        backward(step)
        (first, second)[step % 2].step()
        model.zero_grad()


def schedules(model: nn.Module, backward: Backward) -> object:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [2])
    rates = []
    for step in range(4):
        steps(optimizer, backward, step, 1)
        schedule.step()
        rates.append(schedule.get_last_lr())
    return rates


def running_average(model: nn.Module, backward: Backward) -> None:
    average = copy.deepcopy(list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.no_grad():
        for step in range(3):
            with torch.enable_grad():
                steps(optimizer, backward, step, 1)
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        for mean, p in zip(average, model.parameters(), strict=True):
            p.copy_(mean)


def written_through_data(model: nn.Module, backward: Backward) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = [p.data.clone() for p in model.parameters()]
    steps(optimizer, backward)
    for p, values in zip(model.parameters(), before, strict=True):
        p.data.copy_(values)
        p.data.mul_(2)
    steps(optimizer, backward)


def averages_swapped_in(model: nn.Module, backward: Backward) -> object:
    """By `.data`, as classes for running averages do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average = {name: p.data.clone() for name, p in model.named_parameters()}
    for step in range(3):
        steps(optimizer, backward, step, 1)
        for name, p in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * p.data
    trained = {name: p.data.clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = average[name]
    with torch.no_grad():
        found = model(inputs(9, 9)).item()
    for name, p in model.named_parameters():
        p.data = trained[name]
    steps(optimizer, backward, 3, 1)
    return found


def averages_with_backups(model: nn.Module, backward: Backward) -> None:
    """What `.data` or `detach` gave keeps its values where others are assigned: restored, swapped, undone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average = {name: p.data * 0.5 for name, p in model.named_parameters()}
    steps(optimizer, backward)
    backup = {}
    for name, p in model.named_parameters():
        backup[name] = p.data
        p.data = average[name]
    for name, p in model.named_parameters():
        p.data = backup[name]
    steps(optimizer, backward)
    for _ in range(3):  # the last time they stay
        for name, p in model.named_parameters():
            p.data, average[name].data = average[name].data, p.data
    steps(optimizer, backward)
    before = [p.detach() for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data - 1
    for p, values in zip(model.parameters(), before, strict=True):
        p.data.copy_(values)
        p.data = p.data
    steps(optimizer, backward)


def gradients_set_to_zero(model: nn.Module, backward: Backward) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        backward(step)
        optimizer.step()
        (model if step % 2 else optimizer).zero_grad(set_to_none=False)
        for p in model.parameters():
            p.grad.detach_().zero_()


def accumulated(model: nn.Module, backward: Backward) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        backward(step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def frozen_by_the_optimizer(model: nn.Module, backward: Backward) -> None:
    """Frozen at first, then trained: the first layers, and a parameter whose gradient is taken away."""
    optimizer = torch.optim.AdamW(model.layers.parameters(), lr=0.01)
    steps(optimizer, backward)
    optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.001})
    for step in range(2):
        backward(step)
        model.first.bias.grad = None
        optimizer.step()
        model.zero_grad()


def clipped_by_value(model: nn.Module, backward: Backward) -> None:
    backward(0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def evaluated_between_steps(model: nn.Module, backward: Backward) -> object:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(2):
        model.eval()
        with torch.no_grad():
            found.append(model(inputs(9, 9)).item())
        with torch.inference_mode():
            found.append(model(inputs(8, 8)).item())
        model.train()
        steps(optimizer, backward, step, 1)
    return found


def frozen_for_a_reference(model: nn.Module, backward: Backward) -> object:
    """As PEFT's `disable_adapter` does around the forward of a reference without adapters."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(2):
        model.layers.requires_grad_(False)
        with torch.no_grad():
            found.append(model(inputs(9, 9)).item())
        model.layers.requires_grad_(True)
        steps(optimizer, backward, step, 1)
    return found


def moved_to_where_it_is(model: nn.Module, backward: Backward) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps(optimizer, backward)
    model.to("cpu").to(torch.float32)
    steps(optimizer, backward)


def counted(model: nn.Module, backward: Backward) -> object:
    shapes = [p.shard_of.shape if hasattr(p, "shard_of") else p.shape for p in model.parameters()]
    return sum(shape.numel() for shape in shapes)


def state_of_the_optimizer(model: nn.Module, backward: Backward) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(optimizer, backward)
    again = torch.optim.AdamW(model.parameters(), lr=1.0)
    again.load_state_dict(optimizer.state_dict())
    steps(again, backward)


def adapters(model: nn.Module, backward: Backward) -> None:
    steps(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), backward)


def decay_groups_of_adapters(model: nn.Module, backward: Backward) -> None:
    """All that is trained has two dimensions, so one group is rightly empty."""
    trained = [p for p in model.layers.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    steps(torch.optim.AdamW(groups, lr=0.01), backward)


def decay_groups_by_name(model: nn.Module, backward: Backward) -> None:
    """As in Hugging Face's examples, of names that the model does not have."""
    groups = [{"params": [], "weight_decay": 0.0}, {"params": list(model.parameters()), "weight_decay": 0.5}]
    for name, _ in model.named_parameters():
        assert "LayerNorm" not in name
    steps(torch.optim.AdamW(groups, lr=0.01), backward)


def steps(optimizer: torch.optim.Optimizer, backward: Backward, first: int = 0, count: int = 2) -> None:
    for step in range(first, first + count):
        backward(step)
        optimizer.step()
        optimizer.zero_grad()


def unsynced(model: nn.Module) -> AbstractContextManager[None]:
    return lowband.no_sync(model) if hasattr(model, "_lowband") else nullcontext()


def scaled_by_a_double(model: nn.Module, backward: Backward) -> None:
    """As sharpness-aware minimization scales gradients, by a number of another type than theirs."""
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.01), torch.tensor(0.25, dtype=torch.float64)
    for step in range(2):
        backward(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad * scale.to(parameter))
        steps(optimizer, lambda _: None, step, 1)


def given_up_by_the_optimizer(model: nn.Module, backward: Backward) -> None:
    """A step's gradients are thrown away before its last backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        with unsynced(model):
            backward(step)
        if step != 2:
            optimizer.zero_grad(set_to_none=step == 0)
        backward(step + 5)
        optimizer.step()
        optimizer.zero_grad()


def given_up_by_one_of_two(model: nn.Module, backward: Backward) -> None:
    """Each has some parameters of every unit."""
    parameters = list(model.parameters())
    first, second = (torch.optim.SGD(parameters[i::2], lr=0.01) for i in range(2))
    with unsynced(model):
        backward(0)
    first.zero_grad()
    first.step()  # of parameters without gradients
    backward(1)
    second.step()
    first.step()


def given_up_by_modules(model: nn.Module, backward: Backward) -> None:
    """By one around the model, and by a part of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    around = nn.Sequential(model)
    for step, gives_up in enumerate((around, model.layers, model)):
        with unsynced(model):
            backward(step)
        gives_up.zero_grad()
        backward(step + 5)
        optimizer.step()
        around.zero_grad()


def closures(model: nn.Module, backward: Backward) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        with unsynced(model):
            backward(step)
        optimizer.step(lambda step=step: backward(step + 5))
        optimizer.zero_grad()


def compiled_step(model: nn.Module, backward: Backward) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    for i in range(3):
        backward(i)
        step()
        optimizer.zero_grad()


def called_twice(model: nn.Module, backward: Backward) -> None:
    steps(torch.optim.SGD(model.parameters(), lr=0.01), backward)


RIGHT: tuple[Program, ...] = (
    decay_groups_by_ndim, a_decay_for_each_parameter, decay_groups_by_marks, several_optimizers, schedules,
    running_average, frozen_for_a_reference,
    written_through_data, gradients_set_to_zero, accumulated, frozen_by_the_optimizer, clipped_by_value,
    evaluated_between_steps, moved_to_where_it_is, counted, state_of_the_optimizer, adapters, called_twice,
    decay_groups_of_adapters, decay_groups_by_name, given_up_by_the_optimizer, given_up_by_one_of_two,
    closures, compiled_step, averages_swapped_in, averages_with_backups, given_up_by_modules,
    scaled_by_a_double,
)  # fmt: skip


# Summed over passes in another order, or compiled on one process alone.
ROUNDED = (
    "accumulated", "given_up_by_the_optimizer", "given_up_by_one_of_two", "closures", "compiled_step",
    "given_up_by_modules",
)  # fmt: skip


Result = tuple[object, dict[str, torch.Tensor]]  # what a program returns, the weights that it leaves
# On four ranks, over two levels: those that ask the passes for more than a forward and a backward in turns.
ON_FOUR = ("accumulated", "called_twice", "closures", "evaluated_between_steps", "frozen_by_the_optimizer")


def results(ranks: int, is_sharded: bool, programs: tuple[Program, ...]) -> dict[str, Result]:
    """What each program returns, and the weights that it leaves; one process takes the mean over `ranks`."""
    topology, found = lowband.Topology({"node": 2}), {}
    for program in programs:
        model = Adapted() if program in (adapters, decay_groups_of_adapters) else Used()
        if is_sharded:
            lowband.shard(model, ZERO3, topology, is_layer, compute_dtype=torch.float32)

        def backward(step: int, model: nn.Module = model, program: Program = program) -> None:
            for rank in [dist.get_rank()] if is_sharded else range(ranks):
                loss = model(inputs(step, rank))
                if program is called_twice:
                    loss = loss * model(inputs(step + 5, rank))
                (loss / (1 if is_sharded else ranks)).backward()

        returned = program(model, backward)
        state = lowband.full_state_dict(model) if is_sharded else model.state_dict()
        found[program.__name__] = returned, {name: value.detach() for name, value in state.items()}
    return found


def is_wide(ranks: int, program: str) -> bool:
    return ranks == 4 and program not in ON_FOUR


@functools.cache
def pair(ranks: int, wide: bool) -> tuple[dict[str, Result], dict[str, Result]]:
    programs = tuple(program for program in RIGHT if is_wide(ranks, program.__name__) == wide)
    [whole] = on_ranks(1, results, ranks, False, programs, time_limit_s=300)
    return on_ranks(ranks, results, ranks, True, programs, time_limit_s=300)[0], whole


@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        pytest.param(ranks, program.__name__, marks=[pytest.mark.wide] * is_wide(ranks, program.__name__))
        for ranks in (2, 4)
        for program in RIGHT
    ],
)
def test_right(ranks: int, program: str) -> None:
    """Bit by bit on two ranks, where there is one order of summing."""
    is_exact = ranks == 2 and program not in ROUNDED
    (returned, weights), (expected, whole) = (side[program] for side in pair(ranks, is_wide(ranks, program)))
    assert returned == expected or (not is_exact and returned == pytest.approx(expected, rel=1e-5))
    assert weights.keys() == whole.keys()
    for name, value in weights.items():
        assert math.isfinite(value.sum())
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0 if is_exact else 1e-5, msg=name)


# ---- refused on every rank


def trained(model: nn.Module) -> nn.Module:
    """With gradients, and with copies of the weights that a forward has used."""
    model(inputs(0, dist.get_rank())).backward()
    return model


def norm_by_hand(model: nn.Module) -> None:
    sum(p.grad.data.norm(2) ** 2 for p in trained(model).parameters() if p.grad is not None)


def squares_by_hand(model: nn.Module) -> None:
    sum(p.grad.detach().pow(2).sum() for p in trained(model).parameters() if p.grad is not None)


def not_finite(model: nn.Module) -> None:
    any(p.grad.isnan().any() for p in trained(model).parameters())


def norm_of_all(model: nn.Module) -> None:
    torch.cat([p.grad.view(-1) for p in trained(model).parameters() if p.grad is not None]).norm()


def fused_scaler(model: nn.Module) -> None:
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(model(inputs(0, 0))).backward()
    scaler.step(optimizer)


def one_value_through_data(model: nn.Module) -> None:
    for p in trained(model).parameters():
        p.data[0] += 1


def one_value_of_a_gradient(model: nn.Module) -> None:
    for p in trained(model).parameters():
        p.grad[0].item()


def rows_through_data(model: nn.Module) -> None:
    trained(model).layers[0][0].weight.data[:2].zero_()


def rows_of_a_gradient(model: nn.Module) -> None:
    trained(model).layers[0][0].weight.grad[1:].mul_(2)


def rows_one_by_one(model: nn.Module) -> None:
    for row in trained(model).layers[0][0].weight.data:
        row.zero_()


def rows_split(model: nn.Module) -> None:
    trained(model).layers[0][0].weight.data.split([1, 2])[0].zero_()


def rows_narrowed(model: nn.Module) -> None:
    trained(model).layers[0][0].weight.data.narrow(0, 1, 2).zero_()


def as_many_as_this_rank_has(model: nn.Module) -> None:
    weight = trained(model).layers[0][0].weight
    weight.data[: weight.shard_of.stop - weight.shard_of.start].zero_()


def row_of_another_shape(model: nn.Module) -> None:
    trained(model).layers[0][0].weight.data.reshape(-1, 1)[0].mul_(2)


def places_by_a_condition(model: nn.Module) -> None:
    torch.where(trained(model).layers[0][0].weight.data > 0)


def one_value_of_a_flat_view(model: nn.Module) -> None:
    trained(model).layers[0][0].weight.data.view(-1)[0] += 1


def first_values_of_a_flat_copy(model: nn.Module) -> None:
    trained(model).layers[0][0].weight.detach().flatten().clone()[:2].sum()


def data_of_a_view_from_before(model: nn.Module) -> None:
    weight = model.layers[0][0].weight
    before = weight.data.as_subclass(torch.Tensor)
    weight.data = weight.data * 2
    weight.data = before


def rows_by_keyword(model: nn.Module) -> None:
    torch.narrow(input=trained(model).layers[0][0].weight.data, dim=0, start=0, length=2).zero_()


def rows_of_a_stack(model: nn.Module) -> None:
    weight = trained(model).layers[0][0].weight
    torch.stack([weight.data, weight.grad])[0][:2].zero_()


def first_values_of_a_copied_shard(model: nn.Module) -> None:
    weight = trained(model).layers[0][0].weight
    weight.new_empty(weight.shape).copy_(weight.data)[:2].zero_()


def data_of_another_shape(model: nn.Module) -> None:
    model.layers[0][0].weight.data = torch.zeros(3, 7)


def tied_through_data(model: nn.Module) -> None:
    first, second = (model.layers[i][0].weight for i in range(2))
    second.data = first.data


def order_of_values_through_numpy(model: nn.Module) -> None:
    for p in trained(model).parameters():
        values = p.detach().numpy()
        values[:] = values[::-1].copy()
    model(inputs(0, 0))


def hook_on_a_shard(model: nn.Module) -> None:
    model.first.weight.register_hook(lambda grad: grad * 0)


def step_in_the_backward(model: nn.Module) -> None:
    model.first.weight.register_post_accumulate_grad_hook(lambda p: None)


def state_dict(model: nn.Module) -> None:
    model.state_dict()


def state_dict_of_a_part(model: nn.Module) -> None:
    model.layers[0].state_dict()


def state_dict_around(model: nn.Module) -> None:
    nn.Sequential(nn.Linear(1, 1), model).state_dict()


def state_dict_by_torch(model: nn.Module) -> None:
    get_model_state_dict(model)


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict(Used().state_dict())


def saved(model: nn.Module) -> None:
    torch.save(model, io.BytesIO())


def parameters_saved(model: nn.Module) -> None:
    torch.save(list(model.parameters()), io.BytesIO())


def average_by_torch(model: nn.Module) -> None:
    torch.optim.swa_utils.AveragedModel(model)


def frozen_and_unfrozen(model: nn.Module) -> None:
    model.layers[0].requires_grad_(False)
    model(inputs(0, 0))


def frozen_behind_an_evaluation_of_a_part(model: nn.Module) -> None:
    x = torch.ones(2, model.layers[0][0].in_features)
    with torch.no_grad():
        model.layers[0](x)
    model.layers[0].requires_grad_(False)
    model.layers[0](x)


def adapters_grouped_by_shape(model: nn.Module) -> None:
    trained = [p for p in model.parameters() if p.ndim >= 2]
    matrices, others = (
        [p for p in trained if (len(p.shape) >= 2) == is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups).step()


def muon(model: nn.Module) -> None:
    torch.optim.Muon([p for p in trained(model).parameters() if p.ndim == 2]).step()


REFUSED: dict[Callable[[nn.Module], None], str] = {
    norm_by_hand: "norm of a shard's gradient covers this rank's part only (allowed: lowband.clip_grad_norm_",
    squares_by_hand: "sum of a shard's gradient covers this rank's part only",
    not_finite: "any of a shard's gradient covers this rank's part only",
    norm_of_all: "norm of a shard's gradient covers this rank's part only",
    fused_scaler: "of a shard's gradient covers this rank's part only",
    one_value_through_data: "scale: __getitem__ of a shard covers this rank's part only",
    one_value_of_a_gradient: "scale: __getitem__ of a shard's gradient covers this rank's part only",
    rows_through_data: "layers.0.0.weight: __getitem__ of a shard covers this rank's part only",
    rows_of_a_gradient: "layers.0.0.weight: __getitem__ of a shard's gradient covers this rank's part only",
    rows_one_by_one: "layers.0.0.weight: unbind of a shard covers this rank's part only",
    rows_split: "layers.0.0.weight: split of a shard covers this rank's part only",
    rows_narrowed: "layers.0.0.weight: narrow of a shard covers this rank's part only",
    as_many_as_this_rank_has: "layers.0.0.weight: __getitem__ of a shard covers this rank's part only",
    row_of_another_shape: "layers.0.0.weight: __getitem__ of a shard covers this rank's part only",
    places_by_a_condition: "layers.0.0.weight: where of a shard covers this rank's part only",
    one_value_of_a_flat_view: "layers.0.0.weight: __getitem__ of a shard covers this rank's part only",
    first_values_of_a_flat_copy: "layers.0.0.weight: __getitem__ of a shard covers this rank's part only",
    data_of_a_view_from_before: "layers.0.0.weight: .data of a shard was set to a view",
    rows_by_keyword: "layers.0.0.weight: narrow of a shard covers this rank's part only",
    rows_of_a_stack: "layers.0.0.weight: __getitem__ of a shard's gradient covers this rank's part only",
    first_values_of_a_copied_shard: "layers.0.0.weight: __getitem__ of a shard covers this rank's part only",
    data_of_another_shape: "layers.0.0.weight: .data of a shard was set to a tensor of shape [3, 7]",
    tied_through_data: "layers.1.0.weight: .data of a shard was set to a view (allowed: p.data.copy_(values)",
    order_of_values_through_numpy: "were written through NumPy or from C++",
    hook_on_a_shard: "first.weight: a hook on a shard would never run",
    step_in_the_backward: "first.weight: a hook on a shard would never run",
    state_dict: "Used: state_dict() of a sharded module would hold this rank's part only",
    state_dict_of_a_part: "Sequential: state_dict() of a sharded module",
    state_dict_around: "Used: state_dict() of a sharded module",
    state_dict_by_torch: "Used: state_dict() of a sharded module",
    load_state_dict: "Used: load_state_dict() of a sharded module",
    saved: "(allowed: lowband.full_state_dict, lowband.Checkpointer",
    parameters_saved: "a shard cannot be pickled",
    average_by_torch: "Used: a sharded module cannot be copied or pickled",
    frozen_and_unfrozen: "requires_grad of 'layers.0' was changed after lowband.shard",
    frozen_behind_an_evaluation_of_a_part: "requires_grad of 'layers.0' was changed after lowband.shard",
    adapters_grouped_by_shape: "AdamW: param group 0 is empty: shards are 1D, so len(p.shape) is always 1",
    muon: "Muon: needs whole parameters",
}


def refusals() -> dict[str, str]:
    """What each idiom raises, where a second copy of the weights is kept."""
    topology, found = lowband.Topology({"node": 2}), {}
    for idiom in REFUSED:
        model = lowband.shard(Used(), ZERO1, topology, is_layer)
        try:
            idiom(model)
        except UserError as error:
            found[idiom.__name__] = str(error)
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.wide)])
def refused(request: pytest.FixtureRequest) -> Iterator[list[dict[str, str]]]:
    yield on_ranks(request.param, refusals, time_limit_s=300)


@pytest.mark.parametrize("idiom", REFUSED, ids=lambda idiom: idiom.__name__)
def test_refused_on_every_rank(idiom: Callable[[nn.Module], None], refused: list[dict[str, str]]) -> None:
    for said in refused:
        assert REFUSED[idiom] in said.get(idiom.__name__, "nothing was raised")
        assert "\n" not in said[idiom.__name__]


def shards_as_torch_sees_them() -> tuple[bool, str]:
    model = lowband.shard(Used(), ZERO3, lowband.Topology({}), is_layer)
    shard = model.layers[0][0].weight
    return type(shard) in _foreach_supported_types, repr(shard)


def test_optimizers_treat_shards_as_parameters() -> None:
    [(is_grouped, shown)] = on_ranks(1, shards_as_torch_sees_them)
    assert is_grouped  # on a GPU: one launch for many shards, not one for each
    assert shown.startswith("Values 0 to 21 of 'layers.0.0.weight', shape (3, 7):\ntensor(")


def hooked_before() -> str:
    model = Used()
    model.first.weight.register_hook(lambda grad: grad * 0)
    return refusal(lambda: lowband.shard(model, ZERO3, lowband.Topology({}), is_layer))


def test_a_hook_that_would_be_lost_is_refused() -> None:
    [said] = on_ranks(1, hooked_before)
    assert said.startswith("Used: a hook on 'first.weight' would not run any more")
