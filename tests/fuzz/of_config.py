"""Configuration: config/, the cluster files, files of a user's own, specs, the workflow's --config."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from lowband.evidence.claims.claim import read_claims
from lowband.evidence.claims.experiments import read_experiments
from lowband.evidence.report.badges import contributions
from lowband.evidence.report.documents import read_blocks
from lowband.predict.request import Grid
from lowband.predict.show.point_text import text
from lowband.spec.config import Config
from lowband.spec.run import RunSpec
from tests.checkout import CONFIG, REFERENCE, ROOT
from tests.fuzz.target import Target, entries, put, run, sound, table

SUITE = (
    "purpose: x\ncluster: frontier\nfixed: {model: gpt-200k, scheme: zero3, ranks: 4, micro_batch: 1, "
    "seq_len: 64, steps: 8, compute_dtype: bf16, reduce_dtype: bf16}\n"
)
RUNS = 200  # of a suite, at most: a larger one is sound but takes long
SCHEMES = entries("config/schemes.yaml", "zero3", "zeropp", "hier3", "diloco")
MODELS = entries("config/models.yaml", "gpt-20b", "gpt-200k")


def small(root: Path) -> None:
    """config/ and slurm/ of a few entries: reading those of the repository would take all the time."""
    put(root, "config/schemes.yaml", SCHEMES)
    put(root, "config/models.yaml", MODELS)
    put(root, "slurm/frontier/machine.yaml", sound("slurm/frontier/machine.yaml"))


def predict(**given: str) -> Callable[[Path], object]:
    """A small job predicted and printed, as `lowband predict` does. given: other names; {} is the folder"""

    def call(root: Path) -> None:
        names = {key: name.replace("{}", str(root)) for key, name in given.items()}
        grid = Grid(
            Config(root), names.get("cluster", "frontier"), [names.get("model", "gpt-20b")],
            [names.get("scheme", "zero3")], [64], [1], [1], [None], ["full"], stack=names.get("stack"),
        )  # fmt: skip
        text(grid.records()[0])

    return call


def runs_of_suite(root: Path) -> None:
    config = Config(root)
    suite = config.suite("fuzzed")
    if len(suite.axes) < 6 and suite.repeats < RUNS:
        config.runs(["fuzzed"])


def _resources(root: Path, spec: str) -> None:
    job = Config(root).job("frontier")
    parsed = RunSpec.parse(json.loads(spec), "job.yaml: sound")
    job.resources(parsed)
    job.tasks_per_node(parsed)


def _experiments(root: Path) -> None:
    for experiment in read_experiments(root / "config").values():
        experiment.minutes(root / "config")
        experiment.memory_gib(root / "config")


def _with_experiments(root: Path) -> None:
    small(root)
    for suite in ("frontier", "box-context"):
        put(root, f"config/suites/{suite}.yaml", sound(f"config/suites/{suite}.yaml"))
    put(root, "config/experiments.yaml", sound("config/experiments.yaml"))
    shutil.copytree(REFERENCE / "local", root / "results" / "reference" / "local")


def _default_suites(root: Path) -> None:
    for name in CONFIG.default_suites:
        put(root, f"config/suites/{name}.yaml", sound(f"config/suites/{name}.yaml"))


def _workflow_config(root: Path) -> None:
    """What the Snakefile does with config/config.yaml and --config, without Snakemake's own schema check."""
    config = Config(root)
    for name in config.default_suites:
        config.suite(name)


DOCUMENT = """
docs/reliability.md:
  campaign:
    table: faults/injected
    where: ranks > 1
    add: {same: same_weights & same_steps, late_s: detected_s + 1}
    by: [kind]
    of: {cases: size, same: min same, middle: median late_s, most: q80 detected_s}
    total: all
    then: {twice: 2 * cases}
    sort: [-cases]
    words: {kind: {kill rank: a rank is killed}}
    show: {fault: "{kind}", cases: "{cases}", same: "{same:all|not all}", after (s): ["{middle:.1f}", "-"]}
    more:
      - {table: faults/injected, where: wrong.isna(), line: "- seed {seed}: {kind}", before: "Right:"}
"""


CONTRIBUTION = "own:\n  sentence: It is right.\n  claims: [one, two]\n"


def _contributions(root: Path) -> None:
    claims = pd.DataFrame({"id": ["one", "two"], "verdict": ["met", "not met"], "kind": "artifact"})
    contributions(claims, root / "config")


def _faults(root: Path) -> None:
    file = "results/reference/faults/injected.csv"
    put(root, file, table(ROOT / file))


def _documents(root: Path) -> None:
    for block in read_blocks(root).values():
        block.all_lines(root, root)


def targets(spec: str) -> list[Target]:
    at = partial(Target, kind="yaml", prepare=small)
    return [
        at("schemes.yaml", "config/schemes.yaml", text=SCHEMES, call=predict()),
        at("models.yaml", "config/models.yaml", text=MODELS, call=predict()),
        at(
            "machine.yaml", "slurm/fuzzed/machine.yaml", text=sound("slurm/frontier/machine.yaml"),
            call=predict(cluster="fuzzed"),
            more=tuple(sound(f"slurm/{name}/machine.yaml") for name in ("frontier-box", "cuda", "dgx2")),
        ),
        at(
            "stack", "config/stacks/fuzzed.yaml", text=sound("config/stacks/deepspeed-zero.yaml"),
            call=predict(stack="fuzzed"),
        ),
        at(
            "own scheme", "own.yaml",
            text="weights: package\ngrads: node\noptim: world\nforward_gather: int8\n",
            call=predict(scheme="{}/own.yaml"),
        ),
        at(
            "own model", "own.yaml",
            text="layers: 4\nhidden: 64\nheads: 4\nvocab: 256\nseq_len: 64\nsource: ours\n",
            call=predict(model="{}/own.yaml"),
        ),
        at(
            "own machine", "own.yaml", text=sound("slurm/frontier/machine.yaml"),
            call=predict(cluster="{}/own.yaml"),
        ),
        at(
            "own stack", "own.yaml", text=sound("config/stacks/deepspeed-zero.yaml"),
            call=predict(stack="{}/own.yaml"),
        ),
        at(
            "job.yaml", "slurm/frontier/job.yaml", text=sound("slurm/frontier/job.yaml"),
            call=lambda root: _resources(root, spec),
        ),
        at("config.yaml", "config/config.yaml", text=sound("config/config.yaml"), call=_workflow_config,
           prepare=_default_suites),
        at(
            "suite", "config/suites/fuzzed.yaml", text=sound("config/suites/box-dgx2.yaml"),
            call=runs_of_suite,
            more=(SUITE, sound("config/suites/smoke.yaml"), sound("config/suites/box-sweep.yaml")),
        ),
        at(
            "suite, rehearsed", "config/suites/fuzzed.yaml", text=SUITE,
            call=lambda root: run("rehearse", "--suite", "fuzzed", "--root", root),
        ),
        at(
            "claims.yaml", "config/claims.yaml", text=entries("config/claims.yaml"),
            call=lambda root: read_claims(root / "config" / "claims.yaml"),
            prepare=lambda root: put(root, "config/experiments.yaml", sound("config/experiments.yaml")),
        ),
        at("experiments.yaml", "config/experiments.yaml", text=entries("config/experiments.yaml"),
           call=_experiments, prepare=_with_experiments),
        at("contributions.yaml", "config/contributions.yaml", text=CONTRIBUTION, call=_contributions),
        Target("documents.yaml", "config/documents.yaml", "yaml", DOCUMENT, _documents, prepare=_faults),
        Target("spec.json", "spec.json", "json", spec, lambda root: RunSpec.read_json(root / "spec.json")),
    ]  # fmt: skip
