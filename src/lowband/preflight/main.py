"""`lowband preflight`: the ranks of a run meet, measure, and rank 0 reports what is wrong."""

import json
import multiprocessing
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowband.box.network import SHAPED
from lowband.cost.collectives import Network
from lowband.engine.transport.meeting import Meeting
from lowband.engine.transport.topology import Topology
from lowband.errors import UserError
from lowband.predict.footprint import memory_items, peak_bytes
from lowband.predict.workload import workload_of
from lowband.preflight import TIME_LIMIT_S, verdicts
from lowband.preflight.facts import RankFacts, own_facts
from lowband.preflight.links import level_rate, pair_rates
from lowband.preflight.probes import clocks, write_and_read
from lowband.preflight.verdicts import Finding
from lowband.run.environment import host
from lowband.run.joining import device_type, join_job
from lowband.run.launch import RankFailure, TimeLimit, run_local, run_ranks
from lowband.run.ranks import Rank, from_environment, is_first_process, step_name
from lowband.spec.files import naming, write_whole
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder

RESULT = "preflight.json"  # in the run's folder
LEAVE_S = 3.0  # the first process leaves last: srun kills all others when one ends with an error


def preflight(spec_path: Path, links: str) -> int:
    """Check the machine on which a run is about to start, as the run's own ranks.

    spec_path: of the run; the result is written beside it
    Returns 1 in the first process if something is wrong, else 0.
    Raises UserError, with nothing measured, for a run that has no ranks of its own or cannot start here.
    """
    spec = RunSpec.read_json(spec_path)
    if spec.device == "fake":
        raise UserError("is counted by one process, without ranks", where=spec.run_id)
    # Two minutes are enough: a rank that hangs is named before the job's time is spent.
    spec = spec.model_copy(update={"peer_timeout_s": min(spec.peer_timeout_s, TIME_LIMIT_S // 2)})
    mine = from_environment(spec.ranks)
    on = device_type(spec, is_launched=mine is not None)
    folder = RunFolder(spec_path.parent)
    if is_first_process():
        with suppress(OSError):  # a folder that cannot be written is a finding
            (folder.path / RESULT).unlink(
                missing_ok=True
            )  # an earlier verdict says nothing about these nodes
    wrong = multiprocessing.get_context("fork").Value("i", 0)  # findings, set by rank 0

    def work(rank: Rank) -> None:
        count = _as_rank(rank, spec, folder.path, links, on)
        if rank.rank == 0:
            wrong.value = count

    try:
        if isinstance(mine, Rank):
            work(mine)
        elif mine is None:
            run_local(spec.ranks, work, TIME_LIMIT_S)
        else:
            with naming(folder.path), folder.causes(step_name()) as causes:
                run_ranks(mine, work, TIME_LIMIT_S, causes)
    except RankFailure as failure:
        raise UserError(failure.cause, where="preflight") from None
    except TimeLimit:
        raise UserError(f"took longer than {TIME_LIMIT_S} s", where="preflight") from None
    except (RuntimeError, TimeoutError) as error:  # of torchrun's or srun's rank: a peer is lost or hangs
        raise UserError(str(error).splitlines()[0], where="preflight") from None
    if wrong.value:
        time.sleep(LEAVE_S)
    return int(wrong.value > 0)


def _as_rank(rank: Rank, spec: RunSpec, folder: Path, links: str, on: str) -> int:
    """Measure as one rank; rank 0 reports. Returns the number of findings that are wrong, on every rank."""
    start = time.monotonic()
    device = join_job(rank, spec, links, on)
    meeting = Meeting(spec.peer_timeout_s)
    host_of = meeting.everyone(host())
    facts = meeting.everyone(own_facts(device, rank.rank, host_of.count(host())))
    placed = verdicts.placement(host_of, spec.job_levels)
    findings = [placed, *verdicts.versions(facts), *_devices(spec, facts)]
    if placed.verdict == "ok":
        findings += _links(spec, device, meeting, facts, links)
    else:
        findings.append(Finding("links", "ranks do not fill host after host", "", "not checked"))
    findings.append(verdicts.clock(clocks(host_of, meeting)))
    files = meeting.everyone(write_and_read(folder, host_of, meeting))
    storage = spec.machine.storage if spec.machine.box is None else None
    findings.append(verdicts.file_system(files, facts, storage, is_alone=len(set(host_of)) == 1))
    if rank.rank == 0:
        _report(folder / RESULT, spec, host_of, findings, time.monotonic() - start)
    meeting.everyone(None)  # no rank leaves, which would break connections, before the result is written
    dist.destroy_process_group()
    return sum(finding.verdict == "wrong" for finding in findings)


def _devices(spec: RunSpec, facts: list[RankFacts]) -> list[Finding]:
    needed = None
    if spec.engine == "lowband":
        job = workload_of(spec)
        needed = float(peak_bytes(memory_items(job), job.keeps_grads))
    stated = spec.machine.device.memory_gib if spec.machine.box is None else None
    return verdicts.devices(facts, stated, needed)


def _links(
    spec: RunSpec, device: torch.device, meeting: Meeting, facts: list[RankFacts], links: str
) -> list[Finding]:
    axis = Topology(spec.machine.sizes).along("data")
    expected, findings = expected_rates(spec, links), []
    for hop in axis.levels.hops(SELF, WORLD):
        rate = expected.get(hop.level)
        rates = meeting.everyone(level_rate(axis, hop.level, rate, device, meeting))
        pairs = []
        if rate is not None and verdicts.is_slow(rates, rate):
            pairs = meeting.everyone(pair_rates(axis, hop.level, rate, device, meeting))
        findings.append(verdicts.link(rates, rate, facts, pairs))
    return findings


def expected_rates(spec: RunSpec, links: str) -> Mapping[str, float]:
    """Bytes per second that a rank sends over each level while all send; without levels of unknown rate.

    In a box the scaled rate of its shaped links; else the slow end of what the machine file says is reached.
    """
    known = [level for level in spec.machine.levels if level.link is not None]
    if spec.machine.box is not None:
        if links != SHAPED:
            return {}
        scale = spec.machine.box.scale
        return {level.name: level.link.gigabytes_per_s * 1e9 / scale for level in known if level.link}
    network = Network(spec.machine, "slow", shards=False)
    return {level.name: float(network.rate(level.name)) for level in known}


def _report(result: Path, spec: RunSpec, hosts: list[str], findings: list[Finding], took_s: float) -> None:
    content: dict[str, Any] = {
        "provenance": "measured",
        "run_id": spec.run_id,
        "ok": not any(finding.verdict == "wrong" for finding in findings),
        "ranks": len(hosts),
        "hosts": sorted(set(hosts)),
        "took_s": took_s,
        "findings": [finding._asdict() for finding in findings],
    }
    sys.stdout.write(verdicts.table(findings) + "\n")
    try:
        write_whole(result, json.dumps(content, indent=2) + "\n")
    except OSError as error:  # e.g. the wrong finding itself: a file system that cannot be written
        sys.stdout.write(f"{result} cannot be written: {error.strerror}\n")
    sys.stdout.flush()
