"""Products on a processor: the formulas by hand, a small measurement, and what the shipped one says."""

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowband.bench import products as bench
from lowband.cost.products import ONE, Tile, packed_s, roofline_s, tiled_flops
from lowband.errors import UserError
from lowband.evidence.validation.products import METHODS, compare, errors
from tests.checkout import REFERENCE

SHIPPED = REFERENCE / "products" / "products.csv"
SIDE = st.integers(1, 300)


@given(SIDE, SIDE, SIDE, st.integers(1, 32), st.integers(1, 32))
def test_whole_tiles(rows: int, columns: int, inner: int, high: int, wide: int) -> None:
    tile = Tile(high, wide)
    found, exact = tiled_flops(rows, columns, inner, tile), 2 * rows * columns * inner
    assert tiled_flops(rows, columns, inner, ONE) == exact <= found
    assert found == tiled_flops(-(-rows // high) * high, -(-columns // wide) * wide, inner)
    assert found <= tiled_flops(rows + 1, columns, inner, tile)


def test_times_by_hand() -> None:
    assert roofline_s(4e9, 1e9, 1e12, 1e11, 1e-6) == pytest.approx(0.010001)
    assert roofline_s(4e10, 1e9, 1e12, 1e11, 1e-6) == pytest.approx(0.040001)
    assert packed_s(4e9, 0.01, 1e12, 1e-6) == pytest.approx(0.014001)


def timings(slow: float = 1.0) -> pd.DataFrame:
    """A device of 1 GFLOP/s that copies 4e9 bytes a second and takes 1 us a call."""
    rows: list[tuple[str, int, int, int, float]] = [
        ("fixed", 1, 1, 1, 1e-6),
        ("copy", 1, 1000, 0, 1e-6), ("copy", 1, 10**6, 0, 1e-3),
        ("peak", 100, 100, 100, 2e-3 + 3e-5 + 1e-6),
        ("few rows", 3, 50, 20, slow * (2 * 3 * 50 * 20 / 1e9 + (60 + 1000 + 150) * 1e-9 + 1e-6)),
        ("few rows", 1, 50, 20, slow * (2 * 50 * 20 / 1e9 + 1e-6)),
    ]  # fmt: skip
    found = [(*row[:4], number, row[4] * (1 + number), "core", 4, 8) for row in rows for number in (1, 0)]
    return pd.DataFrame(found, columns=bench.Timing._fields)


def test_predictions_by_hand() -> None:
    """The least of two rounds counts; unfilled tiles of 4 x 8 take 4 rows and 56 columns."""
    found = compare(timings()).set_index("rows")
    assert found["packing"][3] == pytest.approx(found["measured_s"][3], rel=1e-6)
    tiled = (2 * 4 * 56 * 20 - 2 * 3 * 50 * 20) / 1e9
    assert found["tiles"][3] == pytest.approx(found["measured_s"][3] + tiled, rel=1e-6)
    for name in METHODS:  # a vector is not packed
        assert found[name][1] == pytest.approx(found["measured_s"][1], rel=0.03)
    off = errors(compare(timings(slow=2))).set_index("kind")
    assert off["packing_mean"]["all"] == pytest.approx(50, abs=1)
    assert off["shapes"]["all"] == 2


def test_a_short_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "PEAK", 128)
    monkeypatch.setattr(bench, "SHAPES", [bench.Shape("square", n, n, n) for n in (16, 64)])
    found = pd.DataFrame(bench.bench(tmp_path))
    assert len(found) == 2 * (len(bench.FACTS) + 2)
    assert (found["time_s"] > 0).all()
    assert (compare(found)[list(METHODS)] > 0).all().all()


def test_an_unknown_processor_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "TILES", {"Z80": Tile(1, 1)})
    with pytest.raises(UserError, match=r"the tile of OpenBLAS on .* is not known"):
        bench.bench(tmp_path)


def test_copies_explain_what_the_roofline_does_not_and_tiles_nothing_more() -> None:
    """What docs/predictor-errors.md says of the shipped measurement."""
    off = errors(compare(pd.read_csv(SHIPPED))).set_index("kind").loc["all"]
    assert off["shapes"] == 100 == len({*bench.SHAPES})
    assert off["roofline_mean"] > 2 * off["packing_mean"]
    assert off["packing_mean"] - 1 < off["tiles_mean"] < off["packing_mean"] + 1.5
    assert off["packing_mean"] < 13
