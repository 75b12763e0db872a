"""Bad input on the command line: one line, exit code 2, nothing written."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lowband
from lowband.__main__ import USERS, command_line, main
from lowband.box import links, network
from lowband.errors import UserError
from lowband.spec.csv_tables import read_table
from tests.called import called
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by

PREDICT = ["predict", "--cluster", "frontier", "--model", "gpt-20b", "--scheme", "zero3"]
PLAN = ["plan", "--cluster", "frontier", "--model", "gpt-1m", "--gpus", "8"]


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr, of a command that ends with exit code 2."""
    try:
        code = main(arguments)
    except SystemExit as ended:  # argparse's own
        code = ended.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert not any(line.startswith("Traceback") for line in lines)
    return lines[-1]


def test_a_scheme_without_a_name_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert "no entry ''" in told(["spec", "--scheme", "", "--to", "fsdp2", "--ranks", "8"], capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        [*PREDICT, "--gpus", "0"],
        [*PREDICT, "--gpus", "8", "--micro-batch", "0"],
        [*PREDICT, "--gpus", "8", "--accumulation", "-1"],
        [*PREDICT, "--gpus", "8", "--seq", "x"],
        [*PLAN, "--tp", "0"],
        [*PLAN, "--global-batch", "0"],
    ],
)
def test_counts_are_one_or_more(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert "allowed: 1 or more" in told(arguments, capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", "--gpus", "9" * 5000], ["predict", "--gpus", "0\n0"], ["predict", "x" * 10**5],
        ["predict", "--x\ny"], ["predict"], [*PREDICT, "--gpus", "9" * 20], ["box", "x" * 9000],
        ["bench-comm", "--seconds", "\ud800"],
    ],
    ids=range(8),
)  # fmt: skip
def test_whatever_is_given_is_refused_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = printed_by(capsys, *arguments, code=2)
    assert line.startswith(f"lowband: {arguments[0]}")
    assert len(line) < 5000


def test_a_path_of_two_lines_is_shown_in_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--tables", str(tmp_path / "a\nb"), "--out", str(tmp_path)]
    line = printed_by(capsys, "table", "scaling", *given, code=2)
    assert line.startswith(f"lowband: {tmp_path}/a\\nb")


def test_a_table_by_a_name_that_no_system_takes_is_refused() -> None:
    with pytest.raises(UserError, match="no such table"):
        read_table(Path("9" * 9000))


def test_a_path_that_no_system_takes_is_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = printed_by(capsys, "collect", "--out", "9" * 9000, str(tmp_path), code=2)
    assert line.startswith("lowband: 999")
    assert line.endswith("File name too long")
    assert len(line) < 5000


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 47
    assert max(map(len, lines)) <= 80
    *listed, last = [line.split()[0] for line in lines if re.match("  [a-z]", line)]
    assert tuple(listed[: len(USERS)]) == USERS
    assert last == "bench-..."
    names = " ".join(lines).partition("on this machine:")[2].replace(",", "").split()
    assert sorted([*listed, *(f"bench-{name}" for name in names)]) == sorted(command_line()[1])


@pytest.mark.parametrize("verb", command_line()[1])
def test_each_verb_s_help_has_an_example_that_is_accepted(verb: str) -> None:
    parser, verbs = command_line()
    lines = verbs[verb].format_help().splitlines()
    program, *example = shlex.split(lines[lines.index("example:") + 1])
    assert (program, example[0]) == ("lowband", verb)
    assert parser.parse_args(example).run


def test_predict_s_example_gives_the_page_s_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the paper, to which two constants are fitted."""
    lines = command_line()[1]["predict"].format_help().splitlines()
    _, *example = shlex.split(lines[lines.index("example:") + 1])
    assert main([*example, "--json"]) == 0
    rate = {row["scheme"]: row["tflops_per_gpu"] for row in json.loads(capsys.readouterr().out)}
    assert rate["hier3"] / rate["zeropp"] == pytest.approx(1.71, abs=0.01)
    assert rate["zeropp"] / rate["zero3"] == pytest.approx(1.405, abs=0.01)


def test_an_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(["predcit"], capsys) == "lowband: no verb 'predcit'; did you mean 'predict'?"
    assert told(["xyz"], capsys) == "lowband: no verb 'xyz' (allowed: those of lowband --help)"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"lowband {lowband.__version__}\n"


def test_bad_input_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    """torchrun ends the other ranks once the first has printed it."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
        "-m", "lowband", "train", str(tmp_path / "none.json"),
    ]  # fmt: skip
    done = called(*command)
    assert done.returncode != 0
    assert done.stderr.count("lowband: ") == 1, done.stderr


def test_a_folder_that_is_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    out = ["spec", "--suite", "smoke", "--root", str(ROOT), "--out", str(tmp_path / "taken")]
    assert "taken" in told(out, capsys)


def test_jobs_of_no_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "jobs.csv"
    assert "no such folder" in told(["box", "jobs", str(tmp_path / "none"), "--out", str(out)], capsys)
    assert not out.exists()


def test_a_reader_that_leaves_is_no_error() -> None:
    """As `lowband predict ... | head` closes the pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lowband", *PREDICT, "--gpus", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("file", "entry"), [("claims.yaml", "words"), ("experiments.yaml", ["a", "list"])])
def test_an_entry_that_is_no_mapping_is_named(
    tmp_path: Path, file: str, entry: object, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("claims.yaml", "experiments.yaml"):
        (tmp_path / name).write_text((ROOT / "config" / name).read_text())
    (tmp_path / file).write_text(yaml.safe_dump({"broken": entry}))
    words = told(["claims", "--claims", str(tmp_path / "claims.yaml"), "--tables", str(tmp_path)], capsys)
    assert f"{tmp_path / file}: broken: is not a mapping" in words


def test_links_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "missing", lambda: "no ip")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    [spec, *_] = CONFIG.runs(["links"])
    with pytest.raises(UserError, match="no ip"):
        network.connect(spec, "private", False)
    assert network.connect(spec, "auto", False) == f"{network.PLAIN}: no ip"


def test_a_launchers_process_gets_no_network_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "missing", lambda: "")
    monkeypatch.setattr(network, "start_privately", lambda: pytest.fail("alone in a network"))
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    [spec, *_] = CONFIG.runs(["links"])
    assert network.connect(spec, "auto", True).startswith(f"{network.PLAIN}: a launcher's process")
    with pytest.raises(UserError, match="--links private: a launcher's process"):
        network.connect(spec, "private", True)


@pytest.mark.parametrize(
    ("typed", "follows"),
    [
        ("lowband pre", {"predict", "preflight"}),
        ("lowband predict --clu", {"--cluster"}),
        ("lowband zz", set()),
    ],
)
def test_completion_in_a_shell(typed: str, follows: set[str], tmp_path: Path) -> None:
    """Asked as argcomplete's shell function asks: by the environment, answered in a file."""
    pytest.importorskip("argcomplete", reason="pip install -e '.[completion]'")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed)), "_ARGCOMPLETE_IFS": "\n"}
    said = tmp_path / "said"
    done = called(sys.executable, "-m", "lowband", **asked, _ARGCOMPLETE_STDOUT_FILENAME=str(said))
    assert done.returncode == 0, done.stderr
    assert {line.strip() for line in said.read_text().splitlines() if line.strip()} == follows
