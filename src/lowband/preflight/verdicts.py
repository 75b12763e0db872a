"""From what the ranks measured to findings with a verdict: pure functions, a test for each fault."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from lowband.cost.numbers import GIB
from lowband.engine.transport.hosts import check_hosts
from lowband.errors import UserError
from lowband.preflight.facts import RankFacts
from lowband.preflight.links import LevelRate, PairRate
from lowband.preflight.probes import FILE_BYTES, Clock, Files
from lowband.spec.machine import Storage
from lowband.spec.mesh import Levels

SLOW = 0.8  # share of the expected rate below which a link or a file system is wrong
MOST_SKEW_S = 1.0  # make-like tools compare times of files to the second

Verdict = Literal["ok", "wrong", "not checked"]


class Finding(NamedTuple):
    """One line of the result. found, expected: with units, for a reader."""

    check: str
    found: str
    expected: str
    verdict: Verdict


def placement(hosts: Sequence[str], levels: Levels) -> Finding:
    """Whether ranks fill host after host."""
    found = f"{len(hosts)} ranks on {len(set(hosts))} {'host' if len(set(hosts)) == 1 else 'hosts'}"
    try:
        check_hosts(hosts, levels)
    except UserError as error:
        return Finding("placement", error.what, error.allowed, "wrong")
    return Finding("placement", found, "host after host", "ok")


def versions(facts: Sequence[RankFacts]) -> list[Finding]:
    """Which ranks run other software than most."""
    findings = []
    for what in facts[0].versions:
        counts = Counter(fact.versions.get(what, "missing") for fact in facts)
        usual = counts.most_common(1)[0][0]
        for version in sorted(set(counts) - {usual}):
            where = _places(
                facts, [r for r, fact in enumerate(facts) if fact.versions.get(what, "missing") == version]
            )
            findings.append(
                Finding("versions", f"{what} {version} on {where}", f"{usual} everywhere", "wrong")
            )
    same = ", ".join(f"{what} {facts[0].versions[what]}" for what in ("torch", "lowband's source"))
    return findings or [Finding("versions", f"the same on every rank: {same}", "the same", "ok")]


def devices(
    facts: Sequence[RankFacts], stated_gib: float | None, needed_bytes: float | None
) -> list[Finding]:
    """Whether each rank has a device of its own, of the stated size, with the memory that the run needs.

    stated_gib: of the machine file; needed_bytes: the run's predicted peak; none: unknown
    """
    findings = []
    shared = [name for name, count in Counter(fact.device_id for fact in facts).items() if count > 1]
    for name in shared:
        where = _places(facts, [rank for rank, fact in enumerate(facts) if fact.device_id == name])
        findings.append(Finding("device", f"one device for {where}", "one for each rank", "wrong"))
    if stated_gib is not None:
        small = [r for r, fact in enumerate(facts) if fact.total_bytes < 0.95 * stated_gib * GIB]
        if small:
            total = min(facts[rank].total_bytes for rank in small) / GIB
            text = f"{total:.1f} GiB on {_places(facts, small)}"
            findings.append(Finding("device", text, f"{stated_gib:g} GiB, as in machine.yaml", "wrong"))
    names = " and ".join(sorted({fact.device for fact in facts}))
    findings = findings or [Finding("device", f"{names}, one for each rank", "visible, as stated", "ok")]
    least = min(fact.free_bytes for fact in facts)
    if needed_bytes is None:
        text = f"{_size(least)} free for a rank"
        return [*findings, Finding("memory", text, "no prediction for this engine", "not checked")]
    needed = f"{_size(needed_bytes)}, the run's predicted peak"
    short = [rank for rank, fact in enumerate(facts) if fact.free_bytes < needed_bytes]
    if short:
        text = f"{_size(least)} free on {_places(facts, short)}"
        return [*findings, Finding("memory", text, needed, "wrong")]
    return [*findings, Finding("memory", f"{_size(least)} free for a rank", needed, "ok")]


def link(
    rates: Sequence[LevelRate],
    expected: float | None,
    facts: Sequence[RankFacts],
    pairs: Sequence[Sequence[PairRate]] = (),
) -> Finding:
    """One level's links. rates: of each rank; pairs: likewise, measured only if the level is slow."""
    level, slowest = rates[0].level, min(rate.bytes_per_s for rate in rates)
    text = f"{_rate(slowest)} a rank"
    if expected is None:
        return Finding(f"links of {level}", text, "no rate is stated", "not checked")
    wanted = f"{_rate(expected)}"
    if not is_slow(rates, expected):
        return Finding(f"links of {level}", text, wanted, "ok")
    slow = [
        rank
        for rank, mine in enumerate(pairs)
        if len(mine) > 1 and all(pair.bytes_per_s < SLOW * expected for pair in mine)
    ]
    if not slow:  # groups of two, or every link
        slow = [rank for rank, rate in enumerate(rates) if rate.bytes_per_s < SLOW * expected]
    return Finding(f"links of {level}", f"{text}; slow: {_places(facts, slow)}", wanted, "wrong")


def is_slow(rates: Sequence[LevelRate], expected: float) -> bool:
    return min(rate.bytes_per_s for rate in rates) < SLOW * expected


def clock(found: Sequence[Clock]) -> Finding:
    """Whether the hosts' clocks agree."""
    if not found:
        return Finding("clocks", "one host", "", "not checked")
    off = [one for one in found if abs(one.ahead_s) - one.within_s > MOST_SKEW_S]
    expected = f"within {MOST_SKEW_S:g} s"
    if off:
        text = ", ".join(f"{one.host} is {one.ahead_s:+.3g} s" for one in off)
        return Finding("clocks", f"{text} from rank 0's host", expected, "wrong")
    most = max(abs(one.ahead_s) + one.within_s for one in found)
    return Finding("clocks", f"{len(found) + 1} hosts within {most:.2g} s", expected, "ok")


def file_system(
    files: Sequence[Files], facts: Sequence[RankFacts], storage: Storage | None, is_alone: bool
) -> Finding:
    """Whether all ranks can write, see each other's files, and write as fast as stated."""
    failed = [rank for rank, mine in enumerate(files) if mine.error]
    if failed:
        first = failed[0]
        text = f"rank {first} on {facts[first].host} {files[first].error}"
        if len(failed) > 1:
            involved = [{facts[rank].host, facts[files[rank].of_rank].host} for rank in failed]
            common = ", ".join(sorted(set.intersection(*involved)))
            text += f"; {len(failed) - 1} ranks more" + (f"; all involve {common}" if common else "")
        return Finding("file system", text, "one folder for all", "wrong")
    nodes = len({fact.host for fact in facts})
    written, read = (
        len(files) * FILE_BYTES / max(took) / nodes
        for took in ([one.write_s for one in files], [one.read_s for one in files])
    )
    text = f"{_rate(written)} a node written, {_rate(read)} read"
    if storage is None or is_alone:
        return Finding("file system", text, "no rate is stated", "not checked")
    node = storage.node_gigabytes_per_s
    least = 1e9 * min(node.at("low"), storage.write_gigabytes_per_s.at("low") / nodes)
    verdict: Verdict = "ok" if written >= SLOW * least else "wrong"
    return Finding("file system", text, f"{_rate(least)} a node", verdict)


def table(findings: Sequence[Finding]) -> str:
    """The findings for a terminal; what is wrong stands first."""
    order = {"wrong": 0, "not checked": 2, "ok": 1}
    rows = sorted(findings, key=lambda finding: order[finding.verdict])
    widths = [max(len(row[i]) for row in rows) for i in (3, 0)]
    lines = [
        f"{row.verdict:{widths[0]}}  {row.check:{widths[1]}}  {row.found}"
        + (f"  (expected: {row.expected})" if row.expected else "")
        for row in rows
    ]
    wrong = sum(row.verdict == "wrong" for row in rows)
    return "\n".join([*lines, "", "preflight: " + (f"{wrong} wrong" if wrong else "nothing wrong was found")])


def _places(facts: Sequence[RankFacts], ranks: Sequence[int]) -> str:
    """Ranks for a reader, by host: at most four hosts are named."""
    hosts: Mapping[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(facts[rank].host, []).append(rank)  # type: ignore[attr-defined]
    named = [f"{host} (rank {', '.join(map(str, of))})" for host, of in list(hosts.items())[:4]]
    more = [f"and {len(hosts) - 4} hosts more"] if len(hosts) > 4 else []
    return ", ".join([*named, *more])


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _rate(bytes_per_s: float) -> str:
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"
