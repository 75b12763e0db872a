"""The key-value store at which jobs that come and go meet: torch's TCPStore, with errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lowband.errors import UserError

POLL_S = 0.002


def open_store(address: str, hosts: bool = False, timeout_s: float = 30.0) -> dist.TCPStore:
    """The store of the rounds, at `host:port`.

    hosts: whether this process hosts it; it must stay to the end
    Raises UserError for an address that is none, is taken, or where no store answers in `timeout_s`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"store '{address}'", allowed="host:port, port 1 to 65535")
    # torch tries twice.
    limit = timedelta(seconds=timeout_s / 2)
    try:
        return dist.TCPStore(host, int(port), is_master=hosts, wait_for_workers=False, timeout=limit)
    except dist.DistError as error:
        raise UserError(
            f"no store: {str(error).splitlines()[0]}", where=address,
            allowed="a free port to host it at" if hosts else "a process that hosts it there",
        ) from None  # fmt: skip


@contextmanager
def reaching(store: dist.Store) -> Iterator[None]:
    """Turn a broken connection to the store into one line."""
    try:
        yield
    except dist.DistError as error:
        where = f"{getattr(store, 'host', '')}:{getattr(store, 'port', '')}"
        raise UserError(
            f"lost the store of the rounds: {str(error).splitlines()[0]}", where=where,
            allowed="a host process that stays to the end",
        ) from None  # fmt: skip
