"""Pipelines train as one process of plain torch does, bit by bit, and send the bytes of closed forms."""

from functools import partial

import pytest
import torch
from modules import HIER3, HPZ
from staged import STEPS, B, D, S, alone, chain, on_axes, whole

from lowband.engine.parallel import executor, pipeline
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.schedule import peak
from lowband.spec.schedules import lists
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG

WIDE = pytest.mark.wide

# schedule, ranks along pipeline, chunks, micro-batches, scheme, ranks along data, layers in a chain
CASES = [
    ("depth", 1, 3, 3, "zero3", 2, 4),
    ("gpipe", 2, None, 1, "zero1", 2, 4),
    ("1f1b", 2, None, 3, "zero3", 2, 5),
    ("interleaved", 2, 2, 3, "ddp", 2, 4),
    ("breadth", 2, 2, 4, "zero3", 2, 4),
    ("zb-h1", 2, None, 4, "zero2", 2, 4),
    ("zb-h2", 2, None, 2, "zero3", 1, 4),
    ("zb-v", 2, None, 3, "zero3", 2, 5),
    ("dualpipe-v", 2, None, 6, "zero1", 2, 4),
    pytest.param("1f1b", 4, None, 2, "zero3", 2, 6, marks=WIDE),
    pytest.param("1f1b", 2, None, 4, HIER3, 4, 4, marks=WIDE),
    pytest.param("breadth", 2, 3, 3, HPZ, 4, 4, marks=WIDE),
    pytest.param("gpipe", 4, None, 6, "ddp", 1, 4, marks=WIDE),
    pytest.param("interleaved", 4, 2, 6, "zero3", 2, 8, marks=WIDE),
    pytest.param("interleaved", 2, 3, 1, HIER3, 4, 4, marks=WIDE),
    pytest.param("zb-h1", 4, None, 5, "zero3", 1, 4, marks=WIDE),
    pytest.param("zb-h2", 4, None, 9, "zero3", 2, 4, marks=WIDE),
    pytest.param("zb-v", 4, None, 3, HIER3, 2, 6, marks=WIDE),
    pytest.param("zb-v", 2, None, 5, HPZ, 4, 3, marks=WIDE),
    pytest.param("dualpipe-v", 4, None, 9, "zero3", 2, 6, marks=WIDE),
]
INNER = {"package": 2, "node": 4}


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "micro_batches", "scheme", "data", "layers"), CASES)
def test_bits_are_those_of_one_process_and_bytes_those_of_closed_forms(
    schedule: str,
    ranks: int,
    chunks: int | None,
    micro_batches: int,
    scheme: str | Scheme,
    data: int,
    layers: int,
) -> None:
    """Two steps, each with a clip that bites."""
    scheme = CONFIG.scheme(scheme) if isinstance(scheme, str) else scheme
    modules = partial(chain, layers)
    options = {"schedule": schedule, "chunks": chunks}
    found = on_ranks(ranks * data, partial(on_axes, **options), INNER, ranks, scheme, micro_batches, modules)
    inner = {name: min(size, data) for name, size in INNER.items()}
    [expected] = on_ranks(1, alone, modules, micro_batches, Levels.fit(inner, data))

    is_vee = schedule in ("zb-v", "dualpipe-v")
    last = 0 if is_vee else (ranks - 1) * data  # the first rank along data with the last stage
    for rank, one in enumerate(found):
        place = rank - last
        of_rank = expected.losses[place::data] if 0 <= place < data else [[]] * STEPS
        assert one.losses == of_rank
        assert one.norms == found[0].norms
    assert found[0].norms == pytest.approx(expected.norms, rel=1e-12)
    state = whole(found)
    assert state.keys() == expected.state.keys()
    assert [key for key in state if not torch.equal(state[key], expected.state[key])] == []

    stages = ranks * (2 if is_vee else chunks or 1)
    crossed = 0 if ranks == 1 else stages - 1 - is_vee  # the boundary at a V's tip is on one rank
    x = B * S * D * 4
    for row in ("stage_output", "stage_grad"):
        sent = sum(one.sent.get(row, 0) for one in found)
        assert sent == STEPS * data * micro_batches * crossed * x


def gathered(schedule: str, chunks: int | None, micro_batches: int) -> list[dict[str, int]]:
    modules = partial(chain, 2)
    options = {"schedule": schedule, "chunks": chunks}
    found = on_ranks(4, partial(on_axes, **options), {}, 2, "zero3", micro_batches, modules)
    return [one.sent for one in found]


def test_weights_are_gathered_where_the_list_comes_to_a_stage_and_gradients_reduced_once() -> None:
    """Each module is a unit: its parameters, padded to 256 values, in units of 256 values per rank."""
    embed, layer, head = 512, 256 + 256 + 256 + 256 + 256 + 256, 256 + 256 + 256 + 256
    half = 4 * STEPS // 2  # bytes of a value that a rank sends of what it gathers or reduces, in all steps
    for sent, units in zip(gathered("1f1b", None, 5)[::2], (embed + layer, layer + head), strict=True):
        assert sent["forward_gather"] == sent["grad_reduce"] == half * units
        assert "backward_gather" not in sent
    first, second = gathered("breadth", 2, 5)[::2]
    assert first["forward_gather"] == first["grad_reduce"] == half * (embed + layer)
    assert first["backward_gather"] == half * embed  # the other stage has its weights still
    assert second["forward_gather"] == second["grad_reduce"] == half * (layer + head)
    assert second["backward_gather"] == half * layer


def held(schedule: str, micro_batches: int) -> tuple[int, int]:
    """The most micro-batches whose activations this rank holds at once, and the most results on their way."""
    in_flight, on_way = [], []

    class Watched(executor.Executor):
        def _forward(self, stage: int, micro_batch: int) -> None:
            super()._forward(stage, micro_batch)
            in_flight.append(len({*self._outputs, *self._deferred}))
            on_way.append(sum(len(of_rank) for of_rank in self._mail._leaving.values()))

    pipeline.Executor = Watched
    on_axes({}, 2, CONFIG.scheme("zero3"), micro_batches, partial(chain, 2), schedule=schedule)
    return max(in_flight), max(on_way)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_no_more_is_held_than_the_list_says_and_what_was_received_is_freed(schedule: str) -> None:
    found = on_ranks(2, held, schedule, 12)
    chunks = 2 if schedule == "zb-v" else 1
    assert [in_flight for in_flight, _ in found] == peak(lists(schedule, 2, 12, chunks))
    assert max(on_way for _, on_way in found) <= 4
