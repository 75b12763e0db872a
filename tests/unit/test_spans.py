"""Spans are the masks that documents, windows and a causal mask make, both ways round."""

import random

import pytest
import torch

from lowband.errors import UserError
from lowband.kernels.spans import bounded, numbered, of_documents, spans


def seen(
    queries: list[int], keys: list[int], is_causal: bool, window: tuple[int | None, int | None]
) -> torch.Tensor:
    """[Tq, Tk] bool, key by key."""
    mask = torch.zeros(sum(queries), sum(keys), dtype=torch.bool)
    first_query = first_key = 0
    for some, others in zip(queries, keys, strict=True):
        for i in range(some):
            own = i + others - some  # the last query's own key is the last key
            for j in range(others):
                is_near = (window[0] is None or j >= own - window[0]) and (
                    window[1] is None or j <= own + window[1]
                )
                mask[first_query + i, first_key + j] = is_near and not (is_causal and j > own)
        first_query, first_key = first_query + some, first_key + others
    return mask


@pytest.mark.parametrize("seed", range(200))
def test_spans_are_the_masks(seed: int) -> None:
    draw = random.Random(seed)
    documents = draw.randint(1, 4)
    queries, keys = ([draw.randint(0, 7) for _ in range(documents)] for _ in range(2))
    is_causal = draw.random() < 0.5
    window = draw.choice([None, 0, 1, 3, 9]), draw.choice([None, 0, 2, 8])
    found = spans([queries], [keys], is_causal, window)
    expected = seen(queries, keys, is_causal, window if not is_causal else (window[0], None))
    assert torch.equal(found.mask()[0], expected)
    first, end = found.of_keys[0].unsqueeze(-1)
    each = torch.arange(sum(queries))
    assert torch.equal((each >= first) & (each < end), expected.T)


def test_each_sequence_has_documents_of_its_own() -> None:
    both = spans([[3, 4], [6, 1]])
    for i, lengths in enumerate(([3, 4], [6, 1])):
        assert torch.equal(both.mask()[i], spans([lengths]).mask()[0])


def test_documents_by_their_numbers() -> None:
    """Of parts of a sequence, such as a rank's queries and the keys that came to it."""
    documents = torch.tensor([[7, 7, 7, 2, 9, 9], [4, 4, 4, 4, 4, -1]])
    numbers = numbered(documents)
    assert numbers is not None and numbers.tolist() == [[0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 0, 1]]
    assert numbered(torch.tensor([[7, 2, 7], [1, 1, 1]])) is None
    whole = of_documents(numbers, numbers, is_causal=True)
    assert [torch.equal(a, b) for a, b in zip(whole, spans([[3, 1, 2], [5, 1, 0]]), strict=True)] == [
        True
    ] * 2
    part = of_documents(numbers[:, 3:], numbers[:, [0, 1, 4, 5]], is_causal=False)
    expected = documents[:, 3:, None] == documents[:, None, [0, 1, 4, 5]]
    assert torch.equal(part.mask(), expected)


def test_lengths_that_do_not_belong_together_are_refused() -> None:
    for queries, keys, message in [
        ([[3], [4]], None, r"documents of \[\[3\], \[4\]\]"),
        ([], None, r"documents of \[\]"),
        ([[3, -1]], None, "documents of"),
        ([[3, 4]], [[7]], r"\[2\] documents of queries, \[1\] of keys"),
        ([[3]], [[3], [3]], r"\[1\] documents of queries, \[1, 1\] of keys"),
    ]:
        with pytest.raises(UserError, match=message):
            spans(queries, keys)
    with pytest.raises(UserError, match="window"):
        spans([[3]], window=(-1, 0))


@pytest.mark.parametrize(
    ("first", "end"),
    [
        ([0, 0], [1, 4]),  # more than 3 keys
        ([-1, 0], [1, 1]),
        ([2, 2], [1, 3]),  # ends before it begins
        ([1, 0], [1, 1]),  # moves back
        ([0, 0], [2, 1]),
    ],
)
def test_what_are_no_spans_is_refused(first: list[int], end: list[int]) -> None:
    with pytest.raises(UserError, match="queries whose keys are no spans"):
        bounded(torch.tensor([first]), torch.tensor([end]), 3)
