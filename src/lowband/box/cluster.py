"""A Slurm cluster in a box: up, down, status, and a command run inside one.

`up`, for root, leaves a box on this machine until `down`. `run` brings up a box in its own namespaces for as
long as a command runs, also for an ordinary user; when the command ends or is killed, the kernel removes all
of it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from lowband.box import links, slurm, tools
from lowband.box.layout import Layout
from lowband.box.network import MACHINE, STATE, private_command
from lowband.box.slurm import CONFIGURATION, ETC
from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.spec.machine import Machine

STOP_S = 10.0
_DAEMONS = ("munged", "slurmctld", "slurmd")
_STARTERS = ("nsenter", "unshare", "sh", "env")  # programs that become daemons (slurm.start)
_ROUNDS = 10  # of ending processes, of which some may just be starting others


def up(root: Path, cluster: str) -> str:
    """Bring up the box of `slurm/<cluster>/`, unless it is already up; returns a report.

    Raises UserError without root, Slurm or iproute2, or if there is another box or another Slurm.
    """
    machine = Config(root).machine(cluster)
    _check(machine)
    running = _running()
    if running == cluster:
        return f"the box of {cluster} is already up"
    if running is not None:
        raise UserError(f"the box of {running} is up", allowed="lowband box down first")
    if os.geteuid() != 0:
        raise UserError(
            "a box that stays needs root", allowed="lowband box run -- COMMAND, for an ordinary user"
        )
    configured = ETC / CONFIGURATION
    if configured.exists() and not _is_ours(configured):
        raise UserError(f"{configured} exists: this machine has its own Slurm")
    down()  # remove leftovers of a killed `up`
    ETC.mkdir(exist_ok=True)
    return _bring_up(machine, lambda: configured.symlink_to(STATE / CONFIGURATION))


def down() -> str:
    """Take the box down, even if it is only partly up: daemons, jobs, namespaces, files.

    Raises UserError for an ordinary user, because a box that `up` made belongs to root.
    """
    if os.geteuid() != 0 and (STATE.exists() or links.namespaces()):
        raise UserError("the box is root's", where="lowband box down", allowed="root")
    ended = _end_processes()
    namespaces = links.namespaces()
    links.network_down()
    configured = ETC / CONFIGURATION
    if _is_ours(configured):
        configured.unlink()
    was_there = STATE.exists()
    shutil.rmtree(STATE, ignore_errors=True)
    if not (ended or namespaces or was_there):
        return "no box is up"
    return f"box down: {ended} processes ended, {len(namespaces)} namespaces removed"


def status() -> str:
    """One line: which box is up, and its nodes' states."""
    running = _running()
    if running is None:
        left = links.namespaces()
        return (
            f"no box is up; {len(left)} namespaces of one are left (lowband box down)"
            if left
            else "no box is up"
        )
    states = slurm.node_states()
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    return f"the box of {running} is up: {counts or 'its controller does not answer'}"


def run(root: Path, cluster: str, command: list[str]) -> int:
    """Run a command in its own box; returns its exit code."""
    machine = Config(root).machine(cluster)
    _check(machine)
    if os.environ.get("LOWBAND_BOX") != cluster:
        arguments = [sys.executable, "-m", "lowband", "box", "run", "--cluster", cluster, "--", *command]
        isolated = private_command(arguments)
        # In its own process namespace: remaining processes end with the command.
        isolated[1:1] = ["--pid", "--fork", "--mount-proc", "--kill-child"]
        return _supervise(isolated, {**os.environ, "LOWBAND_BOX": cluster})
    print(_bring_up(machine, _bind_configuration), flush=True)
    signal.signal(signal.SIGINT, lambda *_: None)  # for the command to handle; the box stays until it ends
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}", where="box run") from None
    finally:
        _end_processes()


def _supervise(isolated: list[str], env: dict[str, str]) -> int:
    """Run the command of a box; SIGTERM or SIGINT to this process ends everything in the box."""
    # If this process is killed, the kernel ends unshare too.
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *isolated], env=env)
    # SIGKILL, because unshare ignores milder signals; then the box's first process ends, and with it all.
    signal.signal(signal.SIGTERM, lambda *_: process.kill())
    try:
        return process.wait()
    except KeyboardInterrupt:
        # A terminal also signals the command: Snakemake then cancels its jobs and unlocks its folder.
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(STOP_S)
        process.kill()
        return 128 + signal.SIGINT


def _check(machine: Machine) -> None:
    if machine.box is None:
        what = f"cluster '{machine.name}' has no box"
        raise UserError(what, where="machine.yaml: box", allowed="frontier-box, ...")
    for reason in (links.missing(), slurm.missing()):
        if reason:
            raise UserError(f"a box cannot be created here: {reason}")


def _bring_up(machine: Machine, publish: Callable[[], None]) -> str:
    """Make and start a box. publish: makes the configuration visible to Slurm's commands."""
    start = time.monotonic()
    assert machine.box is not None  # _check
    layout = Layout.of(machine, machine.box.nodes * machine.node_size)
    slurm.write_configuration(layout)
    publish()
    links.network_up(layout, with_head=True)
    slurm.start(layout)
    MACHINE.write_text(machine.to_json(), encoding="utf-8")
    rates = ", ".join(
        f"{level.name} {layout.bytes_per_s(i) / 1e3:,.0f} kB/s"
        for i, level in enumerate(machine.levels, start=1)
    )
    return (
        f"box of {machine.name}: {layout.nodes} nodes x {layout.node_size} ranks, idle after "
        f"{time.monotonic() - start:.1f} s\n"
        f"a rank's links: {rates} (1/{machine.box.scale:,.0f} of the machine's)\n"
        f"state and logs: {STATE}"
    )


def _bind_configuration() -> None:
    """Bind STATE over /etc/slurm, which is safe in the box's own mount namespace."""
    if not ETC.exists():
        raise UserError(f"no folder {ETC}: Slurm's package makes it")
    tools.run(["mount", "--bind", str(STATE), str(ETC)])


def _running() -> str | None:
    """The cluster whose box is up, if its controller is running; otherwise None."""
    if not any("slurmctld" in process.info["name"] for process in _daemons()):  # it may be gone by now
        return None
    return Machine.read_json(MACHINE).name if MACHINE.exists() else None


def _daemons() -> Iterator[psutil.Process]:
    """Every munged, slurmctld and slurmd of the box that this process is in, or of the one made by `up`; also
    those that a killed `up` has just begun to start.
    """
    for process in psutil.process_iter(["name", "cmdline"]):
        name, arguments = process.info["name"], process.info["cmdline"] or []
        is_one = name in _DAEMONS and any(str(STATE) in argument for argument in arguments)
        is_starting = name in _STARTERS and str(STATE / CONFIGURATION) in arguments
        if (is_one or is_starting) and _is_of_this_system(process.pid):
            yield process


def _is_of_this_system(pid: int) -> bool:
    """Whether a process is in this one's PID namespace: processes of a `box run` see only each other."""
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()
    except OSError:  # gone, or another user's
        return False


def _end_processes() -> int:
    """End the daemons and all processes in the box's namespaces; returns how many there were."""
    total = 0
    for _ in range(_ROUNDS):
        ended = _end_those_seen()
        total += ended
        if not ended:
            break
    return total


def _end_those_seen() -> int:
    found = {process.pid: process for process in _daemons()}
    for namespace in links.namespaces():
        for pid in links.processes(namespace):
            with suppress(psutil.NoSuchProcess):
                found.setdefault(pid, psutil.Process(pid))
    mine = [process for pid, process in found.items() if pid != os.getpid()]
    # Kill jobs first, because slurmd would wait for them.
    for process in sorted(mine, key=lambda process: process.pid, reverse=True):
        try:
            process.terminate() if "slurm" in process.name() or "munge" in process.name() else process.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(mine, timeout=STOP_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=STOP_S)
    return len(mine)


def _is_ours(path: Path) -> bool:
    return path.is_symlink() and str(path.readlink()).startswith(str(STATE))
