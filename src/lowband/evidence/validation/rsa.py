"""Memory that ring self-attention's paper prints (arXiv 2105.13120, Table 4), by closed forms of activations.

BERT Base on P100, 8 stages of a pipeline, each over 1 to 8 ranks of tensor or of sequence parallelism; values
are fp32. A stage has 2 of the 12 layers at the most. Its batch's activations are all in memory, as a pipeline
of 8 stages with at least 8 micro-batches has them at the first stage. By the counting of Korthikanti et al.
(arXiv 2205.05198, section 4.1) with 4 bytes a value and one for a mask, per token and layer of h, a heads, T
tokens:

    66 h + 9 a T     of these tensor parallelism divides 48 h + 9 a T (what is inside of attention and MLP) by
                     its n ranks, sequence parallelism all: its ranks have T / n tokens of each sequence,
                     whose scores are with all T

States: weights, gradients and Adam's moments, 16 bytes a parameter, of the first stage: its layers, and the
embeddings; tensor parallelism divides the matrices, sequence parallelism nothing. MB: 2^20 bytes, as
Megatron-LM reports them. Nothing is fitted.
"""

from math import prod

import pandas as pd

from lowband.evidence.validation import published_row, reported
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec

REPORTED = "12_rsa.csv"
BERT = ModelSpec(
    name="bert-base", layers=12, hidden=768, heads=12, vocab=30522, seq_len=512, source="arXiv 1810.04805",
)  # fmt: skip
STAGES, LAYERS_OF_A_STAGE = 8, 2
STATE_BYTES = 16
SEQUENCE = "sequence parallelism"


def rsa(config: Config) -> pd.DataFrame:
    """A row per printed memory; off_percent: of what was published."""
    printed = reported(config, REPORTED)
    memory = printed[(printed["metric"] == "max allocated memory") & (printed["value"] != "OOM")]
    rows = []
    for row in memory.itertuples():
        ranks, batch, length = int(row.gpus) // STAGES, int(row.batch), int(row.seq_len)
        predicted = memory_bytes(ranks, batch, length, row.system == SEQUENCE) / 2**20
        setting = f"{row.system}, {ranks} x {STAGES} GPUs, {batch} x {length} tokens"
        rows.append(published_row(row, "memory", "as it is", setting, predicted))
    return pd.DataFrame(rows)


def memory_bytes(ranks: int, batch: int, seq_len: int, is_sequence: bool) -> float:
    """Of one rank of the first stage. ranks: of tensor or sequence parallelism; batch: sequences a step"""
    h, scores = BERT.hidden, 9 * BERT.heads * seq_len
    of_token = (66 * h + scores) / ranks if is_sequence else 18 * h + (48 * h + scores) / ranks
    layer = sum(prod(shape) for shape in BERT.block_shapes().values())
    embeddings = (BERT.vocab + max(seq_len, BERT.seq_len)) * h
    parameters = LAYERS_OF_A_STAGE * layer + embeddings
    divided = 1 if is_sequence else ranks  # norms and positions, a thousandth, are taken as divided, too
    return batch * seq_len * LAYERS_OF_A_STAGE * of_token + STATE_BYTES * parameters / divided
