"""A port that another process will listen at, and that nobody else is given meanwhile."""

import socket

_held: list[socket.socket] = []  # to the end of this process


def held_port() -> int:
    """A free port, bound but not listened at: no port 0 becomes it, and one that names it may have it.

    Such a one sets SO_REUSEADDR, as torch's TCPStore does.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("", 0))
    _held.append(one)
    return int(one.getsockname()[1])
