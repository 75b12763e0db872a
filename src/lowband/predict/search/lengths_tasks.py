"""Which sequence of a batch goes to which ranks, one by one, in three ways to spend the same ranks:

plan        what `lowband plan --lengths` finds: zones, groups or one degree, with a way for each
one degree  the best single number of ranks for all sequences of the batch
padded      the same with every sequence as long as the longest
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lowband.cost.context import parts
from lowband.predict.search.lengths import LengthPlan, best_of_one_degree, fastest
from lowband.predict.search.lengths_step import Costs
from lowband.spec.context import Layout, ways_of
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec


class Task(NamedTuple):
    """A sequence of the batch on ranks `first` to `first + degree - 1`. tokens: with padding"""

    sequence: int
    tokens: int
    degree: int
    first: int
    way: str

    def has(self, rank: int) -> bool:
        return self.first <= rank < self.first + self.degree


def plans(batch: Sequence[int], ranks: int, costs: Costs, degrees: Sequence[int]) -> dict[str, LengthPlan]:
    """By name. Raises DoesNotFit for a sequence that has no room."""
    longest = [max(batch)] * len(batch)
    return {
        "plan": fastest(batch, ranks, costs, degrees),
        "one degree": best_of_one_degree(batch, ranks, costs, degrees),
        "padded": best_of_one_degree(longest, ranks, costs, degrees),
    }


def tasks(batch: Sequence[int], plan: LengthPlan, costs: Costs, is_padded: bool) -> list[Task]:
    """The plan's sequences in the order in which ranks compute theirs: of a micro-step the widest first."""
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    for sequence, length in enumerate(batch):
        waiting[max(batch) if is_padded else length].append(sequence)
    found = []
    for step in plan.steps:
        for one in sorted(step.placed, key=lambda one: -one.degree):
            tokens = max(one.length, one.degree)  # a token a rank at least
            way = costs.way(one.length, one.degree)
            found.append(Task(waiting[one.length].pop(0), tokens, one.degree, one.first, way))
    return found


def sent_bytes(
    model: ModelSpec, given: Sequence[Task], sizes: Mapping[str, int], dtype: str
) -> Counter[tuple[str, str]]:
    """Bytes that all ranks send along context in a step, in closed form: (level, row) -> bytes."""
    total: Counter[tuple[str, str]] = Counter()
    for task in given:
        if task.degree == 1:
            continue
        levels = Levels.fit(sizes, task.degree)
        layout = Layout(levels, ways_of(task.way, levels), zigzag=True)
        for part in parts(model, 1, layout, dtype):
            of_task = part.bytes * layout.padded(task.tokens) * model.layers
            total[part.hop.level, part.row.name] += int(of_task)
    return Counter({key: sent for key, sent in total.items() if sent})
