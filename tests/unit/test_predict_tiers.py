"""States beyond the device: bytes that leave it, what hides, what the host updates, what fits where."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lowband.cost.bytes import sent_bytes, stage_numels
from lowband.cost.memory import state_bytes
from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond, Rates, best_stride, update_s
from lowband.errors import UserError
from lowband.predict.prediction import Prediction, predict
from lowband.predict.request import setting
from lowband.predict.search.candidates import MODEL_ERROR
from lowband.predict.search.choice import chosen
from lowband.predict.search.largest import PLACES, largest, of_width
from lowband.predict.search.plan import plan
from lowband.predict.show import largest as show
from lowband.predict.show.point_text import fits, text
from lowband.predict.show.record import record
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.machine import TierName
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Fact
from tests.checkout import CONFIG
from tests.printed import printed_by


def job(beyond: Beyond | None = None, cluster: str = "polaris", ranks: int = 4, **more: object) -> Workload:
    machine, stack = setting(CONFIG, cluster, "ours")
    scheme = CONFIG.scheme("zero3").on(list(machine.sizes))
    values = {"micro_batch": 1, "seq_len": 2048, "accumulation": 1} | more
    return Workload(machine, stack, CONFIG.model("gpt-10b"), scheme, ranks, beyond=beyond, **values)  # type: ignore[arg-type]


def test_the_host_has_what_the_device_has_no_more() -> None:
    on_device, on_host = predict(job()), predict(job(Beyond("host")))
    optim = float(on_device.memory_bytes["optim"])
    assert on_host.memory_bytes["optim"] == 0
    assert on_host.memory_bytes["optim@host"] == pytest.approx(optim, rel=1e-9)
    assert on_host.memory_bytes["grads@host"] == pytest.approx(optim / 3, rel=1e-9)  # 4 bytes beside 12
    assert on_host.memory_bytes["weights"] == pytest.approx(optim / 6, rel=1e-9)  # 2 bytes: no master stays
    of_unit = 2 * max(stage_numels(job().model, job().levels, job().axes)) / 4  # new weights on their way
    assert on_host.tier_bytes == {
        "host": pytest.approx(4 * (optim * 4 / 3 + of_unit), rel=1e-9)
    }  # of 4 ranks
    half = predict(job(Beyond("host", share=0.5)))
    assert half.memory_bytes["optim"] == pytest.approx(optim / 2, rel=1e-9)


def test_the_update_is_what_the_slower_of_memory_and_way_takes() -> None:
    """Byte by byte: 28 of a parameter that the host updates, 24 of one that moves there and back."""
    parameters = 10_000
    for rates, stride in ((Rates(30, 20, 50), 0), (Rates(30, 20, 50), 3), (Rates(0.1, 0.2, 50), 2)):
        moved = range(0, parameters, stride) if stride else range(0)
        memory = sum(24 if i in moved else 28 for i in range(parameters)) / (rates.update * 1e9)
        way = 12 * len(moved) / (min(rates.fetch, rates.stash) * 1e9)
        assert update_s(parameters, rates, stride) == pytest.approx(max(memory, way), rel=1e-3)


def test_the_best_stride_is_the_fastest_of_all() -> None:
    for fetch, update in ((30, 50), (3, 170), (1, 170), (0.05, 170)):
        rates = Rates(fetch, fetch, update)
        best = best_stride(rates)
        assert all(update_s(1, rates, best) <= update_s(1, rates, stride) for stride in (0, *range(2, 11)))
    assert best_stride(Rates(30, 30, 50)) == 2
    assert best_stride(Rates(0.05, 0.05, 170)) == 0  # a way that slow helps nothing


def test_a_step_waits_for_the_host_and_for_what_does_not_hide() -> None:
    host = job().machine.tier("host")
    rates = Rates.of(host, 4)
    parameters = sum(predict(job(Beyond("host"))).memory_bytes[k] for k in ("optim@host",)) / 12
    items = predict(job(Beyond("host"))).time_s
    assert items["host_update"] == pytest.approx(28 * parameters / rates.update / 1e9, rel=1e-9)
    before = predict(job()).time_s
    assert items["optimizer"] == 0 and before["optimizer"] > 0
    assert all(before[name] == 0 for name in ("stash", "host_update", "fetch"))
    strided = predict(job(Beyond("host", stride=2))).time_s
    assert strided["optimizer"] == pytest.approx(before["optimizer"] / 2, rel=1e-9)
    bare = predict(unhidden(job(Beyond("host")))).time_s
    assert bare["stash"] == pytest.approx(2 * parameters / rates.stash / 1e9, rel=1e-9)  # bf16
    assert bare["fetch"] == pytest.approx(2 * parameters / rates.fetch / 1e9, rel=1e-9)
    assert items["stash"] < bare["stash"]


def test_weights_come_before_each_gather() -> None:
    """Of 3 passes, forward and backward each, on their way through the host where they lie on a disk. The
    root stays gathered from forward to backward."""
    for words, passes in ((["weights@host"], 3), (["weights@disk"], 1)):
        one = unhidden(job(Beyond.of(words), "dgx-h100", 8, accumulation=passes))
        tier = Rates.of(one.machine.tier(words[0].partition("@")[2]), 8)  # type: ignore[arg-type]
        p = predict(one)
        copied = passes * float(p.memory_bytes[words[0]]) / min(tier.fetch, 50) / 1e9
        assert p.time_s["fetch"] == pytest.approx(copied, rel=1e-9)
        root, *blocks = stage_numels(one.model, one.levels, one.axes)
        assert p.time_s["stash"] == pytest.approx(copied * sum(blocks) / (root + sum(blocks)), rel=1e-9)
        assert p.time_s["host_update"] == 0 and p.time_s["optimizer"] > 0


@pytest.mark.parametrize("secondary", [None, "node"])
def test_weights_that_stay_on_the_device_are_not_fetched(secondary: str | None) -> None:
    """Seconds of what is copied by the closed form, and room for it; a secondary copy stays, too."""
    ranks = 8 if secondary is None else 16
    of = job(None, "dgx-h100", ranks, accumulation=3)
    beside = of.scheme.model_dump() | {"weights": "world@host", "secondary": secondary}
    rates = Rates.of(of.machine.tier("host"), 8)
    shares = (None, 0.3, 0.6, 1.0)
    placed = [Scheme.model_validate(beside | ({"resident": share} if share else {})) for share in shares]
    units, found = stage_numels(of.model, of.levels, of.axes), []
    for scheme in placed:
        one = unhidden(replace(of, scheme=scheme))
        p, copied = predict(one), sent_bytes(units, scheme, of.levels, "bf16", "bf16", 3, False)
        by_row = {name: size for (tier, name, _), size in copied.items() if tier == "host"}
        backward = by_row.pop("backward_fetch", 0)
        assert p.time_s["fetch"] == pytest.approx(sum(by_row.values()) / rates.fetch / 1e9, rel=1e-9)
        assert p.time_s["stash"] == pytest.approx(backward / rates.fetch / 1e9, rel=1e-9)
        on_device = scheme.resident * 2 * sum(units) / ranks
        assert p.memory_bytes["weights"] == pytest.approx(on_device, rel=1e-9)
        found.append(p)
    fetched = [float(p.time_s["fetch"]) for p in found]
    assert fetched == sorted(fetched, reverse=True) and len({*fetched}) == len(shares)
    assert fetched[-1] > 0  # new ones' way
    assert found[-1].time_s["stash"] == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"beyond": Beyond.of(["weights@host"])}, "resident beside --tiers weights"),
        ({"axes": Ways(pipeline=2)}, "resident in stages of a pipeline or with ranks along experts"),
    ],
)
def test_where_what_stays_is_not_predicted(more: dict[str, Any], said: str) -> None:
    of = job(None, "dgx-h100", 8)
    dumped = of.scheme.model_dump() | {"weights": "world@host", "resident": 0.5}
    with pytest.raises(UserError, match=said):
        predict(replace(of, scheme=Scheme.model_validate(dumped), **more))


def test_a_disk_is_read_and_written_beside_the_update() -> None:
    one = unhidden(job(Beyond.of(["optim@disk"]), "dgx-h100", 8))
    host, disk = (Rates.of(one.machine.tier(tier), 8) for tier in ("host", "disk"))
    states = float(predict(one).memory_bytes["optim@disk"])
    took = states / 12 * 28 / host.update + states / disk.fetch + states / disk.stash
    assert predict(one).time_s["host_update"] == pytest.approx(took / 1e9, rel=1e-9)


def test_an_update_of_states_on_a_disk_hides_behind_the_next_step_s_first_pass_of_ours() -> None:
    hidden = []
    for passes in (1, 2):
        one = job(Beyond.of(["optim@disk"]), "dgx-h100", 8, accumulation=passes)
        other = replace(one, stack=one.stack.with_options({"hidden_updates": False}))
        mine, theirs = (predict(each).time_s for each in (one, other))
        hidden.append(float(theirs["host_update"] - mine["host_update"]))
        first = float(mine["forward"]) / passes
        assert first <= hidden[-1] < 1.2 * first  # with what a forward waits for
    assert hidden[0] == pytest.approx(hidden[1], rel=1e-9)


def unhidden(one: Workload) -> Workload:
    """The job on a stack that hides nothing."""
    none = Fact(value=0.0, source="made up")
    return replace(one, stack=one.stack.model_copy(update={"overlap": none}))


def test_a_disk_is_slower_than_the_host_and_items_add_up() -> None:
    found = [
        predict(job(Beyond.of(words), "dgx-h100", 8))
        for words in (["optim@host"], ["optim@disk"], ["optim@disk", "weights@disk"])
    ]
    steps = [float(p.step_time_s) for p in found]
    assert steps == sorted(set(steps))
    for p in found:
        assert p.step_time_s == pytest.approx(sum(p.time_s.values()), rel=1e-12)
    assert found[2].memory_bytes["weights"] == 0
    assert set(found[1].tier_bytes) == {"host", "disk"}


def test_a_grid_is_its_points() -> None:
    grid = predict(job(Beyond("host", "host"), micro_batch=np.array([1, 2]), accumulation=np.array([1, 4])))
    for i, (b, a) in enumerate(((1, 1), (2, 4))):
        one = predict(job(Beyond("host", "host"), micro_batch=b, accumulation=a))
        assert grid.step_time_s[i] == pytest.approx(float(one.step_time_s), rel=1e-12)  # type: ignore[index]
        assert bool(np.ravel(grid.fits)[i]) == bool(one.fits)


def zero3(**changes: Any) -> Scheme:
    plain = {"name": "zero3", "weights": "world", "grads": "world", "optim": "world"}
    return Scheme.parse({**plain, **changes}, "test")


def counted_as(scheme: Scheme, plain: Workload, kinds: list[str], *found: Prediction) -> dict[str, int]:
    """What cost/memory.py counts of states, of whole units; a prediction's are of shares."""
    numels = stage_numels(plain.model, plain.levels, plain.axes)
    counted = state_bytes(numels, scheme, plain.levels, "bf16", "bf16", 1, "nccl")
    for kind in kinds:
        for each in found:
            assert each.memory_bytes[kind] == pytest.approx(counted[kind], rel=1e-9)
    return counted


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_scheme_with_a_tier_is_predicted_as_the_option(tier: TierName) -> None:
    plain = job(cluster="dgx-h100", ranks=8)
    by_option = replace(plain, beyond=Beyond(tier))
    scheme = zero3(optim=f"world@{tier}")
    by_scheme = replace(plain, scheme=scheme)
    ours, theirs = predict(by_option), predict(by_scheme)
    assert ours.time_s == theirs.time_s
    kinds = ["weights", "grads", "optim", f"optim@{tier}", "grads@host"]
    counted = counted_as(scheme, plain, kinds + ["weights@host"] * (tier == "disk"), ours, theirs)
    half = predict(replace(by_scheme, beyond=Beyond(tier, share=0.5)))
    assert half.memory_bytes["optim"] == pytest.approx(counted[f"optim@{tier}"] / 2, rel=1e-9)


@pytest.mark.parametrize(
    ("tier", "offload", "share", "moved"),
    [
        ("host", {"share": 0.5}, 0.5, 0),
        ("disk", {"share": 0.5}, 0.5, 0),
        ("host", {"stride": 3}, 1, 1 / 3),
        ("host", {"share": 0.3, "stride": 1}, 0.3, 0.3),
    ],
)
def test_parts_of_a_scheme_are_predicted_as_the_option(
    tier: TierName, offload: dict[str, float], share: float, moved: float
) -> None:
    """But of whole units: of these 25 blocks and the root a few hundredths more or less."""
    plain = job(cluster="dgx-h100", ranks=8)
    by_scheme = replace(plain, scheme=zero3(optim=f"world@{tier}", offload=offload))
    placed = by_scheme.placed
    assert placed is not None and share <= placed.share < share + 0.05
    assert placed.moved == pytest.approx(moved, abs=0.05)
    by_option = replace(plain, beyond=placed)
    ours, theirs = predict(by_option), predict(by_scheme)
    assert ours.time_s == theirs.time_s
    assert ours.memory_bytes["buffers"] >= theirs.memory_bytes["buffers"]  # of the largest units
    for kind in ("weights", "grads", "optim", f"optim@{tier}", "grads@host", "weights@host"):
        expected = theirs.memory_bytes.get(kind, 0)
        assert ours.memory_bytes.get(kind, 0) == pytest.approx(expected, rel=1e-9), kind


@pytest.mark.parametrize("parts", [{"share": 0.5}, {"stride": 2}])
def test_parts_are_never_late(parts: dict[str, float]) -> None:
    with pytest.raises(UserError, match="--tier-late is of all states"):
        Beyond.of(["optim@host"], late=True, **parts)


def test_a_late_update_hides_behind_the_passes() -> None:
    plain = job(cluster="dgx-h100", ranks=8)
    now, late = (
        predict(replace(plain, scheme=zero3(optim="world@host", **more)))
        for more in ({}, {"offload": {"late": True}})
    )
    assert 0 <= late.time_s.get("host_update", 0) < now.time_s["host_update"]
    assert late.memory_bytes["grads@host"] == 2 * now.memory_bytes["grads@host"]
    assert late.memory_bytes["weights@host"] == now.memory_bytes["weights"]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_weights_with_a_tier_are_predicted_as_the_option(tier: TierName) -> None:
    plain = job(cluster="dgx-h100", ranks=8)
    scheme = zero3(weights=f"world@{tier}")
    ours, theirs = (
        predict(replace(plain, beyond=Beyond(weights=tier))),
        predict(replace(plain, scheme=scheme)),
    )
    assert ours.time_s == theirs.time_s
    kinds = ["weights", "grads", "optim", f"weights@{tier}", "gathered"]
    assert counted_as(scheme, plain, kinds, ours, theirs)["weights"] == 0
    assert record(replace(plain, scheme=scheme), theirs)["weights"] == f"world@{tier}"


def test_a_full_host_does_not_fit_though_the_device_does() -> None:
    small = job(Beyond("host"))
    tiers = {"host": small.machine.tier("host").model_copy(update={"capacity_gib": 100})}
    full = replace(small, machine=small.machine.model_copy(update={"tiers": tiers}))
    p = predict(full)
    assert p.peak_memory_bytes < 40 * GIB and not p.fits and predict(small).fits
    said = text(record(full, p))
    assert said.startswith("does not fit beyond the device: host 151 of 100 GiB: does not fit")
    assert "short" not in said


@pytest.mark.parametrize(
    "places, more, says",
    [
        (["optim"], {}, "no place 'optim'"),
        (["grads@host"], {}, "no place 'grads@host'"),
        (["optim@tape"], {}, "no place 'optim@tape'"),
        (["optim@host"], {"share": 0}, "share 0"),
        (["optim@host"], {"stride": -1}, "stride -1"),
        (["optim@disk"], {}, "tier 'disk' has no rates"),
    ],
)
def test_what_cannot_be_is_refused(places: list[str], more: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        job(Beyond.of(places, **more))  # type: ignore[arg-type]


def test_the_planner_places_states_beyond_the_device_of_every_candidate() -> None:
    machine, stack = setting(CONFIG, "polaris", "ours")
    model, search = CONFIG.model("gpt-20b"), {"axes": [Ways()], "micro_batches": [1], "exact": True}
    with pytest.raises(UserError, match="does not fit 4 x 40 GiB"):
        bare = machine.model_copy(update={"tiers": {}})
        plan(bare, stack, model, 4, 2048, 4, **search)  # type: ignore[arg-type]
    found = plan(machine, stack, model, 4, 2048, 4, beyond=Beyond("host"), **search)  # type: ignore[arg-type]
    assert found.ranked
    for one in found.ranked[:5]:
        alone = predict(one.job, interval=False)
        assert alone.fits and float(alone.step_time_s) == pytest.approx(one.step_time_s, rel=1e-12)
    small = {"host": machine.tier("host").model_copy(update={"capacity_gib": 200})}
    with pytest.raises(UserError, match="GiB short"):
        less = machine.model_copy(update={"tiers": small})
        plan(less, stack, model, 4, 2048, 4, beyond=Beyond("host"), **search)  # type: ignore[arg-type]


@pytest.mark.parametrize("places", [["optim@host"], ["optim@host", "weights@host"]])
def test_what_the_planner_leaves_out_is_not_what_is_chosen(places: list[str]) -> None:
    """Its floor of a step is taken without sharding, under which more would be copied."""
    machine, stack = setting(CONFIG, "polaris", "ours")
    job = machine, stack, CONFIG.model("gpt-10b"), 16, 2048, 64, [Ways(), Ways(tensor=4)]
    some, all_of_them = (
        plan(*job, exact=True, beyond=Beyond.of(places), within=within) for within in (MODEL_ERROR, np.inf)
    )
    assert [one.knobs for one in chosen(some)] == [one.knobs for one in chosen(all_of_them)]
    assert len(some.candidates) < len(all_of_them.candidates)


def test_an_update_without_a_rate_is_refused() -> None:
    one = job(Beyond("host"), "dgx2", 16)
    bare = replace(one, machine=CONFIG.machine("dgx2"))  # without defaults
    with pytest.raises(UserError, match="the host's update has no rate"):
        predict(bare)


def test_the_largest_model_is_the_last_that_fits() -> None:
    one = job(cluster="dgx2", ranks=1, seq_len=1024)
    found = largest(one)
    assert [each.places for each in found] == list(PLACES)
    sizes = []
    for each in found:
        assert each.job is not None and each.prediction is not None and each.prediction.fits
        wider = replace(each.job, model=of_width(one.model, each.job.model.heads + 1))
        assert not predict(wider, interval=False).fits
        sizes.append(each.job.model.parameters)
        assert show.record(each)["parameters"] == sizes[-1]
    assert sizes == sorted(sizes)
    assert "none fits" not in show.text(one, [show.record(each) for each in found])


def test_a_family_has_its_widths_in_proportion() -> None:
    """Llama 7B with four times as many heads has 4 x 11,008 values inside of its MLPs and 4 x 32 layers."""
    model = CONFIG.model("llama-7b")
    wide = of_width(model, 4 * model.heads)
    assert (wide.mlp_width, wide.kv_hidden, wide.layers) == (4 * 11008, wide.hidden, 4 * 32)
    assert of_width(model, model.heads).parameters == model.parameters


def test_a_table_says_whose_tiers_are_too_small() -> None:
    one = record(job(), predict(job()))
    one |= {"short_by_bytes": 0}
    assert "too small" not in fits(one | {"fits": True})
    assert fits(one | {"fits": False}).endswith("fits, but its tiers are too small")


def test_a_family_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="family is not known"):
        largest(replace(job(), model=CONFIG.model("mixtral-8x7b")))


JOB = ["--cluster", "polaris", "--model", "gpt-10b", "--gpus", "4", "--root", str(CONFIG.root)]


@pytest.mark.parametrize(
    "words, says",
    [
        (["predict", "--scheme", "zero3", "--tier-stride", "2"], "are of --tiers"),
        (["predict", "--scheme", "zero3", "--tiers", "optim@host", "--tier-share", "2"], "share 2"),
        (["plan", "--tiers", "optim@host", "--outer-gbps", "1"], "--tiers is without --outer-gbps"),
        (["plan", "--lora-rank", "8", "--write", "mine"], "--lora-rank is without --write"),
        (["plan", "--tiers", "optim@host", "--largest"], "--tiers is without --largest"),
        (["plan", "--largest", "--tp", "2"], "--largest is without --tp"),
        (["plan", "--largest", "--micro-batch", "1", "2"], "--largest takes one --micro-batch"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in printed_by(capsys, words[0], *JOB, *words[1:], code=2)


def test_the_planner_prints_a_line_for_each_place(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed_by(capsys, "plan", *JOB, "--largest", "--seq", "1024").splitlines()
    assert [line.split("  ")[0] for line in said[3:]] == ["device", "optim@host", "optim@host weights@host"]
    rows = json.loads(printed_by(capsys, "plan", *JOB, "--largest", "--seq", "1024", "--json"))
    assert [row["parameters"] > 0 for row in rows] == [True, True, True]
