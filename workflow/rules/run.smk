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
    wildcard_constraints:
        run=one_of(ALONE),
    priority: 100
    conda:
        "../../envs/cpu.yaml"
    threads: 1024
    resources:
        **QUEUE,
        mpi="srun",
        nodes=job_resource("nodes"),
        tasks_per_node=job_resource("tasks_per_node"),
        cpus_per_task=job_resource("cpus_per_task"),
        runtime=job_resource("runtime"),
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


# Where a cluster's job.yaml has `job_of: nodes`: one job per number of nodes, which runs what has not ended.
# Before a job starts, Snakemake removes its outputs: markers, which it gets back at once for the runs that
# have ended (src/lowband/run/several.py).
for allocation in ALLOCATIONS:

    rule:
        name:
            f"train_{allocation.name}"
        input:
            specs=[f"{RUNS_DIR}/{spec.run_id}/spec.json" for spec in allocation.runs],
        output:
            [f"{RUNS_DIR}/{spec.run_id}/trained" for spec in allocation.runs],
        log:
            f"{LOGS_DIR}/train/{allocation.name}.log",
        priority: 100
        conda:
            "../../envs/cpu.yaml"
        threads: 1024
        resources:
            **shared_resources(allocation),
            mpi="srun",
        params:
            cluster=allocation.runs[0].machine.name,
            tasks_per_node=JOBS[allocation.runs[0].machine.name].tasks_per_node(
                allocation.runs[0]
            ),
            srun=shlex.quote(JOBS[allocation.runs[0].machine.name].srun),
            logs=f"{LOGS_DIR}/train",
            folders=[f"{RUNS_DIR}/{spec.run_id}" for spec in allocation.runs],
        shell:
            "python -m lowband.run.several {resources.runtime} {params.logs:q}"
            " slurm/launch.sh {params.cluster:q} {resources.nodes} {params.tasks_per_node} {params.srun}"
            " -- {params.folders:q} >> {log:q} 2>&1"


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
        **QUEUE,
        mpi="srun",
        nodes=job_resource("nodes"),
        tasks_per_node=job_resource("tasks_per_node"),
        cpus_per_task=job_resource("cpus_per_task"),
        runtime=preflight_minutes,
        slurm_extra=job_resource("slurm_extra"),
    params:
        asked=time.time_ns(),  # so that each order examines the nodes again
        cluster=lambda wildcards: SPECS[wildcards.run].machine.name,
        tasks_per_node=srun_tasks_per_node,
        srun=srun_options,
    shell:
        "slurm/launch.sh {params.cluster:q} {resources.nodes} {params.tasks_per_node} {params.srun}"
        " python -m lowband preflight {input.spec:q} > {log:q} 2>&1"


# Remove the limit on how fast jobs start, unless a profile sets one: to apply its default (100 per second),
# Snakemake examines all waiting jobs again and again, which takes processor time from timed runs
# (docs/benchmarks.md).
onstart:
    # Snakemake has no public name for the limiter.
    limiter = getattr(workflow.scheduler, "job_rate_limiter", None)
    if limiter and (limiter.max_jobs, limiter.timespan) == (100, 1):
        workflow.scheduler.job_rate_limiter = None
