"""arXiv 2306.10209: TFLOPs per GPU of the 18B model on 384 V100 with 1 to 8 InfiniBand links a node in use.

Values are read off the bars' heights. TFLOPs are taken to count recomputation, as Megatron-DeepSpeed prints
them: otherwise the traffic at one link would exceed its bandwidth. All runs have one number of ranks; the
number of links is the scale that a fold leaves out.
"""

from dataclasses import replace
from typing import Any

from lowband.evidence.validation import Rows, Setting
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.machine import Machine
from lowband.spec.mesh import WORLD

MODEL, RANKS, SEQ_LEN = "gpt-18b", 384, 1024


def with_cards(machine: Machine, cards: int) -> Machine:
    """The machine with only some of a node's network cards in use."""
    levels = []
    for level in machine.levels:
        if level.name == WORLD and level.link is not None and level.link.cards is not None:
            rate = level.link.gigabytes_per_s * cards / level.link.cards
            link = level.link.model_copy(update={"gigabytes_per_s": rate, "cards": cards})
            levels.append(level.model_copy(update={"link": link}))
        else:
            levels.append(level)
    return machine.model_copy(update={"levels": tuple(levels)})


def where(setting: Setting) -> Any:
    df = setting.reported[setting.reported["metric"] == "throughput (bar height)"]
    links = df["ib_links"].map(lambda cards: "1 link" if cards == "1" else f"{cards} links")
    return df.assign(scheme=df["scheme"].str.removesuffix(" baseline"), links=links)


def job(setting: Setting, row: Any) -> Workload:
    job = setting.job(
        setting.model(MODEL), {"ZeRO-3": "zero3", "ZeRO++": "zeropp"}[row.scheme], RANKS,
        int(row.tokens_per_gpu.removesuffix("K")), SEQ_LEN,
    )  # fmt: skip
    return replace(job, machine=with_cards(setting.machine, int(row.ib_links)))


ROWS = Rows(
    where=where, job=job, of=lambda job: speed(job).hfu_tflops_per_gpu,
    id="zeropp: {scheme} {links} {tokens_per_gpu}", quantity="TFLOPs/GPU (recomputation counted)",
    size="18B", scale="{links}",
    note="sequence 1024, full recomputation, plain attention with dropout: ours; tokens per GPU as stated",
)  # fmt: skip
