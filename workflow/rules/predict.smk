# Published rows, machine and stack files -> tables of predictions. Needs no run and takes seconds.


rule predict:
    input:
        reported=sorted(Path("results/reported").glob("*.csv")),
        config=PREDICTED_FROM,
        code=sorted(
            [
                *Path("src/lowband/cost").glob("*.py"),
                *Path("src/lowband/predict").rglob("*.py"),
                *Path("src/lowband/evidence/validation").glob("*.py"),
            ]
        ),
    output:
        expand(f"{TABLES_DIR}/{{table}}.csv", table=PREDICTED),
    log:
        f"{LOGS_DIR}/predict.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    params:
        out=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "python -m lowband validate --out {params.out} > {log} 2>&1"
