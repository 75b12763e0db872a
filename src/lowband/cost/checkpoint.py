"""A checkpoint with Adam's states in closed form: bytes, and seconds at the rates that a machine file states.

    all files   12 P bytes: master weights and two moments, fp32, of P parameters, without padding
    one rank    12 N / |optim| bytes at most; written by the ranks of one group of the optimizer's level
    copy        the rank's bytes / rate from the device to the host; only meanwhile does training wait
    write       the rank's bytes / (rate of sha256), then / (its share of the file system's rate)
    read        verify: every file once, shared by all ranks; then each rank reads its own ranges

With replicas that meet seldom, n of them, all files have 12 n P bytes, 4 P of the anchor and, with momentum,
4 P of the outer optimizer; the rank that writes most has its part of each, and every replica's ranks write.
Of parameters whose exchange has not arrived when the checkpoint is saved, files have 4 bytes more.

N: padded elements of all units. A node's ranks share `node_gigabytes_per_s`, all nodes the file system's own
rate. Left out: the manifest, buffers, generators' states, and the file system's time to create files.
"""

from typing import NamedTuple

from lowband.cost.collectives import Case, share
from lowband.cost.memory import STATE_BYTES, replica_bytes
from lowband.cost.numbers import GIGA
from lowband.spec.machine import Storage
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme


class CheckpointTime(NamedTuple):
    """Seconds. copy_s: of `save`, for which training waits; write_s: behind training; read_s: of a resume."""

    copy_s: float
    write_s: float
    read_s: float


def all_bytes(parameters: int, scheme: Scheme, levels: Levels) -> int:
    """Bytes of all files. parameters: without padding"""
    replicas = levels.world // levels.size(scheme.level("replica"))
    shared = sum(replica_bytes(1, 1, 1, scheme.sync).values())
    return (replicas * STATE_BYTES + shared) * parameters


def rank_bytes(padded: int, scheme: Scheme, levels: Levels) -> int:
    """Bytes of the fullest rank's file. padded: elements of all units"""
    own = STATE_BYTES * padded // levels.size(scheme.optim)
    shared = replica_bytes(padded, levels.size(scheme.level("replica")), levels.world, scheme.sync)
    return own + sum(shared.values())


def writers(scheme: Scheme, levels: Levels) -> int:
    """Ranks that write weights: those of one group of the optimizer's level, in each replica."""
    return levels.world // levels.size(scheme.level("replica")) * levels.size(scheme.optim)


def checkpoint_time(
    storage: Storage, mine: int, writers: int, ranks: int, node_size: int, case: Case = "value"
) -> CheckpointTime:
    """Time to save a checkpoint of a job and to load it again under the same scheme and rank count.

    mine: bytes of the fullest rank's file; writers: ranks that write one
    """
    sum_rate = share(storage.sha256_gigabytes_per_s, case) * GIGA

    def moved_s(bytes_per_rank: float, movers: int, whole: float) -> float:
        """All `movers` at once, node after node filled with them."""
        node = share(storage.node_gigabytes_per_s, case) * GIGA
        return max(bytes_per_rank * min(movers, node_size) / node, bytes_per_rank * movers / (whole * GIGA))

    copy_s = (
        mine / (share(storage.copy_gigabytes_per_s, case) * GIGA) if storage.copy_gigabytes_per_s else 0.0
    )
    write_s = mine / sum_rate + moved_s(mine, writers, share(storage.write_gigabytes_per_s, case))
    read_rate = share(storage.read_gigabytes_per_s, case)
    verified = mine * writers / ranks  # the files are shared by all ranks
    read_s = verified / sum_rate + moved_s(verified, ranks, read_rate) + moved_s(mine, ranks, read_rate)
    return CheckpointTime(copy_s, write_s, read_s + copy_s)
