# The configuration, and the runs and folders that follow from it.
import os
import re
import shlex
import sys
import time
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import validate

from lowband.errors import UserError
from lowband.preflight import TIME_LIMIT_S
from lowband.evidence.report.appendix import APPENDICES
from lowband.evidence.claims.claim import read_claims, sources
from lowband.evidence.tables.build import (
    code_of,
    raw_dir,
    reads_config,
    source_paths,
    tables_of_runs,
)
from lowband.evidence.tables.entries import COLLECTED, TABLES
from lowband.evidence.report.figures import FIGURES, own_figures
from lowband.evidence.report.needs import DISK
from lowband.evidence.validation.tables import PREDICTED
from lowband.evidence.report.shipped import RAW
from lowband.run.several import has_ended
from lowband.run.submit import check
from lowband.spec.config import Config
from lowband.spec.run_folder import RunFolder


configfile: "config/config.yaml"


try:
    validate(config, "../schemas/config.schema.yaml")
    IS_SHIPPED = config["measurements"] == "shipped"
    SUITES = [] if IS_SHIPPED else config["suites"]
    CONFIGURATION = Config()
    SPECS = {spec.run_id: spec for spec in CONFIGURATION.runs(SUITES)}
    CLAIMS_FILE = config["claims"]
    CLAIMS = {claim.id: claim for claim in read_claims(Path(CLAIMS_FILE))}
    CLUSTERS = {spec.machine.name for spec in SPECS.values()}
    JOBS = {cluster: CONFIGURATION.job(cluster) for cluster in CLUSTERS}
    RESOURCES = {
        run: {
            **JOBS[spec.machine.name].resources(spec),
            **JOBS[spec.machine.name].queue(os.environ),
        }
        for run, spec in SPECS.items()
    }
    ALLOCATIONS = [
        allocation
        for cluster, job in JOBS.items()
        for allocation in job.allocations(
            [spec for spec in SPECS.values() if spec.machine.name == cluster]
        )
    ]
    ALONE = set(SPECS) - {
        spec.run_id for allocation in ALLOCATIONS for spec in allocation.runs
    }
    # A profile that gives a number of nodes submits; `make` and jobs themselves give a number of cores. Refuse
    # here, because the graph of all files takes minutes, and Slurm would answer for each job.
    if (
        workflow.is_main_process
        and workflow.resource_settings.nodes is not None
        and not workflow.output_settings.dryrun
    ):
        check(list(SPECS.values()), JOBS, os.environ, Path())
    # The largest run of each cluster: its job is the one whose nodes are examined before it.
    LARGEST = {
        spec.machine.name: spec.run_id
        for spec in sorted(SPECS.values(), key=lambda spec: spec.ranks)
        if spec.device != "fake"
    }
except UserError as error:
    print(f"lowband: {error}", file=sys.stderr)
    sys.exit(2)
except WorkflowError as error:
    # The second line states what is wrong; the others quote the schema.
    finding = str(error).splitlines()[1].removeprefix("ValidationError: ")
    key = re.search(r"^On instance\['(\w+)'\]", str(error), re.MULTILINE)
    if key:
        finding = f"{key[1]}: {finding}"
    print(
        f"lowband: config/config.yaml: {finding} (allowed: workflow/schemas/config.schema.yaml)",
        file=sys.stderr,
    )
    sys.exit(2)

OWN_TABLES = tables_of_runs(SUITES)  # of the requested runs only
OWN_CLAIMS = [
    claim.id
    for claim in CLAIMS.values()
    if claim.queries and set(sources(claim)) <= {*COLLECTED, *OWN_TABLES}
]
IS_OWN = config["scope"] == "own" and not IS_SHIPPED
OWN_FIGURES = own_figures(SUITES)

NAME = config["results"]
RUNS_DIR = f"results/{NAME}/runs"
TABLES_DIR = f"results/{NAME}/tables"
FIGURES_DIR = f"figures/{NAME}"
LOGS_DIR = f"logs/{NAME}"
# The claims that a reproduction's own runs decide are all its claims, unless it grades the others too.
OWN_CLAIMS_CSV = (
    f"{TABLES_DIR}/claims.csv" if IS_OWN else f"results/{NAME}/own_claims/claims.csv"
)
REPORT_CODE = "src/lowband/evidence/report"
# Closed forms of bytes and memory, and predicted times in a box, are columns of the raw tables.
COLLECT_CODE = [
    *(f"src/lowband/evidence/tables/{name}.py" for name in ("collect", "points")),
    "src/lowband/evidence/validation/scale_model.py",
    "src/lowband/spec/step_columns.py",
    *sorted(map(str, Path("src/lowband/cost").glob("*.py"))),
    *sorted(map(str, Path("src/lowband/predict").rglob("*.py"))),
]
CLAIMS_CODE = [
    *(
        f"src/lowband/evidence/claims/{name}.py"
        for name in ("claim", "grade", "expected", "experiments", "origin")
    ),
    *(f"{REPORT_CODE}/{name}.py" for name in ("claim_views", "writers")),
    *(f"{REPORT_CODE}/page/{name}.html.j2" for name in ("macros", "claims")),
]
NOTEBOOKS = sorted(path.stem for path in Path("workflow/notebooks").glob("*.ipynb"))


def sources_dir(table):
    """The folder of a table's raw tables: the shipped ones, unless this reproduction makes them itself."""
    return raw_dir(table, SUITES, Path(TABLES_DIR), Path())


def table_sources(wildcards):
    folder = sources_dir(wildcards.table)
    return [
        str(path)
        for source in TABLES[wildcards.table].sources
        for path in source_paths(source, folder, Path())
    ]


def code_files(table):
    return [f"src/lowband/{file}" for file in code_of(table)]


def table_code(wildcards):
    return code_files(wildcards.table)


# What predictions are made of, beside published rows, and the tables that compare with them or with links' rates.
PREDICTED_FROM = [
    *sorted(Path("slurm").glob("*/machine.yaml")),
    *sorted(Path("config/stacks").glob("*.yaml")),
    "config/models.yaml",
    "config/schemes.yaml",
]


def table_config(wildcards):
    return PREDICTED_FROM if reads_config(wildcards.table) else []


def claim_tables(wildcards):
    return [
        f"{TABLES_DIR}/{table}.csv"
        for table in ("runs", *sources(CLAIMS[wildcards.claim]))
    ]


def job_resource(name):
    """A resource of the Slurm job of a run."""
    return lambda wildcards: RESOURCES[wildcards.run].get(name, "")


# Those that some job has: an empty one would be an option without a value.
QUEUE = {
    name: job_resource(name)
    for name in ("slurm_account", "slurm_partition", "qos", "constraint")
    if any(resources.get(name) for resources in RESOURCES.values())
}


def shared_resources(allocation):
    """Resources of the job that runs share: of minutes, those that the runs which have not ended may take."""
    job = JOBS[allocation.runs[0].machine.name]
    left = [
        spec
        for spec in allocation.runs
        if not has_ended(RunFolder(Path(RUNS_DIR) / spec.run_id), spec)
    ]
    [asked] = job.allocations(left or allocation.runs)
    return {
        **job.resources(allocation.runs[0]),
        **job.queue(os.environ),
        "runtime": asked.minutes,
    }


def preflight_minutes(wildcards):
    spec = SPECS[wildcards.run]
    short = spec.model_copy(update={"time_limit_s": TIME_LIMIT_S})
    return JOBS[spec.machine.name].resources(short)["runtime"]


def srun_tasks_per_node(wildcards):
    spec = SPECS[wildcards.run]
    return JOBS[spec.machine.name].tasks_per_node(spec)


def srun_options(wildcards):
    """The options quoted as one shell word, even if empty: Snakemake's `:q` drops an empty string."""
    return shlex.quote(JOBS[SPECS[wildcards.run].machine.name].srun)


# `python` in a rule is the interpreter that runs snakemake, unless --sdm conda puts an environment before it
# in PATH. Either one runs the package in this folder.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]),
    PYTHONPATH=os.pathsep.join(
        [str(Path("src").absolute()), *filter(None, [os.getenv("PYTHONPATH")])]
    ),
)


def one_of(names):
    """A regular expression that matches exactly these names."""
    return "|".join(map(re.escape, names))


wildcard_constraints:
    run=one_of(SPECS),
    table=one_of(TABLES),
    figure=one_of(FIGURES),
    claim=one_of(CLAIMS),
    notebook=one_of(NOTEBOOKS),
