# Trained runs -> raw tables -> derived tables -> graded claims. Each rule lists its own code as input, so
# that an edit of the code runs it again.


if IS_SHIPPED:

    rule shipped:
        input:
            expand("results/reference/local/tables/{raw}.csv", raw=RAW),
        output:
            expand(f"{TABLES_DIR}/{{raw}}.csv", raw=RAW),
        log:
            f"{LOGS_DIR}/shipped.log",
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            out=lambda wildcards, output: Path(output[0]).parent,
        shell:
            "cp {input:q} {params.out:q} > {log:q} 2>&1"

else:

    # A file of them, because the kernel takes at most 128 KiB of command in one word: some 1,500 runs.
    rule list_runs:
        output:
            f"{TABLES_DIR}/runs.txt",
        log:
            f"{LOGS_DIR}/list_runs.log",
        localrule: True
        params:
            lines="".join(f"{RUNS_DIR}/{run}\n" for run in SPECS),
        run:
            Path(output[0]).write_text(params.lines)

    rule collect:
        input:
            trained=expand(f"{RUNS_DIR}/{{run}}/trained", run=SPECS),
            runs=f"{TABLES_DIR}/runs.txt",
            code=COLLECT_CODE,
        output:
            expand(f"{TABLES_DIR}/{{raw}}.csv", raw=COLLECTED),
        log:
            f"{LOGS_DIR}/collect.log",
        priority: 100
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            out=lambda wildcards, output: Path(output[0]).parent,
        shell:
            "python -m lowband collect @{input.runs:q} --out {params.out:q} > {log:q} 2>&1"


rule table:
    input:
        sources=table_sources,
        config=table_config,
        code=table_code,
    output:
        table=f"{TABLES_DIR}/{{table}}.csv",
    log:
        f"{LOGS_DIR}/table/{{table}}.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        tables=lambda wildcards: sources_dir(wildcards.table),
        out=lambda wildcards, output: Path(output.table).parent,
    shell:
        "python -m lowband table {wildcards.table:q} --tables {params.tables:q} --out {params.out:q} > {log:q} 2>&1"


# A single claim, from the tables on which it is graded.
rule claim:
    input:
        claim_tables,
        claims=CLAIMS_FILE,
        experiments="config/experiments.yaml",
        reported=sorted(Path("results/reported").glob("*.csv")),
        code=CLAIMS_CODE,
    output:
        csv=f"results/{NAME}/claims/{{claim}}/claims.csv",
        md=f"results/{NAME}/claims/{{claim}}/claims.md",
    log:
        f"{LOGS_DIR}/claim/{{claim}}.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        tables=TABLES_DIR,
        out=lambda wildcards, output: Path(output.csv).parent,
    shell:
        "python -m lowband claims --claims {input.claims:q} --tables {params.tables:q} --only {wildcards.claim:q}"
        " --out {params.out:q} > {log:q} 2>&1 && cat {output.md:q}"


# The claims that the requested suites' own runs decide: no shipped rows, no predictions, no figures.
rule own_claims:
    input:
        tables=expand(f"{TABLES_DIR}/{{table}}.csv", table=[*COLLECTED, *OWN_TABLES]),
        claims=CLAIMS_FILE,
        experiments="config/experiments.yaml",
        reported=sorted(Path("results/reported").glob("*.csv")),
        code=CLAIMS_CODE,
    output:
        OWN_CLAIMS_CSV,
    log:
        f"{LOGS_DIR}/own_claims.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        tables=lambda wildcards, input: Path(input.tables[0]).parent,
        out=lambda wildcards, output: Path(output[0]).parent,
        only=OWN_CLAIMS,
    shell:
        "python -m lowband claims --claims {input.claims:q} --tables {params.tables:q} --only {params.only:q}"
        " --out {params.out:q} > {log:q} 2>&1"
        " && python -m lowband summary --tables {params.tables:q} --claims {output:q} 2>> {log:q}"


if not IS_OWN:

    rule claims:
        input:
            expand(
                f"{TABLES_DIR}/{{table}}.csv",
                table=["runs", "bytes", "states", *TABLES],
            ),
            claims=CLAIMS_FILE,
            experiments="config/experiments.yaml",
            reported=sorted(Path("results/reported").glob("*.csv")),
            code=CLAIMS_CODE,
        output:
            table=report(
                f"{TABLES_DIR}/claims.csv",
                caption="../report/claims.rst",
                category="Claims",
                labels={"table": "all claims, graded"},
            ),
            views=expand(f"{TABLES_DIR}/claims.{{kind}}", kind=["md", "tex", "html"]),
        log:
            f"{LOGS_DIR}/claims.log",
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            tables=lambda wildcards, output: Path(output.table).parent,
        shell:
            "python -m lowband claims --claims {input.claims:q} --tables {params.tables:q} > {log:q} 2>&1"
