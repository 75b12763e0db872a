"""Recipes that were published: predicted, and what `lowband plan` finds beside them.

Of a recipe the paper has the degrees and the batch. Where it does not state the number of stages a rank, each
that is possible is tried. `published` is seconds of a step, from the rate that is printed.
"""

from dataclasses import dataclass, replace
from functools import cache

import pytest
from texts import Text

from lowband.cost.numbers import GIB
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.room import MEMORY_ERROR
from lowband.predict.search.choice import chosen
from lowband.predict.search.degrees import axes_to_try, ends
from lowband.predict.search.plan import plan
from lowband.predict.search.software import of_stack, runners
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec
from tests.checkout import CONFIG


def gpt(layers: int, hidden: int, heads: int) -> ModelSpec:
    return ModelSpec(
        name="gpt", layers=layers, hidden=hidden, heads=heads, vocab=51200, seq_len=2048, source="a test"
    )


LLAMA = CONFIG.model("llama-3.1-405b")


@dataclass(frozen=True)
class Recipe:
    """stages: on a rank; published: seconds, or None; gated_kept: of the stack, if not its own"""

    cluster: str
    stack: str
    model: ModelSpec
    ranks: int
    seq_len: int
    batch: int
    scheme: str
    axes: Ways
    stages: tuple[int, ...] = (1,)
    recompute: str = "none"
    published: float | None = None
    gated_kept: int | None = None

    @property
    def setting(self):
        machine, stack = setting(CONFIG, self.cluster, self.stack)
        kept = {} if self.gated_kept is None else {"gated_kept": self.gated_kept}
        return machine, stack.model_copy(update=kept)

    def jobs(self) -> list[Workload]:
        found = []
        for chunks in self.stages:
            layers = ends(self.model.layers, self.axes.pipeline * chunks)
            axes = self.axes.model_copy(update={"chunks": chunks, "layers": layers})
            batches = 1, self.seq_len, self.batch // axes.with_context(self.ranks)["data"]
            of = *self.setting, self.model, CONFIG.scheme(self.scheme), self.ranks, *batches
            found.append(Workload(*of, self.recompute, axes=axes))
        return found


# Of Meta's own SwiGLU, that of xformers, the backward computes activation function and product again.
RECIPES = {
    # arXiv 2407.21783, Table 4: 430, 400 and 380 TFLOPS, which is what these FLOPs take.
    "405b": Recipe(
        "eos-2024", "megatron-lm", LLAMA, 8192, 8192, 2048, "zero1", Ways.of_options(8, 16), (2, 4),
        published=12.7, gated_kept=2,
    ),
    "405b-128k": Recipe(
        "eos-2024", "megatron-lm", LLAMA, 16384, 131072, 128, "zero1",
        Ways.of_options(8, 16, cp=16).model_copy(update={"context_attention": "gather"}), (4,),
        gated_kept=2,
    ),
    # Degrees of arXiv 2104.04473, Table 1, on fewer ranks; of 2312.12705's script; with 2104.04473's
    # interleaved schedule on H100.
    "530b": Recipe(
        "selene-2021", "megatron-lm-2021", gpt(105, 20480, 128), 2240, 2048, 2240, "ddp",
        Ways.of_options(8, 35), recompute="full",
    ),
    "1t": Recipe(
        "frontier", "deepspeed-zero", CONFIG.model("gpt-1t"), 1024, 2048, 1024, "zero1",
        Ways.of_options(4, 128), recompute="full",
    ),
    "175b": Recipe(
        "eos-2024", "megatron-lm", gpt(96, 12288, 96), 1024, 2048, 1536, "zero1", Ways.of_options(4, 8), (6,)
    ),
    # As published_recipes.csv has them: Nemotron-4 340B, whose stages a rank its paper does not say, and
    # arXiv 2504.14960's Mixtral 8x22B in Megatron-Core without folding (experts inside a node).
    "340b": Recipe(
        "eos-2024", "megatron-lm", CONFIG.model("nemotron-4-340b"), 6144, 4096, 2304, "zero1",
        Ways.of_options(8, 12), (2, 4, 8), published=8.0,
    ),
    "8x22b": Recipe(
        "eos-2024", "megatron-lm", CONFIG.model("mixtral-8x22b"), 128, 4096, 1024, "zero1",
        Ways.of_options(2, 8, ep=4), (7,),
    ),
}  # fmt: skip
DOCUMENT = Text("docs/predictor.md")
SAID = {  # the document's rows that have nothing but a time
    "530b": "tp 8, pp 35 | {:.1f} s | no slower |",
    "1t": "tp 4, pp 128 | {:.0f} s | no slower |",
    "175b": "pp 8, 6 stages a rank | {:.2f} s | no slower |",
}


@cache
def first(name: str) -> tuple[float, float, tuple[str, ...], Workload]:
    """Seconds and bytes of the planner's first row, what runs it, and the job; of the stack's software."""
    recipe = RECIPES[name]
    machine, stack = recipe.setting
    software = [row for row in of_stack(stack, recipe.model) if row.name != "lowband"]
    axes = axes_to_try(machine, recipe.model, context=None, expert=None, seq_len=recipe.seq_len)
    found = plan(
        machine, stack, recipe.model, recipe.ranks, recipe.seq_len, recipe.batch, axes, software=software
    )
    best = chosen(found)[0]
    return best.step_time_s, best.peak, runners(best.job), best.job


def times(name: str) -> list[float]:
    return [float(predict(job, interval=False).step_time_s) for job in RECIPES[name].jobs()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (name in ("530b", "175b"))) for name in RECIPES]
)
def test_the_planner_is_no_slower_than_a_recipe_that_fits(name: str) -> None:
    seconds, peak, software, job = first(name)
    if name in SAID:
        DOCUMENT.says(SAID[name].format(times(name)[0]))
    fitting = [
        float(p.step_time_s)
        for p in (predict(one, interval=False) for one in RECIPES[name].jobs()) if p.fits
    ]  # fmt: skip
    assert all(seconds <= one for one in fitting)
    assert fitting or name in ("405b", "8x22b")  # beyond 80 GiB, within the error: the next test, and theirs
    assert peak * MEMORY_ERROR <= job.machine.device.memory_gib * GIB
    assert set(software) & {row.name for row in of_stack(job.stack, job.model)}


def test_metas_recipe_of_8k() -> None:
    """How many stages a rank had the paper does not say: with 4 it fits within the memory model's error, with
    2 it does not. The planner's row is faster than published."""
    recipe = RECIPES["405b"]
    two, four = times("405b")
    assert abs(two / recipe.published - 1) < abs(four / recipe.published - 1) < 0.11
    seconds = first("405b")[0]
    DOCUMENT.says(
        f"| {two:.1f} s with 2 stages a rank, {four:.1f} s with 4 | {seconds:.1f} s: the same with cp 2 |"
    )
    DOCUMENT.says(f"ends {100 * (seconds / four - 1):.0f} % behind the recipe with 4 stages")
    peaks = [float(predict(job, interval=False).peak_memory_bytes) / GIB for job in recipe.jobs()]
    DOCUMENT.says(f"with 4 of them {peaks[1]:.0f} GiB are predicted of 80")
    DOCUMENT.says(f"(`--gated-kept 2`); with 2 stages {peaks[0]:.0f}.")
    assert peaks[1] / MEMORY_ERROR < 80 < peaks[0] / MEMORY_ERROR
    assert first("405b")[0] < recipe.published
    (eager,) = replace(recipe, gated_kept=4, stages=(4,)).jobs()
    assert float(predict(eager, interval=False).peak_memory_bytes) / MEMORY_ERROR > 80 * GIB


def test_metas_recipe_of_128k() -> None:
    (job,) = RECIPES["405b-128k"].jobs()
    p = predict(job, interval=False)
    assert p.fits
    best = first("405b-128k")[3]
    DOCUMENT.says(
        f"| {float(p.tflops_per_gpu):.0f} TFLOPS | as fast, or faster: "
        f"{float(predict(best, interval=False).tflops_per_gpu):.0f} with pp {best.axes.pipeline}, "
        f"{best.axes.chunks} stages a rank |"
    )
    assert best.axes.context >= 16


def test_nvidias_recipe_of_nemotron_340b_on_6144() -> None:
    """By any number of stages a rank; the planner's row is no slower than published."""
    recipe = RECIPES["340b"]
    two, four, eight = (f"{one:.1f}" for one in times("340b"))
    assert four == eight
    DOCUMENT.says(f"| {two} s with 2 stages a rank, {four} s with 4 and with 8 | no slower than published |")
    assert first("340b")[0] <= recipe.published


def test_nvidias_recipe_of_nemotron_340b() -> None:
    """On 128 H100 it fits within the error if gradients are summed in bf16, not if in fp32."""
    machine, stack = setting(CONFIG, "eos-2024", "megatron-lm")
    model = CONFIG.model("nemotron-4-340b")
    peaks = {}
    for dtype in ("fp32", "bf16"):
        job = Workload(
            machine, stack.model_copy(update={"summed_dtype": dtype}), model, CONFIG.scheme("zero1"), 128, 1,
            4096, 16, "none", axes=Ways.of_options(8, 8, 12),
        )  # fmt: skip
        peaks[dtype] = float(predict(job, interval=False).peak_memory_bytes) / GIB
    assert peaks["bf16"] / MEMORY_ERROR < 80 < peaks["fp32"] / MEMORY_ERROR
    DOCUMENT.says(
        f"Nemotron-340B on 128 H100 needs {peaks['bf16']:.0f} of 80 GiB with gradients summed and reduced"
    )
    DOCUMENT.says(f"within the error, and {peaks['fp32']:.0f} in fp32.")


def test_a_plan_for_16384_ranks_predicts_a_part_of_its_candidates() -> None:
    """By which it takes 3 processor seconds."""
    recipe = replace(RECIPES["405b"], ranks=16384)
    machine, stack = recipe.setting
    axes = axes_to_try(machine, LLAMA, context=None, seq_len=8192)
    found = plan(machine, stack, LLAMA, 16384, 8192, 2048, axes, software=of_stack(stack, LLAMA))
    assert 4 * len(found.candidates) < found.tried
