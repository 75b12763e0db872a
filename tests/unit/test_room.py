"""A run whose states have no room, or whose machine has no rate for them, is refused before it starts."""

import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lowband.cost.held import held_bytes
from lowband.engine.collectives.copies import room
from lowband.errors import UserError
from lowband.run.ranks import Rank, ranks_here
from lowband.run.train import train
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG

SMOKE = next(spec for spec in CONFIG.runs(["smoke"]) if spec.machine.name == "local")
ADAM = 4 + 8  # bytes a parameter: fp32 master weights, two moments


def on(tier: str, **changes: Any) -> dict[str, Any]:
    scheme = {"weights": "self", "grads": "self", "optim": f"world@{tier}", "name": "offloaded"}
    plain = {"ranks": 4, "model": CONFIG.model("gpt-200k"), "seq_len": 32, "micro_batch": 1}
    return {**SMOKE.model_dump(), **plain, "scheme": Scheme.parse(scheme, "test"), **changes}


def weights_on(tier: str) -> Scheme:
    scheme = {"weights": f"world@{tier}", "grads": "world", "optim": "world", "name": "offloaded"}
    return Scheme.parse(scheme, "test")


PLACES = {"host": "in this node's memory", "disk": "on this node's disk"}
Memory, Space = namedtuple("Memory", "available"), namedtuple("Space", "free")


def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], short: str
) -> tuple[RunSpec, str]:
    """The spec, and what is said of it where a tier is short of room."""
    free = {"host": 10**9, "disk": 10**9, short: 10**5}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(free["host"]))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Space(free["disk"]))
    spec, path = RunSpec.parse(values, "test"), tmp_path / "spec.json"
    path.write_text(spec.to_json())
    with pytest.raises(UserError) as caught:
        train(path)
    return spec, str(caught.value)


@pytest.mark.parametrize(("tier", "short"), [("host", "host"), ("disk", "disk"), ("disk", "host")])
def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, short: str) -> None:
    _, said = refused(tmp_path, monkeypatch, on(tier), short)
    found = re.fullmatch(
        rf"scheme 'offloaded': ([\d,]+) bytes of states {PLACES[short]}, where 100,000 are free "
        r"\(allowed: a smaller model, more nodes\)",
        said,
    )
    assert found is not None, said
    parameters = CONFIG.model("gpt-200k").parameters
    if short == tier:  # and the gradients, in the host's memory
        assert ADAM * parameters <= int(found[1].replace(",", "")) < 2 * ADAM * parameters
    assert [each.name for each in tmp_path.iterdir()] == ["spec.json"]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_no_room_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    spec, said = refused(tmp_path, monkeypatch, on(tier, scheme=weights_on(tier)), tier)
    needed = spec.ranks * held_bytes(spec, "gloo")[f"weights@{tier}"]
    assert said.startswith(
        f"scheme 'offloaded': {needed:,} bytes of states {PLACES[tier]}, where 100,000 are free"
    )


def test_no_room_for_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"scheme": CONFIG.scheme("zero1").model_dump(), "recompute": "host"}
    spec, said = refused(tmp_path, monkeypatch, {**on("host"), **plain}, "host")
    needed = spec.ranks * held_bytes(spec, "gloo")["activations@host"]
    assert said.startswith(
        f"scheme 'zero1': {needed:,} bytes of states and activations {PLACES['host']}, where 100,000 are free"
    )


@pytest.mark.parametrize(
    ("set_by_launcher", "here"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x3),2"}, 8),  # this node may be one of the full ones
        ({}, 1),
    ],
)
def test_a_rank_alone_counts_its_node_s(
    monkeypatch: pytest.MonkeyPatch, set_by_launcher: dict[str, str], here: int
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by_launcher.items():
        monkeypatch.setenv(name, value)
    alone = Rank(3, 26, 3, "env://")
    assert ranks_here(alone, 26) == here
    assert ranks_here([alone, alone], 26) == 2
    assert ranks_here(None, 26) == 26


def test_a_tier_without_a_rate() -> None:
    """Where links have rates; a machine without them cannot be predicted anyway."""
    cuda = CONFIG.machine("cuda")
    assert RunSpec.parse(on("host", machine=cuda), "test").machine is cuda
    alps = CONFIG.machine("alps")
    for tier, machine, missing in (("disk", cuda, "disk"), ("host", alps, "host"), ("disk", alps, "host")):
        with pytest.raises(UserError, match=rf"tier '{missing}' has no rates") as caught:
            RunSpec.parse(on(tier, machine=machine), "a file")
        assert "\n" not in str(caught.value) and machine.name in str(caught.value)
    with pytest.raises(UserError, match="tier 'host' has no rates"):
        RunSpec.parse(on("host", machine=alps, scheme=weights_on("host")), "a file")
    with pytest.raises(UserError, match="states on a disk: neither on device fake nor in stages"):
        RunSpec.parse(on("host", device="fake", scheme=weights_on("disk")), "a file")
    resident = weights_on("host").model_copy(update={"resident": 0.5})
    with pytest.raises(UserError, match="resident neither on device fake, nor in stages of a pipeline, nor"):
        RunSpec.parse(on("host", device="fake", scheme=resident), "a file")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU pins memory")
def test_memory_that_cannot_be_pinned_is_refused_in_one_line() -> None:
    with pytest.raises(UserError) as error:
        room(256, torch.bfloat16, torch.device("cuda", 0))
    assert str(error.value).startswith("host memory: 512 bytes of it cannot be pinned: ")
    assert "ulimit -l" in str(error.value) and "\n" not in str(error.value)
