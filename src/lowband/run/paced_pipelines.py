"""Steps of a pipeline on paced ranks and links, action by action, beside the timeline of its lists.

Each stage is a linear layer, whose three products (forward, input part, weight part) take equally long on a
paced device (run/pacing.py). Ranks are processes over gloo that run the executor of `lowband.Pipeline`. A
paced link is a delay: a message is real, and leaves `send_s` after its sender has computed it, beside others.
"""

import os
import threading
import time
from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.cost.slow_sends import lists_for_sends
from lowband.cost.timeline import timeline
from lowband.engine.transport.messages import Messages, Posted
from lowband.run.on_ranks import on_ranks
from lowband.run.pacing import PacedDevice
from lowband.spec.axes import Axes
from lowband.spec.schedule import Action, Lists, peak, stages
from lowband.spec.schedules import Name, lists

RANKS, MICRO_BATCHES = 4, 8
STEPS = 3  # after one that is not counted
WIDTH, SEQUENCES = 64, 8
SEARCHED = "searched"
NAMED: tuple[tuple[Name, int], ...] = (  # with the stages on a rank
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("breadth", 2),
    ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2),
)  # fmt: skip


class Step(NamedTuple):
    """memory: micro-batches on the fullest rank; bubble: idle share of ranks whose actions take the stated
    time; load: of the machine, runnable processes in the mean over a minute"""

    schedule: str
    ranks: int
    micro_batches: int
    forward_s: float
    send_over_forward: float
    memory: float
    step: int
    step_s: float
    predicted_step_s: float
    bubble: float
    predicted_bubble: float
    load: float


class End(NamedTuple):
    """When an action ended, seconds from the step's start, in the middle one of the steps by time."""

    schedule: str
    send_over_forward: float
    rank: int
    kind: str
    stage: int
    micro_batch: int
    seconds: float
    end_s: float
    predicted_end_s: float


class Paced(Messages):
    """Messages that leave `send_s` after they were given."""

    send_s: float

    def send(self, tensor: torch.Tensor, place: int, name: str) -> Posted:
        return Late(lambda: super(Paced, self).send(tensor, place, name), self.send_s)  # type: ignore[return-value]


class Late:
    """A message that is posted after a while, by a thread of its own."""

    def __init__(self, post: Callable[[], Posted], after_s: float) -> None:
        self._post, self._posted, self._error = post, list[Posted](), list[BaseException]()
        self._timer = threading.Timer(after_s, self._run)
        self._timer.start()

    def _run(self) -> None:
        try:
            self._posted.append(self._post())
        except BaseException as error:
            self._error.append(error)

    def wait(self) -> torch.Tensor:
        self._timer.join()
        for error in self._error:
            raise error
        return self._posted[0].wait()


def schedules(send: float) -> dict[str, Lists]:
    """The lists that are measured, by name. send: over the forward"""
    found: dict[str, Lists] = {name: lists(name, RANKS, MICRO_BATCHES, chunks) for name, chunks in NAMED}
    return found | {SEARCHED: lists_for_sends(RANKS, MICRO_BATCHES, 1.0, 1.0, 1.0, send)}


def measure(forward_s: float, sends: tuple[float, ...], steps: int = STEPS) -> tuple[list[Step], list[End]]:
    """Every schedule on every link, in turns: a step of each, then the next step of each.

    forward_s: of a micro-batch in all of a rank's stages, and of each part of its backward
    sends:     over it
    """
    rows, ends = [], []
    for send in sends:
        given = schedules(send)
        limit_s = 120 + 3 * (1 + steps) * len(given) * MICRO_BATCHES * forward_s * (3 + 6 * send)
        by_rank = on_ranks(RANKS, _steps, given, forward_s, send * forward_s, steps, time_limit_s=limit_s)
        for name, of_it in given.items():
            found = [[of_rank[name][step] for of_rank in by_rank] for step in range(steps)]
            of_step, of_middle = _rows(name, of_it, forward_s, send, found)
            rows += of_step
            ends += of_middle
    return rows, ends


class _Found(NamedTuple):
    """One rank's step: its start and its actions' ends, by time.perf_counter(), which ranks share."""

    start: float
    ends: list[tuple[Action, float]]
    load: float


def _rows(
    name: str, of_it: Lists, forward_s: float, send: float, found: list[list[_Found]]
) -> tuple[list[Step], list[End]]:
    chunks = stages(of_it) // RANKS
    part = forward_s / chunks
    line = timeline(of_it, part, part, part, send * forward_s)
    busy_s, predicted_s = 3 * forward_s * MICRO_BATCHES, float(line.step_s)
    took = [
        max(end for one in by_rank for _, end in one.ends) - min(one.start for one in by_rank)
        for by_rank in found
    ]
    rows = [
        Step(
            name, RANKS, MICRO_BATCHES, forward_s, send, max(peak(of_it)) / chunks, step, step_s, predicted_s,
            1 - busy_s / step_s, 1 - busy_s / predicted_s, by_rank[0].load,
        )
        for step, (step_s, by_rank) in enumerate(zip(took, found, strict=True), 1)
    ]  # fmt: skip
    middle = found[took.index(median_low(took))]
    start = min(one.start for one in middle)
    seconds = {"forward": part, "input": part, "weight": part, "backward": 2 * part}
    ends = [
        End(name, send, rank, *action, seconds[action.kind], end - start, float(predicted))
        for rank, one in enumerate(middle)
        for (action, end), predicted in zip(one.ends, line.ends[rank], strict=True)
    ]
    return rows, ends


def _steps(given: dict[str, Lists], forward_s: float, send_s: float, steps: int) -> dict[str, list[_Found]]:
    """On a rank: what it found in each step, by schedule."""
    topology = lowband.Topology({}, Axes(pipeline=RANKS))
    pipes = {name: _pipeline(of_it, topology, send_s) for name, of_it in given.items()}
    products = 2 * SEQUENCES * WIDTH * WIDTH
    devices = {
        name: PacedDevice(products * stages(of_it) / RANKS / forward_s) for name, of_it in given.items()
    }
    x = torch.ones(SEQUENCES, WIDTH)
    found: dict[str, list[_Found]] = {name: [] for name in given}
    for step in range(1 + steps):
        for name, pipe in pipes.items():
            dist.barrier()
            load, start = os.getloadavg()[0], time.perf_counter()
            with devices[name]:
                pipe.step([(x, x)] * MICRO_BATCHES)
            if step:
                found[name].append(_Found(start, pipe.ends, load))
            pipe.zero_grad()
    return found


class _Start(nn.Module):
    """Before the first stage's layer, so that its input part has a gradient to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _pipeline(of_it: Lists, topology: lowband.Topology, send_s: float) -> lowband.Pipeline:
    count = stages(of_it)
    chain = [_Start(), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))]
    pipe = lowband.Pipeline(
        chain, lambda output, _: output.square().mean(), "zero3", topology, MICRO_BATCHES, of_it,
        layers=[2] + [1] * (count - 1), compute_dtype=torch.float32,
    )  # fmt: skip
    paced = Paced(topology.along("pipeline"))
    paced.send_s = send_s
    pipe._mail._messages = paced
    return pipe
