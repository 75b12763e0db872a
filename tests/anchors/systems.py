"""The systems compared, and the job that each is given: the same model, text, ranks and settings."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.checkout import CONFIG, ROOT
from tests.dist.started import TEXT
from tests.ports import held_port

STEPS, EVERY = 20, 10  # of a run; steps between checkpoints
PEER_TIMEOUT_S = 8
LONGEST_S = 120  # then a job that has not ended is hanging
PORT = 29531
HOSTS = "hosts"
_FSDP2, _DEEPSPEED = "tests.anchors.train_fsdp2", "tests.anchors.train_deepspeed"
_BIN = Path(sys.executable).parent


def job(ranks: int, on_links: bool) -> RunSpec:
    """What all systems train. on_links: on a machine of shaped links, one rank behind each."""
    smoke = next(spec for spec in CONFIG.runs(["smoke"]) if spec.scheme.name == "zero3" and spec.ranks == 8)
    machine = smoke.machine.model_dump()
    if on_links:
        machine = CONFIG.machine("frontier-box").model_dump()
        # Links of 5 MB/s, and so slow a computation that a busy machine keeps its pace.
        machine["box"] |= {"scale": 1e4, "tflops": 0.2}
    return RunSpec.parse(
        smoke.model_dump() | {
            "machine": machine, "ranks": ranks, "text": TEXT, "steps": STEPS, "checkpoint_every": EVERY,
            "model": smoke.model.model_dump() | {"layers": 1, "hidden": 32}, "micro_batch": 1,
            "accumulation": 1, "seq_len": 32, "warmup_steps": 1, "compute_dtype": "fp32",
            "reduce_dtype": "fp32", "peer_timeout_s": PEER_TIMEOUT_S, "time_limit_s": 10 * LONGEST_S,
        },
        "job",
    )  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """
    starts: the step from which each attempt went on
    losses: by step, of its last attempt
    last:   the last step that was recorded
    final:  sha256 of the final weights, "" before the end
    """

    starts: tuple[int, ...]
    losses: dict[int, str]
    last: int
    final: str


@dataclass(frozen=True)
class System:
    """
    script:   the module that its ranks run
    command:  starts all ranks on this host: (spec's file, folder, ranks) -> argument vector
    on_links: the same for one rank in a network of its own: (spec's file, folder, ranks, rank, address of
              rank 0); None: the command itself makes the links
    progress: what a job in the folder has recorded
    restarts: whether it starts its ranks again by itself
    """

    name: str
    script: str
    command: Callable[[Path, Path, int], list[str]]
    on_links: Callable[[Path, Path, int, int, str], list[str]] | None
    progress: Callable[[Path], Progress]
    restarts: bool = False


def _lowband(spec: Path, _folder: Path, _ranks: int) -> list[str]:
    links = ["--links", "private"] if RunSpec.read_json(spec).machine.box else []
    return [sys.executable, "-m", "lowband", "train", *links, str(spec)]


def _torchrun(spec: Path, folder: Path, ranks: int) -> list[str]:
    return _with_torchrun(spec, folder, "--standalone", "--nproc-per-node", str(ranks))


def _torchrun_again(spec: Path, folder: Path, ranks: int) -> list[str]:
    return _with_torchrun(spec, folder, "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1")


def _torchrun_on_links(spec: Path, folder: Path, ranks: int, rank: int, first: str) -> list[str]:
    nodes = ["--nnodes", str(ranks), "--node-rank", str(rank), "--nproc-per-node", "1"]
    return _with_torchrun(spec, folder, *nodes, "--master-addr", first, "--master-port", str(PORT))


def _with_torchrun(spec: Path, folder: Path, *options: str) -> list[str]:
    return [str(_BIN / "torchrun"), *options, _file(_FSDP2), str(spec), str(folder)]


def _deepspeed(spec: Path, folder: Path, ranks: int) -> list[str]:
    return _with_deepspeed(spec, folder, "--num_gpus", str(ranks), "--master_port", str(held_port()))


def _deepspeed_on_links(spec: Path, folder: Path, ranks: int, rank: int, first: str) -> list[str]:
    hosts = folder / f"{HOSTS}{rank}"
    hosts.write_text("".join(f"host{i} slots=1\n" for i in range(ranks)))
    nodes = ["--hostfile", str(hosts), "--no_ssh", "--node_rank", str(rank), "--num_gpus", "1"]
    return _with_deepspeed(spec, folder, *nodes, "--master_addr", first, "--master_port", str(PORT))


def _with_deepspeed(spec: Path, folder: Path, *options: str) -> list[str]:
    return [str(_BIN / "deepspeed"), *options, _file(_DEEPSPEED), str(spec), str(folder)]


def _file(module: str) -> str:
    return str(ROOT / (module.replace(".", "/") + ".py"))


def _progress_of_lowband(folder: Path) -> Progress:
    run = RunFolder(folder)
    outcome = run.read_outcome()
    losses = {step.step: f"{step.loss!r} {step.grad_norm!r}" for step in run.whole_steps()}
    starts = () if outcome is None or outcome.resumed_from is None else (outcome.resumed_from,)
    final = (outcome.weights_sha256 or "") if outcome is not None and outcome.status == "ok" else ""
    return Progress(starts, losses, max(losses, default=0), final)


def _progress_of_peer(folder: Path) -> Progress:
    path = folder / "records"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    steps = [(int(key), value) for key, value in lines if key.isdigit()]
    return Progress(
        tuple(int(value) for key, value in lines if key == "start"),
        dict(steps),
        steps[-1][0] if steps else 0,
        next((value for key, value in lines if key == "final"), ""),
    )


SYSTEMS = {
    system.name: system
    for system in (
        System("lowband", "lowband.run.train", _lowband, None, _progress_of_lowband),
        System("torchrun + FSDP2 + DCP", _FSDP2, _torchrun, _torchrun_on_links, _progress_of_peer),
        System("DeepSpeed ZeRO-3", _DEEPSPEED, _deepspeed, _deepspeed_on_links, _progress_of_peer),
        System(
            "torchrun --max-restarts 1 + FSDP2 + DCP", _FSDP2, _torchrun_again, None, _progress_of_peer, True
        ),
    )
}
