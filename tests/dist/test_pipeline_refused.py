"""What a pipeline refuses, in one line on every rank, and how it ends where a rank fails."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import brief
import pytest
import torch
import torch.distributed as dist
from staged import batches, chain, loss_of
from torch import nn

import lowband
from lowband.engine.api import engine_of
from lowband.engine.transport import gloo
from lowband.errors import UserError
from lowband.run.launch import run_local
from lowband.run.on_ranks import on_ranks
from lowband.run.ranks import Rank
from lowband.spec.axes import Axes
from lowband.spec.schedule import Action
from lowband.spec.scheme import Scheme


def outcome(call) -> str:
    try:
        call()
    except (UserError, RuntimeError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


WAITING = [  # each waits for the other one's result
    [Action("backward", 0, 0), Action("forward", 0, 0)],
    [Action("forward", 1, 0), Action("backward", 1, 0)],
]
TWICE = nn.Linear(8, 8)
# by what the error says: changes of the arguments
REFUSED = {
    "the ranks of a schedule wait for each other: rank 0, before its backward of stage 0": {
        "schedule": WAITING,
        "micro_batches": 1,
    },
    "a schedule for 1 micro-batches, of 2": {
        "schedule": [of_rank[::-1] if rank == 0 else of_rank for rank, of_rank in enumerate(WAITING)],
        "micro_batches": 2,
    },
    "3 modules cannot be cut into 4 stages (allowed: a module or more for each stage)": {
        "chain": chain(1),
        "schedule": "zb-v",
    },
    "layers [6, 0] for 2 stages of 6 modules (allowed: 2 numbers of 1 or more whose sum is 6)": {
        "layers": [6, 0]
    },
    "layers [2, 3] for 2 stages of 6 modules": {"layers": [2, 3]},
    "unknown schedule '2f2b'": {"schedule": "2f2b"},
    "schedule '1f1b' with 2 chunks (allowed: 1 chunks)": {"chunks": 2},
    "schedule 'depth' with 2 ranks (allowed: 1 ranks)": {"schedule": "depth"},
    "schedule '1f1b' with 0 micro-batches": {"micro_batches": 0},
    "ranks [1] of the axis have no parameters": {"chain": [nn.Linear(8, 8), nn.Tanh()]},
    "module '3' is in stages 1 and 3, which are of one rank": {
        "chain": [nn.Embedding(11, 8), TWICE, nn.Linear(8, 8), TWICE],
        "schedule": "interleaved",
        "chunks": 2,
        "layers": [1, 1, 1, 1],
    },
    "no entry 'zero4'": {"scheme": "zero4"},
}


def refused() -> tuple[list[str], list]:
    topology, found = lowband.Topology({}, Axes(pipeline=2)), []
    for changes in REFUSED.values():
        given = {"chain": chain(4), "scheme": "zero3", "micro_batches": 3, **changes}
        found.append(outcome(lambda given=given: lowband.Pipeline(loss=loss_of, topology=topology, **given)))
    make = partial(lowband.Pipeline, loss=loss_of, scheme="zero3", topology=topology)
    found.append(outcome(lambda: make(chain(4), micro_batches=3 + topology.rank)))
    found.append(outcome(lambda: make(chain(4 + topology.rank), micro_batches=3)))
    found.append(outcome(lambda: lowband.Topology({}, Axes(pipeline=3))))
    pipe = make(chain(4), micro_batches=3)
    found.append(outcome(lambda: pipe.step(batches(0, 0, 2))))
    found.append(outcome(lambda: pipe(torch.zeros(1))))
    return found, engine_of(pipe).ledger.take()


def test_refusals_are_one_line_on_every_rank_before_anything_is_sent() -> None:
    (first, sent), (second, also_sent) = on_ranks(2, refused)
    assert first == second
    assert sent == also_sent == []
    assert all("\n" not in text and text.startswith("UserError: ") for text in first)
    said = iter(first)
    for text in REFUSED:
        assert text in next(said)
    assert "differs from rank 0 in micro-batches of a pipeline: 4, not 3" in next(said)
    assert "differs from rank 0 in modules of a pipeline" in next(said)
    assert "2 ranks are no multiple of tensor 1 x pipeline 3" in next(said)
    assert "pipeline 0: 2 micro-batches (allowed: the 3 that it was made for)" in next(said)
    assert "pipeline 0: a pipeline is not called (allowed: its step(micro_batches))" in next(said)


def of_other_axes() -> list[str]:
    """What lowband.shard refuses, too: replicas that context crosses; experts of another Topology."""
    spread, pipelines = lowband.Topology({}, Axes(expert=2)), lowband.Topology({}, Axes(context=2))
    apart = Scheme(name="s", weights="self", grads="self", optim="self", sync={"beyond": "self", "every": 2})
    experts = nn.Sequential(lowband.MixtureOfExperts(8, 8, lowband.Routing(experts=4, top_k=2)))
    lowband.spread_experts(experts, spread)
    rest = pipelines, 1, "depth"
    given = (chain(1), loss_of, apart, *rest), (experts, loss_of, "zero3", *rest)
    return [outcome(partial(lowband.Pipeline, *each)) for each in given]


def test_what_other_axes_refuse() -> None:
    for replicas, experts in on_ranks(2, of_other_axes):
        assert "context 2 crosses replicas, the groups of level 'self'" in replicas
        assert "lowband.Pipeline: its experts were spread over the axis of another Topology" in experts


def other_lengths(data: list) -> list:
    """The second micro-batch is longer than the first one."""
    return [(x.repeat(1, 1 + (i == 1)), y.repeat(1, 1 + (i == 1))) for i, (x, y) in enumerate(data)]


class Bad(nn.Module):
    """Fails where it has computed twice, or returns what cannot be handed on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.scale = how, 0, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> object:
        self.calls += 1
        if self.how == "raises" and self.calls == 2:
            raise ArithmeticError("no number\nof this kind")
        if self.how == "None":
            return x * self.scale, None
        return {"x": x} if self.how == "dict" else x * self.scale


def to_the_end(ranks: int, work: Callable[[], str]) -> list[str]:
    """What `work` says on each rank. A rank ends when it has said so, which closes its connections."""
    with tempfile.TemporaryDirectory() as folder:

        def rank_main(rank: Rank) -> None:
            torch.set_num_threads(1)  # those of the pytest process do not survive the fork
            where = {"init_method": rank.init_method, "rank": rank.rank, "world_size": rank.world}
            dist.init_process_group("gloo", **where)
            Path(folder, str(rank.rank)).write_text(work())
            os._exit(0)

        run_local(ranks, rank_main, 120)
        return [Path(folder, str(rank)).read_text() for rank in range(ranks)]


def failing(how: str) -> str:
    topology = lowband.Topology({}, Axes(pipeline=4))
    modules = [nn.Embedding(11, 8), Bad(how), nn.Linear(8, 8), nn.Linear(8, 11)]
    loss = (lambda logits, targets: logits) if how == "loss" else loss_of
    pipe, data = lowband.Pipeline(modules, loss, "zero3", topology, 3), batches(0, 0, 3)
    return outcome(lambda: pipe.step(other_lengths(data) if how == "lengths" else data))


@pytest.mark.parametrize(
    ("how", "who", "cause"),
    [
        ("raises", 1, "ArithmeticError: no number"),
        ("dict", 1, "stage 1 of a pipeline: its output is a dict (allowed: a tensor or a tuple of tensors"),
        ("None", 1, "its output is a tuple of Tensor, NoneType (allowed: a tensor or a tuple of tensors"),
        ("loss", 3, "UserError: a pipeline's loss is no loss"),
        ("lengths", 0, "micro-batch 1 leaves it as bfloat16[2, 10, 8], not bfloat16[2, 5, 8] as the first"),
    ],
)
def test_ranks_that_lose_one_that_failed_say_why(how: str, who: int, cause: str) -> None:
    found = to_the_end(4, partial(failing, how))
    assert cause in found.pop(who)
    for text in found:
        assert text.startswith("PeerLost: rank ")
        assert "\n" not in text
        assert f"before, rank {who} failed: " in text
        assert cause in text


def missing() -> str:
    """Rank 2 makes one step, and is there until rank 1 has missed it in the next one."""
    wait = gloo.wait

    def wait_less_for_rank_2(works: list, partner: int, name: str) -> None:
        wait([brief.Brief(work) for work in works] if partner == 2 else works, partner, name)

    topology = lowband.Topology({}, Axes(pipeline=3))
    pipe = lowband.Pipeline(chain(4), loss_of, "zero3", topology, 3)
    store, key = dist.distributed_c10d._get_default_store(), "missed"
    pipe.step(batches(0, 0, 3))
    gloo.wait = wait_less_for_rank_2
    if topology.rank == 2:
        store.wait([key])
        return ""
    text = outcome(lambda: pipe.step(batches(0, 0, 3)))
    store.set(key, "") if topology.rank == 1 else None
    return text


def test_a_rank_that_makes_no_step_is_missed_after_the_timeout() -> None:
    first, second, _ = to_the_end(3, missing)
    assert second.startswith(
        "PeerLost: rank 1 timed out waiting for rank 2 in the input's gradient 0 of stage"
    )
    assert "(step 2 of pipeline 0)" in second
    assert first.startswith("PeerLost: rank 0 lost its connection to rank 1 in ")
