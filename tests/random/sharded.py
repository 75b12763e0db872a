"""A case on ranks: `lowband.shard` and the calls around it, as a user makes them."""

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache
from random import Random

import torch
import torch.distributed as dist

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport import axis, gloo
from lowband.errors import UserError
from lowband.spec.axes import Axes
from tests.random.cases import (
    Accumulate,
    Backward,
    BrokenBackward,
    BrokenForward,
    Case,
    Clip,
    Forward,
    LostForward,
    State,
    Step,
    Zero,
)
from tests.random.model import (
    DTYPE,
    Blown,
    Fuse,
    is_matrix,
    is_unit,
    nets_of,
    optimizers_of,
    run_nets,
)
from tests.random.observed import Observed

ALONE = Axes()
MODES = {"train": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@cache
def topology_of(inner: tuple[tuple[str, int], ...], axes: Axes, _index: int = 0) -> lowband.Topology:
    """Process groups are made once for all cases on these levels.

    inner: sizes of levels as the ranks along the data axis see them
    """
    return lowband.Topology({name: size * axes.tensor for name, size in inner}, axes)


def run_sharded(case: Case, axes: Axes = ALONE) -> Observed:
    """This rank's part. axes: beside data; along them ranks do the same, each slice of the mesh for itself"""
    _delay_exchanges(case)
    return _Run(case, axes).run()


def _delay_exchanges(case: Case) -> None:
    """Make some of this rank's exchanges late, if the case asks for it."""
    random = Random(case.seed + dist.get_rank())
    is_slow = case.slow == "lane" and dist.get_rank() % 2 == 1

    def late(*arguments: object) -> None:
        if random.random() < 0.3:
            time.sleep(0.004 * random.random())
        gloo.exchange(*arguments)

    axis.exchange = late if is_slow else gloo.exchange


class _Run:
    def __init__(self, case: Case, axes: Axes) -> None:
        along = topology_of(case.inner, axes).along("data")
        self.case, self.rank, self.fuse = case, along.ranks.index(along.rank), Fuse()
        if case.slow == "computation" and dist.get_rank() % 2 == 1:
            self.fuse.slow_down(Random(case.seed + self.rank))
        compute, sums = DTYPE[case.compute_dtype], DTYPE[case.reduce_dtype]
        self.nets = [
            lowband.shard(
                chain,
                chain.net.scheme,
                topology_of(case.inner, axes, index if case.own_topologies else 0),
                is_unit,
                compute,
                sums,
                case.overlap,
                collectives=case.collectives,
            )
            for index, chain in enumerate(nets_of(case, self.fuse))
        ]
        self.matrices, whole = None, []
        parameters = [p for net in self.nets for p in net.parameters()]
        if case.has_matrices:
            self.matrices = lowband.Matrices(self.nets[0], is_matrix, over=case.over)
            whole = self.matrices.parameters()
            parameters = [*self.matrices.others(), *(p for net in self.nets[1:] for p in net.parameters())]
        self.optimizers = optimizers_of(case, parameters, whole)
        self.waiting: dict[int, torch.Tensor] = {}  # losses of micro-batches in flight
        self.seen = Observed(
            units=[[unit.layout.numel for unit in engine_of(net).units] for net in self.nets]
        )

    def run(self) -> Observed:
        for action in self.case.program:
            self._act(action)
        self._take_sent()  # a lost forward may leave gathers on the way: only now all of them are counted
        return self.seen

    def _loss(self, number: int, skipped: tuple[int, ...] = ()) -> torch.Tensor:
        return run_nets(self.case, self.nets, number, self.rank, skipped)

    def _act(self, action: object) -> None:
        match action:
            case Forward(number, skipped):
                self.waiting[number] = self._loss(number, skipped)
                self.seen.losses.append(self.waiting[number].detach().clone())
            case Backward():
                self._backward(action)
            case Accumulate(numbers, sync):
                with nullcontext() if sync else lowband.no_sync(self.nets[0]):
                    self.seen.losses += lowband.accumulate(self.nets[0], numbers, self._loss)
                self._see_held()
            case LostForward(number, mode):
                with MODES[mode]():
                    self.seen.losses.append(self._loss(number).detach().clone())
            case BrokenForward():
                self._broken_forward(action)
            case BrokenBackward():
                self._broken_backward(action)
            case State():
                states = [lowband.full_state_dict(net) for net in self.nets]
                self.seen.states += states if self.rank == 0 else []
            case Clip(max_norm):
                for net in self.nets:
                    self._unless_refused(
                        lambda net=net: self.seen.norms.append(float(lowband.clip_grad_norm_(net, max_norm)))
                    )
            case Step(numbers):
                self._step(numbers)
            case Zero(how):
                self._zero(how)

    def _broken_forward(self, action: BrokenForward) -> None:
        self.fuse.arm("forward", action.net, action.place)
        try:
            with MODES[action.mode]():
                self._loss(action.number)
        except Blown:
            return
        raise AssertionError(f"{action} did not raise")

    def _broken_backward(self, action: BrokenBackward) -> None:
        self.fuse.arm(action.where, action.net, action.place)
        broken = False
        try:
            self.waiting.pop(action.number).backward()
        except Blown:
            broken = True
        self.fuse.disarm()
        self.seen.broken += [broken] if self.case.is_seen(action) else []

    def _backward(self, action: Backward) -> None:
        with ExitStack() as stack:
            for net in self.nets if not action.sync else ():
                stack.enter_context(lowband.no_sync(net))
            sum(self.waiting[number] for number in action.numbers).backward(retain_graph=action.keep)
        for number in () if action.keep else action.numbers:
            del self.waiting[number]
        self._see_held()

    def _see_held(self) -> None:
        """What is still there after a backward, where no micro-batch waits for one."""
        for net in self.nets if not self.waiting else ():
            now = engine_of(net).meter.now
            held = {kind: now[kind] for kind in ("gathered", "sums") if now[kind]}
            self.seen.held += [held] if held else []

    def _step(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            optimizer = self.optimizers[number]
            if self.matrices is not None and number == 0:
                self._unless_refused(self._step_matrices)
            elif optimizer is not None:
                self._unless_refused(optimizer.step)
        if self.case.is_plain:
            self._take_sent()

    def _step_matrices(self) -> None:
        with self.matrices:
            self.optimizers[0].step()

    def _unless_refused(self, call: Callable[[], object]) -> None:
        try:
            call()
            self.seen.refused.append(False)
        except UserError as error:
            if "has gradients of backwards under no_sync" not in str(error):
                raise
            self.seen.refused.append(True)

    def _zero(self, how: str) -> None:
        for cleared in self.nets if how == "modules" else self.optimizers:
            if cleared is not None:
                cleared.zero_grad(set_to_none=how != "zeros")

    def _take_sent(self) -> None:
        taken = [engine_of(net).ledger.take() for net in self.nets]
        self.seen.sent.append([{(s.level, s.collective, s.wire): s.bytes for s in sent} for sent in taken])
