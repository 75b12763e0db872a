"""How layers are cut over tensor ranks, as data: rules by the names of modules, and the plan for our GPT.

Source: Megatron-LM (arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from lowband.spec.model import ModelSpec


@dataclass(frozen=True)
class Column:
    """A linear layer whose output features are divided.

    parts:    equal parts of them that are divided each, such as queries, keys and values
    together: neighbouring features that stay on one rank, such as a head's
    """

    parts: int = 1
    together: int = 1


@dataclass(frozen=True)
class Row:
    """A linear layer whose input features are divided, as a Column divided them; its outputs are summed."""


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary is divided: rows of an embedding, outputs of a linear layer, logits of a loss."""


@dataclass(frozen=True)
class Join:
    """An identity behind which every rank has all features that a Column divided.

    parts: the Column's; with others the features would come in another order
    """

    parts: int = 1


@dataclass(frozen=True)
class Enter:
    """An identity whose input every rank has, and whose output each rank's features or heads take without a
    Column, such as the part of a latent's keys that heads share: its gradients are summed."""


@dataclass(frozen=True)
class Split:
    """With sequence parallelism: a module whose first input, [sequences, tokens, ...], is cut by tokens."""


@dataclass(frozen=True)
class Tokens:
    """With sequence parallelism: a module that sees only its rank's tokens, so that its gradients are partial
    sums."""


@dataclass(frozen=True)
class Partial:
    """A module between a Column and its Row, such as a norm of queries: every tensor rank has its parameters
    whole and sees only its own features or heads, so that its gradients are partial sums."""


@dataclass(frozen=True)
class Whole:
    """A module that every tensor rank computes alike."""


Rule = Column | Row | Vocabulary | Join | Enter | Split | Tokens | Partial | Whole
Plan = Mapping[str, Rule]

DIVIDED: Final[Mapping[type, int]] = {Column: 0, Vocabulary: 0, Row: 1}  # the dimension that a rule cuts


def gpt_plan(model: ModelSpec) -> Plan:
    """The plan for model.gpt.GPT, and for what can be predicted beside it."""
    optional: Plan = {
        **({"positions": Whole()} if model.positions == "learned" else {}),
        **({"*mlp.gate": Column()} if model.gated and model.dense_share else {}),
    }
    # Experts are divided over an axis of their own; each tensor rank has its tokens' routes and outputs.
    dense: Plan = {"*mlp.up": Column(), "*mlp.down": Row()} if model.dense_share else {}
    mlp: Plan = {"*mlp": Tokens()} if model.experts else {}
    return {
        **optional,
        "embed": Vocabulary(),
        "blocks.0": Split(),
        "*_norm": Tokens(),
        **_products(model),
        "*attention.out": Row(),
        **dense,
        **mlp,
        "head": Vocabulary(),
        "logits": Join(),
        "loss": Vocabulary(),
    }


def _products(model: ModelSpec) -> Plan:
    """Of attention, up to its heads. Every rank has a latent's short vectors whole, as in Megatron-LM."""
    latent = model.latent
    if latent is None:
        return {"*attention.qkv": Column(parts=3, together=model.head_size)}
    heads = Column(together=latent.query)
    queries: Plan = {"q": heads} if latent.q_rank is None else {"q_down": Tokens(), "q_up": heads}
    keys: Plan = {
        "kv_down": Tokens(),
        "k_rope": Enter(),
        "kv_up": Column(together=latent.nope + latent.value),
    }
    return {f"*attention.{name}": rule for name, rule in {**queries, **keys}.items()}


def rule_of(name: str, plan: Plan) -> Rule | None:
    """The first rule that fits a module's name."""
    return next((rule for pattern, rule in plan.items() if fnmatchcase(name, pattern)), None)


def cut_shape(name: str, shape: tuple[int, ...], plan: Plan, ranks: int) -> tuple[int, ...]:
    """The shape of a rank's slice of a parameter, rounded up. name: the parameter's"""
    dim = DIVIDED.get(type(rule_of(name.rpartition(".")[0], plan)))
    if dim is None or dim >= len(shape):
        return shape
    return (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :])
