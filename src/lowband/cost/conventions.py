"""FLOPs per token as other projects' logs and papers count them, to interpret their TFLOPS.

Letters: L layers, H hidden, T sequence length, V vocabulary.
"""

from lowband.spec.model import ModelSpec


def megatron_flops_per_token(model: ModelSpec, seq_len: int, *, recompute: bool) -> float:
    """24 c L H^2 (1 + T / 6H + V / 16LH), c = 4 with the forward's recomputation, else 3.

    Source: equation 3 of Narayanan et al. (arXiv 2104.04473), which has c = 4. Megatron-LM's logs take c = 3
    since 2023; Megatron-DeepSpeed's take 4 where activations are checkpointed, else 3.
    """
    factor = 4 if recompute else 3
    H, L = model.hidden, model.layers
    return 24 * factor * L * H**2 * (1 + seq_len / (6 * H) + model.vocab / (16 * L * H))


def torchtitan_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """6 (N - input embedding) + 12 L H T: `num_flops_per_token` of torchtitan's models.

    It subtracts every embedding, even one that is also the output layer.
    """
    embeddings = model.vocab * model.hidden
    if model.positions == "learned":
        embeddings += model.seq_len * model.hidden
    return 6 * (model.parameters - embeddings) + 12 * model.layers * model.hidden * seq_len


def flash_attention_flops_per_token(model: ModelSpec, seq_len: int) -> int:
    """6 N + 12 L H T, counting all weights: the training runs of arXiv 2307.08691, section 4.2."""
    return 6 * model.parameters + 12 * model.layers * model.hidden * seq_len


def flops_per_token(form: str, model: ModelSpec, seq_len: int, *, recompute: bool) -> float | None:
    """FLOPs per token by which logs of this format (importers) print TFLOPS; None if they print none."""
    if form == "torchtitan":
        return torchtitan_flops_per_token(model, seq_len)
    if form == "megatron-lm":
        return megatron_flops_per_token(model, seq_len, recompute=False)
    if form == "megatron-deepspeed":
        return megatron_flops_per_token(model, seq_len, recompute=recompute)
    return None
