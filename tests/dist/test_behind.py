"""Updates of states on a disk behind the next forward: the bits of states on the device, whoever looks before
they have ended; their order, what is read ahead of them, their errors. What a step of them costs, and longer
runs of all schemes: test_tiers.py.
"""

import os
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import SPEC
from test_tiers import DTYPE, INNER, adamw, folder_of, placed, step

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.engine.units import behind
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.refused import answer

Way = Callable[[Any, torch.optim.Optimizer], Any]


def built(scheme: Scheme, dtype: str = "bf16", **options: Any) -> Any:
    topology, options = lowband.Topology(INNER[dist.get_world_size()]), {"disk": folder_of(scheme)} | options
    return lowband.shard(GPT(SPEC, seed=7), scheme, topology, Block, DTYPE[dtype], **options)


def batch(number: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randint(SPEC.vocab, (2, 1, SPEC.seq_len), generator=drawn)


@contextmanager
def held() -> Iterator[None]:
    """Updates wait until somebody waits for them: who does not sees what was before."""
    begins, update = Event(), behind.Behind
    with pytest.MonkeyPatch.context() as patch:
        for name in ("finish", "await_weights"):
            waits = getattr(update, name)

            def waited(*args: Any, waits: Callable[..., Any] = waits) -> Any:
                begins.set()
                return waits(*args)

            patch.setattr(update, name, waited)
        behind._thread.submit(begins.wait)
        try:
            yield
        finally:
            begins.set()


def fails(model: Any, inputs: Any, hooked: Callable[[Any], Any]) -> None:
    """A forward that its caller's own error ends. hooked: registers a hook"""

    def stop(*_: Any) -> None:
        raise ValueError("stop")

    hook = hooked(stop)
    with pytest.raises(ValueError, match="stop"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(*inputs)
    hook.remove()


# ---- who looks


def evaluate(model: Any, _: Any) -> Any:
    with torch.no_grad():
        return model(*batch(9)).item()


def step_again(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def zero(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def zero_module(model: Any, _: Any) -> None:
    model.zero_grad(set_to_none=False)


def drop(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def scale(model: Any, _: Any) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)


def clip(model: Any, _: Any) -> float:
    return float(lowband.clip_grad_norm_(model, 1e-6))


def go_on_adding(model: Any, _: Any) -> None:
    """Gradients of another backward come to those of the step."""
    model(*batch(10)).backward()


def change_options(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)


def write_through_numpy(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.numpy()[:] = 0.0


def write_as_output(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        torch.mul(torch.ones(parameter.grad.shape), 3.0, out=parameter.grad)


def read_counts(_: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(of["step"]) for of in optimizer.state.values()]


def count_anew(_: Any, optimizer: torch.optim.Optimizer) -> None:
    for of in optimizer.state.values():
        of["step"].zero_()


def forget_states(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def set_states(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def fail(model: Any, _: Any) -> str:
    """A forward that ends in its second block."""
    fails(model, batch(11), model.blocks[1].register_forward_pre_hook)
    return answer(lambda: None)


def save(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What another model on the device has of a checkpoint."""
    checkpointer = lowband.Checkpointer(tempfile.mkdtemp())
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    other = built(placed("zero1", "device"))
    of_other = adamw(other)
    checkpointer.load(checkpointer.latest(), other, of_other)
    step(other, of_other, 5, 1, 0.05)
    return [*lowband.full_state_dict(other).values()]


WAYS: list[Way] = [
    evaluate, step_again, zero, zero_module, drop, scale, clip, go_on_adding, change_options, fail, save,
    write_through_numpy, write_as_output, read_counts, count_anew, forget_states, set_states,
]  # fmt: skip


def looked_at(way: Way, tier: str, **options: Any) -> list[Any]:
    """Weights and losses of a run in which somebody looks behind its second step, and goes on."""
    model = built(placed("zero1", tier), **options)
    optimizer = adamw(model)
    step(model, optimizer, 2, 1, 0.05)
    model(*batch(3)).backward()
    with held():
        optimizer.step()
        found = [way(model, optimizer)]
        found.append([*lowband.full_state_dict(model).values()])
    optimizer.param_groups[0].update(lr=1e-3, betas=(0.9, 0.999))
    optimizer.zero_grad()
    found.append(step(model, optimizer, 4, 1, 0.05))
    return [*found, *lowband.full_state_dict(model).values()]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return all(map(equal, one, other))
    return bool(one == other)


def same_in_both(found: Callable[[str], Any]) -> bool:
    """found: of states on the device, or on a disk"""
    return equal(found("device"), found("disk"))


def all_looked_at() -> list[str]:
    """Ways to look that differ."""
    found = []
    for way in WAYS:
        if not equal(looked_at(way, "device"), looked_at(way, "disk")):
            found.append(way.__name__)
    if not equal(looked_at(drop, "device"), looked_at(drop, "disk", overlap=False)):
        found.append("no overlap")
    return found


def test_whoever_looks_sees_the_update() -> None:
    assert on_ranks(1, all_looked_at) == [[]]


def lamb(model: Any) -> torch.optim.Optimizer:
    """Sums over ranks in its step, which waits."""
    return lowband.Lamb(model.parameters(), lr=1e-3)


def as_users_do(scheme: Scheme, accumulation: int, clip: float, made: Callable[..., Any]) -> list[Any]:
    """Losses, norms and weights with a step left out, another rate for each and an evaluation behind each."""
    model = built(scheme)
    optimizer, seen = made(model), []
    for number in range(5):
        optimizer.param_groups[0]["lr"] = 1e-3 * (number + 1)
        seen.append(str(step(model, optimizer, number, accumulation, clip)))
        seen.append(evaluate(model, optimizer) if number % 2 else "")
    return [*seen, *lowband.full_state_dict(model).values()]


# scheme, tier of weights, accumulation, norm to clip to, optimizer
Case = tuple[str, str, int, float, Callable[..., Any]]
CASES: list[Case] = [
    ("zero3", "disk", 1, 0.05, adamw), ("zero1", "host", 2, 0.05, adamw), ("zero3", "device", 1, 0.05, lamb),
    ("hier3", "device", 4, float("inf"), adamw),
]  # fmt: skip


def all_as_users_do(cases: list[Case]) -> list[Any]:
    """Cases that differ."""
    return [
        str(case)
        for case in cases
        if not equal(
            as_users_do(placed(case[0], "device"), *case[2:]),
            as_users_do(placed(case[0], "disk", case[1]), *case[2:]),
        )
    ]


@pytest.mark.parametrize(("ranks", "cases"), [(1, CASES[:1]), (2, CASES[:3]), (4, CASES[3:])])
def test_bits_are_those_of_states_on_the_device(ranks: int, cases: list[Case]) -> None:
    assert on_ranks(ranks, all_as_users_do, cases) == [[]] * ranks


# ---- order and memory


class Crossed(torch.nn.Module):
    """Computes its layers in another order than it has them, and some only if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for place in order:
            x = self.layers[place](x).tanh()
        return x.sum()


def crossed(tier: str, folder: str | None = None) -> Any:
    torch.manual_seed(0)
    scheme, of_layers = placed("zero1", tier), (lowband.Topology({}), torch.nn.Linear, DTYPE["fp32"])
    return lowband.shard(Crossed(), scheme, *of_layers, disk=folder or folder_of(scheme))


def in_memory(model: Any) -> list[str]:
    """Units whose states have memory once nothing moves any more."""
    engine = engine_of(model)
    for disk, _ in engine.on_disk():
        disk.wait()
    return [unit.name[-1] for unit in engine.units if unit.master.untyped_storage().nbytes()]


def in_order() -> list[Any]:
    """What is in memory behind backwards; units as they are updated."""
    model, x = crossed("disk"), torch.ones(1, 16)
    optimizer = adamw(model)
    found: list[Any] = []
    for backward in range(3):
        model(x, [3, 1, 0, 2]).backward()
        found.append("".join(in_memory(model)))
        if backward != 1:  # a step is left out
            optimizer.step()
    names = {unit.held.disk: unit.name[-1] for unit in engine_of(model).units}
    optimizer.zero_grad()
    model(x, [3, 1, 0, 2]).backward()
    with held():
        optimizer.step()
        [update] = {disk.update for disk, _ in engine_of(model).on_disk()}
        found.append("".join(names[disk] for disk in update.disks))
    return [*found, "".join(in_memory(model))]


def test_units_are_updated_as_the_forward_needs_them() -> None:
    assert on_ranks(1, in_order) == [["01", "13", "13", "3102", ""]]


def of_parts(tier: str) -> list[Any]:
    """Weights where a forward leaves out units, and optimizers have some each."""
    model, x = crossed(tier), torch.ones(1, 16)
    shards = list(model.parameters())
    optimizers = [torch.optim.AdamW(some, fused=True) for some in (shards[:4], shards[4:])]
    for order in ([3, 1, 0, 2], [0, 1], [2, 3], [0, 1, 2, 3], [1]):
        model(x, order).backward()
        with held():
            for optimizer in reversed(optimizers):
                optimizer.step()
                optimizer.zero_grad()
            model.zero_grad()
            model(x, order[::-1]).backward()  # waits for units that it has not used
            behind_it = [disk.update for disk, _ in engine_of(model).on_disk()]
            assert not any(behind_it)
        optimizers[0].step()
        model.zero_grad()
    return [*lowband.full_state_dict(model).values()]


def test_units_that_a_forward_leaves_out() -> None:
    assert on_ranks(1, same_in_both, of_parts) == [True]


def with_own_gradients(tier: str) -> list[Any]:
    """Weights where the caller writes to what it has of gradients: tensors of its own, and views."""
    model, x = crossed(tier), torch.ones(1, 16)
    optimizer = adamw(model)
    own = [torch.ones(parameter.shape) for parameter in model.parameters()]
    for number in range(4):
        model(x, [0, 1, 2, 3]).backward()
        for parameter, values in zip(model.parameters(), own, strict=True):
            if number % 2:
                parameter.grad = values
        kept = own if number % 2 else [parameter.grad.detach() for parameter in model.parameters()]
        with held():
            optimizer.step()
            for values in kept:
                values.mul_(-0.5)
        optimizer.zero_grad()
    return [*lowband.full_state_dict(model).values()]


def test_writes_to_a_caller_s_own_gradients_come_behind_the_step() -> None:
    assert on_ranks(1, same_in_both, with_own_gradients) == [True]


def of_backwards() -> list[str]:
    """What is in memory behind backwards that use a unit each, and, of two modules, behind both's."""
    (model, x), other = (crossed("disk"), torch.ones(1, 16)), crossed("disk")
    optimizer, found = adamw(model), []
    model(x, [3, 1, 0, 2]).backward()
    optimizer.step()
    optimizer.zero_grad()
    for place in (3, 1, 0, 2):
        model(x, [place]).backward()
    found.append("".join(in_memory(model)))
    optimizer.step()
    for each in (other, model):
        each(x, [3, 1, 0, 2]).backward()
    return [*found, "".join([*in_memory(other), *in_memory(model)])]


def test_two_units_at_most_are_read_ahead() -> None:
    assert [len(names) for names in on_ranks(1, of_backwards)[0]] == [2, 2]


def with_mixed_weights() -> list[Any]:
    """A forward in which a unit is needed out of turn whose weights lie on the disk.

    The last unit but one is read for its update only once that unit's gather has been submitted.
    """
    on_device, on_disk = placed("zero1", "disk"), placed("zero1", "disk", "disk")
    torch.manual_seed(0)
    model = lowband.shard(
        Crossed(), on_device, lowband.Topology({}), torch.nn.Linear, DTYPE["bf16"], disk=tempfile.mkdtemp(),
        placement_of=lambda name, _: on_disk if name == "layers.1" else on_device,
    )  # fmt: skip
    optimizer, x, begins = adamw(model), torch.ones(1, 16), Event()
    units = engine_of(model).units
    out_of_turn, late = units[1], units[2].held.disk
    model(x, [0, 1, 2, 3]).backward()
    optimizer.step()
    with lowband.no_sync(model):
        model(x, [0, 1, 2, 3]).backward()
    model(x, [0, 3, 1, 2]).backward()  # the next forward gathers the last unit behind the first one
    start, read = out_of_turn.start_gather, late.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out_of_turn, "start_gather", lambda *given: (start(*given), begins.set()))
        patch.setattr(late, "read", lambda: (begins.wait(), read()))
        optimizer.step()
        return [model(x, [0, 1, 2, 3]).isfinite().item()]


def test_a_gather_to_a_disk_stops_no_update() -> None:
    assert on_ranks(1, with_mixed_weights, time_limit_s=60) == [[True]]


# ---- errors and ends


def failing(tmp: str) -> list[str]:
    """What is said of an update that fails: in a forward, and once; of a file, and of options."""
    scheme, found = placed("zero1", "disk"), []
    for number, harm in enumerate(("file", "options")):
        folder = Path(tmp, str(number))
        model = built(scheme, disk=folder)
        optimizer = adamw(model)
        step(model, optimizer, 2, 1, 0.05)
        in_memory(model)
        if harm == "file":
            os.truncate(folder / "rank0" / "blocks.1.states", 100)
        else:
            optimizer.param_groups[0]["betas"] = None
        step(model, optimizer, 3, 1, 0.05)  # returns: not all units' reads, nor any update, come before
        try:
            model(*batch(3))
            found.append("nothing")
        except (UserError, TypeError) as error:
            found.append(str(error))
        in_memory(model)  # has no error any more
    return found


def test_an_update_that_fails_is_an_error_of_the_next_forward(tmp_path: Path) -> None:
    [[of_file, of_options]] = on_ranks(1, failing, str(tmp_path))
    assert "blocks.1.states: ends after 100 bytes" in of_file
    assert "NoneType" in of_options


def told_of() -> list[str]:
    """What a caller is told whose own error ends the forward that would have told it."""
    folder = tempfile.mkdtemp()
    model, x = crossed("disk", folder), torch.ones(1, 16)
    optimizer = adamw(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(x, [3, 1, 0, 2]).backward()
        optimizer.step()
    optimizer.zero_grad()
    model(x, [3, 1, 0, 2]).backward()
    in_memory(model)
    os.truncate(Path(folder, "rank0", "layers.0.states"), 0)
    optimizer.step()
    # The failed unit is gathered ahead by then.
    fails(model, (x, [3, 1, 0, 2]), model.layers[1].register_forward_hook)
    return [answer(model(x, [3]).backward), answer(optimizer.step)]


def test_an_update_that_fails_is_no_secret_of_a_gather_ahead() -> None:
    [[first, then]] = on_ranks(1, told_of)
    assert "layers.0.states: ends after 0 bytes" in first
    assert "ends after" not in then


ENDS = """
import sys, threading, torch, torch.distributed as dist, lowband
from lowband.engine.units import behind
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/group", rank=0, world_size=1)
scheme = lowband.Scheme(name="x", weights="world", grads="world", optim="world@disk")
model = lowband.shard(torch.nn.Linear(4, 4), scheme, lowband.Topology({}), torch.nn.Linear, disk=sys.argv[1])
optimizer, begins = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), threading.Event()
threading._register_atexit(begins.set)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    if _: behind._thread.submit(begins.wait)
    optimizer.step()
"""


def test_a_process_ends_behind_its_last_update(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def anew() -> str:
    """What is said of a folder whose module nothing refers to any more, but its last update."""
    folder = tempfile.mkdtemp()
    for _ in range(2):
        model = crossed("disk", folder)
        optimizer = adamw(model)
        for _ in range(2):
            model(torch.ones(1, 16), [0, 1, 2, 3]).backward()
            optimizer.step()
        del model, optimizer
    return ""


def test_a_module_is_made_anew_behind_the_last_one_s_update() -> None:
    assert on_ranks(1, anew) == [""]


def forked() -> int:
    """The exit status of a process that was forked while an update is on its way."""
    model = crossed("disk")
    optimizer = adamw(model)
    for _ in range(2):
        model(torch.ones(1, 16), [0, 1, 2, 3]).backward()
        with held():
            optimizer.step()
            if (child := os.fork()) == 0:
                behind._finish_all()  # it has no thread to wait for
                os._exit(0)
            status = os.waitpid(child, 0)[1]
    return status


def test_a_forked_process_waits_for_no_update() -> None:
    assert on_ranks(1, forked) == [0]
