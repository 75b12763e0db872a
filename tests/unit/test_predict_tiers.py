"""States beyond the device: bytes that leave it, what hides, what the host updates, what fits where."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lowband.cost.bytes import stage_numels
from lowband.cost.memory import state_bytes
from lowband.cost.tiers import Beyond, Rates, best_stride, update_s
from lowband.errors import UserError
from lowband.predict.footprint import GIB
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.search.largest import PLACES, largest, of_width
from lowband.predict.show import largest as show
from lowband.predict.show.render import record, text
from lowband.predict.workload import Workload
from lowband.spec.config import Config
from lowband.spec.scheme import Scheme

CONFIG = Config(Path(__file__).parents[2])


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
    assert on_host.tier_bytes == {"host": pytest.approx(4 * optim * 4 / 3, rel=1e-9)}  # a node of 4
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
    sure = job(Beyond("host"))
    open_ = sure.stack.model_copy(update={"overlap": sure.stack.overlap.model_copy(update={"value": 0.0})})  # type: ignore[union-attr]
    bare = predict(replace(sure, stack=open_)).time_s
    assert bare["stash"] == pytest.approx(2 * parameters / rates.stash / 1e9, rel=1e-9)  # bf16, unhidden
    assert bare["fetch"] == pytest.approx(2 * parameters / rates.fetch / 1e9, rel=1e-9)
    assert items["stash"] < bare["stash"]


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


def test_a_scheme_with_a_tier_is_predicted_as_the_option() -> None:
    by_option = job(Beyond("host"))
    scheme = Scheme.parse(
        {"name": "zero3", "weights": "world", "grads": "world", "optim": "world@host"}, Path("zero3.yaml")
    )
    by_scheme = replace(job(), scheme=scheme)
    ours, theirs = predict(by_option), predict(by_scheme)
    assert ours.time_s == theirs.time_s
    for kind in ("weights", "grads", "optim", "optim@host", "grads@host"):
        assert ours.memory_bytes[kind] == pytest.approx(theirs.memory_bytes[kind], rel=1e-9)
    # The engine's half counts what it holds (cost/memory.py): the two forms are written apart.
    counted = state_bytes(
        stage_numels(by_scheme.model, by_scheme.levels, by_scheme.axes),
        scheme,
        by_scheme.levels,
        "bf16",
        "bf16",
        1,
        "nccl",
    )
    for kind in ("weights", "grads", "optim", "optim@host", "grads@host"):
        assert ours.memory_bytes[kind] == pytest.approx(counted[kind], rel=1e-9)
    half = predict(replace(by_scheme, beyond=Beyond("host", share=0.5)))
    assert half.memory_bytes["optim"] == pytest.approx(theirs.memory_bytes["optim@host"] / 2, rel=1e-9)


def test_a_full_host_does_not_fit_though_the_device_does() -> None:
    small = job(Beyond("host"))
    tiers = {"host": small.machine.tier("host").model_copy(update={"capacity_gib": 100})}
    full = replace(small, machine=small.machine.model_copy(update={"tiers": tiers}))
    p = predict(full)
    assert p.peak_memory_bytes < 40 * GIB and not p.fits and predict(small).fits
    assert "of 100 GiB: does not fit" in text(record(full, p))


@pytest.mark.parametrize(
    "places, more, says",
    [
        (["optim"], {}, "no place 'optim'"),
        (["grads@host"], {}, "no place 'grads@host'"),
        (["optim@tape"], {}, "no place 'optim@tape'"),
        (["optim@host"], {"share": 0}, "share 0"),
        (["optim@host"], {"stride": 1}, "stride 1"),
        (["optim@disk"], {}, "tier 'disk' has no rates"),
    ],
)
def test_what_cannot_be_is_refused(places: list[str], more: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        job(Beyond.of(places, **more))  # type: ignore[arg-type]


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


def test_a_family_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="family is not known"):
        largest(replace(job(), model=CONFIG.model("mixtral-8x7b")))
