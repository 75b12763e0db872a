"""Functions that are said to work element by element do: of two parts they give the parts of the whole's."""

from collections.abc import Callable

import pytest
import torch

from lowband.engine.units.by_element import Kind, kind_of

WHOLE = torch.linspace(0.1, 0.9, 12)
OTHER = torch.linspace(0.7, 0.2, 12)


def methods(kind: Kind) -> list[str]:
    named = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
    return [name for name, method in named.items() if callable(method) and kind_of(method) is kind]


def results(name: str, others: int) -> list[torch.Tensor] | None:
    """On the whole and on two parts that make it up, beside as many others; None if it takes no such."""
    found = []
    for part in (slice(None), slice(0, 5), slice(5, None)):
        try:
            found.append(getattr(WHOLE[part].clone(), name)(*[OTHER[part].clone()] * others))
        except (TypeError, RuntimeError, AssertionError):
            return None
    return found


@pytest.mark.parametrize("others", [0, 1, 2])
def test_elements_of_a_part_are_those_of_the_whole(others: int) -> None:
    tried = 0
    for name in methods(Kind.ELEMENT):
        found = results(name, others)
        if found is not None and isinstance(found[0], torch.Tensor):
            whole, *parts = found
            torch.testing.assert_close(torch.cat(parts), whole, equal_nan=True, msg=name)
            tried += 1
    assert tried > (100, 60, 3)[others]


def test_moves_keep_all_values() -> None:
    for name in set(methods(Kind.MOVE)) | set(methods(Kind.COPY)):
        found = results(name, 0)
        if found is not None and isinstance(found[0], torch.Tensor):
            assert [each.numel() for each in found] == [12, 5, 7], name


OF_TORCH = (
    "norm sum nansum mean std var std_mean median quantile topk max aminmax argmax logsumexp count_nonzero "
    "cumsum sort matmul dot equal allclose _foreach_norm _foreach_max softmax flip dist"
)
OF_TENSORS = "__matmul__ item backward prod any all multinomial"
OF_LAYERS = "linear mse_loss normalize embedding layer_norm cosine_similarity"


@pytest.mark.parametrize(
    "function",
    [
        *(getattr(torch, name) for name in OF_TORCH.split()),
        *(getattr(torch.Tensor, name) for name in OF_TENSORS.split()),
        *(getattr(torch.nn.functional, name) for name in OF_LAYERS.split()),
        torch.linalg.vector_norm,
        torch.nn.init.orthogonal_,
    ],
    ids=lambda function: function.__name__,
)
def test_what_mixes_elements_is_known(function: Callable[..., object]) -> None:
    assert kind_of(function) is Kind.MIX
