"""Replicas of one run as processes, and the same training in one process."""

import copy
import json
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quorum_worker import batch, module, optimizer_of

from tests import warm

WORKER = Path(__file__).with_name("quorum_worker.py")
EVERY, STEPS = 3, 18
TIMEOUT_S = 300  # for a job
Seen = dict[str, Any]


class Jobs:
    """Replicas of one run, each a process with ranks of its own; the store is here."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder, self._options = folder, options
        self._running: dict[int, ForkServerProcess] = {}

    def start(self, replica: int, **options: Any) -> None:
        out = self._folder / f"{replica}.json"
        out.unlink(missing_ok=True)
        mine = {
            "replica": replica, "ranks": 1, "begins": [0, 1, 2], "steps": STEPS, "patience_s": 60.0,
            "join_s": 120.0, "address": f"127.0.0.1:{self._store.port}", "out": str(out),
            **self._options, **options,
        }  # fmt: skip
        file = self._folder / f"{replica}.options.json"
        file.write_text(json.dumps(mine))
        self._running[replica] = warm.begun([WORKER, file], self._output(replica))

    def wait_for(self, key: str) -> None:
        """Until the replicas have written it."""
        self._store.get(f"quorum/{key}")

    def end_patience(self, round_: str, what: str, *here: str) -> None:
        """Of those that wait in this attempt at a round for its record or verdict, once it has these keys.

        For replicas with the option `is_told`: no clock ends theirs.
        """
        for key in here:
            self.wait_for(f"{round_}/{key}")
        self._store.set(f"quorum/{round_}/patience/{what}", "")

    def close_store(self) -> None:
        del self._store

    def pid(self, replica: int) -> int:
        """Of the process whose children are the ranks."""
        pid = self._running[replica].pid
        assert pid is not None
        return pid

    def kill(self, replica: int) -> None:
        warm.killed(self._running[replica])

    def ended(self, replica: int) -> str:
        """What a job that fails has printed."""
        said = self._said(replica)
        assert self._running[replica].exitcode, said
        return said

    def seen(self, replica: int) -> list[Seen]:
        """By rank."""
        said = self._said(replica)
        assert self._running[replica].exitcode == 0, said
        found: list[Seen] = json.loads((self._folder / f"{replica}.json").read_text())
        return found

    def end(self) -> None:
        for running in self._running.values():
            warm.killed(running)

    def _said(self, replica: int) -> str:
        """What it has printed, once it has ended."""
        self._running[replica].join(TIMEOUT_S)
        return self._output(replica).read_text(errors="replace")

    def _output(self, replica: int) -> Path:
        return self._folder / f"{replica}.output"


class Model:
    """A replica of the reference."""

    def __init__(self) -> None:
        self.module = module()
        self.weights = list(self.module.parameters())
        self.optimizer = optimizer_of(self.weights)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.anchor = [weight.detach().clone() for weight in self.weights]
        self.outer = [torch.zeros_like(weight) for weight in self.weights]

    def copy_of(self, other: "Model") -> None:
        self.module.load_state_dict(other.module.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.schedule.load_state_dict(other.schedule.state_dict())
        self.anchor = [each.clone() for each in other.anchor]
        self.outer = [each.clone() for each in other.outer]

    def step(self, replica: int, ranks: int, step: int) -> None:
        grads = []
        for rank in range(ranks):
            self.optimizer.zero_grad()
            self.module(batch(replica, rank, step)).square().mean().backward()
            grads.append([weight.grad.clone() for weight in self.weights])
        for i, weight in enumerate(self.weights):
            weight.grad = sum(each[i] for each in grads[1:]) + grads[0][i] if ranks > 1 else grads[0][i]
            weight.grad /= ranks
        self.optimizer.step()
        self.schedule.step()


def exchange(models: list[Model], which: list[int], momentum: float = 0.9, rate: float = 0.7) -> None:
    """An exchange of these weights."""
    for i in which:
        total = models[0].anchor[i] - models[0].weights[i].detach()
        for model in models[1:]:
            total = total + (model.anchor[i] - model.weights[i].detach())
        mean = total / len(models)
        for model in models:
            model.outer[i] = momentum * model.outer[i] + mean
            model.anchor[i] -= rate * (mean + momentum * model.outer[i])
            with torch.no_grad():
                model.weights[i].copy_(model.anchor[i])


def reference(members_of: dict[int, list[int]], ranks: int, fragments: int = 1) -> dict[int, list[Any]]:
    """By step of an exchange and by replica in it: weights, and the outer momentum.

    members_of: by that step; a replica that was in no exchange just before is a copy of the first that was
    """
    gap, found, before = EVERY // fragments, {}, members_of[min(members_of)]
    models = {replica: Model() for replica in before}
    units = [[0, 1], [2, 3]]  # the layers; the root has no parameters
    for end in sorted(members_of):
        members = members_of[end]
        for replica in members:
            if replica not in before:
                models[replica] = Model()
                models[replica].copy_of(models[before[0]])
        for replica in members:
            for step in range(end - gap, end):
                models[replica].step(replica, ranks, step)
        fragment = (end // gap - 1) % fragments
        which = [i for unit, slots in enumerate(units) if unit % fragments == fragment for i in slots]
        exchange([models[replica] for replica in members], which)
        found[end] = [[each.detach().clone() for each in models[replica].anchor] for replica in members]
        before = members
    return found


def check(found: dict[int, list[Seen]], ranks: int, fragments: int = 1) -> dict[int, list[int]]:
    """Compare all replicas, at all exchanges and once they have joined, with the reference.

    Returns members by step.
    """
    members_of: dict[int, list[int]] = {}
    for seen in found.values():
        for step, members in seen[0]["members"].items():
            assert members_of.setdefault(int(step), members) == members
    expected = reference(members_of, ranks, fragments)
    for replica, seen in found.items():
        for text, weights in seen[0]["weights"].items():
            members = members_of[int(text)]
            place = members.index(replica) if replica in members else 0  # it has joined since
            for value, other in zip(weights.values(), expected[int(text)][place], strict=True):
                assert torch.equal(torch.tensor(value), other), (replica, text)
    return members_of


def rounds(members_of: dict[int, list[int]]) -> list[list[int]]:
    return [members_of[step] for step in sorted(members_of)]
