"""Attention and its gradients against the formulas in float64, for odd lengths, groups, strides and masks."""

import pytest
import torch
from common import ONLY_INTERPRETED, ONLY_ON_GPU

from lowband.errors import UserError
from lowband.kernels import flash_attention
from lowband.kernels import flash_attention_triton as fast
from lowband.kernels.flash_attention import (
    attention,
    attention_with_logsumexp,
    check_dtype,
    gradients,
    inputs,
    reference,
    reference_gradients,
)

NAN = float("nan")
# Largest error over the reference's largest value: a few roundings of the dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = {  # B, N, G, Tq, Tk, D
    "one query": (1, 1, 1, 1, 1, 32),
    "one block": (1, 2, 2, 64, 32, 32),
    "ragged": (2, 1, 1, 97, 97, 64),
    "even": (1, 1, 1, 128, 128, 64),
    "grouped": (1, 4, 2, 70, 70, 32),
    "one key head": (2, 4, 1, 33, 33, 32),
    "more keys": (1, 2, 1, 37, 150, 32),
    "more queries": (1, 2, 2, 150, 37, 32),
    "wide": (1, 1, 1, 90, 90, 128),
    "widest": (1, 1, 1, 65, 65, 256),
}
# fp32 is for the interpreter: on a GPU its tiles compile for a minute each, or do not fit the shared memory.
CASES = [
    *(
        pytest.param(name, torch.float32, marks=ONLY_INTERPRETED if shape[-1] > 32 else ())
        for name, shape in SHAPES.items()
    ),
    *((name, torch.float16) for name in ("ragged", "grouped", "wide")),
    *(pytest.param(name, torch.bfloat16, marks=ONLY_ON_GPU) for name in SHAPES),
]


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.isfinite().all()
    error = (found.cpu().double() - expected).abs().max() / expected.abs().max().clamp_min(0.1)
    assert error <= TOLERANCE[dtype], f"{error:.2e}"


def expected_of(tensors: tuple[torch.Tensor, ...], is_causal: bool, scale: float) -> list[torch.Tensor]:
    """Output and the gradients of q, k, v, float64 on the CPU, from the values that the kernel gets."""
    q, k, v, dout = (x.detach().cpu().double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = reference(*leaves, is_causal, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_forward_and_gradients(device, name: str, is_causal: bool, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    tensors = inputs(shape, dtype, device)
    scale = shape[-1] ** -0.5
    expected = expected_of(tensors, is_causal, scale)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = attention(*leaves, is_causal)
    close(out, expected[0], dtype)
    for found, wanted in zip(torch.autograd.grad(out, leaves, tensors[3]), expected[1:], strict=True):
        assert found.dtype == dtype
        close(found, wanted, dtype)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_value_is_written(device, is_causal: bool) -> None:
    """Outputs begin as NaN; nothing is written beyond them."""
    q, k, v, dout = inputs((2, 4, 2, 97, 131, 32), torch.float32, device)

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*x.shape[:2], x.shape[2] + 40, x.shape[3]), NAN, device=device)
        return wide[:, :, : x.shape[2]]

    out, dq, dk, dv = (poisoned(x) for x in (q, q, k, v))
    logsumexp = torch.full(q.shape[:3], NAN, device=device)
    fast.launch_forward(q, k, v, out, logsumexp, is_causal, 0.3)
    fast.launch_backward(dout, q, k, v, out, logsumexp, None, dq, dk, dv, is_causal, 0.3)
    expected = expected_of((q, k, v, dout), is_causal, 0.3)
    for found, wanted in zip((out, dq, dk, dv), expected, strict=True):
        close(found, wanted, torch.float32)
        whole = found.as_strided((*found.shape[:2], found.shape[2] + 40, found.shape[3]), found.stride())
        assert whole[:, :, found.shape[2] :].isnan().all()
    _, wanted_log = reference(q.cpu().double(), k.cpu().double(), v.cpu().double(), is_causal, 0.3)
    close(logsumexp, wanted_log, torch.float32)


def test_a_query_without_keys_gives_zeros(device) -> None:
    q, k, v, dout = inputs((1, 1, 1, 100, 60, 32), torch.float32, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, is_causal=True)
    assert (out[:, :, :40] == 0).all()
    assert (out[:, :, 40:] != 0).any(dim=-1).all()
    dq, _, _ = torch.autograd.grad(out, leaves, dout)
    assert (dq[:, :, :40] == 0).all()


@pytest.mark.parametrize("size", [1e-3, 30.0, 300.0])
def test_large_scores_do_not_overflow(device, size: float) -> None:
    """Scores of either sign far beyond what exp holds: ragged keys stay masked where a logsumexp is -9000."""
    q, k, v, dout = inputs((1, 1, 1, 40, 50, 32), torch.float32, device)
    q = (q.abs() * size).requires_grad_()
    k = (-k.abs() * 1.0).requires_grad_()
    v.requires_grad_()
    expected = expected_of((q, k, v, dout), False, 32**-0.5)
    out = attention(q, k, v)
    assert out.isfinite().all()
    torch.testing.assert_close(out.cpu().double(), expected[0], rtol=2e-3, atol=2e-3)
    for found, wanted in zip(torch.autograd.grad(out, (q, k, v), dout), expected[1:], strict=True):
        limit = 2e-3 * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=2e-3, atol=limit)


def test_strides_as_the_model_has_them(device) -> None:
    """q, k, v as views of one projection [B, T, 3, N, D], and a gradient that comes transposed."""
    B, T, N, D = 2, 50, 3, 32
    generator = torch.Generator().manual_seed(5)
    packed = torch.randn(B, T, 3, N, D, generator=generator).to(device).requires_grad_()
    dout = torch.randn(B, T, N, D, generator=generator).to(device).transpose(1, 2)
    q, k, v = packed.permute(0, 2, 3, 1, 4).unbind(1)
    out = attention(q, k, v, is_causal=True)
    expected = expected_of((q, k, v, dout), True, D**-0.5)
    close(out, expected[0], torch.float32)
    (gradient,) = torch.autograd.grad(out, packed, dout)
    for i, wanted in enumerate(expected[1:]):
        close(gradient[:, :, i].transpose(1, 2), wanted, torch.float32)


def test_runs_twice_give_the_same_bits(device) -> None:
    tensors = inputs((1, 4, 2, 90, 90, 64), torch.float16, device)
    results = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = attention(*leaves, is_causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, tensors[3])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp over all keys, from those over parts of them."""
    outs, logs = (torch.stack(each) for each in zip(*parts, strict=True))
    logsumexp = logs.logsumexp(0)
    return (outs * (logs - logsumexp).exp().unsqueeze(-1)).sum(0), logsumexp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_parts_of_the_keys_are_merged(device, dtype: torch.dtype) -> None:
    """By torch's autograd through both outputs, and by gradients that take the merged ones from outside."""
    tensors = inputs((2, 4, 2, 70, 110, 32), dtype, device)
    expected = expected_of(tensors, False, 0.3)
    *leaves, dout = [x.requires_grad_() for x in tensors[:3]] + [tensors[3]]
    parts = [leaves[0], *(x.split([32, 5, 73], dim=2) for x in leaves[1:])]
    blocks = list(zip(*parts[1:], strict=True))
    out, logsumexp = merged([attention_with_logsumexp(parts[0], k, v, False, 0.3) for k, v in blocks])
    q, k, v = (x.detach().cpu().double() for x in leaves)
    close(logsumexp.detach(), reference(q, k, v, False, 0.3)[1], dtype)
    found = [out.detach(), *torch.autograd.grad(out.to(dtype), leaves, dout)]
    for mine, wanted in zip(found, expected, strict=True):
        close(mine, wanted, dtype)

    # The merged ones are views of larger tensors, as a ring has them.
    outside = torch.cat([out.detach().to(dtype)] * 2, dim=2)[:, :, 70:]
    log = torch.cat([logsumexp.detach()] * 2, dim=2)[:, :, 70:]
    with torch.no_grad():
        found = [gradients(dout, parts[0], k, v, outside, log, False, 0.3) for k, v in blocks]
    dq, dk, dv = zip(*found, strict=True)
    joined = sum(x.float() for x in dq), torch.cat(dk, dim=2), torch.cat(dv, dim=2)
    for mine, wanted in zip(joined, expected[1:], strict=True):
        close(mine, wanted, dtype)


def test_the_gradient_of_the_logsumexp(device) -> None:
    """Beside the output's and alone. That of a query without keys, whose logsumexp is -inf, goes nowhere."""
    q, k, v, dout = inputs((1, 4, 2, 100, 60, 32), torch.float32, device)
    dlog = dout.sum(-1)
    dlog[:, :, :40] = NAN  # as torch.logaddexp has it
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, log = attention_with_logsumexp(*leaves, is_causal=True)
    both = torch.autograd.grad((out, log), leaves, (dout, dlog), retain_graph=True)
    alone = torch.autograd.grad(log, leaves, dlog)
    assert (both[0][:, :, :40] == 0).all()
    assert (alone[2] == 0).all()

    dout, dlog, q = (x.detach()[:, :, 40:] for x in (dout, dlog, q))
    leaves = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    given = [x.cpu().double() for x in (dout, dlog)]
    out, log = reference(*leaves, True, 32**-0.5)
    wanted = [
        *torch.autograd.grad((out, log), leaves, given, retain_graph=True),
        *torch.autograd.grad(log, leaves[:2], given[1]),
    ]
    found = [both[0][:, :, 40:], *both[1:], alone[0][:, :, 40:], alone[1]]
    for mine, exact in zip(found, wanted, strict=True):
        close(mine, exact, torch.float32)


def test_the_references_gradients_are_those_of_autograd() -> None:
    """With grouped heads, both masks, and a query that sees no key."""
    q, k, v, dout = (x.double() for x in inputs((2, 4, 2, 20, 15, 32), torch.float32, torch.device("cpu")))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.rand(2, 20, 15, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[:, 11] = False
    for is_causal, seen in ((False, None), (True, None), (True, mask)):
        out, logsumexp = reference(*leaves, is_causal, 0.3, seen)
        wanted = torch.autograd.grad(out, leaves, dout)
        given = [x.detach() for x in (dout, *leaves, out, logsumexp)]
        for mine, exact in zip(reference_gradients(*given, is_causal, 0.3, seen), wanted, strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


@ONLY_INTERPRETED
def test_bf16_by_upcast(device) -> None:
    tensors = inputs((1, 2, 1, 40, 40, 32), torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = attention(*leaves, is_causal=True)
    expected = expected_of(tensors, True, 32**-0.5)
    assert out.dtype == torch.bfloat16
    close(out, expected[0], torch.bfloat16)
    for found, wanted in zip(torch.autograd.grad(out, leaves, tensors[3]), expected[1:], strict=True):
        close(found, wanted, torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 1, 8, 8, 84), "head size 84 .*multiples of 8 up to 256"),
        ((1, 1, 1, 8, 8, 264), "head size 264"),
        ((1, 3, 2, 8, 8, 32), "3 query heads are not a multiple of 2"),
        ((1, 2, 0, 8, 8, 32), "2 query heads are not a multiple of 0"),
    ],
)
def test_what_is_not_served_is_refused(device, shape, message: str) -> None:
    q, k, v, _ = inputs(shape, torch.float32, device)
    with pytest.raises(UserError, match=message):
        attention(q, k, v)


def test_other_and_mixed_dtypes_are_refused(device) -> None:
    q, k, v, _ = inputs((1, 1, 1, 8, 8, 32), torch.float32, device)
    for given in ((q, k, v.half()), (q.half(), k, v), (q.double(), k.double(), v.double())):
        with pytest.raises(UserError, match="fp16, bf16 or fp32, one device"):
            attention(*given)


def test_gradients_of_what_is_not_the_querys_are_refused(device) -> None:
    q, k, v, dout = inputs((1, 2, 1, 8, 9, 32), torch.float16, device)
    out, log = attention_with_logsumexp(q, k, v)
    for given in (
        (dout[:, :, 1:], out, log),
        (dout.float(), out, log),
        (dout, out, log[:, :1]),
        (dout, k, log),
    ):
        with pytest.raises(UserError, match=r"dout, out, logsumexp of .* \[1, 2, 8\] torch.float32"):
            gradients(given[0], q, k, v, *given[1:])


def test_positions_too_far_apart_for_offsets_of_32_bits_are_copied(device, monkeypatch) -> None:
    q, k, v, _ = inputs((2, 1, 1, 40, 50, 32), torch.float32, device)
    apart = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    near = attention(*apart)
    monkeypatch.setattr(flash_attention, "MOST_STRIDE", apart[0].stride(2) - 1)
    assert attention(*apart).equal(near) and attention(*apart).stride(2) < near.stride(2)


def test_wide_heads_of_fp32_are_refused_on_a_gpu() -> None:
    gpu = torch.device("cuda", 0)
    with pytest.raises(UserError, match="fp32 with head size 128 on a GPU"):
        check_dtype(torch.float32, 128, gpu)
    check_dtype(torch.float32, 64, gpu)
    check_dtype(torch.bfloat16, 128, gpu)
    check_dtype(torch.float32, 128, torch.device("cpu"))


@pytest.mark.parametrize("strides", ["positions apart", "values apart"])
def test_the_operators_are_what_torch_asks_of_them(device, strides: str) -> None:
    """Their schemas, their fakes' strides and any sizes, and their gradients under torch's compiler."""
    first, second = (1, 2) if strides == "positions apart" else (2, 3)
    q, k, v = (
        x.transpose(first, second).contiguous().transpose(first, second).requires_grad_()
        for x in inputs((1, 2, 1, 5, 7, 32), torch.float16, device)[:3]
    )
    torch.library.opcheck(torch.ops.lowband.flash_attention, (q, k, v, True, 0.2))
    out, logsumexp = attention_with_logsumexp(q, k, v, True, 0.2)
    given = [x.detach() for x in (out, q, k, v, out, logsumexp, logsumexp)]
    torch.library.opcheck(torch.ops.lowband.flash_attention_backward, (*given[:6], None, True, 0.2))
    torch.library.opcheck(torch.ops.lowband.flash_attention_backward, (*given, True, 0.2))


def test_torchs_compiler_does_not_break_the_graph(device) -> None:
    """One graph, forward and backward, with the values of the kernels themselves."""
    q, k, v, dout = inputs((1, 2, 2, 50, 50, 32), torch.float16, device)
    results = []
    for call in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = call(*leaves, is_causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("group", [1, 2])
def test_the_reference_is_torchs(group: int) -> None:
    """torch's causal mask counts from the first of both; with as many queries as keys that is the same."""
    q, k, v, _ = (
        x.double() for x in inputs((2, 4, 4 // group, 30, 30, 32), torch.float32, torch.device("cpu"))
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
    torch.testing.assert_close(reference(q, k, v, True, 32**-0.5)[0], expected)
