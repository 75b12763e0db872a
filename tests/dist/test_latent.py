"""Multi-head latent attention along tensor, against one process, and its bytes against the closed form.

Every rank has what makes the short vectors; products by heads are divided, and so is the product behind them.
"""

from typing import Any

import pytest
import torch
from gpts import CLIP
from latent import SPEC, latent_gpt
from near import assert_near

import lowband
from lowband.cost.contents import tensor_bytes
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.activations import TENSOR
from lowband.spec.model import ModelSpec
from lowband.spec.tensor import gpt_plan
from tests.refused import answer

WITHOUT = SPEC.model_copy(update={"latent": SPEC.latent.model_copy(update={"q_rank": None})})
ROWS = {row.name for row in TENSOR}
Sent = dict[tuple[str, str, str], float]
Found = tuple[list[float], dict[str, torch.Tensor], Sent, Sent]


def trained(spec: ModelSpec, inner: dict[str, int], axes: dict[str, Any] | None) -> Found:
    """Losses and norms of two steps, the weights after them; the second's bytes along tensor, sent and in
    closed form.

    axes: None: one process, without the library. All ranks have the same batches
    """
    model = latent_gpt(spec)
    assert {name: tuple(p.shape) for name, p in model.blocks[0].named_parameters()} == spec.block_shapes()
    topology = None if axes is None else lowband.Topology(inner, lowband.Axes(**axes))
    if topology is not None:
        lowband.parallelize(model, gpt_plan(spec), topology)
        lowband.shard(model, "zero3", topology, Block, torch.float32)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    generator = torch.Generator().manual_seed(1)
    sent: Sent = {}
    for _ in range(2):
        tokens = torch.randint(spec.vocab, (2, spec.seq_len + 1), generator=generator)
        if topology is not None:
            engine_of(model).ledger.take()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        clip = torch.nn.utils.clip_grad_norm_ if topology is None else lowband.clip_grad_norm_
        of = model.parameters() if topology is None else model
        found += [loss.item(), float(clip(of, CLIP))]
        if topology is not None:
            taken = engine_of(model).ledger.take()
            sent = {(e.level, e.collective, e.wire): e.bytes for e in taken if e.collective in ROWS}
        optimizer.step()
        optimizer.zero_grad()
    if topology is None:
        return found, model.state_dict(), {}, {}
    levels, along_data = (topology.along(axis).levels for axis in ("tensor", "data"))
    of_step = topology.axes, 2, spec.seq_len, 1, "fp32", True
    expected = tensor_bytes(spec, levels, (along_data.world, 1), *of_step)
    return found, lowband.full_state_dict(model), sent, dict(expected)


@pytest.mark.parametrize(
    ("ranks", "inner", "axes", "spec"),
    [
        (1, {}, {}, SPEC),
        pytest.param(2, {}, {"tensor": 2}, SPEC, marks=pytest.mark.wide),
        (2, {}, {"tensor": 2, "sequence_parallel": True}, WITHOUT),
        (4, {"node": 2}, {"tensor": 4, "sequence_parallel": True}, SPEC),
        (4, {"node": 2}, {"tensor": 2}, WITHOUT),
    ],
)
def test_trains_as_one_process(
    ranks: int, inner: dict[str, int], axes: dict[str, Any], spec: ModelSpec
) -> None:
    [(expected, weights, *_)] = on_ranks(1, trained, spec, {}, None)
    found = on_ranks(ranks, trained, spec, inner, axes)
    for theirs, *_ in found:
        assert theirs == found[0][0] == pytest.approx(expected, rel=2e-6)
    assert expected[1] > CLIP
    assert_near(found[0][1], weights, rtol=1e-5, atol=2e-6)
    sent = [of_rank for _, _, of_rank, _ in found]
    closed = found[0][3]
    assert bool(closed) == (axes != {})
    assert {key: sum(each.get(key, 0) for each in sent) / ranks for key in sent[0] | closed} == closed


def forgotten(name: str) -> str:
    """What a step says of a plan without the rule of that name."""
    model = latent_gpt()
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    plan = {key: rule for key, rule in gpt_plan(SPEC).items() if not key.endswith(name)}
    lowband.parallelize(model, plan, topology)
    lowband.shard(model, "zero3", topology, Block, torch.float32)
    tokens = torch.arange(SPEC.seq_len + 1).unsqueeze(0)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    return answer(loss.backward)


def test_keys_that_heads_share_are_not_forgotten() -> None:
    for said in on_ranks(2, forgotten, "k_rope"):
        assert "the gradient of 'blocks." in said
        assert "Enter() for what heads share" in said
