"""Steps of a batch of many lengths on a box's links and paced ranks (`lowband box lengths`)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lowband.box import links
from lowband.box.layout import Layout
from lowband.box.network import enter_place
from lowband.predict.search.lengths_tasks import Task, sent_bytes
from lowband.run import by_length
from lowband.run.on_ranks import on_ranks
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec

DTYPE = "bf16"


class Row(NamedTuple):
    """One step of one way to spend the batch.

    tokens, computed_tokens: of the batch, and with padding; tokens_per_s: of the batch
    predicted_s: without the reduction of gradients, which is the same for all
    sent_bytes, closed_form_bytes: along context by all ranks, counted and by cost/context.py
    """

    provenance: str
    cluster: str
    model: str
    ranks: int
    sequences: int
    way: str
    step: int
    step_s: float
    predicted_s: float
    tokens: int
    computed_tokens: int
    tokens_per_s: float
    sent_bytes: float
    closed_form_bytes: float


def measure(
    machine: Machine,
    model: ModelSpec,
    batch: Sequence[int],
    given: Mapping[str, Sequence[Task]],
    predicted_s: Mapping[str, float],
    ranks: int,
    steps: int,
) -> list[Row]:
    """A row per way and step, after one that is not counted; in this process's own network.

    given, predicted_s: by way
    """
    assert machine.box is not None
    layout = Layout.of(machine, ranks)
    links.network_up(layout)
    flop_per_s = machine.box.tflops * 1e12 / machine.box.scale
    found = on_ranks(
        ranks, by_length.train, model, batch, given, machine.sizes, DTYPE, 1 + steps, flop_per_s,
        time_limit_s=300 + 10 * (1 + steps) * sum(predicted_s.values()),
        enter=lambda rank: enter_place(layout.place(rank)),
    )  # fmt: skip
    rows = []
    for way, tasks in given.items():
        sent = sum(sent_bytes(model, tasks, machine.sizes, DTYPE).values())
        for step in range(1, 1 + steps):
            of_ranks = [of_rank[way][step] for of_rank in found]
            step_s = max(one.seconds for one in of_ranks)
            counted = sum(sum(one.sent.values()) for one in of_ranks)
            rows.append(
                Row(
                    "measured", machine.name, model.name, ranks, len(batch), way, step, step_s,
                    predicted_s[way], sum(batch), sum(task.tokens for task in tasks), sum(batch) / step_s,
                    counted, sent,
                )
            )  # fmt: skip
    return rows
