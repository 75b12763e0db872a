"""Weights by name, compared."""

from collections.abc import Mapping

import torch


def assert_near(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, rtol: float, atol: float
) -> None:
    """The same names in the same order, and values as near as that."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
