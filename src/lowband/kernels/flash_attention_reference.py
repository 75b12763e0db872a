"""The formulas of flash_attention.py in plain torch, with the scores in memory, and inputs to try them on."""

import torch


def inputs(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Random q, k, v and a random gradient of the output. shape: B, N, G, Tq, Tk, D."""
    B, N, G, Tq, Tk, D = shape
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(
        torch.randn(size, generator=generator, dtype=torch.float32, device=device).to(dtype)
        for size in ((B, N, Tq, D), (B, G, Tk, D), (B, G, Tk, D), (B, N, Tq, D))
    )


def reference(
    q_BNTD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTD: torch.Tensor,
    is_causal: bool,
    scale: float,
    mask_BTT: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, N, Tq, D] and logsumexp [B, N, Tq] by the formulas, in the inputs' dtype.

    mask_BTT: [B, Tq, Tk] bool, which keys a query may see; default: all
    """
    scores = _scores(q_BNTD, k_BGTD, is_causal, scale, mask_BTT, softcap)
    logsumexp = scores.logsumexp(-1)
    return _weights(scores, logsumexp) @ _repeated(v_BGTD, q_BNTD), logsumexp


def reference_gradients(
    dout_BNTD: torch.Tensor,
    q_BNTD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTD: torch.Tensor,
    out_BNTD: torch.Tensor,
    logsumexp_BNT: torch.Tensor,
    is_causal: bool,
    scale: float,
    mask_BTT: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `gradients` computes, by the formulas, in the inputs' dtype."""
    scores = _scores(q_BNTD, k_BGTD, is_causal, scale, mask_BTT, softcap)
    weights = _weights(scores, logsumexp_BNT)
    delta = (dout_BNTD * out_BNTD).sum(-1, keepdim=True)
    dscores = weights * (dout_BNTD @ _repeated(v_BGTD, q_BNTD).transpose(-1, -2) - delta) * scale
    if softcap is not None:  # tanh' = 1 - tanh^2; a hidden score is -inf, and its weight 0
        dscores = dscores * (1 - (scores.masked_fill(scores.isinf(), 0) / softcap) ** 2)
    dk, dv = dscores.transpose(-1, -2) @ q_BNTD, weights.transpose(-1, -2) @ dout_BNTD
    groups = k_BGTD.shape[1], -1
    return dscores @ _repeated(k_BGTD, q_BNTD), dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    is_causal: bool,
    scale: float,
    mask: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """[B, N, Tq, Tk], -inf where a query does not see a key."""
    scores = scale * q @ _repeated(k, q).transpose(-1, -2)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    Tq, Tk = scores.shape[-2:]
    if is_causal:
        hidden = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).triu(Tk - Tq + 1)
        scores.masked_fill_(hidden, float("-inf"))
    if mask is not None:
        scores.masked_fill_(~mask.unsqueeze(1), float("-inf"))
    return scores


def _weights(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    sees_any = logsumexp.isfinite().unsqueeze(-1)
    return torch.where(sees_any, scores - logsumexp.unsqueeze(-1), float("-inf")).exp()


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values for each head of queries."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
