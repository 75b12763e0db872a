"""A process of tests in a network of its own, with nothing in it but the loopback.

gloo asks nobody who connects: who seeks a rank that was killed may reach, at a port that the kernel has given
to another job meanwhile, that job's listener, and take the place of one of its ranks (gloo's
`Listener::haveConnection` keeps the first connection of a number, and closes the second).
"""

import ctypes
import fcntl
import os
import socket
import struct

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def enter() -> bool:
    """Whether this process, and all that it starts, has one from now on: that needs Linux and root."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        return False  # in a container that may not
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("16xh", request)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
    return True
