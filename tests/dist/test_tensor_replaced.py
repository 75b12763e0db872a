"""Layers whose weights are computed, and parameters with hooks, which a cut would leave behind."""

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from test_tensor_more import Net, _error
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.tensor import Column, Row
from tests.refused import refusal

AXES = lowband.Axes(tensor=2)


def _linear(prepare: Callable[[nn.Linear], object]) -> nn.Sequential:
    layer = nn.Linear(4, 8)
    prepare(layer)
    return nn.Sequential(layer)


def _spectral(layer: nn.Linear) -> None:
    nn.utils.spectral_norm(layer)


def _pruned(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


def _by_columns(layer: nn.Linear) -> None:
    nn.utils.weight_norm(layer, dim=1)


def _as_a_whole(layer: nn.Linear) -> None:
    nn.utils.weight_norm(layer, dim=None)  # type: ignore[arg-type]


def _with_a_hook(layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda gradient: gradient / 2)


CASES = (
    (_spectral, Row(), "Row of '0': its weight is computed with 'weight_v', which is not cut as its 4 in_f"),
    (_spectral, Column(), "with 'weight_u', which is not cut as its 8 out_features"),
    (_pruned, Row(), "with 'weight_mask', which is not cut as its 4 in_features (allowed: layers without"),
    (_by_columns, Column(), "with 'weight_g', which is not cut as its 8 out_features"),
    (_as_a_whole, Column(), "with 'weight_g', which is not cut as its 8 out_features"),
    (_as_a_whole, Row(), "with 'weight_g', which is not cut as its 4 in_features"),
    (
        _with_a_hook,
        Column(),
        "Sequential: a hook on '0.weight' would not run any more (allowed: hooks on mod",
    ),
)


def _answers() -> list[str]:
    on = lowband.Topology({}, lowband.Axes(tensor=2))
    return [refusal(lowband.parallelize, _linear(prepare), {"0": rule}, on) for prepare, rule, _ in CASES]


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_weights_that_slices_do_not_give_and_lost_hooks_are_refused() -> None:
    for found in on_ranks(2, _answers):
        for text, (*_, part) in zip(found, CASES, strict=True):
            assert part in text


def _with_a_buffer() -> list[int]:
    """Which the layer does not compute with."""
    model = _linear(lambda layer: layer.register_buffer("seen", torch.zeros(8)))
    lowband.parallelize(model, {"0": Column()}, lowband.Topology({}, lowband.Axes(tensor=2)))
    return [*model[0].weight.shape, *model[0].seen.shape]


def test_other_buffers_of_a_layer_stay_as_they_are() -> None:
    assert on_ranks(2, _with_a_buffer) == [[4, 4, 8]] * 2


def _copies() -> list[str]:
    model = lowband.parallelize(_linear(lambda _: None), {"0": Column()}, lowband.Topology({}, AXES))
    return [refusal(copy, model) for copy in (deepcopy, AveragedModel, pickle.dumps)]


def test_copies_whose_parameters_would_not_know_their_slices_are_refused() -> None:
    for found in on_ranks(2, _copies):
        assert all("cut over ranks along tensor cannot be copied or pickled" in text for text in found)


def _given_states() -> tuple[str, bool]:
    """What a whole state is told; whether one's own is taken."""
    plain = _linear(lambda _: None)
    whole = {name: value.clone() for name, value in plain.state_dict().items()}
    model = lowband.parallelize(plain, {"0": Column()}, lowband.Topology({}, AXES))
    own = {name: value + 1 for name, value in model.state_dict().items()}
    told = refusal(nn.ModuleDict({"net": model}).load_state_dict, {f"net.{k}": v for k, v in whole.items()})
    model.load_state_dict(own)
    return told, all(torch.equal(own[name], value) for name, value in model.state_dict().items())


def test_a_whole_state_is_refused_by_name() -> None:
    line = "load_state_dict(): 'net.0.weight' is whole, and cut over tensor ranks in the module (allowed: wei"
    for told, is_taken in on_ranks(2, _given_states):
        assert line in told and is_taken


def _of_normed(dim: int, rule: Column | Row) -> float:
    """A weight norm over what a rank has all of."""

    def make() -> nn.Module:
        model = Net()
        nn.utils.weight_norm(model.block[1 if isinstance(rule, Column) else 3], dim=dim)
        return model

    return _error(make, {"block.1": Column(), "block.3": Row()}, sequence=False)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize(("dim", "rule"), [(0, Column()), (1, Row())])
def test_norms_over_what_a_rank_has_all_of_are_cut(dim: int, rule: Column | Row) -> None:
    assert max(on_ranks(2, _of_normed, dim, rule)) < 1e-12
