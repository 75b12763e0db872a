"""The runs and commands that are made twice, and the runs that must have the bits of another."""

from dataclasses import dataclass, field
from typing import Any

from lowband.spec.run import RunSpec
from tests.checkout import CONFIG
from tests.dist.started import SMOKE, TEXT

STEPS, EVERY = 4, 2  # of a run, and between exchanges of replicas that meet seldom
LONGEST_S = 1800

_RING = "a ring sums each part of a buffer from another rank on, hops in the order of the ranks"
_ONCE = "a rank sums its passes before the one reduction; depth-first each pass is reduced before the sum"
_NORM = "the gradient norm is summed over other shards, and clipping divides by it"
_QUANTIZED = "rounded values are not sums of the same rounded values in another order"


@dataclass(frozen=True)
class Case:
    """
    changes:     of the run's options from zero3 on 8 ranks in fp32
    like:        another case that it is compared with; "": none
    is_promised: that the two have the same bits
    why:         they may differ
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    like: str = ""
    is_promised: bool = False
    why: str = ""

    @property
    def run_id(self) -> str:
        return self.name.replace(" ", "-").replace(",", "")

    def spec(self) -> RunSpec:
        some = next(spec for spec in SMOKE.values() if spec.ranks == 8).model_dump()
        scheme = CONFIG.scheme(self.changes.get("scheme", "zero3"))
        if scheme.sync:
            seldom = scheme.sync.model_copy(
                update={"every": EVERY, "fragments": min(2, scheme.sync.fragments)}
            )
            scheme = scheme.model_copy(update={"sync": seldom})
        common = {
            "run_id": self.run_id,
            "text": TEXT, "steps": STEPS, "warmup_steps": 1, "micro_batch": 1, "accumulation": 2,
            "seq_len": 32, "model": some["model"] | {"layers": 2, "hidden": 32},
            "time_limit_s": LONGEST_S, "peer_timeout_s": LONGEST_S,
        }  # fmt: skip
        return RunSpec.parse(some | common | self.changes | {"scheme": scheme.model_dump()}, self.name)


def _of(scheme: str, **changes: Any) -> dict[str, Any]:
    return {"scheme": scheme, **changes}


_BF16 = {"compute_dtype": "bf16"}

CASES = (
    Case("zero3"),
    Case("zero3 on 1 rank", {"ranks": 1}),
    Case("zero3 on 2 ranks", {"ranks": 2}),
    Case("zero3 on 4 ranks", {"ranks": 4}),
    Case("zero3, a 1M model on 1 rank", {
        "ranks": 1, "model": CONFIG.model("gpt-1m").model_dump(), "seq_len": 128, "micro_batch": 4,
    }),
    Case("zero3 without overlap", {"overlap": False}, "zero3", True),
    Case("zero3 in joined hops", {"collectives": "joined"}, "zero3", True),
    Case("zero3 in flat rings", {"collectives": "flat"}, "zero3", False, _RING),
    Case("zero3 breadth-first", {"order": "breadth"}, "zero3", False, _ONCE),
    Case("zero3 with recomputation", {"recompute": "full"}, "zero3", True),
    Case("zero3 in bf16", _BF16),
    Case("zero3 in bf16 with recomputation", {**_BF16, "recompute": "full"}, "zero3 in bf16", True),
    Case("ddp", _of("ddp"), "zero3", False, _NORM),
    Case("ddp in joined hops", _of("ddp", collectives="joined"), "ddp", True),
    Case("zeropp", _of("zeropp"), "zero3", False, "zeropp rounds weights to int8, gradients to int4"),
    Case("zeropp without overlap", _of("zeropp", overlap=False), "zeropp", True),
    Case("hier3", _of("hier3"), "zero3", False, "hier3 rounds weights to int8, gradients to int4"),
    Case("hier3 on 4 ranks", _of("hier3", ranks=4)),
    Case("hier3 without overlap", _of("hier3", overlap=False), "hier3", True),
    Case("hier3 breadth-first", _of("hier3", order="breadth"), "hier3", False, _QUANTIZED),
    Case("hier3 in bf16", _of("hier3", **_BF16)),
    Case("diloco", _of("diloco")),
    Case("diloco on 4 ranks, one replica", _of("diloco", ranks=4)),
    Case("streaming-diloco", _of("streaming-diloco")),
    Case("streaming-diloco, no overlap", _of("streaming-diloco", overlap=False), "streaming-diloco", True),
    Case("diloco-hier3", _of("diloco-hier3")),
)  # fmt: skip

_FRONTIER = ("--cluster", "frontier", "--model", "gpt-20b", "--gpus", "384")

# Commands run in a folder of their own that has these of the repository; its `out/` is compared.
LINKED = ("config", "slurm", "results", "CITATION.cff")
COMMANDS: dict[str, tuple[str, ...]] = {
    "lowband predict --json": ("lowband", "predict", *_FRONTIER, "--scheme", "zero3", "hier3", "--json"),
    "lowband plan --csv": ("lowband", "plan", *_FRONTIER, "--csv"),
    "lowband spec": ("lowband", "spec", "--suite", "default", "--out", "out"),
    "lowband validate": ("lowband", "validate", "--out", "out"),
    "lowband collect": ("lowband", "collect", "@runs.txt", "--out", "out"),
    "lowband calibrate --folds": ("lowband", "calibrate", "--folds", "--out", "out"),
    "tables, figures, claims, page": ("tests.twice.report", "out"),
}
