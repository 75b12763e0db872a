# Specs -> trained runs.


# This rule runs again if the spec's text changes, and only then does `train`: editing one line of a suite
# trains only the points that it changes.
rule spec:
    output:
        f"{RUNS_DIR}/{{run}}/spec.json",
    log:
        f"{LOGS_DIR}/spec/{{run}}.log",
    # Training comes before tables and figures that do not wait for it.
    priority: 100
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        text=lambda wildcards: SPECS[wildcards.run].to_json(),
    shell:
        "printf %s {params.text:q} > {output:q} 2> {log:q}"


# The output is a marker and not outcome.json, because Snakemake removes the outputs of a failed job, and the
# cause of a failure must stay. The marker contains the outcome's checksum, because Snakemake treats files
# with identical content as unchanged. `threads: 1024` is capped at the number of cores, so that timed runs
# never share the machine. Under Slurm the job's geometry is here and not in the profile, so that no
# command-line option can remove it.
rule train:
    input:
        spec=f"{RUNS_DIR}/{{run}}/spec.json",
    output:
        f"{RUNS_DIR}/{{run}}/trained",
    log:
        f"{LOGS_DIR}/train/{{run}}.log",
    priority: 100
    conda:
        "../../envs/cpu.yaml"
    threads: 1024
    resources:
        mpi="srun",
        nodes=job_resource("nodes"),
        tasks_per_node=job_resource("tasks_per_node"),
        cpus_per_task=job_resource("cpus_per_task"),
        runtime=job_resource("runtime"),
        constraint=job_resource("constraint"),
        slurm_extra=job_resource("slurm_extra"),
    params:
        cluster=lambda wildcards: SPECS[wildcards.run].machine.name,
        tasks_per_node=srun_tasks_per_node,
        srun=srun_options,
        outcome=f"{RUNS_DIR}/{{run}}/outcome.json",
    shell:
        "slurm/launch.sh {params.cluster:q} {resources.nodes} {params.tasks_per_node} {params.srun}"
        " python -m lowband train {input.spec:q} >> {log:q} 2>&1"
        " && sha256sum {params.outcome:q} > {output:q}"


# The same job as `train`, for two minutes. It fails if something is wrong; the findings are in the log and in
# preflight.json beside the spec.
rule preflight_run:
    input:
        spec=f"{RUNS_DIR}/{{run}}/spec.json",
    output:
        touch(f"{RUNS_DIR}/{{run}}/preflight"),
    log:
        f"{LOGS_DIR}/preflight/{{run}}.log",
    conda:
        "../../envs/cpu.yaml"
    threads: 1024
    resources:
        mpi="srun",
        nodes=job_resource("nodes"),
        tasks_per_node=job_resource("tasks_per_node"),
        cpus_per_task=job_resource("cpus_per_task"),
        runtime=preflight_minutes,
        constraint=job_resource("constraint"),
        slurm_extra=job_resource("slurm_extra"),
    params:
        cluster=lambda wildcards: SPECS[wildcards.run].machine.name,
        tasks_per_node=srun_tasks_per_node,
        srun=srun_options,
    shell:
        "slurm/launch.sh {params.cluster:q} {resources.nodes} {params.tasks_per_node} {params.srun}"
        " python -m lowband preflight {input.spec:q} > {log:q} 2>&1"


# Stop if Slurm does not answer: otherwise each job would fail with a message about accounts. Also remove the
# limit on how fast jobs start, unless a profile sets one: to apply its default (100 per second), Snakemake
# examines all waiting jobs again and again, which takes processor time from timed runs (docs/benchmarks.md).
onstart:
    # Snakemake has no public name for the limiter.
    limiter = getattr(workflow.scheduler, "job_rate_limiter", None)
    if limiter and (limiter.max_jobs, limiter.timespan) == (100, 1):
        workflow.scheduler.job_rate_limiter = None
    reason = why_not() if workflow.executor_plugin.name == "slurm" else ""
    if reason:
        print(
            f"lowband: no Slurm here: {reason} (allowed: a login node of a site; lowband box run -- "
            "snakemake --profile slurm)",
            file=sys.stderr,
        )
        sys.exit(2)
