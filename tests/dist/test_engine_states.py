"""What the engine holds and registers after a forward, a failure or a timeout."""

import os
import signal
from contextlib import nullcontext
from datetime import timedelta
from functools import cache

import psutil
import pytest
import torch
import torch.distributed as dist
from brief import wait_briefly
from modules import HIER3, HPZ, INNER, Tower, inputs, is_layer, loop, sgd
from test_library_steps import Fuse, Fused
from torch import nn

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport.axis import world_timeout
from lowband.engine.transport.gloo import PeerLost
from lowband.engine.units.states import UnitState
from lowband.run.launch import RankFailure
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.refused import answer
from tests.waiting import wait_for


def sharded(module: nn.Module, scheme: Scheme) -> nn.Module:
    return lowband.shard(module, scheme, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)


class Twice(nn.Module):
    """A frozen layer whose output is its own next input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = nn.Linear(5, 7)
        self.layer = nn.Sequential(nn.Linear(7, 7), nn.Tanh()).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(self.first(x))).square().mean()


def train_twice(scheme: Scheme | None) -> dict[str, torch.Tensor]:
    model = Twice() if scheme is None else sharded(Twice(), scheme)
    ranks = range(4) if scheme is None else [dist.get_rank()]
    loop(model, sgd, lambda step: [inputs(step, rank) for rank in ranks])
    state = model.state_dict() if scheme is None else lowband.full_state_dict(model)
    return {name: value.detach() for name, value in state.items()}


@pytest.mark.parametrize("scheme", [HIER3, HPZ], ids=lambda s: s.name)
def test_a_frozen_layer_is_its_own_input(scheme: Scheme) -> None:
    [expected] = on_ranks(1, train_twice, None)
    got = on_ranks(4, train_twice, scheme)[0]
    assert all(torch.allclose(got[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())


def after_calls_of_units() -> list[tuple[int, int, int]]:
    """How many calls the engine remembers, and the gathered bytes that are left, after each step in which
    layers are called and the module is not."""
    model, found = sharded(Tower(), HPZ), []
    engine = engine_of(model)
    for step in range(3):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            model.layers[2](x)
        model.layers[1](model.layers[0](x)).sum().backward()
        run = engine._hooks._pass
        found.append((len(run.begun), len(run.ended), engine.meter.now["gathered"]))
    return found


def test_layers_that_are_called_on_their_own_leave_nothing() -> None:
    assert on_ranks(4, after_calls_of_units) == [[(0, 2, 0)] * 3] * 4


def gradients_after_all() -> dict[str, list[torch.Tensor]]:
    return {leave.__name__: gradients_after_zero_grad(leave) for leave in (nothing, *LEFT)}


@cache
def gradients() -> list[dict[str, list[torch.Tensor]]]:
    """Of each rank, by what was left."""
    return on_ranks(4, gradients_after_all)


def gradients_after_zero_grad(leave) -> list[torch.Tensor]:
    """Of one backward, after `leave` has left something behind and zero_grad has cleared it."""
    model = sharded(Tower(), HIER3)
    leave(model)
    model.zero_grad()
    model(inputs(0, dist.get_rank())).backward()
    return [p.grad.as_subclass(torch.Tensor) for p in model.parameters()]


def nothing(_model: nn.Module) -> None:
    pass


def lost_forward(model: nn.Module) -> None:
    model(inputs(1, dist.get_rank())).backward()
    model(inputs(2, dist.get_rank()))


def broken_forward(model: nn.Module) -> None:
    model(inputs(1, dist.get_rank())).backward()
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 6))
    assert engine_of(model).meter.now["gathered"] == 0


def accumulated(model: nn.Module) -> None:
    with lowband.no_sync(model):
        model(inputs(1, dist.get_rank())).backward()


LEFT = lost_forward, broken_forward, accumulated


@pytest.mark.parametrize("leave", [each.__name__ for each in LEFT])
def test_zero_grad_clears_everything(leave: str) -> None:
    for by_what in gradients():
        pairs = zip(by_what[leave], by_what["nothing"], strict=True)
        assert all(torch.equal(got, expected) for got, expected in pairs)


def forward_after_a_failed_gather() -> tuple[float, float, bool]:
    """Every rank runs out of memory in one gather, and goes on with the same input."""
    model = sharded(Tower(), HPZ)
    expected = model(inputs(0, dist.get_rank())).item()
    unit = engine_of(model).units[2]
    gather, unit.held.gather = unit.held.gather, failing
    with pytest.raises(MemoryError):
        model(inputs(0, dist.get_rank()))
    unit.held.gather = gather
    is_free = unit.state is UnitState.SHARDED and unit.flat.untyped_storage().nbytes() == 0
    return expected, model(inputs(0, dist.get_rank())).item(), is_free


def failing(*_: object, **__: object):
    raise MemoryError
    yield


def test_a_failed_gather_leaves_no_garbage() -> None:
    for expected, got, is_free in on_ranks(4, forward_after_a_failed_gather):
        assert is_free
        assert got == expected


TIMEOUT_S = 150  # of no default: groups are made within it, however busy the machine is


def timeouts() -> tuple[timedelta, list[timedelta], str]:
    """Of the default group, of a topology's; what a message to a rank that is late says when it fails."""
    topology = lowband.Topology(INNER)
    groups = [g for bound in topology.along("data").hops("self", "world") for g in (bound.group, bound.back)]
    found = [g._get_backend(torch.device("cpu")).options._timeout for g in groups]
    store, text = dist.distributed_c10d._get_default_store(), ""
    if dist.get_rank() == 2:
        wait_briefly()
    if dist.get_rank() != 3:
        try:
            shards = torch.ones(2, 4)
            topology.along("data").hops("self", "package")[0].exchange(shards, shards.clone(), "a test")
        except PeerLost as error:
            text = str(error)
    if dist.get_rank() == 2:
        store.set("rank 2 has waited", "")
    store.wait(["rank 2 has waited"], timedelta(seconds=100))
    return world_timeout(), found, text


@pytest.mark.waits
def test_the_jobs_timeout_holds_for_every_group() -> None:
    results = on_ranks(4, timeouts, peer_timeout_s=TIMEOUT_S)
    for world, groups, _ in results:
        assert [world, *groups] == [timedelta(seconds=TIMEOUT_S)] * 5
    assert results[2][2].startswith("rank 2 timed out waiting for rank 3 in a test")
    assert results[0][2] == results[1][2] == ""


def test_the_version_of_the_weights_decides_what_the_backward_gathers() -> None:
    """A forward without gradients between a forward and its backward leaves the secondary shard valid."""
    for sent in on_ranks(8, outer_bytes_of_backward):
        assert sent == 0


def outer_bytes_of_backward() -> int:
    model = sharded(Tower(), HPZ)
    loss = model(inputs(0, dist.get_rank()))
    with torch.no_grad():
        model(inputs(1, dist.get_rank()))
    engine_of(model).ledger.take()
    loss.backward()
    return sum(
        s.bytes
        for s in engine_of(model).ledger.take()
        if s.collective == "backward_gather" and s.level == "world"
    )


def gradients_after_a_broken_backward(breaks: bool) -> list[torch.Tensor]:
    """Two forwards; the second one's backward breaks, or is not made; then the first one's backward."""
    model = sharded(Fused(False, False), HPZ)
    one, other = (model(inputs(i, dist.get_rank())) for i in range(2))
    if breaks:
        Fuse.blows = True
        with pytest.raises(ArithmeticError):
            other.backward()
    one.backward()
    return [p.grad.as_subclass(torch.Tensor) for p in model.parameters()]


def test_a_backward_after_a_broken_one() -> None:
    expected = on_ranks(4, gradients_after_a_broken_backward, False)
    for got, of_rank in zip(on_ranks(4, gradients_after_a_broken_backward, True), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, of_rank, strict=True))


def answers_after_one_that_broke(scheme: Scheme, at_the_end: bool) -> list[str]:
    """Of the step and of the norm, where the second of three micro-batches breaks, or the last, all but this
    under no_sync; after zero_grad, of the step where the first one breaks, which had nothing to lose."""
    model = sharded(Fused(False, False), scheme)
    optimizer = sgd(model.parameters())

    def take(*breaks: bool) -> None:
        for i, is_broken in enumerate(breaks):
            with nullcontext() if i + 1 == len(breaks) else lowband.no_sync(model):
                Fuse.blows = is_broken
                with pytest.raises(ArithmeticError) if is_broken else nullcontext():
                    model(inputs(i, dist.get_rank())).backward()
        if breaks[-1]:
            model(inputs(3, dist.get_rank())).backward()

    take(False, at_the_end is False, at_the_end)
    found = [answer(optimizer.step), answer(lambda: lowband.clip_grad_norm_(model, 1.0))]
    optimizer.zero_grad()
    take(True, False, False)
    return [*found, answer(optimizer.step)]


LOST = "has lost gradients of backwards under no_sync to one that ended with an exception"


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("scheme", [HIER3, HPZ], ids=lambda s: s.name)
def test_no_step_without_the_micro_batches_before_one_that_broke(scheme: Scheme, at_the_end: bool) -> None:
    for step, norm, later in on_ranks(4, answers_after_one_that_broke, scheme, at_the_end):
        assert LOST in step
        assert LOST in norm
        assert later == ""


def wait_for_stop(process: psutil.Process) -> None:
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)


def stopped_in_training() -> None:
    model = sharded(Tower(), HPZ)
    optimizer = sgd(model.parameters())
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        if step == 1 and dist.get_rank() == 5:
            store.set("rank 5", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == 1:
            wait_for_stop(psutil.Process(int(store.get("rank 5"))))
            wait_briefly()
        model(inputs(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.waits
def test_a_rank_that_stops_in_training_ends_the_job_and_is_named() -> None:
    message = r"^rank 5 is stopped \(SIGSTOP\); rank [0-9]: PeerLost: rank [0-9] .* of '"
    with pytest.raises(RankFailure, match=message):
        on_ranks(8, stopped_in_training, peer_timeout_s=TIMEOUT_S)
