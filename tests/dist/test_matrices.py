"""Whole-matrix optimizers on sharded modules, against the same optimizer on whole parameters."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import product
from typing import Any

import pytest
import pytorch_optimizer
import torch
from test_parity import INNER
from torch import nn

import lowband
from lowband.cost.matrices import moved_numel
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from tests.checkout import CONFIG, ROOT

STEPS = 3  # disturbed before the last; Shampoo's roots change once


class Block(nn.Module):
    """Matrices smaller and larger than a shard, a bias, and a matrix that is not square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.tiny = nn.Linear(width, 3, bias=False)
        self.back = nn.Linear(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.back(self.tiny(x))


class Model(nn.Module):
    def __init__(self, width: int = 17, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), (tokens + 1).flatten() % 11)


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(step))  # on all ranks the same


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.05, weight_decay=0.1)


def shampoo(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Distributed Shampoo (arXiv 2002.09018) of a package; roots of its statistics at every second step."""
    return pytorch_optimizer.ScalableShampoo(
        parameters, lr=0.05, start_preconditioning_step=1, preconditioning_compute_steps=2, block_size=16
    )


OPTIMIZERS = {"muon": muon, "shampoo": shampoo}


def train_whole(of: str = "muon", steps: int = STEPS) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    named = dict(model.named_parameters())
    inside = [p for name, p in named.items() if name.startswith("blocks") and p.ndim == 2]
    others = [p for name, p in named.items() if not (name.startswith("blocks") and p.ndim == 2)]
    optimizers = OPTIMIZERS[of](inside), torch.optim.AdamW(others, lr=1e-2)
    for step in range(steps):
        model(tokens_of(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@cache
def trained_whole(of: str) -> dict[str, torch.Tensor]:
    return on_ranks(1, train_whole, of)[0]


def train(
    scheme: str,
    act: Callable[..., Any] = lambda *_: None,
    over: str | None = None,
    of: str = "muon",
    **options: Any,
) -> Any:
    """Trained on all ranks, on the same data; `act` is called with step, model, matrices before each step."""
    torch.manual_seed(0)
    model = lowband.shard(
        Model(), CONFIG.scheme(scheme), lowband.Topology(INNER), Block, torch.float32, **options
    )
    matrices = lowband.Matrices(model, over=over)
    optimizer, adamw = OPTIMIZERS[of](matrices.parameters()), torch.optim.AdamW(matrices.others(), lr=1e-2)
    sent = []
    for step in range(STEPS):
        model(tokens_of(step)).backward()
        engine_of(model).ledger.take()
        act(step, model, matrices)
        with matrices:
            optimizer.step()
        sent.append([each for each in engine_of(model).ledger.take() if each.collective.startswith("matrix")])
        adamw.step()
        adamw.zero_grad()
    state = lowband.full_state_dict(model)
    shapes = [tuple(p.shape) for p in matrices.parameters()]
    return state, sent, shapes, len(model._lowband.units)


# On 8 ranks there are all levels, on 4 none beyond the node; on 1 and 2 schemes differ in little or nothing.
FEW = {("zero3", 1), ("zero3", 2), ("hsdp", 4), ("zero1", 4), ("hier3-exact", 8)}
SCHEMES = ("zero3", "hier3-exact", "hsdp", "ddp", "zero1")


@pytest.mark.parametrize(
    ("scheme", "ranks"),
    [
        pytest.param(*case, marks=[] if case in FEW else [pytest.mark.wide])
        for case in product(SCHEMES, (1, 2, 4, 8))
    ],
)
def test_as_on_whole_parameters(scheme: str, ranks: int) -> None:
    """The gradients are sums of equal numbers, in another order: differences are of rounding."""
    reference = trained_whole("muon")
    check_close(on_ranks(ranks, train, scheme)[0][0], reference)


def check_close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.wide) for ranks in (1, 4, 8))])
def test_shampoo_as_on_whole_parameters(ranks: int) -> None:
    reference = trained_whole("shampoo")
    results = on_ranks(ranks, train, "zero3", no_act, None, "shampoo")
    check_close(results[0][0], reference)


@pytest.mark.parametrize(("scheme", "ranks"), [("ddp", 4), ("hsdp", 8)])
def test_replicas_share_the_work_over_the_world(scheme: str, ranks: int) -> None:
    """Each matrix has one owner among all ranks, to which only those of its replica send gradients."""
    results = on_ranks(ranks, train, scheme, no_act, "world")
    reference = trained_whole("muon")
    check_close(results[0][0], reference)
    assert sum(a * b for _, _, shapes, _ in results for a, b in shapes) == NUMEL
    sent = {
        name: sum(each.bytes for r in results for each in r[1][-1] if each.collective == name)
        for name in NAMES
    }
    replicas = ranks if scheme == "ddp" else ranks // INNER["node"]
    assert sent["matrix_return"] - sent["matrix_gather"] == 4 * (replicas - 1) * NUMEL
    assert scheme != "ddp" or sent["matrix_gather"] == 0


def no_act(*_: object) -> None:
    pass


def test_bytes_are_those_of_the_closed_form_and_every_rank_owns_its_share() -> None:
    """Each element that a matrix's owner does not hold travels there as a gradient, and back as a value."""
    results = on_ranks(4, train, "zero3")
    owned = [sum(a * b for a, b in shapes) for _, _, shapes, _ in results]
    assert sum(owned) == NUMEL
    assert min(owned) > 0
    by_step = [
        {
            name: sum(each.bytes for r in results for each in r[1][step] if each.collective == name)
            for name in NAMES
        }
        for step in range(STEPS)
    ]
    first, *later = by_step
    assert first["matrix_gather"] == 2 * later[0]["matrix_gather"]  # the values too, the first time
    for sent in later:
        assert sent["matrix_gather"] == sent["matrix_return"]
        assert sent["matrix_changed"] == 4 * 3 * 3  # a byte to each other rank, for each unit with matrices
    assert later[0]["matrix_return"] == sum(on_ranks(4, moved_bytes, "zero3"))
    block = tuple(tuple(p.shape) for p in Model().blocks[0].parameters())
    levels = Levels.fit(INNER, 4)
    assert later[0]["matrix_return"] == 4 * moved_numel((block,) * 3, levels, "world")  # the predictor's


NAMES = ("matrix_gather", "matrix_return", "matrix_changed")
NUMEL = sum(p.numel() for n, p in Model().named_parameters() if n.startswith("blocks") and p.ndim == 2)


def moved_bytes(scheme: str) -> int:
    """4 bytes for each element of this rank's shards whose owner is another rank, from public facts alone."""
    model = lowband.shard(Model(), CONFIG.scheme(scheme), lowband.Topology(INNER), Block, torch.float32)
    matrices = lowband.Matrices(model)
    own = {id(p) for p in matrices.others()}
    mine = [p.shard_of for p in model.parameters() if id(p) not in own]
    held = sum(shard.stop - shard.start for shard in mine)
    kept = 0
    for share in matrices._shares:
        for matrix in share.matrices:
            if matrix.is_owned:
                kept += matrix.of.stop - matrix.of.start
    return 4 * (held - kept)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def selected_of_stages(
    is_tied: bool,
    inner: dict[str, int] | None = None,
    degree: int | None = None,
    layers: list[int] | None = None,
) -> list[str]:
    """degree: of the pipeline; default: all ranks"""
    embed, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    if is_tied:
        head.weight = embed.weight
    degree = torch.distributed.get_world_size() if degree is None else degree
    topology = lowband.Topology(inner or {}, lowband.Axes(pipeline=degree))
    pipeline = lowband.Pipeline(
        [embed, Residual(), Residual(), head],
        lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        "zero3", topology, 1, layers=layers, compute_dtype=torch.float32,
    )  # fmt: skip
    matrices = lowband.Matrices(pipeline)
    muon, others = torch.optim.Muon(matrices.parameters(), lr=0.1), matrices.others()
    adamw = torch.optim.AdamW(others, lr=0.1) if others else None
    tokens = torch.arange(6).view(1, 6)
    pipeline.step([(tokens, tokens)])
    with matrices:
        muon.step()
    if adamw is not None:
        adamw.step()
    names = {shard.shard_of.name for shard in others}
    return [name for name, shard in pipeline.named_parameters() if shard.shard_of.name not in names]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head_of_a_pipeline_are_no_matrices(ranks: int, is_tied: bool) -> None:
    """With 4 stages two ranks have no others."""
    found = on_ranks(ranks, selected_of_stages, is_tied)
    assert [name for names in found for name in names] == ["1.inner.weight", "2.inner.weight"]


def meeting_after_matrices(layers: list[int]) -> int:
    """A sum over all ranks in a group that is made later. layers: of each of two stages"""
    selected_of_stages(False, {"package": 2, "node": 4}, 2, layers)
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=torch.distributed.new_group())
    return int(total)


@pytest.mark.parametrize("layers", [[1, 3], [3, 1]])
def test_a_stage_without_matrices_makes_the_groups_of_the_others(layers: list[int]) -> None:
    """Data ranks, four of each stage, lie along two hops, which for matrices are one ring."""
    assert on_ranks(8, meeting_after_matrices, layers) == [8] * 8


def load_in_between(step: int, model: nn.Module, matrices: lowband.Matrices) -> None:
    if step == 2:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def train_whole_changed(act: Callable[..., None] = load_in_between) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    named = dict(model.named_parameters())
    inside = [p for name, p in named.items() if name.startswith("blocks") and p.ndim == 2]
    optimizers = (
        muon(inside),
        torch.optim.AdamW([p for p in named.values() if all(p is not q for q in inside)], 1e-2),
    )
    for step in range(STEPS):
        model(tokens_of(step)).backward()
        act(step, model, None)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_values_that_changed_between_two_steps_reach_the_owner() -> None:
    [reference] = on_ranks(1, train_whole_changed)
    check_close(on_ranks(4, train, "hier3-exact", load_in_between)[0][0], reference)


def swap_in_between(step: int, model: nn.Module, _: lowband.Matrices | None) -> None:
    """Two matrices of a unit have each other's values, and the rows of another one change places."""
    if step != 2:
        return
    flat = {
        name: p.detach().as_subclass(torch.Tensor).clone().flatten() for name, p in model.named_parameters()
    }
    up, down, tiny = "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.tiny.weight"
    flat[up], flat[down] = flat[down], flat[up]
    flat[tiny][:51] = flat[tiny][:51].roll(17)  # without the padding behind a shard
    with torch.no_grad():
        for name in (up, down, tiny):
            parameter = model.get_parameter(name)
            parameter.copy_(flat[name].view_as(parameter))


def test_values_that_changed_places_reach_the_owner() -> None:
    """On one rank, whose shards are whole matrices."""
    [expected] = on_ranks(1, train_whole_changed, swap_in_between)
    check_close(on_ranks(1, train, "zero3", swap_in_between)[0][0], expected)


def stepped_beside() -> list[str]:
    """Steps that would leave out matrices' gradients: outside of the context, and with a closure in it."""
    model = lowband.shard(Model(), CONFIG.scheme("zero3"), lowband.Topology(INNER), Block, torch.float32)
    matrices, said = lowband.Matrices(model), []
    optimizers = muon(matrices.parameters()), torch.optim.LBFGS(matrices.parameters())

    def closure() -> float:
        loss = model(tokens_of(0))
        loss.backward()
        return float(loss)

    for optimizer, given, context in zip(
        optimizers, ((), (closure,)), (nullcontext(), matrices), strict=True
    ):
        closure()
        with pytest.raises(UserError) as error, context:
            optimizer.step(*given)
        said.append(str(error.value))
    return said


def test_gradients_that_have_not_come_to_the_matrices_are_not_left_out() -> None:
    assert on_ranks(2, stepped_beside)[0] == [
        f"{kind}: the gradient of 'blocks.0.up.weight' has not come to its matrix "
        "(allowed: optimizer.step() in `with matrices`, behind the backward)"
        for kind in ("Muon", "LBFGS")
    ]


def clipped_after(how: str) -> tuple[float, float]:
    """The norm of what is left when matrices' gradients, or one, are discarded: found, and as it must be."""
    model = lowband.shard(Model(), CONFIG.scheme("zero3"), lowband.Topology(INNER), Block, torch.float32)
    matrices = lowband.Matrices(model)
    optimizer = muon(matrices.parameters())
    others = torch.optim.SGD(matrices.others(), lr=0.0)
    for step in range(2):  # the first is a whole one
        model(tokens_of(step)).backward()
        if step and how == "all":
            optimizer.zero_grad()
        if step and how == "one":
            model.get_parameter("blocks.0.up.weight").grad = None
        have = [p for p in model.parameters() if p.grad is not None]
        norms = lowband.norms(have, [p.grad for p in have])
        clipped = lowband.clip_grad_norm_(model, 1.0)
        with matrices:
            optimizer.step()
        others.step()
        others.zero_grad()
    return float(clipped), float(torch.stack([*norms]).norm())


@pytest.mark.parametrize("how", ["none", "one", "all"])
def test_what_is_left_of_the_gradients_is_clipped(how: str) -> None:
    for found, expected in on_ranks(2, clipped_after, how):
        assert found == pytest.approx(expected, rel=1e-5)


def misused(how: str) -> str:
    model = lowband.shard(Model(), CONFIG.scheme("zero3"), lowband.Topology(INNER), Block, torch.float32)
    try:
        if how == "selects nothing":
            lowband.Matrices(model, select=lambda name, shape: False)
        if how == "inside":
            lowband.Matrices(model, over="self")
        if how == "cost raises":
            with pytest.raises(ZeroDivisionError):
                lowband.Matrices(model, cost=lambda shape: 1 / 0)
            return repr(len(lowband.Matrices(model).parameters()) > 0)
        matrices = lowband.Matrices(model)
        if how == "clipped too late":
            model(tokens_of(0)).backward()
            with matrices:
                lowband.clip_grad_norm_(model, 1.0)
        if how == "clipped behind":
            model(tokens_of(0)).backward()
            with matrices:
                pass
            lowband.clip_grad_norm_(model, 1.0)
        if how == "twice":
            lowband.Matrices(model, select=lambda name, shape: "blocks.2" in name)
        optimizer = torch.optim.AdamW(model.parameters())
        model(tokens_of(0)).backward()
        optimizer.step()
    except UserError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("selects nothing", "no matrices are selected"),
        ("inside", "Matrices: over='self' of 'blocks.0' (allowed: world)"),
        ("cost raises", "True"),
        ("all to AdamW", "which lowband.Matrices updates"),
        ("clipped too late", "Matrices: clip_grad_norm_ inside of `with matrices` or behind it, where their"),
        ("clipped behind", "Matrices: clip_grad_norm_ inside of `with matrices` or behind it, where their"),
        ("twice", "updated by another lowband.Matrices"),
    ],
)
def test_misuse_is_refused(how: str, text: str) -> None:
    assert all(text in message for message in on_ranks(2, misused, how))


def fail_once(step: int, model: nn.Module, matrices: lowband.Matrices) -> None:
    """A step that spoils the owners' values and raises; then the same gradients again."""
    if step != 2:
        return
    before = lowband.full_state_dict(model)
    with pytest.raises(ZeroDivisionError), matrices:
        for whole in matrices.parameters():
            whole.data.fill_(7.0)
        raise ZeroDivisionError
    after = lowband.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.zero_grad()
    model(tokens_of(step)).backward()


def test_a_step_that_raised_leaves_no_trace() -> None:
    state, undisturbed = (on_ranks(4, train, "zero3", act)[0][0] for act in (fail_once, lambda *_: None))
    assert all(torch.equal(state[name], value) for name, value in undisturbed.items())


def accumulate_and_skip() -> list[bool]:
    """Without gradients there is nothing to move, and Muon leaves the values alone."""
    model = lowband.shard(Model(), CONFIG.scheme("zero3"), lowband.Topology(INNER), Block, torch.float32)
    matrices = lowband.Matrices(model)
    optimizer = muon(matrices.parameters())
    before = lowband.full_state_dict(model)
    with matrices:
        optimizer.step()
    after = lowband.full_state_dict(model)
    with lowband.no_sync(model):
        model(tokens_of(0)).backward()
    model(tokens_of(1)).backward()
    with matrices:
        optimizer.step()
    moved = lowband.full_state_dict(model)
    name = "blocks.0.up.weight"
    return [torch.equal(before[name], after[name]), torch.equal(after[name], moved[name])] if before else []


def test_a_step_without_gradients_changes_nothing() -> None:
    assert on_ranks(2, accumulate_and_skip)[0] == [True, False]


def skip_steps(is_sharded: bool) -> dict[str, torch.Tensor]:
    """Of each step, gradients first come that the optimizers discard: the loss was not finite, say."""
    torch.manual_seed(0)
    model = Model()
    inside = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not q for q in inside)]
    matrices: AbstractContextManager[object] = nullcontext()
    if is_sharded:
        lowband.shard(model, CONFIG.scheme("zero3"), lowband.Topology(INNER), Block, torch.float32)
        matrices = lowband.Matrices(model)
        inside, others = matrices.parameters(), matrices.others()
    optimizers = muon(inside), torch.optim.SGD(others, 0.1)
    for step in range(STEPS):
        for skipped in (True, False):
            with lowband.no_sync(model) if is_sharded and skipped and step else nullcontext():
                model(tokens_of(2 * step + skipped)).backward()
            if step == 1:
                model.blocks[0].up.weight.grad = None
            if not skipped:
                with matrices:
                    optimizers[0].step()
                optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return lowband.full_state_dict(model) if is_sharded else model.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_left_out_and_a_matrix_without_a_gradient(ranks: int) -> None:
    [expected] = on_ranks(1, skip_steps, False)
    check_close(on_ranks(ranks, skip_steps, True)[0], expected)


def run_example(text: str) -> bool:
    torch.manual_seed(0)
    model = lowband.shard(Model(), CONFIG.scheme("zero3"), lowband.Topology(INNER), Block, torch.float32)
    before = lowband.full_state_dict(model)
    exec(text, {"torch": torch, "lowband": lowband, "model": model, "x": tokens_of(0)})
    after = lowband.full_state_dict(model)
    return any(not torch.equal(before[name], after[name]) for name in before) or not before


def test_the_example_of_the_page_runs() -> None:
    page = ROOT / "docs" / "library.md"
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    [example] = [text for text in found if "lowband.Matrices" in text]
    assert on_ranks(2, run_example, example) == [True, True]
