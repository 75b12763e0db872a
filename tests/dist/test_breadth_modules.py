"""Breadth-first accumulation of any module that is a chain of its units, and the refusal of others."""

import re

import torch
import torch.distributed as dist
from chains import (
    MICRO_BATCHES,
    RANKS,
    STEPS,
    Chain,
    Earlier,
    FrozenEnd,
    FrozenStart,
    Recomputed,
    Shared,
    accumulated,
    micro,
    sharded,
    train,
    weights,
)
from modules import HIER3, Adapted, Tower, sgd
from torch import nn

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.run.on_ranks import on_ranks
from tests.checkout import ROOT
from tests.refused import answer


def train_all(makes) -> list[dict[str, torch.Tensor]]:
    found = []
    for make in makes:
        model = sharded(make)
        train(model)
        assert not any(engine_of(model).meter.now[kind] for kind in ("gathered", "sums"))
        found.append(weights(model))
    return found


def single(makes) -> list[dict[str, torch.Tensor]]:
    """The mean over all ranks' micro-batches, in one process."""
    found = []
    for make in makes:
        model = make()
        optimizer = sgd([p for p in model.parameters() if p.requires_grad])
        for step in range(STEPS):
            for i in range(MICRO_BATCHES):
                for rank in range(RANKS):
                    (model(micro(step, i, rank)) / (MICRO_BATCHES * RANKS)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.detach() for name, value in model.state_dict().items()})
    return found


CHAINS = (Chain, FrozenStart, FrozenEnd, Shared, Earlier, Recomputed)


def test_chains_train_as_in_one_process() -> None:
    """Up to the order of sums over ranks."""
    [expected] = on_ranks(1, single, CHAINS)
    for make, got, of_make in zip(CHAINS, on_ranks(RANKS, train_all, CHAINS)[0], expected, strict=True):
        for name, value in of_make.items():
            if name != "unused":  # it has no gradient on one device and a zero one here
                assert torch.allclose(got[name], value, rtol=1e-5, atol=2e-5), (make.__name__, name)


# ---- refused


class Reentrant(Recomputed):
    reentrant = True


class Nested(Chain):
    """A unit inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].append(nn.Sequential(nn.Linear(7, 7)))


class Choosing(Chain):
    """Micro-batches take different layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = int(x[0, 0] > 0)
        return self.layers[2](self.layers[skipped](self.first(x))).square().mean()


class Stopping(Chain):
    """The second micro-batch goes through one more layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](self.first(x))
        return (y if x[0, 0] > 0 else self.layers[1](y)).square().mean()


class Skipping(Chain):
    """The head also uses the embedding's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = x
        for layer in self.layers:
            y = layer(y)
        return (x * y).mean()


REFUSED = {
    Tower: "'layers.1': breadth-first: it takes a tensor with a gradient that is not an earlier unit's",
    Adapted: "'layers.1': breadth-first: it takes a tensor with a gradient",
    Reentrant: "'layers.0': breadth-first: it runs without gradients, as under reentrant",
    Nested: "'layers.1.3': breadth-first: it runs inside of unit 'layers.1'",
    Choosing: "breadth-first: not every micro-batch goes through it",
    Stopping: "'layers.1': breadth-first: not every micro-batch goes through it (allowed",
    Skipping: "the loss uses a tensor from before the first unit",
}


def refusals() -> list[str]:
    said = []
    for make in REFUSED:
        model = sharded(make, HIER3)
        parts = [torch.full((4, 5), x) for x in (1.0, -1.0)]
        said.append(answer(lambda m=model, p=parts: lowband.accumulate(m, p, m)))
        with torch.no_grad():
            model(parts[0])
    model = sharded(Chain)
    for loss_of in (
        lambda x: model(x) + model(x),
        lambda x: model(x).detach(),
        lambda x: lowband.accumulate(model, [x], model)[0],
    ):
        said.append(answer(lambda f=loss_of: lowband.accumulate(model, [torch.ones(4, 5)], f)))
    said.append(answer(lambda: lowband.accumulate(model, [], model)))
    accumulated(model, 0)
    return said


def test_what_is_no_chain_is_refused() -> None:
    expected = [
        *REFUSED.values(),
        "loss_of calls the module more than once",
        "loss_of returns no loss",
        "another thread runs a forward or backward of this module",
        "no micro-batches",
    ]
    for said, words in zip(on_ranks(RANKS, refusals)[0], expected, strict=True):
        assert words in said
        assert "\n" not in said


# ---- the example


def run_example(text: str) -> bool:
    names = {"lowband": lowband, "torch": torch, "module": Chain(), "Block": nn.Sequential}
    before = [value.detach().clone() for value in names["module"].parameters()]
    names["steps"] = [[micro(step, i, dist.get_rank()) for i in range(2)] for step in range(2)]
    exec(text, names)
    after = list(lowband.full_state_dict(names["module"]).values())  # on rank 0
    return len(names["losses"]) == 2 and not any(map(torch.equal, before, after))


def test_the_example_of_the_page_runs(monkeypatch) -> None:
    root = ROOT
    monkeypatch.chdir(root)
    found = re.findall(r"```python\n(.*?)```", (root / "docs" / "library.md").read_text(), re.DOTALL)
    [example] = [text for text in found if "lowband.accumulate" in text]
    assert on_ranks(2, run_example, example) == [True, True]
