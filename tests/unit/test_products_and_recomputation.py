"""Products in 8 bits, some layers recomputed, and the first line of what stands on no known run."""

from dataclasses import replace
from typing import Any

import pytest

from lowband.cost.collectives import Network
from lowband.cost.compute import CAST_BYTES, Computer
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.predict.prediction import predict
from lowband.predict.request import Grid, job_of, setting
from lowband.predict.show.point_text import text
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from tests.checkout import CONFIG


def job(
    recompute: Any = "none", layers: int | None = None, ways: Ways | None = None, **software: object
) -> Workload:
    machine, stack = setting(CONFIG, "dgx-h100", "fsdp2")
    model = CONFIG.model("llama-3-8b")
    return job_of(
        machine, stack, model, CONFIG.scheme("zero3"), 8, 2, 8192, 1, recompute, ways or Ways(), software,
        recompute_layers=layers,
    )  # fmt: skip


@pytest.mark.parametrize("products", ["fp8", "mxfp8"])
def test_products_in_8_bits_by_hand(products: str) -> None:
    """What a step gains: half of the blocks' product time, less the casts of factors."""
    in_16, in_8 = (predict(job(products=each)) for each in ("bf16", products))
    one, tokens = job(), 2 * 8192
    device, h, f, kv = one.machine.device, 4096, 14336, 1024
    assert device.matmul_efficiency is not None
    weights = 32 * (2 * h * h + 2 * h * kv + 3 * h * f)
    rates = [device.peak_tflops[key] * 1e12 * device.matmul_efficiency.value for key in ("bf16", "fp8")]
    faster = 6 * weights * tokens * (1 / rates[0] - 1 / rates[1])
    inputs, outputs = 2 * h + h + f, (h + 2 * kv) + 2 * h + 2 * f
    values = 32 * tokens * (inputs + outputs) + 2 * weights
    casts = Computer(one.machine, "bf16").memory_s(CAST_BYTES[products] * values)
    computed = [sum(float(p.time_s[key]) for key in ("forward", "backward")) for p in (in_16, in_8)]
    assert computed[0] - computed[1] == pytest.approx(faster - float(casts), rel=1e-9)
    assert in_8.peak_memory_bytes == in_16.peak_memory_bytes  # torchtitan's table: 77.0 and 76.8 GiB


def test_a_device_without_such_products() -> None:
    machine, stack = setting(CONFIG, "dgx-a100", "fsdp2")
    model, scheme = CONFIG.model("llama-3-8b"), CONFIG.scheme("zero3")
    asked = job_of(machine, stack, model, scheme, 8, 1, 2048, software={"products": "fp8"})
    with pytest.raises(UserError, match="peak_tflops has no fp8"):
        predict(asked)


def test_some_layers_recomputed_lie_between_none_and_all() -> None:
    """Exactly by their share, in time without exposed communication, in FLOPs and in activations."""
    none, some, whole = (predict(job(*each)) for each in (("none",), ("full", 8), ("full",)))
    for of in (
        lambda p: p.time_s["recompute"],
        lambda p: p.hfu_tflops_per_gpu / p.tokens_per_s_per_gpu,
    ):
        assert float(of(some)) == pytest.approx(float(of(none)) + (float(of(whole)) - float(of(none))) / 4)
    kept = [float(p.memory_bytes["activations"]) for p in (none, some, whole)]
    again = kept[0] / 32  # of the layer that is being recomputed, less its input
    assert kept[0] > kept[1] > kept[2]
    assert kept[1] == pytest.approx(kept[0] - (kept[0] - kept[2] + again) / 4 + again, rel=0.02)


def test_selective_recomputation_of_fused_attention_is_none() -> None:
    """In time, in FLOPs and in memory; of plain attention its products run again (arXiv 2205.05198)."""
    none, fused = (predict(job(each)) for each in ("none", "selective"))
    assert (fused.step_time_s, fused.peak_memory_bytes) == (none.step_time_s, none.peak_memory_bytes)
    assert fused.hfu_tflops_per_gpu == fused.tflops_per_gpu
    plain = predict(job("selective", attention="plain"))
    again = 32 * 4 * 4096 * 8192  # 4 H T a layer
    more = plain.hfu_tflops_per_gpu - plain.tflops_per_gpu
    assert float(more) == pytest.approx(float(plain.tokens_per_s_per_gpu) * again / 1e12)


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw8bit", 2 * 260 / 256), ("muon", 4)])
def test_states_and_updates_of_other_optimizers(optimizer: str, moments: float) -> None:
    adam, other = (predict(job(optimizer=each)) for each in ("adamw", optimizer))
    less = 8 - moments
    shard = float(adam.memory_bytes["optim"]) / 12
    assert float(adam.memory_bytes["optim"] - other.memory_bytes["optim"]) == pytest.approx(less * shard)
    assert float(adam.peak_memory_bytes - other.peak_memory_bytes) == pytest.approx(less * shard)
    computer, orthogonal = Computer(job().machine, "bf16"), 0.0
    if optimizer == "muon":  # each of a block's five kinds of matrices, on one of 8 ranks
        h, f, qkv = 4096, 14336, 6144
        cubes = sum(4 * h * h * n + 2 * h**3 for n in (qkv, h, f, f, f))
        orthogonal = float(computer.matmul_s(5 * 32 * cubes / 8))
    gained = float(computer.memory_s(2 * less * shard)) - orthogonal
    assert float(adam.time_s["optimizer"] - other.time_s["optimizer"]) == pytest.approx(gained)


def test_whole_matrices_travel_to_their_owners_and_back() -> None:
    """On 8 ranks of a node, each with an eighth of every unit: 7/8 of all matrices' 4 bytes, both ways; none
    where each rank has all of them."""
    one = predict(job(optimizer="muon"))
    rate = Network(job().machine, job().stack).rate("node")
    sent = 4 * 7 / 8 * 32 * (4096 * (4096 + 6144 + 3 * 14336)) / 8
    for name in ("matrix_gather", "matrix_return"):
        taken = float(one.communication_s[name])
        assert float(one.time_s[f"exposed_{name}"]) == taken
        assert 1 <= taken * rate / sent < 1.2  # owners hold a part of theirs or none; latencies
    assert float(one.step_time_s) == pytest.approx(float(sum(one.time_s.values())))
    whole = replace(job(optimizer="muon"), scheme=CONFIG.scheme("ddp"))
    assert float(predict(whole).communication_s["matrix_gather"]) == 0
    assert "matrix_gather" not in predict(job()).communication_s


def test_other_optimizers_beyond_the_device_are_refused() -> None:
    with pytest.raises(UserError, match="states of muon beyond the device are not predicted"):
        replace(job(optimizer="muon"), beyond=Beyond.of(["optim@host"], 1.0, 0))


def test_layers_that_cannot_be_recomputed() -> None:
    with pytest.raises(UserError, match=r"33 layers that are recomputed.*1 to 32"):
        job("full", 33)
    with pytest.raises(UserError, match="with ranks along context or experts all"):
        job("full", 8, Ways(context=2))


@pytest.mark.parametrize(("cluster", "is_known"), [("dgx-h100", True), ("alps", False), ("frontier", True)])
def test_the_first_line_says_what_it_stands_on(cluster: str, is_known: bool) -> None:
    grid = Grid(CONFIG, cluster, ["gpt-2.7b"], ["zero3"], [64], [1], [1], [2048], ["full"])
    [record] = grid.records()
    first, *_ = text(record).splitlines()
    assert first.startswith("lower bound, no evidence on this machine: no run of ") != is_known
    assert record["evidence"] == is_known
