"""The ratios of throughputs that a suite's runs will give, predicted, each beside the number of its claim.

A ratio is of two runs on the same machine, so every constant is taken at the same end of its interval for
both; it is predicted with the links as published, and with the shares of them that the machine's own stack is
known to reach. Its interval spans both, with all constants as stated, at their slow ends and at their fast
ends. Where the wanted number is outside, a measurement's result is foreseen: its node-hours decide nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowband.cost.collectives import Case
from lowband.errors import UserError
from lowband.predict.defaults import with_defaults
from lowband.predict.time import step_time
from lowband.predict.workload import Workload, workload_of
from lowband.spec.columns import aligned
from lowband.spec.peers import PEER_NAMES
from lowband.spec.run import RunSpec
from lowband.spec.stack import Stack
from lowband.spec.suites import Decides

WITHIN = 0.05  # of the wanted number: a measured ratio as near as this meets it
CASES: tuple[Case, ...] = ("value", "slow", "fast")
_OF_CONDITION = ("accumulation", "collectives", "overlap", "order")


@dataclass(frozen=True)
class Wanted:
    """A claim's number, and the ratio that it is about.

    is_one_sided: whether any ratio on one side of the number meets it
    """

    claim: str
    number: float
    of: Decides
    is_one_sided: bool = False

    @property
    def meets(self) -> tuple[float, float]:
        """Of a ratio that is surely below the first or above the second the outcome is foreseen."""
        within = 0 if self.is_one_sided else WITHIN
        return self.number * (1 - within), self.number * (1 + within)


@dataclass(frozen=True)
class Ratio:
    """One cell: a ratio under one condition.

    over:       the scheme, engine or ranks that the throughput is divided by
    published, attained: predicted with links as published, and with the machine's stack's shares of them
    low, high:  the interval around both
    node_hours: predicted, of the steps of both runs, once, with links as published; slow_node_hours: with the
                shares
    foreseen:   below or above, where the wanted number is outside the interval; "" where the cell can decide
    """

    claim: str
    wanted: float
    scheme: str
    engine: str
    ranks: int
    over: str
    accumulation: int
    collectives: str
    overlap: bool
    order: str
    published: float
    attained: float
    low: float
    high: float
    node_hours: float
    slow_node_hours: float
    foreseen: str


def job_of(spec: RunSpec, stacks: Mapping[str, Stack], own: Stack, is_attained: bool) -> Workload:
    """The run as it is predicted.

    stacks: of peers, by engine; own: the machine's, whose shares of links are taken if is_attained
    """
    job = workload_of(spec)
    shares = own.efficiency if is_attained else {}
    if spec.engine == "lowband":
        stack = job.stack.model_copy(update={"efficiency": shares})
    else:
        stack = stacks[spec.engine].model_copy(update={"efficiency": shares})
        job = replace(job, collectives=None)
    machine, stack = with_defaults(job.machine, stack)
    return replace(job, machine=machine, stack=stack)


def ratios(
    specs: Sequence[RunSpec], wanted: Sequence[Wanted], stacks: Mapping[str, Stack], own: Stack
) -> list[Ratio]:
    """A row per claim and condition. Raises UserError for a claim that no two runs of the suite are about."""
    points = [spec for spec in specs if spec.repeat == 1 and spec.engine in ("lowband", *stacks)]
    found: list[Ratio] = []
    for want in wanted:
        pairs = list(_pairs(points, want.of))
        if not pairs:
            of = want.of.model_dump(exclude_none=True)
            raise UserError(f"no two runs give {of}", where=f"{specs[0].suite}: decides: {want.claim}")
        found += sorted(
            (_ratio(want, *pair, stacks, own) for pair in pairs), key=lambda row: (row.accumulation, row.over)
        )
    return found


def _pairs(points: Sequence[RunSpec], of: Decides) -> Iterator[tuple[RunSpec, RunSpec]]:
    """Runs, each with those that it is compared with: equal but for the scheme, or for the ranks.

    A scheme that a peer does not run is also compared with the peer's other one, whose collectives, overlap
    and order are its own. One that runs in an order in which the other does not is compared with its order.
    """

    def with_points(scheme: str, ranks: int) -> list[tuple[RunSpec, dict[str, Any]]]:
        return [(spec, spec.point) for spec in points if (spec.scheme.name, spec.ranks) == (scheme, ranks)]

    ones = with_points(of.scheme, of.ranks)
    others = with_points(of.over or of.scheme, of.over_ranks or of.ranks)
    if of.over_engine is not None:
        others = [(spec, point) for spec, point in others if spec.engine == of.over_engine]
    engines = {spec.engine for spec, _ in ones}
    is_one_order = bool({spec.order for spec, _ in ones} & {spec.order for spec, _ in others})
    for one, mine in ones:
        for other, theirs in others:
            free = {"scheme", "ranks"} if is_one_order else {"scheme", "ranks", "order"}
            if other.engine not in engines:
                free |= {"engine", *_OF_CONDITION} - {"accumulation"}
            if all(mine[key] == theirs[key] for key in mine if key not in free):
                yield one, other


def _ratio(want: Wanted, one: RunSpec, other: RunSpec, stacks: Mapping[str, Stack], own: Stack) -> Ratio:
    values: dict[tuple[bool, Case], float] = {}
    hours = {}
    for is_attained in (False, True):
        jobs = [job_of(spec, stacks, own, is_attained) for spec in (one, other)]
        for case in CASES:
            rate, other_rate = (float(job.tokens / job.ranks / step_time(job, case).total) for job in jobs)
            values[is_attained, case] = rate / other_rate
        hours[is_attained] = sum(
            _node_hours(spec, float(step_time(job).total))
            for spec, job in zip((one, other), jobs, strict=True)
        )
    low, high = min(values.values()), max(values.values())
    least, most = want.meets
    over = want.of.over or f"{want.of.over_ranks} ranks"
    if one.engine != other.engine:
        over += f" of {PEER_NAMES[other.engine]}"
    return Ratio(
        claim=want.claim,
        wanted=want.number,
        scheme=one.scheme.name,
        engine=one.engine,
        ranks=one.ranks,
        over=over,
        **{key: getattr(one, key) for key in _OF_CONDITION},
        published=values[False, "value"],
        attained=values[True, "value"],
        low=low,
        high=high,
        node_hours=hours[False],
        slow_node_hours=hours[True],
        foreseen="below" if high < least else "above" if low > most else "",
    )


def _node_hours(spec: RunSpec, step_s: float) -> float:
    """Of the steps of one run, without its start and end."""
    return -(-spec.ranks // spec.machine.node_size) * spec.steps * step_s / 3600


def text(rows: Sequence[Ratio]) -> list[str]:
    """A table per claim, line by line, each with the cells that can decide it."""
    lines: list[str] = []
    for claim in dict.fromkeys(row.claim for row in rows):
        cells = [row for row in rows if row.claim == claim]
        lines += ["", *_table(cells), "", _verdict(cells)]
    return lines


def _table(cells: Sequence[Ratio]) -> list[str]:
    first = cells[0]
    head = ["passes", "engine", "over", "published", "attained", "interval", "wanted", "node-h", "decides"]
    body = [
        [
            f"{row.accumulation}", condition(row), row.over, f"{row.published:.2f}", f"{row.attained:.2f}",
            f"{row.low:.2f} to {row.high:.2f}", f"{row.wanted:.3f}",
            f"{row.node_hours:.1f} to {row.slow_node_hours:.1f}",
            f"no: foreseen {row.foreseen}" if row.foreseen else "yes",
        ]
        for row in cells
    ]  # fmt: skip
    title = f"{first.scheme} on {first.ranks} ranks, throughput over that of: predicted for {first.claim}"
    return [title, *aligned([head, *body])]


def condition(row: Ratio) -> str:
    """How the run's engine communicates, for a reader; a peer's way is its own."""
    if row.engine != "lowband":
        return PEER_NAMES[row.engine]
    order = ", breadth-first" if row.order == "breadth" else ""
    return f"ours, {row.collectives}, {'overlap' if row.overlap else 'no overlap'}{order}"


def _verdict(cells: Sequence[Ratio]) -> str:
    able = [row for row in cells if not row.foreseen]
    if not able:
        return f"no cell can decide {cells[0].claim}: the outcome of each is foreseen"
    least = min(able, key=lambda row: row.slow_node_hours)
    passes = "1 pass" if least.accumulation == 1 else f"{least.accumulation} passes"
    return (
        f"{len(able)} of {len(cells)} cells can decide {cells[0].claim}; with the fewest node-hours: "
        f"{passes}, {condition(least)}, over {least.over}"
    )


def records(rows: Sequence[Ratio]) -> list[dict[str, Any]]:
    """The rows as plain data, with their provenance."""
    return [{"provenance": "predicted", **asdict(row)} for row in rows]
