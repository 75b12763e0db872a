"""`lowband check-context`: the example is right in every way, and what users get wrong is named."""

import shutil
from pathlib import Path

import pytest

from lowband.__main__ import main
from lowband.run import check_context
from tests.checkout import ROOT

RIGHT = ROOT / "examples" / "context.py"
POSITIONS = ("self.context.places(x)", "torch.arange(x.shape[1])")
LOST = ("self.context.attention(q, k, v)", "self.context.attention(q, k, v if len(v) == 3 else v.detach())")
NORM = ("x = x + self.position(places)", "x = x + self.position(places) - x.mean(1, keepdim=True)")


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[str], str]:
    code = main(["check-context", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def changed(folder: Path, old: str, new: str) -> Path:
    text = RIGHT.read_text()
    assert old in text
    file = folder / "mine.py"
    file.write_text(text.replace(old, new))
    return file


def test_the_example_is_right_in_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = told(capsys, RIGHT, "--tolerance", "1e-12")
    assert code == 0
    assert len(lines) == 1 + 8 + 1
    assert lines[-1] == "8 of 8 ways give what one process gives, on 4 ranks"


def test_heads_that_three_ranks_cannot_divide_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = told(capsys, RIGHT, "--ranks", 3)
    assert code == 0
    assert [line for line in lines if "refused: context_attention heads: 4 heads with 2 of keys" in line]
    assert lines[-1] == "4 of 4 ways give what one process gives, on 3 ranks"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (POSITIONS, "wrong outputs: most of token"),
        (NORM, "wrong outputs: most of token"),
        (LOST, "wrong gradients: most of kv.weight"),
    ],
    ids=["positions", "a mean over tokens", "lost gradients"],
)
def test_what_is_wrong_is_named(
    fault: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, _ = told(capsys, changed(tmp_path, *fault), "--ranks", 2)
    assert code == 1
    assert lines[-1] == "0 of 6 ways give what one process gives, on 2 ranks"
    assert all(said in line for line in lines[1:-1]), lines


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def inputs()", "def batch()", "does not define inputs (allowed: make(context) and inputs())"),
        ("return Attention(context)", "return 3", "make(context) returns int (allowed: a torch.nn.Module)"),
        ("return torch.randn(2, 30, WIDTH)", "return 3", "inputs() gives no batch"),
        ("return out", "return out.sum()", "the module returns [] (allowed: a tensor [2, 30, ...]"),
        ("return out", "return out.nothing", "AttributeError: 'Tensor' object has no attribute 'nothing'"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_checked(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, err = told(capsys, changed(tmp_path, old, new), "--ranks", 2)
    assert (code, lines) == (2, [])
    assert said in err.splitlines()[-1]


def test_a_module_that_takes_too_long_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_context, "LIMIT_S", 1.0)
    endless = changed(
        tmp_path, "def inputs() -> torch.Tensor:", "def inputs() -> torch.Tensor:\n    while True: pass"
    )
    code, _, err = told(capsys, endless, "--ranks", 2)
    assert code == 2
    assert "it took more than 1 s (allowed: a smaller batch)" in err.splitlines()[-1]


def test_words_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in told(capsys, tmp_path / "none.py")[2]
    shutil.copy(RIGHT, tmp_path / "mine.py")
    assert "1 ranks (allowed: 2 to 64" in told(capsys, tmp_path / "mine.py", "--ranks", 1)[2]
    assert "'2' (allowed: a number between 0 and 1)" in told(capsys, RIGHT, "--tolerance", 2)[2]


LINEAR = """
import torch
from torch import nn

from lowband.engine.parallel.linear import reference


class Layers(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.context, self.qkv, self.last = context, nn.Linear(8, 24), nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = reference(q, k, v) if self.context is None else self.context.linear_attention(q, k, v)
        x = x + y.transpose(1, 2).flatten(2)
        return x


def make(context):
    return Layers(context)


def inputs():
    return torch.randn(2, 30, 8)
"""
SOFTMAX = """
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.last(x).chunk(3, -1))
        one = nn.functional.scaled_dot_product_attention
        y = one(q, k, v, is_causal=True) if self.context is None else self.context.attention(q, k, v)
        return x + y.transpose(1, 2).flatten(2)
"""


def test_linear_layers_are_tried_by_their_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine := tmp_path / "mine.py").write_text(LINEAR)
    code, lines, _ = told(capsys, mine, "--tolerance", "1e-12")
    assert code == 0
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["state, pass", "state, gather", "state, scan"]
    assert lines[-1] == "3 of 3 ways give what one process gives, on 4 ranks"


def test_layers_of_both_kinds_are_tried_where_tokens_lie_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine := tmp_path / "mine.py").write_text(LINEAR.replace("        return x\n", SOFTMAX))
    code, lines, _ = told(capsys, mine, "--ranks", 2, "--tolerance", "1e-12")
    assert code == 0
    assert [line.split("  ")[0].strip() for line in lines[1:-1]] == ["gather", "ring", "heads"]
    lost = LINEAR.replace("linear_attention(q, k, v)", "linear_attention(q, k, v.detach())")
    mine.write_text(lost)
    code, lines, _ = told(capsys, mine, "--ranks", 2)
    assert code == 1
    assert all("wrong gradients: most of qkv." in line for line in lines[1:-1]), lines
