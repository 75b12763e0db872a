"""Routers: which experts each token goes to, and with what weight (spec.routing says how).

[Note: balance] What keeps experts equally loaded happens as the gradient of the weights passes on its way
back to the router: there pairs are counted, and there the auxiliary loss adds its gradient. So both happen
once for each backward: neither again when activation checkpointing repeats the forward, nor in an evaluation,
nor for a micro-batch that is left out. Pairs are those chosen, also where capacity then drops some.

Shape letters: T tokens, H hidden, E experts, K experts of a token, P pairs of a token and an expert.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lowband.errors import UserError
from lowband.spec.routing import Routing

TINY = 1e-20  # added to a sum of scores that may all have become zero; without effect on any other


class Routed(NamedTuple):
    """Pairs of a token and an expert, any number of a token; within a token by falling score, of equal ones
    the lower expert first.

    tokens_P:  int64, nondecreasing
    experts_P: int64
    weights_P: fp32 or fp64, with the router's gradient
    """

    tokens_P: torch.Tensor
    experts_P: torch.Tensor
    weights_P: torch.Tensor


class Router(nn.Module):
    """x [tokens, hidden] -> Routed. Its scores are computed in fp32 at least, also under autocast.

    weight: [experts, hidden]
    bias:   a buffer, [experts] fp32 or fp64, with balance by bias; `balance` moves it
    counts: [experts] int64, pairs of each expert since the last `balance`; not in a state dict

    of the auxiliary loss, whose gradient is that of loss_weight times its mean over tokens:
    counts_of_all: sums such counts over the ranks whose tokens it takes as one; it may communicate, and is
                   called again where activation checkpointing repeats the forward. None: own
    tokens_of_all: from this rank's number of tokens, the number that the gradients of all forwards, ranks and
                   micro-batches are a mean over: where gradients are averaged over R ranks and the loss is
                   divided by m micro-batches, the tokens of all ranks times m / R, and divided by the scale
                   of a loss that is scaled. None: own

    A score that is not a number makes its token's weights so, and is no error. Capacity counts the tokens of
    one forward of this rank.
    """

    def __init__(self, hidden: int, routing: Routing, **factory: Any) -> None:
        """factory: device and dtype of the weight"""
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, hidden, **factory))
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        has_bias = routing.balance == "bias"
        bias = torch.zeros(routing.experts, dtype=dtype, device=self.weight.device) if has_bias else None
        self.register_buffer("bias", bias)
        self.counts_of_all: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.tokens_of_all: Callable[[int], float] | None = None
        self.has_added: Callable[[], bool] | None = None  # tokens that are none: `Context.split`
        self._counts: torch.Tensor | None = None  # no buffer, which would need a value on the meta device
        if routing.choice == "expert":
            _warn()
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight as torch fills a linear layer's, no bias."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return str(self.routing)

    def _apply(self, *args: Any, **kwargs: Any) -> "Router":
        """`.bfloat16()` leaves the bias as wide as it is: a step of it would be lost."""
        bias = self.bias
        super()._apply(*args, **kwargs)
        if bias is not None and self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        if self._counts is not None:
            self._counts = None if self.weight.is_meta else self._counts.to(self.weight.device)
        return self

    @property
    def counts(self) -> torch.Tensor:
        if self._counts is None:
            return torch.zeros(self.routing.experts, dtype=torch.int64, device=self.weight.device)
        return self._counts

    def forward(self, x_TH: torch.Tensor) -> Routed:
        dtype = torch.promote_types(torch.promote_types(x_TH.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(x_TH.device.type, enabled=False):
            logits_TE = F.linear(x_TH.to(dtype), self.weight.to(dtype))
        scores_TE = logits_TE.softmax(-1) if self.routing.scores == "softmax" else logits_TE.sigmoid()
        by_experts = self.routing.choice == "expert"
        routed = self._chosen_by_experts(scores_TE) if by_experts else self._chosen_by_tokens(scores_TE)
        most = self.routing.most_pairs(len(x_TH))
        if self.training and torch.is_grad_enabled():
            self._check_added(most)
            routed = routed._replace(weights_P=self._balanced(routed, scores_TE))
        if by_experts or most is None:
            return routed
        kept_P = _first(routed.experts_P, self.routing.experts, most)
        return Routed(*(each[kept_P] for each in routed))

    def _check_added(self, most: int | None) -> None:
        """Raises UserError if some of the tokens are none, and would count."""
        counts = most is not None or self.routing.balance != "none"
        if counts and self.has_added is not None and self.has_added():
            raise UserError(
                "tokens that Context.split has added would count in the balance of experts",
                where="lowband.Routing",
                allowed="lengths that ranks along context divide equally; no balance, no limit of pairs",
            )

    def _chosen_by_tokens(self, scores_TE: torch.Tensor) -> Routed:
        tokens, k = len(scores_TE), self.routing.top_k
        with torch.no_grad():
            by_TE = scores_TE if self.bias is None else scores_TE + self.bias
            experts_TK = _falling(self._limited(by_TE))[:, :k]
            tokens_P = torch.arange(tokens, device=scores_TE.device).repeat_interleave(k)
        weights_TK = self._weights(scores_TE.gather(1, experts_TK))
        return Routed(tokens_P, experts_TK.flatten(), weights_TK.flatten())

    def _chosen_by_experts(self, scores_TE: torch.Tensor) -> Routed:
        most = self.routing.most_pairs(len(scores_TE))
        with torch.no_grad():
            best = _falling(scores_TE, dim=0)[:most]
            chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, best, True)
            experts_TE = _falling(scores_TE)
            tokens_P, places_P = chosen_TE.gather(1, experts_TE).nonzero(as_tuple=True)
            experts_P = experts_TE[tokens_P, places_P]
        weights_TE = self._weights(scores_TE.masked_fill(~chosen_TE, 0))
        return Routed(tokens_P, experts_P, weights_TE[tokens_P, experts_P])

    def _weights(self, scores: torch.Tensor) -> torch.Tensor:
        """scores: of the experts of each token"""
        if self.routing.normalized:
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
        return scores if self.routing.scale == 1 else scores * self.routing.scale

    def _limited(self, by_TE: torch.Tensor) -> torch.Tensor:
        """What is chosen by, -inf in groups that are not a token's."""
        of = self.routing
        if of.groups == 1:
            return by_TE
        grouped = by_TE.unflatten(1, (of.groups, -1))
        best = grouped.topk(1 if of.group_score == "best" else 2, dim=-1).values.sum(-1)
        others = torch.ones_like(best, dtype=torch.bool).scatter_(
            1, _falling(best)[:, : of.top_groups], False
        )
        return grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(1)

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _balanced(self, routed: Routed, scores_TE: torch.Tensor) -> torch.Tensor:
        """The weights, whose gradient counts the pairs and takes the auxiliary loss's along."""
        counts_E = counted(routed.experts_P, self.routing.experts)
        if self.routing.balance != "loss":
            weights_P = routed.weights_P
            if self.routing.balance == "bias" and not weights_P.requires_grad:  # frozen, as all before it
                weights_P = weights_P.detach().requires_grad_()
            return _Passing.apply(weights_P, None, None, counts_E, self)  # type: ignore[no-any-return]
        shares_TE = scores_TE
        if self.routing.scores == "sigmoid":
            shares_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)
        all_E = counts_E if self.counts_of_all is None else self.counts_of_all(counts_E)
        tokens = len(scores_TE) if self.tokens_of_all is None else self.tokens_of_all(len(scores_TE))
        factor = self.routing.loss_weight * self.routing.experts / tokens if tokens else 0.0
        slope_E = factor * all_E.to(shares_TE.dtype) / all_E.sum().clamp(min=1)
        return _Passing.apply(routed.weights_P, shares_TE, slope_E, counts_E, self)  # type: ignore[no-any-return]

    def count(self, counts_E: torch.Tensor) -> None:
        """Add to the counts."""
        self._counts = self.counts + counts_E

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor) -> None:
        """Move the bias by `rate` against the load; the counts become zero.

        counts_E: pairs of each expert over all ranks
        """
        self._counts = None
        if self.bias is not None:
            above = self.routing.experts * counts_E - counts_E.sum()  # exact: the mean is no integer
            self.bias -= self.routing.rate * above.sign()
            self.bias -= self.bias.mean()


def balance(
    module: nn.Module, summed: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """After each optimizer step: every router of a module is balanced, and its counts are zero.

    summed: sums a tensor, int64, over all ranks whose tokens differ; called once, unless there is no router
    Returns the pairs of each expert over these ranks, by the router's name.
    """
    routers = {name: each for name, each in module.named_modules() if isinstance(each, Router)}
    if not routers:
        return {}
    counts = torch.cat([router.counts for router in routers.values()])
    if summed is not None:
        counts = summed(counts)
    found = counts.split([router.routing.experts for router in routers.values()])
    for router, counts_E in zip(routers.values(), found, strict=True):
        router.update(counts_E)
    return dict(zip(routers, found, strict=True))


class _Passing(torch.autograd.Function):
    """The weights. Behind them, as their gradient comes: see [Note: balance]."""

    @staticmethod
    def forward(
        ctx: Any,
        weights_P: torch.Tensor,
        shares_TE: torch.Tensor | None,
        slope_E: torch.Tensor | None,
        counts_E: torch.Tensor,
        router: Router,
    ) -> torch.Tensor:
        """slope_E: gradient of the auxiliary loss with respect to every token's shares"""
        ctx.shape = None if shares_TE is None else shares_TE.shape
        # Attributes, not saved tensors: what a repeated forward would put in their place is the same.
        ctx.slope_E, ctx.counts_E, ctx.router = slope_E, counts_E, router
        return weights_P.view_as(weights_P)

    @staticmethod
    def backward(ctx: Any, grad_P: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.router.count(ctx.counts_E)
        return grad_P, None if ctx.slope_E is None else ctx.slope_E.expand(ctx.shape), None, None, None


def _falling(scores: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Places by falling score, of equal ones the lower first; not-a-number is above all."""
    return scores.argsort(dim=dim, descending=True, stable=True)


def _first(experts_P: torch.Tensor, experts: int, most: int) -> torch.Tensor:
    """[P] bool: whether a pair is among the first so many of its expert."""
    order_P = experts_P.argsort(stable=True)
    ends_E = counted(experts_P, experts).cumsum(0)
    starts_E = F.pad(ends_E, (1, 0))[:-1]
    place_P = torch.arange(len(experts_P), device=experts_P.device) - starts_E[experts_P[order_P]]
    return torch.empty_like(experts_P, dtype=torch.bool).index_copy_(0, order_P, place_P < most)


def counted(experts_P: torch.Tensor, experts: int) -> torch.Tensor:
    """[E] int64: pairs of each expert."""
    return experts_P.new_zeros(experts).index_add_(0, experts_P, torch.ones_like(experts_P))


@cache
def _warn() -> None:
    """Once a process."""
    text = "experts that choose their tokens compare each with later ones: a causal model sees its future"
    warnings.warn(text, UserWarning, stacklevel=3)
