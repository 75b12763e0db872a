"""Logs of other projects: written by us in their formats, with a malformed line in each.

All fixtures are of one run: gpt-20b on 8 ranks, 16 sequences of 2048 tokens in 2 s: 2048 tokens/s per rank.
"""

from pathlib import Path

import pytest

from lowband.__main__ import main
from lowband.evidence.importers import Malformed, megatron, torchtitan
from lowband.spec.csv_tables import read_table
from tests.checkout import ROOT

LOGS = ROOT / "tests" / "fixtures" / "foreign"
# By hand: 44 x (12 x 6144^2 + 13 x 6144) + 2 x 6144 + 50432 x 6144 weights that multiply; attention on top.
MODEL_FLOP_PER_S = 2048 * (6 * 20_244_713_472 + 12 * 44 * 6144 * 2048)


def imported(tmp_path: Path, log: Path, form: str, *more: str):
    out = tmp_path / f"{form}.csv"
    arguments = ["--format", form, "--model", "gpt-20b", "--seq-len", "2048", "--ranks", "8", *more]
    assert main(["import-log", str(log), *arguments, "--root", str(ROOT), "--out", str(out)]) == 0
    return read_table(out).set_index("step")


@pytest.mark.parametrize(
    ("form", "step", "more", "malformed"),
    [
        ("megatron-lm", 3, (), {4: "elapsed time per iteration (ms) is '20x0.0'", 6: "is cut off"}),
        ("megatron-deepspeed", 1, ("--recompute",), {3: "iteration is 'two'"}),
        ("deepspeed", 10, (), {3: "is cut off or from another version"}),
        ("torchtitan", 1, (), {4: "is cut off"}),
        ("mllog", 10, (), {4: "JSONDecodeError"}),
    ],
)
def test_every_format_tells_the_same_rate(tmp_path, capsys, form, step, more, malformed) -> None:
    table = imported(tmp_path, LOGS / f"{form}.log", form, *more)
    row = table.loc[step]
    assert row["tokens_per_s"] == 8 * 2048
    assert row["model_flop_per_s_per_rank"] == MODEL_FLOP_PER_S
    if form in ("megatron-lm", "megatron-deepspeed", "torchtitan"):
        assert row["reported_over_convention"] == pytest.approx(1, abs=1e-4)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(malformed)
    for line, (number, what) in zip(told, malformed.items(), strict=True):
        assert line.startswith(f"{LOGS / form}.log:{number}: malformed, skipped: {what}")


def test_what_a_log_does_not_tell_is_empty(tmp_path) -> None:
    skipped = imported(tmp_path, LOGS / "megatron-lm.log", "megatron-lm").loc[3]
    assert skipped[["loss", "grad_norm"]].isna().all()
    titan = imported(tmp_path, LOGS / "torchtitan.log", "torchtitan")
    assert titan["step_time_s"].isna().all()
    assert titan.loc[10, "reported_over_convention"] != titan.loc[10, "reported_over_convention"]
    assert titan.loc[1, "peak_memory_bytes"] == 24 * 2**30
    losses = imported(tmp_path, LOGS / "mllog.log", "mllog")["loss"]
    assert list(losses.items()) == [(10, 9.125), (30, 8.0)]


def test_another_attempt_in_the_same_log_takes_no_time_of_the_first(tmp_path) -> None:
    lines = (LOGS / "mllog.log").read_text().splitlines()
    log = tmp_path / "twice.log"
    again = [line.replace('"time_ms": 10', '"time_ms": 90').replace("480}", "640}") for line in lines]
    log.write_text("\n".join([*lines[:3], lines[4], *again[:2], again[4], ""]))
    table = imported(tmp_path, log, "mllog")
    assert list(table.index) == [10, 30, 40]
    assert list(table["step_time_s"].fillna(0)) == [2, 2, 0]


def test_a_step_that_every_rank_prints_is_one(tmp_path, capsys) -> None:
    """Lines of validation and bytes that are no text are lines of another kind."""
    log, lines = tmp_path / "ranks.log", []
    for step in (10, 20):
        row = f"[rank]: step: {step}  loss: 8.1  memory: 5.2GiB(6.0%)  tps: 1,234  tflops: 5.6  mfu: 1.0%"
        lines += [row, row, row, f"validate step: {step}  loss: 7.1  memory: 5.2GiB(6.0%)  tps: 1,234"]
    log.write_bytes("\n".join(lines).encode() + b"\n\xe9\xff banner\n")
    assert list(imported(tmp_path, log, "torchtitan").index) == [10, 20]
    [told] = capsys.readouterr().err.splitlines()
    assert ":2: malformed, skipped: step 10 once more, by another rank" in told


def test_recomputation_is_in_megatron_deepspeeds_convention(tmp_path) -> None:
    row = imported(tmp_path, LOGS / "megatron-deepspeed.log", "megatron-deepspeed").loc[1]
    assert row["reported_over_convention"] == pytest.approx(4 / 3, abs=1e-4)


def test_a_digit_that_is_no_number_is_malformed() -> None:
    with pytest.raises(Malformed, match="iteration is '²'"):
        megatron.parse(" iteration ²/ 3 | lm loss: 1.0 |")


@pytest.mark.parametrize(
    ("parser", "line", "message"),
    [
        (megatron, " iteration NUMBER/ 3 | lm loss: 1.0 |", "iteration is '9999"),
        (
            torchtitan,
            "step: NUMBER  loss: 8.1  memory: 1.0GiB(1.0%)  tps: 7,000  tflops: 1.0  mfu: 1.0%",
            "step is '9999",
        ),
    ],
)
def test_a_count_of_thousands_of_digits_is_malformed(parser, line: str, message: str) -> None:
    """Python's int refuses it with an error of its own."""
    with pytest.raises(Malformed, match=message) as error:
        parser.parse(line.replace("NUMBER", "9" * 5000))
    assert len(str(error.value)) < 100


@pytest.mark.parametrize("value", ["-5.0", "inf", "nan", "1_0"])
def test_a_time_that_cannot_be_is_malformed(value: str) -> None:
    line = f" iteration 1/ 3 | elapsed time per iteration (ms): {value} | lm loss: nan |"
    with pytest.raises(Malformed, match=f"elapsed.* is '{value}'"):
        megatron.parse(line)


def test_a_run_that_diverged_is_read() -> None:
    line = " iteration 1/ 3 | elapsed time per iteration (ms): 5.0 | global batch size: 8 | lm loss: nan |"
    found = megatron.parse(line)
    assert found is not None and found["loss"] != found["loss"]


def test_a_log_without_steps_is_refused(tmp_path, capsys) -> None:
    arguments = ["--format", "mllog", "--model", "gpt-20b", "--seq-len", "2048", "--ranks", "8"]
    log = LOGS / "deepspeed.log"
    assert main(["import-log", str(log), *arguments, "--root", str(ROOT), "--out", str(tmp_path / "x")]) == 2
    assert "parses as a step of a mllog log" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
