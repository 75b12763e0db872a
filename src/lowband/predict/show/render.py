"""A prediction as a record for JSON and CSV, and as text that lets a reader check every term."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from lowband.cost.bytes import stage_numels, transfers
from lowband.predict.context import context_sent
from lowband.predict.defaults import constants
from lowband.predict.experts import experts_sent
from lowband.predict.footprint import GIB
from lowband.predict.prediction import Prediction
from lowband.predict.room import room_of
from lowband.predict.workload import Workload
from lowband.spec.axes import SHORT, shown
from lowband.spec.machine import TierName
from lowband.spec.sourced import DEFAULT, Kind
from lowband.spec.tiers import at

SENT = "_sent_bytes"
STATES = ("weights", "secondary", "grads", "optim")
KINDS: tuple[Kind, ...] = ("fitted", "measured or published", "assumed", "default")


def record(job: Workload, prediction: Prediction) -> dict[str, Any]:
    """The prediction as plain numbers. Times in seconds, memory in bytes per rank; zero items are kept."""
    p, room = prediction, room_of(job, prediction)
    axes = vars(job.axes) | job.axes.with_context(job.ranks)
    return {
        "provenance": "predicted",
        "cluster": job.machine.name,
        "stack": job.stack.name,
        "evidence": job.stack.has_evidence,
        "model": job.model.name,
        "parameters": job.model.parameters,
        "scheme": job.scheme.name,
        **{key: getattr(job.scheme, key) for key in STATES},
        "optim": at(job.scheme.optim, job.scheme.optim_tier),
        "gpus": job.ranks,
        **{short: axes[name] for name, short in SHORT.items()},
        "schedule": job.axes.schedule,
        **({"layers": shown(job.axes.layers)} if job.axes.layers else {}),
        "micro_batch": job.micro_batch,
        "accumulation": job.accumulation,
        "seq_len": job.seq_len,
        "recompute": job.recompute,
        **({} if job.recomputed == 1 else {"recomputed": job.recomputed}),
        "attention": job.stack.attention,
        "products": job.stack.products,
        "optimizer": job.stack.optimizer,
        "dropout": job.stack.dropout,
        "sequence_parallel": job.axes.sequence_parallel,
        "reduce_dtype": job.stack.reduce_dtype,
        "step_time_s": float(p.step_time_s),
        "tflops_per_gpu": float(p.tflops_per_gpu),
        "hfu_tflops_per_gpu": float(p.hfu_tflops_per_gpu),
        "tokens_per_s_per_gpu": float(p.tokens_per_s_per_gpu),
        "time_s": {name: float(value) for name, value in p.time_s.items()},
        "communication_s": {name: float(value) for name, value in p.communication_s.items()},
        "memory_bytes": {name: round(float(value)) for name, value in p.memory_bytes.items()},
        "peak_memory_bytes": round(float(p.peak_memory_bytes)),
        "fits": None if p.fits is None else bool(p.fits),
        "short_by_bytes": round(short_by(job, p)),
        "capacity_bytes": None if room is None else round(room.capacity),
        "runtime_bytes": round(float(p.memory_bytes["framework"])),
        "headroom_bytes": None if room is None else round(room.headroom),
        "interval": {
            "step_time_s": [float(p.step_time_fast_s), float(p.step_time_slow_s)],
            "tflops_per_gpu": [
                float(p.tflops_per_gpu * p.step_time_s / t) for t in (p.step_time_slow_s, p.step_time_fast_s)
            ],
            "headroom_bytes": None if room is None else [round(room.low), round(room.high)],
        },
        "constants": {
            path: {**fact.model_dump(include={"value", "low", "high", "source"}), "kind": fact.kind}
            for path, fact in constants(job.machine, job.stack).items()
        },
        **_context(job),
        **_experts(job),
        **_sync(job),
        **_tiers(job, prediction),
    }


def _tiers(job: Workload, prediction: Prediction) -> dict[str, Any]:
    """Of states beyond the device: which, and a node's bytes in each tier; nothing if all are on it."""
    if (beyond := job.placed) is None:
        return {}
    tiers = {
        f"{tier}_{name}_bytes": round(float(size))
        for tier, held in prediction.tier_bytes.items()
        for name, size in (("node", held), ("capacity", job.machine.tier(tier).capacity_gib * GIB))
    }
    return {"tiers": vars(beyond) | tiers}


def _context(job: Workload) -> dict[str, Any]:
    """Of ranks along context: how many, how they attend, and what each sends there in a step, in the mean, by
    level; nothing on one."""
    if job.axes.context == 1:
        return {}
    of = {"cp": job.axes.context, "ways": job.axes.attends, "zigzag": job.axes.zigzag}
    return {"context": of | _by_level(context_sent(job))}


def _experts(job: Workload) -> dict[str, Any]:
    """Of ranks that divide experts: how many, how tokens travel, and what each sends to and fro in a step, in
    the mean, by level; nothing on one."""
    if job.axes.expert == 1:
        return {}
    of = {"ep": job.axes.expert, "route": job.axes.route, "imbalance": job.imbalance}
    if job.axes.copies:
        of |= {"copies": job.axes.copies, "load": job.load}
    return {"experts": of | _by_level(experts_sent(job))}


def _by_level(found: Mapping[tuple[str, str, str], float]) -> dict[str, float]:
    sent: defaultdict[str, float] = defaultdict(float)
    for (level, _, _), count in found.items():
        sent[level] += count
    return {f"{level}{SENT}": count for level, count in sent.items()}


def _sync(job: Workload) -> dict[str, Any]:
    """Of replicas that meet seldom: what a rank sends in one period, and of it in the exchange of the largest
    fragment; nothing of other schemes."""
    scheme, levels = job.scheme, job.levels
    if (sync := scheme.sync) is None:
        return {}
    by_fragment = [0] * sync.fragments
    for i, numel in enumerate(stage_numels(job.model, levels, job.axes)):
        parts = transfers(numel, i == 0, scheme, levels, "bf16", "bf16")
        sent = sum(part.sent_bytes for part in parts if part.collective.every == "sync")
        by_fragment[sync.fragment_of(i)] += sent
    return {
        "sync": {
            "replica_ranks": levels.size(sync.beyond),
            "every": sync.every,
            "fragments": sync.fragments,
            "delay": sync.delay,
            "sent_bytes": sum(by_fragment),
            "most_at_once_bytes": max(by_fragment),
        }
    }


def short_by(job: Workload, prediction: Prediction) -> float:
    """Bytes by which the device's memory is too small; 0 if it suffices."""
    memory_gib = job.machine.device.memory_gib
    return 0.0 if memory_gib is None else max(0.0, float(prediction.peak_memory_bytes) - memory_gib * GIB)


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """The record with each item in its own column, for a table."""
    columns: dict[str, Any] = {}
    for key, value in row.items():
        if key == "interval":
            columns["step_time_fast_s"], columns["step_time_slow_s"] = value["step_time_s"]
            room = value["headroom_bytes"] or (None, None)
            columns["headroom_low_bytes"], columns["headroom_high_bytes"] = room
        elif key == "constants":
            columns |= {f"constants.{kind}": " ".join(_named(value, kind)) for kind in KINDS}
        elif isinstance(value, dict):
            columns |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            columns[key] = value
    return columns


def text(row: dict[str, Any]) -> str:
    """One point as text for a terminal."""
    fast, slow = row["interval"]["step_time_s"]
    step, secondary = row["step_time_s"], f"/{row['secondary']}" if row["secondary"] else ""
    lines = [
        *([_does_not_fit(row)] if row["fits"] is False else []),
        *_no_evidence(row),
        f"predicted: {row['model']} under {row['scheme']} on {row['gpus']} ranks of {row['cluster']}, "
        f"stack {row['stack']}",
        f"weights {row['weights']}{secondary}, grads {row['grads']}, optim {row['optim']}",
        f"tp {row['tp']}, pp {row['pp']} x {row['interleave']}, {row['schedule']}, dp {row['dp']}"
        + (f", layers {row['layers']}" if "layers" in row else ""),
        f"micro-batch {row['micro_batch']}, accumulation {row['accumulation']}, sequence {row['seq_len']}, "
        f"recompute {row['recompute']}{_recomputed(row)}",
        f"products in {row['products']}, attention {row['attention']}, {'with' if row['dropout'] else 'no'} "
        f"dropout, {row['optimizer']}, gradients reduced in {row['reduce_dtype']}"
        + (", tokens divided along tp" if row["sequence_parallel"] else ""),
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


def _no_evidence(row: dict[str, Any]) -> list[str]:
    """The first line of what stands on no run of the stack on the machine."""
    if row["evidence"]:
        return []
    what = f"no evidence on this machine: no run of {row['stack']} on {row['cluster']} is known"
    return [f"lower bound, {what}; a step takes this long or longer"]


def _recomputed(row: dict[str, Any]) -> str:
    return f" of {100 * row['recomputed']:.3g} % of the layers" if "recomputed" in row else ""


def _does_not_fit(row: dict[str, Any]) -> str:
    """The first line on a job that does not fit: its times are of no job that can run there."""
    if not row["short_by_bytes"]:
        return f"does not fit beyond the device: {_rooms(row['tiers'])}; times below are as if it did"
    low, high = (-end / GIB for end in row["interval"]["headroom_bytes"])
    return (
        f"does not fit: {row['short_by_bytes'] / GIB:.3g} GiB ({high:.3g} to {low:.3g}) short of the "
        f"{row['capacity_bytes'] / GIB:g} GiB of a rank; times below are as if it did"
    )


def _of_node(of: dict[str, Any]) -> str:
    """What a node holds beyond its devices."""
    states = [f"{state}@{of[state]}" for state in ("optim", "weights") if of[state] is not None]
    parts = f", share {of['share']:g}" if of["share"] < 1 else ""
    parts += f", of {of['stride']} subgroups one is updated on the device" if of["stride"] else ""
    return f"  beyond the device {', '.join(states)}{parts}; of a node: {_rooms(of)}"


def _rooms(of: dict[str, Any]) -> str:
    """What a node holds in each tier, and may."""
    found = []
    for tier in get_args(TierName):
        if f"{tier}_node_bytes" in of:
            held, room = of[f"{tier}_node_bytes"] / GIB, of[f"{tier}_capacity_bytes"] / GIB
            found.append(f"{tier} {held:.4g} of {room:.4g} GiB" + ("" if held <= room else ": does not fit"))
    return ", ".join(found)


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


# Heading -> the cell of a record, for a table of several.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda row: str(row["model"]),
    "scheme": lambda row: str(row["scheme"]),
    "gpus": lambda row: str(row["gpus"]),
    "batch": lambda row: f"{row['micro_batch']} x {row['accumulation']}",
    "seq": lambda row: str(row["seq_len"]),
    "recompute": lambda row: str(row["recompute"]),
    "cp": lambda row: str(_cp(row)),
    "ways": lambda row: row["context"]["ways"] if "context" in row else "",
    "ep": lambda row: str(row["experts"]["ep"]) if "experts" in row else "1",
    "route": lambda row: row["experts"]["route"] if "experts" in row else "",
    "copies": lambda row: str(row["experts"].get("copies", 0)) if "experts" in row else "",
    "step (s)": lambda row: f"{row['step_time_s']:.4g}",
    "interval": lambda row: "{:.4g} to {:.4g}".format(*row["interval"]["step_time_s"]),
    "tokens/s/GPU": lambda row: f"{row['tokens_per_s_per_gpu']:.4g}",
    "TFLOPS": lambda row: f"{row['tflops_per_gpu']:.4g}",
    "GiB": lambda row: f"{row['peak_memory_bytes'] / GIB:.4g}",
    "headroom": lambda row: "?" if row["fits"] is None else f"{row['headroom_bytes'] / GIB:.3g} {fits(row)}",
}


_OF_A_JOB = ("model", "scheme", "gpus", "batch", "seq", "recompute", "cp", "ep", "route", "copies")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Several points of one machine and stack as a table, one line each, and what they stand on."""
    first = rows[0]
    capacity = "" if first["capacity_bytes"] is None else f", {first['capacity_bytes'] / GIB:g} GiB a rank"
    left_out = _left_out(rows)
    cells = [
        [heading, *(cell(row) for row in rows)]
        for heading, cell in _COLUMNS.items() if heading not in left_out
    ]  # fmt: skip
    title = f"predicted on {first['cluster']}, stack {first['stack']}{capacity}"
    short = sum(row["fits"] is False for row in rows)
    title += f"; {short} of {len(rows)} do not fit" if short else ""
    title = "\n".join([*_no_evidence(first), title])
    return "\n".join([title, "", *aligned(cells), "", *_best_ways(rows), *constant_lines(first["constants"])])


def _left_out(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Columns of axes along which no ranks lie in any row."""
    columns = {"context": ("cp", "ways"), "experts": ("ep", "route")}
    left_out = [
        name for key, names in columns.items() if not any(key in row for row in rows) for name in names
    ]
    return left_out if any("copies" in row.get("experts", {}) for row in rows) else [*left_out, "copies"]


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Columns, headings first, as lines."""
    widths = [max(map(len, column)) for column in cells]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*cells, strict=True)
    ]


def _cp(row: dict[str, Any]) -> int:
    return int(row["context"]["cp"]) if "context" in row else 1


def _best_ways(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The fastest way along context of each job that is predicted in several, of those that fit if any does,
    and by how much the next is slower; no lines if there are none."""
    names = [name for name in _COLUMNS if name in _OF_A_JOB and name not in _left_out(rows)]
    jobs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        jobs.setdefault(tuple(_COLUMNS[name](row) for name in names), []).append(row)
    lines = []
    for job, found in jobs.items():
        if len(found) < 2 or any("context" not in row for row in found):
            continue
        best, second = sorted(found, key=lambda row: (row["fits"] is False, row["step_time_s"]))[:2]
        slower = f"{100 * (second['step_time_s'] / best['step_time_s'] - 1):+.1f} %"
        room = " (does not fit)" if second["fits"] is False else ""
        ways = [row["context"]["ways"] for row in (best, second)]
        lines.append([*job, ways[0], f"{best['step_time_s']:.4g}", f"{ways[1]} {slower}{room}"])
    if not lines:
        return []
    columns = zip([*names, "best way", "step (s)", "next"], *lines, strict=True)
    return [*aligned([list(column) for column in columns]), ""]


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
        return f"{between} does not fit: {row['short_by_bytes'] / GIB:.3g} GiB short"
    return f"{between} fits" if low >= 0 else f"{between} fits only if the runtime takes less than it may"


def constant_lines(found: dict[str, Any]) -> list[str]:
    """What the prediction stands on: names by kind, and each default with its interval and reason."""
    named = {kind: _named(found, kind) for kind in KINDS}
    lines = [f"{kind}: {', '.join(names)}" for kind, names in named.items() if names and kind != "default"]
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


def _named(found: dict[str, Any], kind: Kind) -> list[str]:
    return [path for path, one in found.items() if one["kind"] == kind]


def _items(title: str, items: dict[str, tuple[float, str]]) -> list[str]:
    return [title, *(f"  {name:24}{value:12.4g}  {more}" for name, (value, more) in items.items() if value)]
