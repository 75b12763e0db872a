"""The verdicts of `lowband preflight`: every fault is named with its ranks, and a clean job has none."""

import pytest

from lowband.predict.footprint import memory_items, peak_bytes
from lowband.predict.workload import workload_of
from lowband.preflight import verdicts
from lowband.preflight.facts import RankFacts
from lowband.preflight.links import LevelRate, PairRate, _rounds
from lowband.preflight.main import _devices
from lowband.preflight.probes import FILE_BYTES, Clock, Files
from lowband.spec.machine import Storage
from lowband.spec.mesh import Levels
from lowband.spec.sourced import Fact
from tests.checkout import CONFIG

GIB = 2**30
VERSIONS = {"torch": "2.13.0", "lowband's source": "abc"}
LEVELS = Levels.fit({"node": 2}, 8)
HOSTS = ["a", "a", "b", "b", "c", "c", "d", "d"]


def facts(rank: int, **changes) -> RankFacts:
    kept = {
        "host": HOSTS[rank], "versions": VERSIONS, "device": "GPU", "device_id": f"device {rank}",
        "free_bytes": 60 * GIB, "total_bytes": 64 * GIB,
    }  # fmt: skip
    return RankFacts(**{**kept, **changes})


CLEAN = [facts(rank) for rank in range(8)]


def changed(rank: int, **changes) -> list[RankFacts]:
    return [facts(r, **changes) if r == rank else CLEAN[r] for r in range(8)]


def wrong(*findings: verdicts.Finding) -> list[str]:
    return [finding.found for finding in findings if finding.verdict == "wrong"]


def test_a_clean_job_has_no_fault() -> None:
    assert not wrong(
        verdicts.placement(HOSTS, LEVELS),
        *verdicts.versions(CLEAN),
        *verdicts.devices(CLEAN, 64, 50 * GIB),
        verdicts.clock([Clock("b", 0.2, 0.01)]),
        verdicts.link([LevelRate("world", 4, 100.0)] * 8, 100, CLEAN),
    )


def test_a_cyclic_placement() -> None:
    found = verdicts.placement(["a", "b"] * 4, LEVELS)
    assert found.verdict == "wrong" and "--distribution=block" in found.expected


def test_the_rank_that_differs_is_named_even_if_it_is_rank_0() -> None:
    for rank in (0, 5):
        [found] = wrong(*verdicts.versions(changed(rank, versions={**VERSIONS, "torch": "2.11.0"})))
        assert found == f"torch 2.11.0 on {HOSTS[rank]} (rank {rank})"
    [found] = wrong(*verdicts.versions(changed(3, versions={"lowband's source": "abc"})))
    assert found == "torch missing on b (rank 3)"


def test_devices() -> None:
    assert wrong(*verdicts.devices(changed(1, device_id="device 0"), 64, None)) == [
        "one device for a (rank 0, 1)"
    ]
    assert wrong(*verdicts.devices(changed(6, total_bytes=32 * GIB), 64, None)) == ["32.0 GiB on d (rank 6)"]
    assert wrong(*verdicts.devices(changed(6, free_bytes=40 * GIB), 64, 50 * GIB)) == [
        "40.00 GiB free on d (rank 6)"
    ]


def test_a_run_that_rehearse_says_to_fit_fits() -> None:
    """Breadth-first no gradients are kept between passes."""
    spec = next(
        spec for spec in CONFIG.runs(["frontier"]) if spec.order == "breadth" and spec.accumulation > 1
    )
    job = workload_of(spec)
    peak = int(peak_bytes(memory_items(job), job.keeps_grads))
    assert not wrong(*_devices(spec, [facts(rank, free_bytes=peak + 1) for rank in range(8)]))
    assert wrong(*_devices(spec, [facts(rank, free_bytes=peak - 1) for rank in range(8)]))


@pytest.mark.parametrize("count", range(2, 10))
def test_neighbours_meet_once_and_nobody_two_at_a_time(count: int) -> None:
    rounds = _rounds(count)
    for pairs in rounds:
        busy = [place for pair in pairs for place in pair]
        assert len(busy) == len({*busy})
    met = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert met == sorted({tuple(sorted((place, (place + 1) % count))) for place in range(count)})


def test_a_slow_node_is_told_from_its_partners() -> None:
    """A gather is as slow as its slowest member; in pairs only one rank is slow with both neighbours."""
    rates = [LevelRate("world", 4, 10.0)] * 8
    speed = {
        frozenset((r, other)): 10.0 if {r, other} & {4, 5} else 95.0 for r in range(8) for other in range(8)
    }
    pairs = [[PairRate(o, speed[frozenset((r, o))]) for o in ((r + 2) % 8, (r - 2) % 8)] for r in range(8)]
    assert verdicts.link(rates, 100, CLEAN, pairs).found.endswith("slow: c (rank 4, 5)")


def test_two_partners_cannot_be_told_apart() -> None:
    rates = [LevelRate("node", 2, 10.0 if r in (2, 3) else 100.0) for r in range(8)]
    pairs = [[PairRate(r ^ 1, 10.0 if r in (2, 3) else 100.0)] for r in range(8)]
    assert verdicts.link(rates, 100, CLEAN, pairs).found.endswith("slow: b (rank 2, 3)")


@pytest.mark.parametrize(("ahead", "is_wrong"), [(0.9, False), (-1.5, True), (1.5, True)])
def test_clocks(ahead: float, is_wrong: bool) -> None:
    assert bool(wrong(verdicts.clock([Clock("b", ahead, 0.01)]))) == is_wrong
    assert not wrong(verdicts.clock([Clock("b", ahead, 1.0)]))  # a slow way proves nothing


def test_the_file_system() -> None:
    rate = Fact(value=1.0, source="test")
    storage = Storage(
        write_gigabytes_per_s=rate, read_gigabytes_per_s=rate, node_gigabytes_per_s=rate,
        sha256_gigabytes_per_s=rate,
    )  # fmt: skip
    fast, slow = Files(8 * FILE_BYTES / 1e9, 0.1, "", 0), Files(80 * FILE_BYTES / 1e9, 0.1, "", 0)
    # Four nodes share 1 GB/s: each may expect a quarter, which is two files in eight times one file's time.
    assert not wrong(verdicts.file_system([fast] * 8, CLEAN, storage, is_alone=False))
    assert wrong(verdicts.file_system([fast] * 7 + [slow], CLEAN, storage, is_alone=False))
    assert wrong(
        verdicts.file_system(
            [fast] * 7 + [Files(0, 0, "cannot write /x: Read-only file system", 7)], CLEAN, storage, False
        )
    ) == ["rank 7 on d cannot write /x: Read-only file system"]


def test_the_node_without_the_shared_folder_is_named() -> None:
    """Each rank reads a file of the next host; only node b's own files, and what b sees, are missing."""
    files = [
        Files(0.1, 0.0, "does not see it" if {HOSTS[r], HOSTS[(r + 2) % 8]} & {"b"} else "", (r + 2) % 8)
        for r in range(8)
    ]
    assert wrong(verdicts.file_system(files, CLEAN, None, is_alone=False)) == [
        "rank 0 on a does not see it; 3 ranks more; all involve b"
    ]


def test_what_is_wrong_stands_first() -> None:
    lines = verdicts.table(
        [verdicts.Finding("device", "GPU", "", "ok"), verdicts.Finding("clocks", "b is +3 s", "", "wrong")]
    ).splitlines()
    assert lines[0].startswith("wrong") and lines[-1] == "preflight: 1 wrong"


def test_frontier_states_all_of_its_rates() -> None:
    assert CONFIG.machine("frontier").storage is not None
