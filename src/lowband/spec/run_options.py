"""The options of a run, one line each."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lowband.errors import UserError
from lowband.spec.axes import InStages
from lowband.spec.mesh import MOST_RANKS
from lowband.spec.model import AttentionKernel
from lowband.spec.peers import Engine
from lowband.spec.schedules import SCHEDULES, Name
from lowband.spec.step import Order, OurRecompute, Pattern

Dtype = Literal["fp32", "bf16"]


class RunOptions(InStages):
    """The options that a suite may set for a run, one line each: type, default and meaning.

    Among them are its axes.
    """

    younger: ClassVar = (
        "schedule", "chunks", "layers", "compile", "loss_chunks", "fused_adamw", "recompute_layers",
    )  # fmt: skip

    engine: Engine = "lowband"
    ranks: PositiveInt = Field(le=MOST_RANKS)
    accumulation: PositiveInt = Field(default=1, description="backward passes per optimizer step")
    order: Order = Field(
        default="depth", description="of accumulation; breadth: a unit computes all passes, gathered once"
    )
    schedule: Name = Field(default="1f1b", description="of accumulation where ranks lie along pipeline")
    chunks: NonNegativeInt = Field(
        default=0, description="stages on each rank along pipeline; 0: the fewest that the schedule allows"
    )
    seq_len: PositiveInt
    steps: PositiveInt
    warmup_steps: NonNegativeInt = Field(
        default=2, description="first steps of the run, and behind its last resume, which are in no time"
    )
    seed: NonNegativeInt = Field(default=1, description="of initial weights and of the order of data")
    device: Literal["auto", "fake"] = Field(
        default="auto",
        description="auto: a GPU if there is one, else the CPU; fake: nothing is computed, bytes are counted",
    )
    attention: AttentionKernel = Field(
        default="sdpa", description="sdpa: torch's kernels; flash2: ours in Triton, for a GPU"
    )
    recompute: OurRecompute = Field(
        default="none",
        description="full: of each block only the input is kept, and it computes twice; host: what it keeps "
        "waits in the host's memory",
    )
    recompute_layers: NonNegativeInt = Field(
        default=0, description="of how many blocks, the first ones of each stage; 0: of all"
    )
    compute_dtype: Dtype = "fp32"
    reduce_dtype: Dtype = "fp32"
    compile: bool = Field(default=False, description="each block compiled by torch, on its own")
    loss_chunks: PositiveInt = Field(
        default=1, description="pieces of a pass's tokens of which only one's logits are in memory"
    )
    fused_adamw: bool = Field(
        default=False, description="AdamW in one pass over the shard, from gradients in the reduce dtype"
    )
    overlap: bool = Field(default=True, description="communication behind the computation")
    collectives: Pattern = Field(
        default="hops",
        description="hops: one per level; flat: a ring over all ranks; joined: one exchange of all",
    )
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.1
    grad_clip: PositiveFloat = 1.0
    text: str = Field(default="stdlib", description="stdlib, a text file, or a .bin file of tokens")
    checkpoint_every: NonNegativeInt = Field(default=0, description="steps between checkpoints; 0: none")
    fingerprint: bool = Field(default=True, description="a checksum of the final weights, made at the end")
    time_limit_s: PositiveInt = Field(default=900, description="the whole run ends as `timeout` after this")
    peer_timeout_s: PositiveInt = Field(
        default=60, description="a rank that waits longer for another ends the run"
    )

    @property
    def chunks_each(self) -> int:
        """Stages on each rank along pipeline."""
        return self.chunks or SCHEDULES[self.schedule].chunks[0]

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks_each if self.is_in_stages else self.pipeline

    @property
    def is_in_stages(self) -> bool:
        """Whether the model is cut into stages."""
        return self.pipeline > 1

    def check_step(self) -> None:
        """Raises UserError for ways of a step that do not go with the engine or the axes.

        One rule for all four: what they change is one device's, so the only axis is data.
        """
        is_ours = self.fused_adamw or self.recompute == "host"
        allowed = f"engine lowband{'' if is_ours else ' or fsdp2'}, device auto, only data as its axis"
        asked = {
            "compile": self.compile,
            "loss_chunks": self.loss_chunks > 1,
            "fused_adamw": self.fused_adamw,
            "recompute host": self.recompute == "host",
        }
        engines = ("lowband",) if is_ours else ("lowband", "fsdp2")
        is_one_axis = self.tensor * self.pipeline * self.context * self.expert == 1
        if self.engine in engines and self.device == "auto" and is_one_axis:
            return
        for name in (name for name, is_asked in asked.items() if is_asked):
            raise UserError(f"engine {self.engine}, device {self.device}", where=name, allowed=allowed)
