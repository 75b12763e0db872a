"""A small GPT with experts beside a dense one of equal FLOPs per token: losses, and experts' loads.

Both are trained on the same batches of the same text, on two ranks of which each has half of every layer's
experts (engine.parallel.experts): with loads balanced by a bias (arXiv 2408.15664), and not balanced at all.
A token goes to 2 of 8 experts, each half as wide as the dense model's MLP, so that products differ by the
router's alone; the model with experts has more parameters.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import lowband
from lowband.cost.flops import model_flops_per_token
from lowband.model.data import STDLIB, Corpus, batch, read_corpus
from lowband.model.gpt import GPT
from lowband.model.gpt import on_ranks as on_job
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec

RANKS, SEEDS = 2, 3
SEQUENCES, WINDOW, VALIDATIONS = 16, 20, 16  # of a batch over all ranks; steps of a mean; batches at the end
LEARNING_RATE, CLIP = 3e-3, 1.0
TIME_LIMIT_S = 3600  # of one model


class Loss(NamedTuple):
    """loss: of training, mean over the WINDOW steps up to `step`, nats per token"""

    way: str
    seed: int
    step: int
    loss: float


class Load(NamedTuple):
    """Pairs of the expert with the most, over the mean of all.

    max_over_mean: of a step's tokens, the mean over the WINDOW steps up to `step`
    of_window:     of all their tokens together
    """

    way: str
    seed: int
    step: int
    layer: int
    max_over_mean: float
    of_window: float


class End(NamedTuple):
    """validation_loss: after the last step, of text that is not trained on, nats per token"""

    way: str
    seed: int
    parameters: int
    flops_per_token: int
    validation_loss: float


class Found(NamedTuple):
    """losses: of each step; loads: [layers, steps, experts] int64; validation_loss: as of `End`"""

    losses: list[float]
    loads: torch.Tensor
    validation_loss: float


def models() -> dict[str, ModelSpec]:
    """By way."""
    dense = Config().model("gpt-200k")
    experts = {"experts": 8, "top_k": 2, "expert_hidden": dense.mlp_width // 2}
    return {
        "dense": dense,
        "experts balanced": dense.model_copy(update={**experts, "balance": "bias"}),
        "experts": dense.model_copy(update={**experts, "balance": "none"}),
    }


def measure(steps: int) -> tuple[list[Loss], list[Load], list[End]]:
    """Train every way for as many steps with each seed."""
    corpus = read_corpus(STDLIB)
    losses, loads, ends = list[Loss](), list[Load](), list[End]()
    for seed in range(SEEDS):
        for way, spec in models().items():
            found: Found = on_ranks(RANKS, _train, spec, corpus, seed, steps, time_limit_s=TIME_LIMIT_S)[0]
            for first in range(0, steps, WINDOW):
                last = min(first + WINDOW, steps)
                losses.append(Loss(way, seed, last, _mean(found.losses[first:last])))
                for layer, of_layer in enumerate(found.loads[:, first:last].double()):
                    ratios = of_layer.amax(1) / of_layer.mean(1)
                    whole = of_layer.sum(0)
                    of_window = whole.max() / whole.mean()
                    loads.append(Load(way, seed, last, layer, float(ratios.mean()), float(of_window)))
            flops = int(model_flops_per_token(spec, spec.seq_len))
            ends.append(End(way, seed, spec.parameters, flops, found.validation_loss))
    return losses, loads, ends


def _train(spec: ModelSpec, corpus: Corpus, seed: int, steps: int) -> Found:
    topology = lowband.Topology({}, lowband.Axes(expert=RANKS if spec.experts else 1))
    place = topology.along("data").place
    with torch.device("meta"):
        model = GPT(spec)
    on_job(model, Config().scheme("zero1"), topology, compute_dtype=torch.float32, seed=seed, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, loads = list[torch.Tensor](), list[torch.Tensor]()
    for step in range(steps):
        loss = model(*_batch(corpus.train, spec, seed, step, place))
        loss.backward()
        losses.append(loss.detach())
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        of_step = [*lowband.balance_experts(model).values()]
        loads.append(torch.stack(of_step) if of_step else torch.empty(0, 0))
    with torch.no_grad():
        ends = (_batch(corpus.validation, spec, seed, step, place) for step in range(VALIDATIONS))
        at_end = [model(*pair) for pair in ends]
    total = torch.stack([*losses, *at_end])
    dist.all_reduce(total)
    means = (total / RANKS).tolist()
    return Found(means[:steps], torch.stack(loads, 1), _mean(means[steps:]))


def _batch(text: Any, spec: ModelSpec, seed: int, step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and targets of the rank at this place."""
    count = SEQUENCES // RANKS
    inputs, targets = batch(text, seed, step, place * count, count, SEQUENCES, spec.seq_len)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _mean(values: Any) -> float:
    return float(sum(values) / len(values))
