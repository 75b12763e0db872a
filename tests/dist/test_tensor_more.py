"""Modules and plans beside the usual ones, cut over tensor ranks, against one process that has them whole."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.engine.checkpoint.manifest import FORMAT, Damaged, Manifest, _sum
from lowband.engine.units.parts import along_tensor
from lowband.engine.units.slice_of import is_partial, slice_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.activations import SHARED_REDUCE
from lowband.spec.tensor import Column, Join, Plan, Row, Split, Tokens, Vocabulary, Whole
from tests.refused import answer, refusal


def _topology(sequence: bool = False) -> lowband.Topology:
    return lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=sequence))


def _error(make: Callable[[], nn.Module], plan: Plan, sequence: bool) -> float:
    """The largest relative error of the gradients; infinite if one is missing."""
    made = []
    for _ in range(2):  # torch copies no module with a weight norm
        torch.manual_seed(0)
        made.append(make().double())
    whole, cut = made[0], lowband.parallelize(made[1], plan, _topology(sequence))
    x, along = torch.randn(2, 4, 8, dtype=torch.double), along_tensor(cut)
    assert along is not None
    for module in (cut, whole):
        module(x).square().sum().backward()
    errors = []
    for part, full in zip(cut.parameters(), whole.parameters(), strict=True):
        if part.grad is None or full.grad is None:
            errors.append(0.0 if part.grad is full.grad else torch.inf)
            continue
        of = slice_of(part)
        grad = along.summed(part.grad, SHARED_REDUCE, "test") if is_partial(part) else part.grad
        expected = full.grad if of is None else of.cut(full.grad)
        errors.append(((grad - expected).abs().max() / full.grad.abs().max()).item())
    return max(errors)


class Products(nn.Module):
    """Two products of one input, the first of which is made without a graph."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.first, self.q, self.k, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.is_checkpointed:
            q = checkpoint(self.q, x, use_reentrant=True)
        else:
            with torch.no_grad():
                q = self.q(x)
        return self.out(q * self.k(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.head = nn.Embedding(4, 8), nn.Linear(8, 8)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.all = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all(self.head(self.block(x + self.positions.weight)))  # type: ignore[no-any-return]


PRODUCTS: Plan = {"[qk]": Column(), "out": Row()}
NET: Plan = {
    "block": Split(), "block.1": Column(), "block.3": Row(), "head": Column(), "all": Join(),
    "positions": Whole(),
}  # fmt: skip


def _errors() -> list[float]:
    return [
        _error(lambda: Products(is_checkpointed=False), PRODUCTS, sequence=False),
        _error(lambda: Products(is_checkpointed=True), PRODUCTS, sequence=False),
        _error(Net, {**NET, "*": Tokens()}, sequence=True),  # also fits the root, around `positions`
    ]


def test_gradients_are_those_of_one_process() -> None:
    assert all(error < 1e-12 for errors in on_ranks(2, _errors) for error in errors)


class Prompted(nn.Module):
    """A parameter enters a column product whose parent, a list, has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(4, 8))
        self.layers, self.out = nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.layers[0](self.prompt))  # type: ignore[no-any-return]


def _losses(tensor: int) -> list[float]:
    torch.manual_seed(0)
    module, topology = Prompted(), lowband.Topology({}, lowband.Axes(tensor=tensor))
    lowband.parallelize(module, {"layers.0": Column(), "out": Row()}, topology)
    lowband.shard(module, "zero3", topology, nn.Identity, compute_dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = module(torch.ones(8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_parameter_that_enters_a_product_is_read_anew_in_each_step() -> None:
    [alone] = on_ranks(1, _losses, 1)
    for found in on_ranks(4, _losses, 2):
        assert found == pytest.approx(alone, rel=1e-5)
    assert alone[2] < 0.99 * alone[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


def _refusals() -> list[str]:
    topology = _topology()
    cases: list[tuple[nn.Module, Plan, lowband.Topology]] = [
        (Net(), NET, _topology(sequence=True)),
        (Tied(), {"embed": Vocabulary()}, topology),
        (nn.Sequential(nn.Embedding(8, 8, scale_grad_by_freq=True)), {"0": Vocabulary()}, topology),
        (nn.Sequential(nn.Linear(8, 12)), {"0": Column(parts=1 + 2 * topology.rank)}, topology),
        (nn.Sequential(nn.Linear(8, 12 - topology.rank)), {"0": Column()}, topology),
    ]
    texts = []
    for module, plan, on in cases:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1)
        texts.append(refusal(lowband.parallelize, module, plan, on))
    return texts


def test_plans_that_would_train_wrongly_are_refused() -> None:
    first, second = on_ranks(2, _refusals)
    assert first == second
    assert "no rule says whether 'block.0.weight' sees all tokens" in first[0]
    assert "'embed.weight' has several places, and the plan does not treat it alike in them" in first[1]
    assert "scale_grad_by_freq" in first[2]
    assert "differs from rank 0 in rules of its plan" in first[3]
    assert "differs from rank 0 in list of parameters" in first[4]


def _in_inference_mode(sequence: bool) -> float:
    torch.manual_seed(0)
    whole = Net()
    cut = lowband.parallelize(copy.deepcopy(whole), {**NET, "block.0": Tokens()}, _topology(sequence))
    with torch.inference_mode():
        x = torch.randn(2, 4, 8)
        return float((cut(x) - whole(x)).abs().max())


@pytest.mark.parametrize("sequence", [False, True])
def test_inference_mode(sequence: bool) -> None:
    assert max(on_ranks(2, _in_inference_mode, sequence)) < 1e-5


def _loss_of_masked() -> tuple[float, str]:
    """Where all of the second rank's vocabulary is masked: the largest error of the gradient."""
    torch.manual_seed(0)
    loss_of = nn.CrossEntropyLoss()
    along = along_tensor(lowband.parallelize(loss_of, {"": Vocabulary()}, _topology()))
    assert along is not None
    logits, targets = torch.randn(3, 16), torch.tensor([1, -100, 3])
    logits[:, 8:] = -torch.inf
    mine = along.part(logits, 1).clone().requires_grad_()
    loss = loss_of(mine, targets)
    loss.backward()
    logits.requires_grad_()
    F.cross_entropy(logits, targets).backward()
    assert mine.grad is not None
    assert logits.grad is not None
    with pytest.raises(IndexError) as error:
        loss_of(mine, torch.tensor([1, 2, 16]))
    return float((mine.grad - along.part(logits.grad, 1)).abs().max()), str(error.value)


def test_loss_of_masked_logits_and_of_wrong_targets() -> None:
    for error, text in on_ranks(2, _loss_of_masked):
        assert error < 1e-6
        assert text == "Target 16 is out of bounds."


def _losses_refused() -> list[str]:
    """Of logits by class in the second dimension, which has as many tokens, and of shares of classes."""
    loss_of = lowband.parallelize(nn.CrossEntropyLoss(), {"": Vocabulary()}, _topology())
    logits = torch.randn(2, 4, 4)
    return [
        refusal(loss_of, logits, torch.zeros(2, 4, dtype=torch.int64)),
        refusal(loss_of, logits[0], torch.zeros(4, 8)),
    ]


def test_losses_that_are_not_of_a_row_of_logits_for_each_token_are_refused() -> None:
    for by_class, shares in on_ranks(2, _losses_refused):
        assert by_class == (
            "Vocabulary of '': logits [2, 4, 4] with targets [2, 4] (allowed: [tokens, vocabulary / ranks] "
            "with the numbers of classes [tokens])"
        )
        assert "logits [4, 4] with targets [4, 8]" in shares


class ByName(nn.Module):
    """Gives its layers their inputs by torch's names of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(8, 4), nn.Identity()
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.down(input=self.up(input=self.embed(input=tokens)))
        logits = self.head(input=self.block(input=x)).flatten(0, 1)
        return self.loss(input=logits, target=tokens.flatten())


def _by_name() -> tuple[float, str]:
    torch.manual_seed(0)
    whole, tokens = ByName(), torch.arange(8).view(2, 4)
    plan: Plan = {
        "embed": Vocabulary(),
        "up": Column(),
        "down": Row(),
        "head": Vocabulary(),
        "loss": Vocabulary(),
    }
    cut = lowband.parallelize(copy.deepcopy(whole), plan, _topology())
    tokenwise = {"block": Split(), **plan}
    split = lowband.parallelize(copy.deepcopy(whole), tokenwise, _topology(sequence=True))
    return abs(float(cut(tokens) - whole(tokens))), refusal(split, tokens)


def test_inputs_given_by_name() -> None:
    for error, refused in on_ranks(2, _by_name):
        assert error < 1e-6
        assert refused.startswith("'block': with sequence parallelism a module that splits tokens takes them")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [0], "cut": {"shape": [0], "dim": 0, "parts": 1, "ranks": 10**6}}, "has more slices than"),
        ({"sharded": False, "shape": [0]}, "is cut, and not sharded"),
    ],
)
def test_manifests_with_impossible_slices_are_damaged(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    cut = {"shape": [0], "dim": 0, "parts": 1, "ranks": 2}
    tensor = {"dtype": "float32", "shape": [0], "sharded": True, "chunks": [], "cut": cut, **change}
    plain = {
        "format": FORMAT, "step": 0, "optimizer": "SGD", "groups": [], "tensors": {"model.x": tensor},
        "numbers": {}, "files": [], "extra": {},
    }  # fmt: skip
    folder = tmp_path / "step-00000000"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(plain | {"sha256": _sum(plain)}))
    with pytest.raises(Damaged, match=said):
        Manifest.read(folder)


def _of_half() -> tuple[torch.dtype, float, float]:
    """Of a loss of bf16 logits without autocast: its dtype, and how far it and its gradient are from those of
    the same logits in fp32."""
    torch.manual_seed(0)
    loss_of = lowband.parallelize(nn.CrossEntropyLoss(), {"": Vocabulary()}, topology := _topology())
    whole = (torch.randn(64, 16) * 16).bfloat16().requires_grad_()
    mine = whole.detach()[:, 8 * topology.rank : 8 * topology.rank + 8].clone().requires_grad_()
    targets = torch.randint(16, (64,))
    found, expected = loss_of(mine, targets), F.cross_entropy(whole.float(), targets)
    found.backward()
    expected.backward()
    assert mine.grad is not None and whole.grad is not None
    theirs = whole.grad[:, 8 * topology.rank : 8 * topology.rank + 8]
    apart = ((mine.grad - theirs).abs() / theirs.abs().clamp(min=1e-12)).max()
    return found.dtype, float(found - expected.bfloat16()), float(apart)


def test_a_loss_of_half_precision_is_computed_in_single() -> None:
    for dtype, of_loss, of_grad in on_ranks(2, _of_half):
        assert dtype == torch.bfloat16
        assert (of_loss, of_grad) == (0, pytest.approx(0, abs=2**-7))  # one rounding to bf16


class Shared(nn.Module):
    """One module under two names, as the embeddings of an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 4)
        self.second = nn.Sequential(self.first)


def _more_refusals() -> list[str]:
    topology, said = _topology(), []
    loss_of = lowband.parallelize(nn.CrossEntropyLoss(), {"": Vocabulary()}, topology)
    said.append(refusal(loss_of, torch.arange(64.0).view(4, 16), torch.arange(4)))  # joined before
    tied = Tied()
    lowband.parallelize(tied.embed, {"": Vocabulary()}, topology)
    said.append(refusal(lowband.parallelize, tied.head, {"": Vocabulary()}, topology))
    said.append(refusal(lowband.shard, tied.head, "zero3", topology, nn.Linear))
    module = nn.Sequential(nn.Linear(4, 8))
    optimizer = torch.optim.SGD(module.parameters())
    lowband.parallelize(module, {"0": Column()}, topology)
    lowband.shard(module, "zero3", topology, nn.Linear)
    said.append(refusal(optimizer.step))
    rules: Plan = {"second.0": Whole(), "first": Vocabulary()}
    said.append(str(tuple(lowband.parallelize(Shared(), rules, topology).first.weight.shape)))
    by_other_name = lowband.parallelize(Shared(), {"second.0": Vocabulary()}, topology)
    said.append(str(tuple(by_other_name.first.weight.shape)))
    alone = lowband.Topology({}, lowband.Axes())
    said.append(answer(lowband.parallelize, nn.Sequential(nn.Dropout(0.1)), {}, alone))
    return said


def test_what_is_cut_twice_or_joined_before_is_refused() -> None:
    for joined, tied, sharded, before, whole, shape, alone in on_ranks(2, _more_refusals):
        assert "every rank was given the same logits" in joined
        for text in (tied, sharded):
            assert "'weight' is shared with a module that is already sharded or cut" in text
        assert "holds '0." in before and "from before lowband.shard" in before
        assert (whole, shape, alone) == ("(8, 4)", "(4, 4)", "")
