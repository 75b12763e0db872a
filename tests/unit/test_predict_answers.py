"""`lowband predict` and `plan` on jobs that cannot be: what is said first, why, and the exit code."""

import json
from pathlib import Path

import pandas as pd
import pytest

from lowband.__main__ import main
from lowband.predict.request import setting
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by

MACHINE = """description: made up
device: {name: a GPU, memory_gib: 80, peak_tflops: {PEAK}, source: made up}
levels:
  - {name: node, size: SIZE, link: {gigabytes_per_s: 200, source: made up}}
  - {name: world, link: {gigabytes_per_s: 25, source: made up}}
"""


def machine(folder: Path, peak: str = "bf16: 300", size: int = 8) -> str:
    """A machine file of a user's own."""
    file = folder / "mine.yaml"
    file.write_text(MACHINE.replace("PEAK", peak).replace("SIZE", str(size)))
    return str(file)


def refused(capsys: pytest.CaptureFixture[str], verb: str, *more: str) -> str:
    """The one line of a command that is refused, without the program's name."""
    scheme = ["--scheme", "zero3"] if verb == "predict" else []
    line = printed_by(capsys, verb, "--model", "gpt-20b", *scheme, "--root", str(ROOT), *more, code=2)
    return line.removeprefix("lowband: ")


ON_64 = ("--cluster", "frontier", "--gpus", "64")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            ["--tp", "5"],
            "axes: 64 ranks are no multiple of tensor 5 x pipeline 1; no other axes are possible either",
        ),
        (
            ["--tp", "8", "--pp", "64"],
            "axes: 64 ranks are no multiple of tensor 8 x pipeline 64 (allowed: multiples of 512 ranks)",
        ),
        (
            ["--pp", "32", "--tp", "1"],
            "model 'gpt-20b': 44 layers cannot be divided over 32 stages",
        ),
        (
            ["--tp", "1", "--pp", "1", "--global-batch", "100"],
            "a global batch of 100 sequences is not divisible",
        ),
        (
            ["--micro-batch", "3"],
            "a global batch of 256 sequences is not divisible by any data-parallel degree",
        ),
    ],
)
def test_a_plan_says_which_number_is_wrong(
    given: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "plan", *ON_64, *given).startswith(reason)


def test_a_plan_skips_degrees_that_do_not_fill_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 1, 2 and 4 tensor-parallel ranks, 4 leave a part of a node of 6 over."""
    asked = ["plan", "--cluster", machine(tmp_path, size=6), "--model", "gpt-2.7b", "--gpus", "12"]
    small = [
        "--root",
        str(ROOT),
        "--pp",
        "1",
        "--exact",
        "--recompute",
        "full",
        "--micro-batch",
        "1",
        "--json",
    ]
    assert {row["tp"] for row in json.loads(printed_by(capsys, *asked, *small))} <= {1, 2}
    assert "machine 'mine': tensor 4 does not divide level 'node' of 6" in refused(
        capsys, "plan", "--cluster", machine(tmp_path, size=6), "--gpus", "12", "--tp", "4", "--pp", "1"
    )


def test_a_machine_file_without_the_rate_is_named_by_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "predict", "--cluster", machine(tmp_path, "fp32: 20"), "--gpus", "8")
    assert line == (
        "machine 'mine': device.peak_tflops has no bf16 (allowed: peak_tflops: {bf16: 10^12 FLOP/s})"
    )


def test_a_scheme_on_a_machine_without_its_levels_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme = tmp_path / "hier4.yaml"
    scheme.write_text("secondary: package\nweights: node\ngrads: rack\noptim: world\n")
    line = refused(capsys, "predict", *ON_64, "--scheme", str(scheme))
    assert line.startswith("scheme 'hier4' on machine 'frontier': grads: no level 'rack' (allowed: self, ")


def test_sizes_that_no_machine_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("predict", "plan"):
        line = refused(capsys, verb, "--cluster", "frontier", "--gpus", "100000000")
        assert line.startswith("100,000,000 ranks (allowed: at most 1,048,576")
    for peak, size, words in (
        ("bf16: 3.0e+8", 8, "device.peak_tflops.bf16: Input should be less than or equal to 1000000, not"),
        ("bf16: 300", 10**8, "levels.0.size: Input should be less than or equal to 1048576, not 100000000"),
    ):
        line = refused(capsys, "predict", "--cluster", machine(tmp_path, peak, size), "--gpus", "8")
        assert words in line


ASKED = ["predict", "--cluster", "frontier", "--scheme", "zero3", "--root", str(ROOT), "--gpus", "8"]


def test_options_are_columns_by_the_same_names(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"tp": 2, "pp": 2, "interleave": 11, "schedule": "breadth-first"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    row = json.loads(printed_by(capsys, *ASKED, "--model", "gpt-20b", *words, "--json"))
    assert {name: row[name] for name in options} == options
    assert row["dp"] == 2


def test_a_job_that_does_not_fit_says_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    """And ends with exit code 1; in a grid, if no point fits."""
    first, second, *_ = printed_by(capsys, *ASKED, "--model", "gpt-1t", code=1).splitlines()
    assert first.startswith("does not fit: ")
    assert "short of the 64 GiB of a rank; times below" in first
    hier3 = ["hier3" if word == "zero3" else word for word in ASKED]
    nearly = printed_by(capsys, *hier3, "--model", "gpt-20b", "--accumulation", "4", code=1)
    assert "short of the 64 GiB of a rank, within the error of predicted memory; times" in nearly
    assert second.startswith("predicted: gpt-1t under zero3 on 8 ranks of frontier")
    row = json.loads(printed_by(capsys, *ASKED, "--model", "gpt-1t", "--json", code=1))
    assert not row["fits"]
    assert f"does not fit: {row['short_by_bytes'] / 2**30:.3g} GiB" in first
    title, *_ = printed_by(capsys, *ASKED, "--model", "gpt-1m", "gpt-1t").splitlines()
    assert title.endswith("64 GiB a rank; 1 of 2 do not fit")
    assert printed_by(capsys, *ASKED, "--model", "gpt-1m").startswith("predicted: ")


def test_a_fitted_constant_says_on_whose_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A machine's share of the peak is of the stack that ran there, whichever is asked for."""
    asked = ["predict", "--root", str(ROOT), "--cluster", "dgx-h100", "--stack", "fsdp2", "--model", "gpt-1m"]
    said = printed_by(capsys, *asked, "--scheme", "zero3", "--gpus", "8")
    assert "fitted, on rows of llm-foundry: device.memory_efficiency, device.matmul_efficiency" in said
    assert "fitted, on rows of torchtitan: device.framework_gib" in said


def test_strict_ends_with_1_if_anything_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--model", "gpt-1m", "gpt-1t", "--strict"]) == 1
    assert main([*ASKED, "--model", "gpt-1m", "--strict"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["--tp", "1", "--pp", "1", "--micro-batch", "1"], marks=pytest.mark.wide),
        ["--outer-gbps", "10"],
        ["--lengths"],
    ],
)
def test_a_strict_plan_ends_with_1_if_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1024\n")
    how = [*how, str(lengths)] if how == ["--lengths"] else how
    plan = ["plan", "--cluster", "frontier", "--root", str(ROOT), "--gpus", "16", *how, "--model"]
    line = printed_by(capsys, *plan, "gpt-1t", code=2)
    assert main([*plan, "gpt-1t", "--strict"]) == 1
    assert capsys.readouterr() == ("", f"{line}\n")
    assert " fit" in line
    assert "no-such-model" in printed_by(capsys, *plan, "no-such-model", "--strict", code=2)


def test_three_pairs_of_the_table_of_machines_have_no_error_of_their_own() -> None:
    """As docs/predictor-errors.md says under "On your machine"."""
    table = pd.read_csv(ROOT / "results" / "reference" / "predicted" / "validation.csv")
    is_speed = ~table["quantity"].isin(["peak GiB", "ratio", "efficiency"])
    pairs = table[(table["use"] != "calibration") & is_speed].groupby(["cluster", "stack"]).size().index
    without = {pair for pair in pairs if not setting(CONFIG, *pair)[1].has_evidence}
    assert without == {
        ("frontier", "fsdp2"), ("dgx-h200", "fsdp2-2025"), ("selene-2021", "deepspeed-zero"),
    }  # fmt: skip


def test_an_option_about_gated_mlps_is_of_models_that_have_some(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--root", str(ROOT), "--cluster", "dgx-h100", "--gpus", "8", "--gated-kept", "2", "--seq", "1024"]
    assert main(["predict", *job, "--model", "gpt-20b", "--scheme", "zero3"]) == 2
    assert "--gated-kept: model 'gpt-20b' has no gated MLPs" in capsys.readouterr().err
    assert main(["plan", *job, "--model", "gpt-20b"]) == 2
    assert "--gated-kept: model 'gpt-20b' has no gated MLPs" in capsys.readouterr().err
    assert main(["predict", *job, "--model", "llama-3-8b", "--scheme", "zero3"]) == 0
    assert ", 2 vectors of a gated MLP kept, " in capsys.readouterr().out


def test_a_grid_says_what_is_within_the_error_of_memory_as_one_job_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = [
        "predict",
        "--root",
        str(ROOT),
        "--cluster",
        "frontier",
        "--scheme",
        "hier3",
        "--gpus",
        "8",
        "--model",
    ]
    assert main([*job, "gpt-20b", "gpt-1t"]) == 1
    small, large = (line for line in capsys.readouterr().out.splitlines() if " does not fit: " in line)
    assert small.endswith(" short, within the error of predicted memory")
    assert large.endswith(" GiB short")
    assert main([*job, "gpt-20b"]) == 1
    assert ", within the error of predicted memory; times below" in capsys.readouterr().out
