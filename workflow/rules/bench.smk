# This machine -> raw tables of benchmarks, a rule for each entry of spec/benchmarks.py.
from lowband.spec.benchmarks import BENCHMARKS

# It reserves all cores although it uses one, so that nothing else that is timed runs beside it. The sources are
# inputs, so that a changed kernel is measured again.
for bench_name, benchmark in BENCHMARKS.items():

    rule:
        name:
            f"bench_{bench_name}"
        input:
            benchmark.sources,
        output:
            [f"{TABLES_DIR}/{table}.csv" for table in benchmark.tables],
            f"{TABLES_DIR}/{bench_name}_env.json",
        log:
            f"{LOGS_DIR}/bench_{bench_name}.log",
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        threads: 1024
        params:
            command=f"bench-{bench_name}",
            out=lambda _, output: Path(output[0]).parent,
        shell:
            "python -m lowband {params.command} --out {params.out} > {log} 2>&1"
