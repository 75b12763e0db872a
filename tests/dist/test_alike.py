"""Programs whose losses fall and mean nothing: ranks along an axis that have several batches."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from staged import batches, chain, loss_of
from torch import nn

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.tensor import Column, Plan, Row, Split, Tokens, Vocabulary
from tests.refused import answer


class Dropping(nn.Module):
    """Drops values by a function, which no plan sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.start, self.norm = nn.Embedding(8, 4), nn.Identity(), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.share = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.start(self.embed(tokens)))
        return x + F.dropout(self.down(torch.tanh(self.up(x))), self.share, self.training)


PLAN: Plan = {
    "embed": Vocabulary(), "start": Split(), "norm": Tokens(), "up": Column(), "down": Row(),
}  # fmt: skip


def on_tensor_ranks(sequence_parallel: bool) -> list[str]:
    topology = lowband.Topology({}, Axes(tensor=2, sequence_parallel=sequence_parallel))
    torch.manual_seed(1)
    tokens, rank, found = torch.arange(8).view(2, 4) % 8, dist.get_rank(), []
    for mine in (tokens.roll(rank), tokens):
        model = Dropping()
        lowband.parallelize(model, PLAN, topology)
        lowband.shard(model, "zero3", topology, nn.Linear, compute_dtype=torch.float32)
        found.append(answer(lambda model=model, mine=mine: model(mine)))
    model.share = 0.5
    for seed, trains in ((5, True), (rank, False), (rank, True)):
        torch.manual_seed(seed)
        model.train(trains)
        found.append(answer(lambda: model(tokens)))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_have_one_batch_and_draw_alike(sequence_parallel: bool) -> None:
    for other, same, alike, evaluated, differently in on_ranks(2, on_tensor_ranks, sequence_parallel):
        assert other.startswith("ranks [0, 1] along tensor: rank 1 has other inputs than rank 0 (allowed: ")
        assert same == alike == ""
        texts = (evaluated, differently)  # a module that has drawn is compared from then on
        assert all("rank 1 has other states of random numbers than rank 0" in text for text in texts)


def drawing_alone() -> list[str]:
    topology, tokens, found = lowband.Topology({}, Axes(tensor=2)), torch.arange(8).view(2, 4), []
    model = lowband.parallelize(Dropping(), PLAN, topology)
    lowband.shard(model, "zero3", topology, nn.Linear, compute_dtype=torch.float32)
    if dist.get_rank():
        model.down.register_forward_hook(lambda *_: print(f"sampled {torch.rand(1)}"))
    torch.manual_seed(0)
    for _ in range(2):
        found.append(answer(lambda: model(tokens)))
    return found


def test_one_tensor_rank_that_draws_alone_is_found_out() -> None:
    for first, second in on_ranks(2, drawing_alone):
        assert first == ""
        assert "rank 1 has other states of random numbers than rank 0" in second


def on_pipeline_ranks() -> list[str]:
    topology, rank = lowband.Topology({}, Axes(pipeline=2)), dist.get_rank()
    found, data = [], batches(0, 0, 3)
    of_rank = [(x, None) if rank == 0 else (None, y) for x, y in data]
    for mine in (batches(rank, 0, 3), data, of_rank):
        pipe = lowband.Pipeline(chain(2), loss_of, "zero3", topology, 3, compute_dtype=torch.float32)
        found.append(answer(lambda pipe=pipe, mine=mine: pipe.step(mine)))
    return found


def test_pipeline_ranks_have_one_batch_or_what_they_use_of_it() -> None:
    for other, same, used in on_ranks(2, on_pipeline_ranks):
        assert other.startswith("ranks [0, 1] along pipeline: rank 1 has other inputs than rank 0 (allowed: ")
        assert same == used == ""


def on_both_axes() -> list[str]:
    """The tensor ranks of both stages have batches of their own; then stages draw alike, or not."""
    topology = lowband.Topology({}, Axes(tensor=2, pipeline=2))
    place, found = topology.along("tensor").place, []
    plan: Plan = {"*.up": Column(), "*.down": Row()}
    for own in (True, False):
        cut = lowband.parallelize(nn.ModuleList(chain(2)), plan, topology)
        pipe = lowband.Pipeline(cut, loss_of, "zero3", topology, 3, compute_dtype=torch.float32)
        found.append(answer(lambda pipe=pipe, own=own: pipe.step(batches(own * place, 0, 3))))
    for layer in pipe.children():
        layer.register_forward_hook(lambda _module, _inputs, output: F.dropout(output, 0.1))
    for seed in (3, 3 + place):
        torch.manual_seed(seed)
        found.append(answer(lambda: pipe.step(batches(0, 0, 3))))
    return found


def test_tensor_ranks_of_a_stage_have_one_batch_and_draw_alike() -> None:
    for other, same, alike, differently in on_ranks(4, on_both_axes):
        assert " along tensor: " in other
        assert " has other inputs than " in other
        assert same == alike == ""
        assert " has other states of random numbers than " in differently


def on_context_ranks() -> list[str]:
    """Batches of a sampler over all ranks; those of one over sequences, of which some are split unseen."""
    topology, found = lowband.Topology({}, Axes(context=2)), []
    rank, place = dist.get_rank(), topology.along("data").place // 2
    for mine in (rank, place):
        context, tokens = lowband.Context(topology), torch.arange(16).view(2, 8) + mine
        noise = context.split(torch.rand(2, 8, generator=torch.Generator().manual_seed(rank)))
        part = context.split(tokens)
        tokens.fill_(rank)  # as a loader does that is a batch ahead on some ranks
        for _ in range(2):
            found.append(answer(lambda: context.mean((part * noise).sum(), part != 3)))  # noqa: B023
    return found


def test_context_ranks_have_the_same_sequences() -> None:
    for rank, (other, *same) in enumerate(on_ranks(4, on_context_ranks)):
        of = ("[0, 1] along context: rank 1", "0") if rank < 2 else ("[2, 3] along context: rank 3", "2")
        assert other.startswith(f"ranks {of[0]} has other inputs than rank {of[1]} (allowed: ")
        assert same == [""] * 3


def dropped_on_one_rank() -> str:
    topology = lowband.Topology({}, Axes(tensor=2))
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1 * dist.get_rank()), nn.Linear(4, 4))
    return answer(lambda: lowband.parallelize(module, {"0": Column(), "2": Row()}, topology))


def test_dropout_of_one_tensor_rank_is_known_to_all_of_them() -> None:
    for text in on_ranks(2, dropped_on_one_rank):
        assert "differs from rank 0 in dropout of its modules: ['1: 0.1'], not []" in text


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(11, 11)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(self.head(x), targets)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(x, targets) * self.scale


def losses_that_are_modules() -> tuple[str, list[str]]:
    topology = lowband.Topology({}, Axes(pipeline=2))
    with pytest.raises(UserError) as error:
        lowband.Pipeline(chain(2), OwnLoss(), "zero3", topology, 3)
    pipe = lowband.Pipeline(chain(2), Weighted(), "zero3", topology, 3, compute_dtype=torch.float32)
    pipe.step(batches(0, 0, 3))
    return str(error.value), list(lowband.full_state_dict(pipe))


def test_a_loss_has_no_parameters_and_is_no_part_of_the_state() -> None:
    """Of parameters only the last stage would have gradients, and every rank would save its own values."""
    found = on_ranks(2, losses_that_are_modules)
    assert all("the loss has parameters, such as 'head.weight'" in text for text, _ in found)
    plain = nn.Sequential(*chain(2)).state_dict()
    assert [name for _, names in found for name in names] == list(plain)


# ---- programs that go around an exchange along tensor


class Around(nn.Module):
    """x + down(tanh(up(x))), with something between or beside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.norm(x)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class UnnamedGain(Around):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x) * self.gain


class OtherFunction(Around):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.up.weight))


class Penalty(Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.up.weight.square().sum())


def around(kind: type[Around], topology: lowband.Topology) -> list[str]:
    """What a step of a model whose weights begin at zero, and so its gradients, is answered, and the next."""
    torch.manual_seed(2)
    model = nn.Sequential(Around(), kind())
    with torch.no_grad():
        model[0].down.weight.zero_()
    lowband.parallelize(model, {"*.up": Column(), "*.down": Row()}, topology)
    lowband.shard(model, "zero3", topology, Around, compute_dtype=torch.float32)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(topology.along("data").place))
    for _ in range(2):
        found.append(answer(lambda: model(x).square().sum().backward()))
        optimizer.step()
        optimizer.zero_grad()
    return found


KINDS = Around, UnnamedGain, OtherFunction, Penalty


def around_exchanges() -> list[list[str]]:
    topology = lowband.Topology({}, Axes(tensor=2))
    return [around(kind, topology) for kind in KINDS]


def test_gradients_that_tensor_ranks_must_have_alike_are_compared() -> None:
    for right, *wrong in on_ranks(2, around_exchanges):
        assert right == ["", ""]
        for name, (first, _) in zip(("1.gain", "1.norm.weight", "1.down.bias"), wrong, strict=True):
            told = (
                f"ranks [0, 1] along tensor: the gradient of '{name}' on rank 1 is not that on rank 0 (allow"
            )
            assert first.startswith(told), first


def around_in_stages() -> list[str]:
    topology, found = lowband.Topology({}, Axes(tensor=2)), []
    x = torch.ones(3, 4)
    for kind in (Around, UnnamedGain):
        torch.manual_seed(2)
        chained = lowband.parallelize(
            nn.ModuleList([Around(), kind()]), {"*.up": Column(), "*.down": Row()}, topology
        )
        options = {"schedule": "depth", "compute_dtype": torch.float32}
        pipe = lowband.Pipeline(chained, lambda y, _: y.square().sum(), "zero3", topology, 1, **options)
        found.append(answer(lambda pipe=pipe: pipe.step([(x, x)])))
    return found


def test_gradients_of_stages_are_compared() -> None:
    for right, wrong in on_ranks(2, around_in_stages):
        assert right == ""
        assert wrong.startswith("ranks [0, 1] along tensor: the gradient of '1.gain' on rank 1 is not that")


def drawn_anew(topology: lowband.Topology, seed: int, names: str) -> str:
    """What lowband.shard answers to a cut module some of whose weights are drawn anew."""
    torch.manual_seed(2)
    model = lowband.parallelize(
        nn.Sequential(Around(), Around()), {"*.up": Column(), "*.down": Row()}, topology
    )
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if names in name:
            nn.init.normal_(parameter)
    return answer(lambda: lowband.shard(model, "zero3", topology, Around))


def all_drawn_anew() -> list[str]:
    topology = lowband.Topology({}, Axes(tensor=2))
    ways = (dist.get_rank(), "gain"), (0, ""), (dist.get_rank(), "up"), (0, "0.up")
    return [drawn_anew(topology, *way) for way in ways]


def test_weights_drawn_after_the_cut_are_refused_where_they_are_wrong() -> None:
    where, allowed = "ranks [0, 1] along tensor: ", " (allowed: values from before lowband.parallelize, or "
    for whole, slices, *right in on_ranks(2, all_drawn_anew):
        assert whole.startswith(where + "'0.gain' on rank 1 has other values than on rank 0" + allowed)
        assert slices.startswith(where + "all slices of two ranks have the same values" + allowed)
        assert right == ["", ""]  # slices with a seed of each rank; some slices that are the same
