# specs -> trained runs.


# A job runs again if its spec's text changes, and the run below it only then: editing one line of a suite
# trains the points that it changes.
rule spec:
    output:
        f"{RUNS_DIR}/{{run}}/spec.json",
    log:
        f"{LOGS_DIR}/spec/{{run}}.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        text=lambda wildcards: SPECS[wildcards.run].to_json(),
    shell:
        "printf %s {params.text:q} > {output} 2> {log}"


# The marker is the output, not outcome.json: Snakemake removes the outputs of a failed job, and the cause of a
# failure is to stay. All cores, so that no two timed runs share the machine.
rule train:
    input:
        spec=f"{RUNS_DIR}/{{run}}/spec.json",
    output:
        touch(f"{RUNS_DIR}/{{run}}/trained"),
    log:
        f"{LOGS_DIR}/train/{{run}}.log",
    conda:
        "../../envs/cpu.yaml"
    threads: workflow.cores
    shell:
        "python -m lowband train {input.spec} > {log} 2>&1"
