"""Where ranks listen: on this host alone, also if the host's name is its address in a network."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from commands import ROOT

from lowband.box.links import private_namespaces
from lowband.run.on_ranks import on_ranks

LAN = "10.9.9.9"
# The host's name becomes an address of a network that others could reach.
IN_A_NETWORK = f"""
ip link set lo up
ip link add lan0 type veth peer name lan1
ip addr add {LAN}/24 dev lan0
ip link set lan0 up
ip link set lan1 up
echo "{LAN} $(hostname)" > "$1/hosts"
mount --bind "$1/hosts" /etc/hosts
shift
exec "$@"
"""


def listened() -> list[str]:
    """Addresses on which this rank listens, while it is in a group with another."""
    dist.barrier()
    connections = psutil.Process().net_connections("inet")
    assert socket.gethostbyname(socket.gethostname()) == LAN
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


@pytest.mark.usefixtures("shaped")
def test_ranks_of_one_host_listen_on_loopback(tmp_path: Path) -> None:
    shell = [*private_namespaces(), "sh", "-ec", IN_A_NETWORK, "sh", str(tmp_path)]
    path = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    command = [*shell, sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=path)
    assert done.returncode == 0, done.stderr
    by_rank = json.loads(done.stdout)
    assert len(by_rank) == 2
    assert {address for addresses in by_rank for address in addresses} == {"127.0.0.1"}


if __name__ == "__main__":
    print(json.dumps(on_ranks(2, listened)))
