"""Share and stride of optimizer states in a tier, as the planner chooses them: against every choice."""

import json
import math
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lowband.cost.bytes import stage_numels
from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.predict.prediction import Prediction, predict
from lowband.predict.request import setting
from lowband.predict.room import surely
from lowband.predict.search.choice import chosen
from lowband.predict.search.largest import largest
from lowband.predict.search.parts import chosen_parts, short_share
from lowband.predict.search.placements import schemes
from lowband.predict.search.plan import plan
from lowband.predict.search.software import SOFTWARE, runners
from lowband.predict.show import largest as show
from lowband.predict.show import plan_files
from lowband.predict.show.plan_files import write
from lowband.predict.show.plan_text import records, report
from lowband.predict.workload import Workload
from lowband.spec.axes import ONLY_DATA, Ways
from lowband.spec.config import Config
from lowband.spec.files import create_whole
from lowband.spec.machine import Machine, TierName
from lowband.spec.model import ModelSpec
from lowband.spec.offload import Offload
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Fact
from tests.checkout import CONFIG
from tests.printed import printed_by

SOURCE, STACK = setting(CONFIG, "frontier", "ours")
OURS = [row for row in SOFTWARE if row.name == "lowband"]


def machine(device: float, host: float, update: float, link: float, tier: TierName = "host") -> Machine:
    """device, host: KiB of a rank and of a node; update, link: 10^9 bytes a second"""
    rates = {"update_gigabytes_per_s": update, "fetch_gigabytes_per_s": link, "stash_gigabytes_per_s": link}
    facts: dict[str, object] = {name: Fact(value=rate, source="made up") for name, rate in rates.items()}
    together = dict.fromkeys(
        ("node_update_gigabytes_per_s", "node_fetch_gigabytes_per_s", "node_stash_gigabytes_per_s")
    )
    one = SOURCE.tier("host").model_copy(
        update={**facts, **together, "capacity_gib": host * 1024 / GIB, "device_gib": None}
    )
    small = {"memory_gib": device * 1024 / GIB, "framework_gib": None, "kernel_us": None}
    tiers = {"host": one, tier: one}
    return SOURCE.model_copy(update={"device": SOURCE.device.model_copy(update=small), "tiers": tiers})


def model(layers: int, hidden: int = 64) -> ModelSpec:
    values = {"layers": layers, "hidden": hidden, "heads": 4, "vocab": 512, "seq_len": 64}
    return ModelSpec(name="small", source="none", **values)


def every(job: Workload) -> list[tuple[Beyond | None, Prediction]]:
    """All choices of units and strides, predicted one by one."""
    numels = stage_numels(job.model, job.levels, job.axes)
    found: list[Beyond | None] = [None, job.beyond]
    for count in range(1, len(numels) + 1):
        for stride in range(count + 1 if job.beyond == Beyond("host") else 1):
            share = short_share(numels, count)
            if (share, stride) != (1, 0):
                found.append(replace(job.beyond or Beyond(), offload=Offload(share=share, stride=stride)))
    return [(one, predict(replace(job, beyond=one), interval=False)) for one in found]


def drawn(seed: int) -> Workload:
    """One point on a machine of which nothing, some, or all may fit."""
    rng = random.Random(seed)
    spec = model(rng.randint(2, 6), 64 * rng.randint(1, 2))
    states = 16 * spec.parameters / 1024
    tier: TierName = rng.choice(["host", "host", "host", "disk"])
    made = machine(
        states * rng.uniform(0.15, 1), states * rng.uniform(1, 10), 10 ** rng.uniform(-2, 1),
        10 ** rng.uniform(-1, 2), tier,
    )  # fmt: skip
    scheme = rng.choice(schemes(Workload(made, STACK, spec, CONFIG.scheme("ddp"), 4, 1, 64).levels, True))
    more = rng.choice([1, 4]), rng.choice(["none", "full"])
    return Workload(made, STACK, spec, scheme, 4, rng.choice([1, 2]), 64, *more, beyond=Beyond(tier))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_chosen_is_the_best_of_all(seed: int) -> None:
    job = drawn(seed)
    found, tried = chosen_parts(job, OURS), every(job)
    fitting = [(float(p.step_time_s), float(p.peak_memory_bytes)) for _, p in tried if p.fits]
    if not fitting:
        assert [one.short_by > 0 for one in found] == [True]
        return
    assert (found[0].step_time_s, found[0].peak) == min(fitting)
    assert all(found[0].step_time_s <= p.step_time_s for one, p in tried if p.fits)
    room = (job.machine.device.memory_gib or 0) * GIB
    sure = [each for each in fitting if surely(job.machine, each[1]) <= room]
    assert not sure or (found[-1].step_time_s, found[-1].peak) == min(sure)
    for one in found:
        alone = predict(replace(job, beyond=one.beyond), interval=False)
        assert (float(alone.step_time_s), bool(alone.fits)) == (one.step_time_s, True)
        if one.beyond is None:
            continue
        as_scheme = job.scheme.model_dump() | {"optim": f"{job.scheme.optim}@{one.beyond.optim}"}
        as_scheme |= {"offload": one.beyond.parts} if one.beyond.parts else {}
        run = predict(replace(job, scheme=Scheme.parse(as_scheme, "test"), beyond=None), interval=False)
        assert float(run.step_time_s) == one.step_time_s
        assert run.fits  # buckets of all units are no smaller than those of each part
        assert run.peak_memory_bytes <= one.peak * (1 + 1e-9) <= 1.05 * run.peak_memory_bytes
        assert run.tier_bytes["host"] <= alone.tier_bytes["host"] * (1 + 1e-9)


def test_the_drawn_jobs_have_every_outcome() -> None:
    """Or the test before would show nothing."""
    found = [chosen_parts(drawn(seed), OURS) for seed in range(40)]
    kinds = set()
    for first, *_ in found:
        parts = first.beyond.parts if first.beyond else {"device": True}
        kinds.add((first.short_by > 0, *parts))
    wanted = ("device",), ("share",), ("stride",), ("share", "stride")
    assert {(False, *each) for each in wanted} <= kinds
    assert any(is_short for is_short, *_ in kinds)
    assert any(len(each) == 2 for each in found)


@pytest.mark.parametrize("places", [("optim@host",), ("optim@disk",), ("optim@host", "weights@host")])
@pytest.mark.parametrize("ranks", [1, 4])
def test_tiers_beside_a_scheme_take_what_those_of_a_scheme_do(places: tuple[str, ...], ranks: int) -> None:
    """Gathers and buffers, too: of one rank, whose weights are gathered from the host alone, as well."""
    tier: TierName = "disk" if "disk" in places[0] else "host"
    made, levels = machine(10**6, 10**7, 1, 10, tier), ("self", "node")[ranks > 1]
    for weights in ("self", levels):
        scheme = Scheme(name="test", weights=weights, grads=weights, optim=levels)
        job = Workload(made, STACK, model(3), scheme, ranks, 1, 64, beyond=Beyond.of(places))
        said = {state: f"{getattr(scheme, state)}@{at}" for state, at in (p.split("@") for p in places)}
        placed = Scheme.parse(scheme.model_dump() | said, "test")
        beside, within = predict(job), predict(replace(job, scheme=placed, beyond=None))
        assert float(beside.peak_memory_bytes) == pytest.approx(float(within.peak_memory_bytes), rel=1e-6)
        assert beside.tier_bytes == {
            t: pytest.approx(size, rel=1e-6) for t, size in within.tier_bytes.items()
        }
        assert beside.step_time_s == within.step_time_s


def test_the_shortest_share_has_its_units() -> None:
    for numels in ((50, 10, 10, 10), (7, 10, 10, 13), (1, 5, 5, 5, 5), (10**9, 3, 3)):
        for count in range(1, len(numels)):
            places = Offload(share=short_share(numels, count)).of_units(numels)
            assert len(places) - places.count("device") == count


KIB, HOST_KIB = 1900, 10**6


def searched(made: Machine, beyond: Beyond | None, **more: object):  # type: ignore[no-untyped-def]
    of = made, STACK, model(3), 4, 64, 16, [ONLY_DATA], [1]
    return plan(*of, ["none", "full"], exact=True, beyond=beyond, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("update", [0.5, 50])
def test_a_plan_is_the_fastest_of_all_parts(update: float) -> None:
    made = machine(KIB, HOST_KIB, update, 20)
    first = searched(made, Beyond("host")).ranked[0]
    best = math.inf
    for recompute, schedule in product(("none", "full"), ("1f1b", "breadth-first")):
        way = ONLY_DATA.model_copy(update={"schedule": schedule})
        of = made, STACK, model(3), CONFIG.scheme("ddp"), 4, 1, 64, 4, recompute
        base = Workload(*of, axes=way, beyond=Beyond("host"))  # type: ignore[arg-type]
        for scheme in schemes(base.levels, exact=True):
            fitting = (p for _, p in every(replace(base, scheme=scheme)) if p.fits)
            best = min([best, *(float(p.step_time_s) for p in fitting)])
    assert first.step_time_s == pytest.approx(best, rel=1e-12)
    assert first.job.beyond is not None and first.job.beyond.parts
    whole = searched(made, Beyond("host"), chooses=False).ranked[0]
    assert first.step_time_s < whole.step_time_s and whole.job.beyond == Beyond("host")


def test_what_is_left_out_is_not_chosen() -> None:
    made = machine(KIB, HOST_KIB, 0.5, 20)
    for beyond in (Beyond("host"), None):
        some, all_of_them = (searched(made, beyond, within=within) for within in (0.075, math.inf))
        assert [one.knobs for one in chosen(some)] == [one.knobs for one in chosen(all_of_them)]


def test_parts_are_shown_and_written_as_predicted(tmp_path: Path) -> None:
    found = searched(machine(KIB, HOST_KIB, 0.5, 20), Beyond("host"), software=OURS)
    first = chosen(found)[0]
    assert first.job.beyond is not None
    parts = first.job.beyond.parts
    assert f"optim@host share {parts['share']:g}" in report(found)
    row = records(found)[0]
    assert row["tiers"] == "optim@host" and {name: row[f"tier_{name}"] for name in parts} == parts
    assert "lowband" in runners(first.job)
    for name in ("config", "slurm"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm" / "frontier").symlink_to(CONFIG.root / "slurm" / "frontier")
    write(first, "mine", Config(tmp_path))
    scheme = Config(tmp_path).scheme("mine")
    assert scheme.model_dump()["offload"] == parts
    again = predict(replace(first.job, scheme=scheme, beyond=None), interval=False)
    assert float(again.step_time_s) == first.step_time_s and again.fits


@pytest.mark.parametrize("share, stride", [(0.4, 0), (0.9, 2), (1.0, 2)])
def test_a_given_share_is_planned_as_the_scheme_that_is_written_has_it(
    share: float, stride: int, tmp_path: Path
) -> None:
    """By whole units: of four, 0.4 of the parameters are two blocks, which are more."""
    made = machine(10**6, HOST_KIB, 0.5, 20)
    given = Beyond.of(["optim@host"], share, stride)
    first = chosen(searched(made, given, software=OURS, chooses=False))[0]
    for name in ("config", "slurm"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm" / "frontier").symlink_to(CONFIG.root / "slurm" / "frontier")
    write(first, "mine", Config(tmp_path))
    again = predict(replace(first.job, scheme=Config(tmp_path).scheme("mine"), beyond=None), interval=False)
    assert float(again.step_time_s) == first.step_time_s
    assert float(again.peak_memory_bytes) == pytest.approx(first.peak, rel=1e-6)
    said = {key: value for key, value in {"share": share, "stride": stride}.items() if value not in (0, 1)}
    assert first.job.beyond is not None and first.job.beyond.parts == said
    beside = predict(replace(first.job, beyond=given), interval=False)
    assert float(beside.step_time_s) != first.step_time_s


def test_another_programs_share_is_what_is_given() -> None:
    deepspeed = [row for row in SOFTWARE if row.name == "deepspeed"]
    first = chosen(
        searched(machine(10**6, HOST_KIB, 0.5, 20), Beyond("host", share=0.4), software=deepspeed)
    )[0]
    assert first.job.placed is not None and first.job.placed.share == 0.4


def test_where_all_fits_on_the_device_nothing_is_beyond_it() -> None:
    assert searched(machine(10**6, HOST_KIB, 0.5, 20), Beyond("host")).ranked[0].job.placed is None


def test_only_what_runs_is_chosen() -> None:
    """Megatron-LM has no strides, and nothing has parts in stages."""
    made = machine(KIB, HOST_KIB, 0.5, 20)
    megatron = [row for row in SOFTWARE if row.name == "megatron-lm"]
    found = searched(made, Beyond("host"), software=megatron).ranked
    assert found and all("stride" not in one.job.beyond.parts for one in found if one.job.beyond)
    of = made, STACK, model(3), 4, 64, 16, [Ways.of_options(1, 2)], [1]
    for one in plan(*of, ["full"], exact=True, beyond=Beyond("host")).ranked:  # type: ignore[arg-type]
        assert one.job.beyond == Beyond("host")


def test_the_largest_model_is_as_large_and_no_slower() -> None:
    machine, stack = setting(CONFIG, "polaris", "ours")
    of = CONFIG.model("gpt-10b"), CONFIG.scheme("zero3").on(list(machine.sizes)), 4, 1, 1024
    job, place = Workload(machine, stack, *of), ("optim@host",)
    [whole], [parts] = (largest(job, [place], chooses=chooses) for chooses in (False, True))
    assert whole.job is not None and parts.job is not None and parts.prediction is not None
    assert parts.prediction.fits
    assert parts.job.model.parameters >= whole.job.model.parameters
    assert parts.job.beyond is not None
    said = {f"tier_{name}": value for name, value in parts.job.beyond.parts.items()}
    assert said and said.items() <= show.record(parts).items() and "tier_share" not in show.record(whole)
    [found] = chosen_parts(replace(whole.job, beyond=Beyond("host")))[:1]
    assert whole.prediction is not None and found.step_time_s <= float(whole.prediction.step_time_s)


JOB = ["--cluster", "polaris", "--model", "gpt-10b", "--gpus", "4", "--root", str(CONFIG.root)]
LATE = ["--tiers", "optim@host", "--tier-late"]


@pytest.mark.parametrize(
    "words, says",
    [
        (["--tier-late"], "--tier-late is of --tiers (allowed: --tiers optim@host)"),
        ([*LATE, "--tier-stride", "2"], "--tier-late is of all states, updated by the host"),
        (
            ["--tiers", "optim@host", "weights@host", "--tier-late"],
            "offload beside weights beyond the device",
        ),
        (["--tiers", "optim@disk", "--tier-late"], "late: states on a disk"),
        ([*LATE, "--pp", "2"], "offload in stages of a pipeline"),
        (["--tiers", "optim@host", "optim@disk"], "--tiers: optim in two tiers: host and disk"),
        (["--tiers", "optim@host", "--tier-stride", "9" * 25], "argument --tier-stride: '999"),
        (["--tiers", "optim@host", "--tier-stride", "-1"], "argument --tier-stride: '-1' (allowed: "),
    ],
)
@pytest.mark.parametrize("verb", [["predict", "--scheme", "zero3"], ["plan"]], ids=lambda verb: verb[0])
def test_what_no_scheme_can_say_is_refused(
    verb: list[str], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in printed_by(capsys, verb[0], *JOB, *verb[1:], *words, code=2)


def test_late_from_the_command_line_is_as_in_a_scheme() -> None:
    machine, stack = setting(CONFIG, "polaris", "ours")
    scheme = CONFIG.scheme("zero3").on(list(machine.sizes))
    job = Workload(machine, stack, CONFIG.model("gpt-10b"), scheme, 4, 1, 2048)
    late = scheme.model_dump() | {"optim": f"{scheme.optim}@host", "offload": {"late": True}}
    ours = predict(replace(job, beyond=Beyond.of(["optim@host"], late=True)))
    theirs = predict(replace(job, scheme=type(scheme).parse(late, "test")))
    assert ours.time_s == theirs.time_s
    for kind in ("weights", "grads", "optim", "optim@host", "grads@host", "weights@host"):
        assert ours.memory_bytes[kind] == pytest.approx(theirs.memory_bytes[kind], rel=1e-9), kind


def test_a_late_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--tp", "1", "--micro-batch", "1", "--recompute", "full", "--exact", "--json", "--seq", "1024"]
    rows = json.loads(printed_by(capsys, "plan", *JOB, *LATE, *few))
    assert all(row["tiers"] == "optim@host" and row["tier_late"] is True for row in rows)
    with pytest.raises(UserError, match="late"):
        Beyond("disk", offload=Offload(late=True))


@pytest.mark.parametrize("failure", ["taken", "full"])
def test_what_was_written_of_a_plan_that_cannot_be_is_removed(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took the suite's name, or the disk is full: the scheme's name is free again."""

    def second_fails(path: Path, text: str) -> bool:
        if path.parent.name == "suites":
            if failure == "full":
                raise OSError("no space left on device")
            return False
        return create_whole(path, text)

    monkeypatch.setattr(plan_files, "create_whole", second_fails)
    first = chosen(searched(machine(10**6, HOST_KIB, 0.5, 20), None))[0]
    for name in ("config", "slurm"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm" / "frontier").symlink_to(CONFIG.root / "slurm" / "frontier")
    with pytest.raises((UserError, OSError)):
        write(first, "mine", Config(tmp_path))
    assert not [*tmp_path.glob("config/**/*.yaml")]
