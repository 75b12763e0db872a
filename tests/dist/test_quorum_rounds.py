"""Rounds of replicas and of workers, in one process: who takes part, what is sent, what is tried in vain."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from quorum_worker import NESTEROV, batch, module, optimizer_of

import lowband
from lowband.engine.jobs.life import Member
from lowband.engine.jobs.link import Link
from lowband.engine.jobs.rounds import Record, Rounds
from lowband.engine.passes.engine import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.waiting import wait_for

PATIENCE_S = 60.0  # none of it is used up


def test_who_is_here_no_longer_asks() -> None:
    """Its request was not answered: the one that gave the state died before it could say so."""
    store = dist.HashStore()
    first = Rounds(store, 0, PATIENCE_S)
    assert first.begins([0], "state")
    first.wait_for_all(time.monotonic())
    second = Rounds(store, 1, PATIENCE_S)
    request = second.ask()
    _, record = first.assemble("0")
    assert record == Record([Member(0, 1)], [request])
    first.over(record)
    second.follow(1, record.members, record.asking)
    with ThreadPoolExecutor() as threads:
        told = [threads.submit(each.assemble, "0") for each in (first, second)]
    assert first.was_given(request) is None
    for each in told:
        assert each.result() == ("1.0", Record([Member(0, 1), Member(1, 1)], []))


def test_who_has_the_state_is_awaited_though_its_giver_died_before_it_said_so() -> None:
    """Not in the round that it joined in alone: in all later ones."""
    store = dist.HashStore()
    first, second = Rounds(store, 0, PATIENCE_S), Rounds(store, 1, PATIENCE_S)
    assert first.begins([0], "state")
    first.wait_for_all(time.monotonic())
    request = second.ask()
    for each in (first, second):
        each.follow(1, [first.me], [request])
        each.over(Record([first.me, second.me], []))
    assert first.was_given(request) is None and first._open() == [request]
    assert first._awaited() == [first.me, second.me]
    again = Rounds(store, 1, PATIENCE_S)
    again.ask()
    assert first._awaited() == [first.me]


def test_a_word_that_comes_as_patience_ends_counts() -> None:
    store = dist.HashStore()
    first, second = (Rounds(store, replica, PATIENCE_S) for replica in (0, 1))
    assert all(each.begins([0, 1], "state") for each in (first, second))
    for each in (first, second):
        each.wait_for_all(time.monotonic())
    with ThreadPoolExecutor() as threads:
        told = [threads.submit(each.assemble, "0") for each in (first, second)]
    record = told[0].result()[1]

    def silent_until_now(_member: Member) -> bool:
        second._say("could", "yes")
        return True

    first._is_silent = silent_until_now  # type: ignore[method-assign]
    verdict = first.vote(record, True)
    assert (verdict.holds, verdict.others) == (True, [Member(0, 1), Member(1, 1)])


def _replica() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Replica 0, of one rank."""
    sync = Sync(beyond="node", every=1, **NESTEROV)
    scheme = Scheme(name="mine", weights="node", grads="node", optim="node", sync=sync)
    model = lowband.shard(module(), scheme, lowband.Topology({"node": 1}), torch.nn.Linear, torch.float32)
    return model, optimizer_of(model.parameters())


def _exchanged(store: dist.Store, sizes: dict[str, int], is_late: bool = False) -> tuple[Rounds, Record]:
    """Replica 1, which has not moved, after an exchange that holds; late: connects once it has heard
    replica 0."""
    rounds = Rounds(store, 1, PATIENCE_S)
    assert rounds.begins([0, 1], store.get("quorum/state").decode())
    rounds.wait_for_all(time.monotonic() + PATIENCE_S)
    key, record = rounds.assemble(" ".join(sizes))
    if is_late:
        wait_for(lambda: store.add("quorum/sign/0.1", 0))
    link = Link(store, f"round/{key}/0", 1, 2, PATIENCE_S)
    for numel in sizes.values():
        link.mean(torch.zeros(numel), "native", 64)
    assert rounds.vote(record, True).holds
    return rounds, record


def _beside(store: dist.Store, sizes: dict[str, int]) -> None:
    """Replica 1, which takes part in one exchange, then leaves."""
    rounds, record = _exchanged(store, sizes)
    rounds.over(record)
    rounds.leave()


def _left_alone() -> tuple[list[list[int]], list[int], list[int], bool]:
    """Values of each unit; members and bytes after two exchanges; whether the second was tried again."""
    store, (model, optimizer) = dist.HashStore(), _replica()
    sizes = {unit.name: unit.layout.numel for unit in engine_of(model).units}
    members, sent = [], []
    with ThreadPoolExecutor() as threads:
        other = threads.submit(_beside, store, sizes)
        quorum = lowband.Quorum(model, optimizer, store, 0, [0, 1], PATIENCE_S)
        for step in range(2):
            model(batch(0, 0, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            members.append(quorum.members)
            sent.append(quorum.sent_bytes)
            other.result()
    return [*sizes.values()], members, sent, store.check(["quorum/1.1/record"])


def test_an_exchange_without_one_that_left_is_tried_once_and_bytes_add_up() -> None:
    [(sizes, members, sent, is_repeated)] = on_ranks(1, _left_alone)
    assert members == [[0, 1], [0]]
    assert sent == [sum(2 * 4 * -(-numel // 16) * 8 for numel in sizes)] * 2
    assert not is_repeated


def _heard_while_it_exchanges() -> None:
    store, (model, optimizer) = dist.HashStore(), _replica()
    with ThreadPoolExecutor() as threads:
        sizes = {unit.name: unit.layout.numel for unit in engine_of(model).units}
        other = threads.submit(_exchanged, store, sizes, is_late=True)
        lowband.Quorum(model, optimizer, store, 0, [0, 1], PATIENCE_S)
        model(batch(0, 0, 0)).square().mean().backward()
        optimizer.step()
        other.result()


def test_a_replica_gives_signs_while_it_waits_for_another() -> None:
    on_ranks(1, _heard_while_it_exchanges)


def _joined_and_left() -> list[list[int]]:
    """Who is expected by worker 0 after each of its steps; worker 1 asks at first and leaves after one."""
    store, expected = dist.HashStore(), []

    def worker(number: int, begins: tuple[int, ...]) -> lowband.OneByte:
        inner = module()
        optimizer = optimizer_of(inner.parameters())
        return lowband.OneByte(inner, optimizer, store, number, begins, patience_s=PATIENCE_S)

    def step(one: lowband.OneByte) -> None:
        one.step(lambda: one.module(batch(one.worker, 0, one.round)).square().mean())

    first, second = worker(0, (0,)), worker(1, ())
    step(first)
    expected.append(first.members)
    with ThreadPoolExecutor() as threads:
        list(threads.map(step, (first, second)))
    expected.append(first.members)
    second.leave()
    step(first)
    expected.append(first.members)
    return expected


def test_a_worker_that_left_is_not_expected_because_it_asked_once() -> None:
    assert on_ranks(1, _joined_and_left) == [[[0, 1], [0, 1], [0]]]
