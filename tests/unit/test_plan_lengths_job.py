"""A batch of many lengths on a machine: costs are the predictor's, the verb shows the plan or refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from machines import fact, machine

from lowband.__main__ import main
from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.predict.footprint import memory_items, peak_bytes
from lowband.predict.request import setting
from lowband.predict.search.lengths import plan_lengths
from lowband.predict.search.lengths_cost import OF_A_SEQUENCE, Job, read_lengths
from lowband.predict.time import step_time
from lowband.spec.model import ModelSpec
from lowband.spec.stack import OURS
from tests.checkout import CONFIG

MACHINE, STACK = setting(CONFIG, "dgx-a100-40gb", "ours")
MODEL = CONFIG.model("llama-3-8b").model_copy(update={"seq_len": 131072})


def job(ranks=16):
    return Job(MACHINE, STACK, MODEL, ranks, "full")


def test_seconds_are_those_of_the_fastest_way():
    mine = job()
    lengths = np.array([16384, 1024])
    for degree in (1, 8, 16):
        found = mine.costs().seconds[degree](lengths)
        for length, seconds in zip(lengths, found, strict=True):
            each = {
                axes.context_attention: step_time(mine.workload(axes, int(length))).items
                for axes in mine.axes(degree)
            }
            sums = {way: sum(float(items[name]) for name in OF_A_SEQUENCE) for way, items in each.items()}
            assert seconds == pytest.approx(min(sums.values()), rel=1e-12)
            assert sums[mine.known[degree, int(length)][1]] == min(sums.values())


@pytest.mark.parametrize(("overlap", "waited"), [(0, 1), (0.25, 0.75), (1, 0)])
def test_a_micro_step_waits_for_what_the_stack_does_not_hide(overlap: float, waited: float) -> None:
    """A root of 10,752 elements and four blocks of 51,200 in bf16, on the two ranks of a package: half of it
    crosses a link of 4 GB/s to be gathered, and to be reduced; the blocks' are gathered again."""
    model = ModelSpec(name="g", layers=4, hidden=64, heads=8, vocab=128, seq_len=32, source="made up")
    stack = OURS.model_copy(update={"overlap": fact(overlap)})
    whole = (2 * (10752 + 4 * 51200) + 4 * 51200) * 2 / 2 / 4e9
    found = Job(machine(), stack, model, 2, "none").costs().fixed_s
    assert found == pytest.approx(waited * whole, abs=1e-15)


def test_the_room_fills_the_memory_of_the_fullest_way_and_of_no_other():
    mine = job()
    room = mine.costs().room
    peaks = []
    for degree in mine.degrees:
        for axes in mine.axes(degree):
            full = mine.workload(axes, int(room) // 32 * 32 * degree, 2)
            peaks.append(float(peak_bytes(memory_items(full), full.keeps_grads)) / GIB)
    assert max(peaks) <= MACHINE.device.memory_gib
    assert max(peaks) == pytest.approx(MACHINE.device.memory_gib, rel=0.01)


def test_zones_are_named_after_the_links_that_are_crossed():
    assert [job().zone(degree) for degree in (1, 2, 8, 16)] == ["rank", "node", "node", "world"]


def test_the_verb_prints_the_plan(tmp_path, capsys):
    model = tmp_path / "long.yaml"
    model.write_text(
        "layers: 32\nhidden: 4096\nheads: 32\nkv_heads: 8\nmlp_hidden: 14336\ngated: true\nbiases: false\n"
        "vocab: 32000\nseq_len: 131072\npositions: rotary\ntied_head: false\nsource: made up\n"
    )
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, [60000, 9000, *range(100, 1500, 50)])))
    words = [
        "plan",
        "--cluster",
        "dgx-a100-40gb",
        "--model",
        str(model),
        "--gpus",
        "16",
        "--lengths",
        str(file),
    ]
    assert not main(words)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("30 sequences, 90700 tokens, ")
    assert any("60000 to 60000" in line for line in lines)
    assert not main([*words, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert sum(row["sequences"] for row in rows if row["plan"] == "fastest") == 30
    seconds = {row["plan"]: row["step_s"] for row in rows}
    assert seconds["fastest"] < seconds["one degree"]


@pytest.mark.parametrize("median", [1000, 4000, 16000])
def test_zones_beat_all_ranks_for_each_sequence(median):
    """Zeppelin's order (arXiv 2509.21841, second hand): its zones before context over all ranks, at each
    class of lengths. Lengths are of a stated distribution, lognormal with sigma 1, not those of its data."""
    lengths = (
        np.random.default_rng(0).lognormal(np.log(median), 1.0, 48).astype(int).clip(64, 131072).tolist()
    )
    costs = job().costs()
    zones = plan_lengths(lengths, 16, costs, [1, 8, 16], True)
    assert zones.seconds < plan_lengths(lengths, 16, costs, [16], False).seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no lengths"),
        ("7\nx", "'x' is no length"),
        ("0", "a sequence of 0 tokens"),
        ("131073", "a sequence of 131073 tokens"),
        ("-1", "'-1' is no length"),
    ],
)
def test_what_is_no_batch_is_refused(text, message, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match=message):
        read_lengths(tmp_path / "file", MODEL)


def test_a_batch_is_text_and_not_endless(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"7\n\xff")
    with pytest.raises(UserError, match="file: is no text"):
        read_lengths(path, MODEL)
    path.write_text("7\n" * 4096)
    assert len(read_lengths(path, MODEL)) == 4096
    path.write_text("7\n" * 4097)
    with pytest.raises(UserError, match="more than 4096 sequences"):
        read_lengths(path, MODEL)
    path.write_text(f"7\n{'0' * 13}7")
    with pytest.raises(UserError, match=r"file:2: '0{13}7' is no length"):
        read_lengths(path, MODEL)


def test_states_that_leave_no_room_are_refused():
    with pytest.raises(UserError, match="no room for a token beside its states"):
        job(1).costs()


@pytest.mark.parametrize("option", ["--tp", "--layers", "--cp", "--ways", "--seq"])
def test_options_that_a_plan_of_lengths_does_not_take_are_refused(option, tmp_path, capsys):
    (tmp_path / "file").write_text("100")
    job = ["plan", "--cluster", "dgx-a100-40gb", "--model", "llama-7b", "--gpus", "16"]
    value = "ring" if option == "--ways" else "2"
    assert main([*job, "--lengths", str(tmp_path / "file"), option, value]) == 2
    assert capsys.readouterr().err == f"lowband: --lengths is without {option}\n"
