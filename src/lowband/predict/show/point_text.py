"""The record of one point as text for a terminal, which lets a reader check every term."""

from typing import Any, get_args

from lowband.cost.numbers import GIB
from lowband.predict.show.record import KINDS, SENT, names_of
from lowband.spec.machine import TierName
from lowband.spec.sourced import DEFAULT


def text(row: dict[str, Any]) -> str:
    """One point as text for a terminal."""
    fast, slow = row["interval"]["step_time_s"]
    step, secondary = row["step_time_s"], f"/{row['secondary']}" if row["secondary"] else ""
    lines = [
        *([_does_not_fit(row)] if row["fits"] is False else []),
        *no_evidence(row),
        f"predicted: {row['model']} under {row['scheme']} on {row['gpus']} ranks of {row['cluster']}, "
        f"stack {row['stack']}",
        f"weights {row['weights']}{secondary}, grads {row['grads']}, optim {row['optim']}",
        f"tp {row['tp']}, pp {row['pp']} x {row['interleave']}, {row['schedule']}, dp {row['dp']}"
        + (f", layers {row['layers']}" if "layers" in row else ""),
        f"micro-batch {row['micro_batch']}, accumulation {row['accumulation']}, sequence {row['seq_len']}, "
        f"recompute {row['recompute']}{recomputed(row)}",
        f"products in {row['products']}, attention {row['attention']}, operations {row['operations']}, "
        + (f"{row['gated_kept']} vectors of a gated MLP kept, " if "gated_kept" in row else "")
        + f"{'with' if row['dropout'] else 'no'} dropout, {row['optimizer']}, "
        f"gradients reduced in {row['reduce_dtype']}"
        + (", tokens divided along tp" if row["sequence_parallel"] else ""),
        *([_adapters(row["lora"])] if "lora" in row else []),
        *([_along_context(row["context"])] if "context" in row else []),
        *([_to_experts(row["experts"])] if "experts" in row else []),
        *([_meeting(row["sync"])] if "sync" in row else []),
        "",
        f"step {step:.4g} s ({fast:.4g} to {slow:.4g}), {row['tokens_per_s_per_gpu']:.4g} tokens/s per rank, "
        f"{row['tflops_per_gpu']:.4g} TFLOPS per rank ({row['hfu_tflops_per_gpu']:.4g} with recomputation)",
        "",
        *_items("seconds", {name: (t, f"{100 * t / step:5.1f} %") for name, t in row["time_s"].items()}),
        "",
        *_items(
            "in the lane, hidden or not, seconds",
            {name: (t, "") for name, t in row["communication_s"].items()},
        ),
        "",
        *_memory(row),
        *([_of_node(row["tiers"])] if "tiers" in row else []),
        "",
        *constant_lines(row["constants"]),
    ]
    return "\n".join(line.rstrip() for line in lines)


def no_evidence(row: dict[str, Any]) -> list[str]:
    """The first line where no run of the stack on the machine is known: intervals are of constants alone."""
    if row["evidence"]:
        return []
    what = f"no evidence on this machine: no run of {row['stack']} on {row['cluster']} is known"
    return [f"lower bound, {what}: what only a run shows makes a step longer"]


def recomputed(row: dict[str, Any]) -> str:
    """Of which layers, where not of all."""
    return f" of {100 * row['recomputed']:.3g} % of the layers" if "recomputed" in row else ""


def _does_not_fit(row: dict[str, Any]) -> str:
    """The first line on a job that does not fit: its times are of no job that can run there."""
    if not row["short_by_bytes"]:
        return f"does not fit beyond the device: {_rooms(row['tiers'])}; times below are as if it did"
    most, least = (-end / GIB for end in row["interval"]["headroom_bytes"])
    return (
        f"does not fit: {row['short_by_bytes'] / GIB:.3g} GiB ({least:.3g} to {most:.3g}) short of the "
        f"{row['capacity_bytes'] / GIB:g} GiB of a rank{_perhaps(row)}; times below are as if it did"
    )


def _perhaps(row: dict[str, Any]) -> str:
    """Said of a job that is predicted not to fit, if at the lower end of the interval it would."""
    return ", within the error of predicted memory" if row["interval"]["headroom_bytes"][1] >= 0 else ""


def _of_node(of: dict[str, Any]) -> str:
    """What a node holds beyond its devices."""
    names = ("optim", "weights", "activations")
    states = [f"{name}@{of[name]}" for name in names if of.get(name) is not None]
    parts = f", share {of['share']:g}" if of["share"] < 1 else ""
    parts += f", of {of['stride']} subgroups one is updated on the device" if of["stride"] else ""
    parts += ", the update one step late" if "late" in of else ""
    return f"  beyond the device {', '.join(states)}{parts}; of a node: {_rooms(of)}"


def _rooms(of: dict[str, Any]) -> str:
    """What a node holds in each tier, and may."""
    found = []
    for tier in get_args(TierName):
        if f"{tier}_node_bytes" in of:
            held, room = of[f"{tier}_node_bytes"] / GIB, of[f"{tier}_capacity_bytes"] / GIB
            found.append(f"{tier} {held:.4g} of {room:.4g} GiB" + ("" if held <= room else ": does not fit"))
    return ", ".join(found)


def _adapters(of: dict[str, Any]) -> str:
    return f"adapters of rank {of['rank']} on {of['on']}: {of['parameters']:,} parameters, all else is frozen"


def _along_context(of: dict[str, Any]) -> str:
    order = "zigzag" if of["zigzag"] else "contiguous"
    return f"cp {of['cp']}, {of['ways']}, {order}: a rank sends {_sends(of)} a step"


def _to_experts(of: dict[str, Any]) -> str:
    load = "" if of["imbalance"] == 1 else f", the fullest rank {of['imbalance']:g} times the mean"
    if "copies" in of:
        load += f", {of['load']:.3g} times with copies of {of['copies']}"
    return f"ep {of['ep']}, {of['route']}{load}: a rank sends {_sends(of)} a step"


def _sends(of: dict[str, Any]) -> str:
    sent = [(key, count) for key, count in of.items() if key.endswith(SENT)]
    return ", ".join(f"{count / GIB:.4g} GiB over {key.removesuffix(SENT)}" for key, count in sent)


def _meeting(sync: dict[str, int]) -> str:
    parts = f", in {sync['fragments']} fragments in turn" if sync["fragments"] > 1 else ""
    late = f", which arrive {sync['delay']} step(s) later" if sync["delay"] else ""
    return (
        f"replicas of {sync['replica_ranks']} ranks exchange weights every {sync['every']} steps{parts}"
        f"{late}, {sync['sent_bytes'] / GIB:.4g} GiB per rank; seconds are the mean over that period"
    )


def _memory(row: dict[str, Any]) -> list[str]:
    """Items, what of them is held at once, the runtime, and the room that is left."""
    items = {name: (b / GIB, "") for name, b in row["memory_bytes"].items() if name != "framework"}
    held = row["peak_memory_bytes"] - row["runtime_bytes"]
    summary = {
        "held at once": (held / GIB, ""),
        "runtime": (row["runtime_bytes"] / GIB, "the device's context, collectives' buffers, fragmentation"),
        "capacity": ((row["capacity_bytes"] or 0) / GIB, ""),
    }
    lines = [*_items("GiB per rank", items), *_items("", summary)[1:]]
    if row["fits"] is None:
        return [*lines, "  headroom: the device's memory is not known"]
    return [*lines, f"  {'headroom':24}{row['headroom_bytes'] / GIB:12.4g}  {fits(row)}"]


def fits(row: dict[str, Any]) -> str:
    """Whether the record's job fits, as words, with the interval of its headroom."""
    low, high = (end / GIB for end in row["interval"]["headroom_bytes"])
    between = f"({low:.3g} to {high:.3g})"
    if row["short_by_bytes"]:
        return f"{between} does not fit: {row['short_by_bytes'] / GIB:.3g} GiB short{_perhaps(row)}"
    if row["fits"] is False:
        return f"{between} fits, but its tiers are too small"
    return f"{between} fits" if low >= 0 else f"{between} fits, but not surely: short at the low end"


def constant_lines(found: dict[str, Any]) -> list[str]:
    """What the prediction stands on: names by kind, and each default with its interval and reason."""
    named = {kind: names_of(found, kind) for kind in KINDS}
    of_runs = dict[str, list[str]]()  # a machine's constants are of the stack that ran there
    for name in named["fitted"]:
        of_runs.setdefault(f"fitted, on rows of {', '.join(found[name]['fitted_on'])}", []).append(name)
    others = {kind: names for kind, names in named.items() if names and kind not in ("fitted", "default")}
    lines = [f"{title}: {', '.join(names)}" for title, names in (of_runs | others).items()]
    known = ["constants", *(f"  {line}" for line in lines)] if lines else []
    if not named["default"]:
        return known
    defaults = [
        f"  {path} {one['value']:.4g} ({one['low']:.4g} to {one['high']:.4g}): "
        f"{one['source'].removeprefix(DEFAULT + ': ')}"
        for path, one in found.items() if one["kind"] == "default"
    ]  # fmt: skip
    return [
        "constants",
        *(f"  {line}" for line in lines),
        "defaults, as neither file states these",
        *defaults,
    ]


def _items(title: str, items: dict[str, tuple[float, str]]) -> list[str]:
    return [title, *(f"  {name:24}{value:12.4g}  {more}" for name, (value, more) in items.items() if value)]
