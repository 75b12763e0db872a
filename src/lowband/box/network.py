"""How a run gets its links: a private network of its own, a Slurm box's, or what there is.

A private network needs no daemon, no root and no clean-up: `lowband train` starts itself anew in network and mount
namespaces of its own, in which it makes the links, and the kernel removes them with its last process.
"""

import os
import sys
from typing import Literal

from lowband.box import links
from lowband.box.layout import Layout, Place
from lowband.spec.run import RunSpec

SHAPED = "shaped"
PLAIN = "plain loopback, not shaped"
OWN = "the machine's own"

Links = Literal["auto", "private", "plain"]


def connect(spec: RunSpec, wish: Links) -> str:
    """Make or find the links of a run; returns what they are, for the record.

    With `auto`, a run of a box's machine that no launcher started is started anew by `private_command`, with
    `private`, and this function does not return.
    """
    if spec.machine.box is None or spec.device == "fake":
        return OWN
    if "SLURM_STEP_ID" in os.environ:
        place = Layout.of(spec.machine, spec.ranks).place(0)
        return SHAPED if (links.NAMESPACES / place.namespace).exists() else f"{PLAIN}: a job outside of a box"
    if wish == "private":
        links.network_up(Layout.of(spec.machine, spec.ranks))
        return SHAPED
    reason = "as asked" if wish == "plain" else links.missing()
    if reason:
        return f"{PLAIN}: {reason}"
    sys.stdout.flush()
    arguments = [sys.executable, "-m", "lowband", *sys.argv[1:], "--links", "private"]
    command = private_command(arguments)
    os.execvp(command[0], command)


def private_command(arguments: list[str]) -> list[str]:
    """The command that runs `arguments` with a network of its own and an empty /run, for iproute2's names."""
    mounted = 'mount -t tmpfs tmpfs /run && exec "$@"'
    return [*links.private_namespaces(), "sh", "-c", mounted, "sh", *arguments]


def join(place: Place) -> None:
    """Make this process the rank at a place: in its namespace, on its interface."""
    links.enter(place.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
