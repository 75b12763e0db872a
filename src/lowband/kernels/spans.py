"""Which keys each query sees, as intervals: documents, sliding windows, and both with a causal mask.

A query sees the keys from its first one to its last one, and from one query to the next neither moves back.
So the queries that see a key are an interval too, and a block of queries, or of keys, needs no mask but at
its borders. Two numbers a query say what a mask of queries times keys would.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lowband.errors import UserError

Window = tuple[int | None, int | None]


class Spans(NamedTuple):
    """The two ends of each interval: its first position, and the one after its last. Equal: it is empty.

    of_queries: [B, 2, Tq] int32, contiguous: the keys that each query sees; B is 1 if all sequences are alike
    of_keys:    [B, 2, Tk] int32, contiguous: the queries that see each key
    """

    of_queries: torch.Tensor
    of_keys: torch.Tensor

    def to(self, device: torch.device | str) -> "Spans":
        return Spans(self.of_queries.to(device), self.of_keys.to(device))

    def mask(self) -> torch.Tensor:
        """[B, Tq, Tk] bool: whether the query sees the key."""
        first, end = (x.unsqueeze(-1) for x in self.of_queries.unbind(1))
        keys = torch.arange(self.of_keys.shape[2], device=first.device)
        return (keys >= first) & (keys < end)


def spans(
    queries: Sequence[Sequence[int]],
    keys: Sequence[Sequence[int]] | None = None,
    is_causal: bool = True,
    window: Window = (None, None),
) -> Spans:
    """On the CPU: each query sees the keys of its document, of these at most those of a window.

    queries: of each sequence the lengths of its documents, one after another; one sequence stands for all
    keys:    the same of the keys, if they are not as many
    window:  how many keys before and after its own a query sees; None: all. With is_causal, none after

    In a document the last query's own key is the last key (as in FlashAttention since 2.1).
    Raises UserError for lengths that do not belong together and for a window below 0.
    """
    keys = queries if keys is None else keys
    for where, lengths in (("queries", queries), ("keys", keys)):
        if len({sum(each) for each in lengths}) != 1 or min(map(min, filter(len, lengths)), default=0) < 0:
            raise UserError(
                f"documents of {[list(each) for each in lengths]}", where=f"spans, {where}",
                allowed="sequences of one length, each a list of its documents' lengths",
            )  # fmt: skip
    if [*map(len, queries)] != [*map(len, keys)]:
        raise UserError(
            f"{[*map(len, queries)]} documents of queries, {[*map(len, keys)]} of keys", where="spans",
            allowed="as many of both in each sequence",
        )  # fmt: skip
    if any(side is not None and side < 0 for side in window):
        raise UserError(f"window {window}", where="spans", allowed="numbers of keys from 0 on, or None")
    left, right = window
    right = 0 if is_causal else right
    bounds = [_of_sequence(*lengths, left, right) for lengths in zip(queries, keys, strict=True)]
    first, end = (torch.stack(each) for each in zip(*bounds, strict=True))
    return bounded(first, end, sum(keys[0]))


def bounded(first: torch.Tensor, end: torch.Tensor, keys: int) -> Spans:
    """Spans of any kind, such as a prefix that all its tokens see whole. It reads the values: once a batch.

    first, end: [B, Tq] integers: the first key that each query sees, and the one after the last
    Raises UserError unless each is a span of `keys` keys and neither end moves back.
    """
    ends = torch.stack([first, end], dim=1).int()
    is_span = (ends[:, :1] >= 0) & (ends[:, :1] <= ends[:, 1:]) & (ends[:, 1:] <= keys)
    if not (is_span.all() and (ends.diff(dim=2) >= 0).all()):
        raise UserError(
            "queries whose keys are no spans, or whose spans move back", where="spans",
            allowed=f"0 <= first <= end <= {keys}, and neither lower than the query's before",
        )  # fmt: skip
    return _both_ways(ends, keys)


def of_documents(queries: torch.Tensor, keys: torch.Tensor, is_causal: bool) -> Spans:
    """Each query sees its document's keys; with is_causal, where both are the same tokens, up to its own.

    queries, keys: [B, Tq] and [B, Tk], as `numbered` numbers documents; of parts of a sequence, in its order
    """
    keys, queries = keys.contiguous(), queries.contiguous()
    first, end = (torch.searchsorted(keys, queries, right=right) for right in (False, True))
    if is_causal:
        end = torch.minimum(end, torch.arange(1, keys.shape[1] + 1, device=keys.device))
    return _both_ways(torch.stack([first, end], dim=1).int(), keys.shape[1])


def numbered(documents: torch.Tensor) -> torch.Tensor | None:
    """Documents [B, T] by the order in which they follow each other; None if one is in several places."""
    begins = documents.diff(dim=1, prepend=documents[:, :1]) != 0
    different = documents.sort(dim=1).values.diff(dim=1) != 0
    return begins.cumsum(1) if torch.equal(begins.sum(1), different.sum(1)) else None


def _both_ways(ends: torch.Tensor, keys: int) -> Spans:
    """From the spans of queries, [B, 2, Tq] int32, those of keys."""
    every = torch.arange(keys, dtype=torch.int32, device=ends.device).expand(len(ends), -1).contiguous()
    # Those from the first whose end is after the key, to the last whose first is not after it.
    seeing = [torch.searchsorted(side.contiguous(), every, right=True) for side in (ends[:, 1], ends[:, 0])]
    return Spans(ends.contiguous(), torch.stack(seeing, dim=1).int())


def _of_sequence(
    queries: Sequence[int], keys: Sequence[int], left: int | None, right: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ends [Tq] for the queries of a sequence of documents."""
    lengths, theirs = torch.tensor(queries), torch.tensor(keys)
    stop = theirs.cumsum(0)  # of each document's keys
    # Of each query: its document's first key and end, and its own key, counted from the document's end.
    start_T, stop_T = ((x).repeat_interleave(lengths) for x in (stop - theirs, stop))
    own = stop_T + torch.arange(len(stop_T)) - lengths.cumsum(0).repeat_interleave(lengths)
    first = start_T if left is None else (own - left).clamp(min=start_T, max=stop_T)
    end = stop_T if right is None else (own + right + 1).clamp(min=start_T, max=stop_T)
    return torch.minimum(first, end), end
