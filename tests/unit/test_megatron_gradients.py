"""What Megatron-LM and Transformer Engine do with gradients and weights in 8 bits, beside published runs."""

from dataclasses import replace

import pytest

from lowband.cost.compute import Computer, work
from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.predict.footprint import memory_items
from lowband.predict.prediction import predict
from lowband.predict.request import job_of, setting
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec
from tests.checkout import CONFIG

LLAMA = CONFIG.model("llama-3-8b")
NEMOTRON = ModelSpec(
    name="nemotron4-15b", layers=32, hidden=6144, heads=48, kv_heads=8, mlp_hidden=24576, biases=False,
    vocab=256000, seq_len=4096, positions="rotary", tied_head=False, source="NVIDIA/dgxc-benchmarking",
)  # fmt: skip


def job(cluster: str = "dgxc-h100", accumulation: int = 32, **software: object) -> Workload:
    """Llama 3 8B on 8 H100, as NVIDIA's benchmark has it."""
    machine, stack = setting(CONFIG, cluster, "megatron-lm")
    return job_of(
        machine, stack, LLAMA, CONFIG.scheme("zero1"), 8, 1, 8192, accumulation, "none",
        Ways.of_options(cp=2), software,
    )  # fmt: skip


def seconds(job: Workload) -> float:
    return float(predict(job, interval=False).step_time_s)


def peak(job: Workload) -> float:
    return float(predict(job, interval=False).peak_memory_bytes)


def test_gradients_are_summed_in_the_dtype_in_which_they_are_reduced() -> None:
    """With --bf16 Megatron-LM has one buffer of fp32 for both; with --grad-reduce-in-bf16 of bf16."""
    assert job("eos-2024").stack.reduce_dtype == "fp32"
    assert job("dgxc-h100").stack.reduce_dtype == "bf16"
    in_fp32, in_bf16 = (peak(job(reduce_dtype=dtype)) for dtype in ("fp32", "bf16"))
    assert in_fp32 - in_bf16 == pytest.approx(2 * LLAMA.parameters, rel=1e-3)


def test_the_buffer_of_gradients_is_there_with_one_micro_batch_too() -> None:
    once, twice = (memory_items(job(accumulation=count))["grads"] for count in (1, 2))
    assert once == twice == pytest.approx(2 * LLAMA.parameters, rel=1e-3)
    assert peak(job(accumulation=1)) == pytest.approx(peak(job(accumulation=2)))


def test_states_on_the_host_leave_no_more_gradients_on_the_device() -> None:
    for dtype in ("bf16", "fp32"):
        one = job(accumulation=1)
        one = replace(one, stack=one.stack.model_copy(update={"summed_dtype": dtype}))
        whole, part = (
            memory_items(replace(one, beyond=b))["grads"] for b in (None, Beyond("host", share=0.1))
        )
        assert part == pytest.approx(0.9 * whole)


def test_peaks_that_nemo_logged() -> None:
    """In NVIDIA/dgxc-benchmarking of April 2025: bytes of tensors, without the runtime; nothing is fitted."""
    llama = job()
    machine, stack = setting(CONFIG, "dgxc-h100", None)
    nemotron = job_of(
        machine, stack, NEMOTRON, CONFIG.scheme("zero1"), 64, 2, 4096, 4, "none", Ways.of_options(2)
    )  # fmt: skip
    for one, logged in ((llama, 70833405952), (nemotron, 72972500992)):
        assert machine.device.framework_gib is not None
        assert peak(one) - GIB * machine.device.framework_gib.value == pytest.approx(logged, rel=0.03)


def test_gradients_in_fp16_are_as_large_as_in_bf16() -> None:
    of_each = [job(reduce_dtype=dtype) for dtype in ("fp16", "bf16")]
    assert seconds(of_each[0]) == seconds(of_each[1])
    assert peak(of_each[0]) == peak(of_each[1])


def saved(accumulation: int, scheme: str = "zero1", **given: object) -> float:
    """Seconds of a step by casts that are kept."""
    kept = replace(job(accumulation=accumulation, products="fp8"), scheme=CONFIG.scheme(scheme), **given)
    again = replace(kept, stack=kept.stack.model_copy(update={"keeps_casts": False}))
    return seconds(again) - seconds(kept)


def test_weights_in_8_bits_are_cast_once_a_step() -> None:
    """So steps of one micro-batch take as long as if they were cast in each pass, and others less by it."""

    assert saved(1) == 0
    assert saved(32) == pytest.approx(31 * saved(2), rel=1e-6)
    assert saved(2) > 0
    in_16_bits = job()
    assert seconds(in_16_bits) == seconds(
        replace(in_16_bits, stack=in_16_bits.stack.model_copy(update={"keeps_casts": False}))
    )


def test_weights_that_are_gathered_for_each_pass_are_cast_in_each() -> None:
    assert saved(8, "zero2") > 0
    assert saved(8, "zero3") == saved(8, beyond=Beyond(weights="host")) == 0


@pytest.mark.parametrize(("model", "less"), [(LLAMA, 2 * LLAMA.mlp_width), (CONFIG.model("gpt-20b"), 0)])
def test_a_fused_gate_moves_less(model: ModelSpec, less: int) -> None:
    """Bytes of a token: two inputs are read and one output written, not each operation's."""
    machine, _ = setting(CONFIG, "dgxc-h100", None)
    computer = Computer(machine, "bf16", "value", "bf16")
    kept, fused = (
        float(work(computer, model, 1, 2048, "none", "flash", gated_kept=kept).forward) for kept in (4, 3)
    )
    assert kept - fused == pytest.approx(float(computer.memory_s(2048 * less)), abs=1e-9)
