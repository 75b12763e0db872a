"""These tests make network namespaces with shaped links, some with Slurm in them. Where that is not possible
they are skipped, and say what is missing."""

import pytest

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
