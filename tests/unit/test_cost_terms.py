"""Single terms of the cost formulas, each worked out by hand where a whole step would hide it."""

import pytest
from machines import SIZES, fact, machine

from lowband.cost.activations import to_host_bytes
from lowband.cost.buffers import buffer_bytes
from lowband.cost.bytes import unit_numels
from lowband.cost.collectives import Network
from lowband.cost.experts import copied_bytes
from lowband.cost.states import sent_as_states
from lowband.spec.axes import Ways
from lowband.spec.context import layout_of
from lowband.spec.mesh import SELF, WORLD, Joined, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import OURS

GPT = ModelSpec(name="g", layers=4, hidden=64, heads=8, vocab=96, seq_len=32, source="made up")


@pytest.mark.parametrize(("positions", "angles"), [("learned", 0), ("rotary", 4 * 32 * 8 * 4)])
def test_rotary_angles_go_to_the_host(positions: str, angles: int) -> None:
    """2 x 32 tokens in bf16: 9 x 64 + 2 x 256 + 4 values and 8 log-sum-exps in fp32 each; of 32 positions
    four times the head's 8 angles in fp32."""
    model = GPT.model_copy(update={"positions": positions})
    assert to_host_bytes(model, 2, 32, "bf16") == 2 * 64 * 1092 + 4 * 64 * 8 + angles


def test_a_mean_block_of_layers_with_and_without_experts() -> None:
    """Matrices are multiples of 256 elements, two norms of 64 are padded to that. One of four blocks has an
    MLP 1,024 wide, the others a router and two experts 64 wide."""
    model = GPT.model_copy(update={
        "biases": False, "mlp_hidden": 1024, "experts": 2, "top_k": 1, "expert_hidden": 64, "dense_layers": 1,
    })  # fmt: skip
    attention = 3 * 64 * 64 + 64 * 64 + 2 * 256
    dense, routed = attention + 2 * 1024 * 64, attention + 256 + 2 * 2 * 64 * 64
    root = (96 + 32) * 64 + 256
    assert unit_numels(model, Levels.fit({}, 1)) == [root, *[(dense + 3 * routed) // 4] * 4]


def test_what_is_fetched_is_beside_gathers_and_no_reduction() -> None:
    """A unit of 8,000 values in bf16 on 8 ranks: a reduction holds it and what seven ranks send, an eighth
    each. Weights that come from the host are beside the gathers, which hold less."""
    on_device, beyond = (
        Scheme.model_validate({"name": "s", "weights": place, "grads": "world", "optim": "world@host"})
        for place in ("world", "world@host")
    )
    for scheme in (on_device, beyond):
        assert buffer_bytes([8000], scheme, Levels.fit({}, 8), "bf16", "bf16", "gloo") == 16000 + 14000


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
