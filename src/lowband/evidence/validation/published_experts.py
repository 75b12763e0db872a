"""What papers on experts print, predicted: MegaBlocks (arXiv 2211.15841), DeepEP, FSMoE (fsmoe.py).

MegaBlocks trains GPTs with 64 experts, of which a token has one, on 8 A100 of 80 GB, an eighth of the
experts each, with Megatron-LM, plain attention and dropout. Its parameters name the shapes, its FLOPs
sequences of 1,024 tokens. Of a batch of 512 sequences a GPU has 64 at most; micro-batches are powers of two.

DeepEP V1 prints bytes a second over the level that is its bottleneck, for 4,096 tokens of 7,168 values with
8 experts each, merged by node; and what its low-latency kernels take for 128 tokens, each row sent apart.
Tokens go out in fp8 with a scale for 128 values, outputs return in bf16. Links are as printed, the rest is
default.
"""

from fractions import Fraction

import pandas as pd

from lowband.cost.activations import HALF
from lowband.cost.collectives import Network
from lowband.cost.experts import crossings
from lowband.cost.flops import model_flops_per_token
from lowband.evidence.validation import fsmoe, published_row, reported
from lowband.predict.defaults import with_defaults
from lowband.predict.prediction import predict
from lowband.predict.request import job_of
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.machine import Level, Link
from lowband.spec.mesh import WORLD, Levels
from lowband.spec.model import ModelSpec

REPORTED = "14_experts.csv"
SHAPES = {"XS": (6, 512, 8), "Small": (12, 768, 12), "Medium": (24, 1024, 16)}  # layers, hidden, heads
SEQ_LEN, SHARE = 1024, 64  # of a GPU, of 512 sequences
NODE, NVLINK = 8, 160  # GPUs, 10^9 bytes a second
HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
PREFILL_TOKENS, DECODE_TOKENS = 4096, 128  # of a rank, where bandwidth and where latency is published
FP8_ROW = HIDDEN + HIDDEN // 128 * 4
BITS = 8


def published_experts(config: Config) -> pd.DataFrame:
    """A row per published number and prediction of it; off_percent: of what was published."""
    printed = reported(config, REPORTED)
    rows = []
    for row in printed[printed["system"].isin(("MegaBlocks", "MegaBlocks dMoE"))].itertuples():
        model = _gpt(str(row.model))
        if row.metric == "parameters":
            rows.append(published_row(row, "parameters", "as it is", row.model, model.parameters / 1e9))
        elif row.metric == "FLOPs of a sequence":
            flops = SEQ_LEN * int(model_flops_per_token(model, SEQ_LEN))
            rows.append(published_row(row, "FLOPs of a sequence", "as it is", row.model, flops / 1e9))
        elif row.metric == "largest micro-batch":
            rows.append(
                published_row(row, "largest micro-batch", "as it is", row.model, largest(config, model))
            )
    for row in printed[printed["system"] == "DeepEP V1"].itertuples():
        way = str(row.metric).split(",")[0]
        ranks, where = int(row.gpus), f"{row.gpus} GPUs, {way}"
        network = _network(config, float(row.link_gbps) / BITS)
        level = WORLD if "RDMA" in row.note else "node"
        rows.append(
            published_row(
                row, "bandwidth, merged", "as it is", where, bandwidth(network, ranks, way, level) / 1e9
            )
        )
    for row in printed[printed["system"] == "DeepEP V1 low latency"].itertuples():
        way, quantity = str(row.metric).split()
        if quantity == "latency":
            found = 1e6 * latency_s(_network(config, float(row.link_gbps) / BITS), int(row.gpus), way)
            rows.append(published_row(row, "latency, flat", "as it is", f"{row.gpus} GPUs, {way}", found))
    for reading, schedule, found in fsmoe.speedups(printed):
        is_it = (printed["artifact"] == "Table 5") & printed["hardware"].str.startswith("testbed A")
        [row] = printed[is_it & (printed["system"] == schedule)].itertuples()
        rows.append(published_row(row, "mean speedup over Tutel", f"slopes: {reading}", schedule, found))
    return pd.DataFrame(rows)


def _gpt(name: str) -> ModelSpec:
    """By the size in a printed name."""
    layers, hidden, heads = next(shape for size, shape in SHAPES.items() if f"-{size}" in name)
    return ModelSpec(
        name=name, layers=layers, hidden=hidden, heads=heads, vocab=51200, seq_len=SEQ_LEN, experts=64,
        top_k=1, source="arXiv 2211.15841",
    )  # fmt: skip


def largest(config: Config, model: ModelSpec) -> int:
    """The largest power of two of sequences a GPU that fits; 0 if none does."""
    machine, stack = config.machine("dgx-a100"), config.stack_on("megatron-lm", "dgx-a100")
    found = 0
    for sequences in (2**i for i in range(SHARE.bit_length())):
        job = job_of(
            machine, stack, model, config.scheme("ddp"), NODE, sequences, SEQ_LEN, SHARE // sequences,
            "none", Ways(expert=NODE, route="flat"),
            {"attention": "plain", "dropout": True, "reduce_dtype": "fp32"},
        )  # fmt: skip
        found = sequences if predict(job, interval=False).fits else found
    return found


def _network(config: Config, gigabytes_per_s: float) -> Network:
    """DeepEP's nodes, with defaults for what is not printed."""
    levels = tuple(
        Level(name=name, size=size, link=Link(gigabytes_per_s=rate, source="DeepEP, docs/legacy.md"))
        for name, size, rate in (("node", NODE, NVLINK), (WORLD, None, gigabytes_per_s))
    )
    cuda = config.machine("cuda").model_copy(update={"levels": levels})
    machine, stack = with_defaults(cuda, config.given_stack("ours", cuda))
    return Network(machine, stack, shards=False)


def _levels(ranks: int) -> Levels:
    return Levels.fit({"node": NODE}, ranks)


def bandwidth(network: Network, ranks: int, way: str, level: str) -> float:
    """Bytes a second over a level, in the hop that crosses it."""
    of_token = FP8_ROW if way == "dispatch" else HIDDEN * HALF
    found = {one.level: one for one in crossings(_levels(ranks), "merged", EXPERTS, TOP_K)}[level]
    sent = float(found.rows * of_token * PREFILL_TOKENS)
    fixed = network.base_s + float(found.messages) * network.latency_s(level)
    return sent / (fixed + sent / float(network.rate(level)))


def latency_s(network: Network, ranks: int, way: str) -> float:
    """Seconds of one exchange of all pairs' rows."""
    of_token = Fraction(FP8_ROW if way == "dispatch" else HIDDEN * HALF)
    seconds = network.base_s
    for level, rows, _, messages in crossings(_levels(ranks), "flat", EXPERTS, TOP_K):
        sent = float(rows * of_token * DECODE_TOKENS)
        seconds += float(messages) * network.latency_s(level) + sent / float(network.rate(level))
    return seconds
