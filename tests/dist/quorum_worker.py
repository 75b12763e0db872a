"""One replica of a run whose replicas are jobs of their own: `python quorum_worker.py OPTIONS.json`.

Writes what its rank 0 has seen to the options' `out`. It may be told to die, or to freeze, at a moment, and
its patience with other replicas may be the test's instead of a clock's.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lowband
from lowband.engine.jobs.handover import Handover
from lowband.engine.jobs.life import Member
from lowband.engine.jobs.rounds import Rounds
from lowband.engine.jobs.store import POLL_S
from lowband.engine.passes.engine import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync

NESTEROV = {"outer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}


def module() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))


def batch(replica: int, rank: int, step: int) -> torch.Tensor:
    seed = 10000 * replica + 100 * rank + step
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def sync_of(options: dict[str, Any]) -> Sync:
    return Sync.model_validate({"beyond": "node", "every": 3, **NESTEROV, **options.get("sync", {})})


def scheme_of(options: dict[str, Any]) -> Scheme:
    inside = options.get("inside", "node")
    return Scheme(
        name="mine", weights=inside, grads=inside, optim=inside, sync=sync_of(options),
        sync_reduce=options.get("wire", "native"),
    )  # fmt: skip


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Members by exchange, the state after each, and the steps that this replica began at."""
    replica, rank, ranks = options["replica"], dist.get_rank(), dist.get_world_size()
    model = lowband.shard(
        module(), scheme_of(options), lowband.Topology({"node": ranks}), torch.nn.Linear, torch.float32
    )
    optimizer = optimizer_of(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    store = lowband.Quorum.store(options["address"])
    quorum = lowband.Quorum(
        model, optimizer, store, replica, options["begins"], options["patience_s"], options["join_s"],
        {"rate": schedule},
    )  # fmt: skip
    seen: dict[str, Any] = {
        "began": quorum.steps,
        "members": {},
        "weights": {},
        "outer": {},
        "rate": {},
        "at": {},
    }
    if quorum.steps:
        note(seen, model, quorum, schedule)
    while quorum.steps < options["steps"]:
        step = quorum.steps
        die(options, step, store)
        if step == options.get("waits_at"):  # until a replica has asked to join
            while not int(store.add("quorum/asks", 0)):
                time.sleep(0.01)
        time.sleep(options.get("step_s", 0))
        loss = model(batch(replica, rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if quorum.steps % sync_of(options).gap == 0:
            note(seen, model, quorum, schedule)
    quorum.leave()
    seen["sent"] = quorum.sent_bytes
    seen["units"] = [unit.layout.numel for unit in engine_of(model).units]
    seen["held"] = dict(engine_of(model).meter.peak), dict(engine_of(model).meter.now)
    return seen


def note(seen: dict[str, Any], model: torch.nn.Module, quorum: lowband.Quorum, schedule: Any) -> None:
    engine, step = engine_of(model), quorum.steps
    assert engine.replicas is not None
    state = lowband.full_state_dict(model)
    seen["weights"][step] = {name: value.tolist() for name, value in state.items()}
    seen["at"][step] = time.monotonic()
    anchors = engine.replicas.exchanges
    seen["outer"][step] = [each.momentum.tolist() for each in anchors if each.momentum is not None]  # type: ignore[attr-defined]
    seen["members"][step], seen["rate"][step] = quorum.members, schedule.get_last_lr()


def die(options: dict[str, Any], moment: object, store: dist.Store) -> None:
    if options.get("dies") == moment and dist.get_rank() == options.get("rank", 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if options.get("sleeps") == moment:  # all ranks, as if its machine was suspended
        store.wait([f"quorum/{options['until']}"])


def signal_in(options: dict[str, Any], name: str, at: int, order: str) -> None:
    """Get a signal at the at-th call of a method, of a Quorum or of its Handover."""
    [owner] = [each for each in (lowband.Quorum, Handover) if hasattr(each, name)]
    method, calls = getattr(owner, name), []

    def call(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == at and dist.get_rank() == options.get("rank", 0):
            os.kill(os.getpid(), signal.Signals[order])
        return method(*arguments)

    setattr(owner, name, call)


def waiting_until_told(self: Rounds) -> Iterator[float]:
    """In place of `Rounds._waiting`: no time passes until the test says so, then an hour with each look."""
    waited_s = 0.0
    while True:
        yield waited_s
        waited_s += 3600.0 * self._store.check([f"{self.key}/patience/record"])
        self.tick()
        time.sleep(POLL_S)


def silent_when_told(self: Rounds, _member: Member) -> bool:
    """In place of `Rounds._is_silent`."""
    return bool(self._store.check([f"{self.key}/patience/verdict"]))


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    if options.get("is_told"):
        Rounds._waiting = waiting_until_told  # type: ignore[method-assign]
        Rounds._is_silent = silent_when_told  # type: ignore[method-assign]
    if "signal_in" in options:
        signal_in(options, *options["signal_in"])
    found = on_ranks(
        options["ranks"], train, options, time_limit_s=240, peer_timeout_s=options.get("peer_timeout_s")
    )
    Path(options["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
