"""Fine-tuning in which a worker sends one byte per step, whatever the model's size.

Each worker moves all trainable weights along a random direction, measures how the loss of its own batch
changes, and sends that one number in a byte. Whoever knows the round and the worker can draw the direction
again. So every worker applies every worker's number to its own copy of the weights, and the copies stay equal
bit by bit. Source: Zelikman et al., Just One Byte (per gradient), arXiv 2306.10015, with the projected
gradients of MeZO (arXiv 2305.17333). How they put a number into a byte is not known to us; here it is an
8-bit float.

[Note: rounds] Workers are no ranks of a process group, which would end with the first of them. They meet in a
key-value store (torch.distributed.TCPStore). For each round they put their bytes there, and the first worker
that has all of them, or whose patience is over, puts the round's record: the numbers that count, and who is
expected in the next round. The store takes one record of a round only, so there is no second opinion. A
worker joins by replaying the records so far on the weights that the others began with. Records stay in the
store, some hundred bytes per worker and round.
"""

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.jobs.store import POLL_S, open_store, reaching
from lowband.errors import UserError

BYTE = torch.float8_e5m2  # 2^-16 to 57344, in steps of a quarter or less; and 0
MOST_WORKERS = 2**16


class Record(NamedTuple):
    """What a round was.

    bytes: by worker; next: who is expected in the next round; asked: how many have asked to join so far
    """

    bytes: dict[int, int]
    next: list[int]
    asked: int

    def written(self) -> str:
        return json.dumps([list(self.bytes.items()), self.next, self.asked], separators=(",", ":"))

    @classmethod
    def read(cls, text: bytes) -> "Record":
        pairs, following, asked = json.loads(text)
        return cls(dict(pairs), following, asked)


class OneByte:
    """One worker: its module, its optimizer, and its place in the rounds."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: dist.Store,
        worker: int,
        begins: Collection[int] = (),
        epsilon: float = 1e-3,
        patience_s: float = 30.0,
        seed: int = 0,
        first_round: int = 0,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        """
        module:      whole on this worker, not sharded, without dropout; its buffers are not exchanged
        optimizer:   a torch optimizer of the module's parameters; the same on every worker
        store:       a TCPStore that all workers reach. The process that hosts it must stay to the end
        worker:      this worker's number, which no other worker has at the same time
        begins:      all workers of the first round, the same on each of them; empty for one that joins later
        epsilon:     how far weights are moved to measure a loss
        patience_s:  how long a round waits for a worker, then it goes on without; and how long one that joins
                     waits for the run to begin
        seed:        of the directions; the same on every worker
        first_round: of a run that goes on from saved weights and optimizer: the `round` they were saved at
        scheduler:   of the learning rate; stepped here after every round, also those that are replayed

        Raises UserError for a module that is sharded or all frozen, and for weights, a seed, an optimizer or
        workers other than those that the run began with.
        """
        if hasattr(module, "_lowband"):
            raise UserError("the module is sharded, and a worker needs all weights", where="OneByte")
        if not 0 <= worker < MOST_WORKERS:
            raise UserError(f"worker {worker}", where="OneByte", allowed=f"0 to {MOST_WORKERS - 1}")
        if epsilon <= 0 or patience_s <= 0:
            raise UserError(
                f"epsilon {epsilon}, patience_s {patience_s}", where="OneByte", allowed="numbers above 0"
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError("the module has no trainable parameters", where="OneByte")
        if begins and worker not in begins:
            raise UserError(f"worker {worker} is not among those that begin", where="OneByte", allowed=begins)
        for each in (optimizer, scheduler):
            _check_step(each)
        self.module, self.optimizer, self.worker = module, optimizer, worker
        self._scheduler = scheduler
        self._weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._store, self._epsilon, self._patience_s, self._seed = store, epsilon, patience_s, seed
        self.round = first_round  # whose record has to be applied next
        self.sent_bytes = 0  # the numbers; the store's keys come on top
        self._asked = 0  # how many have asked to join, by the last record
        self._is_asking = False
        with reaching(store):
            self._agree("weights, buffers or seed", self._checksum(_tensors(module)))
            self._agree("optimizer or scheduler", _options(optimizer, scheduler))
            self.members = self._first(begins)  # who is expected in this round
            self._ask_to_join()

    @torch.no_grad()
    def step(self, loss_of: Callable[[], torch.Tensor]) -> float:
        """Measure the loss of a batch on both sides, send a byte, and apply everybody's as a gradient.

        loss_of: computes the loss, one number; called twice, it must take the same batch

        A worker that joins, or that came late, first applies the rounds that it missed. Returns the mean of
        the two losses. Raises UserError for a loss that is not finite (nothing is sent), for a worker whose
        weights differ from the others' after the rounds that it missed, for one that comes when the run is
        over (its weights are then the run's last), and if the store is gone.
        """
        with reaching(self._store):
            self._catch_up()
            ahead, behind = self._losses(loss_of)
            slope = torch.tensor((ahead - behind) / (2 * self._epsilon))
            if not slope.isfinite():
                raise UserError(f"losses {ahead}, {behind}", where="OneByte.step", allowed="finite numbers")
            largest = torch.finfo(BYTE).max
            byte = slope.clamp(-largest, largest).to(BYTE).view(torch.uint8)
            self._store.set(self._key(self.worker), str(int(byte)))
            self.sent_bytes += byte.nbytes
            self._apply(self._record())
        return (ahead + behind) / 2

    def leave(self) -> None:
        """Take no part until the next `step`. Without this call the others wait once, for `patience_s`.

        When all have left, the run is over.
        """
        with reaching(self._store):
            if self.worker in self.members:
                self._store.set(self._key(self.worker), "")
                self.members = [worker for worker in self.members if worker != self.worker]

    store = staticmethod(open_store)

    # ---- rounds

    def _key(self, what: object) -> str:
        return f"one-byte/{self.round}/{what}"

    def _checksum(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Of the seed, the round, and these tensors with their names."""
        digest = hashlib.sha256(f"{self._seed} {self.round}".encode())
        for name, tensor in tensors:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _agree(self, what: str, mine: str) -> None:
        """Raises UserError unless this is what the first worker had."""
        if self._store.compare_set(f"one-byte/{what}", "", mine).decode() != mine:
            raise UserError(
                f"{what}: not those that the run began with", where="OneByte",
                allowed="the same module, seed, first_round, optimizer and begins on every worker",
            )  # fmt: skip

    def _first(self, begins: Collection[int]) -> list[int]:
        """The workers of the first round."""
        if begins:
            self._agree("begins", json.dumps(sorted(begins)))
        until = time.monotonic() + self._patience_s
        while not self._store.check(["one-byte/begins"]):
            if time.monotonic() > until:
                raise UserError("no run has begun", where="OneByte", allowed="workers that pass `begins`")
            time.sleep(POLL_S)
        first: list[int] = json.loads(self._store.get("one-byte/begins"))
        return first

    def _ask_to_join(self) -> None:
        """Ask, once, if this worker is not expected: it is new, has left, or came late."""
        is_expected = self.worker in self.members
        if not is_expected and not self._is_asking:
            self._store.append("one-byte/asking", f"{self.worker} ")
        self._is_asking = not is_expected

    def _catch_up(self) -> None:
        """Apply the rounds that are over, and those until this worker is expected."""
        self._ask_to_join()
        has_asked = self._is_asking
        while self._is_asking or self._store.check([self._key("record")]):
            self._apply(self._record())
            self._ask_to_join()
        if has_asked:
            self._compare()

    def _compare(self) -> None:
        """Raises UserError if the weights are not the others', who give theirs when somebody joins."""
        until = time.monotonic() + self._patience_s
        while not self._store.check([self._key("weights")]) and len(self.members) > 1:
            if time.monotonic() > until:
                return  # they are gone; the round goes on without them
            time.sleep(POLL_S)
        mine = self._checksum(self.module.named_parameters())
        if len(self.members) > 1 and self._store.get(self._key("weights")).decode() != mine:
            self.leave()
            raise UserError(
                f"after {self.round} rounds the weights are not the others'", where="OneByte.step",
                allowed="the same optimizer, scheduler, torch and kind of device on every worker",
            )  # fmt: skip

    def _record(self) -> Record:
        """The round's record, written by the first worker that has all bytes or has waited long enough."""
        until = time.monotonic() + self._patience_s
        while not self._store.check([self._key("record")]):
            here = [worker for worker in self.members if self._store.check([self._key(worker)])]
            if len(here) == len(self.members) or time.monotonic() > until:
                found = {worker: self._store.get(self._key(worker)) for worker in here}
                if len(here) == len(self.members) and not any(found.values()):
                    over = f"the run is over: all its workers left after {self.round} rounds"
                    raise UserError(over, where="OneByte.step")
                sent = {worker: int(text) for worker, text in found.items() if text}
                asking = self._asking()
                following = sorted({*sent, *asking[self._asked :]})
                record = Record(sent, following, len(asking)).written()
                self._store.compare_set(self._key("record"), "", record)
            else:
                time.sleep(POLL_S)
        return Record.read(self._store.get(self._key("record")))

    def _asking(self) -> list[int]:
        """Who has asked to join, in order, since the run began."""
        known = self._store.check(["one-byte/asking"])
        return [int(worker) for worker in self._store.get("one-byte/asking").split()] if known else []

    def _apply(self, record: Record) -> None:
        """Step the optimizer by the mean of everybody's slope times direction."""
        if record.bytes:
            for weight in self._weights:
                weight.grad = torch.zeros_like(weight)
            for worker, byte in sorted(record.bytes.items()):
                slope = float(torch.tensor(byte, dtype=torch.uint8).view(BYTE)) / len(record.bytes)
                for weight, direction in zip(self._weights, self._directions(worker), strict=True):
                    assert weight.grad is not None
                    weight.grad.add_(direction, alpha=slope)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        self.members, self._asked = record.next, record.asked
        self.round += 1
        if self.worker in record.bytes and set(record.next) != set(record.bytes):  # somebody joins
            self._store.set(self._key("weights"), self._checksum(self.module.named_parameters()))

    # ---- directions

    def _directions(self, worker: int) -> Iterator[torch.Tensor]:
        """A worker's direction in this round, weight by weight: normal numbers of variance 1."""
        name = f"{self._seed} {self.round} {worker}".encode()
        seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "little", signed=True)
        random = torch.Generator(self._weights[0].device).manual_seed(seed)
        for weight in self._weights:
            yield torch.randn(weight.shape, generator=random, dtype=weight.dtype, device=weight.device)

    def _losses(self, loss_of: Callable[[], torch.Tensor]) -> tuple[float, float]:
        """The loss a step `epsilon` ahead along this worker's direction, and behind."""
        kept = [weight.clone() for weight in self._weights]  # adding and subtracting would round
        losses = []
        try:
            for way in (self._epsilon, -self._epsilon):
                for weight, was, direction in zip(
                    self._weights, kept, self._directions(self.worker), strict=True
                ):
                    torch.add(was, direction, alpha=way, out=weight)
                losses.append(float(loss_of()))
        finally:
            torch._foreach_copy_(self._weights, kept)
        return losses[0], losses[1]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of its state, without extra states of other kinds."""
    state = module.state_dict().items()
    return ((name, value) for name, value in state if isinstance(value, torch.Tensor))


def _check_step(stepped: object) -> None:
    """Raises UserError for what cannot be stepped without arguments."""
    if stepped is None:
        return
    try:
        inspect.signature(type(stepped).step).bind(stepped)  # type: ignore[attr-defined]
    except TypeError:
        what = f"{type(stepped).__name__}, whose step needs arguments"
        raise UserError(what, where="OneByte", allowed="those whose step() needs none") from None


def _options(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler | None) -> str:
    """What copies of the weights must have in common to stay equal, as text: kinds, and options of groups."""
    groups = [
        {**group, "params": [list(parameter.shape) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    kinds = [type(each).__qualname__ for each in (optimizer, scheduler)]
    return json.dumps([kinds, groups], sort_keys=True, default=_plain)


def _plain(value: object) -> object:
    """Of what JSON has no form for: a tensor's values, on any device; else the kind, which has no address."""
    return value.tolist() if isinstance(value, torch.Tensor) else type(value).__qualname__
