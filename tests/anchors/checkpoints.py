"""What a checkpoint costs a training: lowband's Checkpointer, and torch.distributed.checkpoint under FSDP2.

The same GPT, sharded over the same ranks, saves its weights and AdamW's moments, and trains on meanwhile.
All methods sync their files. DCP's `save` holds the loop until all is written; `async_save` copies the state,
then writes in a thread; with a stager of its own it copies in a thread, too, and the loop waits before it
changes the weights. `copy` is no checkpoint: the least that a method that copies at once can hold the loop.
"""

import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowband
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from tests.anchors.train_fsdp2 import AppState
from tests.checkout import CONFIG

RANKS = 4
HIDDEN = (240, 480, 960, 1920)  # of 2 layers: 4, 16, 64 and 256 MiB of weights and moments per rank
VOCAB, TOKENS = 256, 8
WARMUP, ALONE = 1, 3  # steps before anything is timed; steps without a checkpoint
CHECKPOINTS = 2
TIME_LIMIT_S = 1200


class Row(NamedTuple):
    """One checkpoint; times are of the slowest rank.

    checkpoint:   1: the first one of its process, which also makes what later ones use again
    state_bytes:  of one rank, mean
    stall_s:      during which the loop did not train
    stall_cpu_s:  processor time of the loop's thread in it: the stall but for waiting, also on a busy machine
    durable_s:    from the call until the checkpoint was whole on the disk
    steps:        trained meanwhile
    step_s:       of a step without a checkpoint, median
    slowed_s:     by which those steps took longer
    extra_bytes:  of one rank's memory at its peak, over that of steps without a checkpoint; the largest
    written_bytes: of all files
    """

    method: str
    ranks: int
    parameters: int
    state_bytes: int
    repeat: int
    checkpoint: int
    stall_s: float
    stall_cpu_s: float
    durable_s: float
    steps: int
    step_s: float
    slowed_s: float
    extra_bytes: int
    written_bytes: int


class Method(ABC):
    """Model and optimizer, and how they are saved."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def save(self, path: Path) -> None:
        """Begin the checkpoint `path`, whose name is `step-` and eight digits."""

    def before_update(self) -> None:  # noqa: B027  most methods have copied already
        """Wait until the weights may change."""

    @abstractmethod
    def await_durable(self) -> None:
        """Return when the last checkpoint is whole."""


class Lowband(Method):
    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        with torch.device("meta"):
            model = GPT(spec)
        scheme = lowband.Scheme(name="zero3", weights="world", grads="world", optim="world")
        self.model = lowband.shard(model, scheme, lowband.Topology({}), Block, torch.float32, init=model.init)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._checkpointer = lowband.Checkpointer(folder)

    def save(self, path: Path) -> None:
        self._checkpointer.save(int(path.name.removeprefix("step-")), self.model, self.optimizer)

    def await_durable(self) -> None:
        self._checkpointer.wait()


class Fsdp2(Method):
    """Saved by DCP's `save`."""

    def __init__(self, spec: ModelSpec, _folder: Path) -> None:
        self.model = GPT(spec)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"app": AppState(self.model, self.optimizer)}
        self.group = dist.new_group(backend="gloo")  # messages of a thread must not mix with the training's

    def save(self, path: Path) -> None:
        dcp.save(self.state, checkpoint_id=path, process_group=self.group)

    def await_durable(self) -> None:
        """`save` has."""


class Async(Fsdp2):
    """Saved by DCP's `async_save`, with its defaults."""

    def save(self, path: Path) -> None:
        self.writing = dcp.async_save(self.state, checkpoint_id=path, process_group=self.group)

    def await_durable(self) -> None:
        self.writing.result()


class Staged(Fsdp2):
    """Saved by DCP's `async_save`, with one stager that copies in a thread and keeps its buffers."""

    staging: Future[None] | None = None

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        super().__init__(spec, folder)
        self._stager = DefaultStager(StagingOptions(False, False, True, False))  # the others need a GPU

    def save(self, path: Path) -> None:
        response = dcp.async_save(
            self.state, checkpoint_id=path, process_group=self.group, async_stager=self._stager
        )
        self.staging, self._writing = response.staging_completion, response.upload_completion

    def before_update(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def await_durable(self) -> None:
        self._writing.result()


class Copy(Fsdp2):
    """Copied, not saved."""

    def save(self, path: Path) -> None:
        self.copies = [value.clone() for value in _local(self.model, self.optimizer)]


METHODS: dict[str, Callable[[ModelSpec, Path], Method]] = {
    "lowband": Lowband,
    "DCP save": Fsdp2,
    "DCP async_save": Async,
    "DCP async_save, staged": Staged,
    "copy": Copy,
}


def bench(repeats: int, folder: Path | None = None) -> Iterator[Row]:
    """By repeat and size, the methods in turns, each in processes of its own. folder: to write into"""
    small = CONFIG.model("gpt-200k").model_dump()
    for repeat in range(1, repeats + 1):
        for hidden in HIDDEN:
            spec = ModelSpec.model_validate(
                small | {"layers": 2, "hidden": hidden, "heads": 4, "vocab": VOCAB, "seq_len": TOKENS}
            )
            for name in METHODS:
                yield from rows(name, spec, repeat, folder)


def rows(name: str, spec: ModelSpec, repeat: int, folder: Path | None = None) -> list[Row]:
    """Of all checkpoints of one start of RANKS ranks."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        by_rank = on_ranks(RANKS, _work, name, spec, Path(own), time_limit_s=TIME_LIMIT_S)
    found = []
    for checkpoint, ranks in enumerate(zip(*by_rank, strict=True), 1):
        values = {key: [each[key] for each in ranks] for key in ranks[0]}
        found.append(
            Row(
                name, RANKS, spec.parameters, sum(values["state"]) // RANKS, repeat, checkpoint,
                max(values["stall"]), max(values["stall_cpu"]), max(values["durable"]), values["steps"][0],
                max(values["step"]), max(values["slowed"]), max(values["extra"]), max(values["written"]),
            )
        )  # fmt: skip
    return found


def _work(name: str, spec: ModelSpec, folder: Path) -> list[dict[str, Any]]:
    """On one rank: its figures of each checkpoint."""
    method = METHODS[name](spec, folder)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCAB, (1, TOKENS), generator=generator)

    def step() -> tuple[float, float]:
        """Seconds of the step, and of those that it waited for the copy."""
        begun = time.perf_counter()
        method.model(tokens, tokens).backward()
        arrived = time.perf_counter()
        method.before_update()
        waited = time.perf_counter() - arrived
        method.optimizer.step()
        method.optimizer.zero_grad()
        return time.perf_counter() - begun, waited

    for _ in range(WARMUP):
        step()
    dist.barrier()
    peak_alone = _peak_reset()
    alone = sorted(step()[0] for _ in range(ALONE))[ALONE // 2]
    peak_alone = _peak_reset()
    state = sum(value.nbytes for value in _local(method.model, method.optimizer))
    found, waiting = [], ThreadPoolExecutor(1)
    for checkpoint in range(1, CHECKPOINTS + 1):
        path = folder / f"step-{checkpoint:08d}"
        dist.barrier()
        begun, used = time.perf_counter(), time.thread_time()
        method.save(path)
        stall, stall_cpu = time.perf_counter() - begun, time.thread_time() - used
        ended, steps, slowed = waiting.submit(_end_of, method), 0, 0.0
        while _any_is_left(not ended.done()):
            took, waited = step()
            steps, slowed, stall = steps + 1, slowed + took - waited - alone, stall + waited
        found.append(
            {
                "state": state,
                "stall": stall,
                "stall_cpu": stall_cpu,
                "durable": ended.result() - begun,
                "steps": steps,
                "step": alone,
                "slowed": slowed,
                "extra": max(0, _peak_reset() - peak_alone),
                "written": sum(file.stat().st_size for file in path.rglob("*")) if path.exists() else 0,
            }
        )
    dist.barrier()
    return found


def _end_of(method: Method) -> float:
    """When the checkpoint was durable."""
    method.await_durable()
    return time.perf_counter()


def _any_is_left(mine: bool) -> bool:
    flag = torch.tensor(int(mine))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _local(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's part of weights and moments."""
    values = [parameter.detach() for parameter in model.parameters()]
    for state in optimizer.state.values():
        values += [value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


def _peak_reset() -> int:
    """The largest resident memory of this process since the last call, bytes (proc(5): VmHWM, clear_refs)."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    [kib] = re.findall(r"VmHWM:\s*(\d+) kB", status)
    return int(kib) * 1024
