"""What else `lowband plan` answers: the largest model, a batch of many lengths, replicas that meet seldom."""

import argparse
from typing import TYPE_CHECKING, Final, get_args

from lowband.commands.predict import print_rows
from lowband.errors import UserError
from lowband.spec.step import Route

if TYPE_CHECKING:
    from lowband.spec.config import Config
    from lowband.spec.machine import Machine
    from lowband.spec.model import ModelSpec
    from lowband.spec.stack import Stack

WHOLE: Final = ("none", "full")  # recomputation that is tried
ALONG: Final = ("ways", "states", "route", "imbalance", "copies", "sequence_parallel")  # about axes
MOST_STALE: Final = 100
SELDOM: Final = ("diloco", "diloco-hier3")  # the placements that are tried in a node


def given(options: argparse.Namespace, *names: str) -> list[str]:
    """Those of these options that were given, as they are written."""
    at_rest = {"ways": ["all"], "route": [*get_args(Route)], "imbalance": 1.0}
    found = [name for name in names if (value := getattr(options, name)) and value != at_rest.get(name)]
    return [f"--{name.replace('_', '-')}" for name in found]


def largest_model(
    options: argparse.Namespace, config: "Config", machine: "Machine", stack: "Stack", model: "ModelSpec"
) -> None:
    from lowband.predict.request import sequence
    from lowband.predict.room import DoesNotFit
    from lowband.predict.search.largest import largest
    from lowband.predict.show import largest as show
    from lowband.predict.workload import Workload

    others = ("write", "tp", "pp", "layers", "exact", "cp", "ep", "recompute")
    if beside := given(options, *others, *ALONG):
        raise UserError(f"--largest is without {beside[0]}")
    scheme = config.given_scheme(options.largest).on(list(machine.sizes))
    micro_batch, *more = options.micro_batch or [1]
    if more:
        raise UserError("--largest takes one --micro-batch")
    passes, rest = divmod(options.global_batch or micro_batch * options.gpus, micro_batch * options.gpus)
    if rest or not passes:
        allowed = f"a multiple of {micro_batch * options.gpus}: ranks x micro-batch"
        raise UserError(f"{options.global_batch} sequences", where="--global-batch", allowed=allowed)
    job = Workload(
        machine, stack, model, scheme, options.gpus, micro_batch, sequence(model, options.seq), passes
    )
    rows = [show.record(one) for one in largest(job, chooses=True)]
    if all(row["parameters"] == 0 for row in rows):
        raise DoesNotFit(f"no model of the family of {model.name} fits at micro-batch {micro_batch}")
    print_rows(options, rows, lambda: show.text(job, rows))


def many_lengths(options: argparse.Namespace, machine: "Machine", stack: "Stack", model: "ModelSpec") -> None:
    from lowband.predict.search.lengths_cost import Job, read_lengths
    from lowband.predict.show import lengths as show

    others = ("write", "tp", "pp", "layers", "outer_gbps", "micro_batch", "global_batch", "seq", "exact")
    beside = given(options, *others, "cp", "ep", *ALONG)
    if beside := [*beside, *["--recompute host"] * ("host" in (options.recompute or ()))]:
        raise UserError(f"--lengths is without {beside[0]}")
    batch = read_lengths(options.lengths, model)
    found, refused = [], []
    for recompute in options.recompute or WHOLE:
        try:
            found.append(show.rows(batch, Job(machine, stack, model, options.gpus, recompute)))
        except UserError as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    rows = min(found, key=lambda each: each[0]["step_s"])
    print_rows(options, rows, lambda: show.report(batch, rows))


def seldom_met(
    options: argparse.Namespace, config: "Config", machine: "Machine", stack: "Stack", model: "ModelSpec"
) -> None:
    from lowband.predict.request import sequence
    from lowband.predict.search import plan_seldom
    from lowband.predict.workload import Workload

    if beside := given(options, "write", "tp", "pp", "cp", "ep", "layers", *ALONG):
        raise UserError(f"--outer-gbps is without {beside[0]}")
    machine = plan_seldom.with_outer_rate(machine, options.outer_gbps)
    inside = plan_seldom.possible([config.scheme(name) for name in SELDOM], machine, options.gpus)
    batch = options.global_batch or 4 * options.gpus
    batches = [
        (micro, batch // (options.gpus * micro))
        for micro in options.micro_batch or [1]
        if batch % (options.gpus * micro) == 0
    ]
    if not batches:
        raise UserError(
            f"no micro-batch divides {batch} sequences over {options.gpus} ranks",
            where="--micro-batch",
            allowed="a global batch of a multiple of ranks x micro-batch",
        )
    job = Workload(machine, stack, model, inside[0], options.gpus, 1, sequence(model, options.seq))
    found = plan_seldom.plan(
        job, inside, options.most_stale or MOST_STALE, batches, options.recompute or WHOLE, options.exact
    )
    rows = [choice.row() for choice in found]
    print_rows(options, rows, lambda: plan_seldom.report(found, options.outer_gbps))
