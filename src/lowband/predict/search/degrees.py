"""Which degrees, ways and schedules a search tries, of those that model, ranks and machine allow.

tensor    every power of two to the node's size
pipeline  every number of ranks over which the layers can be divided, or all but the ends can (see `ends`)
context   every power of two that leaves a rank 4,096 tokens, in every way, or those given, for the levels
          that it crosses
expert    of a model with experts every power of two that divides them, by every route, or those given,
          with each of the numbers of copies
schedule  on one rank along pipeline the order of accumulation: depth (1f1b), breadth (breadth-first)
          where a step has several micro-batches; on several every schedule that is predicted, with every
          number of stages a rank into which layers can be divided, or the stages whose blocks are given
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import get_args

from lowband.errors import UserError
from lowband.predict.context_ways import in_ways
from lowband.predict.given import mesh_of
from lowband.predict.refused import check_stages
from lowband.spec.axes import Ways, row_of, to_experts
from lowband.spec.context import check_layout, layout_of
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import SCHEDULES
from lowband.spec.step import Route, Schedule, States

COPIES = 1, 2, 4, 8  # of popular experts, where ranks are unevenly full
LEAST_TOKENS = 4096  # of a sequence on a rank along context, where no degree is given


def axes_to_try(
    machine: Machine,
    model: ModelSpec,
    tensor: Sequence[int] | None = None,
    pipeline: Sequence[int] | None = None,
    layers: Sequence[int] = (),
    context: Sequence[int] | None = (1,),
    expert: Sequence[int] | None = (1,),
    routes: Sequence[Route] = get_args(Route),
    copies: Sequence[int] = (0,),
    seq_len: int = 1,
) -> list[Ways]:
    """All of these degrees with each other. None: as the module says, of sequences of seq_len.

    layers: blocks of each stage, equally many stages on each rank; none: equally many blocks, or fewer at
            the ends
    """
    context = context or _powers(max(1, seq_len // LEAST_TOKENS))
    expert = expert or [n for n in _powers(model.experts or 1) if (model.experts or 1) % n == 0]
    dividing = [count for count in divisors(len(layers)) if count > 1] or [1]
    stages = pipeline or (dividing if layers else _dividing(model.layers))
    return [
        Ways.of_options(tp, pp, max(len(layers) // pp, 1), layers=layers, cp=cp, ep=ep, route=route, copies=n)
        for tp, pp, cp, (ep, route, n) in itertools.product(
            tensor or _powers(machine.node_size), stages, context, to_experts(expert, routes, copies)
        )
    ]


def _dividing(layers: int) -> list[int]:
    """Numbers of ranks over which layers can be divided, with ends or without."""
    return [ranks for ranks in range(1, layers + 1) if ends(layers, ranks) is not None]


def ends(layers: int, stages: int) -> tuple[int, ...] | None:
    """Blocks of each stage where the layers do not divide, () where they do, None where they cannot.

    The last stage has one block less, for the head; or the first and the last one, for embeddings, too, as
    Llama 3 had it (arXiv 2407.21783, section 3.3.2) and Megatron-LM can (`--account-for-loss-in-pipeline-
    split`, `--account-for-embedding-in-pipeline-split`).
    """
    missing = -layers % stages
    if not missing:
        return ()
    most = layers // stages + 1
    if missing > 2 or most == 1:
        return None
    return (most - (missing == 2), *[most] * (stages - 2), most - 1)


def possible(
    machine: Machine,
    model: ModelSpec,
    ranks: int,
    axes: Sequence[Ways],
    seq_len: int,
    ways: Sequence[str],
    states: Sequence[States],
) -> list[Ways]:
    """Those of the axes that are possible, in each of the ways along context and the schedules that are.

    Raises UserError if none is, with the reason of the first.
    """
    found, refused = list[Ways](), list[UserError]()
    for one in axes:
        try:
            tried = in_ways(machine, model, ranks, one, ways, states)
        except UserError as error:
            refused.append(error)
            continue
        for way in tried:
            try:
                in_orders = list(_in_orders(model, way))
                mesh_of(machine, model, ranks, in_orders[0] if in_orders else way)
                if not in_orders:
                    check_stages(model, way)
                check_layout(layout_of(machine.sizes, way, ranks), way, model, seq_len)
                found += in_orders
            except UserError as error:
                refused.append(error)
    if found:
        return found
    first, are_alike = refused[0], len({str(error) for error in refused}) == 1
    more = "" if are_alike else "; no other axes are possible either"
    raise UserError(first.what + more, where=first.where, allowed=first.allowed)


def _in_orders(model: ModelSpec, axes: Ways) -> Iterator[Ways]:
    """These degrees in every schedule of the search."""
    for schedule in get_args(Schedule):
        if axes.pipeline == 1 and schedule not in ("1f1b", "breadth-first"):
            continue
        most = 1 if axes.pipeline == 1 else model.layers // axes.pipeline + 1
        for chunks in [axes.chunks] if axes.layers else range(1, most + 1):
            row = SCHEDULES[row_of(schedule, chunks)]
            if chunks < row.chunks[0] or (row.chunks[1] is not None and chunks > row.chunks[1]):
                continue
            layers = axes.layers or ends(model.layers, axes.pipeline * chunks)
            if layers is None:
                continue
            way = axes.model_copy(update={"schedule": schedule, "chunks": chunks, "layers": layers})
            if axes.layers or _is_predicted(model, way):
                yield way


def _is_predicted(model: ModelSpec, axes: Ways) -> bool:
    """Whether stages are as `Workload` has them where a model's layers differ."""
    try:
        check_stages(model, axes)
    except UserError:
        return False
    return True


_ORDERS = "without zigzag, which is never faster", "with zigzag, which linear layers cannot have"


def left_out(model: ModelSpec, axes: Sequence[Ways], software: Sequence[str] = ()) -> str:
    """What a search over these axes does not try, and why, in one line. software: to which it keeps"""
    found = ["ranks along context, but those of --cp"]
    if any(one.context > 1 for one in axes):
        found = [f"ranks along context {_ORDERS[model.linear_layers > 0]}"]
    if model.experts is not None and all(one.expert == 1 for one in axes):
        found.append("ranks that divide experts, but those of --ep")
    if software:
        found.append(f"what {' and '.join(software)} cannot run (--software any)")
    return "not tried: " + "; ".join(found)


@cache  # the same for every placement
def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
