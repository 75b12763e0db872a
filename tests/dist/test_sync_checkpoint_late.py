"""Checkpoints while an exchange is on its way: training resumes with the same bits, and so does a run."""

from pathlib import Path

import pytest
import torch
from seldom import ZERO3
from started import MODEL, begun, ended, spec_file
from test_checkpoint import train
from test_parity import SPEC, optimizer_of
from test_stopped_runs import Kill
from test_sync_checkpoint import build, masters
from test_sync_late import NESTEROV

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.model.gpt import GPT
from lowband.run.on_ranks import on_ranks
from lowband.spec.records import Outcome, StepRecord
from lowband.spec.run_folder import RunFolder
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync

INNER = {"package": 1, "node": 2}
LATE = Scheme(name="late", **ZERO3, sync=Sync(**NESTEROV, delay=2, mix=0.5))
PAIRS = Scheme(
    name="pairs", **ZERO3, sync=Sync(beyond="node", every=3, delay=2, partners="exponential")
)  # fmt: skip
SAVED, LAST = 4, 9  # an exchange that starts after step 3 arrives after step 5


def loaded(scheme: Scheme, folder: Path):
    model, optimizer = build(scheme, lowband.Topology(INNER))
    train(model, optimizer, 0, 3)  # has an exchange of its own on its way, which is dropped
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.load(checkpointer.latest(), model, optimizer)
    return model, optimizer


def save_and_go_on(folder: str):
    model, optimizer = build(LATE, lowband.Topology(INNER))
    checkpointer = lowband.Checkpointer(Path(folder))
    train(model, optimizer, 0, SAVED)
    checkpointer.save(SAVED, model, optimizer, {})
    train(model, optimizer, SAVED, LAST)  # while it is written
    checkpointer.wait()
    return masters(model), lowband.full_state_dict(model)


def go_on(folder: str):
    model, optimizer = loaded(LATE, Path(folder))
    train(model, optimizer, SAVED, LAST)
    held = engine_of(model).meter
    assert held.now["in_flight"] == held.peak["in_flight"]  # that of step 9
    return masters(model), lowband.full_state_dict(model)


def go_on_otherwise(folder: str):
    """With other delays and periods the update arrives too, once."""
    arrived = []
    for sync in ({"delay": 0, "mix": 0.5}, {"delay": 1}, {"every": 2, "delay": 1}, {"every": 6, "delay": 5}):
        scheme = LATE.model_copy(update={"sync": Sync(**{**NESTEROV, **sync})})
        model, optimizer = loaded(scheme, Path(folder))
        exchanges = engine_of(model).replicas.exchanges
        assert all(each.is_in_flight for each in exchanges)
        first, updates = exchanges[0].values.clone(), exchanges[0].update().clone()
        for step in range(SAVED, SAVED + 6):
            train(model, optimizer, step, step + 1)
            if not torch.equal(exchanges[0].values, first):
                arrived.append(step + 1)
                if sync["delay"]:  # otherwise the next exchange is in it too
                    assert torch.equal(exchanges[0].values, first - updates)
                break
    return arrived


def load_under_other_units(folder: str) -> list[str]:
    """Fragments on their way, as before and with all parameters in one unit; then no exchange at all."""
    scheme = LATE.model_copy(update={"sync": Sync(**NESTEROV, fragments=3, delay=2, mix=0.5)})
    topology, said = lowband.Topology(INNER), []
    model, optimizer = build(scheme, topology)
    train(model, optimizer, 0, SAVED)
    before = [each.is_in_flight for each in engine_of(model).replicas.exchanges]
    assert before == [True, False, True]  # started after steps 4 and 3; that of step 2 has arrived
    checkpointer = lowband.Checkpointer(Path(folder))
    checkpointer.save(SAVED, model, optimizer, {})
    checkpointer.wait()
    model, optimizer = build(scheme, topology)
    checkpointer.load(checkpointer.latest(), model, optimizer)
    assert [each.is_in_flight for each in engine_of(model).replicas.exchanges] == before
    for _ in range(2):  # refused before anything is overwritten, and again
        model = lowband.shard(GPT(SPEC, seed=7), scheme, topology, lambda module: False, torch.float32)
        with pytest.raises(UserError) as error:
            checkpointer.load(checkpointer.latest(), model, optimizer_of(model.parameters()))
        said.append(str(error.value))
        assert engine_of(model).replicas.is_new
    return said


def test_fragments_on_their_way_fit_the_units_or_are_refused(tmp_path: Path) -> None:
    for said in on_ranks(4, load_under_other_units, str(tmp_path), time_limit_s=400):
        assert len(set(said)) == 1
        assert "had not arrived, that of '" in said[0]
        assert "(allowed: the units and fragments that it was saved with)" in said[0]
        assert "\n" not in said[0]


def test_resumed_while_an_exchange_is_on_its_way(tmp_path: Path) -> None:
    expected = on_ranks(4, save_and_go_on, str(tmp_path), time_limit_s=400)
    for rank, (own, state) in enumerate(on_ranks(4, go_on, str(tmp_path), time_limit_s=400)):
        assert torch.equal(own, expected[rank][0])
        assert all(torch.equal(state[name], value) for name, value in expected[rank][1].items())
    assert on_ranks(4, go_on_otherwise, str(tmp_path), time_limit_s=400) == [[6, 6, 5, 8]] * 4


@pytest.mark.parametrize(
    "scheme", [LATE, pytest.param(PAIRS, marks=pytest.mark.wide)], ids=lambda scheme: scheme.name
)
def test_a_killed_run_has_the_records_of_one_that_was_not(tmp_path: Path, scheme: Scheme) -> None:
    """Also of bytes that were sent before it was killed and are counted afterwards, when they arrive."""
    found = []

    def has_six(folder: RunFolder, _: StepRecord) -> bool:
        return any(folder.checkpoints.glob("*/step-00000006"))

    kill = Kill(RunFolder, "append_step", 8, once=has_six)
    for name, prepare in (("whole", lambda: None), ("killed", kill.arm)):
        folder = tmp_path / name
        folder.mkdir()
        path = spec_file(folder, scheme=scheme.model_dump(), steps=9, checkpoint_every=2, model=MODEL)
        code, error = ended(begun(path, prepare), path)
        if name == "killed":
            assert code == -9
            code, error = ended(begun(path), path)
        assert code == 0, error
        outcome = Outcome.read_json(folder / "outcome.json")
        assert outcome.resumed_from == (6 if name == "killed" else 0)  # the exchange arrives after step 8
        steps = RunFolder(folder).read_steps()
        found.append(([(step.loss, step.grad_norm, step.sent) for step in steps], outcome.sent))
        found[-1] += (outcome.weights_sha256, outcome.consensus_distance)
    assert found[0] == found[1]
