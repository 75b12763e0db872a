"""Replicas that meet seldom: trained by the engine, as several models in one process, and in a run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from started import run
from test_parity import CLIP, SPEC, optimizer_of, part_of_batch
from torch import nn

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.records import Outcome, by_row
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.spec.scheme import Scheme

HIER3 = {"weights": "package", "grads": "node", "optim": "node"}
ZERO3 = {"weights": "node", "grads": "node", "optim": "node"}
DDP = {"weights": "self", "grads": "self", "optim": "self"}
Sent = dict[tuple[str, str, str], int]  # level, collective, wire -> bytes


@dataclass
class Found:
    """Of a rank, by step: its loss, bytes sent, and what was looked at; at the end the state, of all ranks.

    held, units: bytes at the most, and values of each unit
    """

    losses: list[float] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    scheme: Scheme, topology: lowband.Topology, steps: int, look: Callable[[nn.Module], Any]
) -> tuple[nn.Module, Found]:
    """The model afterwards, not yet synchronised. A scheme whose name says so trains breadth-first."""
    is_breadth = scheme.name.startswith("breadth")
    model = GPT(SPEC, seed=7, recompute="full" if is_breadth else "none")
    lowband.shard(model, scheme, topology, wrap=Block, compute_dtype=torch.float32)
    engine, optimizer, found = engine_of(model), optimizer_of(model.parameters()), Found()
    for step in range(steps):
        batch = part_of_batch(step, 0, dist.get_rank(), dist.get_world_size(), 1)
        if is_breadth:
            [loss] = lowband.accumulate(model, [batch], lambda batch: model(*batch))
        else:
            loss = model(*batch)
            loss.backward()
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        found.sent.append(by_row(engine.ledger.take()))
        found.seen.append(look(model))
    found.held = dict(engine.meter.peak)
    found.held["optim"] *= 3  # Adam's moments
    found.units = [unit.layout.numel for unit in engine.units]
    found.state = lowband.full_state_dict(model)
    return model, found


def are_equal(model: nn.Module) -> bool:
    """Whether each rank holds the same bits as the same rank of the first replica."""
    engine = engine_of(model)
    mine = torch.cat([unit.master for unit in engine.units])
    return same_on_replicas(mine, engine.axis.levels.size(engine.replicas.sync.beyond))


def same_on_replicas(mine: torch.Tensor, size: int) -> bool:
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(everyones[rank], everyones[rank % size]) for rank in range(len(everyones)))


def replicas_of(scheme: Scheme, inner: dict[str, int], ranks: int) -> reference.Replicas:
    """The same training in one process."""
    return reference.Replicas(
        lambda: GPT(SPEC, seed=7),
        lambda model, inputs, targets: model(inputs, targets),
        lambda step, micro, rank: part_of_batch(step, micro, rank, ranks, 1),
        scheme,
        Levels.fit(inner, ranks),
        CLIP,
        optimizer_of,
    )


class Cases:
    """Schemes on numbers of ranks, each trained once.

    on:    ranks -> names of schemes;  inner: ranks -> sizes of levels
    train: on each rank
    wide:  numbers of ranks that are for `make test-all`
    reference_of: in one process: losses of all ranks by step, and the state at the end
    """

    def __init__(
        self,
        schemes: Sequence[Scheme],
        on: Mapping[int, Sequence[str]],
        inner: Mapping[int, dict[str, int]],
        train: Callable[[Scheme, lowband.Topology], Found],
        reference_of: Callable[[reference.Replicas], tuple[list[list[float]], dict[str, torch.Tensor]]],
        wide: Collection[int] = (),
    ) -> None:
        self.schemes = {scheme.name: scheme for scheme in schemes}
        self.all, self.exact = (
            [
                pytest.param(ranks, name, marks=[pytest.mark.wide] if ranks in wide else [])
                for ranks, names in on.items()
                for name in names
                if not (is_exact and self.schemes[name].is_quantized)
            ]
            for is_exact in (False, True)
        )
        self._on, self._inner, self._train, self._reference_of = on, inner, train, reference_of
        self._by_rank, self._single = cache(self._sharded), cache(self._in_one_process)

    def levels(self, ranks: int) -> Levels:
        return Levels.fit(self._inner[ranks], ranks)

    def found(self, ranks: int, name: str) -> list[Found]:
        """Of each rank."""
        return [found[name] for found in self._by_rank(ranks)]

    def _sharded(self, ranks: int) -> list[dict[str, Found]]:
        def train_all() -> dict[str, Found]:
            topology = lowband.Topology(self._inner[ranks])
            return {name: self._train(self.schemes[name], topology) for name in self._on[ranks]}

        return on_ranks(ranks, train_all, time_limit_s=400)

    def _in_one_process(self, ranks: int) -> dict[str, Any]:
        def train_references() -> dict[str, Any]:
            names = [name for name in self._on[ranks] if not self.schemes[name].is_quantized]
            replicas = {name: replicas_of(self.schemes[name], self._inner[ranks], ranks) for name in names}
            return {name: self._reference_of(each) for name, each in replicas.items()}

        return on_ranks(1, train_references, time_limit_s=400)[0]

    def check_bits(self, ranks: int, name: str) -> None:
        """Losses and state are those of one process."""
        losses, agreed = self._single(ranks)[name]
        found = self.found(ranks, name)
        for rank, of_rank in enumerate(found):
            assert of_rank.losses == [at_step[rank] for at_step in losses]
        for key, expected in agreed.items():
            assert torch.equal(found[0].state[key], expected), key

    def check_bytes_and_memory(
        self, ranks: int, name: str, firsts: Sequence[int]
    ) -> tuple[dict[str, float], Sent]:
        """Those of the periods from `firsts` on are the closed forms'. Returns these: states, bytes."""
        scheme, levels = self.schemes[name], self.levels(ranks)
        every = scheme.sync.every
        for found in self.found(ranks, name):
            per_step = sent_bytes(found.units, scheme, levels, "fp32", "fp32", 1, is_clipped=True)
            for first in firsts:
                period = found.sent[first : first + every]
                counted = {key: sum(step.get(key, 0) for step in period) for key in {*per_step, *period[-1]}}
                assert counted == {key: every * value for key, value in per_step.items()}
            states = state_bytes(found.units, scheme, levels, "fp32", "fp32", 1, "gloo")
            assert {kind: found.held.get(kind, 0) for kind in states} == states
        return states, per_step


def checked_run(folder: Path, scheme: Scheme, device: str, **changes: Any) -> tuple[RunFolder, Outcome]:
    """A run that records the bytes and the memory of the closed forms. device: auto or fake"""
    found = run(folder, scheme=scheme.model_dump(), device=device, **changes)
    spec, outcome = RunSpec.read_json(found.spec), Outcome.read_json(found.outcome)
    units = unit_numels(spec.model, spec.levels)
    expected = sent_bytes(units, scheme, spec.levels, "fp32", "fp32", 1, is_clipped=device == "auto")
    assert by_row(outcome.sent) == pytest.approx(expected)
    backend = "gloo" if device == "auto" else "fake"
    states = state_bytes(units, scheme, spec.levels, "fp32", "fp32", 1, backend)
    held = {state.kind: state.bytes for state in outcome.states}
    assert {kind: held.get(kind, 0) for kind in states} == states
    return found, outcome
