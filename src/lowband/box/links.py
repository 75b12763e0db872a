"""The network of a box in the kernel: namespaces, bridges, shaped links (iproute2's `ip` and `tc`).

Only features of every kernel that runs containers are used: veth, bridge, htb, bfifo, u32. No latency is
added, because netem is not available everywhere.
"""

import ctypes
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowband.box import tools
from lowband.box.layout import FABRIC, HEAD_ADDRESS, PREFIX, Layout
from lowband.cost.tcp import FRAME_BYTES
from lowband.errors import UserError

NAMESPACES = Path("/run/netns")  # iproute2's folder of named namespaces
HEAD_PORT = "lowband-head"  # the host's end of the link to the fabric
_CLONE_NEWNET = 0x40000000  # linux/sched.h
# TCP passes single frames to the queue. A queue sends a packet at once and delays the next one for it: if
# packets were whole messages, the last message would never be limited.
FRAMES = "gso_max_segs 1"

# Windows that together fit the queues: nothing is dropped, and small messages do not wait long behind large
# ones. All windows are equal and never grow, so connections that share a link get equal shares of it.
_SYSCTLS = {
    "tcp_congestion_control": "reno",
    "tcp_wmem": "32768 32768 32768",
    "tcp_rmem": "4096 65536 131072",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
}


def network_up(layout: Layout, with_head: bool = False) -> None:
    """Make the namespaces and links of a box.

    with_head: also give the host's own namespace an address, HEAD_ADDRESS, connected to the nodes
    Raises UserError with the error message of the kernel or iproute2.
    """
    places = layout.places()
    _batch(["ip"], [f"netns add {name}" for name in [FABRIC, *(place.namespace for place in places)]])
    fabric, queues = [], []
    for bridge in layout.bridges():
        # No forwarding delay: otherwise a port forwards nothing for its first 15 seconds.
        fabric += [f"link add {bridge} type bridge forward_delay 0 mcast_snooping 0", f"link set {bridge} up"]
    inside: dict[int, tuple[list[str], list[str]]] = {}
    for link in layout.up_links():
        near, far = f"{link.inner}u", f"{link.inner}d"  # the group's end, the outer bridge's end
        if link.rank is None:
            fabric += [f"link add {near} type veth peer name {far}", *_attach(near, link.inner)]
            queues += _queue(near, link.bits_per_s)
        else:
            place = places[link.rank]
            fabric += [f"link add {far} type veth peer name eth0 netns {place.namespace}"]
            inside[link.rank] = (
                ["link set lo up", f"addr add {place.address}/16 dev eth0", f"link set eth0 {FRAMES} up"],
                _queue("eth0", link.bits_per_s),
            )
        fabric += _attach(far, link.outer)
        queues += _queue(far, link.bits_per_s)
    if with_head:
        core = layout.bridges()[-1]
        tools.run(["ip", *f"link add {HEAD_PORT} type veth peer name head netns {FABRIC}".split()])
        mine = [f"addr add {HEAD_ADDRESS}/16 dev {HEAD_PORT}", f"link set {HEAD_PORT} up", "link set lo up"]
        _batch(["ip"], mine)
        fabric += _attach("head", core)
    _batch(["ip", "-n", FABRIC], fabric)
    _batch(["tc", "-n", FABRIC], queues)
    for rank, (addresses, queue) in inside.items():
        namespace = places[rank].namespace
        _batch(["ip", "-n", namespace], addresses)
        _batch(["tc", "-n", namespace], queue)
        with inside_namespace(namespace):
            for name, value in _SYSCTLS.items():
                (Path("/proc/sys/net/ipv4") / name).write_text(value, encoding="ascii")


def network_down() -> None:
    """Remove every namespace that a box made, whatever its size, and with them their links."""
    if HEAD_PORT in [name for _, name in socket.if_nameindex()]:
        tools.run(["ip", "link", "del", HEAD_PORT])
    for namespace in namespaces():
        tools.run(["ip", "netns", "del", namespace])


def namespaces() -> list[str]:
    """Names of the existing namespaces of a box, sorted."""
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}*")) if NAMESPACES.exists() else []


def processes(namespace: str) -> list[int]:
    """Ids of all processes in a namespace."""
    return [int(pid) for pid in tools.run(["ip", "netns", "pids", namespace]).split()]


def missing() -> str:
    """Why links cannot be shaped here, in one line; empty if root or a user namespace can shape them."""
    absent = [tool for tool in ("ip", "tc", "unshare", "setpriv") if shutil.which(tool) is None]
    if absent:
        return f"no {' and no '.join(absent)} (Debian: iproute2, util-linux)"
    steps = [
        "mount -t tmpfs tmpfs /run",
        "ip netns add probe",
        "ip link add bridge0 type bridge forward_delay 0 mcast_snooping 0",
        "ip link add veth0 type veth peer name veth1 netns probe",
        f"ip link set veth0 {FRAMES} up",
        *(f"tc {command}" for command in _queue("veth0", 10**6)),
    ]
    try:
        tools.run([*private_namespaces(), "sh", "-e"], "\n".join(steps) + "\n")
    except UserError as error:
        return f"no network namespaces, or none with shaped links: {error.what}"
    return ""


def private_namespaces() -> list[str]:
    """A command prefix that gives a command its own network and mounts, also for an ordinary user.

    Everything made in these namespaces disappears with their last process, however that ends.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount"]


@contextmanager
def inside_namespace(namespace: str) -> Iterator[None]:
    """A context in which the calling thread is in a network namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(namespace)
        yield
    finally:
        _setns(home)
        os.close(home)


def enter(namespace: str) -> None:
    """Move the calling thread, and everything it starts, into a network namespace permanently."""
    fd = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        _setns(fd)
    finally:
        os.close(fd)


def _setns(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def sent_bytes(interface: str = "eth0") -> int:
    """Bytes that this thread's namespace has sent through an interface, by the kernel's counter, including
    headers. Raises UserError if there is no such interface.
    """
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise UserError(f"no interface '{interface}' in this network namespace")


def _attach(port: str, bridge: str) -> list[str]:
    return [f"link set {port} master {bridge}", f"link set {port} up"]


def _queue(device: str, bits_per_s: int) -> list[str]:
    """tc commands that limit a device's outgoing rate, except for bare acknowledgements and head traffic.

    If acknowledgements waited behind data, two-way traffic would throttle itself.
    """
    to_free = "flowid 1:10"
    add_filter = f"filter add dev {device} parent 1: protocol ip"
    # A burst of two frames: with more, a short message would pass without any limit.
    burst = f"burst {2 * FRAME_BYTES} cburst {2 * FRAME_BYTES} quantum {FRAME_BYTES}"
    return [
        f"qdisc add dev {device} root handle 1: htb default 20",
        f"class add dev {device} parent 1: classid 1:10 htb rate 10gbit quantum 60000",
        *(f"{add_filter} prio 1 u32 match ip {way} {HEAD_ADDRESS}/32 {to_free}" for way in ("src", "dst")),
        # TCP of 52 bytes, no IP options, only the ACK flag set
        f"{add_filter} prio 2 u32 match ip protocol 6 0xff "
        f"match u8 0x05 0x0f at 0 match u16 0x0034 0xffff at 2 match u8 0x10 0xff at 33 {to_free}",
        f"class add dev {device} parent 1: classid 1:20 htb rate {bits_per_s}bit {burst}",
        f"qdisc add dev {device} parent 1:20 handle 20: bfifo limit 16mb",  # deep: it never drops
    ]


def _batch(command: list[str], lines: list[str]) -> None:
    # If this process is killed, the batch ends too: what it went on to make, `down` would not see.
    dies_with_us = ["setpriv", "--pdeathsig", "KILL"]
    tools.run([*dies_with_us, *command, "-batch", "-"], "\n".join(lines) + "\n")
