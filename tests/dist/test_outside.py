"""Parameters outside of the module's forward are this rank's parts: refused in one line where that is wrong.

Programs run under a scheme that shards everything and under ddp, whose shards can have the whole's shape.
"""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.refused import answer

ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")
DDP = Scheme(name="ddp", weights="self", grads="self", optim="self")
WIDTH = 256  # a vector's shard under ddp has the vector's shape


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.map(self.norm(x))


class Model(nn.Module):
    """With a method besides forward, a temperature as in CLIP, and a list that keeps a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.blocks = nn.Embedding(7, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.kept = [self.scale]

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encode(tokens) * self.scale * self.temperature.exp()


TOKENS = torch.arange(6).view(2, 3)
Program = Callable[[Model], object]


def states(model: Model) -> torch.Tensor:
    """Of shape [6, WIDTH], with a graph."""
    return model(TOKENS + 0 * dist.get_rank()).flatten(0, 1)


def norm_of_all(model: Model) -> object:
    return sum(p.norm() for p in model.parameters())


def mean_by_torch(model: Model) -> object:
    return torch.mean(model.scale)


def largest_after_detach(model: Model) -> object:
    return model.scale.detach().abs().max()


def squares_through_data(model: Model) -> object:
    return (model.scale.data**2).sum()


def joined_norm(model: Model) -> object:
    return torch.nn.utils.parameters_to_vector(model.parameters()).norm()


def norms_of_list(model: Model) -> object:
    return torch._foreach_norm(list(model.parameters()))


def distance_from_start(model: Model) -> object:
    start = [p.detach().clone() for p in model.parameters()]
    return sum((p - q).square().sum() for p, q in zip(model.parameters(), start, strict=True))


def orthogonality(model: Model) -> object:
    weight = model.blocks[0].map.weight
    return (weight @ weight.T - torch.eye(WIDTH)).square().sum()


def compared(model: Model) -> object:
    return torch.equal(model.scale, model.scale.detach().clone())


def read_as_a_number(model: Model) -> object:
    return model.temperature.item()


def penalty(model: Model) -> object:
    return (states(model).sum() + 0.1 * model.scale.square().sum()).backward()


def map_of_weights(model: Model) -> object:
    return F.linear(states(model), model.blocks[0].map.weight)


def norm_called_alone(model: Model) -> object:
    return model.norm(states(model))


def product_with_states(model: Model) -> object:
    return (states(model) * model.scale).sum().backward()


def product_with_one_state(model: Model) -> object:
    return (states(model)[0] * model.scale).sum().backward()


def temperature_outside(model: Model) -> object:
    return states(model) * model.temperature.exp()


def encoded(model: Model) -> object:
    return model.encode(TOKENS)


def forward_without_hooks(model: Model) -> object:
    return model.forward(TOKENS)


def first_block_alone_then_its_norm(model: Model) -> object:
    return model.blocks[0].norm(model.blocks[0](states(model)))


def one_row_cleared(model: Model) -> object:
    model.embed.weight[3] = 0


def copied_from_whole(model: Model) -> object:
    return model.embed.weight.copy_(torch.zeros(7, WIDTH))


def initialized(model: Model) -> object:
    return nn.init.kaiming_uniform_(model.blocks[0].map.weight)


def drawn_through_data(model: Model) -> object:
    return [p.data.normal_(0, 0.02) for p in model.parameters()]


def drawn_after_detach(model: Model) -> object:
    return model.scale.detach().uniform_(-1, 1)


def drawn_as_large(model: Model) -> object:
    return model.scale.detach() + torch.randn_like(model.scale)


def gradients_by_autograd(model: Model) -> object:
    return torch.autograd.grad(states(model).sum(), list(model.parameters()), allow_unused=True)


def backward_to_inputs(model: Model) -> object:
    return states(model).sum().backward(inputs=list(model.parameters()))


def kept_in_a_list(model: Model) -> object:
    return states(model) * model.kept[0]


def kept_and_copied(model: Model) -> object:
    return [p.clone() for p in model.kept]


def median_of_gradients(model: Model) -> object:
    states(model).sum().backward()
    return [p.grad.median() for p in model.parameters()]


def gradients_of_a_list(model: Model) -> object:
    states(model).sum().backward()
    return torch._foreach_norm(torch._foreach_mul([p.grad for p in model.parameters()], 2.0))


def angle_of_kept_gradients(model: Model) -> object:
    """As in gradient surgery."""
    states(model).sum().backward()
    kept = [p.grad.detach().clone() for p in model.parameters()]
    return sum((p.grad.clone() * q).sum() for p, q in zip(model.parameters(), kept, strict=True))


def sums_of_tensors_written_to(model: Model) -> object:
    """Plain tensors as large as shards: a moving average, a copy."""
    states(model).sum().backward()
    found = []
    for p in model.parameters():
        squares, copied, doubled = (torch.zeros(p.shape) for _ in range(3))
        torch._foreach_addcmul_([squares], [p.grad], [p.grad])
        copied[:] = p.grad
        torch.mul(p.grad, 2, out=doubled)
        found += [answer(each.sum) for each in (squares, copied, doubled)]
    if all(found):
        squares.add_(copied).norm()
    return found


def difference_of_gradients(model: Model) -> object:
    states(model).sum().backward()
    return F.mse_loss(model.scale.grad, torch.zeros_like(model.scale))


PART, USED = "of a shard covers this rank's part only", "parameters inside of their unit's forward"
REFUSED: dict[Program, tuple[str, ...]] = {
    norm_of_all: ("scale: norm " + PART, "lowband.norms"),
    mean_by_torch: ("scale: mean " + PART,),
    largest_after_detach: ("max " + PART, "p.detach().as_subclass(torch.Tensor) for this rank's part"),
    squares_through_data: ("sum " + PART,),
    joined_norm: ("norm " + PART,),
    norms_of_list: ("_foreach_norm " + PART,),
    distance_from_start: (" " + PART,),
    orthogonality: ("blocks.0.map.weight: ", PART),
    compared: ("scale: equal " + PART,),
    read_as_a_number: ("temperature: item " + PART,),
    penalty: ("scale: square " + PART, USED),
    map_of_weights: ("blocks.0.map.weight: linear " + PART, USED),
    norm_called_alone: ("norm.weight: layer_norm " + PART, USED),
    product_with_states: ("scale: mul " + PART, USED),
    product_with_one_state: ("scale: mul " + PART, USED),
    temperature_outside: ("temperature: exp " + PART, USED),
    encoded: ("embed.weight: embedding " + PART, USED),
    forward_without_hooks: ("embed.weight: embedding " + PART, USED),
    first_block_alone_then_its_norm: ("blocks.0.norm.weight: layer_norm " + PART, USED),
    one_row_cleared: ("embed.weight: __setitem__ " + PART,),
    copied_from_whole: ("embed.weight: copy_ " + PART,),
    initialized: ("blocks.0.map.weight: kaiming_uniform_ " + PART,),
    drawn_through_data: ("normal_ draws values", "init="),
    drawn_after_detach: ("uniform_ draws values",),
    drawn_as_large: ("scale: randn_like draws values", "torch.randn(p.shape)"),
    gradients_by_autograd: ("autograd is asked for gradients of shards", "loss.backward(), then p.grad"),
    backward_to_inputs: ("autograd is asked for gradients of shards",),
    kept_in_a_list: ("scale: mul of a parameter from before lowband.shard", "the module's own attribute"),
    kept_and_copied: ("scale: clone of a parameter from before lowband.shard",),
    median_of_gradients: ("median of a shard's gradient covers this rank's part only",),
    gradients_of_a_list: ("_foreach_norm of a shard's gradient",),
    angle_of_kept_gradients: ("sum of a shard's gradient covers this rank's part only",),
    sums_of_tensors_written_to: ("norm of a shard's gradient covers this rank's part only",),
    difference_of_gradients: ("mse_loss of a shard's gradient",),
}  # fmt: skip
"""What is said, for each program, with gradients enabled and, unless it needs them, under no_grad."""

NEED_GRAPHS = (
    penalty, product_with_one_state, gradients_by_autograd, backward_to_inputs, median_of_gradients,
    gradients_of_a_list, angle_of_kept_gradients, difference_of_gradients,
    sums_of_tensors_written_to,
)  # fmt: skip


def refusals() -> dict[str, str]:
    topology, found = lowband.Topology({}), {}
    for scheme in (ZERO3, DDP):
        model = lowband.shard(Model(), scheme, topology, Block, compute_dtype=torch.float32)
        for program in REFUSED:
            for graphs in (True, False) if program not in NEED_GRAPHS else (True,):
                with torch.set_grad_enabled(graphs):
                    said = answer(program, model)
                found[f"{program.__name__} {scheme.name} {'graphs' if graphs else 'no_grad'}"] = said
                model.zero_grad()
    return found


@pytest.fixture(scope="module")
def said() -> Iterator[list[dict[str, str]]]:
    yield on_ranks(2, refusals)


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_refused_on_every_rank(program: Program, said: list[dict[str, str]]) -> None:
    for by_case in said:
        mine = {case: text for case, text in by_case.items() if case.split()[0] == program.__name__}
        assert len(mine) == (2 if program in NEED_GRAPHS else 4)
        for case, text in mine.items():
            words = REFUSED[program]
            if program is temperature_outside and case.endswith("no_grad"):
                words = ("mul " + PART, USED)  # without a graph the exponential alone is right on a part
            assert all(each in text for each in words), (case, text)
            assert "\n" not in text


# ---- right: element by element, copies, facts


def used_rightly() -> list[object]:
    """What loops do with parameters besides training: averages, checks, copies, other types and places."""
    model = lowband.shard(Model(), DDP, lowband.Topology({}), Block, compute_dtype=torch.float32)
    states(model).sum().backward()
    parameters = list(model.parameters())
    with torch.no_grad():
        averages = [p.detach().clone() for p in parameters]
        for average, p in zip(averages, parameters, strict=True):
            average.mul_(0.9).add_(p, alpha=0.1)
            p.sub_(p.grad.sign() * 0.001 + p.sign() * 0)
        torch._foreach_lerp_(averages, parameters, 0.5)
        found = [each.ndim == p.ndim for each, p in zip(averages, parameters, strict=True)]
        mask = parameters[0] > 0
        parameters[0][mask] = 0.0
        parameters[0][...] = parameters[0] * 2
        values = [p.detach().as_subclass(torch.Tensor).norm().item() > 0 for p in parameters[1:]]
    saved = io.BytesIO()
    torch.save({"parts": [p.detach() for p in parameters], "grads": [p.grad for p in parameters]}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    kinds = {type(each) for part in loaded.values() for each in part}
    copied = copy.deepcopy([p.grad for p in parameters])
    pairs = zip(parameters, copied, strict=True)
    shapes = {p.shape == p.grad.shape == q.shape and p.device == q.device for p, q in pairs}
    return [all(found), all(values), kinds == {torch.Tensor}, shapes == {True}, len({*parameters})]


def test_values_of_parts_are_right_element_by_element() -> None:
    count = len(list(Model().parameters()))
    assert on_ranks(2, used_rightly) == [[True, True, True, True, count]] * 2


# ---- other methods of a module, inside of the forward of one around it


class Encoding(nn.Module):
    """What docs/library.md says to do: the sharded module's forward calls the other methods."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, tokens: torch.Tensor) -> torch.Tensor:
        return getattr(self.model, method)(tokens)


def encoded_inside(is_sharded: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = Encoding(Model())
    if is_sharded:
        lowband.shard(model, ZERO3, lowband.Topology({}), Block, compute_dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in ("forward", "encode", "forward"):
        model(method, TOKENS).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    with torch.no_grad():
        found = model("encode", TOKENS)
    return found, lowband.full_state_dict(model) if is_sharded else model.state_dict()


def test_other_methods_inside_of_the_forward_are_right() -> None:
    [(expected, weights)] = on_ranks(1, encoded_inside, False)
    for rank, (found, state) in enumerate(on_ranks(2, encoded_inside, True)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert rank or all(
            torch.allclose(state[name], value, rtol=1e-5, atol=1e-6) for name, value in weights.items()
        )


# ---- writes through `.data`: as any others, on every rank

WRITTEN = ("ddp", "zero1", "zero2", "zero3")
LEAST, MOST = 0.49, 0.51  # of the temperature, which the steps change by more


def clamped_through_data(scheme: str, dtype: torch.dtype) -> list[float]:
    """Losses of all ranks' one batch. scheme: "" for one process's plain module"""
    model = Model()
    if scheme:
        lowband.shard(model, scheme, lowband.Topology({}), Block, compute_dtype=dtype)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        loss = model(TOKENS).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.temperature.data.clamp_(LEAST, MOST)
        model.blocks[0].map.bias.data.view(-1).add_(0.1)
    return losses


def all_clamped() -> dict[tuple[str, torch.dtype], list[float]]:
    return {(s, t): clamped_through_data(s, t) for s in WRITTEN for t in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_writes_through_data_are_seen(ranks: int) -> None:
    [expected] = on_ranks(1, clamped_through_data, "", torch.float32)
    for found in on_ranks(ranks, all_clamped):
        for (scheme, dtype), losses in found.items():
            bound = 1e-5 if dtype == torch.float32 else 0.05
            assert losses == pytest.approx(expected, rel=bound), (scheme, dtype)
