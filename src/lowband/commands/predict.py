"""predict, plan, rehearse: the performance model of a workload."""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lowband.commands import add_verb, at_least_one, at_least_zero, positive
from lowband.errors import UserError
from lowband.spec.step import Route, Schedule, States

if TYPE_CHECKING:
    from lowband.spec.config import Config
    from lowband.spec.machine import Machine
    from lowband.spec.model import ModelSpec
    from lowband.spec.stack import Stack

STACK = "a name in config/stacks/, `ours`, or a file (default: the one that the machine names)"
LAYERS = "blocks of each stage, first to last (default: equally many)"
RECOMPUTE = ["none", "selective", "op", "full"]


def add(commands: Any) -> None:
    predict = add_verb(
        commands, "predict", "time and memory of a scheme on a cluster, item by item",
        "--cluster frontier --model gpt-20b --scheme zero3 zeropp hier3 --gpus 384 --accumulation 4",
        "Options that take several values make a grid. Exit code 1: no point fits the memory.",
    )  # fmt: skip
    _add_job(predict)
    predict.add_argument("--scheme", "--dp-scheme", nargs="+", required=True, help="names, or files")
    predict.add_argument(
        "--micro-batch", nargs="+", type=at_least_one, default=[1], metavar="N", help="sequences per pass"
    )
    predict.add_argument(
        "--accumulation", nargs="+", type=at_least_one, default=[1], metavar="N", help="passes per step"
    )
    predict.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=["full"])
    predict.add_argument("--tp", type=at_least_one, default=1, help="tensor-parallel ranks")
    predict.add_argument("--pp", type=at_least_one, default=1, help="pipeline stages")
    _add_context(predict, [], "default: ring; state")
    _add_experts(predict, ["merged"], "default: merged", "0")
    predict.add_argument(
        "--tiers", nargs="+", default=[], metavar="STATE@TIER",
        help="states beyond the device: optim@host, optim@disk, weights@host, weights@disk",
    )  # fmt: skip
    predict.add_argument(
        "--tier-share", type=positive, default=1.0, metavar="X", help="of optim's parameters (default: 1)"
    )
    predict.add_argument(
        "--tier-stride", type=int, default=0, metavar="K",
        help="every K-th of their subgroups is updated on the device (default: none)",
    )  # fmt: skip
    predict.add_argument(
        "--interleave", type=at_least_one, default=1, metavar="N", help="virtual stages per rank"
    )
    predict.add_argument("--schedule", choices=get_args(Schedule), default="1f1b")
    predict.add_argument("--layers", nargs="+", type=at_least_one, default=[], help=LAYERS)
    out = predict.add_mutually_exclusive_group()
    out.add_argument("--json", action="store_true", help="an object; an array for a grid")
    out.add_argument("--csv", action="store_true")
    predict.set_defaults(run=_predict)

    plan = add_verb(
        commands, "plan", "the fastest placement, wires, batches, order, degrees that fit",
        "--cluster frontier --model gpt-20b --gpus 384",
    )  # fmt: skip
    _add_job(plan)
    plan.add_argument("--global-batch", type=at_least_one, help="sequences per step (default: 4 a rank)")
    plan.add_argument(
        "--micro-batch", nargs="+", type=at_least_one, help="to try (default: all that divide the batch)"
    )
    plan.add_argument(
        "--recompute", nargs="+", choices=["none", "full"], default=["none", "full"], help="to try"
    )
    plan.add_argument(
        "--tp", nargs="+", type=at_least_one, help="degrees to try (default: powers of 2 in a node)"
    )
    plan.add_argument("--pp", nargs="+", type=at_least_one, help="stages to try (default: powers of 2 to 16)")
    plan.add_argument("--layers", nargs="+", type=at_least_one, default=[], help=LAYERS)
    _add_context(plan, ["all"], "default: all")
    _add_experts(plan, list(get_args(Route)), "default: all", "some if --imbalance")
    plan.add_argument("--exact", action="store_true", help="no lossy wires (int8, int4)")
    plan.add_argument(
        "--lengths", type=Path, metavar="FILE",
        help="a batch's, one a line: which sequence goes to which ranks, in how many micro-steps",
    )  # fmt: skip
    plan.add_argument(
        "--outer-gbps", type=positive, metavar="RATE",
        help="of each node's link, in Gbit/s: choose how often, on which wire and how late nodes exchange",
    )  # fmt: skip
    plan.add_argument(
        "--most-stale", type=at_least_one, default=100, metavar="STEPS", help="H + delay, with --outer-gbps"
    )
    plan.add_argument(
        "--largest", metavar="SCHEME", nargs="?", const="zero3",
        help="the largest model of this one's family that fits, its states on device, host, disk",
    )  # fmt: skip
    form = plan.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="an array: a row per placement, fastest first")
    form.add_argument("--csv", action="store_true", help="the same rows")
    plan.add_argument(
        "--write", metavar="NAME", help="write the best scheme and a suite of this name into config/"
    )
    plan.set_defaults(run=_plan)

    rehearse = add_verb(
        commands, "rehearse", "a suite before it runs: cost, memory, steps, what it decides",
        "--suite frontier",
    )  # fmt: skip
    rehearse.add_argument("--suite", required=True, help="a name in config/suites/, of a real cluster")
    rehearse.add_argument("--json", action="store_true")
    rehearse.add_argument("--root", type=Path, default=Path(), help="folder that holds config/ and slurm/")
    rehearse.set_defaults(run=_rehearse)


def _add_context(parser: argparse.ArgumentParser, ways: list[str], default: str) -> None:
    """Add the options of ranks along context. ways: the default"""
    parser.add_argument(
        "--cp", type=at_least_one, nargs="+", default=[1], metavar="N", help="ranks along context"
    )
    parser.add_argument(
        "--ways", nargs="+", default=ways, metavar="WAY",
        help=f"of theirs: heads, gather, ring; package=heads,world=ring; state; all ({default})",
    )  # fmt: skip
    parser.add_argument(
        "--states", nargs="+", choices=get_args(States), default=[],
        help="of linear layers (default: scan; with --ways all each)",
    )  # fmt: skip


def _add_experts(parser: argparse.ArgumentParser, routes: list[str], default: str, copies: str) -> None:
    """Add the options of ranks with different experts. routes: the default; copies: theirs"""
    parser.add_argument(
        "--ep", type=at_least_one, nargs="+", default=[1], metavar="N", help="ranks that divide experts"
    )
    parser.add_argument(
        "--route", nargs="+", choices=get_args(Route), default=routes, help=f"to theirs ({default})"
    )
    parser.add_argument(
        "--imbalance",
        type=positive,
        default=1.0,
        metavar="X",
        help="of theirs: most rows to mean (default: 1)",
    )
    parser.add_argument(
        "--copies", type=at_least_zero, nargs="+", metavar="N", help=f"of popular ones (default: {copies})"
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add the options that `predict` and `plan` share. Lists make a grid."""
    several = parser.prog.endswith("predict")
    parser.add_argument("--cluster", required=True, help="a folder of slurm/, or a machine file")
    parser.add_argument(
        "--model",
        required=True,
        nargs="+" if several else None,
        help="a name of config/models.yaml, a YAML file, or a Hugging Face config.json",
    )
    parser.add_argument(
        "--gpus", required=True, type=at_least_one, nargs="+" if several else None, help="ranks"
    )
    parser.add_argument(
        "--seq", type=at_least_one, nargs="+" if several else None, help="default: the model's longest"
    )
    parser.add_argument("--stack", help=STACK)
    parser.add_argument("--root", type=Path, default=Path(), help="folder that holds config/ and slurm/")


def _predict(options: argparse.Namespace) -> int:
    import json
    from itertools import product

    from lowband.cost.tiers import Beyond
    from lowband.predict.request import Grid
    from lowband.predict.show.render import flat, table, text
    from lowband.spec.axes import Ways, to_experts
    from lowband.spec.config import Config

    names = {field.name for field in dataclasses.fields(Grid)}
    values = {key: value for key, value in vars(options).items() if key in names}
    of_stages = options.interleave, options.schedule, options.layers
    axes = [
        Ways.of_options(options.tp, options.pp, *of_stages, cp, *along)
        for cp, along in product(options.cp, to_experts(options.ep, options.route, options.copies or [0]))
    ]
    beyond = Beyond.of(options.tiers, options.tier_share, options.tier_stride)
    values |= {"config": Config(options.root), "seq": options.seq or [None], "axes": axes, "beyond": beyond}
    records = Grid(**values).records()
    if options.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
    elif options.csv:
        _print_csv([flat(record) for record in records])
    else:
        print(text(records[0]) if len(records) == 1 else table(records))
    return int(all(record["fits"] is False for record in records))


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    columns = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(sys.stdout, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _plan(options: argparse.Namespace) -> None:
    import json

    from lowband.predict.request import sequence, setting
    from lowband.predict.search.choice import chosen
    from lowband.predict.search.plan import COPIES, axes_to_try, plan
    from lowband.predict.show import plan_files
    from lowband.spec.config import Config

    config = Config(options.root)
    machine, stack = setting(config, options.cluster, options.stack)
    model = config.given_model(options.model)
    if options.write and options.cluster not in config.clusters:
        raise UserError(
            f"--write: a suite cannot name the file {options.cluster}", allowed=", ".join(config.clusters)
        )
    if options.lengths is not None:
        _plan_lengths(options, machine, stack, model)
        return
    if options.outer_gbps is not None:
        _plan_seldom(options, config)
        return
    if options.largest is not None:
        _plan_largest(options, config, machine, stack, model)
        return
    copies = options.copies or ([0] if options.imbalance == 1 else [0, *COPIES])
    of_experts = options.ep, options.route, copies
    axes = axes_to_try(machine, options.tp, options.pp, options.layers, options.cp, *of_experts)
    found = plan(
        machine, stack, model, options.gpus, sequence(model, options.seq),
        options.global_batch or 4 * options.gpus, axes,
        options.micro_batch, options.recompute, options.exact, options.ways, options.states,
        options.imbalance,
    )  # fmt: skip
    written = plan_files.write(chosen(found)[0], options.write, config) if options.write else []
    if options.json:
        print(json.dumps(plan_files.records(found), indent=2))
    elif options.csv:
        _print_csv(plan_files.records(found))
    else:
        print("\n".join([plan_files.report(found), *(f"written: {path}" for path in written)]))


def _plan_largest(
    options: argparse.Namespace, config: "Config", machine: "Machine", stack: "Stack", model: "ModelSpec"
) -> None:
    import json

    from lowband.predict.request import sequence
    from lowband.predict.search.largest import largest
    from lowband.predict.show import largest as show
    from lowband.predict.workload import Workload

    others = ("write", "tp", "pp", "layers", "exact", "states")
    beside = [f"--{name}" for name in others if getattr(options, name)]
    beside += ["--cp"] * (options.cp != [1]) + ["--ep"] * (options.ep != [1])
    if beside:
        raise UserError(f"--largest is without {beside[0]}")
    scheme = config.given_scheme(options.largest).on(list(machine.sizes))
    micro_batch, *more = options.micro_batch or [1]
    if more:
        raise UserError("--largest takes one --micro-batch")
    batch = options.global_batch or micro_batch * options.gpus
    job = Workload(
        machine, stack, model, scheme, options.gpus, micro_batch, sequence(model, options.seq),
        max(1, batch // (micro_batch * options.gpus)),
    )  # fmt: skip
    rows = [show.record(one) for one in largest(job)]
    if options.json:
        print(json.dumps(rows, indent=2))
    elif options.csv:
        _print_csv(rows)
    else:
        print(show.text(job, rows))


def _plan_lengths(
    options: argparse.Namespace, machine: "Machine", stack: "Stack", model: "ModelSpec"
) -> None:
    import json

    from lowband.predict.search.lengths_cost import Job, read_lengths
    from lowband.predict.show import lengths as show

    others = ("write", "tp", "pp", "layers", "outer_gbps", "micro_batch", "global_batch", "seq", "exact")
    beside = [f"--{name.replace('_', '-')}" for name in others if getattr(options, name)]
    beside += ["--cp"] * (options.cp != [1]) + ["--ways"] * (options.ways != ["all"])
    beside += ["--states"] * bool(options.states) + ["--ep"] * (options.ep != [1])
    if beside:
        raise UserError(f"--lengths is without {beside[0]}")
    batch = read_lengths(options.lengths, model)
    found, refused = [], []
    for recompute in options.recompute:
        try:
            found.append(show.rows(batch, Job(machine, stack, model, options.gpus, recompute)))
        except UserError as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    rows = min(found, key=lambda each: each[0]["step_s"])
    if options.json:
        print(json.dumps(rows, indent=2))
    elif options.csv:
        _print_csv(rows)
    else:
        print(show.report(batch, rows))


SELDOM = ("diloco", "diloco-hier3")  # the placements that are tried in a node


def _plan_seldom(options: argparse.Namespace, config: "Config") -> None:
    import json

    from lowband.predict.request import sequence, setting
    from lowband.predict.search import plan_seldom
    from lowband.predict.workload import Workload

    if options.write or options.tp or options.pp or options.layers or options.cp + options.ep != [1, 1]:
        raise UserError("--outer-gbps is without --write, --tp, --pp, --cp, --ep and --layers")
    machine, stack = setting(config, options.cluster, options.stack)
    machine = plan_seldom.with_outer_rate(machine, options.outer_gbps)
    model = config.given_model(options.model)
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
    found = plan_seldom.plan(job, inside, options.most_stale, batches, options.recompute, options.exact)
    rows = [choice.row() for choice in found]
    if options.json:
        print(json.dumps(rows, indent=2))
    elif options.csv:
        _print_csv(rows)
    else:
        print(plan_seldom.report(found, options.outer_gbps))


def _rehearse(options: argparse.Namespace) -> int:
    import json

    from lowband.evidence.claims.rehearsed import suite_ratios, suite_stacks
    from lowband.predict.search import ratios
    from lowband.predict.search.rehearsal import records, rehearse, text
    from lowband.spec.config import Config

    config = Config(options.root)
    specs = config.runs([options.suite])
    cluster = specs[0].machine.name
    request = config.job(cluster) if config.has_slurm(cluster) else None
    rows = rehearse(specs, request, suite_stacks(config, specs))
    cells = suite_ratios(config, options.suite)
    if options.json:
        print(json.dumps({"runs": records(rows), "ratios": ratios.records(cells)}, indent=2))
    else:
        shared = [] if request is None else request.allocations(specs)
        print("\n".join([text(rows, shared), *ratios.text(cells)]))
    return int(any(row.fits is False for row in rows))
