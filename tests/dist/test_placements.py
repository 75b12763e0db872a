"""Placements that levels allow, not only the named ones: bit-equal to one process. `--wide`: all of them."""

from itertools import combinations_with_replacement

import pytest
import torch
from test_parity import SPEC, optimizer_of, stepped, train_reference

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.records import by_row
from lowband.spec.scheme import Scheme
from tests.pairwise import covering

STEPS = 2
ONE_LEVEL: dict[str, int] = {}
THREE_LEVELS = {"package": 2, "node": 4}
FOUR_LEVELS = {"die": 2, "package": 4, "node": 8}


def placements(inner: dict[str, int], ranks: int) -> list[Scheme]:
    """weights <= grads <= optim over all levels, with every secondary inside the weights, or none."""
    names = Levels.fit(inner, ranks).names
    found = []
    for weights, grads, optim in combinations_with_replacement(range(len(names)), 3):
        for secondary in (None, *range(weights)):
            found.append(
                Scheme(
                    name=f"{weights}{secondary}{grads}{optim}",
                    weights=names[weights],
                    grads=names[grads],
                    optim=names[optim],
                    secondary=None if secondary is None else names[secondary],
                )
            )
    return found


def train_all(schemes: list[Scheme], inner: dict[str, int], spec: ModelSpec):
    """Final weights, and whether each second step's bytes are the closed form's, by scheme."""
    topology = lowband.Topology(inner)
    results = []
    for scheme in schemes:
        model = lowband.shard(GPT(spec, seed=7), scheme, topology, Block, compute_dtype=torch.float32)
        for step, _ in enumerate(stepped(model, optimizer_of(model.parameters()), STEPS)):
            if step == 0:
                engine_of(model).ledger.take()
        sent = by_row(engine_of(model).ledger.take())
        units = unit_numels(spec, topology.levels)
        is_closed_form = sent == sent_bytes(units, scheme, topology.levels, "fp32", "fp32", 1, True)
        results.append((lowband.full_state_dict(model), is_closed_form))
    return results


def train_references(schemes: list[Scheme], inner: dict[str, int], spec: ModelSpec, ranks: int):
    """Only the order of sums matters: one reference for each grads level."""
    found = {}
    for scheme in schemes:
        if scheme.grads not in found:
            found[scheme.grads] = train_reference(scheme, Levels.fit(inner, ranks), STEPS, spec=spec)[2]
    return found


def levels_of(scheme: Scheme) -> tuple[str, str | None, str, str]:
    return scheme.weights, scheme.secondary, scheme.grads, scheme.optim


ON_4, ON_8 = placements(ONE_LEVEL, 4), placements(THREE_LEVELS, 8)
# Of four levels those that use the innermost: the others are those of three levels.
ON_16 = [each for each in placements(FOUR_LEVELS, 16) if "die" in each.model_dump().values()]
FEW = covering([levels_of(each) for each in ON_8], size=1)  # any of weights, secondary, grads, optim
FOUR = [each for each in ON_16 if levels_of(each) == ("package", "die", "node", "world")]


@pytest.mark.parametrize(
    ("inner", "ranks", "layers", "schemes"),
    [
        pytest.param(ONE_LEVEL, 4, 2, ON_4, id="4"),
        pytest.param(THREE_LEVELS, 8, 1, [each for each in ON_8 if levels_of(each) in FEW], id="8"),
        pytest.param(FOUR_LEVELS, 16, 1, FOUR, id="16", marks=pytest.mark.wide),
        pytest.param(THREE_LEVELS, 8, 2, ON_8, id="8-all", marks=pytest.mark.wide),
        pytest.param(FOUR_LEVELS, 16, 1, ON_16, id="16-all", marks=pytest.mark.wide),
    ],
)
def test_placements(inner: dict[str, int], ranks: int, layers: int, schemes: list[Scheme]) -> None:
    spec = SPEC.model_copy(update={"layers": layers})
    [expected] = on_ranks(1, train_references, schemes, inner, spec, ranks)
    trained = on_ranks(ranks, train_all, schemes, inner, spec, time_limit_s=400 + 20 * len(schemes))[0]
    for scheme, (weights, is_closed_form) in zip(schemes, trained, strict=True):
        assert is_closed_form, scheme
        for name, value in expected[scheme.grads].items():
            assert torch.equal(weights[name], value), (scheme, name)


def test_number_of_placements() -> None:
    assert [len(schemes) for schemes in (ON_4, ON_8, ON_16, FOUR)] == [5, 35, 35, 1]
