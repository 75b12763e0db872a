"""Replicas that are jobs of their own: killed, started again, late; bit-equal to models in one process."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quorum_jobs import EVERY, STEPS, Jobs, check, rounds
from quorum_worker import NESTEROV, batch, module, optimizer_of

import lowband
from lowband.engine.jobs import life as quorum_life
from lowband.engine.jobs import quorum as engine_quorum
from lowband.engine.jobs import rounds as quorum_rounds
from lowband.engine.jobs.handover import Handover
from lowband.engine.jobs.life import Member
from lowband.engine.jobs.link import Link
from lowband.engine.jobs.rounds import LONGEST_PAUSE_S, Record, Rounds
from lowband.engine.jobs.state import State
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.refused import refusal


@pytest.fixture
def jobs_of(tmp_path: Path) -> Iterator[Callable[..., Jobs]]:
    made = []

    def make(**options: Any) -> Jobs:
        made.append(Jobs(tmp_path, **options))
        return made[-1]

    yield make
    for jobs in made:
        jobs.end()


@pytest.mark.parametrize(
    ("replicas", "ranks", "fragments"),
    [
        (1, 2, 1),
        pytest.param(2, 1, 1, marks=pytest.mark.wide),
        (3, 1, 3),
        pytest.param(3, 2, 3, marks=pytest.mark.wide),
    ],
)
def test_bit_equal_to_models_in_one_process(jobs_of, replicas: int, ranks: int, fragments: int) -> None:
    jobs = jobs_of(ranks=ranks, begins=list(range(replicas)), sync={"fragments": fragments})
    for replica in range(replicas):
        jobs.start(replica)
    found = {replica: jobs.seen(replica) for replica in range(replicas)}
    assert rounds(check(found, ranks, fragments)) == [list(range(replicas))] * (STEPS * fragments // EVERY)
    for seen in found.values():
        for of_rank in seen:
            pieces = [numel // ranks for numel in of_rank["units"]]
            parts = [-(-piece // (8 * replicas)) * 8 for piece in pieces]
            assert of_rank["sent"] == sum(2 * 4 * part * (replicas - 1) for part in parts) * STEPS // EVERY
            peak, now = of_rank["held"]
            assert peak["anchor"] == peak["outer"] == 4 * sum(pieces)
            assert peak["in_flight"] == 4 * (sum(pieces) if fragments == 1 else max(pieces))
            assert now["in_flight"] == 0


def test_a_killed_replica_joins_again_and_others_lose_no_step(jobs_of) -> None:
    jobs = jobs_of(ranks=2, waits_at=8)
    jobs.start(0)
    jobs.start(1, dies=7, rank=1)
    jobs.start(2)
    jobs.ended(1)
    jobs.start(1)
    found = {replica: jobs.seen(replica) for replica in range(3)}
    assert found[1][0]["began"] == 9
    assert rounds(check(found, ranks=2)) == [[0, 1, 2]] * 2 + [[0, 2]] + [[0, 1, 2]] * 3
    last = str(STEPS)
    assert found[1][1]["outer"][last] == found[0][1]["outer"][last] == found[2][1]["outer"][last]
    assert found[1][0]["rate"] == {k: v for k, v in found[0][0]["rate"].items() if int(k) >= 9}


@pytest.mark.parametrize(("signal", "more"), [("SIGKILL", {}), ("SIGSTOP", {"patience_s": 10.0})])
def test_one_that_dies_or_freezes_in_an_exchange_changes_nothing_for_the_others(
    signal: str, more: dict[str, float], jobs_of
) -> None:
    """The patience is of each message: gloo ends the wait for the one that is frozen, which still holds its
    connections."""
    jobs = jobs_of(ranks=2, is_told=True, **more)
    jobs.start(0)
    jobs.start(1, signal_in=["_means", 3, signal], rank=1)  # after it has said that it is here
    jobs.start(2)
    if signal == "SIGKILL":
        jobs.ended(1)
    jobs.end_patience("2.0", "verdict", "could/0.1", "could/2.1")
    found = {replica: jobs.seen(replica) for replica in (0, 2)}
    assert rounds(check(found, ranks=2)) == [[0, 1, 2]] * 2 + [[0, 2]] * 4


def test_when_the_one_that_gives_the_state_dies_another_one_gives_it(jobs_of) -> None:
    jobs = jobs_of(is_told=True, waits_at=2)  # it has asked before the first exchange
    jobs.start(0, signal_in=["give", 1, "SIGKILL"])
    jobs.start(1)
    jobs.start(2, dies=1)
    jobs.ended(2)
    jobs.start(2)
    jobs.ended(0)
    jobs.end_patience("1.0", "record", "here/1.1")
    found = {replica: jobs.seen(replica) for replica in (1, 2)}
    assert found[2][0]["began"] == 2 * EVERY
    assert rounds(check(found, ranks=1)) == [[0, 1], [1]] + [[1, 2]] * 4


def test_one_that_dies_as_it_is_given_the_state_does_not_stop_the_giver(jobs_of) -> None:
    jobs = jobs_of(begins=[0, 1], is_told=True, patience_s=3.0, waits_at=4)
    jobs.start(0)
    jobs.start(1)
    jobs.start(2, signal_in=["_receive", 1, "SIGKILL"])
    jobs.ended(2)
    found = {replica: jobs.seen(replica) for replica in range(2)}
    assert rounds(check(found, ranks=1)) == [[0, 1]] * (STEPS // EVERY)


def test_one_that_was_suspended_too_long_is_refused(jobs_of) -> None:
    jobs = jobs_of(is_told=True)
    jobs.start(0)
    jobs.start(1, sleeps=4, until="1.0/record")
    jobs.start(2, sleeps=10, until="3.0/here/0.1")  # it comes before the other's patience is over
    jobs.end_patience("1.0", "record", "here/0.1", "here/2.1")
    assert "replica 1: the others went on without it after 6 steps" in jobs.ended(1)
    found = {replica: jobs.seen(replica) for replica in (0, 2)}
    assert rounds(check(found, ranks=1)) == [[0, 1, 2]] + [[0, 2]] * 5


def test_a_new_replica_joins(jobs_of) -> None:
    jobs = jobs_of(begins=[4, 7], waits_at=4)
    jobs.start(9)
    jobs.start(4)
    jobs.start(7)
    found = {replica: jobs.seen(replica) for replica in (4, 7, 9)}
    began = found[9][0]["began"]
    assert began in (3, 6)
    before = began // EVERY
    assert rounds(check(found, ranks=1)) == [[4, 7]] * before + [[4, 7, 9]] * (STEPS // EVERY - before)


def test_replicas_are_equal_on_a_quantized_wire(jobs_of) -> None:
    jobs = jobs_of(ranks=2, begins=[0, 1], wire="int4")
    jobs.start(0)
    jobs.start(1)
    first, second = jobs.seen(0), jobs.seen(1)
    assert first[0]["weights"] == second[0]["weights"]
    assert first[1]["outer"] == second[1]["outer"]
    assert first[0]["sent"] < 18 * 4 * 60


def test_a_run_that_all_have_left_lets_nobody_join(jobs_of) -> None:
    jobs = jobs_of(begins=[0])
    jobs.start(0)
    jobs.seen(0)
    jobs.start(1)
    assert "replica 1: the run is over: all replicas left after 6 rounds" in jobs.ended(1)


def test_the_last_two_that_died_are_told_so(jobs_of) -> None:
    """Though both would wait for an hour."""
    jobs = jobs_of(begins=[0, 1], join_s=3600.0)
    for replica in range(2):
        jobs.start(replica, dies=4)
    for replica in range(2):
        jobs.ended(replica)
    for replica in range(2):
        jobs.start(replica)
    for replica in range(2):
        said = jobs.ended(replica).splitlines()[-1]
        assert f"replica {replica}: no replica is left that has the state" in said


def test_without_a_store_all_end_in_one_line(jobs_of) -> None:
    jobs = jobs_of(begins=[0, 1], steps=3000, step_s=0.02)
    jobs.start(0)
    jobs.start(1)
    jobs.wait_for("2.0/record")
    jobs.close_store()
    for replica in range(2):
        assert "lost the store of the rounds" in jobs.ended(replica).splitlines()[-1]


def test_replicas_that_differ_or_do_not_begin_are_refused_in_one_line(jobs_of) -> None:
    jobs = jobs_of(begins=[0, 1], join_s=1.0)  # of which one never begins
    jobs.start(0)
    jobs.start(1, sync={"every": 2})
    said = sorted(jobs.ended(replica).splitlines()[-1] for replica in range(2))
    assert "has not begun" in "".join(said)
    assert "scheme, ranks, units and optimizer: not what the other replicas began with" in "".join(said)


def _refused() -> list[str]:
    said, store = [], dist.HashStore()

    def note(scheme: Scheme, select: slice = slice(None), **options: Any) -> None:
        model = lowband.shard(module(), scheme, lowband.Topology({"node": 1}), torch.nn.Linear, torch.float32)
        optimizer = optimizer_of(list(model.parameters())[select])
        said.append(
            refusal(lowband.Quorum, model, optimizer, store, **{"replica": 0, "begins": [0], **options})
        )

    def scheme(**options: Any) -> Scheme:
        sync = Sync(beyond="node", every=EVERY, **{**NESTEROV, **options})
        return Scheme(name="mine", weights="node", grads="node", optim="node", sync=sync)

    if dist.get_world_size() == 2:
        note(scheme())
        return said
    note(Scheme(name="none", weights="node", grads="node", optim="node"))
    note(scheme(delay=1))
    note(scheme(), replica=-1)
    note(scheme(), patience_s=0.0)
    note(scheme(), slice(2))
    return said


def test_misuse_is_one_line() -> None:
    said = on_ranks(1, _refused)[0] + on_ranks(2, _refused)[0]
    parts = "has no sync", "delay 1", "replica -1", "patience_s 0.0", "does not have all", "has 2 replicas"
    for text, part in zip(said, parts, strict=True):
        assert part in text
        assert "\n" not in text


def _alone(
    store: dist.Store | None = None, begins: Sequence[int] = (0,), **options: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer, lowband.Quorum]:
    """Replica 0 of a run, which exchanges after each step."""
    scheme = Scheme(
        name="mine", weights="node", grads="node", optim="node", sync=Sync(beyond="node", every=1, **NESTEROV)
    )
    model = lowband.shard(module(), scheme, lowband.Topology({"node": 1}), torch.nn.Linear, torch.float32)
    optimizer = optimizer_of(model.parameters())
    return model, optimizer, lowband.Quorum(model, optimizer, store or dist.HashStore(), 0, begins, **options)


def _asked_for_more() -> list[dict[str, torch.Tensor]]:
    """The weights behind an exchange, behind a second one at once, and behind one of weights that moved."""
    model, optimizer, quorum = _alone()
    found = []
    for weights_move in (True, False, True):
        if weights_move:
            model(batch(0, 0, 0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            lowband.sync_replicas(model)
        found.append(lowband.full_state_dict(model))
    quorum.leave()
    return found


def test_replicas_that_agree_are_not_moved_on() -> None:
    """By the outer momentum, where `sync_replicas` is called behind a period's end."""
    [(exchanged, again, moved)] = on_ranks(1, _asked_for_more)
    assert all(torch.equal(again[name], value) for name, value in exchanged.items())
    assert not all(torch.equal(moved[name], value) for name, value in exchanged.items())


def _misused(folder: Path) -> list[str]:
    said = []

    def refused(call: Callable[[], object]) -> None:
        said.append(refusal(call))

    model, optimizer, quorum = _alone()
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(0, model, optimizer)
    checkpointer.wait()
    refused(lambda: checkpointer.load(folder / "step-00000000", model, optimizer))
    refused(lambda: lowband.consensus_distance(model))
    refused(lambda: lowband.Quorum(model, optimizer, dist.HashStore(), 0, [0]))
    model(batch(0, 0, 0)).sum().backward()
    optimizer.step()
    assert quorum.steps == 1
    with lowband.no_sync(model):
        model(batch(0, 0, 0)).sum().backward()
    refused(optimizer.step)
    assert quorum.steps == 1
    model.zero_grad()
    quorum.leave()
    refused(optimizer.step)
    refused(lambda: lowband.sync_replicas(model))

    model, optimizer, quorum = _alone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model(batch(0, 0, 0)).sum().backward()
    refused(optimizer.step)

    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])  # by number
    refused(lambda: _alone(also={"schedule": milestones}))
    refused(lambda: checkpointer.save(1, model, optimizer, milestones.state_dict()))
    return said


def test_what_would_train_wrongly_is_one_line(tmp_path: Path) -> None:
    [said] = on_ranks(1, _misused, tmp_path)
    parts = (
        "a checkpoint is loaded after it was made", "the other replicas are other jobs", "has one already",
        "gradients of backwards under no_sync, which",
        "it has left", "it has left", "were changed after it was made",
        "the key 2 would come back as text", "the key 2 would come back as text",
    )  # fmt: skip
    for text, part in zip(said, parts, strict=True):
        assert part in text
        assert "\n" not in text


def _sums(has_trained: bool) -> list[str]:
    """Of replicas with another frozen weight, or another buffer."""
    found = []
    for frozen, kept in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        inner = module()
        inner[2].requires_grad_(False)
        inner[2].bias.data.fill_(frozen)
        inner.register_buffer("kept", torch.full((3,), kept))
        sync = Sync(beyond="node", every=1)
        scheme = Scheme(name="mine", weights="node", grads="node", optim="node", sync=sync)
        model = lowband.shard(inner, scheme, lowband.Topology({"node": 1}), torch.nn.Linear, torch.float32)
        found.append(State(model, optimizer_of(model.parameters()), {}).sum(has_trained))
    return found


def test_frozen_weights_and_buffers_must_be_alike() -> None:
    assert len(set(on_ranks(1, _sums, False)[0])) == 3


def test_of_a_run_that_goes_on_buffers_may_differ() -> None:
    """Each replica has counted its own batches."""
    [[one, frozen, counted]] = on_ranks(1, _sums, True)
    assert one == counted != frozen


def test_a_refused_start_does_not_use_up_a_replicas_turn() -> None:
    store = dist.HashStore()
    first, wrong = Rounds(store, 0, 1.0), Rounds(store, 1, 1.0)
    assert first.begins([0, 1], "state")
    with pytest.raises(UserError, match="state"):
        wrong.begins([0, 1], "another state")
    again = Rounds(store, 1, 1.0)
    assert again.begins([0, 1], "state")
    assert not Rounds(store, 1, 1.0).begins([0, 1], "state")
    for rounds_ in (first, again):
        rounds_.wait_for_all(time.monotonic())
        assert rounds_.expected == [Member(0, 1), Member(1, 2)]


def test_a_state_that_one_rank_did_not_receive_is_put_on_none() -> None:
    joining = object.__new__(Handover)
    joining._meeting = SimpleNamespace(
        together=lambda _what, _receive: ("link", "state"), everyone=lambda came: [came, False]
    )
    assert not joining._receive(1, 0, '{"state": {}}')


def test_the_run_is_over_though_one_died_late() -> None:
    store = dist.HashStore()
    first, second = Rounds(store, 0, 1.0), Rounds(store, 1, 1.0)
    assert first.begins([0, 1], "state")
    assert second.begins([0, 1], "state")
    first.wait_for_all(time.monotonic())
    first.leave()
    late = Rounds(store, 1, 1.0)
    with pytest.raises(UserError, match="the run is over: all replicas left after 0 rounds"):
        late.offered(late.ask(), -1, time.monotonic())


def test_the_run_is_not_over_because_one_that_joined_again_had_left_before() -> None:
    first, second = _two()
    store = first._store.underlying_store
    first.leave()
    second.over(Record([second.me], []))
    again = Rounds(store, 0, 1.0)
    request = again.ask()
    for each in (again, second):  # it was given the state
        each.follow(2, [second.me], [request])
    second.leave()
    late = Rounds(store, 1, 1.0)
    with pytest.raises(UserError, match="no replica has let it join"):
        late.offered(late.ask(), -1, time.monotonic())
    again.leave()
    with pytest.raises(UserError, match="the run is over: all replicas left after 2 rounds"):
        late.offered(late.ask(), -1, time.monotonic())


def test_nobody_is_left_when_all_that_had_the_state_are_gone() -> None:
    """One is waited for as long as it may train, though it is the last."""
    store = dist.HashStore()
    asker = Rounds(store, 3, 1.0)
    request = asker.ask()

    def said() -> str:
        return refusal(lambda: asker.offered(request, -1, time.monotonic()))

    first, second, third = (Rounds(store, replica, 1.0) for replica in range(3))
    for each in (first, second):
        assert each.begins([0, 1, 2], "state")
    first = Rounds(store, 0, 1.0)
    assert "no replica has let it join" in said()  # the third has not begun
    assert third.begins([0, 1, 2], "state")
    third.wait_for_all(time.monotonic())
    third.over(Record([third.me], []))  # without the second, which is not started again
    assert "no replica has let it join" in said()
    first.follow(1, [third.me], [])  # it was given the state
    Rounds(store, 2, 1.0)
    assert "no replica has let it join" in said()
    Rounds(store, 0, 1.0)
    assert "no replica is left that has the state" in said()


def test_replicas_that_exchange_other_units_are_refused() -> None:
    store = dist.HashStore()
    first, second = Rounds(store, 0, 60.0), Rounds(store, 1, 60.0)
    for rounds_ in (first, second):
        assert rounds_.begins([0, 1], "state")
    for rounds_ in (first, second):
        rounds_.wait_for_all(time.monotonic())
    with ThreadPoolExecutor() as threads:
        told = [threads.submit(first.assemble, "0"), threads.submit(second.assemble, "0 2")]
    for each, other in zip(told, (1, 0), strict=True):
        with pytest.raises(UserError, match=f"replica {other} exchanges other units"):
            each.result()


PATIENCE_S = 20.0


class Clock:
    """In place of the module `time`: seconds pass in `sleep` only, and things happen `at` them."""

    def __init__(self, at: dict[float, Callable[[], object]] | None = None) -> None:
        self._now, self._at = 0.0, at or {}

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        for moment in [moment for moment in self._at if moment <= self._now]:
            self._at.pop(moment)()

    def is_just_after(self, moment: float) -> bool:
        """But for a pause before it is noticed, and one before what was done then is."""
        return moment < self._now <= moment + 3 * LONGEST_PAUSE_S


def _two() -> tuple[Rounds, Rounds]:
    store = dist.HashStore()
    both = Rounds(store, 0, PATIENCE_S), Rounds(store, 1, PATIENCE_S)
    for each in both:
        assert each.begins([0, 1], "state")
    for each in both:
        each.wait_for_all(time.monotonic())
    return both


def test_one_that_does_not_come_is_waited_for_until_the_patience_is_over(monkeypatch) -> None:
    first, _ = _two()
    monkeypatch.setattr(quorum_rounds, "time", clock := Clock())
    assert first.assemble("0")[1].members == [first.me]
    assert clock.is_just_after(PATIENCE_S)


def _in_an_exchange(patch: pytest.MonkeyPatch, clock: Clock) -> tuple[Rounds, Rounds, Record]:
    """Two replicas, when the exchange begins."""
    first, second = _two()
    patch.setattr(quorum_life, "time", clock)
    with ThreadPoolExecutor() as threads:
        [(_, record), _] = threads.map(lambda each: each.assemble("0"), (first, second))
    patch.setattr(quorum_rounds, "time", clock)
    return first, second, record


SILENCE_S = PATIENCE_S + 2 * LONGEST_PAUSE_S


@pytest.mark.parametrize("could", [True, False])
@pytest.mark.parametrize("exchanged_s", [0, 5, int(PATIENCE_S)])
def test_one_that_gives_no_sign_is_left_out(monkeypatch, could: bool, exchanged_s: int) -> None:
    """So long after it stopped, however long the others needed to find out."""
    first, _, record = _in_an_exchange(monkeypatch, clock := Clock())
    began = clock.monotonic()
    for _ in range(exchanged_s):
        first.live()
        clock.sleep(1.0)
    assert first.vote(record, could) == (False, [first.me])
    assert clock.is_just_after(began + SILENCE_S)


def test_one_that_gives_signs_is_waited_for(monkeypatch) -> None:
    """Its connection may come to nothing long after the others'."""
    signs, last = [i * PATIENCE_S for i in range(1, 6)], 5.5 * PATIENCE_S

    def live() -> None:
        second.live()

    happens: dict[float, Callable[[], object]] = dict.fromkeys(signs, live)
    happens[last] = lambda: second._say("could", "no")
    first, second, record = _in_an_exchange(monkeypatch, clock := Clock(happens))
    assert first.vote(record, False) == (False, [first.me, second.me])
    assert clock.is_just_after(last)


@pytest.mark.parametrize("comes", [True, False])
def test_patience_begins_anew_as_another_one_gives_its_state(monkeypatch, comes: bool) -> None:
    """To one that dies meanwhile."""
    giver, other = _two()
    number = Rounds(giver._store.underlying_store, 2, PATIENCE_S).ask()
    for each in (giver, other):
        each.follow(1, [giver.me, other.me], [number])
    happens: dict[float, Callable[[], object]] = {
        0.9 * PATIENCE_S: lambda: giver.gives(number),
        1.8 * PATIENCE_S: lambda: giver.given(number, False),
    }
    if comes:
        happens[2.7 * PATIENCE_S] = lambda: giver.assemble("0")
    monkeypatch.setattr(quorum_rounds, "time", clock := Clock(happens))
    assert other.assemble("0")[1].members == ([giver.me, other.me] if comes else [other.me])
    assert clock.is_just_after((2.7 if comes else 2.8) * PATIENCE_S)


@pytest.mark.parametrize("takes", [3.5, 5.5])
def test_who_gave_its_state_for_long_is_awaited_as_long(monkeypatch, takes: float) -> None:
    """It trains so much later than the others, whether these come before it has given it, or after."""
    giver, other = _two()
    number = Rounds(giver._store.underlying_store, 2, PATIENCE_S).ask()
    for each in (giver, other):
        each.follow(1, [giver.me, other.me], [number])
    period_s, takes_s = 4.5 * PATIENCE_S, takes * PATIENCE_S
    happens: dict[float, Callable[[], object]] = {}
    if takes_s < period_s:
        giver.given(number, False, takes_s)
    else:  # seconds since the other one has come
        happens[0.5 * PATIENCE_S] = lambda: giver.gives(number)
        happens[takes_s - period_s] = lambda: giver.given(number, False, takes_s)
    happens[takes_s] = lambda: giver.assemble("0")
    monkeypatch.setattr(quorum_rounds, "time", clock := Clock(happens))
    assert other.assemble("0")[1].members == [giver.me, other.me]
    assert clock.is_just_after(takes_s)


def _waits_for_another() -> tuple[list[int], bool, list[float]]:
    """Of an exchange to which another one does not come: members; whether all patience with it, and no more,
    was used up; patience with messages.
    """
    store, of_messages = dist.HashStore(), []

    def linked(store: dist.Store, name: str, place: int, count: int, patience_s: float) -> Link:
        of_messages.append(patience_s)
        return Link(store, name, place, count, patience_s)

    store.set("quorum/began/1", "1")
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer, replica = _alone(store, [0, 1], patience_s=PATIENCE_S)
        patch.setattr(quorum_rounds, "time", clock := Clock())
        patch.setattr(engine_quorum, "Link", linked)
        model(batch(0, 0, 0)).sum().backward()
        optimizer.step()
    return replica.members, clock.is_just_after(PATIENCE_S), of_messages


def test_a_replica_has_the_patience_that_it_was_given() -> None:
    assert on_ranks(1, _waits_for_another) == [([0], True, [PATIENCE_S])]


def _cannot_send() -> str:
    """Every attempt fails, though nobody is lost."""
    model, optimizer, _ = _alone()
    model(batch(0, 0, 0)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "mean", _fail)
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
    return str(error.value)


def _fail(*_: object) -> None:
    raise RuntimeError("no memory\nat all")


def test_an_exchange_that_always_fails_ends() -> None:
    assert on_ranks(1, _cannot_send) == ["10 attempts at an exchange failed: no memory"]
