"""Attention with spans, a softcap and heads of any width, against the formulas in float64 and torch's own."""

from typing import NamedTuple

import pytest
import torch
from common import ONLY_INTERPRETED, ONLY_ON_GPU
from flash_attention import NAN, close
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lowband.errors import UserError
from lowband.kernels import flash_attention_triton as fast
from lowband.kernels.flash_attention import (
    attention,
    attention_with_logsumexp,
    gradients,
    inputs,
    reference,
    reference_gradients,
)
from lowband.kernels.spans import Spans, bounded, spans

SCALE = 0.3
FOUR = (50, 0, 7, 40)  # documents of a sequence of 97: one is empty, one shorter than any tile


class Case(NamedTuple):
    """shape: B, N, G, Tq, Tk, D"""

    shape: tuple[int, int, int, int, int, int]
    seen: Spans | str
    softcap: float | None = None


CASES = {
    "documents": Case((2, 2, 1, 97, 97, 32), spans([FOUR, (97, 0, 0, 0)])),
    "documents both ways": Case((1, 2, 2, 97, 131, 32), spans([FOUR], [(10, 100, 7, 14)], is_causal=False)),
    "window": Case((2, 2, 2, 150, 150, 32), spans([[150]], window=(20, 0))),
    "window both ways": Case((1, 1, 1, 70, 110, 32), spans([[70]], [[110]], is_causal=False, window=(9, 30))),
    "window in documents, capped": Case((1, 4, 2, 97, 97, 48), spans([FOUR], window=(33, 0)), 2.0),
    "queries without keys": Case((1, 1, 1, 150, 40, 32), spans([[100, 50]], [[10, 30]])),
    "a prefix": Case(
        (1, 2, 1, 80, 80, 32),
        bounded(torch.zeros(1, 80), torch.arange(1, 81).clamp(min=33).unsqueeze(0), 80),
    ),
    "capped": Case((1, 2, 1, 70, 90, 32), "full", 5.0),
    "capped, causal": Case((1, 2, 1, 70, 90, 64), "causal", 1.0),
    "heads of 8": Case((1, 2, 1, 70, 90, 8), "causal"),
    "heads of 96": Case((1, 2, 2, 70, 90, 96), "full"),
    "heads of 192": Case((1, 1, 1, 65, 65, 192), "causal"),
}
ALL_AT_ONCE = "window in documents, capped"
RUNS = [
    *(pytest.param(name, torch.float32, marks=ONLY_INTERPRETED) for name in CASES),
    *(pytest.param(name, torch.float16, marks=() if name == ALL_AT_ONCE else ONLY_ON_GPU) for name in CASES),
]


def expected_of(case: Case, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Output, logsumexp and the gradients of q, k, v: float64, by torch's autograd."""
    q, k, v, dout = (x.detach().cpu().double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = case.seen.mask() if isinstance(case.seen, Spans) else None
    out, logsumexp = reference(*leaves, case.seen == "causal", SCALE, mask, case.softcap)
    return [out.detach(), logsumexp.detach(), *torch.autograd.grad(out, leaves, dout)]


def options(case: Case, device: torch.device) -> dict[str, object]:
    seen = case.seen.to(device) if isinstance(case.seen, Spans) else None
    return {"is_causal": case.seen == "causal", "scale": SCALE, "spans": seen, "softcap": case.softcap}


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
def test_forward_and_gradients(device, name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    tensors = inputs(case.shape, dtype, device)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out, logsumexp = attention_with_logsumexp(*leaves, **options(case, device))
    expected, log, *wanted = expected_of(case, tensors)
    close(out.detach(), expected, dtype)
    assert torch.equal(logsumexp.isinf().cpu(), log.isinf())
    close(logsumexp.detach().nan_to_num(neginf=0), log.nan_to_num(neginf=0), dtype)
    for found, exact in zip(torch.autograd.grad(out, leaves, tensors[3]), wanted, strict=True):
        assert found.dtype == dtype
        close(found, exact, dtype)


def test_spans_of_a_causal_mask_give_its_bits(device) -> None:
    """In dk and dv blocks of queries begin at other places, so sums have another order."""
    q, k, v, dout = inputs((1, 4, 2, 97, 131, 64), torch.float16, device)
    results = []
    for seen in ({"is_causal": True}, {"spans": spans([[97]], [[131]]).to(device)}):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, **seen)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for name, a, b in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert torch.equal(a, b) or (name in ("dk", "dv") and (a - b).abs().max() < 4e-3 * b.abs().max())


def test_other_documents_are_not_read(device) -> None:
    """Not even whole blocks: the keys of a document of several tiles are NaN for the others."""
    seen = spans([[128, 128]], is_causal=False)
    q, k, v, dout = inputs((1, 1, 1, 256, 256, 32), torch.float32, device)
    expected = expected_of(Case((1, 1, 1, 256, 256, 32), seen), (q, k, v, dout))
    for x in (k, v, q, dout):
        x[:, :, :128] = NAN
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, scale=SCALE, spans=seen.to(device))
    close(out.detach()[:, :, 128:], expected[0][:, :, 128:], torch.float32)
    for found, exact in zip(torch.autograd.grad(out, leaves, dout), expected[2:], strict=True):
        close(found[:, :, 128:], exact[:, :, 128:], torch.float32)


def test_nothing_beyond_a_head_is_read_or_written(device) -> None:
    """Heads of 40 in rows of 64, whose rest is NaN before and after."""

    def within(x: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
        wide = torch.full((*x.shape[:-1], 64), NAN, device=device)
        if value is not None:
            wide[..., :40] = value
        return wide[..., :40]

    case = Case((1, 2, 1, 70, 90, 40), "causal")
    tensors = inputs(case.shape, torch.float32, device)
    q, k, v, dout = (within(x, x) for x in tensors)
    out, dq, dk, dv = (within(x) for x in (q, q, k, v))
    logsumexp = torch.full(q.shape[:3], NAN, device=device)
    fast.launch_forward(q, k, v, out, logsumexp, True, SCALE)
    fast.launch_backward(dout, q, k, v, out, logsumexp, None, dq, dk, dv, True, SCALE)
    expected = expected_of(case, tensors)
    for found, exact in zip((out, dq, dk, dv), (expected[0], *expected[2:]), strict=True):
        close(found, exact, torch.float32)
        rest = found.as_strided((*found.shape[:-1], 24), found.stride(), 40)
        assert rest.isnan().all()


def test_gradients_from_outside(device) -> None:
    """As a ring has them: `gradients` takes the same options as the forward."""
    case = CASES[ALL_AT_ONCE]
    q, k, v, dout = inputs(case.shape, torch.float16, device)
    given = options(case, device)
    out, logsumexp = attention_with_logsumexp(q, k, v, **given)
    for found, exact in zip(
        gradients(dout, q, k, v, out, logsumexp, **given),
        expected_of(case, (q, k, v, dout))[2:],
        strict=True,
    ):
        close(found, exact, torch.float16)


def test_the_references_gradients_are_those_of_autograd() -> None:
    case = CASES["queries without keys"]._replace(softcap=2.0)
    tensors = tuple(x.double() for x in inputs(case.shape, torch.float32, torch.device("cpu")))
    out, logsumexp, *wanted = expected_of(case, tensors)
    q, k, v, dout = tensors
    found = reference_gradients(dout, q, k, v, out, logsumexp, False, SCALE, case.seen.mask(), case.softcap)
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


def test_the_reference_is_torchs_flexible_attention() -> None:
    """A window in documents and a softcap, as score_mod and mask_mod say them."""
    tensors = inputs((1, 2, 2, 97, 97, 32), torch.float32, torch.device("cpu"))
    q, k, v = (x.double() for x in tensors[:3])
    document = torch.arange(4).repeat_interleave(torch.tensor(FOUR))

    def seen(_b, _h, query, key):
        return (document[query] == document[key]) & (key <= query) & (query - key <= 33)

    wanted = flex_attention(
        q, k, v, scale=SCALE, score_mod=lambda score, *_: 2.0 * torch.tanh(score / 2.0),
        block_mask=create_block_mask(seen, 1, 1, 97, 97, device="cpu"),
    )  # fmt: skip
    mask = spans([FOUR], window=(33, 0)).mask()
    torch.testing.assert_close(reference(q, k, v, False, SCALE, mask, 2.0)[0], wanted)


def test_the_operators_are_what_torch_asks_of_them(device) -> None:
    q, k, v = (x.requires_grad_() for x in inputs((1, 2, 1, 9, 9, 24), torch.float16, device)[:3])
    seen = spans([[4, 5]]).to(device)
    torch.library.opcheck(torch.ops.lowband.flash_attention, (q, k, v, False, 0.2, *seen, 3.0))
    out, logsumexp = attention_with_logsumexp(q, k, v, False, 0.2, seen, 3.0)
    given = [x.detach() for x in (out, q, k, v, out, logsumexp)]
    torch.library.opcheck(torch.ops.lowband.flash_attention_backward, (*given, None, False, 0.2, *seen, 3.0))


def test_torchs_compiler_does_not_break_the_graph(device) -> None:
    q, k, v, dout = inputs((1, 2, 2, 50, 50, 32), torch.float16, device)
    seen, results = spans([[20, 30]]).to(device), []
    for call in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = call(*leaves, spans=seen, softcap=3.0)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spans": spans([[9]]), "is_causal": True}, "is_causal beside spans"),
        ({"spans": spans([[8]])}, r"spans of queries \[1, 2, 8\] .*allowed: \[2 or 1, 2, 9\]"),
        ({"spans": spans([[9]], [[8]])}, r"spans of keys \[1, 2, 8\]"),
        ({"spans": spans([[9]] * 3)}, r"spans of queries \[3, 2, 9\]"),
        ({"softcap": 0.0}, "softcap 0.0 is not positive"),
    ],
)
def test_what_is_not_served_is_refused(device, given: dict, message: str) -> None:
    if "spans" in given:
        given = given | {"spans": given["spans"].to(device)}
    q, k, v, _ = inputs((2, 1, 1, 9, 9, 32), torch.float32, device)
    with pytest.raises(UserError, match=message):
        attention(q, k, v, **given)
