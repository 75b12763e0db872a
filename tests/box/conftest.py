"""These tests make network namespaces with shaped links, some with Slurm in them. Where that is not possible
they are skipped, and say what is missing."""

from pathlib import Path

import pytest
from commands import copy_tree

from lowband.box import links, slurm


@pytest.fixture(scope="session")
def shaped() -> None:
    reason = links.missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def with_slurm(shaped: None) -> None:
    reason = slurm.missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_tree(tmp_path)
