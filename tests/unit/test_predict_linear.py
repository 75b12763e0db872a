"""What the predictor says of linear layers, and of their states along context: by hand, and limits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from machines import fact, machine
from test_predict_context import GPT, check_bytes, job, run

from lowband.__main__ import main
from lowband.cost.collectives import Network
from lowband.cost.compute import Computer, Work, work
from lowband.cost.flops import hardware_flops_per_token, model_flops_per_token
from lowband.cost.linear import held_bytes, kept_bytes, moved_bytes, products
from lowband.errors import UserError
from lowband.predict.context import waits
from lowband.predict.footprint import memory_items
from lowband.predict.prediction import predict
from lowband.predict.states import state_waits
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec
from lowband.spec.stack import OURS
from tests.checkout import CONFIG
from tests.printed import printed_by

LINEAR = GPT.model_copy(update={"attention": "linear"})
HYBRID = GPT.model_copy(update={"attention": "linear", "softmax_every": 2})
S = 8 * 8 * 9 * 4  # bytes of a state: 8 heads of 8 x 9 values
STATES = ("pass", "gather", "scan")


def along(context: int, states: str, **changes: object) -> Workload:
    """Its linear layers' states over links of package, node and world, whose rates are as 4, 2 and 1."""
    given = {"model": LINEAR, "machine": machine(), "ranks": 8, "micro_batch": 1, "seq_len": 256} | changes
    way = "state" if given["model"] is LINEAR else "ring"
    axes = Ways(context=context, context_attention=way, context_states=states, zigzag=False)
    return Workload(stack=OURS, scheme=CONFIG.scheme("ddp"), axes=axes, **given)


def computed(one: Workload) -> tuple[Work, Network]:
    found = work(
        Computer(one.machine, "bf16"),
        one.model,
        one.micro_batch,
        one.seq_len,
        one.recompute,
        "flash",
        one.axes,
    )
    return found, Network(one.machine, OURS, shards=False)


# ---- bytes


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(("tensor", "recompute"), [(1, "none"), (2, "full")])
def test_bytes_are_those_of_a_run(states: str, tensor: int, recompute: str) -> None:
    """`step_bytes` is what the engine counts (tests/dist/test_context_gpt.py)."""
    given = {"context_states": states, "zigzag": False, "tensor": tensor, "recompute": recompute}
    check_bytes(run(model=LINEAR.model_dump(), context_attention="state", accumulation=3, **given))
    check_bytes(run(model=HYBRID.model_dump(), context_attention="gather", **given))


def test_bytes_do_not_grow_with_the_sequence() -> None:
    short, long = (predict(along(8, "scan", seq_len=n)).communication_s for n in (256, 4096))
    for row in ("context_state_scan", "context_state_scan_grad"):
        assert short[row] == long[row] > 0


# ---- FLOPs and time


def test_flops_of_the_model_meet_a_state_instead_of_all_tokens() -> None:
    """12 L H T becomes 12 L H D, and of what is recomputed 4 H T becomes 4 H D."""
    softmax, linear = (model_flops_per_token(model, 4096) for model in (GPT, LINEAR))
    assert softmax - linear == 12 * 4 * 64 * (4096 - 8)
    again = [hardware_flops_per_token(model, 4096, "full") for model in (GPT, HYBRID, LINEAR)]
    each = [model_flops_per_token(model, 4096) for model in (GPT, HYBRID, LINEAR)]
    more = [a - b for a, b in zip(again, each, strict=True)]
    assert more[0] - more[2] == 4 * 4 * 64 * (4096 - 8)
    assert more[1] == (more[0] + more[2]) / 2
    assert hardware_flops_per_token(LINEAR, 4096, "selective") == each[2]


def test_a_block_computes_the_closed_form() -> None:
    """Peak 10^12: products beside those of the block's matrices, which softmax has, too."""
    one = along(4, "scan", micro_batch=3, recompute="none", seq_len=1024)
    found, softmax = computed(one)[0], computed(replace(one, model=GPT, axes=job(4, "heads").axes))[0]
    expected = products(LINEAR, 1, 256)
    assert found.forward - (softmax.forward - softmax.attention) == pytest.approx(3 * expected.forward / 1e12)
    matrices = softmax.backward - softmax.attention_backward
    assert found.backward - matrices == pytest.approx(3 * expected.backward / 1e12)
    assert (found.linear, found.linear_backward) == pytest.approx(
        (3 * expected.forward_hidden / 1e12, 3 * expected.backward_hidden / 1e12)
    )
    both = computed(replace(one, model=HYBRID, axes=along(4, "scan", model=HYBRID).axes))[0]
    assert both.forward == pytest.approx((found.forward + softmax.forward) / 2)


def test_memory_rates_and_kernels_are_charged() -> None:
    slow = machine(memory_gigabytes_per_s=fact(1.0), kernel_us=fact(2.0))
    fast = machine()
    one = along(4, "scan", recompute="none", seq_len=1024)
    with_, without = (computed(replace(one, machine=each))[0].forward for each in (slow, fast))
    softmax = [
        computed(replace(one, model=GPT, axes=job(4).axes, machine=each))[0].forward for each in (slow, fast)
    ]
    more = with_ - without - (softmax[0] - softmax[1])
    assert more == pytest.approx(moved_bytes(LINEAR, 1, 256) / 1e9 + (34 - 12) * 2e-6)


def test_states_travel_behind_products_by_hand() -> None:
    """Eight ranks in packages of 2, nodes of 4: a gather waits level by level, a scan for parts of sums."""
    given = {"machine": machine(latency_us=5), "ranks": 8, "recompute": "none", "micro_batch": 1}
    seconds = {
        "gather": (5e-6 + 4 * S / 4e9) + (5e-6 + 2 * S / 2e9) + (5e-6 + S / 1e9),
        "scan": 2 * 5e-6 + 1.5 * S / 4e9 + 2 * 5e-6 + 0.75 * S / 2e9 + 5e-6 + S / 4 / 1e9,
    }
    for states, travel in seconds.items():
        one = along(8, states, **given)
        own, network = computed(one)
        found = state_waits(one, network, own, overlap=1.0)
        assert found.travel == pytest.approx(travel)
        assert found.forward == pytest.approx(max(travel - own.linear, 0))
        assert found.backward == pytest.approx(max(travel - own.linear_backward, 0))
        assert state_waits(one, network, own, overlap=0.0).forward == pytest.approx(travel)
        again = replace(one, recompute="full")
        assert state_waits(again, network, own, 1.0).backward == pytest.approx(found.backward + found.forward)
        assert waits(one, network, own, 1.0).lane[f"context_state_{states}"] == pytest.approx(4 * travel)


def _lag(ranks: int, blocks: int, compute_s: float, hidden_s: float, hop_s: float, again: bool) -> float:
    """Seconds of a pass of all blocks when each rank waits for the one before: rank by rank, block by block.

    again: in each block a second time, towards the other end
    """
    ready = [0.0] * ranks
    for _ in range(blocks):
        for order in [range(ranks), range(ranks - 1, -1, -1)][: 2 if again else 1]:
            arrived = -1.0
            for rank in order:
                ends = max(ready[rank] + hidden_s, arrived)
                arrived = max(ready[rank], arrived) + hop_s
                ready[rank] = ends + compute_s - hidden_s
    return max(ready) - blocks * compute_s * (2 if again else 1)


@pytest.mark.parametrize("again", [False, True])
def test_a_chain_of_states_lags_once_unless_directions_meet(again: bool) -> None:
    """Against an event by event simulation of all ranks; links alike, computation longer than the chain."""
    one = along(
        8, "pass", ranks=8, machine=machine(latency_us=5, rate=1e9), recompute="full" if again else "none"
    )
    own, network = computed(one)
    own = replace(own, linear=0.0, linear_backward=0.0)
    found = state_waits(one, network, own, overlap=1.0)
    assert found.travel == pytest.approx(7 * 5e-6, rel=1e-3)
    simulated = _lag(8, 4, 1e-3, 0.0, 5e-6, again)
    total = 4 * (found.backward if again else found.forward)
    assert total == pytest.approx(simulated, rel=0.15 if again else 1e-3)


def test_without_links_and_on_one_rank() -> None:
    alone = step_time(job(1, model=LINEAR, ranks=2, seq_len=1024)).items
    assert alone["context"] == 0
    for states in STATES:
        found = step_time(along(4, states, machine=machine(rate=1e12), seq_len=1024)).items
        assert found["context"] == pytest.approx(0, abs=1e-12)
        assert found["forward"] == pytest.approx(alone["forward"] / 4)
        assert found["backward"] == pytest.approx(alone["backward"] / 4)


# ---- memory


def test_memory_by_hand() -> None:
    one = along(4, "scan", recompute="none", seq_len=1024)
    softmax = memory_items(job(4, recompute="none", seq_len=1024))
    found = memory_items(one)
    assert kept_bytes(LINEAR, 1, 256, "bf16") == 2 * (4 * 64 + 2 * 8) + S / 256
    assert held_bytes(LINEAR, 1, 256, "bf16") == 64 * (4 * (7 + 2 * 8 + 3 / 8) + 8)
    assert found["linear"] == 256 * held_bytes(LINEAR, 1, 256, "bf16")
    assert "context" not in found
    # Softmax keeps its output twice and the logsumexp; linear layers keep what is above instead.
    less = 2 * 64 + 4 * 8
    assert found["activations"] - softmax["activations"] == pytest.approx(
        4 * 256 * (kept_bytes(LINEAR, 1, 256, "bf16") - less)
    )
    both = memory_items(along(4, "scan", model=HYBRID, recompute="none", seq_len=1024))
    assert both["activations"] == pytest.approx((found["activations"] + softmax["activations"]) / 2)
    assert both["context"] == softmax["context"]
    assert both["linear"] == found["linear"]


# ---- what uses it


def test_stages_must_be_alike() -> None:
    axes = Ways(pipeline=4)
    with pytest.raises(UserError, match="every 2-th layer is one of softmax are not predicted"):
        replace(job(1, model=HYBRID), axes=axes)
    halves = step_time(replace(job(1, model=HYBRID, accumulation=4), axes=Ways(pipeline=2)))
    assert halves.total > 0


def _file(tmp_path: Path, model: ModelSpec) -> str:
    file = tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump(model.model_dump(exclude={"name"})))
    return str(file)


def test_commands_know_the_ways_of_states(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["--cluster", "frontier", "--gpus", "16", "--root", str(CONFIG.root), "--seq", "1024"]
    linear = [*asked, "--model", _file(tmp_path, LINEAR)]
    one = ["predict", *linear, "--scheme", "zero3", "--cp", "8"]

    assert "cp 8, state by scan, contiguous" in printed_by(capsys, *one)
    assert "cp 8, state by pass, contiguous" in printed_by(capsys, *one, "--states", "pass")
    rows = json.loads(printed_by(capsys, *one, "--ways", "all", "--json"))
    assert {row["context"]["ways"] for row in rows} == {f"state by {states}" for states in STATES}
    best = min(rows, key=lambda row: row["step_time_s"])["context"]["ways"]
    assert f"{best}  " in printed_by(capsys, *one, "--ways", "all").split("best way")[1]
    few = ["--cp", "8", "--tp", "1", "--pp", "1", "--exact", "--micro-batch", "1", "--recompute", "none"]
    found = json.loads(printed_by(capsys, "plan", *linear, *few, "--json"))
    assert found[0]["ways"] == "state"
    assert found[0]["states"] in STATES
    text = printed_by(capsys, "plan", *linear, *few)
    assert "states " in text
    assert "with zigzag, which linear layers cannot have" in text
    both = ["predict", *asked, "--model", _file(tmp_path, HYBRID), "--scheme", "zero3", "--cp", "8"]
    assert "cp 8, ring, state by scan, contiguous" in printed_by(capsys, *both)


def test_a_plan_of_lengths_knows_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, [4096, 2048, 100, 100, 70, 64])))
    asked = ["--cluster", "frontier", "--gpus", "8", "--root", str(CONFIG.root)]
    assert (
        main(["plan", *asked, "--model", _file(tmp_path, LINEAR), "--lengths", str(lengths), "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)
