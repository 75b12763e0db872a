"""What a command says that runs in the test's own process."""

import pytest

from lowband.__main__ import main


def printed_by(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What it prints; if it is refused, with 2, the one line that says why."""
    assert main([*arguments]) == code
    out, err = capsys.readouterr()
    if code != 2:
        return out
    assert err.endswith("\n")
    [line] = err.splitlines()
    return line
