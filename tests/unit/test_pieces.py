"""Where what partners exchange is cut: all of it, in order, and never more at once than the limit."""

import pytest

from lowband.spec.partition import ALIGN, AT_ONCE, pieces


@pytest.mark.parametrize("partners", [1, 3, 7, 3071])
@pytest.mark.parametrize("numel", [1, ALIGN, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 5])
def test_pieces_cover_a_row_in_order_within_the_limit(numel: int, partners: int) -> None:
    cuts = pieces(numel, partners)
    assert [cuts[0][0], *(stop for _, stop in cuts)] == [*(start for start, _ in cuts), numel]
    assert all(start < stop and start % ALIGN == 0 for start, stop in cuts)
    longest = max(stop - start for start, stop in cuts)
    assert longest * partners < AT_ONCE + partners * ALIGN  # cuts are at multiples of ALIGN


def test_a_row_without_elements_is_one_piece_without_any() -> None:
    assert pieces(0, 3) == [(0, 0)]
