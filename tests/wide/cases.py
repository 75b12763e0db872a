"""A case: a module that users bring, how it is sharded, and what the training loop does, as printable data.

`tests.wide.draw.case` makes one from a seed; `sharded` and `plain` run it.
"""

from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["none", "reentrant", "plain"]
Returned = Literal["tensor", "tuple", "dataclass", "namespace", "dict"]
Mixer = Literal["mlp", "attention", "recurrent", "convolution", "statistics", "transformer"]
Generation = Literal["none", "direct", "inside"]  # by the module's own method, or inside of a sharded forward

STEPS = 3
BOUND = {"fp32": 1e-5, "bf16": 0.01}  # of the largest relative difference
CHAINS = {"own", "llama", "gpt2", "bert", "vit", "mixtral", "mamba", "lora llama", "lora gpt2"}
GENERATE = {"llama", "gpt2", "mixtral", "t5", "lora llama", "lora gpt2"}
PART = "of a shard covers this rank's part only"


@dataclass(frozen=True)
class Own:
    """A small module of ours, of what real ones do besides returning a tensor."""

    mixer: Mixer
    by_units: Returned
    by_root: Returned
    side: Literal["none", "before", "after", "penalty", "map"]  # what a unit keeps in an attribute, and when
    summed: Literal["loop", "root", "list"]  # who adds side losses up: the loop, the root, it from a list
    is_reused: bool  # a unit runs twice

    @property
    def penalizes(self) -> bool:
        """Whether a unit's side loss reads its linear layers' weights."""
        return self.side in ("penalty", "map")


@dataclass(frozen=True)
class Case:
    """Everything that a run depends on."""

    seed: int
    net: str
    own: Own | None
    is_tied: bool
    has_dropout: bool
    has_side_outputs: bool  # in the loss: attention maps or router logits, which hooks collect
    checkpointing: Checkpointing
    frozen: int | None  # parameters with this number modulo 3 do not train
    scheme: str
    ranks: int
    levels: tuple[tuple[str, int], ...]
    wrap: Literal["units", "linears", "nested", "nothing"]
    overlap: bool
    collectives: Literal["hops", "flat", "joined"]
    dtype: Literal["fp32", "bf16"]
    micro_batches: int
    accumulation: Literal["plain", "no_sync", "breadth"]
    clip: float | None
    optimizer: str
    decay_groups: bool  # by the number of dimensions
    schedule: bool
    evaluation: Literal["none", "no_grad", "inference"]
    generation: Generation
    average: bool  # running averages of the weights, which replace them in the end
    resumed: str | None  # after the first step, under this scheme

    @property
    def bound(self) -> float:
        return BOUND[self.dtype]

    @property
    def is_chain(self) -> bool:
        """Of its units, in which each tensor with a gradient comes from the one before.

        What only a hook's list keeps is not cut behind its unit, and reentrant checkpointing hides the chain.
        """
        is_plain = not self.has_side_outputs and self.checkpointing != "reentrant"
        return self.net in CHAINS and self.wrap == "units" and is_plain

    @property
    def generates_outside(self) -> bool:
        """Whether it uses parameters outside of the sharded module's forward."""
        return self.generation == "direct" and (self.net == "t5" or self.net.startswith("lora"))

    @property
    def may_be_refused(self) -> tuple[str, ...]:
        """What the one line may contain; empty where every refusal is a fault."""
        allowed = []
        if self.accumulation == "breadth" and not self.is_chain:
            allowed.append("breadth-first")
        if self.generates_outside:
            allowed.append(PART)
        own = self.own
        reads_inner = self.net == "mamba" if own is None else own.mixer == "transformer" or own.penalizes
        if reads_inner and self.wrap in ("linears", "nested"):
            allowed.append(PART)  # a block reads its linear layers' weights itself
        return tuple(allowed)
