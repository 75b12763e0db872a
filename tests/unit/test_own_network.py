"""Processes of tests that are apart do not meet at a port."""

import multiprocessing
import socket
from multiprocessing.connection import Connection

import pytest

from tests import own_network


def listen(here: Connection) -> None:
    """Listen at the port that is told, in a network of its own if there can be one."""
    has_own = own_network.enter()
    server = socket.create_server(("127.0.0.1", here.recv() if has_own else 0))
    with server, socket.create_connection(server.getsockname()):  # its loopback is up
        here.send(has_own)


def test_one_port_serves_two_networks() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=listen, args=(theirs,))
    process.start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours.send(server.getsockname()[1])
        has_own = ours.recv()
    process.join()
    assert process.exitcode == 0
    if not has_own:
        pytest.skip("a network of its own needs root")
