"""Time and memory of a job against numbers worked out by hand, and against formulas as papers print them."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowband.cost.activations import Attention, kept_bytes_per_token
from lowband.cost.attention import flops
from lowband.cost.buffers import buffer_bytes
from lowband.cost.bytes import sent_bytes, transfers
from lowband.cost.compute import Computer, work
from lowband.cost.flops import block_matmul_flops_per_token
from lowband.cost.memory import in_flight_bytes, keeps_weights_copy, largest_two
from lowband.errors import UserError
from lowband.predict.footprint import memory_items, peak_bytes
from lowband.predict.prediction import predict
from lowband.predict.search.candidates import Candidate, Plan, knobs_of
from lowband.predict.search.degrees import axes_to_try
from lowband.predict.search.plan import jobs, plan
from lowband.predict.show.plan_files import write
from lowband.predict.show.plan_text import report
from lowband.predict.show.record import flat, record, short_by
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.attention import Latent
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.records import Sent, mean
from lowband.spec.scheme import Scheme
from lowband.spec.stack import OURS, Stack
from lowband.spec.step import Recompute
from lowband.spec.sync import Sync
from tests.checkout import CONFIG, ROOT

GIB = 2**30


def fact(value: float, low: float | None = None, high: float | None = None) -> dict[str, object]:
    return {"value": value, "low": low, "high": high, "source": "made up"}


# 50 TFLOPS of products, 25 of fused attention, 800 GB/s of memory, 10 us a kernel, 2 GiB for itself.
MACHINE = Machine.model_validate(
    {
        "name": "made-up", "description": "round numbers",
        "device": {
            "name": "d", "memory_gib": 64, "peak_tflops": {"bf16": 100}, "source": "made up",
            "matmul_efficiency": fact(0.5, 0.25, 1), "attention_efficiency": fact(0.25),
            "memory_gigabytes_per_s": fact(1000), "memory_efficiency": fact(0.8), "kernel_us": fact(10),
            "framework_gib": fact(2),
        },
        "levels": [
            {"name": "node", "size": 4, "link": {"gigabytes_per_s": 100, "source": "made up"}},
            {"name": "world", "link": {"gigabytes_per_s": 10, "source": "made up"}},
        ],
    }
)  # fmt: skip
LLAMA = ModelSpec(
    name="l", layers=4, hidden=16, heads=4, kv_heads=2, mlp_hidden=24, gated=True, biases=False,
    positions="rotary", tied_head=False, vocab=40, seq_len=32, source="made up",
)  # fmt: skip
GPT = ModelSpec(name="g", layers=8, hidden=32, heads=8, vocab=48, seq_len=64, source="made up")
DDP = Scheme(name="ddp", weights="self", grads="self", optim="self")
ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")
# FLOPs of one token of LLAMA: 2 a weight of qkv, out, gate, up and down; 4 H T of attention
MATRICES = 2 * (32 * 16 + 16 * 16 + 3 * 24 * 16)
SCORES = 4 * 16 * 32


@pytest.mark.parametrize(
    ("recompute", "again"),
    [("none", 0.0), ("selective", 1.0), ("op", 2.0), ("full", 3.0)],
)
def test_a_block_with_plain_attention(recompute: Recompute, again: float) -> None:
    """64 tokens on 2 ranks of tensor parallelism, with dropout."""
    found = work(Computer(MACHINE, "bf16"), LLAMA, 2, 32, recompute, "plain", Ways(tensor=2), dropout=True)
    products = 64 * MATRICES / 2 / 50e12
    core = max(64 * SCORES / 2 / 50e12, 64 * 4 * 4 * 32 / 2 / 800e9)  # 4 bytes a score in the products
    scores = 64 * 9 * 4 * 32 / 2 / 800e9
    rest = 64 * ((8 + 14) * 16 + (4 * (16 + 2 * 8) + 8 * 24) / 2) / 800e9
    kernels = 18 * 10e-6
    forward = products + core + scores + rest + kernels
    assert found.forward == pytest.approx(forward, rel=1e-12)
    assert found.backward == pytest.approx(2 * forward, rel=1e-12)
    by_kind = {0.0: 0.0, 1.0: core + scores, 2.0: products / 2 + rest, 3.0: forward}
    assert found.recompute == pytest.approx(by_kind[again], rel=1e-12)
    head, logits = 64 * 2 * 16 * 40 / 2 / 50e12, 64 * 40 / 2 / 800e9
    assert found.head_forward == pytest.approx(head + 8 * logits, rel=1e-12)
    assert found.head_backward == pytest.approx(2 * head + 16 * logits, rel=1e-12)


def test_a_block_with_fused_attention() -> None:
    """Half of the products where causality masks; five of them backward for two forward; nothing stored."""
    axes = Ways(tensor=2, sequence_parallel=True)
    found = work(Computer(MACHINE, "bf16"), GPT, 1, 64, "selective", "flash", axes)
    products = 64 * 2 * 12 * 32 * 32 / 2 / 50e12
    core = 64 * 4 * 32 * 64 / 2 / 2 / 25e12
    rest = 64 * ((8 + 12) * 32 + 4 * 3 * 32 + 4 * 4 * 32) / 2 / 800e9
    kernels = 12 * 10e-6
    assert found.forward == pytest.approx(products + core + rest + kernels, rel=1e-12)
    assert found.backward == pytest.approx(2 * products + 2.5 * core + 2 * (rest + kernels), rel=1e-12)
    assert found.recompute == 0


def test_a_device_without_rates_of_its_own() -> None:
    """Attention as other products, memory for nothing; a dtype without a peak is refused."""
    bare = MACHINE.model_copy(update={"device": MACHINE.device.model_copy(update={
        "attention_efficiency": None, "memory_gigabytes_per_s": None, "matmul_efficiency": None,
    })})  # fmt: skip
    computer = Computer(bare, "bf16")
    assert computer.attention_s(8e12, "flash") == pytest.approx(0.04)
    assert computer.attention_s(8e12, "plain") == pytest.approx(0.08)
    assert computer.memory_s(1e12) == computer.adam_s(1e9) == computer.quantize_s(1e9) == 0
    with pytest.raises(UserError, match="peak_tflops has no fp32"):
        Computer(bare, "fp32").matmul_s(1.0)


def test_adam_and_quantization_move_bytes() -> None:
    computer = Computer(MACHINE, "bf16")
    assert computer.adam_s(1e9) == pytest.approx(34 / 800)
    assert computer.quantize_s(1e9) == pytest.approx(3 / 800)


@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "recompute", "per_h", "per_core"),
    [
        (1, False, "none", 34, 5),  # equation 1 of arXiv 2205.05198: s b h (34 + 5 a s / h)
        (4, False, "none", 10 + 24 / 4, 5 / 4),  # equation 2
        (4, True, "none", 34 / 4, 5 / 4),  # equation 4
        (4, True, "selective", 34 / 4, 0),  # equation 6
        (4, True, "full", 2 / 4, 0),
        (1, False, "full", 2, 0),  # table 2: 2 s b h
    ],
)
def test_activations_are_korthikantis(
    tensor: int, sequence_parallel: bool, recompute: Recompute, per_h: float, per_core: float
) -> None:
    axes = Ways(tensor=tensor, sequence_parallel=sequence_parallel)
    kept = kept_bytes_per_token(GPT, 64, recompute, "plain", axes, dropout=True)
    assert kept.block == pytest.approx(per_h * 32 + per_core * 8 * 64)
    whole = kept_bytes_per_token(GPT, 64, "none", "plain", axes, dropout=True)
    assert kept.block + kept.working == pytest.approx(whole.block)


def test_attention_takes_four_and_ten_products() -> None:
    """2 sequences, 3 heads of 4, 8 queries, 16 keys: each product has 2 x 3 x 8 x 16 x 4 terms."""
    terms = 2 * 3 * 8 * 16 * 4
    assert flops(2, 3, 8, 16, 4, is_causal=False) == (4 * terms, 10 * terms)
    assert flops(2, 3, 8, 16, 4, is_causal=True) == (2 * terms, 5 * terms)


def test_exchanges_on_their_way_hold_masters_of_a_replicas_shard() -> None:
    """Four units of 40, 30, 20 and 10 values in two fragments: units 0 and 2 are the larger one."""
    late = Sync(beyond="node", every=4, fragments=2, delay=2)
    assert in_flight_bytes([40, 30, 20, 10], 2, late) == {"in_flight": 4 * 60 // 2}
    later = Sync(beyond="node", every=4, fragments=2, delay=4, mix=0.5)
    assert in_flight_bytes([40, 30, 20, 10], 2, later) == {"in_flight": 4 * 100 // 2}
    assert in_flight_bytes([40, 30, 20, 10], 2, Sync(beyond="node", every=4)) == {}
    assert in_flight_bytes([40, 30, 20, 10], 2, None) == {}


@pytest.mark.parametrize(("recompute", "block", "working"), [("none", 2, 0), ("op", 0, 2), ("full", 0, 2)])
def test_gathered_inputs_are_kept_where_nothing_recomputes_them(
    recompute: Recompute, block: int, working: int
) -> None:
    """2 inputs of 32 16-bit values a token, of which each of 4 ranks has a quarter already."""
    axes = Ways(tensor=4, sequence_parallel=True)
    without, kept = (kept_bytes_per_token(GPT, 64, recompute, "flash", axes, gathered=n) for n in (0, 2))
    assert kept.block - without.block == pytest.approx(block * 2 * 32 * 3 / 4)
    assert kept.working - without.working == pytest.approx(working * 2 * 32 * 3 / 4)
    one, both = (kept_bytes_per_token(GPT, 64, recompute, "flash", gathered=n) for n in (0, 2))
    assert one == both  # nothing is gathered


@pytest.mark.parametrize(
    ("attention", "recompute", "kept"),
    [
        # norms, qkv input and output, attention's output, up's input; up, gate, activation, product; heads
        ("flash", "none", 2 * 32 + 32 + 2 * 32 + 32 + 32 + 4 * 2 * 24 + 4 * 4),
        ("flash", "selective", 2 * 32 + 32 + 2 * 32 + 32 + 32 + 4 * 2 * 24 + 4 * 4),
        ("plain", "op", 2 * 16 + 2 * (16 + 16 + 8 + 24) + 2 * 16),
    ],
)
def test_activations_of_a_gated_block(attention: Attention, recompute: Recompute, kept: float) -> None:
    assert kept_bytes_per_token(LLAMA, 32, recompute, attention).block == pytest.approx(kept)


def job(**changes: object) -> Workload:
    given = {"ranks": 8, "micro_batch": 1, "seq_len": 64, "accumulation": 6, "recompute": "none", **changes}
    return Workload(MACHINE, OURS, GPT, DDP, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "in_flight"),
    [
        ({}, 1),
        ({"axes": Ways(pipeline=4)}, 4),
        ({"axes": Ways(pipeline=4), "accumulation": 3}, 3),
        ({"axes": Ways(pipeline=4, chunks=2)}, 4 + 3 / 2),
        ({"axes": Ways(pipeline=4, chunks=2), "accumulation": 5}, 5),
        ({"axes": Ways(pipeline=4, schedule="breadth-first")}, 6),
        ({"axes": Ways(schedule="breadth-first")}, 6),
        ({"axes": Ways(pipeline=4, schedule="zb-h1")}, 4),
        ({"axes": Ways(pipeline=4, schedule="zb-h2"), "accumulation": 20}, 7),
        ({"axes": Ways(pipeline=4, chunks=2, schedule="zb-v")}, 4),
        ({"axes": Ways(pipeline=4, chunks=2, schedule="dualpipe-v")}, 9 / 2),
        ({"axes": Ways(pipeline=4, chunks=2, schedule="dualpipe-v"), "accumulation": 3}, 3),
    ],
)
def test_micro_batches_in_flight(changes: dict[str, object], in_flight: float) -> None:
    """One block keeps, per token, 32 h (arXiv 2205.05198 without dropout) and 4 bytes a head."""
    one = job(**changes)
    items = memory_items(one)
    assert float(items["activations"]) == pytest.approx(
        in_flight * (8 / one.axes.pipeline) * 64 * (32 * 32 + 4 * 8)
    )
    assert float(items["logits"]) == 64 * 14 * 48
    compiled = Stack.model_validate({"name": "s", "description": "d", "logit_bytes": fact(4)})
    assert float(memory_items(replace(one, stack=compiled))["logits"]) == 64 * 4 * 48
    assert float(items["framework"]) == 2 * GIB


def test_a_pipelines_exchange_and_the_hosts_time() -> None:
    """Activations of 64 tokens x 32 values in 16 bits, over the node's link, both ways, twice a rank; and 2
    passes of 100 us for each of 2 blocks and 6 micro-batches. Once a step a tied head's gradient."""
    stack = Stack.model_validate(
        {"name": "s", "description": "d", "collective_us": fact(30), "unit_us": fact(100)}
    )
    one = replace(job(ranks=4, axes=Ways(pipeline=4, chunks=2)), stack=stack, scheme=ZERO3)
    items = step_time(one).items
    exchange = 2 * 2 * (30e-6 + 2 * 64 * 32 / 100e9)
    tied = 30e-6 + 4 * GPT.vocab * 32 / 100e9
    assert items["pipeline_exchange"] == pytest.approx(6 * exchange + tied, rel=1e-12)
    assert items["host"] == pytest.approx(6 * 2 * 2 * 100e-6, rel=1e-12)
    blocks = sum(items[name] for name in ("forward", "backward", "host"))
    head = work(Computer(MACHINE, "bf16"), GPT, 1, 64, "none", "flash")
    busy = blocks / 6 - head.head_forward - head.head_backward
    assert items["bubble"] == pytest.approx(3 / 2 * (busy + exchange), rel=1e-12)
    # Two micro-batches over four ranks: each rank also waits for the first of them at its second chunk.
    few = step_time(replace(one, accumulation=2)).items
    assert few["bubble"] == pytest.approx((3 / 2 + 2 / 2) * (busy + exchange), rel=1e-12)


def test_bubbles_of_split_backwards() -> None:
    """ZB-H1: (p - 1) (F + B - W) where 1F1B has (p - 1) (F + B + W) (2401.10241, section 2.3); W is the time
    of the products of 2 blocks' forward. A single micro-batch leaves no hole that another's W could fill. A
    grid is its points."""
    several = np.array([6, 1, 40])
    axes = Ways(pipeline=4)

    def bubble(schedule: str, accumulation: object, chunks: int = 1) -> object:
        changed = axes.model_copy(update={"schedule": schedule, "chunks": chunks})
        return step_time(job(ranks=4, axes=changed, accumulation=accumulation)).items["bubble"]

    weight = Computer(MACHINE, "bf16").matmul_s(2 * 64 * block_matmul_flops_per_token(GPT))
    for many, weights in ((6, 2), (40, 2), (1, 1)):
        expected = bubble("1f1b", many) - 3 * weights * weight
        assert bubble("zb-h1", many) == pytest.approx(expected, rel=1e-9)
    for schedule, chunks in (("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2)):
        one_by_one = [bubble(schedule, int(many), chunks) for many in several]
        assert bubble(schedule, several, chunks) == pytest.approx(one_by_one, rel=1e-9)
        assert one_by_one[2] < bubble("1f1b", 40)


def test_the_host_hides_behind_the_device_or_makes_it_wait() -> None:
    """Of launching, what takes longer than a block's 4 passes of computation adds up; of waiting, everything,
    but only where hooks shard the gradients."""
    one = replace(job(ranks=4), scheme=ZERO3)
    w = work(Computer(MACHINE, "bf16"), GPT, 1, 64, "none", "flash")
    passes = 8 * one.accumulation
    longer = float(w.backward) * 1e6 + 50
    for constant, scheme, by_hand in (
        ("launch_us", ZERO3, 2 * longer - (w.forward + w.backward) * 1e6),
        ("launch_us", DDP, 2 * longer - (w.forward + w.backward) * 1e6),
        ("unit_us", ZERO3, 2 * longer),
        ("unit_us", DDP, 0),
    ):
        stack = Stack.model_validate({"name": "s", "description": "d", constant: fact(longer)})
        host = step_time(replace(one, stack=stack, scheme=scheme)).items["host"]
        assert host == pytest.approx(passes * by_hand * 1e-6), (constant, scheme.name)
    less = fact(float(w.forward) * 0.9e6)
    again = replace(one, stack=stack, scheme=ZERO3, recompute="full")  # the forward's hooks run a third time
    assert step_time(again).items["host"] == pytest.approx(passes * 3 * longer * 1e-6)
    hidden = Stack.model_validate({"name": "s", "description": "d", "launch_us": less})
    assert step_time(replace(one, stack=hidden)).items["host"] == 0


def test_a_stack_hides_tensor_parallel_collectives() -> None:
    """Behind a block's computation, all of the shorter but a quarter; not those of embedding and head."""
    axes = Ways(tensor=4)
    whole, hiding = (
        replace(
            job(ranks=4, axes=axes),
            stack=Stack.model_validate({"name": "s", "description": "d", **constants}),
        )
        for constants in ({}, {"tensor_overlap": fact(0.75)})
    )
    w = work(Computer(MACHINE, "bf16"), GPT, 1, 64, "none", "flash", axes)
    two = 2 * (2 * 3 / 4 * 2 * 64 * 32 / 100e9)  # all-reduces of 64 tokens x 32 values in 16 bits
    assert two < w.forward
    passes, ends = 8 * whole.accumulation, whole.accumulation * two
    assert step_time(whole).items["tensor_parallel"] == pytest.approx(passes * 2 * two + ends)
    assert step_time(hiding).items["tensor_parallel"] == pytest.approx(passes * 2 * two / 4 + ends)


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_enters_attention_with_a_latent_is_narrower(in_parts: bool, recompute: Recompute) -> None:
    """12 + 8 + 4 features of a token in place of 32, which go half of an all-reduce's way where ranks divide
    tokens. Else they are reduced behind a backward alone, and a forward, recomputed or not, has none."""
    latent = Latent(kv_rank=8, q_rank=12, rope=4, nope=4, value=4)
    model = GPT.model_copy(update={"latent": latent, "biases": False, "positions": "rotary"})
    stack = Stack.model_validate({"name": "s", "description": "d", "sequence_parallel": in_parts})
    one = replace(job(ranks=4, axes=Ways(tensor=4)), stack=stack, recompute=recompute, model=model)
    hidden = 2 * 3 / 4 * 2 * 64 * 32 / 100e9  # an all-reduce of 64 tokens x 32 values in 16 bits
    passes = 3 if recompute == "full" else 2
    narrow = passes / 2 if in_parts else 1
    by_hand = 8 * (passes * hidden + (passes - narrow + narrow * 24 / 32) * hidden) + 2 * hidden
    assert step_time(one).items["tensor_parallel"] == pytest.approx(one.accumulation * by_hand)


def test_a_stack_cuts_a_blocks_collectives() -> None:
    """On 4 ranks each piece of a block's two gathers takes a base of 30 us, each of its reductions too; the
    root's stay whole."""
    whole = {"name": "s", "description": "d", "collective_us": fact(30)}
    cut = {**whole, "gathers": fact(4), "reductions": fact(2)}
    lanes = [
        step_time(replace(job(ranks=4), scheme=ZERO3, stack=Stack.model_validate(stack))).lane
        for stack in (whole, cut)
    ]
    more = {name: lanes[1][name] - lanes[0][name] for name in lanes[0]}
    passes = 8 * job(ranks=4).accumulation
    assert more["forward_gather"] == pytest.approx(passes * 3 * 30e-6)
    assert more["backward_gather"] == pytest.approx(passes * 3 * 30e-6)
    assert more["grad_reduce"] == pytest.approx(passes * 1 * 30e-6)


def test_what_is_encoded_and_decoded_around_each_hop() -> None:
    """A gather is encoded by its owner and decoded by everyone at the end; a reduction at every hop."""
    levels = Levels.fit({"node": 4}, 8)
    scheme = ZERO3.model_copy(update={"forward_gather": "int8", "grad_reduce": "int4"})
    values: dict[str, list[int]] = {}
    for t in transfers(8000, False, scheme, levels, "bf16", "bf16"):
        values.setdefault(t.collective.name, []).append(t.quantized_values)
    assert values["forward_gather"] == [1000, 8000]
    assert values["backward_gather"] == [0, 0]
    assert values["grad_reduce"] == [2 * 8000, 2 * 2000]


def test_what_a_swap_encodes_and_decodes() -> None:
    """Its own shard's message and the partner's."""
    levels = Levels.fit({"node": 4}, 8)
    sync = Sync(beyond="node", every=4, partners="exponential")
    scheme = Scheme(
        name="s", weights="node", grads="node", optim="node", sync=sync, sync_swap="int8", block_size=500
    )
    [swap] = [
        t for t in transfers(8000, False, scheme, levels, "bf16", "bf16") if t.collective.name == "sync_swap"
    ]
    assert (swap.quantized_values, swap.hop.count) == (2 * 2000, 2)


def test_bytes_of_a_flat_step_by_hand() -> None:
    """A unit of 8,000 values on 2 nodes of 4: 3 of 4 ranks have their successor inside the node. A gather in
    bf16 sends 7 x 2,000 bytes, the INT4 reduction goes hop by hop: 4,000 values to 3, 1,000 to 1."""
    levels = Levels.fit({"node": 4}, 8)
    scheme = ZERO3.model_copy(update={"grad_reduce": "int4", "block_size": 500})
    by_rank = [
        sent_bytes([8000], scheme, levels, "bf16", "bf16", 1, False, "flat", rank) for rank in range(8)
    ]
    int4 = {("node", "grad_reduce", "int4"): 3 * 1024, ("world", "grad_reduce", "int4"): 512}
    for rank, sent in enumerate(by_rank):
        crosses = rank in (3, 7)
        gather = {"node": 0 if crosses else 14000, "world": 14000 if crosses else 0}
        assert sent == {(level, "forward_gather", "native"): count for level, count in gather.items()} | int4
    assert sent_bytes([8000], scheme, levels, "bf16", "bf16", 1, False, "flat") == {
        ("node", "forward_gather", "native"): 10500,
        ("world", "forward_gather", "native"): 3500,
        **int4,
    }


def test_bytes_of_joined_hops_by_hand() -> None:
    """The same unit: each rank sends a seventh of its 14,000 bytes to each of 3 in its node and 4 beyond."""
    levels = Levels.fit({"node": 4}, 8)
    scheme = ZERO3.model_copy(update={"grad_reduce": "int4", "block_size": 500})
    for rank in (None, 0, 7):
        assert sent_bytes([8000], scheme, levels, "bf16", "bf16", 1, False, "joined", rank) == {
            ("node", "forward_gather", "native"): 6000,
            ("world", "forward_gather", "native"): 8000,
            ("node", "grad_reduce", "int4"): 3 * 1024,
            ("world", "grad_reduce", "int4"): 512,
        }


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    places=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 3),
    units=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    is_clipped=st.booleans(),
)
def test_flat_bytes_by_level(
    counts: list[int], places: tuple[float, ...], units: list[int], is_clipped: bool
) -> None:
    """The mean over ranks is that of each rank's bytes; all levels together get what hops send."""
    sizes = np.cumprod(counts).tolist()
    levels = Levels.fit({f"level{i}": size for i, size in enumerate(sizes[:-1])}, sizes[-1])
    weights, grads, optim = sorted(int(place * len(levels.names)) for place in places)
    scheme = Scheme(
        name="drawn", weights=levels.names[weights], grads=levels.names[grads], optim=levels.names[optim]
    )
    numels = [unit * 256 * levels.world for unit in units]
    arguments = numels, scheme, levels, "bf16", "fp32", 2, is_clipped
    totals: Counter[tuple[str, str, str]] = Counter()
    hops = Counter[str]()
    for (_, name, _), count in sent_bytes(*arguments).items():
        hops[name] += int(count)
    for rank in range(levels.world):
        flat = Counter[str]()
        for key, count in sent_bytes(*arguments, "flat", rank).items():
            totals[key] += int(count)
            flat[key[1]] += int(count)
        assert flat == hops
    assert sent_bytes(*arguments, "flat") == {k: mean(total, levels.world) for k, total in totals.items()}


def test_a_mean_is_recorded_exactly() -> None:
    for total, ranks in ((12, 4), (80, 3), (2**53 - 1, 7)):
        sent = Sent(level="node", collective="norm_gather", wire="native", bytes=mean(total, ranks))
        assert Sent.model_validate_json(sent.model_dump_json()) == sent
        assert isinstance(sent.bytes, int) == (total % ranks == 0)


@pytest.mark.parametrize(("backend", "held"), [("gloo", 16000 + 2000), ("nccl", 2 * 16000)])
def test_buffers_of_a_ring_by_hand(backend: str, held: int) -> None:
    """A unit of 8,000 values in bf16 on 2 nodes of 4: its gradient and an eighth; or it and its copy."""
    levels = Levels.fit({"node": 4}, 8)
    assert buffer_bytes([8000], ZERO3, levels, "bf16", "bf16", backend, "flat") == held
    # Joined, gloo's ranks send seven eighths and receive as much; other back ends do the same as for a ring.
    joined = {"gloo": 16000 + 14000, "nccl": 2 * 16000}[backend]
    assert buffer_bytes([8000], ZERO3, levels, "bf16", "bf16", backend, "joined") == joined
    one_level = Levels.fit({}, 8)  # ranks are in the order of the shards: no copy
    assert buffer_bytes([8000], ZERO3, one_level, "bf16", "bf16", backend, "flat") == 16000 + 2000


def test_weights_that_are_fetched_lie_beside_the_buffers_of_their_gather() -> None:
    """8,000 values, whole on the host, a half of them on each device of a package for the backward, which
    sends its partner 16 blocks of 256 values in INT8, each with a scale of 4 bytes."""
    placed = {"weights": "self@host", "secondary": "package", "grads": "self", "optim": "package@host"}
    scheme = Scheme.parse({**placed, "name": "mine", "backward_gather": "int8"}, "made up")
    levels = Levels.fit({"package": 2}, 8)
    message = 4000 + 16 * 4
    assert buffer_bytes([8000], scheme, levels, "bf16", "bf16", "gloo") == 3 * message + 2 * 8000


def test_memory_peaks_at_the_start_at_the_loss_or_after_the_backward() -> None:
    kinds = (
        "weights",
        "secondary",
        "optim",
        "gathered",
        "framework",
        "activations",
        "logits",
        "grads",
        "buffers",
    )
    items = dict(zip(kinds, (1.0, 2.0, 4.5, 7.5, 16.0, 32.0, 64.0, 128.0, 256.0), strict=True), start=0.0)
    assert peak_bytes(items, False) == 31 + 128 + 256
    assert peak_bytes({**items, "activations": 1000.0}, False) == 31 + 1064
    assert peak_bytes({**items, "activations": 1000.0}, True) == 31 + 1064 + 128
    masters = 4.5 / 3  # without the two moments of Adam
    assert peak_bytes({**items, "start": 1000.0}, False) == 1 + 2 + 16 + masters + 1000
    grid = peak_bytes({**items, "activations": 1000.0}, np.array([False, True]))
    assert list(grid) == [31 + 1064, 31 + 1064 + 128]


def test_of_two_units_in_turn_one_comes_while_the_other_leaves() -> None:
    assert [largest_two(numels) for numels in ([5, 3, 7, 2], [7, 1, 7], [4], [])] == [10, 8, 4, 0]


def test_gradients_wait_only_where_they_accumulate() -> None:
    scheme = Scheme(name="s", weights="self", grads="self", optim="world")
    once, grid = (replace(job(), scheme=scheme, accumulation=a) for a in (1, np.array([1, 2])))
    one, two = memory_items(grid)["grads"]
    assert 8 * one == two == 8 * memory_items(once)["grads"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 0}, "ranks 0"),
        ({"ranks": 6}, "machine 'made-up': data 6 does not fill whole groups of level 'node' of 4"),
        ({"accumulation": 0}, "accumulation 0"),
        ({"micro_batch": np.array([1, 0])}, "micro_batch"),
        ({"axes": Ways(tensor=3)}, "8 ranks are no multiple of tensor 3"),
        ({"axes": Ways(pipeline=2, schedule="zb-v")}, "schedule 'zb-v' with 1 chunks"),
        ({"axes": Ways(pipeline=2, chunks=2, schedule="zb-h1")}, "schedule 'zb-h1' with 2 chunks"),
        (
            {"axes": Ways(pipeline=8, chunks=2)},
            "8 layers cannot be divided over 16 stages",
        ),
        ({"ranks": 48, "axes": Ways(tensor=16)}, "8 heads cannot be divided over tensor 16"),
        (
            {"ranks": 6, "axes": Ways(tensor=2, pipeline=3)},
            "8 layers cannot be divided over 3 stages",
        ),
    ],
)
def test_degrees_that_do_not_divide(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        job(**changes)


def test_a_scheme_that_the_machine_cannot_serve_names_both() -> None:
    scheme = ZERO3.model_copy(update={"name": "x", "weights": "rack"})
    with pytest.raises(UserError, match=r"^scheme 'x' on machine 'made-up': weights: no level 'rack'"):
        replace(job(), scheme=scheme)


def test_ranks_are_numbered_tensor_parallel_first() -> None:
    one = job(ranks=32, axes=Ways(tensor=2, pipeline=4))
    assert one.levels.sizes == (1, 2, 4)
    assert one.tokens == 64 * 6 * 4
    assert job(axes=Ways(tensor=4)).levels.sizes == (1, 1, 2)
    assert job(axes=Ways(tensor=8)).levels.sizes == (1, 1, 1)
    with pytest.raises(UserError, match="tensor 8 does not divide level 'node' of 12"):
        node = MACHINE.levels[0].model_copy(update={"size": 12})
        machine = MACHINE.model_copy(update={"levels": (node, MACHINE.levels[1])})
        Workload(machine, OURS, GPT, DDP, 24, 1, 64, axes=Ways(tensor=8))


@pytest.mark.parametrize(
    ("ranks", "tensor", "stages", "level"),
    [(4, 1, 4, "node"), (4, 2, 2, "node"), (8, 2, 2, "world"), (8, 1, 8, "node")],
)
def test_the_link_to_the_next_stage(ranks: int, tensor: int, stages: int, level: str) -> None:
    one = job(ranks=ranks, axes=Ways(tensor=tensor, pipeline=stages))
    assert one.mesh.along("pipeline")[0].level == level


def test_rates_and_what_fits() -> None:
    """Model FLOPs by hand: 6 a weight that multiplies, 12 L H T; recomputed: 2 a weight and 4 L H T more."""
    one = job(recompute="full")
    p = predict(one)
    weights = 8 * (12 * 32 * 32 + 13 * 32) + 2 * 32 + 48 * 32
    tokens = 64 * 6 / float(p.step_time_s)
    assert float(p.tokens_per_s_per_gpu) == pytest.approx(tokens)
    assert float(p.tflops_per_gpu) * 1e12 == pytest.approx(tokens * (6 * weights + 12 * 8 * 32 * 64))
    again = 8 * (2 * 12 * 32 * 32 + 4 * 32 * 64)
    assert float(p.hfu_tflops_per_gpu - p.tflops_per_gpu) * 1e12 == pytest.approx(tokens * again)
    assert p.step_time_fast_s < p.step_time_s < p.step_time_slow_s
    assert predict(one, interval=False).step_time_slow_s == p.step_time_s
    peak = float(p.peak_memory_bytes)
    for room, fits, short in ((peak, True, 0), (peak - 3, False, 3), (None, None, 0)):
        gib = None if room is None else room / GIB
        device = MACHINE.device.model_copy(update={"memory_gib": gib})
        other = replace(one, machine=MACHINE.model_copy(update={"device": device}))
        found = predict(other)
        assert (found.fits, short_by(other, found)) == (fits, short)
        assert record(other, found)["fits"] is fits


def test_a_record_is_flattened() -> None:
    row = record(job(), predict(job()))
    columns = flat(row)
    assert (columns["step_time_fast_s"], columns["step_time_slow_s"]) == tuple(row["interval"]["step_time_s"])
    assert not [key for key, value in columns.items() if isinstance(value, dict | list)]
    assert columns["gpus"] == row["gpus"] == 8


def candidate(knobs: tuple[object, ...], seconds: float, short: float = 0) -> Candidate:
    return Candidate(knobs, replace(job(), scheme=ZERO3), 2, 3, seconds, short)


BEST = (
    "world", None, "world", "world", *["native"] * 4, 2, "none", 1.0, None, 1, 1, "ring", "auto", 1, "flat",
    0, 1, "1f1b", 1,
)  # fmt: skip


def with_(changes: dict[int, object]) -> tuple[object, ...]:
    """The best one's knobs, with others by place."""
    return tuple(changes.get(place, knob) for place, knob in enumerate(BEST))


def test_what_other_choices_cost() -> None:
    """Knob by knob: the fastest other value that fits, else the least that is short, else none."""
    points = [
        candidate(BEST, 1.0), candidate(with_({0: "node"}), 1.5), candidate(with_({0: "self"}), 1.25),
        candidate(with_({0: "x"}), 0.5, 9), candidate(with_({8: 4}), 0.9, 2 * GIB),
        candidate(with_({8: 8}), 0.8, 3 * GIB), candidate(with_({9: "full", 21: 2}), 0.1),  # differs in two
    ]  # fmt: skip
    lines = Plan([points[0]], {point.knobs: point for point in points}).reasons(points[0])
    assert lines[0] == "weights world: self would be 25.0 % slower"
    assert lines[8] == "micro_batch 2: 4 does not fit: 2 GiB short"
    assert lines[9] == "recompute none: no other value was possible here"
    assert lines[11] == "cp 1: no other value was possible here"
    assert lines[13] == "schedule 1f1b: no other value was possible here"
    # No way and states on one rank along context, no experts; all layers alike, and all on the device.
    assert len(lines) == len(BEST) - 7


def test_what_another_degree_of_context_costs() -> None:
    """In its own best way; another way at the same degree."""
    times = {(4, "heads"): 1.0, (4, "ring"): 1.5, (4, "gather"): 1.25, (2, "ring"): 1.1, (1, "ring"): 2.0}
    points = [candidate(with_({13: cp, 14: way}), seconds) for (cp, way), seconds in times.items()]
    lines = Plan([points[0]], {point.knobs: point for point in points}).reasons(points[0])
    assert lines[11] == "cp 4: 2 would be 10.0 % slower"
    assert lines[12] == "ways heads: gather would be 25.0 % slower"


def test_batches_and_degrees_of_the_search() -> None:
    """Every micro-batch that divides the share of 16 sequences on 4 groups; degrees that divide the rest."""
    found = list(jobs(MACHINE, OURS, GPT, 8, 64, 16, [Ways(tensor=2)]))
    for one in found:
        assert one.levels.world == 4
        batches = {"depth": [1, 2, 4], "breadth": [1, 2]}[one.order]  # a lone micro-batch has no order
        assert list(one.micro_batch) == batches
        assert list(one.accumulation) == [4 // b for b in batches]
    assert {one.order for one in found} == {"depth", "breadth"}
    few = jobs(MACHINE, OURS, GPT, 8, 64, 16, [Ways(tensor=2)], micro_batches=[3, 4], recompute=["full"])
    assert {(*one.micro_batch, *one.accumulation, one.order, one.recompute) for one in few} == {
        (4, 1, "depth", "full")
    }
    odd = GPT.model_copy(update={"layers": 3, "heads": 1})
    for model, most, data in ((GPT, 3, {8}), (odd, 2, {8, 4})):  # 3 layers as 2 and 1
        axes = axes_to_try(MACHINE, model, [1, most], [1, most])
        points = plan(MACHINE, OURS, model, 8, 64, 16, axes, within=math.inf).ranked
        assert {point.job.levels.world for point in points} == data
    assert not list(jobs(MACHINE, OURS, GPT, 8, 64, 12, [Ways()]))
    with pytest.raises(
        UserError, match="a global batch of 12 sequences is not divisible by any data-parallel degree of 8"
    ):
        plan(MACHINE, OURS, GPT, 8, 64, 12, [Ways()])
    with pytest.raises(UserError, match=r"not divisible by .* of 8 ranks x micro-batch 3 or 5"):
        plan(MACHINE, OURS, GPT, 8, 64, 16, [Ways()], micro_batches=[3, 5])


def test_what_a_candidate_is_short_of_is_what_is_predicted() -> None:
    device = MACHINE.device.model_copy(update={"memory_gib": 2 + 2e-3})
    machine = MACHINE.model_copy(update={"device": device})
    found = plan(machine, OURS, GPT, 4, 64, 16, [Ways()], within=math.inf)
    shorts = {point.short_by for point in found.candidates.values()}
    assert 0 in shorts
    assert len(shorts) > 10
    for point in found.candidates.values():
        one = point.job
        assert one.micro_batch * one.accumulation * 4 == 16
        assert point.short_by == pytest.approx(short_by(one, predict(one, interval=False)), abs=1)


def test_the_written_suite_is_the_plans_best(tmp_path: Path) -> None:
    (tmp_path / "config" / "suites").mkdir(parents=True)
    for name in ("schemes", "models"):
        text = (ROOT / "config" / f"{name}.yaml").read_text()
        (tmp_path / "config" / f"{name}.yaml").write_text(text)
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    [smoke] = [spec for spec in CONFIG.runs(["smoke"]) if spec.ranks == 8][:1]
    scheme = ZERO3.model_copy(update={"grad_reduce": "int4"})
    machine = MACHINE.model_copy(update={"name": "local"})
    model = smoke.model.model_copy(update={"seq_len": 64})
    batches = Workload(
        machine,
        OURS,
        model,
        scheme,
        8,
        np.array([1, 2]),
        64,
        np.array([6, 3]),
        recompute="none",
        axes=Ways(schedule="breadth-first"),
    )
    best = Candidate((), batches, 2, 3, 1.0, 0.0)
    write(best, "found", Config(tmp_path))
    [spec] = Config(tmp_path).runs(["found"])
    assert (spec.ranks, spec.micro_batch, spec.accumulation, spec.order) == (8, 2, 3, "breadth")
    assert (spec.seq_len, spec.recompute) == (64, "none")
    assert spec.scheme.model_copy(update={"name": "zero3", "known_as": scheme.known_as}) == scheme
    assert (spec.steps, spec.warmup_steps, spec.compute_dtype) == (20, 2, "bf16")
    for taken in ("found", "zero3"):
        with pytest.raises(UserError, match=f"'{taken}' is taken"):
            write(best, taken, Config(tmp_path))
    shown = replace(best, knobs=knobs_of(best.job, micro_batch=2))
    text = report(Plan([shown], {shown.knobs: shown}))
    assert "grad_reduce int4; micro-batch 2 x 3, order breadth, recompute none, tp 1, pp 1" in text


def test_a_copy_of_the_weights_is_kept_where_nothing_else_is_them() -> None:
    levels = Levels.fit({"node": 2}, 4)
    whole = Scheme(name="ddp", weights="self", grads="self", optim="self")
    apart = Scheme(name="hier", weights="node", grads="node", optim="world")
    kept = {
        (scheme.name, is_fp32): keeps_weights_copy(scheme, levels, is_fp32)
        for scheme in (whole, ZERO3, apart)
        for is_fp32 in (True, False)
    }
    assert kept == {
        ("ddp", True): False, ("ddp", False): True, (ZERO3.name, True): False, (ZERO3.name, False): False,
        ("hier", True): True, ("hier", False): True,
    }  # fmt: skip
