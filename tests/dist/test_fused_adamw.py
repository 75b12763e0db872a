"""lowband.AdamW on a sharded GPT against the same arithmetic on shards one by one, from gradients that were
widened and scaled, with weights cast by the next gather: bit for bit."""

import tempfile
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import lowband
from lowband.cost.bytes import unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.kernels.adamw import reference
from lowband.kernels.adamw_scalars import Scalars
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG
from tests.refused import answer, refusal

MODEL = CONFIG.model("gpt-200k")
LR, BETAS, EPS, DECAY, MAX_NORM = 1e-2, (0.9, 0.999), 1e-8, 0.1, 0.5
STEPS = 3
BF16, FP32 = torch.bfloat16, torch.float32
WIRE = {BF16: "bf16", FP32: "fp32"}


class Case(NamedTuple):
    """how: of two passes a step: no_sync, or two backwards whose gradients are added"""

    scheme: str
    compute: torch.dtype = BF16
    reduce: torch.dtype = BF16
    how: str = "one"
    breadth: bool = False


CASES = {
    1: (
        Case("zero3"), Case("ddp", FP32, FP32), Case("zero3", BF16, FP32), Case("zero3", how="no_sync"),
        Case("zero3", how="added"), Case("zero3", how="breadth"),
    ),
    2: (Case("zero3"), Case("zero1"), Case("zero3", how="no_sync")),
    3: (Case("zero3"),),  # whose averages 16 bits cannot hold
}  # fmt: skip
WIDE = {1: (), 2: (), 3: pytest.mark.wide}


def inner(ranks: int) -> dict[str, int]:
    return {} if ranks % 2 else {"node": 2}


class Plain:
    """The definition, shard by shard, and no Optimizer: it writes to parameters as a user's loop may."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.steps = model, 0
        self.moments = {p: [torch.zeros(p.numel()) for _ in range(2)] for p in model.parameters()}

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return lowband.clip_grad_norm_(self.model, max_norm)

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        scalars = Scalars.of(LR, BETAS, EPS, DECAY, self.steps)
        for p, moments in self.moments.items():
            assert p.grad.dtype == FP32
            parts = [each.detach().as_subclass(torch.Tensor) for each in (p, p.grad)]
            reference(*parts, *moments, scalars)

    def zero_grad(self) -> None:
        for p in self.moments:
            p.grad = None


def sharded(case: Case) -> torch.nn.Module:
    model, topology = GPT(MODEL, seed=1), lowband.Topology(inner(dist.get_world_size()))
    return lowband.shard(model, CONFIG.scheme(case.scheme), topology, Block, case.compute, case.reduce)


def backward(model: torch.nn.Module, case: Case, step: int) -> None:
    rank, passes = torch.distributed.get_rank(), 1 if case.how == "one" else 2
    seeds = [1000 * step + 10 * i + rank for i in range(passes)]
    batches = [
        torch.randint(MODEL.vocab, (2, 16), generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    if case.how == "breadth":
        lowband.accumulate(model, batches, lambda tokens: model(tokens, tokens) / passes)
        return
    for i, tokens in enumerate(batches):
        if case.how == "no_sync" and i < passes - 1:
            with lowband.no_sync(model):
                (model(tokens, tokens) / passes).backward()
        else:
            (model(tokens, tokens) / passes).backward()


def train(
    case: Case, is_fused: bool
) -> tuple[list[float], dict[str, torch.Tensor], set[Any], dict[str, int]]:
    """Norms, final weights, dtypes of gradients, peak bytes of states."""
    model = sharded(case)
    optimizer = lowband.AdamW(model, LR, BETAS, EPS, DECAY) if is_fused else Plain(model)
    norms, dtypes = [], set()
    for step in range(STEPS):
        backward(model, case, step)
        dtypes |= {p.grad.dtype for p in model.parameters()}
        norms.append(float(optimizer.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, lowband.full_state_dict(model), dtypes, dict(engine_of(model).meter.peak)


def both(cases: tuple[Case, ...]) -> list[Any]:
    return [(train(case, True), train(case, False)) for case in cases]


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=WIDE[n]) for n in CASES])
def test_the_bits_of_one_pass_are_those_of_five(ranks: int) -> None:
    for case, (fused, plain) in zip(CASES[ranks], on_ranks(ranks, both, CASES[ranks])[0], strict=True):
        assert fused[0] == plain[0] and max(fused[0]) > MAX_NORM, case
        assert all(torch.equal(fused[1][name], value) for name, value in plain[1].items()), case
        takes_reduced = case.reduce == BF16 and ranks != 3
        assert fused[2] == {FP32 if case.how == "added" or not takes_reduced else BF16}, case
        scheme: Scheme = CONFIG.scheme(case.scheme)
        levels = Levels.fit(inner(ranks), ranks)
        closed = state_bytes(
            unit_numels(MODEL, levels, Axes()), scheme, levels, WIRE[case.compute], WIRE[case.reduce],
            2 if case.how in ("no_sync", "breadth") else 1, "gloo", "hops",
            "breadth" if case.how == "breadth" else "depth", fused_adamw=True,
        )  # fmt: skip
        if case.how != "added":
            assert fused[3]["grads"] == closed["grads"], case
            assert (closed["grads"] < plain[3]["grads"]) == (takes_reduced and case.how != "no_sync"), case


def groups_and_checkpoint() -> tuple[bool, list[dict[str, torch.Tensor]]]:
    """Whether a step changes what its group has, and no more; weights after a second step, made twice from
    the checkpoint before it."""
    model = sharded(Case("zero3"))
    optimizer = lowband.AdamW(model, LR, BETAS, EPS, DECAY)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(matrices.values())})
    before = lowband.full_state_dict(model)
    backward(model, Case("zero3"), 0)
    optimizer.step()
    model.zero_grad()
    after = lowband.full_state_dict(model)
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    is_alone = changed == {*matrices, "head.weight"}  # which is the embedding's
    found = []
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = lowband.Checkpointer(folder)
        checkpointer.save(1, model, optimizer)
        checkpointer.wait()
        for _ in range(2):
            backward(model, Case("zero3"), 1)
            optimizer.step()
            model.zero_grad()
            found.append(lowband.full_state_dict(model))
            checkpointer.load_newest(model, optimizer)
    return is_alone, found


def test_groups_and_checkpoints() -> None:
    is_alone, (first, second) = on_ranks(1, groups_and_checkpoint)[0]
    assert is_alone
    assert all(torch.equal(first[name], value) for name, value in second.items())


def after_two_steps(ways: list[tuple[Any, torch.dtype]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for betas, default in ways:
        model = sharded(Case("zero3"))
        optimizer = lowband.AdamW(model, betas=betas)
        torch.set_default_dtype(default)
        for step in range(2):
            backward(model, Case("zero3"), step)
            optimizer.step()
            optimizer.zero_grad()
        torch.set_default_dtype(FP32)
        found.append(lowband.full_state_dict(model))
    return found


def test_betas_may_be_a_list_and_states_are_fp32_whatever_the_default() -> None:
    """As a file of options gives them; as programs set it to build a model."""
    ways = [((0.8, 0.95), FP32), ([0.8, 0.95], FP32), ((0.8, 0.95), BF16)]
    [(expected, *found)] = on_ranks(1, after_two_steps, ways)
    for each in found:
        assert all(torch.equal(each[name], value) for name, value in expected.items())


def after_a_skipped_step() -> list[dict[str, torch.Tensor]]:
    """Weights after a step that was clipped and left out, then one without clipping; and after this alone."""
    found = []
    for steps in ((0, 1), (1,)):
        model = sharded(Case("zero3"))
        optimizer = lowband.AdamW(model, LR)
        for step in steps:
            backward(model, Case("zero3"), step)
            if step == 0:
                optimizer.clip_grad_norm_(1e-3)
            else:
                optimizer.step()
            optimizer.zero_grad()
        found.append(lowband.full_state_dict(model))
    return found


def test_a_step_that_is_left_out_clips_no_other() -> None:
    [(skipped, alone)] = on_ranks(1, after_a_skipped_step)
    for name, weights in alone.items():
        assert torch.equal(skipped[name], weights), name


def norms_and_weights(how: str, is_torchs: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Of steps with clipping, where something comes between it and the step."""
    model = sharded(Case("zero3", FP32, FP32))
    kind, of = (torch.optim.AdamW, model.parameters()) if is_torchs else (lowband.AdamW, model)
    optimizer: Any = kind(of, LR, eps=1.0)  # by which steps are as large as gradients are

    def clip(max_norm: float) -> float:
        if is_torchs:
            return float(lowband.clip_grad_norm_(model, max_norm))
        return float(optimizer.clip_grad_norm_(max_norm))

    norms = []
    for step in range(2):
        backward(model, Case("zero3"), step)
        norms.append(clip(1e-3))
        if how == "clipped again":
            norms += [clip(float("inf")), clip(1e-4), clip(1.0)]
        elif how == "left out":
            model.zero_grad()
            backward(model, Case("zero3"), step + 5)
        elif how == "added to":
            backward(model, Case("zero3"), step + 5)
        optimizer.step()
        optimizer.zero_grad()
    return norms, lowband.full_state_dict(model)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["clipped again", "left out", "added to"])
def test_what_comes_between_clipping_and_the_step(ranks: int, how: str) -> None:
    ours, torchs = (on_ranks(ranks, norms_and_weights, how, is_torchs)[0] for is_torchs in (False, True))
    assert ours[0] == pytest.approx(torchs[0], rel=1e-5)
    for name, weights in torchs[1].items():
        assert torch.allclose(ours[1][name], weights, rtol=1e-4, atol=1e-6), name


def test_what_it_refuses() -> None:
    def made() -> list[str]:
        synced = lowband.shard(
            GPT(MODEL), CONFIG.scheme("local-sgd"), lowband.Topology({"node": 2}), Block, FP32, FP32
        )
        told = [refusal(lowband.AdamW, module) for module in (torch.nn.Linear(2, 2), synced)]
        one, other = (sharded(Case("zero3")) for _ in range(2))
        optimizer = lowband.AdamW(one)
        for parameters in (other.parameters(), [torch.nn.Parameter(torch.zeros(1))]):
            with pytest.raises(UserError, match="a parameter of another module") as error:
                optimizer.add_param_group({"params": parameters})
            assert "\n" not in str(error.value) and len(optimizer.param_groups) == 1
        return told

    plain, synced = on_ranks(2, made)[0]
    assert "not sharded" in plain and "replicas that meet seldom" in synced


def with_a_tensor_as_rate(is_torchs: bool) -> dict[str, torch.Tensor]:
    """A scheduler changes it in place; one parameter is a step behind the others."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    rate = torch.tensor(0.1)
    if is_torchs:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    else:
        scheme = Scheme(name="one", weights="self", grads="world", optim="world")
        lowband.shard(model, scheme, lowband.Topology({}), torch.nn.Linear, torch.float32)
        optimizer = lowband.AdamW(model, lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(5):
        model(torch.ones(2, 4)).square().mean().backward()
        if step == 0:
            model[1].weight.grad = None
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict() if is_torchs else lowband.full_state_dict(model)


def test_a_rate_may_be_a_tensor() -> None:
    [expected], [found] = (on_ranks(1, with_a_tensor_as_rate, is_torchs) for is_torchs in (True, False))
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)


def beside_another(is_own: bool) -> dict[str, torch.Tensor]:
    """Weights after a step that was clipped, of which another optimizer has every second parameter."""
    case = Case("zero3")._replace(reduce=FP32)
    model = sharded(case)
    parameters = list(model.parameters())
    optimizer = lowband.AdamW(model, LR, BETAS, EPS, DECAY)
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": parameters[::2]})
    other = torch.optim.SGD(parameters[1::2], lr=0.1)
    backward(model, case, 0)
    if is_own:
        optimizer.clip_grad_norm_(MAX_NORM)
    else:
        lowband.clip_grad_norm_(model, MAX_NORM)
    other.step()
    optimizer.step()
    return lowband.full_state_dict(model)


def test_what_is_clipped_is_so_for_other_optimizers_too() -> None:
    [own], [expected] = (on_ranks(1, beside_another, is_own) for is_own in (True, False))
    assert all(torch.allclose(own[name], value, rtol=1e-6, atol=1e-7) for name, value in expected.items())


def with_others_options() -> list[str]:
    model = sharded(Case("zero3"))
    optimizer = lowband.AdamW(model)
    state = torch.optim.AdamW(model.parameters(), amsgrad=True).state_dict()
    more = {"params": [], "maximize": True}
    return [answer(optimizer.load_state_dict, state), answer(optimizer.add_param_group, more)]


def test_options_that_it_has_not_are_refused() -> None:
    [(loaded, added)] = on_ranks(1, with_others_options)
    assert "lowband.AdamW: amsgrad True in a param group (allowed: False" in loaded
    assert "lowband.AdamW: maximize True in a param group (allowed: False" in added
