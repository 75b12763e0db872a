"""The time of a product on a GPU: FLOPs at one share of the peak and a fixed time, as measured on two."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import least_squares

from tests.checkout import CONFIG, REFERENCE

DEVICES = ["h100", "h200"]
PEAK, UNITS = 989e12, 132  # of either: FLOP/s in bf16, multiprocessors


def _products(device: str = "h100") -> pd.DataFrame:
    kernels = pd.read_csv(REFERENCE / device / "kernels.csv")
    return kernels[(kernels["part"] == "products") & (kernels["outcome"] == "ok")]


def _error(products: pd.DataFrame, ideal_s: np.ndarray) -> tuple[float, float]:
    """Mean relative error of ideal_s / share + fixed, with the best share and fixed time; that time in us."""
    measured = products["time_s"].to_numpy()

    def residuals(x: np.ndarray) -> np.ndarray:
        return (ideal_s / x[0] + x[1] * 1e-6) / measured - 1

    found = least_squares(residuals, [0.7, 5], x_scale=[0.1, 1])
    return float(np.abs(residuals(found.x)).mean()), float(found.x[1])


def test_the_fixed_time_of_a_kernel() -> None:
    found = [_error(p, p["flops"].to_numpy() / PEAK) for p in map(_products, DEVICES)]
    assert max(error for error, _ in found) < 0.04
    fixed_us = sum(us for _, us in found) / len(found)
    for name in ("dgx-h100", "dgx-a100", "dgx2", "selene-2021"):
        fact = CONFIG.machine(name).device.kernel_us
        assert fact is not None
        assert fact.value == pytest.approx(fixed_us, abs=0.05)


def test_waves_of_tiles_explain_no_more() -> None:
    """Wave quantization with tiles of 128 x 128: whole waves over all multiprocessors. So it is no term."""
    products = _products()
    tiles = np.ceil(products["rows"] / 128) * np.ceil(products["columns"] / 128)
    waves = np.ceil(tiles.to_numpy() / UNITS)
    quantized = waves * UNITS * 2 * 128 * 128 * products["inner"].to_numpy() / PEAK
    assert _error(products, quantized)[0] > _error(products, products["flops"].to_numpy() / PEAK)[0]
