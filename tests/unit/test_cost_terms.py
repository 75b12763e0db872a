"""Single terms of the cost formulas, each worked out by hand where a whole step would hide it."""

from typing import Any

import numpy as np
import pytest
from machines import SIZES, fact, machine

from lowband.cost.activations import to_host_bytes
from lowband.cost.buffers import buffer_bytes
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.collectives import Network
from lowband.cost.compute import Computer, Work, muon_flops, work
from lowband.cost.experts import copied_bytes
from lowband.cost.lora import Lora
from lowband.cost.matrices import exchange_s
from lowband.cost.memory import start_bytes, state_bytes
from lowband.cost.states import sent_as_states
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.spec.attention import Latent
from lowband.spec.axes import Ways
from lowband.spec.context import layout_of
from lowband.spec.machine import Level, Link
from lowband.spec.mesh import SELF, WORLD, Joined, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.offload import Offload
from lowband.spec.scheme import Scheme
from lowband.spec.stack import OURS
from lowband.spec.step import Attention, Operations, Products, Recompute

GPT = ModelSpec(name="g", layers=4, hidden=64, heads=8, vocab=96, seq_len=32, source="made up")
MIXED = GPT.model_copy(update={
    "biases": False, "mlp_hidden": 1024, "experts": 2, "top_k": 1, "expert_hidden": 64, "dense_layers": 1,
})  # fmt: skip


@pytest.mark.parametrize(("positions", "angles"), [("learned", 0), ("rotary", 4 * 32 * 8 * 4)])
def test_rotary_angles_go_to_the_host(positions: str, angles: int) -> None:
    """2 x 32 tokens in bf16: 9 x 64 + 2 x 256 + 4 values and 8 log-sum-exps in fp32 each; of 32 positions
    four times the head's 8 angles in fp32."""
    model = GPT.model_copy(update={"positions": positions})
    assert to_host_bytes(model, 2, 32, "bf16") == 2 * 64 * 1092 + 4 * 64 * 8 + angles


def test_a_mean_block_of_layers_with_and_without_experts() -> None:
    """Matrices are multiples of 256 elements, two norms of 64 are padded to that. One of four blocks has an
    MLP 1,024 wide, the others a router and two experts 64 wide."""
    attention = 3 * 64 * 64 + 64 * 64 + 2 * 256
    dense, routed = attention + 2 * 1024 * 64, attention + 256 + 2 * 2 * 64 * 64
    root = (96 + 32) * 64 + 256
    assert unit_numels(MIXED, Levels.fit({}, 1)) == [root, *[(dense + 3 * routed) // 4] * 4]


def test_what_is_fetched_is_beside_gathers_and_no_reduction() -> None:
    """A unit of 8,000 values in bf16 on 8 ranks: a reduction holds it and what seven ranks send, an eighth
    each. Weights that come from the host are beside the gathers, which hold less."""
    on_device, beyond = (
        Scheme.model_validate({"name": "s", "weights": place, "grads": "world", "optim": "world@host"})
        for place in ("world", "world@host")
    )
    for scheme in (on_device, beyond):
        assert buffer_bytes([8000], scheme, Levels.fit({}, 8), "bf16", "bf16", "gloo") == 16000 + 14000


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_copies_of_weights_beyond_the_device(tier: str) -> None:
    """On 4 ranks a root's shard of 2,048 bytes and a block's of 4,096, in three micro-batches: new weights go
    once; for a forward they come but where they are new, twice, and for a backward three times, but a root's,
    which stays. Of a disk all go by way of the host."""
    places = {"weights": f"world@{tier}", "grads": "world", "optim": f"world@{tier}"}
    scheme = Scheme.model_validate({"name": "s", **places})
    sent = sent_bytes([4096, 8192], scheme, Levels.fit({}, 4), "bf16", "bf16", 3, False)
    copied = {"weights_stash": 6144, "forward_fetch": 2 * 6144, "backward_fetch": 3 * 4096}
    states = {"stash": 12 * 3072, "fetch": 12 * 3072} if tier == "disk" else {}
    of_host = {"stash": 4 * 3072, "fetch": 2 * 3072} | copied
    for place, rows in (("host", of_host), ("disk", states | copied if tier == "disk" else {})):
        assert {row: count for (at, row, _), count in sent.items() if at == place} == rows


def test_the_two_largest_blocks_are_gathered_beside_the_root() -> None:
    zero3 = Scheme(name="zero3", weights="world", grads="world", optim="world")
    found = state_bytes([1024, 2048, 4096, 3072], zero3, Levels.fit({}, 4), "bf16", "bf16", 1, "gloo")
    assert found["gathered"] == 2 * (1024 + 4096 + 3072)


@pytest.mark.parametrize(("rank", "peak"), [(None, 4 * 1536), (0, 2 * 1792), (1, 4 * 1536), (6, 4 * 1536)])
def test_what_the_start_takes(rank: int | None, peak: int) -> None:
    """Parameters of 256 and 1,536 elements on seven ranks, 256 each: all but the first make the larger one in
    fp32; the first one the smaller one, and the gathered buffer in bf16 is more."""
    zero3 = Scheme(name="zero3", weights="world", grads="world", optim="world")
    assert start_bytes([[(256,), (1536,)]], zero3, Levels.fit({}, 7), "bf16", rank) == peak


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ((None, None), "offload beside no optim beyond the device"),
        ((None, "host"), "offload beside weights beyond the device"),
        (("host", "host"), "offload beside weights beyond the device"),
        (("disk", None), "late: states on a disk are updated when their gradients are there"),
    ],
)
def test_late_updates_are_of_all_states_on_the_host(places: tuple[Any, Any], says: str) -> None:
    late = Offload(late=True)
    with pytest.raises(UserError, match=says):
        Beyond(*places, offload=late)
    assert Beyond("host", offload=late).is_late


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": 1.1}, {"share": np.array([0.5, 0])}, {"stride": 0.5}, {"stride": -1}]
)
def test_parts_that_no_states_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"^(share|stride) .* \(allowed: (more than 0, at most 1|0, or 1 or more)"
    ):
        Beyond("host", **wrong)


def test_joined_hops_by_hand() -> None:
    """Of 8 ranks each sends to 1 in its package, 2 more in its node and 4 beyond: 7 messages of 5 us, one
    after the other, behind 10 us of a collective. Links have 4, 2 and 1 GB/s."""
    stack = OURS.model_copy(update={"collective_us": fact(10)})
    network = Network(machine(latency_us=5), stack, own="joined")
    hops = tuple(Levels.fit(SIZES, 8).hops(SELF, WORLD))
    sent = 1e6 / 4e9 + 2e6 / 2e9 + 4e6 / 1e9
    assert network.joined_s(Joined(hops), 7e6) == pytest.approx(45e-6 + sent)
    assert network.joined_s(Joined(hops), 7e6, pieces=3, rounds=2) == pytest.approx(6 * 45e-6 + sent)
    assert network.all_reduce_s(hops, 8e6) == pytest.approx(2 * 45e-6 + 2 * sent)


def test_a_message_has_the_cards_of_ranks_that_rest() -> None:
    """Eight ranks of a node share four cards, each with 10 GB/s as its own share: two ranks a card, so that
    one alone has 20 GB/s, and no more. Inside of a node each has its own link. Of a ring over both levels the
    slowest message decides."""
    levels = (
        Level(name="node", size=8, link=Link(gigabytes_per_s=100, source="made up")),
        Level(name="world", link=Link(gigabytes_per_s=10, cards=4, latency_us=fact(5), source="made up")),
    )
    stack = OURS.model_copy(update={"collective_us": fact(10)})
    network = Network(machine().model_copy(update={"levels": levels}), stack)
    node, world = Levels.fit({"node": 8}, 16).hops(SELF, WORLD)
    assert network.message_s(world, 1, 1e6) == pytest.approx(5e-6 + 1e6 / 10e9)
    assert network.message_s(world, 8, 1e6) == pytest.approx(5e-6 + 1e6 / 20e9)
    assert network.message_s(node, 8, 1e6) == pytest.approx(1e6 / 100e9)
    assert network.pass_on_s([node, world], 1e6) == pytest.approx(10e-6 + 5e-6 + 1e6 / 20e9)


def test_an_exchange_between_replicas_moves_its_momentum_if_it_has_one() -> None:
    """Of a piece's value difference, anchor and weights, 32 bytes; of a part's the mean 8, and 48 with
    momentum; at 1 GB/s."""
    computer = Computer(machine(memory_gigabytes_per_s=fact(1)), "bf16")
    assert computer.outer_s(1e6, 2e5, False) == pytest.approx((32e6 + 1.6e6) / 1e9)
    assert computer.outer_s(1e6, 2e5, True) == pytest.approx((32e6 + 1.6e6 + 9.6e6) / 1e9)


def test_muons_products_of_layers_with_and_without_experts() -> None:
    """Five times, of m x n with m <= n: 4 m m n + 2 m m m FLOPs. Attention has 64 x 192 and 64 x 64; one of
    four blocks an MLP of two 64 x 1,024, the others a router of 2 x 64 and two experts of two 64 x 64."""
    attention, square = 3_670_016 + 1_572_864, 1_572_864
    dense, routed = attention + 2 * 17_301_504, attention + 1_040 + 4 * square
    assert muon_flops(MIXED) == 5 * (dense + 3 * routed)


def test_experts_with_few_rows_wait_for_their_weights() -> None:
    """Of four blocks three have two experts of two 64 x 64, top 1: in bf16 32,768 bytes, at 1 GB/s more than
    a token's 2 x 8,192 FLOPs at 10^12 a second; of 10^6 tokens the products take longer."""
    computer = Computer(machine(memory_gigabytes_per_s=fact(1)), "bf16")
    few, many = (work(computer, MIXED, tokens, 1, "none", "flash").experts for tokens in (1, 10**6))
    assert few == pytest.approx(0.75 * 32768 / 1e9)
    assert many == pytest.approx(0.75 * 16384 * 1e6 / 1e12)


def test_factors_in_8_bits_are_cast() -> None:
    """Products are as fast in 8 bits here, so that casts are all that differs: 6 bytes of each factor, at
    1 GB/s. Factors of a block are, of a token, what enters qkv, out, the MLP and its down, 4 x 64, and
    backward the gradients of qkv's 192, out, gate, up and down, 4 x 64; and of qkv, out, a router of 128 and
    both experts, though a token meets one, 41,088 weights. What is recomputed casts its factors again."""
    rates = {"bf16": 1.0, "fp8": 1.0}
    device = machine(memory_gigabytes_per_s=fact(1)).device.model_copy(update={"peak_tflops": rates})
    here = machine().model_copy(update={"device": device})
    model = MIXED.model_copy(update={"dense_layers": 0, "gated": True})

    def found(products: Products, recompute: Recompute = "none") -> Work:
        return work(Computer(here, "bf16", products=products), model, 10, 1, recompute, "flash")

    plain, cast = found("bf16"), found("fp8")
    assert cast.forward - plain.forward == pytest.approx(6 * (10 * 256 + 41088) / 1e9)
    assert cast.backward - plain.backward == pytest.approx(6 * (10 * 448 + 41088) / 1e9)
    assert cast.recompute == 0
    assert found("fp8", "full").recompute == cast.forward
    again = [found(products, "op").recompute for products in ("fp8", "bf16")]
    assert again[0] - again[1] == pytest.approx(cast.forward - plain.forward)


def test_adapters_wait_for_memory_or_for_their_products() -> None:
    """Of rank 8 on q and v, 64 x 64: 2,048 weights; of a token A and B move 2 x 2 x (64 + 16 + 64) bytes,
    what scales and adds their outputs 2 x 2 x 5 x 64. Frozen, a head has no gradient of its weights."""
    lora, flops = Lora(8), 2 * 2048
    for rate, products in ((1, 576e-9), (1e6, flops / 1e12)):
        computer = Computer(machine(memory_gigabytes_per_s=fact(rate)), "bf16")
        with_, without = (work(computer, GPT, 10, 1, "none", "flash", lora=each) for each in (lora, None))
        more = 10 * (products + 1280 / (rate * 1e9))
        assert with_.forward - without.forward == pytest.approx(more, rel=1e-6)
        assert with_.weight == pytest.approx(more)
        assert (with_.head_weight, without.head_weight) == (0, pytest.approx(10 * 2 * 64 * 96 / 1e12))


@pytest.mark.parametrize(
    ("operations", "positions", "more", "bytes_more"),
    [
        ("norms", "learned", {}, 0),
        ("norms", "rotary", {}, 20 * (64 + 16)),
        ("single", "learned", {}, 2 * 32 * 64),
        ("single", "rotary", {}, 2 * 32 * 64 + 20 * (64 + 16)),
        ("single", "learned", {"parallel_block": True}, 32 * 64),
        ("single", "learned", {"post_norms": True, "qk_norm": True}, 4 * 32 * 64 + 32 * (64 + 16)),
    ],
)
def test_operations_that_read_and_write(
    operations: Operations, positions: str, more: dict[str, Any], bytes_more: int
) -> None:
    """Bytes of a token's block, at 1 GB/s, beside fused ones: 2 query heads of 8 for each key's. A norm of 64
    values in torch's composition to fp32 and back, and rotary embeddings as complex numbers."""
    computer = Computer(machine(memory_gigabytes_per_s=fact(1)), "bf16")
    model = GPT.model_copy(update={"kv_heads": 2, "positions": positions, **more})
    fused, found = (
        work(computer, model, 10, 1, "none", "flash", operations=each) for each in ("fused", operations)
    )
    assert found.forward - fused.forward == pytest.approx(10 * bytes_more / 1e9, abs=1e-15)
    assert found.backward - fused.backward == pytest.approx(20 * bytes_more / 1e9, abs=1e-15)


def test_of_a_latent_its_positions_are_turned() -> None:
    """4 of each query of 8 heads, and once of the key that all heads share."""
    computer = Computer(machine(memory_gigabytes_per_s=fact(1)), "bf16")
    latent = Latent(kv_rank=16, q_rank=16, rope=4, nope=8, value=8)
    model = GPT.model_copy(update={"positions": "rotary", "latent": latent})
    fused, found = (
        work(computer, model, 10, 1, "none", "flash", operations=each) for each in ("fused", "norms")
    )
    assert found.forward - fused.forward == pytest.approx(10 * 20 * 4 * 9 / 1e9, abs=1e-15)


@pytest.mark.parametrize(
    ("on", "attention", "parallel_block", "gated_kept", "less"),
    [
        (("q", "v"), "flash", False, 0, 64 + 256),  # the MLP's input, and what enters down
        (("q", "v"), "plain", False, 0, 64 + 256 + 64),  # and attention's output
        (("q", "out"), "plain", False, 0, 64 + 256),
        (("q", "v"), "flash", True, 0, 256),  # attention and MLP have one input
        (("out", "down"), "flash", True, 0, 64),
        (("out", "down"), "flash", False, 0, 64 + 64),
        (("q", "v"), "flash", False, 2, 64),  # of a gated MLP what enters down is computed again
        (("q", "v"), "flash", False, 3, 64 + 256),
    ],
)
def test_what_frozen_matrices_need_not_keep(
    on: tuple[str, ...], attention: Attention, parallel_block: bool, gated_kept: int, less: int
) -> None:
    """In bf16, beside the 8 values of each of two adapters, hidden 64 and an MLP 256 wide."""
    model = GPT.model_copy(update={"gated": gated_kept > 0, "parallel_block": parallel_block})
    assert Lora(8, on).kept_more(model, attention, gated_kept) == 2 * (2 * 8 - less)


def test_a_units_matrices_are_few_messages() -> None:
    """Of two matrices a rank sends to the partner in its package one message, to the two others in its node
    two, and of the four beyond two get one: 5 x 5 us, over links that take no time."""
    network = Network(machine(latency_us=5, rate=1e12), OURS)
    units = (((64, 64), (64, 64), (64,)),)
    assert exchange_s(network, units, Levels.fit(SIZES, 8), WORLD) == pytest.approx(25e-6, rel=1e-3)


def test_copies_of_experts_that_a_layer_keeps() -> None:
    """16 experts of 2 x 64 x 256 weights in bf16 on 2 nodes of 4 ranks: two each. Between nodes at most the
    other one's two are copied to a rank; between all ranks any of the other 14."""
    model, levels = GPT.model_copy(update={"experts": 16}), Levels.fit({"node": 4}, 8)
    an_expert = 2 * 2 * 64 * 256
    for route, copies, held in (("hops", 5, 2), ("flat", 5, 5), ("hops", 1, 1), ("flat", 15, 14)):
        assert copied_bytes(model, levels, route, "bf16", copies) == an_expert * (2 + held)
    assert copied_bytes(model, levels, "flat", "bf16", 0) == 0


@pytest.mark.parametrize(("is_recomputed", "forwards"), [(False, 1), (True, 2)])
@pytest.mark.parametrize(
    ("states", "by_level"),
    [
        ("gather", {"package": 4, "node": 2, "world": 1}),  # outermost first, of all that a rank then has
        ("pass", {"package": 4 / 8, "node": 2 / 8, "world": 1 / 8}),  # of 7 messages between 8 ranks
    ],
)
def test_bytes_of_states(states: str, by_level: dict[str, float], is_recomputed: bool, forwards: int) -> None:
    """A state is 8 heads x 8 x 9 values in fp32; 4 layers, 3 micro-batches."""
    linear, s = GPT.model_copy(update={"attention": "linear"}), 8 * 8 * 9 * 4
    ways = Ways(context=8, context_attention="state", context_states=states, zigzag=False)
    of = layout_of(SIZES, ways, 8), 1, 1, 3, is_recomputed
    assert sent_as_states(linear, *of) == {
        (level, f"context_state_{states}{end}", "native"): 4 * 3 * times * s * count
        for level, count in by_level.items()
        for end, times in (("", forwards), ("_grad", 1))
    }
    assert sent_as_states(GPT, *of) == {}
    every_other = linear.model_copy(update={"softmax_every": 2})
    assert {key: 2 * count for key, count in sent_as_states(every_other, *of).items()} == sent_as_states(
        linear, *of
    )
