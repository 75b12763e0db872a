"""What runs a candidate, and its options: degrees, batches and placement as the candidate has them."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lowband.__main__ import main
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.predict.request import setting
from lowband.predict.search.candidates import Candidate
from lowband.predict.search.software import SOFTWARE, of_stack, runners
from lowband.predict.show.plan_options import deepspeed, megatron, torchtitan
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.exchange import scheme_of_deepspeed
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Fact
from lowband.spec.tiers import DEVICE, DISK, HOST, Tier
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by

LLAMA = CONFIG.model("llama-3-70b")


def job(scheme: str, axes: Ways, accumulation: int = 8, recompute: str = "none") -> Workload:
    machine, stack = setting(CONFIG, "dgx-h100", "megatron-lm")
    of = machine, stack, LLAMA, CONFIG.scheme(scheme), 512, 2, 8192, accumulation, recompute
    return Workload(*of, axes=axes)


def best(of: Workload) -> Candidate:
    return Candidate((), of, of.micro_batch, of.accumulation, 1.0, 0.0)


@pytest.mark.parametrize(
    ("scheme", "axes", "accumulation", "recompute", "expected"),
    [
        ("zero1", Ways.of_options(8, 4, 5), 8, "none", ["megatron-lm", "torchtitan"]),
        ("zero1", Ways.of_options(8, 4, 5), 6, "none", ["torchtitan"]),  # no whole rounds
        ("zero1", Ways.of_options(8, 4, 2, "zb-v"), 8, "none", ["torchtitan"]),
        ("zero1", Ways.of_options(8, 4), 8, "op", ["torchtitan"]),
        ("zero1", Ways.of_options(8, 4), 8, "full", ["megatron-lm", "deepspeed", "torchtitan"]),
        ("zero3", Ways.of_options(8), 1, "full", ["deepspeed", "torchtitan"]),
        ("zero3", Ways.of_options(), 1, "full", ["deepspeed", "torchtitan", "llm-foundry"]),
        ("zeropp", Ways.of_options(), 1, "full", ["deepspeed"]),
        ("zero3", Ways.of_options(8, 4), 8, "full", []),  # a stage's weights stay gathered everywhere
    ],
)  # fmt: skip
def test_what_runs_a_job(
    scheme: str, axes: Ways, accumulation: int, recompute: str, expected: list[str]
) -> None:
    assert list(runners(job(scheme, axes, accumulation, recompute))) == expected


@pytest.mark.parametrize("level", ["node", "world"])
@pytest.mark.parametrize(("weights", "stage"), [(True, 3), (False, 1)])
def test_a_node_of_all_ranks_is_all_of_them(level: str, weights: bool, stage: int) -> None:
    """A plan of one node says `node`: its states are on the host all the same, and no part of a group."""
    machine, stack = setting(CONFIG, "polaris", "deepspeed-zero")
    inner = level if weights else "self"
    scheme = Scheme(name="plan", weights=inner, grads=inner, optim=level)
    of = machine, stack, CONFIG.model("gpt-10b"), scheme, 4, 1, 2048
    on_host = Workload(*of, recompute="full", beyond=Beyond("host"))
    assert "deepspeed" in runners(on_host)
    zero = json.loads(deepspeed(best(on_host)))["zero_optimization"]
    assert zero == {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    if level == "node":
        assert "deepspeed" not in runners(replace(on_host, ranks=8))


@pytest.mark.parametrize("optim", [HOST, DISK])
@pytest.mark.parametrize("weights", [DEVICE, HOST, DISK])
def test_deepspeed_is_told_the_tiers_of_a_plan(optim: Tier, weights: Tier) -> None:
    machine, stack = setting(CONFIG, "dgx-h100", "deepspeed-zero")
    places = [f"optim@{optim}", *([f"weights@{weights}"] if weights != DEVICE else [])]
    of = machine, stack, CONFIG.model("gpt-10b"), CONFIG.scheme("zero3"), 8, 1, 2048
    planned = Workload(*of, recompute="full", beyond=Beyond.of(places))
    assert "deepspeed" in runners(planned)
    read = scheme_of_deepspeed(json.loads(deepspeed(best(planned))), Levels.fit(machine.sizes, 8), "test")
    assert (read.optim_tier, read.weights_tier) == (optim, weights)


@pytest.mark.parametrize("level", ["node", "world"])
def test_ranks_along_context_are_no_shards_of_a_node_of_all(level: str) -> None:
    machine, stack = setting(CONFIG, "dgx-h100", "fsdp2")
    scheme = Scheme(name="plan", weights=level, grads=level, optim=level)
    along = Ways.of_options(1, 1).model_copy(update={"context": 2})
    of = machine, stack, CONFIG.model("llama-3-8b"), scheme, 8, 1, 8192
    written = tomllib.loads(torchtitan(best(Workload(*of, recompute="full", axes=along))))["parallelism"]
    shards, replicas = (written[f"data_parallel_{name}_degree"] for name in ("shard", "replicate"))
    assert (shards, replicas, written["context_parallel_degree"]) == (4, 1, 2)


def test_our_engine_runs_every_scheme_of_a_model_that_it_trains() -> None:
    llama = job("zeropp", Ways.of_options(2), 1, "full")
    assert "lowband" not in runners(llama)
    assert "lowband" in runners(replace(llama, model=CONFIG.model("gpt-22b"), seq_len=2048))


def test_a_plan_keeps_to_what_its_stack_is_of() -> None:
    gpt = CONFIG.model("gpt-22b")
    for row in SOFTWARE:
        for name in row.stacks:
            stack = setting(CONFIG, "dgx-h100", name)[1]
            assert [one.name for one in of_stack(stack, LLAMA)] == [row.name] * (name != "ours")
            assert [one.name for one in of_stack(stack, gpt)] == list(dict.fromkeys([row.name, "lowband"]))
            assert of_stack(stack, gpt, ["any"]) == ()
    unknown = setting(CONFIG, "dgx-h100", "fsdp")[1].model_copy(update={"name": "mine"})
    assert of_stack(unknown, gpt) == ()


def arguments(text: str) -> dict[str, str]:
    return dict((line.removeprefix("--") + " ").split(" ", 1) for line in text.splitlines())


def test_megatrons_arguments() -> None:
    axes = Ways.of_options(8, 4, 2, layers=(9, *[10] * 6, 11), cp=2)
    found = arguments(megatron(best(job("zero1", axes, recompute="full"))))
    expected = {
        "tensor-model-parallel-size": 8, "pipeline-model-parallel-size": 4, "context-parallel-size": 2,
        "num-virtual-stages-per-pipeline-rank": 2, "micro-batch-size": 2, "global-batch-size": 2 * 8 * 8,
        "num-layers": 80, "hidden-size": 8192, "num-query-groups": 8, "ffn-hidden-size": 28672,
        "recompute-granularity": "full", "cp-comm-type": "p2p", "seq-length": 8192,
    }  # fmt: skip
    assert {key: found[key].strip() for key in expected} == {
        key: str(value) for key, value in expected.items()
    }
    flags = {"use-distributed-optimizer", "sequence-parallel", "swiglu", "group-query-attention", "bf16"}
    assert flags <= {key for key, value in found.items() if not value.strip()}
    ends = Ways.of_options(8, 4, layers=(20, 20, 20, 20))
    assert "account-for-embedding-in-pipeline-split" in found
    assert "account-for-embedding-in-pipeline-split" not in megatron(best(job("zero1", ends)))


def _of(name: str, axes: Ways) -> Candidate:
    return best(replace(job("zero1", Ways.of_options()), axes=axes, model=CONFIG.model(name)))


def test_megatrons_arguments_are_of_the_same_model() -> None:
    """Its heads are as wide as hidden / heads, and its experts cut along tensor, unless it is told."""
    found = arguments(megatron(_of("qwen3-30b-a3b", Ways.of_options(4, ep=2))))
    assert (found["kv-channels"], found["expert-tensor-parallel-size"]) == ("128 ", "1 ")
    assert "qk-layernorm" in found and "kv-channels" not in megatron(best(job("zero1", Ways.of_options())))
    with pytest.raises(
        UserError, match=r"'deepseek-v2-lite': latent, dense_layers: Megatron-LM's options for these"
    ):
        megatron(_of("deepseek-v2-lite", Ways.of_options(ep=2)))
    biased = LLAMA.model_copy(update={"biases": "attention"})
    with pytest.raises(UserError, match="biases: Megatron-LM's options for these"):
        megatron(best(replace(job("zero1", Ways.of_options()), model=biased)))


def test_heads_of_keys_are_divided_over_tensor() -> None:
    with pytest.raises(UserError, match="'qwen3-30b-a3b': 4 heads of keys cannot be divided over tensor 8"):
        Ways.of_options(8).check(CONFIG.model("qwen3-30b-a3b"))


def test_torchtitan_divides_states_over_context_too() -> None:
    """A node's 8 ranks, of which 2 lie along context, are 4 along data; 512 ranks are 64 such nodes."""
    scheme = Scheme(name="plan", weights="node", grads="node", optim="node")
    found = best(replace(job("zero3", _attending("ring"), recompute="full"), scheme=scheme))
    shown = tomllib.loads(torchtitan(found))["parallelism"]
    assert (shown["data_parallel_shard_degree"], shown["data_parallel_replicate_degree"]) == (4, 64)
    alone = replace(found.job, scheme=CONFIG.scheme("ddp"))
    assert "torchtitan" not in runners(alone)


def test_deepspeeds_configuration() -> None:
    found = json.loads(deepspeed(best(job("zeropp", Ways.of_options(), 4, "full"))))
    assert found["train_batch_size"] == 512 * 2 * 4
    assert found["zero_optimization"] == {
        "stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }  # fmt: skip
    assert json.loads(deepspeed(best(job("zero1", Ways.of_options(8, 4)))))["zero_optimization"] == {
        "stage": 1
    }


def test_torchtitans_configuration() -> None:
    axes = Ways.of_options(8, 4, 2, layers=(9, *[10] * 6, 9))
    model = LLAMA.model_copy(update={"layers": 78})
    found = tomllib.loads(torchtitan(best(replace(job("zero1", Ways.of_options(8, 4), 8, "op"), axes=axes,
                                                  model=model))))  # fmt: skip
    shown = found["parallelism"]
    assert (shown["data_parallel_shard_degree"], shown["data_parallel_replicate_degree"]) == (16, 1)
    assert shown["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert (
        shown["pipeline_parallel_first_stage_less_layers"], shown["pipeline_parallel_last_stage_less_layers"]
    ) == (1, 1)  # fmt: skip
    assert found["training"] == {"local_batch_size": 16, "seq_len": 8192, "global_batch_size": 16 * 16}
    assert found["activation_checkpoint"]["selective_ac_option"] == "op"
    hsdp = best(job("zero3", Ways.of_options(), 1, "full"))
    shard = Scheme(name="plan", weights="node", grads="node", optim="node")
    shown = tomllib.loads(torchtitan(replace(hsdp, batches=replace(hsdp.batches, scheme=shard))))[
        "parallelism"
    ]
    assert (shown["data_parallel_shard_degree"], shown["data_parallel_replicate_degree"]) == (8, 64)
    assert np.prod([shown[f"{axis}_parallel_degree"] for axis in ("tensor", "context", "pipeline")]) == 1


def test_the_command_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    of = ["plan", "--cluster", "dgx-h100", "--stack", "megatron-lm", "--model", "llama-3-8b", "--gpus", "16"]
    of += ["--micro-batch", "1", "--seq", "2048", "--write", "found", "--software"]
    assert "runs in megatron-lm" in printed_by(capsys, *of, "megatron-lm")
    assert arguments((tmp_path / "found.args").read_text())["micro-batch-size"].strip() == "1"
    assert "is taken" in printed_by(capsys, *of, "megatron-lm", code=2)
    assert "no options of its to write" in printed_by(capsys, *of, "llm-foundry", code=2)


@pytest.mark.parametrize(
    ("software", "stack", "tiers", "file", "says"),
    [
        ("megatron-lm", "megatron-lm", ["optim@host"], "found.args", "--optimizer-cpu-offload\n"),
        ("deepspeed", "deepspeed-zero", ["optim@host"], "found.json", '"offload_optimizer": {'),
        ("torchtitan", "fsdp2", ["optim@host", "weights@host"], "found.toml", "enable_cpu_offload = true\n"),
    ],
)
def test_the_command_writes_tiers(
    software: str, stack: str, tiers: list[str], file: str, says: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    of = ["plan", "--cluster", "polaris", "--stack", stack, "--model", "gpt-10b", "--gpus", "4"]
    of += ["--micro-batch", "1", "--seq", "1024", "--tiers", *tiers, "--write", "found"]
    assert file in printed_by(capsys, *of, "--software", software)
    assert says in (tmp_path / file).read_text()


@pytest.mark.parametrize(
    ("operations", "logit_bytes", "parts"),
    [
        ("single", None, None),
        ("single", 4.0, ["loss"]),
        ("fused", None, ["model"]),
        ("fused", 4.0, ["model", "loss"]),
    ],
)
def test_torchtitan_compiles_what_was_predicted_so(
    operations: str, logit_bytes: float | None, parts: list[str] | None
) -> None:
    of = job("zero3", Ways(), recompute="full")
    fact = None if logit_bytes is None else Fact(value=logit_bytes, source="asked")
    stack = of.stack.model_copy(update={"operations": operations, "logit_bytes": fact})
    written = tomllib.loads(torchtitan(best(replace(of, stack=stack))))
    assert written.get("compile") == (None if parts is None else {"enable": True, "components": parts})


def test_costs_of_choices_beside_degrees_of_which_software_has_no_scheme(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = ("--cluster", "dgx-h100", "--stack", "fsdp2", "--model", "llama-3.1-8b", "--gpus", "8")
    said = printed_by(capsys, "plan", "--root", str(ROOT), *job, "--software", "torchtitan")
    assert "runs in torchtitan" in said and "ways gather: ring would be" in said


def _attending(way: str) -> Ways:
    return Ways.of_options(cp=2).model_copy(update={"context_attention": way})


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("ring", {"megatron-lm", "torchtitan"}),
        ("gather", {"megatron-lm", "torchtitan"}),
        ("heads", {"megatron-lm", "deepspeed"}),
        ("node=heads,world=ring", {"megatron-lm"}),
        ("node=gather,world=ring", set()),
    ],
)
def test_who_attends_so_along_context(way: str, names: set[str]) -> None:
    jobs = [job(scheme, _attending(way)) for scheme in ("zero1", "zero3")]
    found = {row.name for row in SOFTWARE for each in jobs if row.runs(each)}
    assert found - {"lowband"} == names


def test_torchtitan_is_told_how_ranks_along_context_attend() -> None:
    for way, method in ("ring", "alltoall"), ("gather", "allgather"):
        text = torchtitan(best(job("zero1", _attending(way))))
        assert tomllib.loads(text)["parallelism"]["context_parallel_rotate_method"] == method
    assert "rotate" not in torchtitan(best(job("zero1", Ways.of_options())))


def test_a_copy_of_one_rank_is_none_to_deepspeed() -> None:
    """Of a node along data one rank is left, where the others are along tensor."""
    assert "deepspeed" in runners(job("zeropp", Ways.of_options(4), recompute="full"))
    assert "deepspeed" not in runners(job("zeropp", Ways.of_options(8), recompute="full"))


def test_a_search_kept_to_software_says_so_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """llm-foundry has no ranks along context: others run what it cannot."""
    of = "plan --cluster dgx-h100 --model llama-3.1-70b --seq 131072 --gpus 512 --global-batch 512 --exact"
    assert main([*of.split(), "--tp", "1", "--pp", "1", "--recompute", "full", "--strict"]) == 1
    said = capsys.readouterr().err
    assert "even the smallest scheme that llm-foundry runs is " in said
    assert said.endswith("(allowed: --software any, or another --stack)\n")


def test_costs_of_choices_beside_jobs_that_the_software_has_nowhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """torchtitan has no optimizer's states alone on the host, which is tried where memory is short."""
    of = "plan --cluster dgx-h100 --model llama-3-8b --gpus 2 --tp 1 --pp 1 --micro-batch 1 --global-batch 2"
    assert "recompute full: " in printed_by(capsys, *of.split(), "--stack", "fsdp2")


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ("selective", "keeps scores that it could recompute (allowed: --attention plain)"),
        ("selective host", "keeps scores that it could recompute or could keep its activations on the host "),
    ],
)
def test_kinds_of_recomputation_that_no_job_has(
    capsys: pytest.CaptureFixture[str], kinds: str, why: str
) -> None:
    """A fused kernel keeps no scores: it is not the batch that is refused."""
    of = "plan --cluster dgx-h100 --model llama-3-8b --gpus 16 --micro-batch 1 --tp 2 --pp 1 --recompute"
    said = printed_by(capsys, *of.split(), *kinds.split(), code=2)
    assert f"--recompute: no candidate that divides the batch {why}" in said


@pytest.mark.parametrize("beyond", [Beyond("host"), Beyond("host", share=0.5), Beyond("host", stride=2)])
def test_our_engine_has_states_on_the_host_in_whole_and_in_part(beyond: Beyond) -> None:
    machine, stack = setting(CONFIG, "polaris", "deepspeed-zero")
    scheme = Scheme(name="plan", weights="world", grads="world", optim="world")
    of = machine, stack, CONFIG.model("gpt-10b"), scheme, 4, 1, 2048
    assert "lowband" in runners(Workload(*of, recompute="full", beyond=beyond))
