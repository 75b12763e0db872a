"""The command line: vectors of words for every verb, run in this process on a folder of its own.

Work stops where a verb would start a process, and nothing is written outside of the folder: an audit hook of
Python refuses both, so that no vector can train for minutes or change the repository.
"""

import errno
import importlib
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from lowband.__main__ import command_line
from lowband.box.slurm import missing
from lowband.errors import UserError
from tests.checkout import REFERENCE, ROOT
from tests.fuzz.of_config import MODELS, SCHEMES, SUITE
from tests.fuzz.of_peers import DEEPSPEED, LLAMA
from tests.fuzz.of_tables import CLAIM, gradable, graded
from tests.fuzz.target import Hang, Refused, Target, put, run, sound, table

JOB = "--cluster frontier --model gpt-200k"
# A sound vector or several of each verb, in the target's folder.
VECTORS: dict[str, tuple[str, ...]] = {
    "spec": (
        "--suite mine --out out --root .", "--scheme zeropp --to deepspeed --ranks 16 --cluster frontier",
        "--from ds.json --ranks 16 --cluster frontier", "--scheme zero3 --to fsdp2 --ranks 8",
    ),
    "train": ("results/local/runs/one/spec.json --links plain",),
    "preflight": ("results/local/runs/one/spec.json",),
    "curves": ("results/local --to tensorboard --out curves",),
    "collect": ("results/local/runs/one --out tables2",),
    "table": ("scaling --tables tables --out out", "memory --tables tables"),
    "figure": ("scaling --tables tables --out out",),
    "claims": ("--claims config/claims.yaml --tables tables --out out --only sent-bytes ratio",),
    "summary": ("--tables tables --claims tables/claims.csv --figures figures",),
    "appendix": ("--claims tables/claims.csv --config config --out out",),
    "page": ("--tables tables --figures figures --out out/page.html --root .",),
    "documents": ("--root .",),
    "provenance": ("--results local --out out/crate.zip --root .",),
    "verify": ("--root .", "--write --root ."),
    "status": ("--results local --suite mine --root .",),
    "box": ("status", *(() if missing() else ("jobs results/local/runs --out jobs.csv",)),
        "run --cluster frontier-box -- true", "up", "down",
        "lengths --lengths lengths.txt --room 64 --out out"),
    "bench-comm": ("--cluster frontier-box --ranks 16 --seconds 0.1 --repeats 2 --out out",),
    "bench-routes": ("--cluster frontier-box --ranks 16 --seconds 0.1 --repeats 2 --out out",),
    "import-log": (
        "train.log --format torchtitan --model gpt-200k --seq-len 64 --ranks 4 --recompute --out s.csv",
    ),
    "faults": ("--out out",),
    "advise": (f"{JOB} --gpus 16 --scheme zero3 --micro-batch 2 --recompute none --seq 64 --json",),
    "advise-page": (f"{JOB} --gpus 16 32 --scheme zero3 --seq 64 --out page.html",),
    "predict": (
        f"{JOB} --scheme zero3 hier3 --gpus 16 --micro-batch 1 2 --accumulation 2 --recompute none full "
        "--strict",
        f"{JOB} --scheme zero3 --gpus 16 --cp 1 2 --ways all --seq 32 64 --csv",
        "--cluster frontier --model mixtral-8x7b --scheme zero3 --gpus 16 --ep 1 4 --route hops "
        "--imbalance 2 --copies 0 2",
        f"{JOB} --scheme zero3 --gpus 16 --tiers optim@host --tier-share 0.5 --tier-stride 2",
        "--cluster frontier --model hf.json --scheme zero3 --gpus 64 --tp 2 --pp 2 --interleave 1 --seq 64 "
        "--gated-kept 3",
        f"{JOB} --scheme zero3 --gpus 16 --lora-rank 4 --lora-on q out",
        "--cluster dgx-h100 --model gpt-200k --scheme zero3 --gpus 16 --products mxfp8 --attention plain "
        "--dropout --no-sequence-parallel --reduce-dtype fp32 --recompute-layers 1 --optimizer muon "
        "--operations single",
        "--cluster dgx-h100 --model gpt-200k --scheme zero3 --gpus 64 --groups 32 --tokens 1e9 "
        "--hours-between-failures 5e4 --restart-minutes 10 --checkpoint-seconds 30",
    ),
    "plan": (
        f"{JOB} --gpus 16 --global-batch 64 --micro-batch 1 --recompute none --tp 1 --pp 1 --exact --json "
        "--strict",
        f"{JOB} --gpus 16 --seq 64 --largest zero3 --csv",
        f"{JOB} --gpus 8 --micro-batch 1 --lora-rank 4 --lora-on q v --csv",
        f"{JOB} --gpus 8 --tp 1 --pp 1 --micro-batch 1 --tiers optim@host --exact --csv",
        f"{JOB} --gpus 8 --tp 1 --micro-batch 1 --tiers optim@host --tier-late --exact --csv",
        f"{JOB} --gpus 16 --outer-gbps 10 --most-stale 10 --csv",
        f"{JOB} --gpus 8 --tp 1 --pp 1 --write found",
        f"{JOB} --gpus 8 --tp 1 --pp 1 --micro-batch 1 --software deepspeed --write found",
        f"{JOB} --gpus 32 --tp 1 --pp 1 --micro-batch 1 --groups 16",
        f"{JOB} --gpus 8 --tp 1 --pp 1 --micro-batch 1 --tokens 1e9 --hours-between-failures 5e4 "
        "--restart-minutes 10 --checkpoint-seconds 30",
        f"{JOB} --gpus 8 --recompute full --lengths lengths.txt --csv",
        f"{JOB} --gpus 8 --tp 1 --pp 1 --cp 2 --ways heads ring --micro-batch 1",
    ),
    "schedules": ("--ranks 2 --micro-batches 2 4 --send 0.5 --input 1 --weight 0.5 --memory 2",),
    "rehearse": ("--suite mine --json --root .",),
    "bench-predict": ("--root .",),
    "validate": ("--out out --root .",),
    "calibrate": ("frontier --out out --root .", "--folds"),
    "simulate": ("--cluster frontier --model gpt-200k --scheme zero3 --gpus 16 --python nothing --out out",),
    "bench-softmax": ("--out out",),
    "bench-start": ("--out out --root .",),
    "bench-optimizers": ("--out out --root .",),
    "bench-orders": ("--out out --root .",),
    "bench-compile": ("--out out --root .",),
    "bench-mfu": ("--out out --root . --model gpt-200k",),
    "bench-joined": ("--out out --root .",),
    "bench-saved": ("--out out --root .",),
    "bench-pipeline": ("--out out",),
    "bench-experts": ("--steps 1 --out out",),
    "bench-padding": ("--out out",),
    "bench-disk": ("--out out",),
    "check-context": ("context.py --ranks 2 --tolerance 1e-9",),
    "bench-schedules": ("--forward 0.1 --send 0.5 --out out",),
    "bench-products": ("--out out --root .",),
    "bench-kernel": ("--out out --device cpu --only block_quant --limit-s 1", "--out out --compile sm_80"),
    "gpu": ("--out out --device cpu --only softmax --minutes 1",),
    "doctor": ("",),
    "watch": ("--results smoke -- true",),
}  # fmt: skip
# Verbs whose sound work takes longer than a hang: of these, everything before it is tried.
LONG = (
    "bench-predict", "validate", "calibrate", "simulate", "bench-start", "bench-optimizers", "bench-orders",
    "bench-compile", "bench-mfu", "bench-joined", "bench-saved", "bench-schedules", "bench-pipeline",
    "bench-products", "bench-experts", "bench-padding", "bench-disk", "bench-kernel", "bench-softmax",
    "bench-comm", "bench-routes", "gpu", "faults", "documents", "train", "preflight", "doctor",
)  # fmt: skip
# Verbs that read what this repository has of results; and those whose sound work needs more than that.
OF_REPOSITORY = ("appendix", "documents", "verify", "validate", "calibrate")
UNFINISHED = ("page", "provenance")
WORK_S = 0.3  # of their work


class Started(BaseException):
    """The verb began its work: it would start a process, or measure."""


@cache
def _words() -> list[str]:
    _, verbs = command_line()
    options = {name for verb in verbs.values() for action in verb._actions for name in action.option_strings}
    given = {word for vectors in VECTORS.values() for vector in vectors for word in vector.split()}
    odd = {
        "--",
        "-",
        "--out=",
        "--root=x",
        "--gpus=",
        "-x",
        "0",
        "-1",
        "1e9",
        "9" * 30,
        "1000000000000",
        "/",
        ".",
    }
    return sorted(options | given | odd | set(verbs))


WORDS = _words()


def _prepare(sound_run: Path, verb: str, root: Path) -> None:
    if verb == "claims":
        gradable(root)
    if verb in OF_REPOSITORY:
        (root / "results").mkdir()
        for name in ("reference", "reported"):
            (root / "results" / name).symlink_to(ROOT / "results" / name)  # nothing is written there: _watch
    put(root, "config/suites/mine.yaml", SUITE)
    put(root, "config/schemes.yaml", SCHEMES)
    put(root, "config/models.yaml", MODELS)
    for name in ("experiments", "documents"):
        put(root, f"config/{name}.yaml", sound(f"config/{name}.yaml"))
    put(root, "ds.json", DEEPSPEED)
    put(root, "hf.json", LLAMA)
    put(root, "lengths.txt", "64\n32\n7\n")
    put(root, "context.py", sound("examples/context.py"))
    put(root, "train.log", sound("tests/fixtures/foreign/torchtitan.log"))
    one = root / "results" / "local" / "runs" / "one"
    one.mkdir(parents=True)
    for path in sound_run.iterdir():
        if path.suffix in (".json", ".jsonl"):
            shutil.copy(path, one / path.name)
    put(root, "config/claims.yaml", CLAIM)
    put(root, "CITATION.cff", sound("CITATION.cff"))
    put(root, "config/contributions.yaml", "own: {sentence: It is right., claims: [sent-bytes]}\n")
    for path in (REFERENCE / "local" / "tables").iterdir():
        put(root, f"tables/{path.name}", table(path))
    put(root, "tables/claims.csv", graded())


_WRITES = (
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
)
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
_guard: list[
    tuple[Path, list[Path], list[str]]
] = []  # the folder, what the words name, what was written elsewhere
_installed: list[bool] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _guard:
        return
    root, named, elsewhere = _guard[-1]
    if event in _STARTS:
        raise Started
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, str | bytes | os.PathLike) or not flags & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT
        ):
            return
    elif event in _WRITES:
        path = arguments[0]
    else:
        return
    with suppress(TypeError, ValueError):
        found = Path(os.path.realpath(os.fsdecode(path)))
        if found.is_relative_to("/dev/shm"):  # a semaphore of processes that it would start
            raise Started
        if found == Path(os.devnull) or found.is_relative_to(root):
            return
        if not any(found.is_relative_to(folder) for folder in named):
            elsewhere.append(f"{event} {found}")
        raise PermissionError(errno.EACCES, "is outside of the folder", os.fsdecode(path))


def import_all() -> None:
    """Import what verbs import when they are run: a time limit in the middle would leave a module in half."""
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401
    import torch._dynamo  # noqa: F401

    import lowband
    from lowband.trainers.deepspeed import load

    with suppress(UserError):  # it is not installed
        load("cpu")

    for module in pkgutil.walk_packages(lowband.__path__, "lowband."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(module.name)


@contextmanager
def _inside(root: Path, words: list[str]) -> Iterator[list[str]]:
    """Work in the folder; yields what was tried to be written elsewhere, other than where the words say."""
    if not _installed:
        sys.addaudithook(_watch)
        _installed.append(True)
    before, elsewhere = Path.cwd(), []
    (root / "tmp").mkdir(exist_ok=True)
    tempdir, tempfile.tempdir = tempfile.tempdir, str(root / "tmp")
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    os.chdir(root)
    named = []
    for word in words:
        with suppress(ValueError, OSError):
            named.append(Path(os.path.realpath(word.partition("=")[2] or word)))
    _guard.append((root.resolve(), [path for path in named if path != Path("/")], elsewhere))
    try:
        yield elsewhere
    finally:
        _guard.pop()
        os.chdir(before)
        tempfile.tempdir, sys.dont_write_bytecode = tempdir, bytecode


def _call(verb: str, root: Path) -> None:
    try:
        words = json.loads((root / "words").read_bytes())
    except (ValueError, RecursionError):
        return
    if not isinstance(words, list):
        return
    # What a shell can pass: text without NUL.
    words = [word for word in words if isinstance(word, str) and "\0" not in word]
    try:
        "".join(words).encode("utf-8")
    except UnicodeEncodeError:
        return
    with _inside(root, words) as elsewhere:
        follows = verb in ("status", "curves") and any(word.startswith("--f") for word in words)
        if verb in LONG:
            signal.setitimer(signal.ITIMER_PROF, WORK_S)
        if follows:  # until every run has ended
            signal.setitimer(signal.ITIMER_REAL, WORK_S)
        try:
            run(verb, *words)
        except Started:
            pass
        except Hang:
            if verb not in LONG and not follows:
                raise
        except SystemExit as end:  # argparse's own: --help, or a refusal, both of which it prints
            if end.code not in (0, 2):
                raise
            _one_line(end)
    if elsewhere:
        raise AssertionError(f"written outside of the folder: {elsewhere}")


def _one_line(end: SystemExit) -> None:
    """argparse prints a usage before its line; that line is judged."""
    if end.code == 2:
        lines = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined] # judge's
        sys.stderr.seek(0), sys.stderr.truncate()
        sys.stderr.write(next((line for line in reversed(lines) if "error:" in line), "\n".join(lines)))
        raise Refused


def targets(sound_run: Path) -> list[Target]:
    return [
        Target(
            f"lowband {verb}", "words", "words", json.dumps(vectors[0].split()),
            lambda root, verb=verb: _call(verb, root),
            prepare=lambda root, verb=verb: _prepare(sound_run, verb, root), is_fresh=True,
            more=tuple(json.dumps(vector.split()) for vector in vectors[1:]), group="command line",
            is_unfinished=verb in UNFINISHED,
        )
        for verb, vectors in VECTORS.items()
    ]  # fmt: skip
