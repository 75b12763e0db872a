"""What threads behind a step have in the place of its optimizer, and what becomes of their errors."""

import atexit
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lowband.errors import UserError


class CopiedOptimizer:
    """An optimizer as it is now, which others may change from now on, for plain tensors in place of shards.

    Options that are tensors, as a learning rate may be, are copied, or a scheduler would change them.
    state: by such a tensor
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Optimizer], Any],
        of: Mapping[nn.Parameter, torch.Tensor],
        called: str,
    ) -> None:
        """step: the class's; of: by shard what is updated; called: who updates"""
        self._step, self._called = step, called
        self._groups = [group for group in optimizer.param_groups if any(p in of for p in group["params"])]
        self._before = [{**{key: _copied(option) for key, option in group.items()},
                         "params": [of[p] for p in group["params"] if p in of]}
                        for group in self._groups]  # fmt: skip
        self._after: list[Mapping[str, Any]] = list(self._before)
        self.state: Mapping[torch.Tensor, dict[str, Any]] = defaultdict(dict, {
            of[shard]: {key: plain(value) for key, value in held.items()}
            for shard, held in optimizer.state.items() if shard in of
        })  # fmt: skip
        # The optimizer itself, but for what it updates.
        self._copy = object.__new__(type(optimizer))
        self._copy.__dict__ |= {**optimizer.__dict__, "state": self.state}

    def step(self, some: Sequence[torch.Tensor]) -> None:
        """Step these with the options of before: see units.turns, [Note: options]."""
        wanted = {id(values) for values in some}
        parts = [{**group, "params": [p for p in group["params"] if id(p) in wanted]}
                 for group in self._before]  # fmt: skip
        self._copy.param_groups = [part for part in parts if part["params"]]
        self._step(self._copy)
        check_states(self._copy, self._called)
        self._after = [
            part if part["params"] else last for part, last in zip(parts, self._after, strict=True)
        ]

    def give_back_options(self) -> bool:
        """Let the optimizer have what became of its options. Returns whether a step changes some."""
        has_changed = False
        for group, before, after in zip(self._groups, self._before, self._after, strict=True):
            changed = {k: v for k, v in after.items() if k not in before or v is not before[k]}
            changed.pop("params", None)
            group.update(changed)
            has_changed |= bool(changed)
        return has_changed


class StateWaits:
    """`state` of a class of optimizers: who reads or sets it waits for the update behind the last step."""

    def __get__(self, optimizer: Optimizer | None, _kind: Any = None) -> Any:
        if optimizer is None:
            return self
        end_update(optimizer)
        return optimizer.__dict__["state"]

    def __set__(self, optimizer: Optimizer, state: Any) -> None:
        end_update(optimizer)
        optimizer.__dict__["state"] = state


_UPDATE = "_lowband_update"  # attribute of an optimizer: how to finish the update behind its last step


def be_updated(optimizer: Optimizer, finish: Callable[[], None]) -> None:
    """An update behind its step has begun."""
    optimizer.__dict__[_UPDATE] = finish


def is_updated(optimizer: Optimizer) -> None:
    """It has ended."""
    optimizer.__dict__.pop(_UPDATE, None)


def end_update(optimizer: Optimizer) -> None:
    """Wait for the update behind the last step. Raises its error."""
    if (finish := optimizer.__dict__.get(_UPDATE)) is not None:
        finish()


def check_states(optimizer: Optimizer, called: str) -> None:
    """Raises UserError if one would change with each part of a step."""
    if shared := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise UserError(
            f"its state {shared[0]!r} is of no parameter, and changes with each unit",
            where=f"{type(optimizer).__name__} of {called}",
            allowed="states of parameters",
        )


def plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


def _copied(option: Any) -> Any:
    return option.clone() if isinstance(option, torch.Tensor) else option


# ---- threads

_unraised: list[BaseException] = []  # errors of updates of which nobody has been told yet


def begin(thread: Executor, work: Callable[[], None]) -> Future[None]:
    """Have a thread work as many threads wide as the caller; a new one starts with the library's default."""
    return thread.submit(_run, work, torch.get_num_threads())


def _run(work: Callable[[], None], threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        work()
    except BaseException as error:
        note(error)
        raise


def note(error: BaseException) -> None:
    """Somebody has to be told of it: the next caller, or who looks at how the process ended."""
    _unraised.append(error)


def is_new(error: BaseException) -> bool:
    """Whether nobody has been told of it; now somebody is."""
    if error not in _unraised:
        return False
    _unraised.remove(error)
    return True


class _RaisedHere:
    """An error in this context reaches the caller, so nobody else is to report it at the end of the process.

    A class, because it is entered for each unit, and contextlib's takes longer.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            is_new(error)


raised_here = _RaisedHere()


@atexit.register  # behind the end of threads
def _end_with_unraised_failure() -> None:
    """Fail a process that ends while its last update has failed."""
    if _unraised:
        sys.stdout.flush()
        sys.stderr.write(f"lowband: the last step's update failed: {_unraised[0]}\n")
        sys.stderr.flush()
        os._exit(1)
