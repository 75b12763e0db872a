"""Slurm's configuration and daemons for a box: munged, slurmctld, one slurmd in the namespace of each node.

slurmctld checks its host's name, so it runs under the name `head`, each slurmd under its node's. CPUs are
declared but not real: no binding, no cgroups. Instead of a database, ended jobs stay visible for a day.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

from lowband.box import tools
from lowband.box.layout import HEAD_ADDRESS, NODE, Layout
from lowband.box.links import NAMESPACES
from lowband.box.network import STATE
from lowband.errors import UserError

ETC = Path("/etc/slurm")  # where Slurm's commands look: Snakemake's jobs have no SLURM_CONF
CONFIGURATION = "slurm.conf"
READY_S = 30.0
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"

_TOOLS = ("munged", "slurmctld", "slurmd", "sinfo", "sbatch", "srun")
_SBIN = ("/usr/sbin", "/sbin")  # not in every user's path

_CONF = """\
ClusterName=box
SlurmctldHost=head({head})
# The controller listens to the box alone; a box that stays has it on the host's own network.
CommunicationParameters=NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.sock
StateSaveLocation={state}/state
SlurmctldPidFile={state}/slurmctld.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdPidFile={state}/slurmd-%n.pid
SlurmdLogFile={state}/log/slurmd-%n.log
SlurmdSpoolDir={state}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
# Snakemake asks squeue; a job is there for a day after its end.
AccountingStorageType=accounting_storage/none
MinJobAge=86400
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# What a job that is timed asks for: one at a time has the real cores.
Licenses=cores:1
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=20
KillWait=3
# One dead task ends its step; otherwise the others would wait until the time limit.
KillOnBadExit=1
NodeName=DEFAULT CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 State=UNKNOWN
{nodes}
# Whole nodes, as on Frontier: two jobs on one node would share its links.
PartitionName=batch Nodes={node}[1-{count}] Default=YES DefaultTime=10 OverSubscribe=EXCLUSIVE State=UP
"""


def missing() -> str:
    """The missing Slurm programs, in one line; empty if all are installed."""
    absent = [tool for tool in _TOOLS if find(tool) is None]
    return f"no {', '.join(absent)} (`make box-deps` installs Debian's {PACKAGES})" if absent else ""


def find(tool: str) -> str | None:
    """Path of a program, also in the folders for administrators; None if it is missing."""
    return shutil.which(tool, path=os.pathsep.join([*os.get_exec_path(), *_SBIN]))


def is_rootless() -> bool:
    """Whether root here is an ordinary user outside: the only user of a user namespace."""
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split()[2] == "1"


def write_configuration(layout: Layout) -> None:
    """Write slurm.conf, munge's key and the hosts file into STATE."""
    STATE.mkdir(mode=0o711)  # munge's socket and the configuration are for all, by name; the rest is root's
    for folder in (STATE / "log", STATE / "spool", STATE / "state"):
        folder.mkdir(mode=0o700)
    key = STATE / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    nodes = range(1, layout.nodes + 1)
    first = {node: layout.place((node - 1) * layout.node_size) for node in nodes}
    hosts = ["127.0.0.1 localhost", f"{HEAD_ADDRESS} head"]
    hosts += [f"{first[node].address} {NODE}{node}" for node in nodes]
    (STATE / "hosts").write_text("\n".join(hosts) + "\n", encoding="ascii")
    (STATE / CONFIGURATION).write_text(
        _CONF.format(
            head=HEAD_ADDRESS,
            state=STATE,
            cpus=layout.node_size,
            nodes="\n".join(f"NodeName={NODE}{node} NodeAddr={first[node].address}" for node in nodes),
            node=NODE,
            count=layout.nodes,
        ),
        encoding="ascii",
    )


def start(layout: Layout) -> None:
    """Start the daemons and wait until every node is idle. Raises UserError with the last error line."""
    munged = [
        f"--{name}={STATE / file}"
        for name, file in {
            "key-file": "munge.key",
            "socket": "munge.sock",
            "pid-file": "munged.pid",
            "log-file": "log/munged.log",
            "seed-file": "munged.seed",
        }.items()
    ]
    # --force: in a user namespace the parent folders belong to users outside of it.
    tools.run([_tool("munged"), *munged, "--num-threads=2", *(["--force"] if is_rootless() else [])])
    preload = _preload()
    conf = str(STATE / CONFIGURATION)
    tools.run(_on_host("head", [*preload, _tool("slurmctld"), "-f", conf]))
    for node in range(1, layout.nodes + 1):
        name = f"{NODE}{node}"
        (STATE / "spool" / name).mkdir()
        # Not by `ip netns exec`: it hides the cgroup file systems, without which slurmd does not start.
        enter = ["nsenter", f"--net={NAMESPACES / layout.place((node - 1) * layout.node_size).namespace}"]
        command = [*preload, _tool("slurmd"), "-f", conf, "-N", name]
        tools.run([*enter, *_on_host(name, command)])
    _wait_until_idle(layout.nodes)


def _wait_until_idle(nodes: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if node_states() == ["idle"] * nodes:
            return
        time.sleep(0.1)
    log = (STATE / "log" / "slurmctld.log").read_text(encoding="utf-8", errors="replace").splitlines()
    raise UserError(f"the nodes do not come up: {log[-1] if log else 'slurmctld wrote no log'}", where=STATE)


def node_states() -> list[str]:
    """The state of every node, as reported by sinfo; [] if no controller answers."""
    command = [_tool("sinfo"), "-h", "-N", "-o", "%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _on_host(name: str, command: list[str]) -> list[str]:
    """The command, run with its own host name and hosts file."""
    inside = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
    mounts = ["unshare", "--uts", "--mount", "--propagation", "slave"]
    return [*mounts, "sh", "-c", inside, "sh", str(STATE / "hosts"), name, *command]


def _preload() -> list[str]:
    if not is_rootless():
        return []
    library = STATE / "nogroups.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise UserError("an ordinary user's box needs a C compiler", allowed="gcc or cc, or root")
    tools.run([compiler, "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("nogroups.c"))])
    return ["env", f"LD_PRELOAD={library}"]


def _tool(name: str) -> str:
    path = find(name)
    if path is None:
        raise UserError(missing())
    return path
