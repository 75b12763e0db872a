"""What a program shows, and the comparison of what the ranks show with what the one process does."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lowband.cost.bytes import sent_bytes
from tests.random.cases import Case

BOUND = 2e-5  # where the order of sums is free: a few roundings of fp32, through a few steps of SGD

State = dict[str, torch.Tensor]
Sent = dict[tuple[str, str, str], int]


@dataclass
class Observed:
    """Of one rank, in the order of the program."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    broken: list[bool] = field(default_factory=list)  # by BrokenBackward: whether it did raise
    refused: list[bool] = field(default_factory=list)  # by Clip and net, by Step and optimizer
    states: list[State] = field(default_factory=list)  # on rank 0: by State and net
    held: list[dict[str, int]] = field(
        default_factory=list
    )  # what should be free after a backward and is not
    sent: list[list[Sent]] = field(
        default_factory=list
    )  # bytes by net: of each Step of a plain case, of the whole program else
    units: list[list[int]] = field(default_factory=list)  # elements of each unit, by net


def exact_sum(ranks: list[Observed]) -> str:
    """One sum over the bits of all losses, norms and weights, and over all bytes sent."""
    total = hashlib.sha256()
    for part in _exact(ranks):
        total.update(part)
    return total.hexdigest()[:16]


def _exact(ranks: list[Observed]) -> Iterator[bytes]:
    for seen in ranks:
        yield repr([norm.hex() for norm in seen.norms]).encode()
        yield repr([[sorted(of_net.items()) for of_net in nets] for nets in seen.sent]).encode()
        named = [(name, value) for state in seen.states for name, value in sorted(state.items())]
        for name, value in [("loss", loss) for loss in seen.losses] + named:
            yield f"{name} {value.dtype} {tuple(value.shape)}".encode()
            yield value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def differences(case: Case, ranks: list[Observed], expected: list[Observed]) -> tuple[list[str], float]:
    """What is wrong, in words, and the largest difference of a loss or a weight."""
    wrong: list[str] = []
    largest = 0.0

    def compare(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        nonlocal largest
        if got.shape != want.shape or got.dtype != want.dtype:
            wrong.append(f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
            return
        same = (got == want) | (got.isnan() & want.isnan())  # a case may diverge
        if not same.all():
            off = (got.double() - want.double())[~same].abs().max().item()
            largest = max(largest, off)
            scale = max(1.0, want.double().abs().max().item())
            if case.is_exact or not off <= BOUND * scale:
                wrong.append(f"{what}: off by {off:.3g}")

    for rank, (got, want) in enumerate(zip(ranks, expected, strict=True)):
        for i, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
            compare(f"loss {i} of rank {rank}", a, b)
        for i, (a, b) in enumerate(zip(got.norms, want.norms, strict=True)):
            is_same = a == b or (math.isnan(a) and math.isnan(b))
            if not (is_same or abs(a - b) <= (1e-12 if case.is_exact else BOUND) * max(b, 1e-3)):
                wrong.append(f"norm {i} of rank {rank}: {a!r}, not {b!r}")
        if got.broken != want.broken:
            wrong.append(f"backward passes that raised on rank {rank}: {got.broken}, not {want.broken}")
        if got.refused != want.refused:
            wrong.append(f"norms and steps refused on rank {rank}: {got.refused}, not {want.refused}")
        if got.held:
            wrong.append(f"held after a backward on rank {rank}: {got.held[0]}")
        if case.collectives != "flat" and _of_all(got.sent) != _of_all(ranks[0].sent):
            wrong.append(f"rank {rank} sent other bytes than rank 0")
    for i, (a, b) in enumerate(zip(ranks[0].states, expected[0].states, strict=True)):
        if list(a) != list(b):
            wrong.append(f"names of state {i}: {list(a)}, not {list(b)}")
        else:
            for name, value in b.items():
                compare(f"state {i}, {name}", a[name], value)
    return wrong + _wrong_bytes(case, ranks), largest


def _of_all(sent: list[list[Sent]]) -> list[list[Sent]]:
    """Without what depends on which matrices a rank owns."""
    return [[{key: n for key, n in of_net.items() if not key[1].startswith("matrix_")} for of_net in nets]
            for nets in sent]  # fmt: skip


def _wrong_bytes(case: Case, ranks: list[Observed]) -> list[str]:
    """Steps after the first, in which no update has to be gathered yet, against the closed form."""
    if not case.is_plain:
        return []
    wrong = []
    for rank, observed in enumerate(ranks):
        [units] = observed.units
        closed = sent_bytes(
            units,
            case.nets[0].scheme,
            case.levels,
            case.compute_dtype,
            case.reduce_dtype,
            case.accumulation,
            "clip" in case.features,
            case.collectives,
            rank,
        )
        for i, [sent] in enumerate(observed.sent[1:-1]):
            if sent != closed:
                wrong.append(f"bytes of step {i + 1} on rank {rank}: {sent}, not {closed}")
    return wrong
