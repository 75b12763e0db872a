"""One byte per worker and step: copies equal bit by bit, against one process that plays all workers."""

import hashlib
import socket

import pytest
import torch
import torch.distributed as dist

import lowband
from lowband.engine.jobs.one_byte import MOST_WORKERS, Record
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from tests.refused import refusal
from tests.waiting import wait_for

ROUNDS, EPSILON, SEED = 5, 1e-2, 3


def _module() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def _loss(module: torch.nn.Module, worker: int, round_: int) -> torch.Tensor:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * worker + round_))
    return module(inputs).square().mean()


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02)


def _direction(round_: int, worker: int, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    digest = hashlib.sha256(f"{SEED} {round_} {worker}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return [torch.randn(weight.shape, generator=random) for weight in weights]


def reference(members_of: list[list[int]]) -> list[torch.Tensor]:
    """The weights after rounds with these workers: out of place, in plain torch."""
    module = _module()
    optimizer, weights = _optimizer(module), list(module.parameters())
    for round_, members in enumerate(members_of):
        slopes = {}
        for worker in members:
            moved, losses = _module(), []
            for way in (EPSILON, -EPSILON):
                parts = zip(moved.parameters(), weights, _direction(round_, worker, weights), strict=True)
                with torch.no_grad():
                    for into, weight, direction in parts:
                        into.copy_(weight.detach() + way * direction)
                    losses.append(float(_loss(moved, worker, round_)))
            slope = torch.tensor((losses[0] - losses[1]) / (2 * EPSILON))
            slopes[worker] = float(slope.to(torch.float8_e5m2))
        for i, weight in enumerate(weights):
            weight.grad = torch.zeros_like(weight)
            for worker in members:
                part = _direction(round_, worker, weights)[i]
                weight.grad.add_(part, alpha=slopes[worker] / len(members))
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def _store() -> dist.TCPStore:
    """One store for all ranks; rank 0 hosts it."""
    port = [0]
    if dist.get_rank() == 0:
        hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [hosted.port]
    dist.broadcast_object_list(port, src=0)
    return hosted if dist.get_rank() == 0 else dist.TCPStore("127.0.0.1", port[0])


def _worker(store: dist.Store, **more: object) -> lowband.OneByte:
    module = _module()
    options = {"epsilon": EPSILON, "seed": SEED, "worker": dist.get_rank(), "patience_s": 60.0, **more}
    return lowband.OneByte(module, _optimizer(module), store, **options)  # type: ignore[arg-type]


def _weights(one: lowband.OneByte) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in one.module.parameters()]


def _step(one: lowband.OneByte, times: int = 1) -> None:
    for _ in range(times):
        one.step(lambda: _loss(one.module, one.worker, one.round))


def _two_steps_with_who_asks(one: lowband.OneByte, asked: int = 1) -> None:
    """Step once somebody, the `asked`th in all, has asked to join, who is expected in the second step."""
    wait_for(lambda: len(one._asking()) == asked)
    _step(one, 2)


def _train() -> tuple[list[torch.Tensor], int, list[torch.Tensor] | None]:
    one = _worker(_store(), begins=range(dist.get_world_size()))
    _step(one, ROUNDS)
    dist.barrier()  # the host of the store stays
    return _weights(one), one.sent_bytes, [w.grad for w in one.module.parameters() if w.grad is not None]


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_bit_equal_to_one_process_that_plays_all_workers(workers) -> None:
    expected = reference([list(range(workers))] * ROUNDS)
    for weights, sent_bytes, grads in on_ranks(workers, _train):
        assert all(torch.equal(ours, other) for ours, other in zip(weights, expected, strict=True))
        assert sent_bytes == ROUNDS  # one per step, whatever the model
        assert not grads


def _come_and_go() -> tuple[list[torch.Tensor], int]:
    """Workers 0 and 1 begin; 1 leaves after two rounds; 2 joins; 1 comes back."""
    store, rank = _store(), dist.get_rank()
    if rank == 0:
        one = _worker(store, begins=(0, 1))
        _step(one, 2)
        dist.barrier()
        _step(one, 3)  # 1 has left; from the second one on 2 is there
        dist.barrier()
        _two_steps_with_who_asks(one, asked=2)  # from the second one on 1 is there again
    elif rank == 1:
        one = _worker(store, begins=(0, 1))
        _step(one, 2)
        one.leave()
        dist.barrier()
        dist.barrier()
        _step(one)
    else:
        wait_for(lambda: store.check(["one-byte/1/record"]))  # two rounds are over
        one = _worker(store)  # asks before the third round
        dist.barrier()
        _step(one, 2)
        dist.barrier()
        _step(one, 2)
    found = _weights(one), one.round
    dist.barrier()
    return found


def test_workers_leave_and_join_and_all_have_the_same_bits() -> None:
    found = on_ranks(3, _come_and_go)
    assert {rounds for _, rounds in found} == {7}
    expected = reference([[0, 1], [0, 1], [0], [0, 2], [0, 2], [0, 2], [0, 1, 2]])
    for weights, _ in found:
        assert all(torch.equal(ours, other) for ours, other in zip(weights, expected, strict=True))


def _stop_and_come_late() -> tuple[list[torch.Tensor], list[int], int]:
    """Worker 1 stops without a word, and steps again after two rounds."""
    store = _store()
    one = _worker(store, begins=(0, 1))
    _step(one)
    expected = []
    if one.worker == 0:
        one._patience_s, patience_s = 0.5, one._patience_s
        _step(one)  # waits
        one._patience_s = patience_s
        expected = list(one.members)
        _step(one)
        dist.barrier()
        _two_steps_with_who_asks(one)
    else:
        dist.barrier()
        _step(one)  # applies what it missed and asks; is expected after the round that is going on
    found = _weights(one), expected, one.round
    dist.barrier()
    return found


def test_a_worker_that_stops_is_waited_for_once_and_may_come_back() -> None:
    found = on_ranks(2, _stop_and_come_late)
    assert found[0][1] == [0]
    expected = reference([[0, 1], [0], [0], [0], [0, 1]])
    for weights, _, rounds in found:
        assert rounds == 5
        assert all(torch.equal(ours, other) for ours, other in zip(weights, expected, strict=True))


def _go_on() -> list[torch.Tensor]:
    """Three rounds; then a new run with the weights, the optimizer and the round of the old one."""
    store = _store()
    one = _worker(store, begins=range(2))
    _step(one, 3)
    again, states = _module(), one.optimizer.state_dict()
    again.load_state_dict(one.module.state_dict())
    optimizer = _optimizer(again)
    optimizer.load_state_dict(states)
    second = lowband.OneByte(
        again, optimizer, dist.PrefixStore("again", store), one.worker, range(2), EPSILON, seed=SEED,
        first_round=one.round,
    )  # fmt: skip
    _step(second, ROUNDS - 3)
    dist.barrier()
    return _weights(second)


def _too_late() -> tuple[list[torch.Tensor], int, str]:
    """Workers 0 and 1 leave after two rounds; 1 steps again, and 2 is new."""
    store, said = _store(), ""
    if dist.get_rank() < 2:
        one = _worker(store, begins=(0, 1))
        _step(one, 2)
        one.leave()
        dist.barrier()
    else:
        dist.barrier()
        one = _worker(store)
    if dist.get_rank() > 0:
        said = refusal(_step, one)
    found = _weights(one), one.round, said
    dist.barrier()
    return found


def test_a_run_that_all_have_left_is_over() -> None:
    found = on_ranks(3, _too_late)
    expected = reference([[0, 1], [0, 1]])
    for weights, rounds, _ in found:
        assert rounds == 2
        assert all(torch.equal(ours, other) for ours, other in zip(weights, expected, strict=True))
    for _, _, said in found[1:]:
        assert said == "OneByte.step: the run is over: all its workers left after 2 rounds"


def test_a_run_goes_on_from_saved_weights() -> None:
    expected = reference([[0, 1]] * ROUNDS)
    for weights in on_ranks(2, _go_on):
        assert all(torch.equal(ours, other) for ours, other in zip(weights, expected, strict=True))


def _join_another_way(decays: tuple[float, float]) -> tuple[list[torch.Tensor], str]:
    """Worker 0 trains two rounds alone, 1 joins; each with a schedule of its own."""
    store, rank, module = _store(), dist.get_rank(), _module()
    adam = _optimizer(module)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, decays[rank])
    begins = (0,) if rank == 0 else ()
    if rank == 1:
        dist.barrier()
    one = lowband.OneByte(module, adam, store, rank, begins, EPSILON, 60.0, SEED, scheduler=schedule)
    error = ""
    if rank == 0:
        _step(one, 2)
        dist.barrier()
        _two_steps_with_who_asks(one)
    else:
        try:
            _step(one)
        except UserError as refused:
            error = str(refused)
    found = _weights(one), error
    dist.barrier()
    return found


def test_who_joins_replays_the_schedule() -> None:
    (first, _), (second, error) = on_ranks(2, _join_another_way, (0.5, 0.5))
    assert error == ""
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_who_would_train_other_weights_is_refused() -> None:
    (_, alone), (_, error) = on_ranks(2, _join_another_way, (0.5, 0.4))
    assert alone == ""
    assert "after 3 rounds the weights are not the others'" in error


def _other_optimizer(store: dist.Store, **options: float) -> lowband.OneByte:
    module = _module()
    optimizer = torch.optim.AdamW(module.parameters(), **{"lr": 0.02, **options})
    return lowband.OneByte(module, optimizer, store, 0, (0,), EPSILON, 0.1, SEED)


class Counting(torch.nn.Linear):
    """Its state has what is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def _refused() -> list[str]:
    store, found = dist.HashStore(), []

    def note(**options: object) -> None:
        found.append(refusal(_worker, store, **{"worker": 0, "patience_s": 0.1, **options}))

    note()  # nobody has begun
    one = _worker(store, begins=(0,))
    note(seed=SEED + 1, begins=(0,))
    note(begins=(0, 1))
    note(worker=1, begins=(0,))
    note(worker=MOST_WORKERS)
    note(epsilon=0.0)
    found.append(refusal(_other_optimizer, store, lr=0.03))
    found.append(refusal(_other_optimizer, store, weight_decay=0.0))
    _other_optimizer(dist.HashStore(), lr=torch.tensor(0.02))
    counting = Counting()
    sgd = torch.optim.SGD(counting.parameters(), lr=0.02)
    lowband.OneByte(counting, sgd, dist.HashStore(), 0, (0,))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    found.append(refusal(lowband.OneByte, counting, sgd, store, 0, (0,), scheduler=plateau))
    lbfgs = torch.optim.LBFGS(counting.parameters())
    found.append(refusal(lowband.OneByte, counting, lbfgs, store, 0, (0,)))
    before = _weights(one)
    found.append(refusal(lambda: one.step(lambda: torch.tensor(float("nan")))))
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(one), strict=True))
    assert one.sent_bytes == 0
    with pytest.raises(ZeroDivisionError):
        one.step(lambda: 1 / 0)
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(one), strict=True))
    _step(one)
    return found


def test_what_does_not_fit_is_refused_and_nothing_is_lost() -> None:
    [found] = on_ranks(1, _refused)
    for text, part in zip(
        found,
        [
            "no run has begun",
            "weights, buffers or seed",
            "begins",
            "not among",
            f"worker {MOST_WORKERS}",
            "epsilon",
            "optimizer or scheduler: not those that the run began with",
            "optimizer or scheduler: not those that the run began with",
            "OneByte: ReduceLROnPlateau, whose step needs arguments (allowed: those whose step() needs none)",
            "OneByte: LBFGS, whose step needs arguments",
            "nan",
        ],
        strict=True,
    ):
        assert part in text
        assert "\n" not in text


@pytest.mark.parametrize("address", ["nowhere", ":1", "localhost:", "localhost:x", "localhost:65536"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"store '{address}'.*host:port"):
        lowband.OneByte.store(address)


def test_a_store_that_does_not_answer_is_one_line_and_a_taken_port_too() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: no store: .*a process that hosts it there"):
            lowband.OneByte.store(f"127.0.0.1:{port}", timeout_s=2.0)
        taken.listen()
        with pytest.raises(UserError, match="a free port to host it at") as refused:
            lowband.OneByte.store(f"127.0.0.1:{port}", hosts=True, timeout_s=2.0)
        assert "\n" not in str(refused.value)


def _without_a_store() -> str:
    store = _store()
    one = _worker(store, begins=range(2))
    _step(one)
    dist.barrier()  # both have read the round's record
    if dist.get_rank() == 0:
        del one, store  # closes the server
    dist.barrier()
    if dist.get_rank() == 0:
        return ""
    return refusal(_step, one)


def test_a_store_that_is_gone_is_one_line() -> None:
    text = on_ranks(2, _without_a_store)[1]
    assert "lost the store of the rounds" in text
    assert "\n" not in text


def test_a_record_is_read_as_it_was_written() -> None:
    record = Record({3: 255, 1: 0}, [1, 3, 65535], 2)
    assert Record.read(record.written().encode()) == record
