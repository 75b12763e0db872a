"""Products of experts: torch's grouped ones, the loop, and each expert's linear layers one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowband.engine.parallel import expert_products
from lowband.engine.parallel.expert_products import products, runs_grouped
from lowband.engine.parallel.experts import Experts
from lowband.errors import UserError

COUNTS = [5, 0, 11, 1, 0]
HIDDEN, INNER = 16, 24


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def inputs(dtype: torch.dtype, counts: list[int], gated: bool) -> list[torch.Tensor | None]:
    """Rows, up, down, gate."""
    torch.manual_seed(2)
    experts = len(counts)
    shapes = (
        (sum(counts), HIDDEN),
        (experts, INNER, HIDDEN),
        (experts, HIDDEN, INNER),
        (experts, INNER, HIDDEN),
    )
    made = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return made if gated else [*made[:3], None]


def plainly(
    x: torch.Tensor, counts: list[int], up: Any, down: Any, gate: Any, activation: Callable[..., Any]
) -> torch.Tensor:
    out = []
    for e, rows in enumerate(x.split(counts)):
        inner = F.linear(rows, up[e])
        inner = activation(inner) if gate is None else activation(F.linear(rows, gate[e])) * inner
        out.append(F.linear(inner, down[e]))
    return torch.cat(out)


def results(compute: Callable[..., torch.Tensor], given: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """What it returns, and the gradients of all it was given."""
    leaves = [None if each is None else each.detach().clone().requires_grad_() for each in given]
    y = compute(*leaves)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)).sum().backward()
    return [y.detach(), *(each.grad for each in leaves if each is not None)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("counts", [COUNTS, [0, 0], [3], [0, 4]], ids=str)
@pytest.mark.parametrize("activation", [F.silu, tanh_gelu])
def test_as_each_experts_layers(gated: bool, as_list: bool, counts: list[int], activation: Any) -> None:
    """In fp64, which the loop computes."""
    given = inputs(torch.float64, counts, gated)
    passed = counts if as_list else torch.tensor(counts)
    mine = results(lambda x, up, down, gate: products(x, passed, up, down, gate, activation), given)
    plain = results(lambda x, up, down, gate: plainly(x, counts, up, down, gate, activation), given)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    for e, count in enumerate(counts):
        assert count or not any(grad[e].any() for grad in mine[2:])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loop_gives_the_bits_of_the_grouped(
    dtype: torch.dtype, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(dtype, COUNTS, gated)
    assert runs_grouped(given[0], (HIDDEN, INNER))
    counts = torch.tensor(COUNTS)
    compute = lambda x, up, down, gate: products(x, counts, up, down, gate)  # noqa: E731
    grouped = results(compute, given)
    monkeypatch.setattr(expert_products, "runs_grouped", lambda *_: False)
    for a, b in zip(grouped, results(compute, given), strict=True):
        assert torch.equal(a, b)


def test_what_torch_does_not_group() -> None:
    rows = torch.zeros(3, 16)
    assert runs_grouped(rows, (16, 8))
    assert not runs_grouped(rows, (16, 6))  # rows of 24 bytes
    assert not runs_grouped(rows.double(), (16, 8))
    assert not runs_grouped(rows[:0], (16, 8))


def test_widths_of_any_size() -> None:
    torch.manual_seed(2)
    x, up, down = torch.randn(6, 5), torch.randn(2, 7, 5), torch.randn(2, 5, 7)
    found = products(x, torch.tensor([2, 4]), up, down)
    torch.testing.assert_close(found, plainly(x, [2, 4], up, down, None, F.silu))


@pytest.mark.parametrize("gated", [True, False])
def test_bytes_kept_for_the_backward(gated: bool) -> None:
    """R (H + I) w, R (H + 2 I) w with a gate; plain autograd's are more by R I w, 2 R I w."""
    x, up, down, gate = inputs(torch.float32, COUNTS, gated)
    mine = kept(lambda: products(x, torch.tensor(COUNTS), up, down, gate), up, down, gate)
    plain = kept(lambda: plainly(x, COUNTS, up, down, gate, F.silu), up, down, gate)
    rows, wide = sum(COUNTS), 2 if gated else 1
    assert mine == rows * (HIDDEN + wide * INNER) * 4
    assert plain == mine + rows * wide * INNER * 4


@pytest.mark.parametrize("gated", [True, False])
def test_bytes_kept_around_products(gated: bool) -> None:
    """With places and weights x once and R I w, 2 R I w with a gate; and 4 R of weights, 8 R of places.

    Rows that are copied before, and weighed behind, keep 2 R H w more.
    """
    _, up, down, gate = inputs(torch.float32, COUNTS, gated)
    x, places, weights = around()
    matrices = up, down, gate
    arguments = torch.tensor(COUNTS), up, down, gate
    mine = kept(lambda: products(x, *arguments, places=places, weights=weights), *matrices)
    plain = kept(lambda: products(x[places], *arguments) * weights.unsqueeze(1), *matrices)
    rows, wide = len(places), 2 if gated else 1
    assert mine == (x.numel() + wide * rows * INNER) * 4 + rows * (4 + 8)
    assert plain == (2 * rows * HIDDEN + wide * rows * INNER) * 4 + rows * (4 + 8)


def around() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """6 tokens; the places of rows in them; weights."""
    torch.manual_seed(4)
    rows = sum(COUNTS)
    made = torch.randn(6, HIDDEN), torch.rand(rows)
    return made[0].requires_grad_(), torch.randint(6, (rows,)), made[1].requires_grad_()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_places_and_weights(dtype: torch.dtype, gated: bool) -> None:
    """As rows that are copied before, and weighed behind."""
    _, *matrices = inputs(dtype, COUNTS, gated)
    x, places, weights = around()
    given = [x.to(dtype), weights.to(dtype), *matrices]
    mine = lambda x, w, *m: products(x, COUNTS, *m, places=places, weights=w)  # noqa: E731
    plain = lambda x, w, *m: products(x[places], COUNTS, *m) * w.unsqueeze(1)  # noqa: E731
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for a, b in zip(results(mine, given), results(plain, given), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def kept(compute: Callable[[], torch.Tensor], *weights: torch.Tensor | None) -> int:
    """Bytes of the tensors that autograd keeps, each storage's rows once, without the weights."""
    seen = {each.untyped_storage().data_ptr() for each in weights if each is not None}
    found: dict[tuple[int, int], torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in seen:
            found[tensor.untyped_storage().data_ptr(), tensor.storage_offset()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = compute()
    assert held is not None
    return sum(each.nbytes for each in found.values())


def test_autocast() -> None:
    given = inputs(torch.float32, COUNTS, True)
    with torch.autocast("cpu", torch.bfloat16):
        mine = results(lambda x, up, down, gate: products(x, COUNTS, up, down, gate), given)
        plain = results(lambda x, up, down, gate: plainly(x, COUNTS, up, down, gate, F.silu), given)
    assert mine[0].dtype == torch.bfloat16
    for a, b in zip(mine, plain, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_mixtrals_experts() -> None:
    pytest.importorskip("transformers")
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(2)
    tokens, k = 30, 2
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=5)
    config._experts_implementation = "eager"
    theirs = MixtralExperts(config).double()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64)
    experts_TK = torch.rand(tokens, 5).argsort(1)[:, :k]
    weights_TK = torch.rand(tokens, k, dtype=torch.float64)

    def mine(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        order = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=5)
        y = products(x[order // k], counts, up, down, gate) * weights_TK.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // k, y)

    found = results(mine, [x, *theirs.parameters()])
    x.requires_grad_()
    y = theirs(x, experts_TK, weights_TK)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape).double()).sum().backward()
    for a, b in zip(found, [y, x.grad, *(each.grad for each in theirs.parameters())], strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)


def clipped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.silu(x), 0.1)


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        (clipped, "the activation draws random numbers, and the backward computes it again"),
        (torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1)), "draws random numbers"),
        (torch.nn.SiLU(inplace=True), "the activation changes its input"),
        (torch.nn.PReLU(), "the activation PReLU has parameters"),
    ],
)
def test_what_the_backward_could_not_compute_again_is_refused(activation: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        experts = Experts(2, HIDDEN, INNER, gated=True, activation=activation)
        experts(torch.randn(3, HIDDEN), torch.tensor([2, 1]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_backward_any_activation_is_right(mode: Any) -> None:
    experts = Experts(2, HIDDEN, INNER, activation=torch.nn.SiLU(inplace=True))
    plain = Experts(2, HIDDEN, INNER, activation=F.silu)
    plain.load_state_dict(experts.state_dict())
    with mode():
        x, counts = torch.randn(3, HIDDEN), torch.tensor([2, 1])
        assert torch.equal(experts(x, counts), plain(x, counts))


def test_an_activation_that_autocast_widens() -> None:
    experts = Experts(2, HIDDEN, INNER, activation=F.softplus)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(torch.randn(3, HIDDEN), torch.tensor([2, 1]))
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and all(p.grad is not None for p in experts.parameters())
