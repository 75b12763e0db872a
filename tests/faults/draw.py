"""A fault, drawn from a seed: which one, in which run, when, and of which rank."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

SCHEMES = ("zero3", "zeropp", "hier3", "diloco-hier3")
STEPS, EVERY = 40, 4  # of a run; steps between checkpoints, and of replicas that meet seldom


@dataclass(frozen=True)
class Case:
    """The fault comes `delay_s` after `step` steps have been recorded; step 0: after the start."""

    seed: int
    kind: str
    scheme: str
    ranks: int
    step: int
    delay_s: float
    victim: int

    @property
    def rng(self) -> random.Random:
        """For what else the fault needs: the file to damage, the bit to flip."""
        return random.Random(f"damage {self.seed}")


def case(seed: int, kinds: Sequence[str]) -> Case:
    """Kinds take turns, so that any run of seeds has equally many of each; the rest is random."""
    rng = random.Random(seed)
    ranks = rng.choice([4, 8])
    step = rng.randrange(STEPS - 2)
    return Case(
        seed=seed,
        kind=kinds[seed % len(kinds)],
        scheme=rng.choice(SCHEMES),
        ranks=ranks,
        step=step,
        delay_s=rng.uniform(0, 0.05 if step else 1.0),
        victim=rng.randrange(ranks),
    )
