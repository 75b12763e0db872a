"""The model's shape as data agrees with the built module, and the module with its shape letters."""

import pytest
import torch

from lowband.cost.flops import model_flops_per_token
from lowband.errors import UserError
from lowband.model.gpt import GPT, rotate
from lowband.spec.model import MOST_WIDTH, ModelSpec
from tests.checkout import CONFIG
from tests.refused import refusal


def tiny(**changes) -> ModelSpec:
    values = {"name": "t", "layers": 2, "hidden": 12, "heads": 3, "vocab": 29, "seq_len": 7, "source": "test"}
    return ModelSpec(**{**values, **changes})


@pytest.mark.parametrize("name", [name for name in CONFIG.models if CONFIG.model(name).is_gpt])
def test_named_models_count_exactly(name: str) -> None:
    spec = CONFIG.model(name)
    with torch.device("meta"):
        module = GPT(spec.model_copy(update={"layers": 1}))
    one_layer = spec.model_copy(update={"layers": 1})
    assert sum(p.numel() for p in module.parameters()) == one_layer.parameters
    h, e = spec.hidden, spec.experts
    block = 12 * h * h + 13 * h
    if e is not None:  # and a router, in place of the MLP; shared experts have biases
        width, shared = spec.expert_width, spec.shared_experts * spec.expert_width
        block += e * h + e * 2 * h * width + 2 * h * shared + shared + h * bool(shared) - (8 * h * h + 5 * h)
    assert spec.parameters - one_layer.parameters == (spec.layers - 1) * block


def test_paper_sizes_are_what_they_are_called() -> None:
    for name, billions in {
        "gpt-10b": 10,
        "gpt-18b": 18,
        "gpt-20b": 20,
        "gpt-22b": 22,
        "gpt-175b": 175,
    }.items():
        assert CONFIG.model(name).parameters / 1e9 == pytest.approx(billions, rel=0.04), name
    assert CONFIG.model("gpt-1t").parameters / 1e12 == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("tied_head", [True, False])
def test_names_and_shapes_are_the_modules(positions: str, tied_head: bool) -> None:
    spec = tiny(positions=positions, tied_head=tied_head)
    expected = dict(spec.root_shapes())
    for i in range(spec.layers):
        expected |= {f"blocks.{i}.{name}": shape for name, shape in spec.block_shapes().items()}
    module = GPT(spec)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == expected
    root = [tuple(p.shape) for name, p in module.named_parameters() if not name.startswith("blocks.")]
    blocks = [[tuple(p.shape) for p in block.parameters()] for block in module.blocks]
    assert spec.unit_shapes() == [root, *blocks]


def test_megatrons_formula() -> None:
    """12 l h^2 (1 + 13 / 12h + (V + s) / 12lh) (arXiv 2104.04473, eq. 2) leaves out the final norm's 2h."""
    spec = tiny(layers=5, hidden=48, vocab=100, seq_len=16)
    layers, h, V, s = spec.layers, spec.hidden, spec.vocab, spec.seq_len
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * layers * h))
    assert spec.parameters == pytest.approx(formula + 2 * h)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@torch.no_grad()
def test_causal(positions: str) -> None:
    """A later token does not change an earlier one's logits."""
    model = GPT(tiny(positions=positions), seed=3)
    tokens = torch.arange(7)[None]
    changed = tokens.clone()
    changed[0, 5] = 20
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@torch.no_grad()
def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 6, 8)
    turned_q, turned_k = rotate(q), rotate(k)
    assert torch.allclose(turned_q.norm(dim=-1), q.norm(dim=-1))
    products = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    for distance in range(-5, 6):
        along = torch.diagonal(products, distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-5)


def test_same_seed_same_weights() -> None:
    a, b, c = GPT(tiny(), seed=1), GPT(tiny(), seed=1), GPT(tiny(), seed=2)
    assert torch.equal(a.embed.weight, b.embed.weight)
    assert not torch.equal(a.embed.weight, c.embed.weight)


def test_flops_against_counting_matrix_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    spec = tiny()
    model = GPT(spec)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, spec.seq_len, dtype=torch.long))
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "positions" not in n)
    assert counter.get_total_flops() >= 2 * weights * spec.seq_len  # CPU attention may not be counted
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    attention = 12 * spec.layers * spec.hidden * spec.seq_len
    assert model_flops_per_token(spec, spec.seq_len) == 6 * (weights + vectors) + attention


def test_a_model_of_a_billion_layers_is_refused() -> None:
    """Each layer is a unit in memory, of a prediction too."""
    values = {"name": "x", "layers": 10**9, "hidden": 8, "heads": 1, "vocab": 8, "seq_len": 8, "source": "x"}
    with pytest.raises(UserError, match=r"layers: .*less than or equal to 10000"):
        ModelSpec.parse(values, "file")


def test_the_widest_mlp() -> None:
    values = {"name": "x", "layers": 1, "hidden": 8, "heads": 1, "vocab": 8, "seq_len": 8, "source": "x"}
    assert ModelSpec.parse({**values, "mlp_hidden": 16 * MOST_WIDTH}, "file").mlp_hidden == 16 * MOST_WIDTH
    with pytest.raises(UserError, match=r"mlp_hidden: .*less than or equal to"):
        ModelSpec.parse({**values, "mlp_hidden": 16 * MOST_WIDTH + 1}, "file")


def test_linear_layers_and_hybrids() -> None:
    linear = tiny(layers=8, attention="linear")
    hybrid = tiny(layers=8, attention="linear", softmax_every=4)
    assert [hybrid.attention_of(i) == "softmax" for i in range(8)] == [False, False, False, True] * 2
    assert [tiny(layers=8).linear_layers, linear.linear_layers, hybrid.linear_layers] == [0, 8, 6]
    assert linear.parameters == tiny(layers=8).parameters
    assert [block.attention.is_linear for block in GPT(hybrid).blocks] == [True, True, True, False] * 2
    # A token meets 7 keys in a layer of softmax, and in a linear one a state of heads of width 4.
    by_softmax, by_states = (model_flops_per_token(spec, 7) for spec in (tiny(layers=8), linear))
    assert by_softmax - by_states == 12 * 12 * 8 * (7 - 4)
    assert by_softmax - model_flops_per_token(hybrid, 7) == 12 * 12 * 6 * (7 - 4)


def test_a_model_without_linear_layers_has_the_specification_that_it_had() -> None:
    assert not {"attention", "softmax_every"} & set(tiny().model_dump())
    written = tiny(attention="linear", softmax_every=2).model_dump()
    assert (written["attention"], written["softmax_every"]) == ("linear", 2)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"softmax_every": 2}, "softmax_every (2) is for attention linear, not softmax"),
        ({"attention": "linear", "softmax_every": 1}, "softmax_every (1) is not from 2 to layers (2)"),
        ({"attention": "linear", "softmax_every": 3}, "softmax_every (3) is not from 2 to layers (2)"),
        ({"attention": "state"}, "attention: Input should be 'softmax' or 'linear', not 'state'"),
    ],
)
def test_wrong_attention_is_refused(changes: dict[str, object], line: str) -> None:
    assert line in refusal(tiny, **changes)


def test_linear_attention_is_not_computed_by_flash2() -> None:
    linear = tiny(attention="linear")
    with pytest.raises(UserError, match="flash2 is of softmax, and all layers are linear"):
        GPT(linear, attention="flash2")
    GPT(tiny(attention="linear", softmax_every=2), attention="flash2")  # of its softmax
