"""Optimizer states on a disk: files that are damaged, full, or another run's; what has no memory. What they
share with other tiers: test_tiers.py."""

import copy
import errno
import fcntl
import gc
import io
import os
import re
import resource
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import SPEC
from test_tiers import DTYPE, adamw, placed, step

import lowband
from lowband.engine.disk import PIECE_BYTES, Disk
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.tiers import TIERS
from tests.refused import answer


def shard_of(tier: str, folder: str | Path | None, seed: int = 7) -> Any:
    scheme = placed("zero1", tier)
    return lowband.shard(
        GPT(SPEC, seed=seed), scheme, lowband.Topology({}), Block, DTYPE["fp32"], disk=folder
    )


def on_one(tmp: str, act: Callable[[str, Any, torch.optim.Optimizer], Any]) -> Any:
    """What `act` returns with a folder, a model with states there after two steps, and its optimizer."""
    model = shard_of("disk", tmp)
    optimizer = adamw(model)
    for number in (2, 3):
        step(model, optimizer, number, 1, 0.05)
    wait_for(model)
    return act(tmp, model, optimizer)


def wait_for(model) -> None:
    for disk, _ in engine_of(model).on_disk():
        disk.wait()


def damaged(tmp: str, model, optimizer) -> list[str]:
    """What a step says of a file with another byte, and of one that ends early."""
    one, other = (Path(tmp, "rank0", f"{unit}.states") for unit in ("root", "blocks.1"))
    with other.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    step(model, optimizer, 4, 1, 0.05)
    found = [answer(lambda: wait_for(model))]
    os.truncate(one, 5000)
    return [*found, answer(lambda: lowband.full_state_dict(model))]


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    [[flipped, short]] = on_ranks(1, on_one, str(tmp_path), damaged)
    assert re.fullmatch(
        r".*/rank0/blocks\.1\.states: \d+ bytes from \d+ are not those that were written", flipped
    )
    assert re.fullmatch(r".*/rank0/root\.states: ends after \d+ bytes, in a piece of \d+ from \d+", short)


def damaged_on_one(tmp: str) -> list[str]:
    """What is said of a checkpoint's save and load if one of two ranks cannot read its states."""
    model = shard_of("disk", tmp)
    optimizer, checkpointer = adamw(model), lowband.Checkpointer(Path(tmp, "checkpoints"))
    step(model, optimizer, 2, 1, 0.05)
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    if dist.get_rank() == 1:
        os.truncate(Path(tmp, "rank1", "root.states"), 100)
    return [
        answer(lambda: checkpointer.save(2, model, optimizer)),
        answer(lambda: checkpointer.load_newest(model, optimizer)),
    ]


def test_a_damaged_file_of_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, damaged_on_one, str(tmp_path))
    assert first == second
    for text in first:
        assert re.fullmatch(r".*/rank1/root\.states: ends after 100 bytes, in a piece of \d+ from 0", text)


def refused(tmp: str, model, optimizer) -> list[str]:
    parameter = next(model.parameters())
    others = lambda kind: kind(model.parameters(), lr=0.1)  # noqa: E731

    class Own(torch.optim.SGD):
        """Of no known package."""

    def hooked() -> None:
        optimizer.register_step_post_hook(lambda *_: None)
        optimizer.step()

    another = lambda folder: shard_of("disk", folder)  # noqa: E731
    Path(tmp, "a file").touch()
    return [
        answer(lambda: parameter + 1), answer(lambda: torch.zeros_like(parameter).lerp_(parameter, 0.5)),
        answer(optimizer.state_dict), answer(lambda: another(None)),
        answer(lambda: another(tmp)), answer(lambda: another(Path(tmp, "a file"))),
        answer(lambda: another("/proc/self")),  # in which nobody may make a folder
        answer(lambda: others(Own).step()), answer(lambda: optimizer.step(lambda: 0.0)), answer(hooked),
    ]  # fmt: skip


def test_what_a_disk_refuses(tmp_path: Path) -> None:
    [found] = on_ranks(1, on_one, str(tmp_path), refused)
    for text, expected in zip(found, (
        "embed.weight: its values are on a disk between steps",
        "embed.weight: its values are on a disk between steps",  # of which an average is taken
        "AdamW: its states are on a disk between steps",
        "scheme 'zero1': optim world@disk, and no folder", "rank0: is being run by process",
        "a file/rank0: cannot be used: Not a directory", "/proc/self/rank0: cannot be used: ",
        "Own of states on disk: is not known to work",
        "AdamW of states on disk: a closure, or hooks on the step", "AdamW of states on disk: a closure",
    ), strict=True):  # fmt: skip
        assert expected in text and "\n" not in text


def read_between_steps(tmp: str, model, optimizer) -> list[str]:
    """What is said of each way to read states and parameters while the last write runs, and behind it."""
    shards = list(model.parameters())
    one, first = shards[0], lambda: next(iter(optimizer.state.values()))["exp_avg"]

    def written_in_list() -> None:
        with torch.no_grad():
            torch._foreach_mul_(shards, 0.5)

    ways: list[Callable[[], object]] = [
        lambda: first().sum(), lambda: first().zero_(), lambda: repr(first()), lambda: first().tolist(),
        lambda: first().numpy(), lambda: copy.deepcopy(first()), lambda: torch.save(first(), io.BytesIO()),
        lambda: torch._foreach_norm([first()]), lambda: repr(optimizer.state),
        lambda: copy.deepcopy(optimizer), lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        written_in_list, lambda: torch.mul(input=one, other=2),
        lambda: torch.mul(torch.ones(one.shape), 2, out=one.data), one.tolist,
        lambda: setattr(one, "data", torch.zeros(one.shape)),
    ]  # fmt: skip
    found = []
    for number, way in enumerate(ways, 4):  # the write of a step, which frees memory, may not have ended
        step(model, optimizer, number, 1, 0.05)
        assert first().shape == one.shape and next(iter(optimizer.state.values()))["step"] > 0
        found.append(answer(way))
    return found


def test_values_on_a_disk_are_not_read(tmp_path: Path) -> None:
    """torch would read memory that is not there, which ends the process."""
    [found] = on_ranks(1, on_one, str(tmp_path), read_between_steps)
    of_state = [
        text for text in found if text.startswith("exp_avg of embed.weight: its values are on a disk")
    ]
    of_shard = [text for text in found if text.startswith("embed.weight: its values are on a disk")]
    assert len(of_state) == 8 and len(of_shard) == 7, found
    assert found[10].startswith("AdamW: its states are on a disk") and not any("\n" in text for text in found)


def each_shard_read(tmp: str) -> list[str]:
    return [answer(lambda p=p: p.detach() * 2) for p in shard_of("disk", tmp).parameters()]


def test_what_a_rank_holds_nothing_of_is_not_read_either(tmp_path: Path) -> None:
    """Or one rank alone would be refused, and the others wait for it."""
    for said in on_ranks(2, each_shard_read, str(tmp_path)):
        assert all("its values are on a disk between steps" in text for text in said)


def as_users_do(tier: str) -> list[Any]:
    """Losses and norms of two models in turns: a scheduler, a later group, gradients kept as zeros."""
    models = [shard_of(tier, tempfile.mkdtemp(), seed) for seed in (1, 2)]
    shards = [list(model.parameters()) for model in models]
    optimizers = [torch.optim.AdamW(some[:3], lr=1e-3, fused=True) for some in shards]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    found = []
    for number in (2, 3, 4):
        for model, mine, optimizer, scheduler in zip(models, shards, optimizers, schedulers, strict=True):
            found.append(step(model, optimizer, number, 1, 0.05))
            optimizer.zero_grad(set_to_none=False)
            scheduler.step()
            if number == 2:
                optimizer.add_param_group({"params": mine[3:], "lr": 1e-4})
    return found


def adagrad(tier: str) -> list[Any]:
    """Losses and norms with an optimizer that makes its states before the first step."""
    model = shard_of(tier, tempfile.mkdtemp())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    return [step(model, optimizer, number, 1, 0.05) for number in (2, 3, 4)]


def test_states_may_be_made_before_the_first_step() -> None:
    [[expected, *others]] = on_ranks(1, lambda: [adagrad(tier) for tier in ("device", *TIERS)])
    assert others == [expected, expected]


def use(tmp: str) -> tuple[list[Any], list[Any]]:
    again = []
    for _ in range(2):  # a folder is free as soon as nobody refers to the module
        model = shard_of("disk", tmp, 7)
        again.append(step(model, adamw(model), 2, 1, 0.05))
        del model
    return [as_users_do(tier) for tier in ("device", *TIERS)], again


def test_optimizers_are_used_as_without(tmp_path: Path) -> None:
    [([expected, *others], [first, second])] = on_ranks(1, use, str(tmp_path))
    assert others == [expected, expected] and first == second


def anew_while_a_write_runs(tmp: str) -> bool:
    """Whether a folder is free again whose module has ended, but for a write that waits for that."""
    write, collect, waited, asked = os.pwrite, gc.collect, threading.Event(), []

    def put(*args: Any) -> int:
        waited.wait(60)
        return write(*args)

    def collected() -> int:
        asked.append(True)
        if len(asked) == 2:  # once is not enough
            waited.set()
        return collect()

    model = shard_of("disk", tmp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", put)
        patch.setattr(gc, "collect", collected)
        start_writes(model)
        del model
        shard_of("disk", tmp)
    return waited.is_set()


def start_writes(model) -> None:
    """Of all units, as the end of a step does."""
    units = [unit for unit, _ in engine_of(model).on_disk()]
    for unit in units:
        unit.start_read(is_counted=False)
        unit.wait()
    for unit in units:
        unit.start_write(None, (), is_counted=False)


def test_a_folder_is_free_behind_the_last_write(tmp_path: Path) -> None:
    assert on_ranks(1, anew_while_a_write_runs, str(tmp_path)) == [True]


def around_the_cache(tmp: str) -> list[tuple[bool, bool, list[str]]]:
    """Of files whose file system refuses nothing, the flag, or its use: whether they go around the page
    cache, whether they give back what they got, and what they say once they are damaged."""
    found, open_file, read = [], os.open, os.preadv

    def open_cached(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(path, flags, *mode)

    def read_cached(file: int, *rest: Any) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return read(file, *rest)

    tensors = [
        torch.arange(PIECE_BYTES + 5).to(torch.uint8),
        torch.zeros(0),
        torch.randn(2 * PIECE_BYTES // 4),
    ]
    for number, refused in enumerate(({}, {"open": open_cached}, {"preadv": read_cached})):
        with pytest.MonkeyPatch.context() as patched:
            for name, other in refused.items():
                patched.setattr(os, name, other)
            file = Disk(Path(tmp), number).file("unit", 1)
            file.write(tensors)
            again = [torch.empty_like(tensor) for tensor in tensors]
            file.read(again)
            is_same = all(map(torch.equal, tensors, again))
            os.truncate(file.path, PIECE_BYTES + 100)
            said = [answer(lambda: file.read(tensors))]  # noqa: B023
            file.write(tensors)
            with file.path.open("r+b") as damaged:
                damaged.seek(3 * PIECE_BYTES)
                damaged.write(bytes([again[2].view(torch.uint8)[-5].item() ^ 1]))
            said.append(answer(lambda: file.read(tensors)))  # noqa: B023
        found.append((file.is_direct, is_same, [text.removeprefix(f"{file.path}: ") for text in said]))
    return found


def test_files_go_around_the_page_cache_where_they_can(tmp_path: Path) -> None:
    [found] = on_ranks(1, around_the_cache, str(tmp_path))
    assert not any(is_direct for is_direct, _, _ in found[1:])
    for _, is_same, said in found:
        assert is_same
        assert said == [
            "ends after 4194404 bytes, in a piece of 4194304 from 4194304",
            "5 bytes from 12582912 are not those that were written",
        ]


def of_two_optimizers(tmp: str) -> int:
    """Bytes in memory between steps of states of two optimizers that have parameters of the same units."""
    model = shard_of("disk", tmp)
    shards = list(model.parameters())
    optimizers = [torch.optim.AdamW(shards[place::2], fused=True) for place in range(2)]
    for number in (2, 3):
        for optimizer in optimizers:
            step(model, optimizer, number, 1, 0.05)
    wait_for(model)
    states = [each for of in optimizers for kept in of.state.values() for each in kept.values() if each.ndim]
    return sum(state.untyped_storage().nbytes() for state in states)


def test_two_optimizers_leave_no_states_in_memory(tmp_path: Path) -> None:
    assert on_ranks(1, of_two_optimizers, str(tmp_path)) == [0]


def of_two_with_the_same(tmp: str) -> bool:
    """Whether two optimizers of the same parameters that take turns train as with states in memory."""
    trained = []
    for tier in ("device", "disk"):
        model = shard_of(tier, tmp if tier == "disk" else None)
        optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for _ in range(2)]
        for number in range(2, 8):
            step(model, optimizers[number % 2], number, 1, 0.05)
        trained.append(lowband.full_state_dict(model))
    return all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_two_optimizers_of_the_same_parameters_may_take_turns(tmp_path: Path) -> None:
    assert on_ranks(1, of_two_with_the_same, str(tmp_path)) == [True]


def of_any_name_and_size(tmp: str) -> list[bool]:
    """Whether files give back what they got."""
    disk, found = Disk(Path(tmp), 0), []
    for name, numel in (("a/b (weights)", 3), ("../..", 0)):
        file, values, again = disk.file(name, 4 * numel), torch.randn(numel), torch.zeros(numel)
        file.write([values])
        file.read([again])
        found.append(file.path.parent == disk.folder and torch.equal(values, again))
    return found


def test_files_of_units_of_any_name_and_size(tmp_path: Path) -> None:
    assert on_ranks(1, of_any_name_and_size, str(tmp_path)) == [[True, True]]


def left_by_a_fork(tmp: str) -> bool:
    """Whether a file is there when a process that was forked from its holder's has let it go."""
    file = Disk(Path(tmp), 0).file("unit", 1)
    path = file.path
    if (child := os.fork()) == 0:
        del file
        os._exit(0)
    os.waitpid(child, 0)
    return path.exists()


class Rooted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.root, self.scale = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.root(x) * self.scale


def _rooted(folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Weights after two steps with and without a disk, and the names of units."""
    torch.manual_seed(7)
    plain = Rooted()
    model = lowband.shard(
        copy.deepcopy(plain), placed("zero1", "disk"), lowband.Topology({}), torch.nn.Linear, torch.float32,
        disk=folder,
    )  # fmt: skip
    names = [unit.name for unit in engine_of(model).units]
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(2):
            each(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*plain.state_dict().values()], [*lowband.full_state_dict(model).values()], names


def test_a_module_named_root_has_a_file_of_its_own(tmp_path: Path) -> None:
    [(expected, found, names)] = on_ranks(1, _rooted, tmp_path)
    assert sorted(names) == ["root", "root (outermost)"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_forked_process_removes_no_files(tmp_path: Path) -> None:
    assert on_ranks(1, left_by_a_fork, str(tmp_path)) == [True]


def full(tmp: str) -> tuple[str, str, bool]:
    """A disk without room before training starts; one that fills up while it is written, and what is left."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    models = [shard_of("disk", Path(tmp, "disk")), shard_of("device", None)]
    room = max(file.stat().st_size for file in Path(tmp, "disk", "rank0").glob("*.states"))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3, fused=True, amsgrad=True) for each in models]
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))  # amsgrad keeps more
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, 2, 1, 0.05)
    try:
        step(models[0], optimizers[0], 3, 1, 0.05)
        second = "nothing"
    except OSError as error:
        second = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room // 2, unlimited[1]))
    first = answer(lambda: shard_of("disk", Path(tmp, "other")))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    checkpointer = lowband.Checkpointer(Path(tmp, "checkpoints"))
    checkpointer.save(1, models[0], optimizers[0])
    checkpointer.wait()
    loaded = shard_of("device", None)
    checkpointer.load(
        checkpointer.latest(), loaded, torch.optim.AdamW(loaded.parameters(), lr=1.0, amsgrad=True)
    )
    mine, others = lowband.full_state_dict(loaded), lowband.full_state_dict(models[1])
    return first, second, all(torch.equal(mine[key], others[key]) for key in others)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    [(first, second, is_whole)] = on_ranks(1, full, str(tmp_path))
    assert re.search(r"other/rank0/\S+\.states: no room for \d+ bytes \(\d+ free\): File too large", first)
    assert re.search(r"File too large: '.*/disk/rank0/.*\.states'", second)
    assert is_whole


def closure_none(tmp: str) -> bool:
    """Whether a step that is called as wrappers do has changed the weights."""
    model = shard_of("disk", tmp)
    optimizer = adamw(model)
    step(model, optimizer, 2, 1, 0.05)
    before = lowband.full_state_dict(model)
    step(model, _Wrapping(optimizer), 3, 1, 0.05)
    return any(not torch.equal(before[name], value) for name, value in lowband.full_state_dict(model).items())


class _Wrapping:
    """As wrappers call a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure=closure)


def test_no_closure_is_none(tmp_path: Path) -> None:
    assert on_ranks(1, closure_none, str(tmp_path)) == [True]
