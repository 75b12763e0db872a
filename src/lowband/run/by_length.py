"""A batch of sequences of many lengths, trained as a plan says: each on as many ranks along context as pay.

Ranks hold whole weights (scheme ddp), so they may compute different sequences one after the other; gradients
are averaged once, behind a rank's last sequence. A loss is a sum over tokens, divided by those of the batch,
which every rank knows beforehand.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lowband
from lowband.engine.parallel.context import Context
from lowband.model.gpt import GPT, Block, attend_along
from lowband.predict.search.lengths_tasks import Task
from lowband.run.pacing import PacedDevice
from lowband.spec.axes import Axes
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme

DDP = Scheme(name="ddp", weights="self", grads="self", optim="self")
LEARNING_RATE = 0.1


class Step(NamedTuple):
    """One optimizer step. loss: of the batch; sent: bytes of all ranks along context by (level, row)"""

    seconds: float
    loss: float
    sent: dict[tuple[str, str], float]


def sequence(vocab: int, number: int, length: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, [1, tokens] each, of a sequence of the batch; behind its length targets: -100."""
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(vocab, (1, length + 1), generator=generator)
    pad = (0, tokens - length)
    return F.pad(drawn[:, :-1], pad), F.pad(drawn[:, 1:], pad, value=-100)


class OfBatch(Context):
    """Ranks along context whose losses divide by the tokens of a batch, which no rank has to ask for."""

    tokens: int

    def mean(self, total: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        return total * (self._all.ranks / self.tokens)


def train(
    model: ModelSpec, batch: Sequence[int], given: Mapping[str, Sequence[Task]], *how: Any
) -> dict[str, list[Step]]:
    """On a rank: steps of each way of spending the batch, in turns; every way starts from the same weights.

    how: as `_steps` takes it
    """
    return {name: [*_steps(model, batch, tasks, *how)] for name, tasks in given.items()}


def _steps(
    spec: ModelSpec, batch: Sequence[int], given: Sequence[Task], sizes: Mapping[str, int], dtype: str,
    steps: int, flop_per_s: float | None = None,
) -> Iterator[Step]:  # fmt: skip
    """sizes: of the machine's levels; flop_per_s: of its products, if paced"""
    contexts = _contexts(given, sizes, sum(batch))
    first = contexts[1, ""]
    with torch.device("meta"):
        model = GPT(spec)
    attend_along(model, first)
    compute = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    topology = lowband.Topology(dict(sizes), Axes())
    lowband.shard(
        model, DDP, topology, wrap=Block, init=model.init, compute_dtype=compute, seed=1, device="cpu"
    )
    for context in contexts.values():
        context.count_in(first.ledger)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    axis = topology.along("data")
    by_rank = [[task for task in given if task.has(rank)] for rank in axis.ranks]
    passes = max(map(len, by_rank))
    mine: list[Task | None] = [*by_rank[axis.place]]
    mine += [None] * (passes - len(mine))
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        with nullcontext() if flop_per_s is None else PacedDevice(flop_per_s):
            loss = _batch(model, spec, batch, mine, contexts) / len(axis.ranks)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds = time.perf_counter() - start
        sent = Counter[tuple[str, str]]()
        for row in first.ledger.take():
            if row.collective.startswith("context"):
                sent[row.level, row.collective] += row.bytes
        yield Step(seconds, loss, dict(sent))


def _contexts(given: Sequence[Task], sizes: Mapping[str, int], tokens: int) -> dict[tuple[int, str], OfBatch]:
    """Ranks along context by degree and way, as the tasks need them, and one rank alone: the same everywhere,
    because making them makes process groups."""
    found = {}
    for degree, way in sorted({(1, ""), *((task.degree, task.way) for task in given if task.degree > 1)}):
        context = OfBatch(lowband.Topology(dict(sizes), Axes(context=degree)), way or None)
        context.tokens = tokens
        found[degree, way] = context
    return found


def _batch(
    model: GPT, spec: ModelSpec, batch: Sequence[int], mine: Sequence[Task | None],
    contexts: Mapping[tuple[int, str], OfBatch],
) -> float:  # fmt: skip
    """Losses and gradients of this rank's sequences; all ranks' losses, added up."""
    total = torch.zeros(())
    for task in mine:
        with lowband.no_sync(model):
            if task is None:
                _nothing(model, spec, contexts)
                continue
            _attend(model, contexts[task.degree, task.way if task.degree > 1 else ""])
            loss = model(*sequence(spec.vocab, task.sequence, batch[task.sequence], task.tokens))
            loss.backward()
        total += loss.detach()
    _nothing(model, spec, contexts)  # with this backward, which every rank has, gradients are averaged
    dist.all_reduce(total)
    return float(total)


def _nothing(model: GPT, spec: ModelSpec, contexts: Mapping[tuple[int, str], OfBatch]) -> None:
    """A pass of one token that counts for nothing: ranks must run equally many."""
    _attend(model, contexts[1, ""])
    (0 * model(*sequence(spec.vocab, 0, 1, 1))).backward()


def _attend(model: GPT, context: Context) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "context", None), Context):
            module.context = context
