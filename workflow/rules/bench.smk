# This machine -> raw tables of benchmarks.


# It reserves all cores although it uses one, so that nothing else that is timed runs beside it. The C file is
# an input, so that a changed kernel is measured again.
rule bench_softmax:
    input:
        kernel="src/lowband/kernels/softmax_cpu.c",
    output:
        times=f"{TABLES_DIR}/softmax_times.csv",
        setup=f"{TABLES_DIR}/softmax_setup.csv",
        environment=f"{TABLES_DIR}/softmax_env.json",
    log:
        f"{LOGS_DIR}/bench_softmax.log",
    localrule: True
    conda:
        "../../envs/cpu.yaml"
    threads: 1024
    params:
        out=lambda wildcards, output: Path(output.times).parent,
    shell:
        "python -m lowband bench-softmax --out {params.out} > {log} 2>&1"
