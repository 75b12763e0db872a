"""plan: the fastest placement of a job that fits, of sequences of many lengths, or between slow nodes."""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lowband.commands import add_verb, at_least_one, name, plan_others, positive, whole_run
from lowband.commands.predict import (
    LAYERS,
    RECOMPUTE,
    add_context,
    add_experts,
    add_job,
    add_lora,
    add_tiers,
    blocks,
    given_on_axes,
    lora,
    print_rows,
)
from lowband.commands.predict import software as given
from lowband.errors import UserError
from lowband.spec.step import Route

if TYPE_CHECKING:
    from lowband.cost.lora import Lora
    from lowband.cost.tiers import Beyond
    from lowband.spec.axes import Ways
    from lowband.spec.config import Config
    from lowband.spec.model import ModelSpec

OURS = "lowband"
ROUTES = list(get_args(Route))
NAMES = ("megatron-lm", "deepspeed", "torchtitan", "llm-foundry", OURS)  # predict.search.software
ANY = "any"
MOST_BATCH = 10**7  # sequences: the largest known have a hundredth of it, and more have ever more divisors


def add(commands: Any) -> None:
    plan = add_verb(
        commands, _plan, "plan", "the fastest placement, wires, batches, order, degrees that fit",
        "--cluster frontier --model gpt-20b --gpus 384",
    )  # fmt: skip
    add_job(plan)
    plan.add_argument("--global-batch", type=at_least_one, help="sequences per step (default: 4 a rank)")
    plan.add_argument(
        "--micro-batch", nargs="+", type=at_least_one, help="to try (default: all that divide the batch)"
    )
    plan.add_argument("--recompute", nargs="+", choices=RECOMPUTE, help="to try (default: all)")
    plan.add_argument(
        "--tp", nargs="+", type=at_least_one, help="degrees to try (default: powers of 2 in a node)"
    )
    plan.add_argument("--pp", nargs="+", type=at_least_one, help="to try (default: all that layers allow)")
    plan.add_argument("--layers", nargs="+", type=blocks, default=[], help=LAYERS)
    add_context(plan, ["all"], "default: all")
    add_experts(plan, ROUTES, "default: all", "some if --imbalance")
    add_tiers(plan, "the fastest that fits")
    add_lora(plan)
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
        "--most-stale", type=at_least_one, metavar="STEPS", help="H + delay, with --outer-gbps (default: 100)"
    )
    plan.add_argument(
        "--largest", metavar="SCHEME", nargs="?", const="zero3",
        help="the largest model of this one's family that fits, its states on device, host, disk",
    )  # fmt: skip
    whole_run.add(plan, "the first row")
    form = plan.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="an array: a row per placement, fastest first")
    form.add_argument("--csv", action="store_true", help="the same rows")
    plan.add_argument(
        "--groups", nargs="+", type=at_least_one, metavar="N",
        help="ranks of groups of several nodes to shard over, beside all ranks (HSDP): sizes to try",
    )  # fmt: skip
    plan.add_argument(
        "--software", nargs="+", choices=[*NAMES, ANY], metavar="NAME",
        help=f"keep to what one of these runs: {', '.join(NAMES)}; {ANY}: to nothing (default: what the "
        "stack is of, and lowband)",
    )  # fmt: skip
    plan.add_argument(
        "--write", metavar="NAME",
        help="write the best scheme and a suite of this name into config/; with --software the options of "
        "that one into a file of this name",
    )  # fmt: skip
    plan.add_argument("--strict", action="store_true", help="exit code 1, not 2, if nothing fits the memory")
    plan.set_defaults(cp=None, ep=None)


def _plan(options: argparse.Namespace) -> int:
    from lowband.predict.room import DoesNotFit

    collects = gc.isenabled()
    gc.disable()  # a search leaves no cycles behind; to look for them would take a part of its time
    try:
        _search(options)
    except DoesNotFit as error:
        if not options.strict:
            raise
        print(f"lowband: {error}", file=sys.stderr)
        return 1
    finally:
        if collects:
            gc.enable()
    return 0


def _search(options: argparse.Namespace) -> None:
    from lowband.predict.groups import with_groups
    from lowband.predict.request import check_gated, sequence, setting
    from lowband.predict.search.choice import chosen
    from lowband.predict.search.degrees import COPIES, axes_to_try
    from lowband.predict.search.plan import plan
    from lowband.predict.search.software import of_stack
    from lowband.predict.show import plan_files, plan_options, plan_text
    from lowband.spec.config import Config

    conditions = whole_run.conditions(options, plan_others.given(options, "largest", "lengths", "outer_gbps"))
    config = Config(options.root)
    machine, stack = setting(config, options.cluster, options.stack)
    model = config.given_model(options.model)
    check_gated(given(options), model)
    stack = stack.with_options(given(options))
    own = not options.software or OURS in options.software
    if options.write and own and options.cluster not in config.clusters:
        raise UserError(
            f"--write: a suite cannot name the file {options.cluster}", allowed=", ".join(config.clusters)
        )
    _check(options, config)
    beyond, adapters = _placed(options)
    if options.lengths is not None:
        plan_others.many_lengths(options, machine, stack, model)
        return
    if options.outer_gbps is not None:
        plan_others.seldom_met(options, config, machine, stack, model)
        return
    if options.largest is not None:
        plan_others.largest_model(options, config, machine, stack, model)
        return
    if options.groups and options.write and own:
        raise UserError("--groups: a suite that --write writes has no such level")
    groups = [with_groups(machine, stack, n, options.gpus) for n in dict.fromkeys(options.groups or ())]
    seq_len = sequence(model, options.seq)
    copies = options.copies or ([0] if options.imbalance == 1 else [0, *COPIES])
    of_experts = options.ep, options.route, copies
    degrees = options.tp, options.pp, options.layers, options.cp, *of_experts
    axes = [stack.axes(one) for one in axes_to_try(machine, model, *degrees, seq_len)]
    _check_used(options, axes, model)
    found = plan(
        machine, stack, model, options.gpus, seq_len,
        options.global_batch or 4 * options.gpus, axes,
        options.micro_batch, options.recompute or RECOMPUTE, options.exact, options.ways, options.states,
        options.imbalance, of_stack(stack, model, options.software), beyond=beyond, lora=adapters,
        chooses=options.tier_share is None and options.tier_stride is None, groups=groups,
    )  # fmt: skip
    told: list[str] = []
    whole = [] if conditions is None else whole_run.lines(chosen(found)[0].job, conditions)
    written: list[Path] = []
    if options.write and own:
        written = plan_files.write(chosen(found)[0], options.write, config)
    elif options.write:
        written = [plan_options.write(chosen(found)[0], options.root / options.write, options.software)]
    if beyond is not None and chosen(found)[0].job.placed is None:
        told.append(f"{' '.join(options.tiers)}: all states fit on the device, which is faster")
    files = [f"written: {path}" for path in written]
    if options.json or options.csv:
        for line in files:
            print(line, file=sys.stderr)
    told += [*whole, *files]
    print_rows(options, plan_text.records(found), lambda: "\n".join([plan_text.report(found), *told]))


def _check(options: argparse.Namespace, config: "Config") -> None:
    """Raises UserError for what would end late, lie elsewhere than in config/, or be ignored."""
    from lowband.predict.show.plan_files import check_free

    if (options.global_batch or 0) > MOST_BATCH:
        what = f"{options.global_batch:,} sequences"
        raise UserError(what, where="--global-batch", allowed=f"at most {MOST_BATCH:,}")
    if options.write == "" or (options.write and (not options.software or OURS in options.software)):
        try:
            name(options.write)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--write: {error}") from None
        check_free(options.write, config)
    instead = plan_others.given(options, "lengths", "outer_gbps", "largest")
    ignored = [*instead[1:], *plan_others.given(options, "groups", "software", "copies")]
    if instead and ignored:
        raise UserError(f"{instead[0]} is without {ignored[0]}")
    if options.most_stale is not None and options.outer_gbps is None:
        raise UserError("would change nothing", where="--most-stale", allowed="with --outer-gbps")


def _check_used(options: argparse.Namespace, axes: "Sequence[Ways]", model: "ModelSpec") -> None:
    """Raises UserError for an option that is about none of what is tried."""
    from lowband.predict.request import check_used

    along = {"--ways": options.ways != ["all"], "--states": options.states}
    check_used(along | given_on_axes(options, ROUTES), axes)
    if options.states and not model.linear_layers:
        what = f"model '{model.name}' has no linear layers"
        raise UserError(what, where="--states", allowed="models with some, or no --states")


def _placed(options: argparse.Namespace) -> "tuple[Beyond | None, Lora | None]":
    """States beyond the device, and adapters, with which only what is predicted is tried by default."""
    from lowband.cost.tiers import Beyond

    given = options.tier_share, options.tier_stride, options.tier_late
    beyond, adapters = Beyond.of(options.tiers, *given), lora(options)
    elsewhere = plan_others.given(options, "largest", "lengths", "outer_gbps")
    written = plan_others.given(options, "write")  # nothing that is written says a rank of LoRA
    for option, without in (
        ("tiers", elsewhere if beyond is not None else []),
        ("lora-rank", [*elsewhere, *written] if adapters is not None else []),
    ):
        if without:
            raise UserError(f"--{option} is without {without[0]}")
    if options.tier_late:
        for degree in ("pp", "ep"):  # with which our engine has none
            setattr(options, degree, getattr(options, degree) or [1])
    if adapters is not None:
        for degree in ("tp", "pp", "cp", "ep"):
            setattr(options, degree, getattr(options, degree) or [1])
        options.recompute = options.recompute or [each for each in RECOMPUTE if each != "op"]
        options.software = options.software or [ANY]
    return beyond, adapters
