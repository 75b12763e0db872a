"""arXiv 2306.10209: TFLOPs per GPU of the 18B model on 384 V100 with 1 to 8 InfiniBand links a node in use.

Values are read off the bars' heights. TFLOPs are taken to count recomputation, as Megatron-DeepSpeed prints
them: otherwise the traffic at one link would exceed its bandwidth. All runs have one number of ranks; the
number of links is the scale that a fold leaves out.
"""

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.machine import Machine
from lowband.spec.mesh import WORLD

MODEL, RANKS, SEQ_LEN = "gpt-18b", 384, 1024
NOTE = "sequence 1024, full recomputation, plain attention with dropout: ours; tokens per GPU as stated"


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


def rows(setting: Setting) -> list[PublishedRow]:
    df = setting.reported
    out = []
    for row in df[df["metric"] == "throughput (bar height)"].itertuples():
        cards, batch = int(row.ib_links), int(row.tokens_per_gpu.removesuffix("K"))
        name = str(row.scheme).removesuffix(" baseline")

        def predicted(name: str = name, cards: int = cards, batch: int = batch) -> Num:
            job = Workload(
                with_cards(setting.machine, cards),
                setting.stack,
                setting.model(MODEL),
                setting.scheme({"ZeRO-3": "zero3", "ZeRO++": "zeropp"}[name]),
                RANKS,
                micro_batch=batch,
                seq_len=SEQ_LEN,
                attention="plain",
                dropout=True,
            )
            return speed(job).hfu_tflops_per_gpu

        links = "1 link" if cards == 1 else f"{cards} links"
        id_ = f"zeropp: {name} {links} {batch}K"
        out.append(
            PublishedRow(
                id_, "TFLOPs/GPU (recomputation counted)", float(row.value), predicted, "18B", links, NOTE
            )
        )
    return out
