"""The choice of a run's links: a private network, a Slurm box's links, or the machine's own.

A private network needs no daemon, no root and no clean-up: `lowband train` starts itself again in its own
network and mount namespaces, in which it makes the links, and the kernel removes them with its last
process.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Literal, NoReturn

from lowband.box import links
from lowband.box.layout import NODE, Layout, Place
from lowband.errors import UserError
from lowband.spec.machine import Machine
from lowband.spec.run import RunSpec
from lowband.spec.slurm_task import is_slurm_task

SHAPED = "shaped"
PLAIN = "plain loopback, not shaped"
OWN = "the machine's own"
STATE = Path("/run/lowband-box")  # all files of a Slurm box: configuration, sockets, logs
MACHINE = STATE / "machine.json"  # the machine whose box it is; written when the box is up

Links = Literal["auto", "private", "plain", "here"]


def kind_of(links: str) -> str:
    """Without the reason, which tells no other kind of links."""
    return links.partition(":")[0]


def connect(spec: RunSpec, wish: Links, is_launched: bool) -> str:
    """Make or find the links of a run; returns their description, for the record.

    is_launched: whether torchrun or srun started this process
    With `auto` and `private`, a run of a box's machine that no launcher started is started again by
    `private_command`, with `here`, and this function does not return. Raises UserError in a Slurm box with
    other links than the run's, and if `private` is not possible here.
    """
    if spec.machine.box is None or spec.device == "fake":
        return OWN
    if is_slurm_task():
        if not (socket.gethostname().startswith(NODE) and links.namespaces()):
            return f"{PLAIN}: a job outside of a box"
        check_links(spec, Machine.read_json(MACHINE))
        return SHAPED
    if wish == "here":
        links.network_up(Layout.of(spec.machine, spec.ranks))
        return SHAPED
    if wish == "plain":
        reason = "as asked"
    elif is_launched:
        reason = "a launcher's process would be alone in a network of its own"
    else:
        reason = links.missing()
    if reason and wish == "private":
        raise UserError(reason, where="--links private", allowed="auto, plain")
    if reason:
        return f"{PLAIN}: {reason}"
    return start_privately()


def check_links(spec: RunSpec, box: Machine) -> None:
    """Raises UserError if a run of a box's machine has other links than a box that is up."""
    if spec.machine.box is None or spec.device == "fake":
        return
    assert box.box is not None
    if (box.levels, box.box.scale) != (spec.machine.levels, spec.machine.box.scale):
        raise UserError(
            "this box has other links than the run", where=spec.run_id,
            allowed="a run with outer_link runs without Slurm, on its own links",
        )  # fmt: skip


def start_privately() -> NoReturn:
    """Replace this process by the same command with `--links here`, in its own network."""
    sys.stdout.flush()
    command = private_command([sys.executable, "-m", "lowband", *sys.argv[1:], "--links", "here"])
    os.execvp(command[0], command)


def private_command(arguments: list[str]) -> list[str]:
    """The command that runs `arguments` in its own network, with an empty /run for iproute2's names."""
    mounted = 'mount -t tmpfs tmpfs /run && exec "$@"'
    return [*links.private_namespaces(), "sh", "-c", mounted, "sh", *arguments]


def _this_node() -> int:
    return int(socket.gethostname().removeprefix(NODE))


def join(spec: RunSpec, rank: int, local_rank: int) -> None:
    """Make this process a rank of the box: in its place's namespace, on its interface."""
    layout = Layout.of(spec.machine, spec.ranks)
    # A job may have any nodes of the box: the host's name identifies the node, not Slurm's variables.
    enter_place(Place(_this_node(), local_rank) if is_slurm_task() else layout.place(rank))


def enter_place(place: Place) -> None:
    """Move this process to a rank's namespace, and make gloo use its interface."""
    links.enter(place.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
