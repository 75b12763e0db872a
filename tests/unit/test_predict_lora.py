"""Adapters of low rank, predicted: states and time by hand, what is said of them, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from lowband.cost.lora import MATRICES, Lora
from lowband.predict.footprint import memory_items
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by
from tests.refused import refusal

ALL = Lora(16, MATRICES)
MODEL = CONFIG.model("llama-3-8b")
WHOLE = Workload(
    *setting(CONFIG, "dgx-h100", None), MODEL, CONFIG.scheme("zero3"), 8, 1, 4096, recompute="none"
)
JOB = replace(WHOLE, lora=ALL)
ADAPTERS = 41_943_040  # trainable parameters that PEFT prints for it


def test_the_number_of_parameters_is_the_known_one() -> None:
    assert MODEL.layers * ALL.parameters(MODEL) == ADAPTERS
    assert MODEL.layers * Lora(16).parameters(MODEL) == 6_815_744


@pytest.mark.parametrize(
    ("scheme", "weights", "optim"), [("ddp", 1, 1), ("zero1", 1, 8), ("zero2", 1, 8), ("zero3", 8, 8)]
)
def test_states_by_hand(scheme: str, weights: int, optim: int) -> None:
    items = memory_items(replace(JOB, scheme=CONFIG.scheme(scheme)))
    copy = 0 if weights == optim == 8 else 2 * ADAPTERS  # sharded alike, masters are the weights
    assert items["weights"] == pytest.approx(2 * MODEL.parameters / weights + copy, rel=1e-6)
    assert items["optim"] == pytest.approx(12 * ADAPTERS / optim, rel=1e-6)
    assert items["grads"] == pytest.approx(4 * ADAPTERS / optim, rel=1e-6)


def test_only_adapters_are_updated_and_reduced() -> None:
    whole, found = step_time(WHOLE), step_time(JOB)
    part = ADAPTERS / MODEL.parameters
    assert float(found.items["optimizer"]) == pytest.approx(float(whole.items["optimizer"]) * part, rel=1e-3)
    assert float(found.lane["forward_gather"]) == pytest.approx(
        float(whole.lane["forward_gather"]) * (1 + part), rel=1e-3
    )
    assert float(found.lane["grad_reduce"]) < float(whole.lane["grad_reduce"]) / 20


def test_the_backward_of_a_frozen_matrix_is_one_product() -> None:
    """And that of an adapter two of its forward's."""
    whole, found = step_time(WHOLE).items, step_time(JOB).items
    products = 2 * 4096 * (MODEL.parameters - MODEL.vocab * MODEL.hidden)  # norms, too, which are no products
    device = WHOLE.machine.device
    assert device.matmul_efficiency is not None
    less = products / (1e12 * device.peak_tflops["bf16"] * device.matmul_efficiency.value)
    adapters = float(found["forward"] - whole["forward"])
    assert adapters > 0
    assert float(found["backward"] - whole["backward"]) == pytest.approx(2 * adapters - less, rel=1e-3)


def test_rates_count_what_is_computed() -> None:
    """Two of three products with weights, and of adapters all: 4 N + 2 of 6 each, attention as it is."""
    whole, found = predict(WHOLE), predict(JOB)
    per_token = [float(each.tflops_per_gpu / each.tokens_per_s_per_gpu) * 1e12 for each in (whole, found)]
    weights = MODEL.parameters - MODEL.vocab * MODEL.hidden
    assert per_token[0] - per_token[1] == pytest.approx(2 * weights - 6 * ADAPTERS, rel=1e-6)
    again = predict(replace(JOB, recompute="full"))
    assert again.hfu_tflops_per_gpu > again.tflops_per_gpu


@pytest.mark.parametrize("scheme", ["zeropp", "hier3", "ddp", "zero3"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_scheme_takes_less_memory(scheme: str, accumulation: int) -> None:
    machine, stack = setting(CONFIG, "frontier", None)
    placed = CONFIG.scheme(scheme).on(list(machine.sizes))
    job = Workload(machine, stack, MODEL, placed, 64, 1, 2048, accumulation, axes=Ways())
    whole, found = (predict(each) for each in (job, replace(job, lora=Lora(8))))
    assert found.peak_memory_bytes < whole.peak_memory_bytes
    assert found.step_time_s < whole.step_time_s


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"axes": Ways(tensor=2)}, "ranks along tensor"),
        ({"recompute": "op"}, "recomputation by operator"),
        ({"lora": Lora(4, ["wq"])}, "no matrix 'wq' (allowed: q, k, v, out, gate, up, down)"),
        ({"model": CONFIG.model("mixtral-8x7b")}, "experts"),
    ],
)
def test_what_is_not_predicted_is_refused(changed: dict[str, Any], words: str) -> None:
    assert words in refusal(replace, JOB, **changed)


def test_the_commands_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "--cluster",
        "dgx-h100",
        "--model",
        "llama-3-8b",
        "--gpus",
        "8",
        "--seq",
        "4096",
        "--root",
        str(ROOT),
    ]
    said = "adapters of rank 16 on q v: 6,815,744 parameters, all else is frozen"
    assert said in printed_by(capsys, "predict", *asked, "--scheme", "zero3", "--lora-rank", "16")
    out = printed_by(capsys, "plan", *asked, "--micro-batch", "1", "--lora-rank", "16")
    assert said in out
    assert "megatron-lm" not in out
    for wrong, words in (
        (["--lora-on", "q"], "--lora-on is for adapters of a --lora-rank"),
        (["--lora-rank", "4", "--write", "mine"], "--lora-rank is without --write"),
        (["--lora-rank", "4", "--tp", "2"], "adapters with ranks along tensor"),
    ):
        assert words in printed_by(capsys, "plan", *asked, *wrong, code=2)
