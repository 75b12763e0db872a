"""Ranks that are not numbered host after host are refused; any other placement is accepted."""

import pytest

from lowband.engine.transport.hosts import check_hosts
from lowband.spec.mesh import Levels
from tests.refused import refusal

INNER = {"package": 2, "node": 4}


def hosts(text: str) -> list[str]:
    return [f"host-{letter}" for letter in text]


@pytest.mark.parametrize(
    ("names", "inner"),
    [
        ("aaaaaaaa", INNER),  # one host simulates two nodes
        ("aaaabbbb", INNER),
        ("aabbccdd", INNER),  # a node of two hosts, as in a rack
        ("aaaabb", {"package": 2}),  # hosts of different sizes
        ("aab", {}),
        ("abcd", INNER),
    ],
)
def test_host_after_host_is_accepted(names: str, inner: dict[str, int]) -> None:
    check_hosts(hosts(names), Levels.fit(inner, len(names)))


@pytest.mark.parametrize(
    ("names", "inner", "words"),
    [
        ("abababab", INNER, "rank 0 runs on host-a, rank 1 on host-b"),
        ("aabbaabb", INNER, "rank 0 runs on host-a, rank 2 on host-b"),
        ("aaabbbbb", INNER, "level 'package' reaches beyond host host-a"),
        ("aaaaaabb", INNER, "level 'node' reaches beyond host host-a, which holds ranks 0 to 5"),
    ],
)
def test_another_numbering_is_refused(names: str, inner: dict[str, int], words: str) -> None:
    assert words in refusal(lambda: check_hosts(hosts(names), Levels.fit(inner, len(names))))
