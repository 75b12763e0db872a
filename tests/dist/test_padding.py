"""What an optimizer or a user writes behind a shard's values, say 0/0, reaches neither wires nor norms: bits
are those without, norms those of one process. And other edits of gradients between a backward and its step.
"""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from modules import Tower, inputs, is_layer

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.refused import refusal

INT8 = {"forward_gather": "int8", "backward_gather": "int8"}
SWAP = Sync(beyond="node", every=2, partners="ring")


def scheme(level: str = "world", optim: str = "world", **more: object) -> Scheme:
    return Scheme(name="mine", weights=level, grads=level, optim=optim, **more)  # type: ignore[arg-type]


IN_MEMORY = {
    "gather": scheme(**INT8),
    "update": scheme("node", **INT8, update_gather="int8"),
    "secondary": scheme(secondary="node", backward_gather="int8"),
    "host": scheme(optim="world@host", **INT8),
    "anchor": scheme("node", "node", sync=Sync(beyond="node", every=2), sync_reduce="int8"),
    "partners": scheme("node", "node", sync=SWAP, sync_swap="int8"),
}
MOVED = {
    "disk": scheme(optim="world@disk", **INT8),
    "late": scheme(optim="world@host", offload={"late": True}, **INT8),
    "stride": scheme(optim="world@host", offload={"stride": 1}, **INT8),
}


def behind(shard: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """A view of the padding of a shard's values or gradient."""
    return values.detach().as_subclass(torch.Tensor)[shard.shard_of.stop - shard.shard_of.start :]


def built(of: Scheme) -> torch.nn.Module:
    topology = lowband.Topology({"node": 2})
    return lowband.shard(Tower(), of, topology, is_layer, torch.float32, disk=tempfile.mkdtemp())


def trained(of: Scheme, junk: float | None, ours: bool) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """junk: written into the padding after each step and backward"""
    rank, model = torch.distributed.get_rank(), built(of)
    optimizer = lowband.AdamW(model, lr=0.01) if ours else torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        loss = model(inputs(step, rank))
        loss.backward()
        if junk is not None:
            for p in model.parameters():
                behind(p, p.grad).fill_(junk)
        norm = optimizer.clip_grad_norm_(0.1) if ours else lowband.clip_grad_norm_(model, 0.1)
        losses += [loss.item(), float(norm)]
        optimizer.step()
        optimizer.zero_grad()
        if junk is not None:
            with torch.no_grad():
                for p in model.parameters():
                    behind(p, p).fill_(junk)
    distance = 0.0 if of.sync is None else lowband.consensus_distance(model)
    return losses, lowband.full_state_dict(model), distance


def same(of: Scheme, ours: bool) -> bool:
    """Whether training is that without."""
    (losses, state, distance), *others = (trained(of, junk, ours) for junk in (None, float("nan"), 1e3))
    return all(
        other[0] == losses
        and other[2] == distance
        and all(torch.equal(values, other[1][name]) for name, values in state.items())
        for other in others
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
@pytest.mark.parametrize("case", IN_MEMORY)
def test_wires_and_norms_do_not_see_it(case: str, ranks: int) -> None:
    of = IN_MEMORY[case]
    takes_ours = of.sync is None and of.optim_tier == "device"
    for ours in (False, True) if takes_ours else (False,):
        assert all(on_ranks(ranks, same, of, ours))


def without_eps(of: Scheme) -> list[float]:
    """Losses with an Adam that leaves NaN there."""
    model, losses = built(of), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.0)
    for step in range(4):
        loss = model(inputs(step, torch.distributed.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", MOVED)
def test_states_elsewhere(case: str) -> None:
    of, like = MOVED[case], MOVED[case] if case == "late" else scheme(**INT8)
    for losses, expected in zip(on_ranks(2, without_eps, of), on_ranks(2, without_eps, like), strict=True):
        assert losses == expected
        assert all(map(math.isfinite, losses))


def edited_norm(of: Scheme | None) -> tuple[float, float]:
    """Of gradients that are edited element by element; the second of those that are 0/0 behind the values."""
    model = Tower() if of is None else built(of)
    norms = []
    for edit in (lambda grad: grad + 1.0, lambda grad: grad / grad.abs()):
        model(inputs(0, 0)).backward()
        trained = [p for name, p in model.named_parameters() if name != "unused"]
        model.unused.grad = None
        for p in trained:
            p.grad = edit(p.grad)
        if of is None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        else:
            norms.append(float(lowband.clip_grad_norm_(model, 1.0)))
        model.zero_grad()
    return norms[0], norms[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_norm_of_edited_gradients(ranks: int) -> None:
    expected = edited_norm(None)
    for of in (scheme(), scheme("self")):
        for norms in on_ranks(ranks, edited_norm, of):
            assert norms == pytest.approx(expected, rel=1e-6)


def clipped_twice(ours: bool, model: torch.nn.Module) -> list[float]:
    """By the optimizer, and then by the function, as where a loop keeps its line."""
    options = {"lr": 1.0, "eps": 1.0}
    optimizer = lowband.AdamW(model, **options) if ours else torch.optim.AdamW(model.parameters(), **options)
    found = []
    for step in range(2):
        (100 * model(inputs(step, 0))).backward()
        if ours:
            found += [float(optimizer.clip_grad_norm_(1.0)), float(lowband.clip_grad_norm_(model, 0.5))]
        else:
            found += [float(torch.nn.utils.clip_grad_norm_(model.parameters(), norm)) for norm in (1.0, 0.5)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, model(inputs(0, 0)).item()]


def test_clipped_by_both() -> None:
    expected = clipped_twice(False, Tower())
    for found in on_ranks(2, lambda: clipped_twice(True, built(scheme()))):
        assert found == pytest.approx(expected, rel=1e-5)


def another_optimizer() -> list[str]:
    """Steps of others behind a lowband.AdamW that takes gradients in 16 bits."""
    said = []
    for kind in (torch.optim.SGD, torch.optim.Adam, lowband.Lamb):
        module = Tower()
        lowband.shard(module, scheme(), lowband.Topology({}), is_layer, reduce_dtype=torch.bfloat16)
        first = lowband.AdamW(module)
        module(inputs(0, 0)).backward()
        first.step()
        first.zero_grad()
        module(inputs(1, 0)).backward()
        said.append(refusal(kind(module.parameters(), lr=0.1).step))
    return said


def test_another_optimizer_behind_ours() -> None:
    for said, kind in zip(on_ranks(1, another_optimizer)[0], ("SGD", "Adam", "Lamb"), strict=True):
        assert said.startswith(
            f"{kind}: the gradient of 'scale' has the reduce dtype (allowed: lowband.AdamW"
        )


def in_inference_mode(folder: str) -> bool:
    model = built(scheme())
    expected = lowband.full_state_dict(model), lowband.norms(model.parameters())
    with torch.inference_mode():
        found = lowband.full_state_dict(model), lowband.norms(model.parameters())
        lowband.save_safetensors(model, folder)
    model(inputs(0, 0)).backward()
    return found[1] == expected[1] and all(torch.equal(v, found[0][name]) for name, v in expected[0].items())


def test_whole_values_in_inference_mode(tmp_path: Path) -> None:
    assert all(on_ranks(2, in_inference_mode, str(tmp_path / "saved")))
