"""What units keep for the backward, in host memory: the same bits, and the bytes that autograd saves."""

import pytest
import torch
from test_parity import SPEC
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.tiers import Tier


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(SPEC.vocab, (2, 1, SPEC.seq_len), generator=drawn)
    return tokens, targets


def trained(activations: Tier, order: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
    """Losses, weights, and the bytes of a step that are copied to and from the host."""
    model = lowband.shard(
        GPT(SPEC, seed=7), Config().scheme("zero3"), lowband.Topology({}), Block, torch.float32,
        activations=activations,
    )  # fmt: skip
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(3):
        engine_of(model).ledger.take()
        if order == "breadth":
            losses += map(float, lowband.accumulate(model, [batch()], lambda given: model(*given)))
        else:
            loss = model(*batch())
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    copied = {one.collective: one.bytes for one in engine_of(model).ledger.take() if one.level == "host"}
    return losses, lowband.full_state_dict(model), copied


def both(order: str) -> tuple[object, ...]:
    return trained("device", order), trained("host", order)


def saved_in_blocks() -> int:
    """Bytes that autograd saves while blocks of the plain model compute, parameters left out."""
    model, total = GPT(SPEC, seed=7), 0
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    open_pairs: dict[nn.Module, saved_tensors_hooks] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += 0 if tensor.untyped_storage()._cdata in own else tensor.nbytes
        return tensor

    def enter(block: nn.Module, _: object) -> None:
        open_pairs[block] = saved_tensors_hooks(pack, lambda tensor: tensor)
        open_pairs[block].__enter__()

    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(lambda block, *_: open_pairs.pop(block).__exit__())
    model(*batch()).backward()
    return total


@pytest.mark.parametrize("order", ["depth", "breadth"])
def test_bits_and_bytes(order: str) -> None:
    [expected] = on_ranks(1, saved_in_blocks)
    for (losses, weights, none), (also, others, copied) in on_ranks(2, both, order):
        assert also == losses and not none
        assert all(torch.equal(weights[key], others[key]) for key in weights)
        assert copied == {"keep_stash": expected, "keep_fetch": expected}


def refused() -> None:
    with pytest.raises(UserError, match="activations in 'disk'"):
        lowband.shard(GPT(SPEC), "zero3", lowband.Topology({}), Block, activations="disk")


def test_another_tier_is_refused() -> None:
    on_ranks(1, refused)
