"""predict, rehearse: the performance model of a workload. Options that `plan` shares."""

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lowband.commands import add_verb, at_least_one, at_least_zero, positive, root, whole_run
from lowband.errors import UserError
from lowband.spec.step import (
    Attention,
    Operations,
    Optimizer,
    Products,
    Recompute,
    ReduceDtype,
    Route,
    Schedule,
    States,
)

if TYPE_CHECKING:
    from lowband.cost.lora import Lora
    from lowband.predict.request import Grid

STACK = "a name in config/stacks/, `ours`, or a file (default: the one that the machine names)"
LAYERS = "blocks of each stage, first to last (default: equally many)"
ROUTES = ["merged"]
RECOMPUTE = get_args(Recompute)


def blocks(text: str) -> int:
    """Parse a stage's number of blocks. Raises the error that argparse reports in one line."""
    if text.strip() == "0":
        what = f"'{text}': a stage of embeddings or head alone (allowed: 1 or more blocks each)"
        raise argparse.ArgumentTypeError(what)
    return at_least_one(text)


def add(commands: Any) -> None:
    predict = add_verb(
        commands, _predict, "predict", "time and memory of a scheme on a cluster, item by item",
        "--cluster frontier --model gpt-20b --scheme zero3 zeropp hier3 --gpus 384 --accumulation 4",
        "Options that take several values make a grid. Exit code 1: no point fits the memory; "
        "with --strict: some point does not.",
    )  # fmt: skip
    add_job(predict)
    predict.add_argument("--scheme", "--dp-scheme", nargs="+", required=True, help="names, or files")
    predict.add_argument(
        "--micro-batch", nargs="+", type=at_least_one, default=[1], metavar="N", help="sequences per pass"
    )
    predict.add_argument(
        "--accumulation", nargs="+", type=at_least_one, default=[1], metavar="N", help="passes per step"
    )
    predict.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=["full"])
    predict.add_argument(
        "--recompute-layers", type=at_least_one, metavar="N", help="of so many layers (default: all)"
    )
    predict.add_argument("--tp", type=at_least_one, default=1, help="tensor-parallel ranks")
    predict.add_argument("--pp", type=at_least_one, default=1, help="pipeline stages")
    add_context(predict, [], "default: ring; state")
    add_experts(predict, ROUTES, "default: merged", "0")
    add_tiers(predict, "1, and none")
    add_lora(predict)
    predict.add_argument(
        "--interleave", type=at_least_one, default=1, metavar="N", help="virtual stages per rank"
    )
    predict.add_argument("--schedule", choices=get_args(Schedule), default="1f1b")
    predict.add_argument("--layers", nargs="+", type=blocks, default=[], help=LAYERS)
    predict.add_argument(
        "--groups", type=at_least_one, metavar="N",
        help="shard over groups of N ranks, of several nodes, what a scheme shards over all (HSDP)",
    )  # fmt: skip
    whole_run.add(predict, "the job")
    predict.add_argument("--strict", action="store_true", help="exit code 1 if any point does not fit")
    out = predict.add_mutually_exclusive_group()
    out.add_argument("--json", action="store_true", help="an object; an array for a grid")
    out.add_argument("--csv", action="store_true")

    rehearse = add_verb(
        commands, _rehearse, "rehearse", "a suite before it runs: cost, memory, steps, what it decides",
        "--suite frontier",
    )  # fmt: skip
    rehearse.add_argument("--suite", required=True, help="a name in config/suites/, of a real cluster")
    rehearse.add_argument("--json", action="store_true")
    rehearse.add_argument("--root", type=root, default=Path(), help="folder that holds config/ and slurm/")


def add_context(parser: argparse.ArgumentParser, ways: list[str], default: str) -> None:
    """Add the options of ranks along context. ways: the default"""
    parser.add_argument(
        "--cp", type=at_least_one, nargs="+", default=[1], metavar="N", help="ranks along context"
    )
    parser.add_argument(
        "--ways", nargs="+", default=ways, metavar="WAY",
        help="how ranks of --cp attend: heads, gather, ring; package=heads,world=ring; state; all "
        f"({default})",
    )  # fmt: skip
    parser.add_argument(
        "--states", nargs="+", choices=get_args(States), default=[],
        help="of linear layers (default: scan; with --ways all each)",
    )  # fmt: skip


def add_experts(parser: argparse.ArgumentParser, routes: list[str], default: str, copies: str) -> None:
    """Add the options of ranks with different experts. routes: the default; copies: theirs"""
    parser.add_argument(
        "--ep", type=at_least_one, nargs="+", default=[1], metavar="N", help="ranks that divide experts"
    )
    parser.add_argument(
        "--route", nargs="+", choices=get_args(Route), default=routes,
        help=f"of tokens to the ranks of --ep ({default})",
    )  # fmt: skip
    parser.add_argument(
        "--imbalance",
        type=positive,
        default=1.0,
        metavar="X",
        help="tokens of the fullest rank of --ep, as a multiple of their mean (default: 1)",
    )
    parser.add_argument(
        "--copies", type=at_least_zero, nargs="+", metavar="N", help=f"of popular experts (default: {copies})"
    )


def add_lora(parser: argparse.ArgumentParser) -> None:
    """Add the options of adapters."""
    parser.add_argument(
        "--lora-rank", type=at_least_one, metavar="R", help="train adapters of this rank alone (LoRA)"
    )
    parser.add_argument(
        "--lora-on", nargs="+", default=[], metavar="MATRIX",
        help="matrices with adapters: q k v out gate up down (default: q v)",
    )  # fmt: skip


def lora(options: argparse.Namespace) -> "Lora | None":
    """Adapters that the options ask for. Raises UserError for matrices without a rank."""
    from lowband.cost.lora import OF_PAPER, Lora

    if options.lora_rank is None:
        if options.lora_on:
            raise UserError("--lora-on is for adapters of a --lora-rank")
        return None
    return Lora(options.lora_rank, tuple(dict.fromkeys(options.lora_on)) or OF_PAPER)


def add_tiers(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options of states beyond the device. default: share and stride"""
    parser.add_argument(
        "--tiers", nargs="+", default=[], metavar="STATE@TIER",
        help="states beyond the device: optim@host, optim@disk, weights@host, weights@disk",
    )  # fmt: skip
    parser.add_argument(
        "--tier-share", type=positive, metavar="X", help=f"of optim's parameters (with K: {default})"
    )
    parser.add_argument(
        "--tier-stride", type=at_least_zero, metavar="K",
        help="every K-th of their subgroups is updated on the device; 0: none",
    )  # fmt: skip
    parser.add_argument(
        "--tier-late", action="store_true", help="the host's update runs behind the next step's passes"
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the options that `predict` and `plan` share. Lists make a grid."""
    several = "+" if parser.prog.endswith("predict") else None
    parser.add_argument("--cluster", required=True, help="a folder of slurm/, or a machine file")
    parser.add_argument(
        "--model", required=True, nargs=several,
        help="a name of config/models.yaml, a YAML file, or a Hugging Face config.json",
    )  # fmt: skip
    parser.add_argument("--gpus", required=True, type=at_least_one, nargs=several, help="ranks")
    parser.add_argument("--seq", type=at_least_one, nargs=several, help="default: the model's longest")
    parser.add_argument("--stack", help=STACK)
    _add_software(parser)
    parser.add_argument("--root", type=root, default=Path(), help="folder that holds config/ and slurm/")


SOFTWARE = (
    "attention",
    "dropout",
    "sequence_parallel",
    "reduce_dtype",
    "products",
    "operations",
    "gated_kept",
    "optimizer",
)  # keys of a stack


def _add_software(parser: argparse.ArgumentParser) -> None:
    """Add the options in place of what the stack computes and keeps (default: as the stack has it)."""
    parser.add_argument("--attention", choices=get_args(Attention), help="default, as below: the stack's")
    parser.add_argument("--dropout", action=argparse.BooleanOptionalAction, help="of scores and outputs")
    parser.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction, help="with tp, tokens are divided, too"
    )
    parser.add_argument("--products", choices=get_args(Products), help="dtype of blocks' matrices")
    parser.add_argument(
        "--operations",
        choices=get_args(Operations),
        help="norms and rotary embeddings: kernels of a compiler, norms alone, or torch's one by one",
    )
    parser.add_argument(
        "--gated-kept", type=int, choices=[2, 3, 4], help="vectors of a gated MLP that a backward finds"
    )
    parser.add_argument("--optimizer", choices=get_args(Optimizer), help="of matrices")
    parser.add_argument("--reduce-dtype", choices=get_args(ReduceDtype), help="of gradients")


def software(options: argparse.Namespace) -> dict[str, object]:
    return {key: getattr(options, key) for key in SOFTWARE}


def _grid(options: argparse.Namespace) -> "Grid":
    """The question of `lowband predict`'s options."""
    from itertools import product

    from lowband.cost.tiers import Beyond
    from lowband.predict.request import Grid, check_used
    from lowband.spec.axes import Ways, to_experts
    from lowband.spec.config import Config

    if options.recompute_layers is not None and options.recompute == ["none"]:
        needed = "with --recompute selective, op, full or host"
        raise UserError("would change nothing", where="--recompute-layers", allowed=needed)
    names = {field.name for field in dataclasses.fields(Grid)}
    values = {key: value for key, value in vars(options).items() if key in names}
    of_stages = options.interleave, options.schedule, options.layers
    axes = [
        Ways.of_options(options.tp, options.pp, *of_stages, cp, *along)
        for cp, along in product(options.cp, to_experts(options.ep, options.route, options.copies or [0]))
    ]
    of_stages_alone = {
        "--interleave": options.interleave > 1,
        "--schedule": options.schedule not in ("1f1b", "breadth-first"),  # orders of passes on one stage
    }
    check_used(of_stages_alone | given_on_axes(options, ROUTES), axes)
    if options.imbalance > (most := max(one.expert for one in axes)):
        allowed = f"1 to {most}, the ranks of --ep: all rows are one rank's"
        raise UserError(f"{options.imbalance:g}", where="--imbalance", allowed=allowed)
    beyond = Beyond.of(options.tiers, options.tier_share, options.tier_stride, options.tier_late)
    values |= {"config": Config(options.root), "seq": options.seq or [None], "axes": axes, "beyond": beyond}
    values |= {"lora": lora(options)}
    return Grid(**values, software=software(options))


def given_on_axes(options: argparse.Namespace, routes: Sequence[str]) -> dict[str, object]:
    """By option about an axis, what is given of it. routes: the default"""
    return {
        "--sequence-parallel": options.sequence_parallel,
        "--route": options.route != routes,
        "--imbalance": options.imbalance != 1,
        "--copies": any(options.copies or []),
    }


def _predict(options: argparse.Namespace) -> int:
    from lowband.predict.show.grid_text import table
    from lowband.predict.show.point_text import text
    from lowband.predict.show.record import flat

    conditions, grid = whole_run.conditions(options), _grid(options)
    records = grid.records()
    if conditions is not None and len(records) > 1:
        raise UserError(f"--tokens is of one job, and these are {len(records)}", allowed="one value each")
    whole = [] if conditions is None else whole_run.lines(next(grid.jobs()), conditions)
    if options.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
    elif options.csv:
        print_csv([flat(record) for record in records])
    else:
        print("\n".join([text(records[0]) if len(records) == 1 else table(records), *whole]))
    short = [record["fits"] is False for record in records]
    return int(any(short) if options.strict else all(short))


def print_rows(options: argparse.Namespace, rows: Sequence[Any], text: Callable[[], str]) -> None:
    """The rows as --json or --csv asks for them, or the text."""
    if options.json:
        print(json.dumps(rows, indent=2))
    elif options.csv:
        print_csv(rows)
    else:
        print(text())


def print_csv(rows: Sequence[dict[str, Any]]) -> None:
    columns = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(sys.stdout, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _rehearse(options: argparse.Namespace) -> int:
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
