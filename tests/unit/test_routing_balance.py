"""Balance by bias, counted once for each backward; by a loss of one scale however tokens are split."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowband.engine.parallel.routing import Router, balance
from lowband.spec.routing import Routing

HIDDEN, EXPERTS, TOKENS = 12, 8, 48


def router(balance: str = "bias", **given: Any) -> Router:
    """A router in fp64."""
    torch.manual_seed(3)
    routing = Routing(**{"experts": EXPERTS, "top_k": 2, "balance": balance, **given})
    return Router(HIDDEN, routing, dtype=torch.float64)


def rows(tokens: int = TOKENS, seed: int = 5) -> torch.Tensor:
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


def counts_of(r: Router, x: torch.Tensor) -> list[int]:
    with torch.no_grad():
        return r(x).experts_P.bincount(minlength=EXPERTS).tolist()


def loss_of(r: Router, x: torch.Tensor) -> torch.Tensor:
    """One in which each weight has another part."""
    weights = r(x).weights_P
    return (weights * torch.linspace(-1, 1, len(weights), dtype=weights.dtype)).sum()


def checkpointed(r: Router, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(lambda x: loss_of(r, x), x, use_reentrant=reentrant)


@pytest.mark.parametrize("repeats", ["never", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_each_backward_counts_once(repeats: str, balance: str) -> None:
    """Recomputation runs the router twice, which doubled the counts in torchtitan (its PR 1593)."""
    r, plain = router(balance), router(balance)
    seen = torch.zeros(EXPERTS, dtype=torch.int64)
    for seed in (1, 2, 3):  # micro-batches
        loss_of(plain, rows(seed=seed)).backward()
        x = rows(seed=seed)
        loss = loss_of(r, x) if repeats == "never" else checkpointed(r, x, repeats == "reentrant")
        loss.backward()
        seen += torch.tensor(counts_of(r, x))
    assert r.counts.tolist() == seen.tolist()
    assert torch.equal(r.weight.grad, plain.weight.grad)


def test_a_frozen_router_counts_behind_what_is_frozen() -> None:
    """Whose weights have no gradient: its experts train, and its bias moves against their load."""
    r, plain, x = router(), router(), rows()
    r.weight.requires_grad_(False)
    scale = torch.ones((), dtype=x.dtype, requires_grad=True)  # of an expert
    (r(x.detach()).weights_P.sum() * scale).backward()
    loss_of(plain, x).backward()
    assert r.counts.tolist() == plain.counts.tolist()
    assert r.weight.grad is None
    assert scale.grad is not None


def test_evaluations_are_not_counted() -> None:
    r = router()
    with torch.no_grad():
        r(rows())
    loss_of(r, rows())  # its backward is left out
    r.eval()
    loss_of(r, rows()).backward()
    assert not r.counts.any()


def test_dropped_pairs_are_counted() -> None:
    r, free = router(capacity=0.5), router()
    loss_of(r, rows()).backward()
    assert r.counts.tolist() == counts_of(free, rows())


def test_the_bias_is_in_the_choice_alone() -> None:
    r, x = router(), rows()
    r.bias.copy_(torch.linspace(-1, 1, EXPERTS))
    scores = (x @ r.weight.T).softmax(-1)
    chosen = (scores + r.bias).topk(2).indices
    routed = r(x)
    assert torch.equal(routed.experts_P.view(-1, 2), chosen)
    torch.testing.assert_close(routed.weights_P, scores.gather(1, chosen).flatten(), rtol=1e-14, atol=0)


def test_the_bias_moves_against_the_load() -> None:
    """By rate times the sign of what the mean has more, and its mean stays 0."""
    r = router(rate=0.25)
    before = torch.linspace(-1, 1, EXPERTS, dtype=torch.float64)
    r.bias.copy_(before)
    counts = torch.tensor([9, 2, 3, 3, 3, 0, 1, 3])  # their mean is 3
    r.update(counts)
    moved = before + 0.25 * torch.tensor([-1, 1, 0, 0, 0, 1, 1, 0])
    torch.testing.assert_close(r.bias, moved - moved.mean(), rtol=0, atol=1e-15)
    assert abs(r.bias.mean().item()) < 1e-15


class Layers(nn.Module):
    """Two routers, of which one has no bias, one in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside = router(), nn.Sequential(router(top_k=3))
        self.other = router("loss", experts=4)

    def routers(self) -> list[Router]:
        return [self.first, self.inside[0], self.other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss_of(each, x) for each in self.routers()]).sum()


def test_one_sum_over_ranks_balances_all_layers() -> None:
    """As one process with all tokens would; in micro-batches too."""
    whole = Layers()
    ranks = [copy.deepcopy(whole) for _ in range(3)]
    parts = rows().detach().split([20, 0, 28])
    for layers, part in zip(ranks, parts, strict=True):
        for micro_batch in part.chunk(2):
            layers(micro_batch).backward()
    whole(rows()).backward()
    summed = sum(torch.cat([each.counts for each in layers.routers()]) for layers in ranks)
    sent: list[int] = []
    for layers in ranks:
        balance(layers, lambda counts: sent.append(len(counts)) or summed)
    assert sent == [EXPERTS + EXPERTS + 4] * 3  # one message of each rank
    found = balance(whole)
    assert torch.equal(torch.cat([*found.values()]), summed)
    assert [*found] == ["first", "inside.0", "other"]
    assert whole.first.bias.any()
    for layers in ranks:
        assert torch.equal(layers.first.bias, whole.first.bias)
        assert torch.equal(layers.inside[0].bias, whole.inside[0].bias)
        assert not layers.first.counts.any()


def test_without_routers_nothing_is_sent() -> None:
    assert balance(nn.Linear(2, 2), lambda counts: pytest.fail("sent")) == {}


def test_the_bias_is_saved_and_counts_are_not() -> None:
    r = router()
    loss_of(r, rows()).backward()
    balance(r)
    loss_of(r, rows()).backward()
    state = r.state_dict()
    assert [*state] == ["weight", "bias"]
    again = router()
    again.load_state_dict(state)
    assert torch.equal(again.bias, r.bias)
    assert r.bias.any()
    assert not again.counts.any()
    assert [*router("loss").state_dict()] == ["weight"]


def test_the_bias_stays_wide() -> None:
    r = Router(HIDDEN, Routing(EXPERTS, 2, balance="bias"))
    r.update(torch.arange(EXPERTS))
    before = r.bias.clone()
    r.bfloat16()
    assert r.weight.dtype == torch.bfloat16
    assert torch.equal(r.bias, before)
    with torch.device("meta"):
        r = Router(HIDDEN, Routing(EXPERTS, 2, balance="bias"))
    assert r.bias.is_meta
    r.to_empty(device="cpu").reset_parameters()
    assert not r.bias.any()


def test_loads_become_equal() -> None:
    """A router that sends most to two experts: after 200 steps the largest load is below 1.2 means."""
    r = router(rate=0.002)
    x = rows(200).detach()
    x[:, 0] += 3.0
    with torch.no_grad():
        r.weight[:2, 0] += 0.5

    def worst() -> float:
        counts = counts_of(r, x)
        return max(counts) / (sum(counts) / EXPERTS)

    assert worst() > 2
    for _ in range(200):
        loss_of(r, x).backward()
        balance(r)
    assert worst() < 1.2


# ---- by an auxiliary loss


def plain_loss(weight: torch.Tensor, routing: Routing, x: torch.Tensor) -> torch.Tensor:
    """Over tokens that are taken as one: experts times the sum of share of pairs times mean score."""
    logits = x @ weight.T
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    pairs = scores.topk(routing.top_k).indices.flatten().bincount(minlength=routing.experts)
    shares = scores / scores.sum(-1, keepdim=True)
    return routing.loss_weight * routing.experts * (pairs.double() / pairs.sum() * shares.mean(0)).sum()


SPLITS = {1: [48], 2: [17, 31], 4: [5, 20, 0, 23]}  # tokens of each rank


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("ranks", SPLITS)
@pytest.mark.parametrize("is_one", [True, False])
def test_the_losss_gradient_does_not_depend_on_the_split(
    scores: str, micro_batches: int, ranks: int, is_one: bool
) -> None:
    """Against one process with the loss written out. Gradients are averaged over ranks, and losses divided by
    micro-batches, as the engine and a pipeline do.

    is_one: the tokens of all ranks have one loss, for which counts are summed; else each rank has one
    """
    r = router("loss", scores=scores, loss_weight=0.3)
    batch = [rows(seed=seed).detach() for seed in range(micro_batches)]
    weight = r.weight.detach().clone().requires_grad_()
    losses = []
    for x in batch:
        parts = [x] if is_one else [part for part in x.split(SPLITS[ranks]) if len(part)]
        losses += [plain_loss(weight, r.routing, part) * len(part) / TOKENS for part in parts]
    (torch.stack(losses).sum() / micro_batches).backward()

    total = torch.zeros_like(weight)
    r.tokens_of_all = lambda own: TOKENS * micro_batches / ranks
    for x in batch:
        counts = torch.tensor(counts_of(r, x))
        r.counts_of_all = (lambda own, counts=counts: counts) if is_one else None
        for part in x.split(SPLITS[ranks]):
            r.weight.grad = None
            (r(part).weights_P * 0).sum().backward()  # the auxiliary loss alone
            total += r.weight.grad / ranks
    torch.testing.assert_close(total, weight.grad, rtol=1e-12, atol=1e-14)
    assert total.abs().max() > 1e-4


def test_both_losses_reach_the_router() -> None:
    """Also of a scaled loss, whose scale divides the tokens; in fp16 training a GradScaler chooses it."""
    r, x = router("loss"), rows()
    weight = r.weight.detach().clone().requires_grad_()
    chosen = (x.detach() @ weight.T).softmax(-1).topk(2).values.flatten()
    main = (chosen * torch.linspace(-1, 1, len(chosen), dtype=chosen.dtype)).sum()
    (main + plain_loss(weight, r.routing, x.detach())).backward()
    for scale in (1.0, 1024.0):
        r.weight.grad = None
        r.tokens_of_all = lambda own, scale=scale: own / scale
        (scale * loss_of(r, x)).backward()
        torch.testing.assert_close(r.weight.grad / scale, weight.grad, rtol=1e-12, atol=1e-14)


def test_an_evaluation_has_no_auxiliary_gradient() -> None:
    r, x = router("loss").eval(), rows()
    (r(x).weights_P * 0).sum().backward()
    assert not r.weight.grad.any()
