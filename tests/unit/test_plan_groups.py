"""Groups of nodes over which states are sharded, and replicated over several (HSDP)."""

import json
import re
from pathlib import Path

import pytest

from lowband.__main__ import main
from lowband.errors import UserError
from lowband.predict.groups import with_groups
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.search.degrees import axes_to_try
from lowband.predict.workload import Workload
from lowband.spec.machine import Level
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (4, "groups of 4 ranks on nodes of 8"), (8, "groups of 8 ranks on nodes of 8"),
        (12, "groups of 12 ranks on nodes of 8"), (128, "groups of 128 ranks in a job of 128"),
    ],
)  # fmt: skip
def test_groups_are_several_nodes_and_not_all(ranks: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        with_groups(*setting(CONFIG, "dgx-h100", "fsdp"), ranks, 128)


def test_a_named_scheme_over_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """What it shards over all ranks; the rest stays where it was."""
    job = ["predict", "--root", str(ROOT), "--cluster", "dgx-h100", "--stack", "fsdp"]
    job += ["--model", "llama-3-8b", "--gpus", "128", "--seq", "2048", "--groups", "32", "--scheme"]
    machine, stack = with_groups(*setting(CONFIG, "dgx-h100", "fsdp"), 32, 128)
    for name, weights in (("zero3", "group-32"), ("zero1", "self")):
        scheme = Scheme(name=name, weights=weights, grads=weights, optim="group-32")
        one = Workload(machine, stack, CONFIG.model("llama-3-8b"), scheme, 128, 1, 2048)
        row = json.loads(printed_by(capsys, *job, name, "--json"))
        assert (row["weights"], row["optim"]) == (weights, "group-32")
        assert row["step_time_s"] == float(predict(one, interval=False).step_time_s)
        assert row["scheme"] == f"{name}, groups of 32"
    assert "'ddp' shards nothing over all ranks" in printed_by(capsys, *job, "ddp", code=2)
    beside = json.loads(printed_by(capsys, *job, "ddp", "zero3", "--json"))
    assert [row["scheme"] for row in beside] == ["ddp", "zero3, groups of 32"]
    alone = json.loads(printed_by(capsys, *job[:-3], "--scheme", "ddp", "--json", code=1))
    assert beside[0] == alone


def test_groups_that_leave_no_replicas_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With 4 stages, 32 of 128 ranks are all of the data axis; with tp 8 they are 4 of its 16."""
    job = ["predict", "--root", str(ROOT), "--cluster", "dgx-h100", "--model", "llama-3-8b", "--gpus", "128"]
    job += ["--scheme", "zero3", "--seq", "2048", "--groups", "32"]
    said = printed_by(capsys, *job, "--pp", "4", code=2)
    assert "--groups: one group has all 32 ranks along the data axis" in said
    row = json.loads(printed_by(capsys, *job, "--tp", "8", "--json"))
    assert row["communication_s"]["replica_reduce"] > 0
    plan = ["plan", *job[1:7], "--gpus", "128", "--seq", "2048", "--tp", "1", "--pp", "4", "--groups", "32"]
    assert "group-32" not in printed_by(capsys, *plan, "--micro-batch", "1", "--software", "any")


def test_a_level_of_the_machine_s_own_keeps_its_size() -> None:
    machine, stack = setting(CONFIG, "dgx-h100", "fsdp")
    *inner, world = machine.levels
    board = Level(name="group-32", size=32, link=world.link)
    own = machine.model_copy(update={"levels": (*inner, board, world)})
    with pytest.raises(UserError, match="machine 'dgx-h100' has a level 'group-32'"):
        with_groups(own, stack, 32, 256)
    assert with_groups(own, stack, 64, 256)[0].sizes == {"node": 8, "group-32": 32, "group-64": 64}
    with pytest.raises(UserError, match="groups of 48 ranks on groups of level 'group-32' of 32"):
        with_groups(own, stack, 48, 256)


PLACED = ("weights", "secondary", "grads", "optim")


def test_a_search_over_several_groups_has_what_each_has_alone(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "--root", str(ROOT), "--cluster", "dgx-a100", "--model", "llama-3-8b", "--gpus", "128"]
    job += ["--seq", "2048", "--tp", "1", "--pp", "1", "--micro-batch", "1"]
    times, counts = dict[tuple[str, ...], float](), list[int]()
    for given in ([], ["--groups", "32"], ["--groups", "64"], ["--groups", "64", "32", "64"]):
        rows = json.loads(printed_by(capsys, *job, *given, "--json"))
        found = {tuple(row[name] for name in PLACED): row["step_time_s"] for row in rows}
        said = printed_by(capsys, *job, *given)
        counts.append(int(re.search(r"([\d,]+) candidates", said)[1].replace(",", "")))
        if len(given) < 4:
            times |= found
    fastest = sorted(times.items(), key=lambda each: each[1])[: len(found)]
    assert sorted(found.values()) == [seconds for _, seconds in fastest]
    assert {level for places in found for level in places} >= {"group-32", "group-64", "world", "node"}
    plain, one, other, both = counts
    assert both - plain == (one - plain) + (other - plain) > 0
    assert "weights self: " in said


def test_groups_change_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Its host's link has twice the states where two groups have them; tensor ranks stay in a node."""
    job = ["predict", "--root", str(ROOT), "--cluster", "dgx-h100", "--model", "llama-3-8b", "--gpus", "128"]
    job += ["--scheme", "zero3", "--seq", "2048", "--tiers", "optim@host", "--json"]
    plain, grouped = (json.loads(printed_by(capsys, *job, *given)) for given in ([], ["--groups", "64"]))
    assert grouped["time_s"]["host_update"] == pytest.approx(2 * plain["time_s"]["host_update"], rel=1e-3)
    assert grouped["tiers"]["host_node_bytes"] == pytest.approx(
        2 * plain["tiers"]["host_node_bytes"], rel=1e-3
    )
    machine, stack = setting(CONFIG, "dgx-h100", "fsdp")
    one, _ = with_groups(machine, stack, 64, 128)
    model = CONFIG.model("llama-3-8b")
    assert one.node_size == machine.node_size == 8
    assert axes_to_try(one, model) == axes_to_try(machine, model)


def test_a_machine_of_one_level_has_no_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flat.yaml"
    file.write_text(
        "description: made up\n"
        "device: {name: a GPU, memory_gib: 80, peak_tflops: {bf16: 300}, source: made up}\n"
        "levels: [{name: world, link: {gigabytes_per_s: 25, source: made up}}]\n"
    )
    job = ["plan", "--root", str(ROOT), "--cluster", str(file), "--model", "gpt-1m", "--gpus", "4"]
    assert "weights self" in printed_by(capsys, *job)
    assert ",group-2,native" in printed_by(capsys, *job, "--groups", "2", "--software", "any", "--csv")


def test_groups_of_nodes_are_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    """Sharding over a group sends no gathers beyond it, in as much time as over as many ranks alone."""
    machine, stack = with_groups(*setting(CONFIG, "dgx-h100", "fsdp"), 32, 128)
    model, scheme = (
        CONFIG.model("llama-3-8b"),
        Scheme(name="hsdp", weights="group-32", grads="group-32", optim="group-32"),
    )
    grouped = predict(Workload(machine, stack, model, scheme, 128, 1, 8192), interval=False)
    alone = setting(CONFIG, "dgx-h100", "fsdp")
    small = predict(Workload(*alone, model, CONFIG.scheme("zero3"), 32, 1, 8192), interval=False)
    for name in ("forward_gather", "backward_gather", "grad_reduce"):
        assert grouped.communication_s[name] == pytest.approx(
            float(small.communication_s[name]), rel=1e-3
        )  # padding
    assert grouped.communication_s["replica_reduce"] > 0
    job = ["plan", "--cluster", "dgx-h100", "--model", "llama-3-8b", "--gpus", "128", "--micro-batch", "1"]
    job += ["--seq", "2048", "--tp", "1", "--pp", "1", "--root", str(ROOT), "--groups"]
    assert "weights group-32, grads group-32, optim group-32" in printed_by(capsys, *job, "32")
    assert main([*job, "12"]) == 2
    assert "groups of 12 ranks on nodes of 8 (allowed: multiples of 8 from 16)" in capsys.readouterr().err
