"""`lowband calibrate`: least squares within bounds."""

from pathlib import Path

import pytest

from lowband.__main__ import main
from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.validation.fit import fit

CONFIG = Config(Path(__file__).parents[2])


def test_a_fit_inside_its_bounds_finds_the_files_values() -> None:
    """The values of selene-2022 were found by another search on the same two rows."""
    found = fit(CONFIG, "selene-2022")
    assert [one.place for one in found] == ["inside", "inside"]
    for one in found:
        assert one.within == pytest.approx(one.value, abs=0.002)
        assert one.within_held_out_error_percent == pytest.approx(one.held_out_error_percent, abs=0.1)


def test_a_fit_that_ends_on_a_bound_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "selene-2021", "--root", str(CONFIG.root), "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "selene-2021 device.memory_efficiency: 0.9 (file: 0.931; 0.22 to 0.9: on a bound)" in printed
    assert "on a bound" in (tmp_path / "within_bounds.csv").read_text()


def test_a_cluster_without_fitted_constants_is_refused() -> None:
    with pytest.raises(UserError, match="no constant was fitted on 'dgx-h200'"):
        fit(CONFIG, "dgx-h200")
