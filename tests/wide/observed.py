"""What a training shows, and how far two of them are apart.

Gradients are seen by the norms of each whole parameter in each step: weights alone would hide a wrong one
behind a small step.
"""

import math
from dataclasses import dataclass, field

import torch

LEAST = 1e-2  # values below this share of a parameter's, or of the whole gradient, are measured by it


@dataclass
class Observed:
    """Of one rank."""

    losses: list[torch.Tensor] = field(default_factory=list)  # of every forward, in order
    gradients: list[dict[str, float]] = field(default_factory=list)  # norms by step and parameter
    clipped: list[float] = field(default_factory=list)  # the norm that clipping returned
    tokens: list[torch.Tensor] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)  # on rank 0


def largest(ranks: list[Observed], expected: list[Observed]) -> tuple[float, str]:
    """The largest relative difference, and where it is."""
    found: list[tuple[float, str]] = [(0.0, "")]

    def numbers(where: str, got: list[float], want: list[float], scale: float = LEAST) -> None:
        if len(got) != len(want):
            found.append((math.inf, f"{where}: {len(got)} in place of {len(want)}"))
        for i, (a, b) in enumerate(zip(got, want, strict=False)):
            off = abs(a - b) / max(abs(b), scale)
            found.append((math.inf if math.isnan(off) else off, f"{where} {i}"))

    for rank, (got, want) in enumerate(zip(ranks, expected, strict=True)):
        numbers(f"loss of rank {rank}", [float(v) for v in got.losses], [float(v) for v in want.losses])
        numbers(f"norm that clipping returned on rank {rank}", got.clipped, want.clipped)
        for step, (a, b) in enumerate(zip(got.gradients, want.gradients, strict=True)):
            whole = sum(norm**2 for norm in b.values()) ** 0.5
            if a.keys() != b.keys():
                found.append((math.inf, f"gradients of {sorted(a.keys() ^ b.keys())[:3]}"))
            else:
                scale = max(LEAST * whole, 1e-12)
                for name in b:
                    numbers(f"gradient of {name} in step {step}, item", [a[name]], [b[name]], scale)
        same = [torch.equal(a, b) for a, b in zip(got.tokens, want.tokens, strict=True)]
        if not all(same):
            found.append((math.inf, f"tokens of rank {rank}"))
    for number, (a, b) in enumerate(zip(ranks[0].states, expected[0].states, strict=True)):
        if a.keys() != b.keys():
            found.append((math.inf, f"names of state {number}: {sorted(a.keys() ^ b.keys())[:3]}"))
        for name in a.keys() & b.keys():
            found.append((_apart(a[name], b[name]), f"state {number}, {name}"))
    return max(found, key=lambda each: each[0])


def _apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference over the largest value; infinite unless all values are finite."""
    if got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    got, want = got.double(), want.double()
    off = float((got - want).abs().max() / want.abs().max().clamp(min=LEAST))
    return math.inf if math.isnan(off) else off
