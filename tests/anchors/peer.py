"""What the training scripts of all peers need: arguments, batches, and records that the campaign reads.

The scripts differ in the calls of the peer alone. Model, text, batches and optimizer are those of
`lowband train`.
"""

import argparse
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lowband.model.data import batch, read_corpus
from lowband.spec.run import RunSpec
from lowband.trainers.trainer import fingerprint_of, sha256


@dataclass(frozen=True)
class Arguments:
    """of a peer's script. folder: of checkpoints and records"""

    spec: RunSpec
    folder: Path

    @classmethod
    def parse(cls) -> "Arguments":
        parser = argparse.ArgumentParser()
        parser.add_argument("spec", type=Path)
        parser.add_argument("folder", type=Path)
        options, _ = parser.parse_known_args()  # DeepSpeed's launcher adds --local_rank
        return cls(RunSpec.read_json(options.spec), options.folder)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.spec.peer_timeout_s)


class Batches:
    """The inputs and targets of one rank, each [1, T] int64."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._tokens: npt.NDArray[np.unsignedinteger] = read_corpus(spec.text).train

    def of_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._spec
        inputs, targets = batch(self._tokens, spec.seed, step, self._rank, 1, spec.global_batch, spec.seq_len)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class Records:
    """Of rank 0: `start STEP` for each attempt, `STEP LOSS` for each step, in the end `final SHA256`.

    Of every rank, the id of its process, in a file of its own.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / "records" if rank == 0 else None
        (folder / f"pid{rank}").write_text(str(os.getpid()))

    def start(self, step: int) -> None:
        self._append(f"start {step}")

    def step(self, step: int, loss: torch.Tensor) -> None:
        self._append(f"{step} {loss.item()!r}")

    def final(self, state: dict[str, torch.Tensor]) -> None:
        """state: the whole fp32 weights by name; on other ranks than 0 anything"""
        if self._path is not None:
            sums = {name: sha256(value.detach().cpu().contiguous()) for name, value in state.items()}
            self._append(f"final {fingerprint_of(sums)}")

    def _append(self, line: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="ascii") as file:
                file.write(line + "\n")
