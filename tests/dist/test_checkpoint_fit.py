"""A checkpoint that does not fit is refused on every rank, before anything is overwritten."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import SHAPES, adamw, bag, change_manifest, everything

import lowband
from lowband.engine.checkpoint import checkpointer as checkpoint_module
from lowband.run.on_ranks import on_ranks
from tests.refused import answer


def in_two_groups(names: set[str]):
    """An optimizer whose first group has the named parameters, the second the others."""

    def make(model):
        named = list(model.named_parameters())
        first, second = ([p for name, p in named if (name in names) == is_in] for is_in in (True, False))
        return torch.optim.AdamW([{"params": first}, {"params": second, "weight_decay": 0.0}], lr=1e-2)

    return make


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def with_scheduler(model):
    optimizer = adamw(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer


# What is loaded into -> what is refused, in that order of the checks.
MISFITS = {
    "transposed": (
        {"shapes": SHAPES | {"a": (8, 4)}},
        "'model.a' has shape [8, 4], but [4, 8] in the checkpoint",
    ),
    "parameter here only": ({"shapes": SHAPES | {"d": (2,)}}, "'model.d' is not in the checkpoint"),
    "parameter there only": (
        {"shapes": {"a": (4, 8), "b": (5,)}},
        "'model.c' is only in the checkpoint",
    ),
    "shape of a buffer": (
        {"buffer": torch.ones(1, 3)},
        "'buffer.seen' has shape [1, 3], but [3] in the checkpoint",
    ),
    "dtype of a buffer": (
        {"buffer": torch.ones(3, dtype=torch.float64)},
        "'buffer.seen' has dtype float64, but float32 in the checkpoint",
    ),
    "another optimizer": ({"make_optimizer": sgd}, "was saved with optimizer torch.optim.adamw.AdamW"),
    "another optimizer, new": ({"make_optimizer": sgd, "steps": 0}, "was saved with optimizer"),
    "number of groups": (
        {"make_optimizer": in_two_groups({"a"})},
        "the optimizer has 2 param groups, the checkpoint 1",
    ),
    "options": (
        {"make_optimizer": with_scheduler},
        "'initial_lr' among the options of param group 0 is not in the checkpoint",
    ),
    "states": (
        {"make_optimizer": lambda model: adamw(model, amsgrad=True)},
        "'max_exp_avg_sq' among the optimizer states of 'a' is not in the checkpoint",
    ),
}


def refusals(folder: str) -> dict[str, tuple[str, bool]]:
    """By misfit: what was refused, and whether everything here is as it was."""
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(1, *bag())
    checkpointer.wait()
    found = {}
    for name, (here, _) in MISFITS.items():
        found[name] = refused(checkpointer, *bag(**here))
    return found


def refused(checkpointer, model, optimizer) -> tuple[str, bool]:
    torch.manual_seed(100 + dist.get_rank())
    before = everything(model, optimizer)
    said = answer(lambda: checkpointer.load(checkpointer.latest(), model, optimizer))
    return said, everything(model, optimizer) == before


def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    for found in on_ranks(2, refusals, str(tmp_path)):
        assert list(found) == list(MISFITS)
        for name, (_, expected) in MISFITS.items():
            said, is_same = found[name]
            assert expected in said, name
            assert str(tmp_path / "step-00000001") in said, name
            assert "\n" not in said, name
            assert is_same, name


def groups_assigned_otherwise(folder: str) -> list[tuple[str, bool]]:
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(1, *bag(make_optimizer=in_two_groups({"a"})))
    checkpointer.wait()
    return [
        refused(checkpointer, *bag(make_optimizer=in_two_groups(names)))
        for names in ({"a"}, {"a", "b"}, {"b", "c"})
    ]


def run_out_of_memory(folder: str) -> tuple[str, bool]:
    """On rank 1, with everything read, while memory is made for the optimizer's states."""
    save_bag(folder)
    checkpointer, here = lowband.Checkpointer(folder), bag(steps=0)
    if dist.get_rank() == 1:

        def fail(*_arguments) -> None:
            raise MemoryError("out of memory")

        checkpoint_module.new_states = fail
    before = everything(*here)
    try:
        checkpointer.load(checkpointer.latest(), *here)
    except RuntimeError as error:
        return str(error), everything(*here) == before
    return "loaded", False


def test_a_load_that_one_rank_has_no_memory_for_changes_nothing(tmp_path: Path) -> None:
    found = on_ranks(2, run_out_of_memory, str(tmp_path))
    assert found == [("rank 1: MemoryError: out of memory", True)] * 2


def test_parameters_in_another_param_group_are_refused(tmp_path: Path) -> None:
    """[the same assignment, one parameter more in the first group, the two groups exchanged]"""
    for same, moved, exchanged in on_ranks(2, groups_assigned_otherwise, str(tmp_path)):
        assert same[0] == ""
        assert "'b' in param group 0 is not in the checkpoint" in moved[0]
        assert "'b' in param group 0 is not in the checkpoint" in exchanged[0]
        assert moved[1]
        assert exchanged[1]


def save_bag(folder: str) -> None:
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(1, *bag(), {"next": 2})
    checkpointer.wait()


def load_into_bag(folder: str, steps: int = 1) -> tuple[str, bool]:
    return refused(lowband.Checkpointer(folder), *bag(steps=steps))


def _retyped(name: str, dtype: str):
    def change(content) -> None:
        content["tensors"][name]["dtype"] = dtype

    return change


def _without(name: str):
    def change(content) -> None:
        del content["tensors"][name]

    return change


def _as_number(name: str):
    def change(content) -> None:
        del content["tensors"][name]
        content["numbers"][name] = 1

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_retyped("model.a", "int32"), "'model.a' has dtype float32, but int32 in the checkpoint"),
        (_retyped("optimizer.exp_avg.b", "bfloat16"), "'optimizer.exp_avg.b' has dtype float32"),
        (_without("optimizer.exp_avg.b"), "'exp_avg' among the optimizer states of 'b' is not in"),
        (_without("buffer.seen"), "'buffer.seen' is not in the checkpoint"),
        (_without("rng.cpu.1"), "'rng.cpu.1' is not in the checkpoint"),
        (
            lambda c: c["numbers"].update({"optimizer.x.a": 1}),
            "'x' among the optimizer states of 'a' is only in the checkpoint",
        ),
        (lambda c: c["numbers"].update({"model.x": 1}), "'model.x' is of an unknown kind"),
        (_as_number("optimizer.exp_avg.b"), "'optimizer.exp_avg.b' is a tensor, but a number in the"),
        (
            lambda c: (
                c["numbers"].update(dict.fromkeys([b := "optimizer.exp_avg.b"], 1)) or c["tensors"].pop(b)
            ),
            "'optimizer.exp_avg.b' is a tensor, but a number in the checkpoint",
        ),
        (
            lambda c: c["tensors"].update({"hook.a": c["tensors"]["model.a"]}),
            "'hook.a' is of an unknown kind",
        ),
        (
            lambda c: c["tensors"].update({"optimizer.step.z": c["tensors"]["optimizer.step.a"]}),
            "has optimizer states of 'z', which is not a parameter",
        ),
    ],
)
def test_a_changed_manifest_that_does_not_fit_is_refused(tmp_path: Path, change, expected: str) -> None:
    """On both ranks, also where it fits one of them: rank 0 has its random numbers."""
    on_ranks(2, save_bag, str(tmp_path))
    change_manifest(tmp_path / "step-00000001", change)
    for said, is_same in on_ranks(2, load_into_bag, str(tmp_path)):
        assert expected in said
        assert is_same


def saved_and_loaded(folder: str, saved_steps: int, steps: int) -> bool:
    """Whether a bag after `steps` is the one that was saved after `saved_steps`, once it is loaded."""
    checkpointer = lowband.Checkpointer(folder)
    saved = bag(steps=saved_steps)
    torch.manual_seed(100 + dist.get_rank())
    expected = everything(*saved)
    checkpointer.save(1, *saved)
    checkpointer.wait()
    loaded = bag(steps=steps, buffer=torch.zeros(3))
    loaded[1].param_groups[0]["lr"] = 9.0
    assert everything(*loaded) != expected
    checkpointer.load(checkpointer.latest(), *loaded)
    return everything(*loaded) == expected


@pytest.mark.parametrize(("saved_steps", "steps"), [(2, 0), (2, 1), (1, 2), (0, 2)])
def test_a_load_makes_everything_as_it_was_saved(tmp_path: Path, saved_steps: int, steps: int) -> None:
    """Also the states of an optimizer that had none, or has some where there were none."""
    assert on_ranks(2, saved_and_loaded, str(tmp_path), saved_steps, steps) == [True, True]


class Counting(torch.optim.Optimizer):
    """An optimizer whose state is a Python number beside a tensor of its own shape."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1, "state": None})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["table"] = torch.full((2, 3), float(state["count"]), dtype=torch.float64)


def counted(folder: str):
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(1, *bag(make_optimizer=lambda m: Counting(m.parameters()), steps=3))
    checkpointer.wait()
    model, optimizer = bag(make_optimizer=lambda m: Counting(m.parameters()), steps=0)
    checkpointer.load(checkpointer.latest(), model, optimizer)
    [group] = optimizer.param_groups
    group["lr"] = torch.tensor(0.1)
    said = answer(checkpointer.save, 2, model, optimizer)
    return [optimizer.state[p] for p in model.parameters()], said


def test_states_that_are_numbers_or_have_a_shape_of_their_own(tmp_path: Path) -> None:
    for states, said in on_ranks(2, counted, str(tmp_path)):
        for state in states:
            assert state["count"] == 3
            assert type(state["count"]) is int
            assert torch.equal(state["table"], torch.full((2, 3), 3.0, dtype=torch.float64))
        assert said.startswith("param group 0: cannot be saved: ")
        assert "values that JSON can represent" in said


def save_what_differs(folder: str) -> list[str]:
    """Mistakes of one rank alone, each found on both."""
    checkpointer, is_first = lowband.Checkpointer(folder), dist.get_rank() == 0
    model, optimizer = bag()
    found = []
    for step, extra in (
        (1 + dist.get_rank(), {}), (3, {"x": 1} if is_first else {"x": object()}), (-1, {}), ("last", {}),
    ):  # fmt: skip
        found.append(answer(checkpointer.save, step, model, optimizer, extra))
    path = checkpointer.latest() if is_first else Path(folder)
    return [*found, answer(checkpointer.load, path, model, optimizer)]


def test_what_one_rank_cannot_save_is_refused_on_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, save_what_differs, str(tmp_path / "ck"))
    assert first == second
    assert "rank 1 saves a different step or state from rank 0" in first[0]
    assert first[1].startswith("extra: cannot be saved")
    assert first[2] == "Checkpointer.save: step is -1 (allowed: int, 0 to 99999999)"
    assert first[3] == "Checkpointer.save: step is 'last' (allowed: int, 0 to 99999999)"
    assert first[4] == f"{tmp_path / 'ck'}: no checkpoint to load (allowed: load_newest)"
    assert not (tmp_path / "ck").exists()
