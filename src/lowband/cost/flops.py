"""FLOPs of training, one convention per function. Log seconds; derive these.

Letters: N parameters, L layers, H hidden, T sequence length, V vocabulary.
"""

from lowband.spec.model import ModelSpec

MODEL_CONVENTION = (
    "6 (N - position and input embeddings) + 12 L H T per token; no recomputation; "
    "attention not halved for causality"
)


def model_flops_per_token(model: ModelSpec, seq_len: int) -> int:
    """Model FLOPs (for MFU): forward 2, backward 4 per weight and token, plus the two attention products.

    Every weight that multiplies an activation counts; looking up an embedding is no multiplication, but a
    tied embedding counts once, as the output layer. Source: PaLM (arXiv 2204.02311), appendix B.
    """
    lookups = model.vocab * model.hidden * (0 if model.tied_head else 1)
    if model.positions == "learned":
        lookups += model.seq_len * model.hidden
    return 6 * (model.parameters - lookups) + 12 * model.layers * model.hidden * seq_len
