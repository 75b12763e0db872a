"""`lowband train` in processes of their own, forked from this one, which has imported torch."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lowband.__main__ import main
from lowband.cost.contents import step_bytes
from lowband.cost.held import held_bytes
from lowband.run.train import train  # noqa: F401 (imports torch once, before the processes are forked)
from lowband.spec.records import Outcome, by_row
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.checkout import CONFIG, ROOT

SMOKE = {spec.run_id: spec for spec in CONFIG.runs(["smoke"])}
TEXT = str(ROOT / "README.md")  # reading the default text, all of the standard library, takes half a second
MODEL = SMOKE["smoke-gpt-200k-zero3-n0001-b8-s64-r1"].model.model_dump() | {"layers": 1, "hidden": 32}
PROMPT_S = 300  # far beyond what a busy machine needs
_stores: list[
    dist.TCPStore
] = []  # of ranks that were `launched`; they stay, as ranks may need them to their end


def spec_file(folder: Path, run_id: str = "smoke-gpt-200k-hier3-exact-n0004-b2-s64-r1", **changes) -> Path:
    spec = RunSpec.parse({**SMOKE[run_id].model_dump(), "text": TEXT, **changes}, "test")
    path = folder / "spec.json"
    path.write_text(spec.to_json())
    return path


def begun(path: Path, prepare: Callable[[], object] = lambda: None, **variables: str) -> ForkProcess:
    """`lowband train` in a process and a session of its own.

    prepare:   called before
    variables: of its environment
    """

    def command() -> None:
        os.setsid()
        os.environ.update(variables)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell ignores
        os.dup2(os.open(stderr_of(path, **variables), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr = os.fdopen(2, "w")
        prepare()
        sys.exit(main(["train", str(path)]))

    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    return process


def killed(process: ForkProcess) -> None:
    """With its ranks; nothing if all have ended."""
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(PROMPT_S)


def stderr_of(path: Path, **variables: str) -> Path:
    return path.with_suffix(f".stderr{variables.get('RANK', '')}")


def ended(process: ForkProcess, path: Path, **variables: str) -> tuple[int | None, str]:
    """Exit code and stderr."""
    process.join(2 * PROMPT_S)
    if process.exitcode is None:
        killed(process)
    return process.exitcode, stderr_of(path, **variables).read_text()


def run(folder: Path, **changes) -> RunFolder:
    """A run that ends well, of `spec_file`'s specification."""
    folder.mkdir(exist_ok=True)
    path = spec_file(folder, **changes)
    code, error = ended(begun(path), path)
    assert code == 0, error
    return RunFolder(folder)


def runs(
    folder: Path, axes: dict[str, dict[str, Any]], **changes
) -> tuple[dict[str, RunFolder], dict[str, list[float]]]:
    """By name of axes, a run of three steps with them, and its losses."""
    changes = {"steps": 3, "fingerprint": False, "scheme": CONFIG.scheme("zero3"), **changes}
    found = {name: run(folder / name, **{**changes, **each}) for name, each in axes.items()}
    return found, {name: [step.loss for step in each.read_steps()] for name, each in found.items()}


def goes_on_with_the_same_bits(folder: Path, **changes) -> None:
    """A run of two steps that is interrupted in the second goes on from the first to the same end."""
    changes = {"steps": 2, "warmup_steps": 1, "checkpoint_every": 1, **changes}
    first = run(folder, **changes)
    steps = [(step.loss, step.grad_norm, step.sent) for step in first.read_steps()]
    weights = first.read_outcome().weights_sha256
    [newest] = first.checkpoints.glob("*/step-00000002")
    shutil.rmtree(newest)
    first.outcome.unlink()
    again = run(folder, **changes)
    assert again.read_outcome().resumed_from == 1
    assert [(step.loss, step.grad_norm, step.sent) for step in again.read_steps()] == steps
    assert again.read_outcome().weights_sha256 == weights


def sends_the_closed_form(folder: RunFolder) -> None:
    """In every step but the first, which has no new weights to fetch."""
    spec = RunSpec.read_json(folder.spec)
    for step in [*folder.read_steps()][1:]:
        assert by_row(step.sent) == step_bytes(spec)


def counts_as_closed_forms(folder: RunFolder) -> tuple[RunSpec, Outcome]:
    """Spec and outcome of a run that recorded the bytes and the memory of the closed forms, but for tokens on
    their way to experts, whose number is drawn."""
    spec, outcome = RunSpec.read_json(folder.spec), Outcome.read_json(folder.outcome)
    assert outcome.status == "ok", outcome.cause
    sent, expected = (
        {row: count for row, count in each.items() if count and not row[1].startswith("route")}
        for each in (by_row(outcome.sent), step_bytes(spec))
    )
    assert sent == expected
    states, closed = {one.kind: one.bytes for one in outcome.states}, held_bytes(spec, "gloo")
    assert {kind: states.get(kind, 0) for kind in closed} == closed
    return spec, outcome


def launched(path: Path, prepare: Callable[[], object] = lambda: None) -> list[ForkProcess]:
    """Two ranks as torchrun starts them, which hosts their store at a free port; nobody watches them."""
    _stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_stores[-1].port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
    }
    return [begun(path, prepare, RANK=str(rank), LOCAL_RANK=str(rank), **address) for rank in range(2)]


def both_ended(ranks: list[ForkProcess], path: Path) -> tuple[list[int | None], list[str]]:
    """Exit codes and stderr of ranks that were `launched`."""
    ends = [ended(process, path, RANK=str(rank)) for rank, process in enumerate(ranks)]
    return [code for code, _ in ends], [error for _, error in ends]
