"""A trial: a run in a network of its own, one rank or link of which is slow, and what its outcome names."""

import ctypes
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from lowband.box import links
from lowband.box.layout import FABRIC, Layout
from lowband.box.network import SHAPED
from lowband.run import training_loop
from lowband.run.pacing import PacedDevice
from lowband.run.train import train
from lowband.spec.records import Outcome, Slow, StepRecord
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.checkout import CONFIG
from tests.dist.started import TEXT, killed
from tests.stragglers.draw import Trial, levels

LONGEST_S = 400  # beside much other work
STEPS, WARMUP = 16, 1
Paced = Callable[[RunSpec], PacedDevice | None]
LINKS = CONFIG.runs(["links"])[0]
SMOKE = CONFIG.runs(["smoke"])[0]
_NEW_NETWORK_AND_MOUNTS = 0x40000000 | 0x00020000  # CLONE_NEWNET, CLONE_NEWNS of linux/sched.h


def spec_of(trial: Trial) -> RunSpec:
    machine = CONFIG.machine("frontier-box").model_dump()
    machine["levels"][1]["size"] = trial.node
    # So slow that ranks that share two busy cores keep their pace: 1.2 s of computation in a step.
    machine["box"] |= {"scale": 6e5, "tflops": 2.4}
    return RunSpec.parse(
        LINKS.model_dump() | {
            "machine": machine, "ranks": trial.ranks, "scheme": CONFIG.scheme(trial.scheme).model_dump(),
            "text": TEXT, "steps": STEPS, "warmup_steps": WARMUP, "seed": 1 + trial.seed,
            "model": SMOKE.model.model_dump() | {"layers": 1, "hidden": 32}, "micro_batch": 1,
            "seq_len": 32, "compute_dtype": "fp32", "reduce_dtype": "fp32", "fingerprint": False,
            "peer_timeout_s": 60, "time_limit_s": LONGEST_S,
        },
        "trial",
    )  # fmt: skip


class Running:
    """A trial's run, in a process and a folder of its own. The engine does not know of the fault."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.started = trial, time.monotonic()
        self._name = tempfile.TemporaryDirectory()
        self.folder = RunFolder(Path(self._name.name))
        self.folder.spec.write_text(spec_of(trial).to_json())
        self.process = multiprocessing.get_context("fork").Process(target=self._command)
        self.process.start()

    def _command(self) -> None:
        os.setsid()
        log = os.open(self.folder.path / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _own_network(self.trial)
        if self.trial.kind == "rank":
            training_loop._paced_device = _slower(training_loop._paced_device, self.trial)
        train(self.folder.spec, links=SHAPED)

    @property
    def has_ended(self) -> bool:
        return not self.process.is_alive() or time.monotonic() > self.started + LONGEST_S

    def end(self) -> tuple[Outcome, list[StepRecord]]:
        self.process.join(max(0.0, self.started + LONGEST_S - time.monotonic()))
        killed(self.process)  # type: ignore[arg-type]
        outcome, steps = self.folder.read_outcome(), self.folder.whole_steps()
        self._name.cleanup()
        return outcome or Outcome(status="error", cause="no outcome", steps=len(steps)), steps


def is_right(trial: Trial, found: tuple[Slow, ...]) -> bool:
    """One thing is named, and it is the one that is slow. A rank's link may be named as its pair where
    the rank has only one partner on a level: nothing distinguishes the two ends.
    """
    if trial.kind == "none":
        return not found
    if len(found) != 1 or (found[0].level == "self") != (trial.kind == "rank"):
        return False
    ranks = set(found[0].ranks)
    if trial.kind == "link":
        hops = levels(trial.ranks, trial.node).hops("self", found[0].level) if len(ranks) == 2 else []
        return set(trial.victim) <= ranks and all(hop.count == 2 for hop in hops[-1:])
    return ranks == set(trial.victim)


def _slower(paced: Paced, trial: Trial) -> Paced:
    def of(spec: RunSpec) -> PacedDevice | None:
        device = paced(spec)
        if device is not None and dist.get_rank() in trial.victim:
            device.flop_per_s /= trial.factor
        return device

    return of


def _own_network(trial: Trial) -> None:
    """This process's own network with the trial's links, one of which may be slow. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK_AND_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    _run("mount --make-rprivate /")
    _run("mount -t tmpfs tmpfs /run")
    spec = spec_of(trial)
    layout = Layout.of(spec.machine, spec.ranks)
    links.network_up(layout)
    if trial.kind == "link":
        [rank] = trial.victim
        [own] = [link for link in layout.up_links() if link.rank == rank]
        rate = f"rate {round(own.bits_per_s / trial.factor)}bit burst 3028 cburst 3028"
        for namespace, device in ((layout.place(rank).namespace, "eth0"), (FABRIC, f"{own.inner}d")):
            _run(f"tc -n {namespace} class change dev {device} parent 1: classid 1:20 htb {rate}")
    if trial.kind == "path":
        [hop] = [hop for hop in layout.levels.hops("self", "world") if hop.level == trial.level]
        share = layout.bytes_per_s(layout.levels.index(trial.level)) / (hop.count - 1)
        rate = f"rate {round(8 * share / trial.factor)}bit burst 3028 cburst 3028 quantum 1514"
        for here, there in (trial.victim, trial.victim[::-1]):
            tc, place = f"tc -n {layout.place(here).namespace}", layout.place(there)
            _run(f"{tc} class add dev eth0 parent 1: classid 1:30 htb {rate}")
            _run(f"{tc} qdisc add dev eth0 parent 1:30 handle 30: bfifo limit 16mb")
            _run(
                f"{tc} filter add dev eth0 parent 1: protocol ip prio 3 u32 match ip dst {place.address}/32 "
                "flowid 1:30"
            )


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=20)
