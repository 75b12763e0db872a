"""`lowband calibrate`: least squares within bounds."""

import shutil
from pathlib import Path

import pytest

from lowband.__main__ import main
from lowband.errors import UserError
from lowband.evidence.validation.fit import fit
from lowband.evidence.validation.tables import constants
from tests.checkout import CONFIG


def test_a_fit_inside_its_bounds_finds_the_files_values() -> None:
    """The values of selene-2022 were found by another search on the same two rows."""
    found = fit(CONFIG, "selene-2022")
    assert [one.place for one in found] == ["inside", "inside"]
    for one in found:
        assert one.within == pytest.approx(one.value, abs=0.002)
        assert one.within_held_out_error_percent == pytest.approx(one.held_out_error_percent, abs=0.1)


def test_every_shipped_constant_is_inside_its_bounds() -> None:
    """A fit that ends on a bound is a wrong model: it takes a mechanism with a source, not a wider bound."""
    places = constants(CONFIG)[["cluster", "stack", "constant", "place"]]
    beyond = places[places["place"].isin(["on a bound", "outside"])]
    assert beyond.empty, beyond.to_string()


def test_calibrate_passes_on_what_is_shipped(tmp_path: Path) -> None:
    assert main(["calibrate", "selene-2021", "--root", str(CONFIG.root), "--out", str(tmp_path)]) == 0
    assert "on a bound" not in (tmp_path / "within_bounds.csv").read_text()


@pytest.mark.parametrize(
    ("value", "bounds", "printed"),
    [
        (0.765, "{low: 0.3, high: 0.7", "0.7 (file: 0.765; 0.3 to 0.7: on a bound)"),
        (0.95, "{low: 0.3, high: 0.9", "0.765 (file: 0.95; 0.3 to 0.9: inside)"),
    ],
)
def test_calibrate_fails_beyond_a_bound(
    value: float, bounds: str, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the fit ends there, and where the file's own value lies there."""
    for folder in ("config", "slurm", "results/reported"):
        shutil.copytree(CONFIG.root / folder, tmp_path / folder)
    path = tmp_path / "slurm" / "selene-2021" / "machine.yaml"
    text = path.read_text()
    text = text.replace("memory_efficiency: {value: 0.765", f"memory_efficiency: {{value: {value}")
    path.write_text(text.replace("{low: 0.3, high: 0.9", bounds))
    assert main(["calibrate", "selene-2021", "--root", str(tmp_path)]) == 1
    assert f"selene-2021 device.memory_efficiency: {printed}" in capsys.readouterr().out


def test_a_cluster_without_fitted_constants_is_refused() -> None:
    with pytest.raises(UserError, match="no constant was fitted on 'dgx-h200'"):
        fit(CONFIG, "dgx-h200")
