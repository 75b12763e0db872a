"""The blocks of documents that are more than rows of a table: each makes its lines.

Each is a function of the folder of derived tables and of the folder that holds docs/, config/ and results/.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

import pandas as pd
from pydantic import BaseModel

from lowband.cost.softmax import TWO_PASS
from lowband.evidence.claims.claim import Claim, Query, Reported, read_claims
from lowband.evidence.claims.experiments import Experiment, read_experiments
from lowband.evidence.claims.origin import HERE, SHIPPED
from lowband.evidence.claims.rehearsed import suite_ratios
from lowband.evidence.report.badges import badges, contribution_table, one_line
from lowband.evidence.report.claim_views import (
    by_kind,
    by_origin,
    by_paper,
    headlines,
    minutes,
    read_graded,
    tried,
)
from lowband.evidence.report.documents.parallel import (
    parallel_groups,
    parallel_places,
    parallel_rows,
    parallel_stages,
    parallel_tokens,
)
from lowband.evidence.report.findings import findings
from lowband.evidence.report.needs import disk
from lowband.evidence.report.summary import summary
from lowband.evidence.report.writers import filled, markdown
from lowband.evidence.tables.build import read_source
from lowband.spec.batch_script import batch_script
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_table, write_csv
from lowband.spec.job import ACCOUNT, SlurmRequest
from lowband.spec.machine import Device, Level, Link, Machine
from lowband.spec.model import ModelSpec
from lowband.spec.offload import Offload
from lowband.spec.peers import OFF_DEVICE, PEER_NAMES, PEERS, TABLE, Has, Lacks
from lowband.spec.scheme import Scheme
from lowband.spec.softmax import TORCH
from lowband.spec.stack import Stack
from lowband.spec.suites import Point, Suite
from lowband.spec.sync import Sync


def counterparts(_tables: Path, _root: Path) -> list[str]:
    """By placement, and by tier of the states: each peer's options, or why it has none."""
    named = {f"`{form}`" if form != "other" else "all others, as `hier3`": row for form, row in TABLE.items()}
    named |= {f"any, states on the {tier}: besides": row for tier, row in OFF_DEVICE.items()}
    rows = [
        {"placement": name, **{PEER_NAMES[peer]: _counterpart(row[peer]) for peer in PEERS}}
        for name, row in named.items()
    ]
    return markdown(pd.DataFrame(rows))


def _counterpart(cell: Has | Lacks) -> str:
    if not isinstance(cell, Has):
        return f"none: {cell.reason}"
    options = ", ".join(f"`{key}: {value}`" for key, value in cell.arguments.items())
    return options.replace("'", "") or "yes"


def claims(tables: Path, _root: Path) -> list[str]:
    """The claims of papers that were tried, and all that do not simply hold; the others by name."""
    graded = read_graded(tables / "claims.csv")
    holds = (graded["kind"] == "artifact") & (graded["verdict"] == "met")
    shown = tried(graded[~holds]).drop(columns="kind")
    lines = [*markdown(by_paper(graded)), "", *markdown(shown), "", "About this artifact itself, met:", ""]
    for origin, group in by_origin(graded[holds]).items():
        lines.append(f"- {origin} ({len(group)}): {'; '.join(group['short'])}.")
    lines += ["", "Not run, and why:", ""]
    others = graded[graded["verdict"] == "not run"]
    for why, group in others.groupby(others["why"].str.split(";").str[0], sort=False):
        lines.append(f"- {why} ({len(group)}): {'; '.join(group['short'])}.")
    return lines


def verdict(tables: Path, root: Path) -> list[str]:
    """A sentence for each badge of an artifact, then the contributions."""
    graded = read_graded(tables / "claims.csv")
    sentences = [f"- **{badge.name}: {badge.state}**; {badge.reason}." for badge in badges(graded, root)]
    return [*sentences, "", *markdown(contribution_table(graded, root / "config"))]


def badge_line(tables: Path, root: Path) -> list[str]:
    """The badges in one line."""
    return [one_line(read_graded(tables / "claims.csv"), root)]


def headline_claims(tables: Path, root: Path) -> list[str]:
    """The verdicts by kind of claim, then the claims that are marked as headlines."""
    graded = read_graded(tables / "claims.csv")
    names = {claim.id: claim.headline for claim in read_claims(root / "config/claims.yaml") if claim.headline}
    return [*markdown(by_kind(graded)), "", *markdown(headlines(graded, names))]


def reproduced(tables: Path, root: Path) -> list[str]:
    """What `make reproduce` prints of the shipped measurements: how its runs ended, the first of the claims
    that they decide, and where everything is."""
    claims = read_graded(tables / "claims.csv")
    own = (claims["experiment"] == "reproduce") & (claims["origin"] == SHIPPED)
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results" / "local" / "tables"
        results.mkdir(parents=True)
        copyfile(tables / "runs.csv", results / "runs.csv")
        write_csv(claims.assign(origin=claims["origin"].mask(own, HERE)), results / "claims.csv")
        printed = summary(results / "claims.csv", results, Path("figures/local"), root)
    lines = printed.replace(f"{folder}/", "").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("This run"))
    return ["```", lines[0], "...", *lines[start : start + 7], "...", *lines[-4:], "```"]


def found(_tables: Path, root: Path) -> list[str]:
    """The findings, in sentences."""
    return [f"{i}. **{finding.lead}**{finding.rest}" for i, finding in enumerate(findings(root), 1)]


def needs(_tables: Path, root: Path) -> list[str]:
    """Resources of each experiment with shipped runs, as they used them; then a sentence about disk space."""
    config = root / "config"
    rows = [
        {
            "command": f"`{experiment.command}`",
            "machine": experiment.hardware,
            "minutes": minutes(experiment.minutes(config) or 0),
            "memory (GiB, at most)": f"{experiment.memory_gib(config) or 0:.1f}",
        }
        for experiment in read_experiments(config).values()
        if experiment.measured is not None
    ]
    return [*markdown(pd.DataFrame(rows)), "", disk(root)]


_FILES: dict[str, type[BaseModel]] = {
    "`slurm/<cluster>/machine.yaml`": Machine, "its `device`": Device, "one of its `levels`": Level,
    "a `link`": Link, "`slurm/<cluster>/job.yaml`": SlurmRequest, "`config/models.yaml`, an entry": ModelSpec,
    "`config/schemes.yaml`, an entry": Scheme, "its `sync`": Sync, "its `offload`": Offload,
    "`config/suites/<suite>.yaml`": Suite, "its `fixed` and `axes`": Point,
    "`config/stacks/<stack>.yaml`": Stack, "a claims file, an entry": Claim, "its `ours` and `per`": Query,
    "one of its `reported`": Reported, "`config/experiments.yaml`, an entry": Experiment,
}  # fmt: skip


def keys(_tables: Path, _root: Path) -> list[str]:
    """Of each kind of file: the keys that it must have, and those that it may have."""
    rows = []
    for what, model in _FILES.items():
        from_place = {"id"} if model in (Level, Device) else {"id", "name"}  # a file's or an entry's own name
        given = {name: field for name, field in model.model_fields.items() if name not in from_place}
        must = [f"`{name}`" for name, field in given.items() if field.is_required()]
        may = [f"`{name}`" for name, field in given.items() if not field.is_required()]
        rows.append({"": what, "must have": ", ".join(must), "may have": ", ".join(may)})
    return markdown(pd.DataFrame(rows))


_OVER = "{{over_two_pass_{0}:.2f}} ({{over_two_pass_q20_{0}:.2f}} to {{over_two_pass_q80_{0}:.2f}})"
_SOFTMAX = {
    "": "{isa}", "input": "{kib:,.0f} KiB", "regime": "{regime}", "n": "{n:.0f}",
    "two-pass (ns per value)": "{ns:.2f}", "GB/s": "{rate:.1f}", "of limit": "{of_limit:.2f}",
    "recompute / two-pass": _OVER.format("recompute"), "reload / two-pass": _OVER.format("reload"),
    "gain": "{gain_percent:.0f} %", "torch.softmax (ns per value)": "{ns_torch:.2f}",
}  # fmt: skip

_SIZES_KIB = (16, 1024, 32768)  # in the caches; beside these all sizes that lie outside


def softmax(tables: Path, root: Path) -> list[str]:
    """By machine, instruction set and some sizes: two-pass, and the others relative to it."""
    table = read_table(tables / "softmax.csv")
    setup = read_source("softmax_setup", root / "results/reference/softmax", root)
    table["ns"] = 1e9 * table["time_s"] / table["elements"]
    table = table.assign(kib=table["array_bytes"] / 2**10, rate=table["bytes_per_s"] / 1e9)
    lines = []
    measured = table[(table["provenance"] == "measured") & (table["status"] == "ok")]
    for cluster, rows in measured.groupby("cluster"):
        made = setup[setup["cluster"] == cluster].iloc[0]
        title = f"{made['device']}, {made['compiler']}, commit {made['commit'][:7]}."
        at_size = rows[rows["algorithm"] == TWO_PASS]
        for name in ("recompute", "reload"):
            others = rows[rows["algorithm"] == f"three-pass {name}"]
            at_size = at_size.merge(others, on=["isa", "elements"], suffixes=("", f"_{name}"))
        torch = rows[rows["algorithm"] == TORCH]
        at_size = at_size.merge(torch, on="elements", suffixes=("", "_torch"))
        shown = at_size[at_size["kib"].isin(_SIZES_KIB) | (at_size["regime"] == "out of cache")]
        lines += [title, "", *markdown(filled(shown, _SOFTMAX)), ""]
    return lines[:-1]


def suites(_tables: Path, root: Path) -> list[str]:
    """Of each suite of config/suites/: what it requests from Slurm, at most for a run, and in all."""
    config = Config(root)
    return markdown(pd.DataFrame([_suite(config, suite) for suite in config.suites]).fillna("-"))


def _suite(config: Config, suite: str) -> dict[str, str]:
    specs = config.runs([suite])
    cluster = specs[0].machine.name
    row = {
        "suite": f"`{suite}`", "cluster": f"`{cluster}`", "runs": f"{len(specs)}",
        "ranks": f"{max(spec.ranks for spec in specs):,}",
    }  # fmt: skip
    if not config.has_slurm(cluster):
        return row
    job = config.job(cluster)
    asked = pd.DataFrame(job.resources(spec) for spec in specs)[["nodes", "runtime"]].astype(int)
    tasks = asked["nodes"] * [job.tasks_per_node(spec) for spec in specs]
    return {
        **row,
        "nodes of a run": f"{asked['nodes'].max()}",
        "tasks of a run": f"{tasks.max()}",
        "minutes of a run": f"{asked['runtime'].max()}",
        "hours of all runs": f"{asked['runtime'].sum() / 60:.1f}",
        "node-hours of all runs": f"{(asked['nodes'] * asked['runtime']).sum() / 60:.1f}",
    }


def rehearsed(_tables: Path, root: Path) -> list[str]:
    """The ratios of the suite frontier, over all engines, and how many of these can decide each."""
    found = pd.DataFrame(asdict(row) for row in suite_ratios(Config(root), "frontier"))
    rows = [
        {
            "claim": f"`{claim}`",
            "ratio": f"{scheme} / {over}",
            "wanted": f"{group['wanted'].iloc[0]:g}",
            "passes": f"{passes}",
            "links as published": f"{group['published'].min():.2f} to {group['published'].max():.2f}",
            "as the paper's stack": f"{group['attained'].min():.2f} to {group['attained'].max():.2f}",
            "interval": f"{group['low'].min():.2f} to {group['high'].max():.2f}",
            "node-hours of both": f"{group['node_hours'].min():.1f} to {group['slow_node_hours'].max():.1f}",
            "can decide": f"{(group['foreseen'] == '').sum()} of {len(group)}",
        }
        for (claim, scheme, over, passes), group in found.groupby(
            ["claim", "scheme", "over", "accumulation"], sort=False
        )
    ]
    return markdown(pd.DataFrame(rows))


def first_jobs(_tables: Path, root: Path) -> list[str]:
    """The command that writes Frontier's first job's script, and what the script asks of Slurm."""
    config = Config(root)
    [spec] = config.runs(["frontier-first"])
    folder = Path("results/first/runs") / spec.run_id
    script = batch_script(
        config.job("frontier"), spec, folder / "spec.json", Path("python"), {ACCOUNT: "abc123"}
    )
    return [
        "```",
        f"$ {ACCOUNT}=abc123 lowband spec --suite frontier-first --sbatch --out results/first/runs",
        f"{folder}/job.sbatch",
        f"$ grep -e '^#SBATCH' -e '^exec' {folder}/job.sbatch",
        *(line for line in script.splitlines() if line.startswith(("#SBATCH", "exec"))),
        "```",
    ]


BLOCKS: dict[str, Callable[[Path, Path], list[str]]] = {
    each.__name__: each
    for each in (
        counterparts, keys, claims, verdict, badge_line, headline_claims, reproduced, found, needs, softmax,
        suites, rehearsed, first_jobs,
        parallel_places, parallel_groups, parallel_rows, parallel_tokens, parallel_stages,
    )
}  # fmt: skip
