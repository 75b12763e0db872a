"""Faults of peers that affect a comparison, each demonstrated by running the peer: rows of `faults.csv`.

The gradients of one step are derived from the weights: plain SGD with a learning rate of 1 and no clipping
moves each weight by its gradient. AdamW would hide a wrong scale.
"""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import NamedTuple

import torch
import torch.distributed as dist

from lowband.model.gpt import GPT
from lowband.run.count_calls import Outside
from lowband.run.on_ranks import on_ranks
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from lowband.trainers.deepspeed import DeepSpeed, load

TIME_LIMIT_S = 300
_MODEL = ModelSpec(name="faults", layers=2, hidden=64, heads=4, vocab=256, seq_len=32, source="ours")


class Fault(NamedTuple):
    """One row: a condition, a quantity, its expected value and the value found."""

    peer: str
    version: str
    fault: str
    condition: str
    quantity: str
    expected: str
    found: str
    notes: str = ""


def find_faults() -> Iterator[Fault]:
    """Run every experiment on the CPU, up to 8 ranks."""
    deepspeed = load("cpu")
    this = ("DeepSpeed", version("deepspeed"))
    for ranks, node in ((4, 1), (4, 2), (8, 4)):
        for dimensions, ratio in qgz_scale(ranks, node).items():
            yield Fault(
                *this,
                "qgZ does not average over the ranks of a node",
                f"{ranks} ranks, {node} a node",
                f"gradients of {dimensions}-D parameters over true means",
                "1",
                f"{ratio:.2f}",
                "shimmed",
            )
    yield Fault(
        *this,
        "stage 2 reduces gradients by all-reduce",
        "2 ranks, defaults",
        "gradient bytes sent over those of a reduce-scatter",
        "1",
        f"{_stage2_ratio():.2f}",
    )
    yield Fault(
        *this,
        "gradients are clipped unless one says no",
        "no gradient_clipping in the configuration",
        "largest gradient norm that is left alone",
        "any",
        f"{deepspeed.runtime.constants.GRADIENT_CLIPPING_DEFAULT:g}",
    )
    for fault, condition, quantity, work in (
        ("no quantizer for CPUs", "qwZ or qgZ on a CPU", "loads", _load_quantizer),
        ("MiCS was removed", "mics_shard_size: 2", "configuration is read", _configure_mics),
    ):
        yield Fault(*this, fault, condition, quantity, "yes", _error(work))


def qgz_scale(ranks: int, node: int) -> dict[int, float]:
    """The ratio of DeepSpeed's gradients under qgZ to exact ones, by number of dimensions."""
    exact = on_ranks(ranks, _update, _spec(ranks, node, {}), time_limit_s=TIME_LIMIT_S)[0]
    spec = _spec(ranks, node, {"grad_reduce": "int4"})
    quantized = on_ranks(ranks, _update, spec, time_limit_s=TIME_LIMIT_S)[0]
    products: dict[int, list[float]] = {}
    for name, true in exact.items():
        sums = products.setdefault(true.ndim, [0.0, 0.0])
        sums[0] += (quantized[name] * true).sum().item()
        sums[1] += true.square().sum().item()
    return {ndim: found / true for ndim, (found, true) in sorted(products.items())}


def _stage2_ratio() -> float:
    spec = _spec(2, 1, {"weights": "self"})
    counted = on_ranks(2, _reduced_bytes, spec, time_limit_s=TIME_LIMIT_S)[0]
    return counted / (4 * spec.model.parameters * (spec.ranks - 1) / spec.ranks)


def _update(spec: RunSpec) -> dict[str, torch.Tensor]:
    """The change that one SGD step subtracts from each parameter, on rank 0; elsewhere {}."""
    before = {name: p.detach().clone() for name, p in GPT(spec.model, seed=spec.seed).named_parameters()}
    trainer = _trainer(spec)
    _step(trainer, spec)
    after = trainer.full_state()
    return {name: before[name] - after[name] for name in before} if after else {}


def _reduced_bytes(spec: RunSpec) -> int:
    trainer = _trainer(spec)
    outside = Outside(spec.levels, None)
    with outside:
        _step(trainer, spec)
    return sum(sent.bytes for sent in outside.sent if "reduce" in sent.collective)


def _trainer(spec: RunSpec) -> DeepSpeed:
    return DeepSpeed(
        GPT(spec.model, seed=spec.seed), spec, lambda model, _: torch.optim.SGD(model.parameters(), lr=1.0)
    )


def _step(trainer: DeepSpeed, spec: RunSpec) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(spec.model.vocab, (1, spec.seq_len + 1), generator=generator)
    trainer.backward(trainer.model(tokens[:, :-1], tokens[:, 1:]))
    trainer.step(spec.grad_clip)


def _spec(ranks: int, node: int, changes: dict[str, str]) -> RunSpec:
    """A ZeRO-3 spec with changes to the scheme, on nodes of `node` ranks."""
    scheme = {"name": "fault", "weights": "world", "grads": "world", "optim": "world", **changes}
    machine = Machine.parse(
        {
            "name": "faults",
            "description": "one machine",
            "device": {"name": "CPU", "source": "none"},
            "levels": [{"name": "node", "size": node}, {"name": "world"}],
        },
        "faults",
    )
    return RunSpec(
        run_id="fault", suite="faults", repeat=1, engine="deepspeed", machine=machine, model=_MODEL,
        scheme=Scheme.parse(scheme, "faults"), ranks=ranks, micro_batch=1, accumulation=1, seq_len=32,
        steps=1, warmup_steps=0, seed=1, device="auto", compute_dtype="fp32", reduce_dtype="fp32",
        learning_rate=1, weight_decay=0, grad_clip=1e9, text="random", time_limit_s=TIME_LIMIT_S,
        peer_timeout_s=60,
    )  # fmt: skip


def _load_quantizer() -> None:
    import deepspeed.ops.op_builder as builders

    builders.QuantizerBuilder().load()


def _configure_mics() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    zero = {"stage": 3, "mics_shard_size": 2}
    DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})


def _error(work: Callable[[], None]) -> str:
    """The error that `work` raises, in one line; "yes" if it raises none."""
    try:
        work()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return "yes"
