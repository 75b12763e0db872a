"""Checkpoints that can be loaded under any scheme, rank count and level sizes.

A checkpoint holds logical tensors. Each rank writes the ranges that it owns into its own file, and reads the
ranges that it owns under the scheme and rank count of the load. Only rank 0's persistent buffers (running
statistics and the like; of replicas that meet seldom those of each one's first rank) and extra states are
saved, and every rank loads them. The random number generators' states, of the CPU and of the device, belong
to ranks: they are restored only if there are as many ranks.

A checkpoint is a folder `step-00000010` (see `lowband.engine.checkpoint.manifest`). It is written as
`.step-00000010.writing` and renamed when complete: an interrupted write never damages an earlier checkpoint.
"""

import atexit
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowband.engine.checkpoint.fit import check_fit, check_replicas
from lowband.engine.checkpoint.folder import begin, finish, newest_first
from lowband.engine.checkpoint.logical_tensors import Logical, Piece, in_flight, random_in
from lowband.engine.checkpoint.manifest import Damaged, Manifest, folder_name
from lowband.engine.checkpoint.names import seen_as, seen_by
from lowband.engine.checkpoint.owner import Owner
from lowband.engine.checkpoint.peer_checkpoint import is_peers
from lowband.engine.checkpoint.rank_file import verify_rank_file, write_rank_file
from lowband.engine.checkpoint.restore import (
    check_none_waits,
    check_values,
    in_memory,
    new_states,
    overwrite,
    ranges,
    read,
)
from lowband.engine.checkpoint.snapshot import Snapshot
from lowband.engine.checkpoint.stages import agreed, names_elsewhere, without
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport.axis import world_timeout
from lowband.engine.transport.lane import outside_of_modes
from lowband.engine.transport.meeting import Meeting, Tick
from lowband.errors import UserError


class Checkpointer:
    """Saves and loads a sharded module and its optimizer. Every rank must make the same calls.

        checkpointer = lowband.Checkpointer("checkpoints")
        extra = checkpointer.load_newest(model, optimizer)  # None if there is no checkpoint yet
        checkpointer.save(step, model, optimizer, {"scheduler": scheduler.state_dict()})  # periodically
        checkpointer.wait()  # at the end

    folder:    of this module alone, which replaces any checkpoint of a step there; on a file system that all
               ranks see; created when the first checkpoint is written
    timeout_s: seconds without a sign of life or progress from a rank before the others give up, however
               long the whole write takes; default: the timeout of the job's default process group

    Every error is raised on all ranks.
    """

    def __init__(self, folder: str | Path, timeout_s: float | None = None) -> None:
        self.folder = Path(folder)
        self._meeting = Meeting(world_timeout().total_seconds() if timeout_s is None else timeout_s)
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._owner = Owner(self.folder, self.wait)
        self.stall_s = 0.0  # time that the last `save` blocked its caller
        self.skipped: tuple[str, ...] = ()  # a line per checkpoint that `load_newest` skipped, newest first

    @outside_of_modes()
    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Copy the state, then write it in the background; `wait` returns when it is complete. Checkpoints of
        later steps, from which this training did not come, are renamed `step-00000010.left`.

        extra: anything that JSON can represent, e.g. the position in the data; rank 0's is saved
        Raises the error of the last save, if it failed, and UserError for a state that cannot be saved; where
        another module saves, unless this one has loaded from there; and while gradients wait that backwards
        under `no_sync` have accumulated: a checkpoint has none.
        """
        start = time.perf_counter()
        self._wait_for_all()
        with in_memory(self._meeting, module, optimizer, writes=False):
            self._meeting.agree(lambda: Snapshot.check(step, module))
            if (replicas := engine_of(module).replicas) is not None:
                self._meeting.agree(
                    replicas.before_first_step
                )  # in which all meet: the weights are the anchor
            snapshot = self._meeting.agree(lambda: Snapshot.of(step, module, optimizer, extra or {}))
            self._meeting.agree(lambda: self._owner.check(module))
            content = agreed(self._meeting, snapshot.content, engine_of(module), self.folder)
        snapshot = replace(snapshot, content=content)
        self._owner.saves(module)
        # Not a daemon: a process that exits without `wait` first completes the checkpoint.
        self._writer = threading.Thread(target=self._write, args=(snapshot,))
        self._writer.start()
        self.stall_s = time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the last save is complete. Raises its error if it failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            _unraised.remove(failure)
            raise failure

    def _wait_for_all(self) -> None:
        """As `wait`, also for what another Checkpointer of this process writes into the folder."""
        self.wait()
        self._owner.wait_for_last()

    def latest(self) -> Path | None:
        """The newest checkpoint in the folder, which may be damaged: see `load_newest`."""
        return next(iter(newest_first(self.folder)), None)

    @outside_of_modes()
    def load(self, path: str | Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Fill module and optimizer in place; returns the `extra` that was saved.

        The optimizer may be new: its states are created from the checkpoint. No code in a checkpoint is ever
        run, whoever made it.
        Raises UserError, naming the file or tensor, if a file is missing or damaged, or if the checkpoint
        does not fit the module or the optimizer; or while gradients wait, as `save`. In that case nothing is
        changed, on any rank.
        """
        self._wait_for_all()
        path = self._meeting.everyone(path and Path(path))[0]  # a shared file system may show others
        if not path:  # of `latest` in an empty folder
            raise UserError("no checkpoint to load", where=self.folder, allowed="load_newest")
        return self._fill_in_memory(path, self._verify(path), module, optimizer)

    @outside_of_modes()
    def load_newest(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the newest undamaged checkpoint; returns its `extra`, or None if there is no checkpoint.

        Rank 0 reports each damaged one in one line on stderr; `skipped` lists them on every rank.
        Raises UserError if all are damaged, naming the newest, if the newest undamaged one does not fit, or
        if the folder is a checkpoint of FSDP2's or DeepSpeed's.
        """
        self._wait_for_all()
        self.skipped = ()
        damage = None
        for path in self._meeting.first("looking for checkpoints", self._found):
            try:
                manifest = self._verify(path)
            except Damaged as error:
                damage = damage or error
                self.skipped += (str(error),)
                if self._meeting.rank == 0:
                    sys.stderr.write(f"lowband: checkpoint skipped: {error}\n")
                continue
            return self._fill_in_memory(path, manifest, module, optimizer)
        if damage is not None:
            what = f"{damage.what}; every checkpoint in this folder is damaged; remove it to start over"
            raise UserError(what, where=damage.where)
        return None

    def _found(self, _tick: Tick) -> list[Path]:
        found = newest_first(self.folder)
        if not found and is_peers(self.folder):  # else a run that should go on would silently start anew
            what = "is a checkpoint of FSDP2's or DeepSpeed's"
            raise UserError(what, where=self.folder, allowed="lowband.load_peer_checkpoint")
        return found

    # ---- writing, in a thread

    def _write(self, snapshot: Snapshot) -> None:
        try:
            meeting, rank, step = self._meeting, self._meeting.rank, snapshot.content.step
            writing = self.folder / f".{folder_name(step)}.writing"
            what = f"writing {writing}"
            meeting.first(what, lambda tick: begin(writing, tick))
            written = meeting.together(
                what, lambda tick: write_rank_file(writing, rank, snapshot.pieces, tick)
            )
            everyones = meeting.collect(written)
            meeting.first(
                what, lambda tick: finish(writing, snapshot.content, snapshot.extra, everyones, tick)
            )
        except BaseException as error:  # raised by the next `wait`
            self._failure = error
            _unraised.append(error)
        finally:
            self._owner.is_writing = False

    # ---- loading

    def _verify(self, path: Path) -> Manifest:
        """The manifest, after every file has been verified by one of the ranks. Raises Damaged."""
        what = f"verifying {path}"
        manifest = self._meeting.first(what, lambda _: Manifest.read(path))

        def verify(tick: Tick) -> None:
            for rank in range(self._meeting.rank, len(manifest.files), self._meeting.ranks):
                verify_rank_file(path, rank, manifest.files[rank], tick)

        self._meeting.together(what, verify)
        return manifest

    def _fill_in_memory(
        self, path: Path, whole: Manifest, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        with in_memory(self._meeting, module, optimizer, writes=True):
            extra = self._fill(path, whole, module, optimizer)
        self._owner.has_loaded(path, module)
        return extra

    def _fill(
        self, path: Path, whole: Manifest, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        device = engine_of(module).device
        elsewhere = names_elsewhere(self._meeting, module, engine_of(module))

        def check() -> tuple[Manifest, Logical, dict[str, Piece]]:
            check_none_waits(module, "Checkpointer.load")
            here = Logical.of(module, optimizer)
            check_replicas(whole, path, here)
            manifest = without(seen_by(whole, here.replica), elsewhere)
            random = random_in(manifest, module, self._meeting.ranks)
            check_fit(manifest, path, here, random)
            if (replicas := engine_of(module).replicas) is not None:
                replicas.check_alone("a checkpoint is loaded after it was made", "before lowband.Quorum")
                in_flight(manifest, replicas)
            return manifest, here, random

        def read_all(tick: Tick) -> dict[str, torch.Tensor]:
            values = {
                name: read(path, whole, seen_as(name, whole, here.replica), wanted, tick)
                for name, wanted in ranges(manifest, here, random).items()
            }
            check_values(values, random, device, path)
            return values

        manifest, here, random = self._meeting.agree(check)
        values = self._meeting.together(f"reading {path}", read_all)
        made = self._meeting.agree(lambda: new_states(manifest, here))
        with torch.no_grad():
            overwrite(manifest, values, made, here, random, module, optimizer, device)
        return manifest.extra


_unraised: list[BaseException] = []  # errors of background writes that no `wait` has raised yet


@atexit.register
def _end_with_unraised_failure() -> None:
    """Fail a process that exits without `wait` if its last checkpoint was not written."""
    if _unraised:
        sys.stdout.flush()
        for failure in _unraised:
            cause = next(iter(str(failure).splitlines()), type(failure).__name__)
            sys.stderr.write(f"lowband: the last checkpoint was not written: {cause}\n")
        sys.stderr.flush()
        os._exit(2 if isinstance(_unraised[0], UserError) else 1)
