"""Ways of a step that change values by rounding alone: compiled blocks, and the loss in pieces."""

import weakref
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch._dynamo.backends.debugging  # once, before the ranks are forked
import torch._functorch.aot_autograd
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowband.cost.activations import loss_bytes
from lowband.model.gpt import GPT
from lowband.model.loss import IGNORED, linear_cross_entropy
from lowband.predict.footprint import memory_items
from lowband.predict.workload import workload_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.run import RunSpec
from lowband.trainers.prepare import prepare
from tests.checkout import CONFIG

SMOKE = next(spec for spec in CONFIG.runs(["smoke"]) if spec.scheme.name == "zero3")
LIMIT_S = 600  # the first use of the compiler takes long on a busy machine


def spec_with(**options: Any) -> RunSpec:
    return RunSpec.model_validate({**SMOKE.model_dump(), "ranks": 2, **options})


# ---- the loss

TOKENS, HIDDEN, VOCAB = 37, 24, 50


def of_loss(dtype: torch.dtype, pieces: int | None, grad: float) -> list[torch.Tensor]:
    """Loss and gradients of x and weight; by torch's cross-entropy for None."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[3:9] = IGNORED
    if pieces is None:
        wide = torch.promote_types(dtype, torch.float32)
        loss = torch.nn.functional.cross_entropy((x @ weight.T).to(wide), targets)
    else:
        loss = linear_cross_entropy(x, weight, targets, pieces)
    (loss * grad).backward()
    return [loss.detach(), x.grad, weight.grad]


def losses() -> dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for pieces in (1, 2, 5, TOKENS, 2 * TOKENS):
            for grad in (1.0, 0.3):
                found[dtype, pieces, grad] = of_loss(dtype, pieces, grad), of_loss(dtype, None, grad)
    return found


def test_the_loss_in_pieces_is_the_whole_one() -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}
    for (dtype, *_), (mine, whole) in on_ranks(1, losses)[0].items():
        for a, b in zip(mine, whole, strict=True):
            assert a.dtype == b.dtype
            assert (a - b).abs().max() <= tolerance[dtype] * b.abs().max()


@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_the_loss_in_pieces_under_autocast_and_of_no_tokens(tokens: int) -> None:
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight, targets = torch.randn(VOCAB, HIDDEN, requires_grad=True), torch.randint(VOCAB, (tokens,))
    found = []
    for pieces in (None, 3):
        with torch.autocast("cpu", torch.bfloat16):
            if pieces is None:
                loss = torch.nn.functional.cross_entropy(x @ weight.T, targets)
            else:
                loss = linear_cross_entropy(x, weight, targets, pieces)
        found.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
    for whole, mine in zip(*found, strict=True):
        assert mine.dtype == whole.dtype == torch.float32
        torch.testing.assert_close(mine, whole, rtol=2**-6, atol=2**-9, equal_nan=True)


class Held(TorchDispatchMode):
    """The most bytes of storages that were made inside and lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known | given:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def held_by_pieces() -> dict[int, int]:
    x = torch.randn(1024, 16, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(2000, 16, dtype=torch.bfloat16).requires_grad_()
    found = {}
    for pieces in (4, 16):
        with Held() as held:
            linear_cross_entropy(x, weight, torch.randint(2000, (1024,)), pieces).backward()
        found[pieces] = held.peak
    return found


def test_what_pieces_hold_is_the_closed_form() -> None:
    model = CONFIG.model("gpt-200k").model_copy(update={"vocab": 2000, "hidden": 16})
    for pieces, peak in on_ranks(1, held_by_pieces)[0].items():
        closed = loss_bytes(model, 1024, pieces)
        assert 0.6 * closed <= peak <= closed, (pieces, peak, closed)
    whole, pieces = (float(memory_items(workload_of(spec_with(loss_chunks=n)))["logits"]) for n in (1, 8))
    assert pieces < whole


# ---- runs


def trained(spec: RunSpec) -> list[float]:
    trainer = prepare(spec, torch.device("cpu"))
    found = []
    for step in range(2):
        generator = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
        tokens = torch.randint(spec.model.vocab, (2, 17), generator=generator)
        batch = tokens[:, :-1], tokens[:, 1:]
        found += map(float, trainer.accumulate(2, lambda _, batch=batch: batch))
        found.append(trainer.step(spec.grad_clip))
    return found


def train_all(specs: list[RunSpec]) -> list[list[float]]:
    GPT.compile_parts = partialmethod(GPT.compile_parts, backend="aot_eager")  # no C++ compiler
    return [trained(spec) for spec in specs]


WAYS: list[dict[str, Any]] = [
    {}, {"compile": True, "loss_chunks": 4, "recompute": "full"},
    {"loss_chunks": 3, "order": "breadth", "engine": "lowband"},
    {"compile": True, "loss_chunks": 2, "fused_adamw": True, "engine": "lowband"},
]  # fmt: skip
ALONE: list[dict[str, Any]] = [{"compile": True}, {"loss_chunks": 4}]  # with --wide


@pytest.mark.parametrize("engine", ["lowband", pytest.param("fsdp2", marks=pytest.mark.wide)])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.wide)])
def test_losses_and_norms_of_runs(engine: str, dtype: str, request: pytest.FixtureRequest) -> None:
    ways = [way for way in WAYS if way.get("engine", engine) == engine]
    ways += ALONE if request.config.getoption("--wide") else []
    specs = [
        spec_with(**{"engine": engine, "compute_dtype": dtype, "reduce_dtype": dtype, **way}) for way in ways
    ]
    plain, *others = on_ranks(2, train_all, specs, time_limit_s=LIMIT_S)[0]
    for way, found in zip(ways[1:], others, strict=True):
        assert found == pytest.approx(plain, rel=1e-5 if dtype == "fp32" else 2e-2), way


def test_defaults_leave_the_spec_as_it_was() -> None:
    assert not {"compile", "loss_chunks", "fused_adamw"} & set(SMOKE.model_dump())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compile": True, "engine": "ddp"}, "compile: engine ddp"),
        ({"loss_chunks": 2, "device": "fake"}, "loss_chunks: engine lowband, device fake"),
        (
            {"loss_chunks": 2, "tensor": 2},
            "loss_chunks: engine lowband, device auto (allowed: engine lowband or",
        ),
        ({"fused_adamw": True, "engine": "fsdp2"}, "fused_adamw: engine fsdp2"),
        ({"loss_chunks": 10**6}, "loss_chunks: 1000000 pieces"),
        (
            {"compile": True, "model": CONFIG.model("gpt-200k-experts").model_dump()},
            "compile: each token chooses",
        ),
        (
            {"fused_adamw": True, "scheme": CONFIG.scheme("local-sgd").model_dump(), "steps": 16},
            "fused_adamw: scheme",
        ),
    ],
)
def test_what_they_cannot_go_with(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        spec_with(**options)
    assert told in str(refused.value)
