"""Updates one step late equal those of a process that delays them by hand; what they cost, save and refuse.

What is said of tiers without: test_tiers.py.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from test_parity import CLIP, SPEC, optimizer_of, part_of_batch, stepped
from test_tiers import DTYPE, INNER, NAN_STEP, adamw, placed, resumed, saved, step, trained

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.engine.units import late as late_steps
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from tests.refused import answer

STEPS = 4


def late(name: str) -> Scheme:
    return Scheme.parse({**placed(name, "host").model_dump(), "offload": {"late": True}}, "test")


class ByHand:
    """Steps an optimizer with the gradients and the learning rate of the step before."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, [self._group] = optimizer, optimizer.param_groups
        self.param_groups = [{"lr": self._group["lr"]}]
        self._waiting: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._lr = 0.0

    def step(self) -> None:
        now = [(parameter, parameter.grad.clone()) for parameter in self._group["params"]]
        self.end()
        for parameter, grad in now:
            parameter.grad = grad.clone()
        self._waiting, self._lr = now, self.param_groups[0]["lr"]

    def end(self) -> None:
        """The update that is left."""
        for parameter, grad in self._waiting:
            parameter.grad = grad
        self._group["lr"] = self._lr
        if self._waiting:
            self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)


Case = tuple[int, str, int]  # ranks, scheme, accumulation
CASES: list[Case] = [(1, "zero1", 2), (2, "zero3", 1), (2, "hier3-exact", 2), (4, "hier3-exact", 1)]


def in_one_process(case: Case) -> Any:
    ranks, name, accumulation = case
    model, made = GPT(SPEC, seed=7), []

    def make(parameters: list[torch.nn.Parameter]) -> ByHand:
        made.append(ByHand(optimizer_of(parameters)))
        return made[0]

    losses, norms, _ = reference.train(
        model, lambda model, *batch: model(*batch),
        lambda step, micro, rank: part_of_batch(step, micro, rank, ranks, accumulation),
        placed(name, "device"), Levels.fit(INNER[ranks], ranks), STEPS, accumulation, CLIP, make,
    )  # fmt: skip
    made[0].end()
    return losses, norms, {key: p.detach().clone() for key, p in model.named_parameters()}


def on_each(case: Case) -> Any:
    ranks, name, accumulation = case
    topology = lowband.Topology(INNER[ranks])
    model = lowband.shard(GPT(SPEC, seed=7), late(name), topology, Block, torch.float32)
    losses, norms = [], []
    for total, norm in stepped(model, optimizer_of(model.parameters()), STEPS, accumulation):
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        norms.append(norm)
    return losses, norms, lowband.full_state_dict(model)


def each_of(cases: list[Case], train: Callable[[Case], Any]) -> list[Any]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bit_equal_to_one_process_that_delays(ranks: int) -> None:
    cases = [case for case in CASES if case[0] == ranks]
    expected = on_ranks(1, each_of, cases, in_one_process)[0]
    found = on_ranks(ranks, each_of, cases, on_each)[0]
    for case, (losses, norms, weights), (ours, our_norms, others) in zip(cases, expected, found, strict=True):
        assert ours == pytest.approx(losses, rel=1e-6), case  # summed over ranks in another order
        assert our_norms == pytest.approx(norms, rel=1e-12), case
        assert all(torch.equal(weights[key], others[key]) for key in weights), case


def as_users_do(scheme: Scheme, by_hand: bool) -> Any:
    """Losses, norms and weights: another learning rate at each step, a step left out, gradients kept as zeros
    or as they were, an evaluation between steps."""
    model = lowband.shard(GPT(SPEC, seed=7), scheme, lowband.Topology({}), Block, DTYPE["bf16"])
    optimizer: Any = ByHand(adamw(model)) if by_hand else adamw(model)
    seen = []
    for number in range(6):
        batch = torch.randint(
            SPEC.vocab, (2, 1, SPEC.seq_len), generator=torch.Generator().manual_seed(number)
        )
        loss = model(*batch)
        (loss * (math.nan if number == NAN_STEP else 1)).backward()
        seen += [loss.item(), norm := float(lowband.clip_grad_norm_(model, 0.05))]
        optimizer.param_groups[0]["lr"] = 1e-3 * (number + 1)
        if math.isfinite(norm):
            optimizer.step()
        if number != 3:
            optimizer.zero_grad(set_to_none=number % 2 == 1)
        with torch.no_grad():
            seen.append(model(*batch).item())
    if by_hand:
        optimizer.end()
    return str(seen), lowband.full_state_dict(model)


def both_ways() -> list[Any]:
    return [as_users_do(placed("zero3", "device"), True), as_users_do(late("zero3"), False)]


def test_whatever_happens_between_steps() -> None:
    [[(seen, weights), (also, others)], _] = on_ranks(2, both_ways)
    assert also == seen
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def changed_in_place(is_late: bool) -> Any:
    """Weights, and after each step how many units' updates were on their way once a gradient was zeroed. A
    learning rate in a tensor is changed before the first update can have begun."""
    scheme, begins = late("zero3") if is_late else placed("zero3", "device"), Event()
    model = lowband.shard(GPT(SPEC, seed=7), scheme, lowband.Topology({}), Block, DTYPE["bf16"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    shards = list(model.parameters())
    model(*torch.ones(2, 1, SPEC.seq_len, dtype=torch.long)).backward()
    late_steps._thread.submit(begins.wait)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.5)
    begins.set()
    shards[0].grad.zero_()
    torch._foreach_zero_([shard.grad for shard in shards])
    left = sum(disk.update is not None for disk, _ in engine_of(model).on_disk())
    return left, lowband.full_state_dict(model)


def both_in_place() -> list[Any]:
    return [changed_in_place(False), changed_in_place(True)]


def test_an_update_has_the_step_s_gradients_and_options() -> None:
    [[(_, weights), (left, others)]] = on_ranks(1, both_in_place)
    assert left == 0
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def counts() -> list[Any]:
    return [trained(late("hier3"), 2, *rest)[1:3] for rest in ((1, 0.05, "bf16"), (2, math.inf, "fp32"))]


def test_bytes_and_memory() -> None:
    for found in on_ranks(2, counts):
        for counted, closed in found:
            assert counted == closed


def built(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = lowband.shard(GPT(SPEC, seed=seed), late("zero3"), lowband.Topology({}), Block, DTYPE["bf16"])
    return model, adamw(model)


def saved_and_resumed(folder: str) -> bool:
    expected, found = saved(folder, *built(7)), resumed(folder, *built(8))
    return all(torch.equal(expected[key], found[key]) for key in expected)


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    assert all(on_ranks(2, saved_and_resumed, str(tmp_path)))


def refused() -> list[str]:
    model, optimizer = built(7)
    for number in (2, 3):
        step(model, optimizer, number, 1, 0.05)
    shard, state = next(model.parameters()), next(iter(optimizer.state.values()))
    fresh, of_lamb = (list(built(seed)[0].parameters()) for seed in (1, 2))
    before, later = (torch.optim.AdamW(some, fused=True) for some in (fresh[:1], fresh[1:]))
    lamb = lowband.Lamb(of_lamb)
    for one in (*fresh, *of_lamb):
        one.grad = torch.zeros(one.shape)
    before.step()
    assigned = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], fused=True)
    assigned.param_groups[0]["params"] = fresh
    found = [
        answer(lambda: fresh[0].mul_(0.5)), answer(later.step), answer(lamb.step),
        answer(assigned.step),
    ]  # fmt: skip
    more = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.zeros(3))])
    return [
        *found,
        answer(shard.tolist), answer(state["exp_avg"].sum), answer(optimizer.state_dict),
        answer(lambda: optimizer.step(lambda: 0.0)), answer(more.step),
    ]  # fmt: skip


def test_what_is_refused_between_steps() -> None:
    [found] = on_ranks(1, refused)
    for text, expected in zip(found, (
        "embed.weight: its values are being updated between steps",
        "AdamW of late updates: another optimizer has some parameters of the unit of 'positions.weight'",
        "Lamb of late updates: sums over ranks", "AdamW of late updates: this step was looked up, or made,",
        "embed.weight: its values are being updated between steps (allowed: lowband.full_state_dict",
        "exp_avg of embed.weight: its values are being updated between steps",
        "AdamW: its states are being updated between steps (allowed: lowband.Checkpointer)",
        "AdamW of late updates: a closure, or hooks on the step",
        "AdamW: has other parameters beside those that are updated late (allowed: an optimizer for each)",
    ), strict=True):  # fmt: skip
        assert text.startswith(expected)


def failing() -> list[str]:
    """What steps say whose updates fail, and then one whose does not."""
    model, optimizer = built(7)
    group, said = optimizer.param_groups[0], []
    for number, betas in ((2, None), (3, group["betas"]), (4, group["betas"])):
        group["betas"] = betas
        try:
            step(model, optimizer, number, 1, 0.05)
            said.append("")
        except TypeError as error:
            said.append(str(error))
    return said


def test_an_update_that_fails_is_an_error_of_the_next_step() -> None:
    [[first, second, third]] = on_ranks(1, failing)
    assert (first, third) == ("", "") and "NoneType" in second


FAILS = """
import os, sys, torch, torch.distributed as dist, lowband
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/group", rank=0, world_size=1)
scheme = lowband.Scheme.parse({"name": "x", "weights": "world", "grads": "world", "optim": "world@host",
                               "offload": {"late": True}}, "test")
model = lowband.shard(torch.nn.Linear(4, 4), scheme, lowband.Topology({}), torch.nn.Linear)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model(torch.ones(1, 4)).sum().backward()
optimizer.param_groups[0]["lr"] = "no number"
optimizer.step()
"""


def test_a_process_whose_last_update_failed_ends_with_its_error(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FAILS, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "lowband: the last step's update failed: " in ended.stderr


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim": "world@disk"}, "offload.late: states on a disk are updated by the host"),
        ({"offload": {"late": True, "share": 0.5}}, "offload: late is of all states, updated by the host"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    given = {**late("zero3").model_dump(), **changes}
    with pytest.raises(UserError) as error:
        Scheme.parse(given, "file.yaml: x").check(Levels.fit({}, 4))
    assert says in str(error.value) and "\n" not in str(error.value)
