"""Named schedules against the lists of torch.distributed.pipelining, wherever it has the schedule and accepts
the numbers. Its lists are private: they are read from schedules that are built and never run."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from lowband.spec.schedule import Action
from lowband.spec.schedules import lists

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")

KINDS = {
    pipelining.FORWARD: "forward",
    pipelining.FULL_BACKWARD: "backward",
    pipelining.BACKWARD_INPUT: "input",
    pipelining.BACKWARD_WEIGHT: "weight",
}


def stage(index: int, ranks: int, stages: int) -> Any:
    return SimpleNamespace(
        stage_index=index, num_stages=stages, group_size=ranks, group_rank=0, has_backward=True,
        is_first=index == 0, is_last=index == stages - 1, submod=None, device="cpu",
    )  # fmt: skip


def of_torch(name: str, ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    """Raises ValueError where torch refuses the numbers."""
    local = [stage(i * ranks, ranks, ranks * chunks) for i in range(chunks)]
    takes_one = issubclass(kind := getattr(pipelining, name), pipelining.PipelineScheduleSingle)
    schedule = kind(local[0] if takes_one else local, micro_batches, loss_fn=lambda *_: None)
    order = schedule._get_pipeline_order() if takes_one else schedule.pipeline_order
    # Waits are None; a forward and the backward that runs beside it are one action with two inside.
    actions = [
        [a for slot in order[rank] if slot for a in slot.sub_actions or [slot]] for rank in range(ranks)
    ]
    return [
        [
            Action(KINDS[a.computation_type], a.stage_index, a.microbatch_index)
            for a in of_rank
            if a.computation_type in KINDS  # what is left is the reduction of gradients
        ]
        for of_rank in actions
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "chunks", "refused"),
    [
        ("gpipe", "ScheduleGPipe", 1, 0),
        ("1f1b", "Schedule1F1B", 1, 28),  # fewer micro-batches than ranks
        ("interleaved", "ScheduleInterleaved1F1B", 2, 22),  # they do not divide into rounds
        ("interleaved", "ScheduleInterleaved1F1B", 3, 22),
        ("breadth", "ScheduleLoopedBFS", 1, 0),
        ("breadth", "ScheduleLoopedBFS", 3, 0),
        ("zb-v", "ScheduleZBVZeroBubble", 2, 0),
        ("dualpipe-v", "ScheduleDualPipeV", 2, 64),  # fewer micro-batches than stages
    ],
)
def test_lists_are_those_of_torch(ours: str, theirs: str, chunks: int, refused: int) -> None:
    refusals = 0
    for ranks, micro_batches in product(range(1, 9), range(1, 17)):
        try:
            expected = of_torch(theirs, ranks, micro_batches, chunks)
        except ValueError:
            refusals += 1
            continue
        if ours == "breadth":
            # torch computes the backwards of a stage from the last micro-batch to the first; our engine sums
            # gradients from the first to the last, as depth-first accumulation does.
            last = micro_batches - 1
            expected = [
                [a if a.kind == "forward" else a._replace(micro_batch=last - a.micro_batch) for a in of_rank]
                for of_rank in expected
            ]
        if ours == "1f1b":
            # The list that torch 2.13 gives for the last rank starts with micro-batch 1; what it runs does
            # not.
            assert expected[-1][0] == Action("forward", ranks - 1, 1)
            expected[-1] = [
                a._replace(micro_batch=a.micro_batch - 1) if a.kind == "forward" else a for a in expected[-1]
            ]
        assert lists(ours, ranks, micro_batches, chunks) == expected, (ranks, micro_batches)
    assert refusals == refused
