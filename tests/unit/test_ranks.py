"""A launcher's variables: a rank, or one line that names the variable at fault."""

import pytest

from lowband.errors import UserError
from lowband.run.ranks import Rank, from_environment
from tests.refused import refusal

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_a_rank_of_torchrun() -> None:
    assert from_environment(4) == Rank(1, 4, 1, "env://")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["", "x", "-1", "1.0", "\u00b2", "9" * 5000, "1\n2"])
def test_a_number_that_is_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert refusal(from_environment, 4).startswith(f"{name}: is '")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(UserError, match=f"{name}.*is not set|is not set"):
        from_environment(4)


def test_a_rank_beyond_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UserError, match=r"^RANK: 4 of 4 ranks \(allowed: 0 to 3\)$"):
        from_environment(4)
