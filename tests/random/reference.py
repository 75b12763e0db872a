"""A case in one process: plain torch, one rank's passes after the other.

Gradients are summed in the order in which the scheme's hops sum them, partners of the innermost level first,
and rounded where a message or a hop rounds them. So the engine must give the same bits.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lowband.kernels.block_quant import dequantize, quantize
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.wire import WIRE_BITS
from tests.random.cases import (
    Accumulate,
    Backward,
    BrokenBackward,
    Case,
    Clip,
    Forward,
    LostForward,
    State,
    Step,
    Zero,
)
from tests.random.model import (
    DTYPE,
    Blown,
    Chain,
    Fuse,
    is_matrix,
    is_unit,
    nets_of,
    optimizers_of,
    run_nets,
)
from tests.random.observed import Observed

PAD = 256  # the engine's units start every parameter on such a boundary; block sizes divide it


def received(values: torch.Tensor, wire: str, dtype: torch.dtype, block: int) -> torch.Tensor:
    """What arrives of a message, in `dtype`."""
    if wire not in WIRE_BITS:
        return values.to(dtype if wire == "native" else DTYPE[wire]).to(dtype)
    bits, flat = WIRE_BITS[wire], values.reshape(-1)
    padded = nn.functional.pad(flat.float(), (0, -flat.numel() % PAD)).view(1, -1)
    arrived = dequantize(*quantize(padded, bits, block), bits, block)[0, : flat.numel()]
    return arrived.to(dtype).view(values.shape)


def summed(
    parts: list[torch.Tensor],
    levels: Levels,
    between: tuple[str, str],
    wire: str,
    sums: torch.dtype,
    block: int,
) -> list[torch.Tensor]:
    """By rank: the sum over the ranks between two levels. What is encoded is summed in fp32."""
    is_cast = wire != "native" and DTYPE.get(wire) != sums
    for hop in levels.hops(*between):
        if is_cast:
            parts = [received(part, wire, torch.float32, block) for part in parts]
        totals = []
        for rank in range(levels.world):
            first, *others = hop.partners(rank)
            total = parts[first].clone()
            for other in others:
                total += parts[other]
            totals.append(total.to(sums))
        parts = totals
    return parts


class Weights:
    """One parameter: what is computed with, and what the optimizer has.

    master: what the optimizer has
    agreed: what a state has instead, where replicas have others; they keep it up to date
    """

    def __init__(self, leaf: nn.Parameter, owner: nn.Module, chain: Chain, case: Case) -> None:
        self.leaf, self._scheme, self._levels = leaf, chain.net.scheme, case.levels
        self.unit = owner, leaf.requires_grad  # frozen parameters are gathered apart
        self._in_root = owner is chain
        self._compute, self.sums = DTYPE[case.compute_dtype], DTYPE[case.reduce_dtype]
        self.master = nn.Parameter(leaf.detach().clone(), leaf.requires_grad)
        self.agreed: torch.Tensor | None = None
        self._accumulated: list[torch.Tensor] | None = None  # by rank
        leaf.data = leaf.data.to(self._compute)
        self.refresh()

    # ---- weights

    def refresh(self) -> None:
        """Take over the master's values."""
        scheme, hops, source = self._scheme, self._levels.hops, self.master.detach()
        if hops(scheme.weights, scheme.optim):  # a copy is kept
            source = self._received(source, scheme.update_gather)
        is_gathered = bool(hops(SELF, scheme.weights))
        self._forward = self._received(source, scheme.forward_gather if is_gathered else "native")
        self._backward = self._forward
        if is_gathered and not self._in_root:  # which stays gathered
            level = scheme.weights
            is_rounded = scheme.forward_gather != scheme.backward_gather  # the copy has what the forward had
            if scheme.secondary is not None and (hops(scheme.secondary, scheme.weights) or is_rounded):
                source, level = self._forward, scheme.secondary
            self._backward = self._received(source, scheme.backward_gather if hops(SELF, level) else "native")
        self.use(backward=False)

    def use(self, backward: bool) -> None:
        """Put the forward's or the backward's values in place, under autograd's graphs."""
        self.leaf.data.copy_(self._backward if backward else self._forward)

    def _received(self, values: torch.Tensor, wire: str) -> torch.Tensor:
        return received(values, wire, self._compute, self._scheme.block_size)

    def saved(self) -> torch.Tensor:
        """What a state has."""
        return self.master.detach() if self.agreed is None else self.agreed

    # ---- gradients

    def take_grad(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One rank's gradient of one backward; default: in the reduce dtype."""
        grad, self.leaf.grad = self.leaf.grad, None
        return (torch.zeros_like(self.leaf) if grad is None else grad).to(dtype or self.sums)

    def reduce(self, by_rank: list[torch.Tensor], sync: bool) -> None:
        """Sum the ranks' gradients to the grads level; out to all ranks if `sync`."""
        scheme = self._scheme
        parts = self._sum(by_rank, SELF, scheme.grads, scheme.grad_reduce)
        if self._accumulated is not None:
            parts = [held + part for held, part in zip(self._accumulated, parts, strict=True)]
        if not sync:
            self._accumulated = [part.float() for part in parts]
            return
        self._accumulated = None
        parts = [part.to(self.sums) for part in parts]
        parts = self._sum(parts, scheme.grads, scheme.optim, scheme.boundary_reduce)
        total = self._sum(parts, scheme.optim, WORLD, scheme.replica_reduce)[0]
        is_mean = self.sums is torch.float32  # what fp32 holds is averaged before it is sent back
        if is_mean:
            total = total / self._levels.world
        if self._levels.hops(scheme.optim, WORLD):
            total = received(total, scheme.replica_reduce, self.sums, scheme.block_size)
        mean = total.float() / (1 if is_mean else self._levels.world)
        self.master.grad = mean if self.master.grad is None else self.master.grad + mean

    @property
    def waits(self) -> bool:
        return self._accumulated is not None

    def forget(self) -> None:
        """A backward broke, or its gradients are not wanted."""
        self.leaf.grad = self._accumulated = None

    def _sum(self, parts: list[torch.Tensor], inner: str, outer: str, wire: str) -> list[torch.Tensor]:
        return summed(parts, self._levels, (inner, outer), wire, self.sums, self._scheme.block_size)


class Run:
    """The ranks of a case, or of one of its replicas.

    first: its first rank in the job
    """

    def __init__(self, case: Case, first: int = 0) -> None:
        self.case, self.fuse, self._first = case, Fuse(), first
        self.nets = nets_of(case, self.fuse)
        self.of_net = [_weights_of(chain, case) for chain in self.nets]
        self.weights = [weights for net in self.of_net for weights in net.values()]
        masters = [weights.master for weights in self.weights]
        matrices = []
        if case.has_matrices:
            of_first = [weights.master for weights in self.of_net[0].values()]
            matrices = [p for p in of_first if p.requires_grad and is_matrix("", p.shape)]
        taken = {id(master) for master in matrices}
        self.optimizers = optimizers_of(case, [p for p in masters if id(p) not in taken], matrices)
        self.waiting: dict[int, list[torch.Tensor]] = {}  # by rank
        self.seen = [Observed() for _ in range(case.ranks)]

    def run(self) -> list[Observed]:
        """What each rank should show."""
        for action in self.case.program:
            self.act(action)
        return self.seen

    def _losses(self, number: int, skipped: tuple[int, ...] = ()) -> list[torch.Tensor]:
        ranks = range(self._first, self._first + self.case.ranks)
        losses = [run_nets(self.case, self.nets, number, rank, skipped) for rank in ranks]
        for seen, loss in zip(self.seen, losses, strict=True):
            seen.losses.append(loss.detach().clone())
        return losses

    def act(self, action: object) -> None:
        match action:
            case Forward(number, skipped):
                self.waiting[number] = self._losses(number, skipped)
            case Backward():
                self._backward(action)
            case Accumulate(numbers, sync):
                self._accumulate(numbers, sync)
            case LostForward(number):
                self._losses(number)
            case BrokenBackward():
                self._broken_backward(action)
            case State():
                self.seen[0].states += [self._state(i) for i in range(len(self.nets))]
            case Clip(max_norm):
                self._clip(max_norm)
            case Step(numbers):
                self._step(numbers)
            case Zero(how):
                self._zero(how)

    def _backward(self, action: Backward) -> None:
        by_rank = []
        for weights in self.weights:
            weights.use(backward=True)
        for losses in zip(*(self.waiting[number] for number in action.numbers), strict=True):
            sum(losses).backward(retain_graph=action.keep)
            by_rank.append([weights.take_grad() for weights in self.weights])
        for weights, grads in zip(self.weights, zip(*by_rank, strict=True), strict=True):
            weights.use(backward=False)
            if weights.leaf.requires_grad:
                weights.reduce(list(grads), action.sync)
        for number in () if action.keep else action.numbers:
            del self.waiting[number]

    def _accumulate(self, numbers: tuple[int, ...], sync: bool) -> None:
        """Each rank's gradients are summed over the micro-batches, in fp32, before ranks' are."""
        by_micro_batch = [self._losses(number) for number in numbers]
        by_rank = []
        for weights in self.weights:
            weights.use(backward=True)
        for losses in zip(*by_micro_batch, strict=True):
            found = []
            for loss in losses:
                loss.backward()
                found.append([weights.take_grad(torch.float32) for weights in self.weights])
            by_rank.append([sum(grads[1:], grads[0]) for grads in zip(*found, strict=True)])
        for weights, grads in zip(self.weights, zip(*by_rank, strict=True), strict=True):
            weights.use(backward=False)
            if weights.leaf.requires_grad:
                weights.reduce([grad.to(weights.sums) for grad in grads], sync)

    def _broken_backward(self, action: BrokenBackward) -> None:
        """Where it does not break, it is thrown away by the `Zero` that follows, as if it had broken."""
        broken = False
        for weights in self.weights:
            weights.use(backward=True)
        for loss in self.waiting.pop(action.number):
            self.fuse.arm(action.where, action.net, action.place)
            try:
                loss.backward()
            except Blown:
                broken = True
            self.fuse.disarm()
        for seen in self.seen:
            seen.broken += [broken] if self.case.is_seen(action) else []
        for weights in self.weights:
            weights.use(backward=False)
            weights.forget()

    def _is_refused(self, weights: Iterable[Weights]) -> bool:
        """Whether gradients wait for a backward that is not under `no_sync`."""
        is_refused = any(each.waits for each in weights)
        for seen in self.seen:
            seen.refused.append(is_refused)
        return is_refused

    def _clip(self, max_norm: float) -> None:
        for net in self.of_net:
            if self._is_refused(net.values()):
                continue
            norm = _clip([w.master.grad for w in net.values() if w.master.grad is not None], max_norm)
            for seen in self.seen:
                seen.norms.append(norm)

    def _step(self, numbers: tuple[int, ...]) -> None:
        of_shard = {id(weights.master): weights for weights in self.weights}
        stepped = []
        for optimizer in (self.optimizers[number] for number in numbers):
            if optimizer is not None:
                shards = [p for group in optimizer.param_groups for p in group["params"]]
                if not self._is_refused(of_shard[id(p)] for p in shards):
                    stepped.append(optimizer)
        for optimizer in stepped:
            optimizer.step()
        changed = {
            id(p) for optimizer in stepped for group in optimizer.param_groups for p in group["params"]
        }
        units = {weights.unit for weights in self.weights if id(weights.master) in changed}
        for weights in self.weights:
            if weights.unit in units:
                weights.refresh()

    def _zero(self, how: str) -> None:
        """Also what `no_sync` has accumulated."""
        for weights in self.weights:
            weights.forget()
            if how != "zeros":
                weights.master.grad = None
            elif weights.master.grad is not None:
                weights.master.grad.zero_()

    def _state(self, index: int) -> dict[str, torch.Tensor]:
        chain, weights = self.nets[index], self.of_net[index]
        named = dict(chain.named_parameters(remove_duplicate=False))
        return {
            name: weights[named[name]].saved().clone() if name in named else value.clone()
            for name, value in chain.state_dict().items()
        }


def _weights_of(chain: Chain, case: Case) -> dict[nn.Parameter, Weights]:
    """By leaf, in the module's order. Inputs of units are cast as the engine casts them."""
    compute = DTYPE[case.compute_dtype]

    def cast(_: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
        to = lambda v: v.to(compute) if isinstance(v, torch.Tensor) and v.is_floating_point() else v  # noqa: E731
        return tree_map(to, args), tree_map(to, kwargs)

    for module in chain.modules():
        if module is chain or is_unit(module):
            module.register_forward_pre_hook(cast, with_kwargs=True)
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for name, parameter in chain.named_parameters(remove_duplicate=False):
        around = [chain.get_submodule(name.rsplit(".", up)[0]) for up in range(1, name.count(".") + 1)]
        owners.setdefault(parameter, set()).add(next((m for m in around if is_unit(m)), chain))
    return {
        leaf: Weights(leaf, owners[leaf].pop() if len(owners[leaf]) == 1 else chain, chain, case)
        for leaf in chain.parameters()
    }


def _clip(grads: list[torch.Tensor], max_norm: float) -> float:
    norm = (
        sum((grad.double().square().sum() for grad in grads), torch.zeros((), dtype=torch.double)).item()
        ** 0.5
    )
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / norm)
    return norm
