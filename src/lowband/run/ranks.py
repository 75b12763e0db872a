"""The ranks that this process is or starts: one given by torchrun or srun, its node's, or all."""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from lowband.errors import UserError
from lowband.spec.slurm_task import is_slurm_task

DIGITS = 10  # of a launcher's number, fewer than
_FAILED = "lowband.failed."  # a key of the group's store, for each rank
ALIKE_S = 3.0  # a launcher ends the other processes within this time after one has failed


@dataclass(frozen=True)
class Rank:
    """One rank of a job. `init_method` is torch.distributed's."""

    rank: int
    world: int
    local_rank: int
    init_method: str


# Variable names of rank, world size and local rank, by launcher.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


def from_environment(ranks: int) -> Rank | list[Rank] | None:
    """This process's rank, or the list of ranks that it must start; None without a launcher.

    srun with one task per node makes each task the launcher of its node's ranks, so only one process per node
    imports torch.

    ranks: number of ranks of the run
    Raises UserError if the launcher started another number, or did not set its variables, MASTER_ADDR and
    MASTER_PORT among them.
    """
    launcher = _launcher()
    if launcher is None:
        return None
    names = _LAUNCHERS[launcher]
    rank, world, local_rank = map(_count, names)
    is_node = launcher == "srun" and os.environ.get("SLURM_NNODES") == str(world) and ranks % world == 0
    if world != ranks and not is_node:
        raise UserError(
            f"{launcher} started {world} ranks", where=names[1], allowed=f"{ranks}, as in the spec"
        )
    needed = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "address and port of rank 0")
    for name, allowed in (needed | ({"SLURM_JOB_ID": "the job's number"} if is_node else {})).items():
        if name not in os.environ:
            raise UserError(f"{name} is not set", where=launcher, allowed=allowed)
    if rank >= world:
        raise UserError(f"{rank} of {world} ranks", where=names[0], allowed=f"0 to {world - 1}")
    if world == ranks:
        return Rank(rank, world, local_rank, "env://")
    per_node = ranks // world
    return [Rank(rank * per_node + local, ranks, local, "env://") for local in range(per_node)]


def ranks_here(found: Rank | list[Rank] | None, ranks: int) -> int:
    """How many ranks of a job this node has; of a rank alone, as far as its launcher says.

    found: what `from_environment` gave
    """
    if not isinstance(found, Rank):
        return ranks if found is None else len(found)
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun's
        return _count("LOCAL_WORLD_SIZE")
    of_nodes = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 8(x3),4
    return max(map(int, of_nodes), default=1)


def _count(name: str) -> int:
    """The launcher's variable as a number. Raises UserError, naming it, if it is missing or none."""
    text = os.environ.get(name)
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < DIGITS):
        raise UserError("is not set" if text is None else f"is '{text}'", where=name, allowed="a number")
    return int(text)


def _launcher() -> str | None:
    if _LAUNCHERS["torchrun"][0] in os.environ:
        return "torchrun"
    return "srun" if is_slurm_task() else None


def is_launched() -> bool:
    """Whether torchrun or srun started this process."""
    return _launcher() is not None


_OF_STEP = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"


def job_id() -> str:
    """An id that is equal in all processes that a launcher started together, and in no others."""
    names = (
        *_OF_STEP, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    )  # fmt: skip
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def step_name() -> str:
    """Of srun's step that started this process: no other step has it, nor this one of the job queued anew."""
    return ".".join(os.environ[name] for name in _OF_STEP if name in os.environ)


def is_first_process() -> bool:
    """Whether this is the launcher's first process, or there is no launcher."""
    launcher = _launcher()
    return launcher is None or os.environ[_LAUNCHERS[launcher][0]] == "0"


def wait_for_first_process() -> None:
    """Return at once in the first process, late in the others: after it failed, the launcher ends them.

    So bad input that every process finds is printed once, and that of one process is still printed.
    """
    if not is_first_process():
        time.sleep(ALIKE_S)


@contextmanager
def one_line_errors(program: str = "lowband") -> Iterator[None]:
    """Ends the process with one line on stderr and exit code 2 where the user is at fault.

        @lowband.one_line_errors()
        def main() -> None: ...

    That is for UserError, and for a file or folder that cannot be opened. Where torchrun or srun started
    several processes, an error that all of them find is printed once. Other exceptions pass.

    program: the first word of the line
    """
    try:
        yield
    except (UserError, OSError) as error:
        line = line_of(error)
        if line is None:
            raise
    else:
        return
    print_once(f"{program}: {line}")
    raise SystemExit(2)


def line_of(error: UserError | OSError) -> str | None:
    """The error in one line; None for an error of the system that no file is the reason of."""
    if isinstance(error, UserError):
        return str(error)
    file = error.filename2 or error.filename  # of a file that takes another's place, that of the other
    return None if file is None else str(UserError(str(error.strerror), where=file))


def print_once(line: str) -> None:
    """Print a line on stderr: in the first process at once, in others unless the launcher ends them.

    The first returns when all have a line to print, at most after ALIKE_S: its end would be another error
    to a process that still connects to it.
    """
    torch_distributed = sys.modules.get("torch.distributed")
    has_group = torch_distributed is not None and torch_distributed.is_initialized()
    if has_group:
        store = torch_distributed.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # the process that keeps it has ended
            store.set(f"{_FAILED}{torch_distributed.get_rank()}", "")
    wait_for_first_process()
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    if has_group and is_first_process():
        others = [f"{_FAILED}{rank}" for rank in range(torch_distributed.get_world_size())]
        with suppress(RuntimeError):  # one has another error, or none
            store.wait(others, timedelta(seconds=ALIKE_S))
