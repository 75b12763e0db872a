"""A data axis beside others: ranks along it train as the same number of plain ranks on the same levels do."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from modules import HIER3, HPZ, Tower, inputs, is_layer
from torch import nn

import lowband
from lowband.engine.api import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.mesh import Mesh
from lowband.spec.partition import shard_range, shard_ranks
from lowband.spec.records import by_row
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG
from tests.refused import answer

NAMES = ("zero3", "ddp", "hsdp", "decentralised-ring")
SCHEMES = (*map(CONFIG.scheme, NAMES), HIER3, HPZ)
# By axes: sizes of the machine's levels, and as the four ranks along the data axis see them.
MESHES = {
    Axes(tensor=2): ({"package": 2, "node": 4}, {"package": 1, "node": 2}),
    Axes(pipeline=2): ({"package": 2, "node": 4}, {"package": 2, "node": 4}),
    Axes(tensor=2, pipeline=2): ({"package": 2, "node": 8}, {"package": 1, "node": 4}),
}


def tower(seed: int) -> Tower:
    model = Tower()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * seed
    return model


def trained(topology: lowband.Topology, scheme: Scheme, way: str, seed: int) -> tuple:
    """Whole weights on the first rank along the axis, norms and distances, and bytes sent.

    way: how collectives run; or `matrices`: hops, and an optimizer of whole matrices
    """
    axis = topology.along("data")
    has_matrices = way == "matrices"
    model = lowband.shard(
        tower(seed), scheme, topology, is_layer, torch.float32, collectives="hops" if has_matrices else way
    )
    matrices = lowband.Matrices(model, over="world") if has_matrices else nullcontext()
    muon = torch.optim.Muon(matrices.parameters(), lr=0.02) if has_matrices else None
    others = matrices.others() if has_matrices else list(model.parameters())
    optimizer, norms = torch.optim.AdamW(others, lr=1e-2), []
    for step in range(2 if scheme.sync is None else 3):  # replicas meet others at each step
        with lowband.no_sync(model):
            model(inputs(step, axis.ranks.index(axis.rank))).backward()
        model(inputs(step + 10, axis.ranks.index(axis.rank))).backward()
        norms += [lowband.clip_grad_norm_(model, 0.5), *lowband.norms(list(model.parameters()))]
        if muon is not None:
            with matrices:
                muon.step()
        optimizer.step()
        norms += [lowband.consensus_distance(model)] if scheme.sync is not None else []
        optimizer.zero_grad()
    sent = by_row(engine_of(model).ledger.take())
    return lowband.full_state_dict(model), [float(norm) for norm in norms], sent


def on_mesh(inner: dict[str, int], axes: Axes, cases: list[tuple[Scheme, str]]) -> tuple:
    topology = lowband.Topology(inner, axes)
    axis = topology.along("data")
    return axis.ranks, [trained(topology, *case, axis.ranks[0]) for case in cases]


def plain(inner: dict[str, int], cases: list[tuple[Scheme, str]], seed: int) -> list[tuple]:
    topology = lowband.Topology(inner)
    return [trained(topology, *case, seed) for case in cases]


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(a, marks=[pytest.mark.wide] if a.tensor * a.pipeline > 2 else [], id=str(a))
        for a in MESHES
    ],
)
def test_bits_and_bytes_are_those_of_plain_ranks(axes: Axes, request: pytest.FixtureRequest) -> None:
    """Each slice of the mesh has a model of its own: the others' bytes must not mix in.

    Without --wide each case runs on one of the meshes.
    """
    inner, seen = MESHES[axes]
    ways = [(SCHEMES[0], way) for way in ("flat", "joined", "matrices")]
    cases = [(scheme, "hops") for scheme in SCHEMES] + ways
    if not request.config.getoption("--wide"):
        cases = cases[list(MESHES).index(axes) :: 3]
    found = on_ranks(4 * axes.tensor * axes.pipeline, on_mesh, inner, axes, cases)
    slices = {ranks for ranks, _ in found}
    assert len(slices) == axes.tensor * axes.pipeline
    for ranks in slices:
        alone = on_ranks(4, plain, seen, cases, ranks[0])
        for rank, theirs in zip(ranks, alone, strict=True):
            for (weights, norms, sent), (other, also, bytes_) in zip(found[rank][1], theirs, strict=True):
                assert weights.keys() == other.keys()
                assert bool(weights) == (rank == ranks[0])
                assert all(torch.equal(weights[key], other[key]) for key in weights)
                assert norms == also
                assert sent == bytes_


def other_weights(who: set[int]) -> str:
    topology = lowband.Topology({}, Axes(pipeline=2))
    model = tower(topology.rank in who)
    return answer(lambda: lowband.shard(model, "zero3", topology, is_layer))


def test_weights_may_differ_between_stages_but_not_along_the_axis() -> None:
    assert set(on_ranks(4, other_weights, {2, 3})) == {""}
    [text] = set(on_ranks(4, other_weights, {3}))
    assert "rank 3 on" in text
    assert "differs from rank 2 in sum of initial weights" in text


def refused(folder: str) -> list[str]:
    topology = lowband.Topology({}, Axes(tensor=2))
    model = lowband.shard(nn.Linear(4, 4), "zero3", topology, nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [
        answer(partial(lowband.Checkpointer(folder).save, 1, model, optimizer)),
        answer(partial(lowband.save_safetensors, model, folder)),
        answer(lambda: lowband.Topology({}, Axes(tensor=3))),
        answer(lambda: lowband.Topology({}, Axes(tensor=1 + topology.rank % 2))),
    ]


def test_what_does_not_know_other_axes_says_so_on_every_rank(tmp_path) -> None:
    [texts] = {tuple(texts) for texts in on_ranks(2, refused, str(tmp_path))}
    assert texts[0] == (
        "Checkpointer: the job has 2 ranks, 1 of them along its axis data "
        "(allowed: a topology without other axes)"
    )
    assert texts[1].startswith("save_safetensors: the job has 2 ranks")
    assert texts[2] == (
        "axes: 2 ranks are no multiple of tensor 3 x pipeline 1 (allowed: multiples of 3 ranks)"
    )
    assert "differs from rank 0 in axes" in texts[3]
    assert not list(tmp_path.iterdir())


def dimensions() -> tuple:
    mesh = lowband.Topology({"node": 4}, Axes(tensor=2)).device_mesh("cpu")
    return mesh.mesh_dim_names, tuple(mesh.mesh.shape), mesh.get_local_rank("tensor_node")


def test_device_mesh_names_the_axis() -> None:
    found = on_ranks(8, dimensions)
    assert found == [(("world", "node", "tensor_node"), (2, 2, 2), rank % 2) for rank in range(8)]


def test_shards_along_an_axis_by_hand() -> None:
    levels = Mesh.fit({"node": 4}, {"tensor": 2, "data": 4}).levels("data")
    assert shard_ranks(levels, "node", 5) == [5, 7]
    assert [levels.common(5, other) for other in (5, 7, 1)] == ["self", "node", "world"]
    assert shard_ranks(levels, "world", 2) == [0, 4, 2, 6]  # the node's coordinate cuts first
    assert [shard_range(8, levels, "world", rank) for rank in (0, 4, 2, 6)] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 8),
    ]
