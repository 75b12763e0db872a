# Graded claims -> the documents that a reviewer reads.


rule appendix:
    input:
        claims=f"{TABLES_DIR}/claims.csv",
        config=["config/experiments.yaml", "config/contributions.yaml", "CITATION.cff"],
        disk=DISK,
        code=[
            f"{REPORT_CODE}/badges.py",
            *sorted(Path(f"{REPORT_CODE}/appendix").glob("*.*")),
        ],
    output:
        expand(f"results/{NAME}/appendix/{{name}}.tex", name=APPENDICES),
    log:
        f"{LOGS_DIR}/appendix.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        out=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "python -m lowband appendix --claims {input.claims} --out {params.out} > {log} 2>&1"


if IS_OWN:

    rule own_page:
        input:
            tables=expand(
                f"{TABLES_DIR}/{{table}}.csv",
                table=["claims", *COLLECTED, *OWN_TABLES],
            ),
            figures=expand(
                f"{FIGURES_DIR}/{{figure}}.{{kind}}",
                figure=OWN_FIGURES,
                kind=["svg", "csv"],
            ),
            code=sorted(Path(f"{REPORT_CODE}/page").glob("*.*")),
        output:
            f"results/{NAME}/page.html",
        log:
            f"{LOGS_DIR}/page.log",
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            tables=lambda wildcards, input: Path(input.tables[0]).parent,
            figures=lambda wildcards, input: Path(input.figures[0]).parent,
        shell:
            "python -m lowband page --own --tables {params.tables} --figures {params.figures} --out {output} > {log} 2>&1"

else:

    rule page:
        input:
            tables=expand(
                f"{TABLES_DIR}/{{table}}.csv",
                table=["runs", "claims", *TABLES, *PREDICTED],
            ),
            figures=expand(
                f"{FIGURES_DIR}/{{figure}}.{{kind}}",
                figure=FIGURES,
                kind=["svg", "csv"],
            ),
            config=[
                "config/schemes.yaml",
                "config/documents.yaml",
                "config/contributions.yaml",
                "CITATION.cff",
                "slurm/frontier/machine.yaml",
            ],
            code=[
                *(
                    f"{REPORT_CODE}/{name}.py"
                    for name in ("badges", "claim_views", "findings", "writers")
                ),
                *sorted(Path(f"{REPORT_CODE}/documents").glob("*.py")),
                *sorted(Path(f"{REPORT_CODE}/page").glob("*.*")),
            ],
        output:
            report(
                f"results/{NAME}/page.html",
                caption="../report/page.rst",
                category="Page",
                labels={"page": "the whole report"},
            ),
        log:
            f"{LOGS_DIR}/page.log",
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            tables=lambda wildcards, input: Path(input.tables[0]).parent,
            figures=lambda wildcards, input: Path(input.figures[0]).parent,
        shell:
            "python -m lowband page --tables {params.tables} --figures {params.figures} --out {output} > {log} 2>&1"


rule provenance:
    input:
        page=f"results/{NAME}/page.html",
        notebooks=expand(
            f"results/{NAME}/notebooks/{{notebook}}.ipynb", notebook=NOTEBOOKS
        ),
        appendix=f"results/{NAME}/appendix/sc.tex",
        code=f"{REPORT_CODE}/provenance.py",
    output:
        f"results/{NAME}/reproduction.crate.zip",
    log:
        f"{LOGS_DIR}/provenance.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        name=NAME,
    shell:
        "python -m lowband provenance --results {params.name} --out {output} > {log} 2>&1"
