"""`python -m tests.anchors.on_links SYSTEM FOLDER`: a peer's ranks on shaped links, a launcher for each.

In a network of its own, as `lowband train --links private` is; needs root. Each rank is a node of its system:
its launcher runs in the rank's network, and is told the address of rank 0's.
"""

import ctypes
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

from lowband.box import tools
from lowband.box.layout import Layout, Place
from lowband.box.links import inside_namespace, network_up
from lowband.spec.run import RunSpec
from tests.anchors.systems import SYSTEMS
from tests.warm import Forked

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000  # linux/sched.h


def main(name: str, folder: Path) -> int:
    """The first exit code that is not 0, once all launchers have ended."""
    spec = RunSpec.read_json(folder / "spec.json")
    importlib.import_module(SYSTEMS[name].script)
    _leave_the_host()
    layout = Layout.of(spec.machine, spec.ranks)
    network_up(layout)
    started = [_start(name, folder, spec.ranks, rank, layout.places()) for rank in range(spec.ranks)]
    first = 0
    while started:
        for process in [each for each in started if each.poll() is not None]:
            started.remove(process)
            first = first or process.returncode
        time.sleep(0.02)
    return first


def _leave_the_host() -> None:
    """As `unshare --net --mount`, with an empty /run for iproute2's names; a fork keeps what is imported."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET | _CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    tools.run(["mount", "--make-rprivate", "/"])
    tools.run(["mount", "-t", "tmpfs", "tmpfs", "/run"])


def _start(name: str, folder: Path, ranks: int, rank: int, places: list[Place]) -> subprocess.Popen[bytes]:
    command = SYSTEMS[name].on_links(folder / "spec.json", folder, ranks, rank, places[0].address)
    with inside_namespace(places[rank].namespace):
        return Forked(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
