"""`lowband advise`: the question in one screen; its page (tests/workflow/test_advice_page.py opens it)."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.__main__ import main
from lowband.commands.advise import SCHEMES
from lowband.cost.numbers import GIB
from lowband.predict.request import Grid, setting
from lowband.predict.search.advice import (
    MICRO_BATCHES,
    RECOMPUTE,
    SHOWN,
    Advisor,
    Outcome,
    placed_schemes,
    split,
)
from lowband.predict.search.candidates import MODEL_ERROR
from lowband.predict.show.advice_text import advise, text
from lowband.predict.workload import Workload
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by

TRIED = [CONFIG.scheme(name) for name in SCHEMES]


def job(cluster: str, model: str, ranks: int, scheme: str, **changes: object) -> Workload:
    machine, stack = setting(CONFIG, cluster, None)
    values = {"micro_batch": 1, "seq_len": 2048, "accumulation": 1, **changes}
    return Workload(machine, stack, CONFIG.model(model), CONFIG.scheme(scheme), ranks, **values)  # type: ignore[arg-type]


def test_the_question_is_answered_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--cluster", "dgx-a100-40gb", "--model", "llama-7b", "--gpus", "8", "--scheme", "zero3"]
    lines = printed_by(capsys, "advise", *asked, "--root", str(ROOT)).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("predicted: llama-7b (6.74 billion parameters) under zero3 on 8 GPUs of")
    assert "stack fsdp" in lines[0]
    assert lines[3].startswith("will it fit?  yes: 17.3 of 40 GiB a GPU, 3.0 of them the runtime")
    table = lines[lines.index("what would make it faster, cheapest first") + 2 :]
    assert len(table[: table.index("")]) == SHOWN
    assert table[0].split("  ")[1] == "recompute none"
    heading, *rows = lines[lines.index("what would make it faster, cheapest first") + 1 :][: SHOWN + 1]
    words = ("change", "tokens/s a GPU", "gain", "interval", "memory", "costs besides")
    for at in map(heading.index, words):  # each column begins at one place
        assert {row[at - 2 : at] for row in rows} == {"  "} and all(row[at] != " " for row in rows)


@pytest.mark.parametrize("passes", [1, 4])
def test_each_change_is_what_predict_says_of_it(passes: int) -> None:
    found = advise(job("frontier", "gpt-20b", 64, "zero3", accumulation=passes), TRIED)
    assert 1 <= len(found["changes"]) <= SHOWN
    base = found["prediction"]
    for change in found["changes"]:
        words = dict(part.split(" ", 1) for part in change["change"].split(", "))
        micro, _, times = words.get("micro-batch", "1").partition(" x ")
        accumulation = int(times or passes)
        scheme, recompute = words.get("scheme", "zero3"), words.get("recompute", "full")
        [after] = Grid(
            CONFIG, "frontier", ["gpt-20b"], [scheme], [64], [int(micro)], [accumulation], [2048], [recompute]
        ).records()
        assert after["fits"]
        assert change["tokens"] == f"{after['tokens_per_s_per_gpu']:.4g}"
        gain = after["tokens_per_s_per_gpu"] / base["tokens_per_s_per_gpu"] - 1
        assert change["gain"] == f"{100 * gain:+.0f} %"
        more = (after["peak_memory_bytes"] - base["peak_memory_bytes"]) / GIB
        assert change["memory"] == f"{more:+.1f} GiB"
        tokens = int(micro) * accumulation / passes
        ends = zip(base["interval"]["step_time_s"], after["interval"]["step_time_s"], strict=True)
        at_ends = [tokens * old / new - 1 for old, new in ends]
        error = 1 + MODEL_ERROR
        low, high = min(*at_ends, (1 + gain) / error - 1), max(*at_ends, (1 + gain) * error - 1)
        assert change["interval"] == f"{100 * low:+.0f} to {100 * high:+.0f} %"
        batch = int(micro) * accumulation
        assert ("global batch" in change["costs"]) == (batch != passes)
        is_lossy = CONFIG.scheme(scheme).is_quantized  # zero3 is not
        assert ("rounded" in change["costs"]) == is_lossy
    costs = [2 * ("rounded" in c["costs"]) or int("global" in c["costs"]) for c in found["changes"]]
    assert costs == sorted(costs)


def test_advice_comes_in_the_order_of_its_costs_not_of_its_memory() -> None:
    """Memory only, then another global batch, then rounded values, whatever memory these take."""
    asked = job("frontier", "gpt-20b", 64, "zero3", accumulation=4)
    batches = [(micro, split(1, 4, micro)) for micro in MICRO_BATCHES]
    advisor = Advisor(asked, placed_schemes(asked, TRIED), batches)
    same = Outcome((1.0, 1.0, 1.0), 10.0, True)
    faster = {("zeropp", "full", 1, 4): 7.0, ("zero3", "full", 32, 4): 8.0, ("zero3", "full", 2, 2): 9.0}
    assert set(faster) <= set(advisor.found)
    advisor.found = {
        point: Outcome((1.5, 1.5, 1.5), faster[point], True) if point in faster else same
        for point in advisor.found
    }
    order = [change.words for change in advisor.changes(("zero3", "full", 1, 4))]
    assert order == ["micro-batch 2 x 2", "micro-batch 32", "scheme zeropp"]


def test_what_does_not_fit_is_made_to() -> None:
    found = advise(job("frontier", "gpt-20b", 8, "hier3"), TRIED)
    assert (found["answer"]["fits"], found["heading"]) == ("no", "what would make it fit")
    assert found["changes"][0]["change"] == "scheme zero3"
    assert found["ranks_that_fit"] == 16
    assert "it fits unchanged on 16 GPUs" in text(found)
    none = advise(job("dgx-a100-40gb", "llama-3-70b", 8, "zero3"), TRIED)
    assert none["changes"] == []
    assert none["heading"] == "no micro-batch, recomputation or scheme makes it fit"


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from(MICRO_BATCHES))
@settings(max_examples=200)
def test_a_split_keeps_the_batch_where_it_can(micro: int, passes: int, wanted: int) -> None:
    found = split(micro, passes, wanted)
    assert found >= 1
    assert wanted * found == micro * passes or ((micro * passes) % wanted and found == passes)


def test_bad_questions_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = ["--cluster", "dgx-a100-40gb", "--model", "llama-7b", "--root", str(ROOT)]
    asked = ["advise", *one, "--gpus", "8"]
    for more, words in (
        (["--scheme", "hier3"], "no level 'package', and none in its place"),
        (["--scheme", "zero4"], "no entry 'zero4'"),
        (["--scheme", "zero3", "--seq", "4096"], "longer than the longest"),
        (["--scheme", "zero3", "--cluster", "local"], "peak_tflops has no bf16"),
    ):
        assert words in printed_by(capsys, *asked, *more, code=2)
    out = tmp_path / "page.html"
    assert main(["advise-page", *one, "--gpus", "12", "--out", str(out)]) == 2
    assert "no job is possible" in capsys.readouterr().err
    assert not out.exists()


def test_the_object_names_its_provenance(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--cluster", "cuda", "--model", "llama-7b", "--gpus", "8", "--scheme", "zero3", "--json"]
    found = json.loads(printed_by(capsys, "advise", *asked, "--root", str(ROOT)))
    assert found["provenance"] == found["prediction"]["provenance"] == "predicted"
    assert "default" in found["stands_on"]
    assert found["stands_on"].endswith("the intervals are wide")
    assert set(RECOMPUTE) == {"full", "none"}
