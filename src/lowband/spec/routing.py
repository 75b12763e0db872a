"""Which experts a token goes to, as data.

    softmax, top_k 1                       Switch (arXiv 2101.03961)
    softmax, normalized                    Mixtral (arXiv 2401.04088), GPT-OSS without the bias of its router
    softmax                                Qwen-MoE, OLMoE (arXiv 2409.02060)
    softmax, groups by their best expert   DeepSeek-V2 (arXiv 2405.04434, section 2.2.2)
    sigmoid, normalized, groups by their
    two best experts, balance by bias      DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)
    softmax, choice by experts             expert choice (arXiv 2202.09368)

Softmax over all experts and then the best k, normalized, is the best k and then softmax over them.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from lowband.errors import UserError

Scores = Literal["softmax", "sigmoid"]
Choice = Literal["token", "expert"]
GroupScore = Literal["best", "best two"]
Balance = Literal["none", "bias", "loss"]


@dataclass(frozen=True)
class Routing:
    """How a router chooses, and how it keeps experts equally loaded.

    experts:     all of them, over all ranks
    top_k:       experts of a token; where experts choose, of a token in the mean
    scores:      of an expert for a token: softmax over experts, or sigmoid of each
    choice:      whether tokens choose their experts or experts their tokens, as many each
    normalized:  whether the weights of a token are divided by their sum
    scale:       by which weights are multiplied, after that
    groups:      of neighbouring experts, equally many; a token's are of at most `top_groups` groups
    group_score: of a group: the score of its best expert, or the sum of its two best
    capacity:    pairs that an expert may have, as a multiple of the mean; later tokens' are dropped.
                 None: dropless where tokens choose, 1 where experts do
    balance:     bias: added to scores for the choice alone, and moved after each step by `rate` (arXiv
                 2408.15664, whose rate is the default). loss: `loss_weight` times experts times the sum over
                 them of share of pairs times mean score, so loss_weight if all are equal (arXiv 2101.03961,
                 section 2.2, whose weight is the default)
    Raises UserError for what no router could do.
    """

    experts: int
    top_k: int
    scores: Scores = "softmax"
    choice: Choice = "token"
    normalized: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "best"
    capacity: float | None = None
    balance: Balance = "none"
    rate: float = 1e-3
    loss_weight: float = 1e-2

    def __post_init__(self) -> None:
        kinds = {"scores": Scores, "choice": Choice, "group_score": GroupScore, "balance": Balance}
        for name, kind in kinds.items():
            if getattr(self, name) not in (allowed := get_args(kind)):
                raise UserError(f"unknown '{getattr(self, name)}'", where=name, allowed=allowed)
        for name in ("scale", "capacity", "rate", "loss_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"is {value}", where=name, allowed="a positive number")
        if self.experts < 1:
            raise UserError(f"is {self.experts}", where="experts", allowed="1 or more")
        if not 1 <= self.top_k <= self.experts:
            raise UserError(f"top_k {self.top_k} of {self.experts} experts", where="top_k",
                            allowed=f"1 to {self.experts}")  # fmt: skip
        self._check_groups()
        if self.choice == "expert" and (self.balance != "none" or self.groups > 1):
            what = "experts that choose have equally many tokens, of any group"
            raise UserError(what, where="choice", allowed="choice token, or balance none and groups 1")

    def _check_groups(self) -> None:
        if self.groups < 1 or self.experts % self.groups:
            what = f"{self.experts} experts do not divide into {self.groups} groups"
            raise UserError(what, where="groups", allowed=f"what divides {self.experts}")
        if not 1 <= self.top_groups <= self.groups:
            what = f"top_groups {self.top_groups} of {self.groups} groups"
            raise UserError(what, where="top_groups", allowed=f"1 to {self.groups}")
        size = self.experts // self.groups
        if self.top_k > (most := self.top_groups * size):
            what = f"top_k {self.top_k}, but {self.top_groups} groups have {most} experts"
            raise UserError(what, where="top_groups", allowed=f"{-(-self.top_k // size)} to {self.groups}")
        if self.groups > 1 and self.group_score == "best two" and size == 1:
            raise UserError("groups have one expert each", where="group_score", allowed="best")

    def most_pairs(self, tokens: int) -> int | None:
        """Pairs that an expert may have of so many tokens; None: any number."""
        if self.capacity is None and self.choice == "token":
            return None
        capacity = Fraction(str(self.capacity or 1))  # as it is written: 1.1 of 10 is 11
        return min(tokens, math.ceil(capacity * self.top_k * tokens / self.experts))
