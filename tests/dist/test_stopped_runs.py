"""A run that is killed anywhere is whole once it is started again.

Killed at every step boundary, while a checkpoint is written, in the final gathering, and in a restart.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from started import MODEL, begun, ended, spec_file
from test_run_faults import assert_same

from lowband.engine.checkpoint import checkpointer as checkpoint
from lowband.engine.checkpoint import folder as checkpoint_folder
from lowband.engine.collectives.collectives import Collectives
from lowband.engine.passes import whole as whole_state
from lowband.run import training_loop as loop
from lowband.run.train import train
from lowband.spec import run_folder
from lowband.spec.records import Outcome, Sent
from lowband.spec.run_folder import RunFolder
from tests.waiting import wait_for

STEPS, EVERY = 6, 2


@dataclass(frozen=True)
class Kill:
    """All processes of a run are killed at the `call`th call of a function in any of them.

    is_after: once the function has returned; else before its first line
    counts:   whether a call with these arguments is counted
    once:     given these arguments: what is waited for before they are killed, such as a checkpoint that is
              written behind training
    """

    owner: Any
    name: str
    call: int = 1
    is_after: bool = False
    counts: Callable[..., bool] = lambda *_, **__: True
    once: Callable[..., bool] = lambda *_, **__: True

    def __str__(self) -> str:
        return f"{'after' if self.is_after else 'before'}-{self.name}-{self.call}"

    def arm(self) -> None:
        """In the process that will fork the ranks: each of them counts its own calls."""
        function, calls = getattr(self.owner, self.name), 0

        def deadly(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += self.counts(*arguments, **named)
            result = None
            if calls != self.call or self.is_after:
                result = function(*arguments, **named)
            if calls == self.call:
                wait_for(lambda: self.once(*arguments, **named))
                os.killpg(0, signal.SIGKILL)
            return result

        setattr(self.owner, self.name, deadly)


def both(owner: Any, name: str, calls: int = 1) -> list[Kill]:
    """Before and after each of the first `calls` calls."""
    return [Kill(owner, name, call, is_after) for call in range(1, calls + 1) for is_after in (False, True)]


SAVES = STEPS // EVERY
STEP_BOUNDARIES = both(RunFolder, "append_step", STEPS)
IN_CHECKPOINTS = [
    *both(checkpoint, "begin", SAVES),
    *both(checkpoint, "write_rank_file", SAVES),
    *both(checkpoint_folder, "write_manifest", SAVES),  # before the rename
    *(Kill(checkpoint, "finish", call, is_after=True) for call in range(1, SAVES + 1)),
    # The last one is whole, the first one not yet removed: a call a save came before, for other folders.
    Kill(checkpoint_folder, "_remove", SAVES + 1),
    Kill(Path, "unlink", 2, counts=lambda path, **_: path.parent.name == "step-00000002"),
]
AT_THE_END = [
    Kill(Collectives, "gather", 2, counts=lambda *_, **named: named.get("name") == "state_dict"),
    *both(whole_state, "sha256"),
    *both(loop, "outcome_of"),
    Kill(Path, "hardlink_to", counts=lambda path, _: path.name == "outcome.json"),
    Kill(run_folder, "create_whole", is_after=True),
]
RESTARTS = [
    Kill(RunFolder, "start", is_after=True),
    Kill(checkpoint, "overwrite"),
    Kill(RunFolder, "_remove_checkpoints", 2),  # the second of a start: records are cut, checkpoints not yet
    *both(RunFolder, "go_back_to"),
]


# What is like another: a step after one that no checkpoint follows, a save that is not the last.
ALIKE = {
    *AT_THE_END[1::2],
    *(Kill(RunFolder, "append_step", call, is_after) for call in (3, 4, 5) for is_after in (False, True)),
    *(kill for kill in IN_CHECKPOINTS if kill.call < SAVES and kill.owner is not Path),
}


def short_run(folder: Path) -> Path:
    return spec_file(folder, ranks=2, steps=STEPS, checkpoint_every=EVERY, model=MODEL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """An undisturbed run, for comparison."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = train(short_run(folder))
    assert (outcome.status, outcome.resumed_from) == ("ok", 0)
    assert outcome.checkpoint_stall_s > 0
    return RunFolder(folder)


@pytest.mark.parametrize(
    "kills",
    [
        *(
            pytest.param([kill], marks=[pytest.mark.wide] * (kill in ALIKE))
            for kill in chain(STEP_BOUNDARIES, IN_CHECKPOINTS, AT_THE_END)
        ),
        *([Kill(RunFolder, "append_step", 5, is_after=True), kill] for kill in RESTARTS),
        [Kill(RunFolder, "append_step", call, is_after=True) for call in (3, 3, 2)],  # steps 3, 5 and 6
    ],
    ids=lambda kills: "-then-".join(map(str, kills)),
)
def test_a_killed_run_comes_to_its_end(tmp_path: Path, whole: RunFolder, kills: list[Kill]) -> None:
    folder, path = RunFolder(tmp_path), short_run(tmp_path)
    for kill in kills:
        assert ended(begun(path, kill.arm), path) == (-signal.SIGKILL, ""), "it was not killed"
    path.with_suffix(".stderr").unlink()
    assert train(path).status == "ok"
    assert_same(folder, whole)
    assert outside(folder) == outside(whole) != ()
    assert [step.step for step in folder.whole_steps()] == list(range(1, STEPS + 1))
    assert files(folder) == files(whole)


def outside(folder: RunFolder) -> tuple[Sent, ...]:
    return Outcome.read_json(folder.outcome).outside


def files(folder: RunFolder) -> list[Path]:
    """But for the oldest checkpoint's, which the next save would remove."""
    found = (path.relative_to(folder.path) for path in folder.path.rglob("*"))
    return sorted(path for path in found if "step-00000002" not in path.parts)


def test_ranks_meet_after_each_unit_that_they_hash(tmp_path: Path) -> None:
    """In turns, a parameter each. So all of it may take longer than ranks wait for each other."""
    path = spec_file(tmp_path, ranks=2, steps=3, model=MODEL)

    def prepare() -> None:
        sha256, gather = whole_state.sha256, Collectives.gather

        def say(what: str) -> None:
            with (tmp_path / f"said-{dist.get_rank()}").open("a") as file:
                file.write(f"{what}\n")

        def noted_sha256(tensor: torch.Tensor) -> str:
            say("hashes")
            return sha256(tensor)

        def noted_gather(*arguments: Any, **named: Any) -> Any:
            if named.get("name") == "state_dict":
                say("meets")
            return gather(*arguments, **named)

        whole_state.sha256, Collectives.gather = noted_sha256, noted_gather

    assert ended(begun(path, prepare), path) == (0, "")
    assert Outcome.read_json(tmp_path / "outcome.json").status == "ok"
    for rank in range(2):
        said = (tmp_path / f"said-{rank}").read_text().splitlines()
        assert "meets meets" not in " ".join(said)
        assert said[0] == "meets"
        assert said.count("meets") > 1
