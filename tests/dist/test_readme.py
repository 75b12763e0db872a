"""The README's example runs; links and make targets of the documents exist."""

import re
from pathlib import Path

import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from tests.checkout import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Model(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def run_example() -> tuple[list[str], bool]:
    torch.manual_seed(1)
    names = {"module": Model(Block(6, 6), Block(6, 3)), "Block": Block, "x": torch.ones(2, 6)}
    before = {name: value.clone() for name, value in names["module"].state_dict().items()}
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    *lines, last = example.strip().splitlines()
    exec("\n".join(lines), names)
    state = eval(last, names)
    return list(state), all(not torch.equal(state[name], before[name]) for name in state)


def test_example(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # the scheme is built in
    (names, has_changed), *others = on_ranks(4, run_example)
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert has_changed
    assert [names for names, _ in others] == [[], [], []]


def test_the_docstring_has_the_same_example() -> None:
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert all(line in lowband.__doc__ for line in example.strip().splitlines())


def test_links() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        for link in links:
            assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)
    assert len(links) > 5


def test_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    # Code alone names targets: a line of prose may begin with "make" as well.
    blocks = re.split(r"^ *```.*\n", text, flags=re.MULTILINE)[1::2]
    targets = set(re.findall(r"^ *make ([\w-]+)", "\n".join(blocks), re.MULTILINE))
    targets |= set(re.findall(r"`make ([\w-]+)", text))
    assert {"figures", "smoke", "reproduce", "test", "box-deps"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
