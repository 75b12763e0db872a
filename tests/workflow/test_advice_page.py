"""`lowband advise-page` in a real browser: its numbers are those of `lowband advise`."""

from itertools import product
from pathlib import Path

import browser
import pytest

from lowband.predict.request import setting
from lowband.predict.search.advice import MICRO_BATCHES
from lowband.predict.show.advice_page import Axes, page
from lowband.predict.show.advice_text import advise
from lowband.predict.workload import Workload
from tests.checkout import CONFIG

SCHEMES = ["zero1", "zero3", "zeropp", "hier3"]
AXES = Axes(["dgx-a100-40gb", "frontier"], ["llama-7b", "gpt-20b"], [8], SCHEMES, 2048)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "advise.html"
    path.write_text(page(CONFIG, AXES))
    return path


def test_it_is_one_small_file_that_fetches_nothing(written: Path) -> None:
    text = written.read_text()
    assert len(text) < 200_000
    assert not [word for word in ("http", "src=", "url(", "@import", "fetch(") if word in text]


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: make page-deps")
def test_it_fits_a_narrow_window(written: Path, tmp_path: Path) -> None:
    found = browser.look_at(written, 360, tmp_path)
    assert found["console"] == []
    assert found["fetched"] == []
    assert found["scroll"] <= found["width"], found["wide"]


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: make page-deps")
def test_it_opens_on_a_job_that_fits(tmp_path: Path) -> None:
    """No GCD has room for 20B of ddp, the first scheme."""
    axes = Axes(["frontier"], ["gpt-20b"], [8, 64], ["ddp", "zero3"], 2048)
    (tmp_path / "advise.html").write_text(page(CONFIG, axes))
    shown = browser.choose(tmp_path / "advise.html", [{}], tmp_path)
    assert shown["console"] == []
    assert shown["found"][0]["texts"]["fits"] == "yes"


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: make page-deps")
def test_its_numbers_are_the_command_s(written: Path, tmp_path: Path) -> None:
    """On every 23rd point, which takes every value of every axis, and from one point to the next."""
    gpus = range(len(AXES.gpus))
    points = list(
        product(AXES.clusters, AXES.models, gpus, SCHEMES, ["full", "none"], range(len(MICRO_BATCHES)))
    )
    names = ("machine", "model", "gpus", "scheme", "recompute", "batch")
    choices = [dict(zip(names, point, strict=True)) for point in points[::23]]
    shown = browser.choose(written, choices, tmp_path)
    assert shown["console"] == []
    possible = 0
    for choice, found in zip(choices, shown["found"], strict=True):
        texts = found["texts"]
        machine, stack = setting(CONFIG, choice["machine"], None)
        if choice["scheme"] == "hier3" and "package" not in machine.sizes:
            assert texts["fits"] == "not possible"
            continue
        schemes = [CONFIG.scheme(name) for name in SCHEMES]
        job = Workload(
            machine, stack, CONFIG.model(choice["model"]), CONFIG.scheme(choice["scheme"]),
            AXES.gpus[choice["gpus"]], MICRO_BATCHES[choice["batch"]], 2048, recompute=choice["recompute"],
        )  # fmt: skip
        answer = advise(job, schemes)
        assert [texts["question"], texts["how"]] == answer["question"]
        assert {name: texts[name] for name in answer["answer"]} == answer["answer"]
        assert (texts["of_a_step"], texts["heading"]) == (answer["of_a_step"], answer["heading"])
        assert found["rows"] == [list(change.values()) for change in answer["changes"]]
        assert texts["gpus-value"] == str(job.ranks)
        assert texts["stands_on"] == answer["stands_on"]
        possible += 1
    assert possible > len(choices) / 2
