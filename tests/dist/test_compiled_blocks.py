"""torch.compile of blocks and of whole modules, against single-process training compiled in the same way.

The backend aot_eager traces a block's forward and backward and runs the graphs by torch's own kernels, so
most tests need no C++ compiler. One test, of `make test-all`, runs inductor's code.
"""

from functools import cache, partial
from typing import NamedTuple

import pytest
import reference
import torch
import torch._dynamo.backends.debugging  # once, before the ranks are forked
import torch._functorch.aot_autograd
from test_parity import CLIP, INNER
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.mesh import Levels
from tests.checkout import CONFIG

STEPS, BLOCKS, WIDTH, BACKEND = 2, 3, 10, "aot_eager"
LIMIT_S = 600  # the first use of the compiler takes long on a busy machine


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), (tokens + 1).flatten() % 11)


class Case(NamedTuple):
    """how: what is compiled, by which call, and whether before or after lowband.shard"""

    scheme: str
    how: str
    micro_batches: int = 1
    order: str = "depth"
    recomputes: bool = False


CASES = {
    1: (
        Case("zero3", "blocks after"),
        Case("zero3", "blocks before, used"),
        Case("ddp", "wrapped before", micro_batches=2),
        Case("zero3", "wrapped after"),
        Case("zero3", "whole before"),
        Case("zero3", "whole after"),
        Case("zero3", "whole wrapped"),
    ),
    2: (
        Case("hpz", "blocks after", micro_batches=2),
        Case("zero3", "blocks before", recomputes=True),
        Case("zero3", "blocks after", micro_batches=2, order="breadth"),
    ),
    4: (
        Case("hier3-exact", "blocks after", micro_batches=2),
        Case("zero1", "wrapped before", recomputes=True),
    ),
}
BY_RANKS = {1: pytest.mark.wide, 2: (), 4: pytest.mark.wide}


def tokens_of(step: int, micro: int, rank: int) -> torch.Tensor:
    seed = 100 * step + 10 * micro + rank
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(seed))


def compile_blocks(model: Model, how: str) -> None:
    for i, block in enumerate(model.blocks):
        if "wrapped" in how:
            model.blocks[i] = torch.compile(block, backend=BACKEND)
        else:
            block.compile(backend=BACKEND)


def compiled_and_sharded(case: Case, topology: lowband.Topology) -> nn.Module:
    model = Model(case.recomputes)
    compile_ = partial(compile_blocks, how=case.how)
    if "whole" in case.how:
        compile_ = partial(nn.Module.compile, backend=BACKEND)
    if "before" in case.how:
        compile_(model)
    if "used" in case.how:
        model(tokens_of(0, 0, 0)).backward()
        model.zero_grad()
    lowband.shard(model, CONFIG.scheme(case.scheme), topology, Block, torch.float32)
    if "whole wrapped" in case.how:
        return torch.compile(model, backend=BACKEND)
    if "after" in case.how:
        compile_(model)
    return model


def backward(model: nn.Module, case: Case, step: int, rank: int) -> None:
    count = case.micro_batches
    batches = [tokens_of(step, micro, rank) for micro in range(count)]
    if case.order == "breadth":
        lowband.accumulate(model, batches, lambda tokens: model(tokens) / count)
        return
    for tokens in batches[:-1]:
        with lowband.no_sync(model):
            (model(tokens) / count).backward()
    (model(batches[-1]) / count).backward()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


Found = tuple[dict[str, torch.Tensor], int, int]  # final weights, graphs, graph breaks


def train(case: Case, topology: lowband.Topology) -> Found:
    torch._dynamo.reset()
    counters.clear()
    model = compiled_and_sharded(case, topology)
    optimizer = adamw(list(model.parameters()))
    for step in range(STEPS):
        backward(model, case, step, topology.rank)
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    state = {name.replace("_orig_mod.", ""): value for name, value in lowband.full_state_dict(model).items()}
    return state, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def train_all(cases: tuple[Case, ...]) -> list[Found]:
    topology = lowband.Topology(INNER)
    return [train(case, topology) for case in cases]


def train_reference(case: Case, ranks: int) -> dict[str, torch.Tensor]:
    model = Model(case.recomputes)
    compile_blocks(model, "")
    scheme = CONFIG.scheme(case.scheme)
    if case.order == "breadth":  # each rank sums its micro-batches first
        scheme = scheme.model_copy(update={"weights": "self", "grads": "self", "secondary": None})
    _, _, weights = reference.train(
        model,
        lambda module, tokens: module(tokens),
        lambda step, micro, rank: (tokens_of(step, micro, rank),),
        scheme,
        Levels.fit(INNER, ranks),
        STEPS,
        case.micro_batches,
        CLIP,
        adamw,
    )
    return weights


def train_references(cases: tuple[Case, ...], ranks: int) -> list[dict[str, torch.Tensor]]:
    return [train_reference(case, ranks) for case in cases]


@cache
def found(ranks: int) -> list[Found]:
    return on_ranks(ranks, train_all, CASES[ranks], time_limit_s=LIMIT_S)[0]


@cache
def expected(ranks: int) -> list[dict[str, torch.Tensor]]:
    return on_ranks(1, train_references, CASES[ranks], ranks, time_limit_s=LIMIT_S)[0]


@pytest.mark.parametrize(
    ("ranks", "i"),
    [pytest.param(n, i, marks=BY_RANKS[n]) for n, cases in CASES.items() for i in range(len(cases))],
)
def test_bit_equal_to_compiled_training_on_one_process(ranks: int, i: int) -> None:
    weights, single = found(ranks)[i][0], expected(ranks)[i]
    for name, value in single.items():
        assert torch.equal(weights[name], value), (CASES[ranks][i], name)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=BY_RANKS[n]) for n in CASES])
def test_one_graph_serves_all_blocks_and_none_breaks(ranks: int) -> None:
    """A whole module breaks at its units' hooks; where torch goes on from there depends on the module."""
    for case, (_, graphs, breaks) in zip(CASES[ranks], found(ranks), strict=True):
        # Those that ran before sharding were compiled for plain parameters.
        expected_graphs = 2 if "used" in case.how else 1
        assert "whole" in case.how or (graphs, breaks) == (expected_graphs, 0), case


def train_by_inductor() -> list[dict[str, torch.Tensor]]:
    """Sharded, and as it is: the second finds the first one's code in the compiler's cache."""
    states = []
    for is_sharded in (True, False):
        model = Model()
        if is_sharded:
            lowband.shard(model, CONFIG.scheme("zero3"), lowband.Topology({}), Block, torch.float32)
        for block in model.blocks:
            block.compile(fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            model(tokens_of(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(lowband.full_state_dict(model) if is_sharded else model.state_dict())
    return states


@pytest.mark.wide  # most of its minute a C++ compiler's
def test_code_of_inductor_gives_the_same_bits() -> None:
    [(sharded, whole)] = on_ranks(1, train_by_inductor, time_limit_s=LIMIT_S)
    for name, value in whole.items():
        assert torch.equal(sharded[name], value), name


def losses_of_steps(is_compiled: bool, kind: str) -> list[float]:
    """Of steps in one function: two backwards, clipping, the optimizer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    lowband.shard(model, "zero3", lowband.Topology({}), Block, torch.float32)
    optimizer = adamw(list(model.parameters())) if kind == "torch" else lowband.AdamW(model, lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        with lowband.no_sync(model):
            model(0.5 * x).square().mean().backward()
        loss = model(x).square().mean()
        loss.backward()
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = torch.compile(step, backend=BACKEND) if is_compiled else step
    drawn = torch.Generator().manual_seed(torch.distributed.get_rank())
    return [float(run(torch.randn(4, WIDTH, generator=drawn))) for _ in range(STEPS + 1)]


def of_steps(kind: str) -> list[list[float]]:
    return [losses_of_steps(False, kind), losses_of_steps(True, kind)]


@pytest.mark.parametrize("kind", [pytest.param("torch"), pytest.param("lowband", marks=pytest.mark.wide)])
def test_a_whole_step_may_be_compiled(kind: str) -> None:
    for plain, compiled in on_ranks(2, of_steps, kind, time_limit_s=LIMIT_S):
        assert compiled == plain


def losses_of_stages(schedule: str, is_compiled: bool) -> tuple[list[float], int]:
    """With the number of graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    chain = [Block() for _ in range(2)]
    for block in chain if is_compiled else []:
        block.compile(backend=BACKEND)
    topology = lowband.Topology({}, Axes(pipeline=2))
    pipe = lowband.Pipeline(
        chain, nn.functional.mse_loss, "zero3", topology, 2, schedule, compute_dtype=torch.float32
    )
    optimizer, losses = adamw(list(pipe.parameters())), []
    for step in range(STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        losses += pipe.step([tuple(torch.randn(2, 3, WIDTH, generator=generator)) for _ in range(2)])
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses], sum(counters["graph_break"].values())


def of_schedules() -> list[tuple[list[float], int]]:
    return [
        losses_of_stages("1f1b", False),
        losses_of_stages("zb-h1", False),
        losses_of_stages("zb-h1", True),
    ]


def test_stages_of_split_schedules_may_be_compiled() -> None:
    *_, last = on_ranks(2, of_schedules, time_limit_s=LIMIT_S)
    losses = [found for found, _ in last]
    assert losses[0] == losses[1] == losses[2]
    assert [breaks for _, breaks in last] == [0, 0, 0]
