# Derived tables -> figures and the executed notebooks.


rule figure:
    input:
        table=lambda wildcards: f"{TABLES_DIR}/{FIGURES[wildcards.figure].table}.csv",
        code=lambda wildcards: f"{REPORT_CODE}/figures/{FIGURES[wildcards.figure].file}.py",
        style=f"{REPORT_CODE}/figures/style.py",
    output:
        png=report(
            f"{FIGURES_DIR}/{{figure}}.png",
            caption="../report/figure.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        pdf=f"{FIGURES_DIR}/{{figure}}.pdf",
        svg=f"{FIGURES_DIR}/{{figure}}.svg",
        csv=f"{FIGURES_DIR}/{{figure}}.csv",
        json=f"{FIGURES_DIR}/{{figure}}.json",
    log:
        f"{LOGS_DIR}/figure/{{figure}}.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        tables=lambda wildcards, input: Path(input.table).parent,
        out=lambda wildcards, output: Path(output.pdf).parent,
        caption=lambda wildcards: FIGURES[wildcards.figure].worded(shows_hier3=True),
        entry=lambda wildcards: repr(FIGURES[wildcards.figure]),
    shell:
        "python -m lowband figure {wildcards.figure:q} --tables {params.tables:q} --out {params.out:q} > {log:q} 2>&1"


rule notebook:
    input:
        tables=expand(
            f"{TABLES_DIR}/{{table}}.csv",
            table=["runs", "claims", *TABLES, *PREDICTED],
        ),
        figures=expand(
            f"{FIGURES_DIR}/{{figure}}.{{kind}}", figure=FIGURES, kind=["png", "json"]
        ),
        notebook="workflow/notebooks/{notebook}.ipynb",
        code=f"{REPORT_CODE}/notebook.py",
    output:
        f"results/{NAME}/notebooks/{{notebook}}.ipynb",
    log:
        f"{LOGS_DIR}/notebook/{{notebook}}.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        tables=lambda wildcards, input: Path(input.tables[0]).parent,
        figures=lambda wildcards, input: Path(input.figures[0]).parent,
    shell:
        "python -m papermill --no-progress-bar --start-timeout 600 -p tables_dir {params.tables:q} -p figures_dir {params.figures:q}"
        " {input.notebook:q} {output:q} > {log:q} 2>&1"
