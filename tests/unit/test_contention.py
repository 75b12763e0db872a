"""Closed forms of collectives against SimGrid, where it is installed: groups that share links, at once."""

from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.evidence.validation.contention import check, missing
from lowband.spec.stack import OURS
from tests.checkout import CONFIG

FRONTIER = CONFIG.machine("frontier")
PYTHON = "/usr/bin/python3"


@pytest.mark.skipif(bool(missing(PYTHON)), reason=missing(PYTHON))
@pytest.mark.parametrize(("cluster", "ranks"), [("frontier", 64), ("dgx2", 64), ("dgx-h100", 32)])
def test_simgrid_agrees(cluster: str, ranks: int) -> None:
    schemes = [CONFIG.scheme(name) for name in ("zero3", "zeropp", "hsdp")]
    machine = CONFIG.machine(cluster)
    stack = CONFIG.given_stack(None, machine)
    rows = check(PYTHON, machine, stack, CONFIG.model("gpt-20b"), schemes, ranks)
    assert {row["algorithm"] for row in rows} == {"hops", "flat ring"}
    for row in rows:
        assert row["simulated_s"] == pytest.approx(row["closed_form_s"], rel=1e-3), row


@pytest.mark.skipif(bool(missing(PYTHON)), reason=missing(PYTHON))
@pytest.mark.parametrize("ranks", [16, 24])  # two replicas, and three
def test_simgrid_agrees_on_a_swap(ranks: int) -> None:
    schemes = [CONFIG.scheme("decentralised-adam")]
    rows = check(PYTHON, FRONTIER, OURS, CONFIG.model("gpt-20b"), schemes, ranks)
    [row] = [row for row in rows if row["collective"] == "sync_swap"]
    assert row["simulated_s"] == pytest.approx(row["closed_form_s"], rel=1e-3)


def test_a_python_without_simgrid_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="/no/python: No such file or directory"):
        check("/no/python", FRONTIER, OURS, CONFIG.model("gpt-20b"), [], 16)


def test_a_python_that_has_no_simgrid(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert missing(str(python)) == f"{python} has no simgrid (Debian: python3-simgrid)"
    with pytest.raises(UserError, match="has no simgrid"):
        check(str(python), FRONTIER, OURS, CONFIG.model("gpt-20b"), [], 16)
    python.write_text("#!/bin/sh\nexit 0\n")
    assert missing(str(python)) == ""
    for ranks, says in ((1, "1 ranks send nothing"), (10**12, "a simulation of 1000000000000 ranks")):
        with pytest.raises(UserError, match=f"{says} .allowed: 2 to 4,096"):
            check(str(python), FRONTIER, OURS, CONFIG.model("gpt-20b"), [], ranks)
