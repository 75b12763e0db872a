"""A layer of gated experts, forward and backward, by the ways in which rows meet their experts' matrices:

    grouped   torch's grouped products, as a run has them (engine/parallel/expert_products.py)
    loop      one expert after the other
    padded    batched products of as many rows for each expert: capacity x the mean; more are dropped
    dense     one MLP with a token's FLOPs, the ceiling: as wide as a token's experts are together

Rows go out from tokens and come back to them weighted, in each way. Who has which expert is drawn before:
evenly, or by Zipf's law with exponent 1, where padding drops most. Row: `model` says experts, top and skew,
`rows` counts the pairs of a token and an expert that are computed, without those dropped and without padding,
and so do FLOPs.

Sources: MegaBlocks (arXiv 2211.15841), which pads and drops nothing; ScatterMoE (arXiv 2403.08245).
"""

from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lowband.bench.kernels.measure import KernelCase
from lowband.engine.parallel.expert_products import products
from lowband.spec.kernel_rows import KernelRow


class Shape(NamedTuple):
    """hidden, width: of an expert; top: experts of a token"""

    experts: int
    top: int
    hidden: int
    width: int
    tokens: int


# Mixtral's shape, and that of fine-grained experts, DeepSeekMoE's.
SHAPES = {
    "cuda": (Shape(8, 2, 4096, 14336, 4096), Shape(64, 6, 2048, 1408, 8192)),
    "cpu": (Shape(4, 2, 64, 32, 64),),
}
SKEWS = (0.0, 1.0)
CAPACITIES = (1.0, 1.5, 2.0)
CHECKED = 4  # tokens
TOLERANCE = 2e-2  # in bf16, relative to the largest value
PRODUCTS = 3 * 3 * 2  # FLOPs: three matrices, forward and two backward, a product and a sum


def groups(device: torch.device) -> Iterator[list[KernelCase]]:
    for shape in SHAPES[device.type]:
        for skew in SKEWS:
            layer = _Layer(device, shape, skew)
            yield [
                layer.case("grouped", layer.grouped, layer.is_any),
                layer.case("loop", layer.loop, layer.is_any),
                *(
                    layer.case(f"padded {capacity:g}", layer.padded(capacity), layer.is_kept(capacity))
                    for capacity in CAPACITIES
                ),
                layer.case("dense", layer.dense, layer.is_any),
            ]


Inputs = dict[str, torch.Tensor]
Forward = Callable[[Inputs], torch.Tensor]


class _Layer:
    """One shape and skew. Pairs of a token and an expert are in the order of the experts."""

    def __init__(self, device: torch.device, shape: Shape, skew: float) -> None:
        self.device, self.shape, self.skew = device, shape, skew

    @cached_property
    def _routes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert and token of each pair, [pairs], on the CPU."""
        shape, generator = self.shape, torch.Generator().manual_seed(0)
        chances = torch.arange(1, shape.experts + 1).pow(-self.skew).expand(shape.tokens, -1)
        chosen = torch.multinomial(chances.double(), shape.top, generator=generator)
        experts, order = chosen.flatten().sort(stable=True)
        return experts, order // shape.top

    @cached_property
    def counts(self) -> list[int]:
        """Pairs of each expert."""
        return torch.bincount(self._routes[0], minlength=self.shape.experts).tolist()

    @property
    def is_any(self) -> torch.Tensor:
        """All pairs, [pairs] of bool."""
        return torch.ones(len(self._routes[0]), dtype=torch.bool)

    def is_kept(self, capacity: float) -> torch.Tensor:
        """Of each pair whether its expert has room, [pairs]: the first of each expert's."""
        return self._place_in_expert < self._room(capacity)

    @cached_property
    def _place_in_expert(self) -> torch.Tensor:
        experts, _ = self._routes
        first = torch.tensor([0, *self.counts[:-1]]).cumsum(0)
        return torch.arange(len(experts)) - first[experts]

    def _room(self, capacity: float) -> int:
        """Rows for each expert."""
        return -int(-capacity * len(self._routes[0]) // self.shape.experts)

    def case(self, name: str, forward: Forward, is_kept: torch.Tensor) -> KernelCase:
        of = self.shape
        pairs = int(is_kept.sum())
        row = KernelRow(
            part="experts", operation="forward and backward", implementation=name, dtype="bfloat16",
            model=f"{of.experts} experts top {of.top} skew {self.skew:g}", rows=pairs, inner=of.hidden,
            columns=of.width, flops=PRODUCTS * pairs * of.hidden * of.width,
        )  # fmt: skip

        def make() -> Callable[[], tuple[torch.Tensor, ...]]:
            inputs = self._inputs()
            dy = inputs.pop("dy")
            leaves = [each.requires_grad_() for each in inputs.values()]

            def work() -> tuple[torch.Tensor, ...]:
                y = forward(inputs)
                return y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)

            return work

        return KernelCase(
            row=row, make=make, error_of=self._error(name == "dense", is_kept), tolerance=TOLERANCE
        )

    def _inputs(self) -> Inputs:
        """x and dy [T, H]; up and gate [E, I, H]; down [E, H, I]; weights [pairs], positive; all bf16."""
        of, generator = self.shape, torch.Generator(self.device).manual_seed(0)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=self.device, dtype=torch.bfloat16)

        wide = (of.experts, of.width, of.hidden)
        return {
            "x": draw(of.tokens, of.hidden), "up": draw(*wide) / of.hidden**0.5,
            "gate": draw(*wide) / of.hidden**0.5, "down": draw(*wide).mT.contiguous() / of.width**0.5,
            "weights": draw(of.tokens * of.top).sigmoid(), "dy": draw(of.tokens, of.hidden),
        }  # fmt: skip

    # ---- the ways

    @cached_property
    def _on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token of each pair, and pairs of each expert."""
        return self._routes[1].to(self.device), torch.tensor(self.counts, device=self.device)

    def grouped(self, given: Inputs) -> torch.Tensor:
        places, counts = self._on_device
        y = products(
            given["x"], counts, given["up"], given["down"], given["gate"], places=places,
            weights=given["weights"],
        )  # fmt: skip
        return torch.zeros_like(given["x"]).index_add(0, places, y)

    def loop(self, given: Inputs) -> torch.Tensor:
        places, _ = self._on_device
        parts = zip(places.split(self.counts), given["weights"].split(self.counts), strict=True)
        y = [
            _mlp(given["x"][own], *(given[name][expert] for name in ("up", "gate", "down"))) * weight[:, None]
            for expert, (own, weight) in enumerate(parts)
        ]
        return torch.zeros_like(given["x"]).index_add(0, places, torch.cat(y))

    def padded(self, capacity: float) -> Forward:
        of, room, kept = self.shape, self._room(capacity), self.is_kept(capacity)
        rows = self._routes[0] * room + self._place_in_expert

        @cache
        def on_device() -> list[torch.Tensor]:
            """Of each pair that is kept its row, its token and its place among all pairs."""
            own = rows[kept], self._routes[1][kept], kept.nonzero().flatten()
            return [each.to(self.device) for each in own]

        def forward(given: Inputs) -> torch.Tensor:
            slots, tokens, pairs = on_device()
            empty = given["x"].new_zeros(of.experts * room, of.hidden)
            rows = empty.index_copy(0, slots, given["x"][tokens]).view(of.experts, room, of.hidden)
            y = _mlp(rows, given["up"], given["gate"], given["down"]).view(-1, of.hidden)[slots]
            return torch.zeros_like(given["x"]).index_add(0, tokens, y * given["weights"][pairs, None])

        return forward

    def dense(self, given: Inputs) -> torch.Tensor:
        return _mlp(given["x"], *self._together(given))

    def _together(self, given: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first experts as one: [top I, H] twice and [H, top I]."""
        top = self.shape.top
        up, gate = (given[name][:top].flatten(0, 1) for name in ("up", "gate"))
        return up, gate, given["down"][:top].transpose(0, 1).flatten(1)

    # ---- what is right

    def _error(self, is_dense: bool, is_kept: torch.Tensor) -> Callable[[Any], float]:
        """Returns a function: the error of the last tokens' outputs and gradients against float64."""

        def error_of(result: tuple[torch.Tensor, ...]) -> float:
            given = self._inputs()
            x = given["x"][-CHECKED:].double().requires_grad_()
            y = self._of_tokens(x, given, is_dense, is_kept)
            (dx,) = torch.autograd.grad(y, x, given["dy"][-CHECKED:].double(), allow_unused=True)
            found = result[0], result[1]
            wanted = y.detach(), torch.zeros_like(x) if dx is None else dx
            return max(_distance(a[-CHECKED:], b) for a, b in zip(found, wanted, strict=True))

        return error_of

    def _of_tokens(
        self, x: torch.Tensor, given: Inputs, is_dense: bool, is_kept: torch.Tensor
    ) -> torch.Tensor:
        if is_dense:
            return _mlp(x, *(each.double() for each in self._together(given)))
        experts, tokens = self._routes
        outputs = []
        for i in range(CHECKED):
            y = torch.zeros_like(x[i])
            of_token = (tokens == self.shape.tokens - CHECKED + i) & is_kept
            for pair in of_token.nonzero().flatten().tolist():
                matrices = (given[name][int(experts[pair])].double() for name in ("up", "gate", "down"))
                y = y + _mlp(x[i : i + 1], *matrices)[0] * given["weights"][pair].double()
            outputs.append(y)
        return torch.stack(outputs)


def _mlp(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate x) up x), of each expert's rows where there is a dimension for it."""
    return (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))
