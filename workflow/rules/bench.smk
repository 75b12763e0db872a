# This machine -> raw tables of benchmarks, a rule for each entry of spec/benchmarks.py that has one.
from lowband.spec.benchmarks import BENCHMARKS, RULES, kernels_of

# It reserves all cores although it uses one, so that nothing else that is timed runs beside it. The sources are
# inputs, so that a changed kernel is measured again.
for bench_name, of_bench in RULES.items():

    rule:
        name:
            f"bench_{bench_name}"
        input:
            of_bench.sources,
        output:
            [f"{TABLES_DIR}/{table}.csv" for table in BENCHMARKS[bench_name].tables],
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


# The kernels of each cluster of the requested suites, as a job on one of its nodes:
# snakemake --profile slurm/frontier kernels
KERNELS_DIR = f"results/{NAME}/kernels"
MACHINES = {spec.machine.name: spec.machine for spec in SPECS.values()}
KERNELS = {cluster: kernels_of(machine) for cluster, machine in MACHINES.items()}

for cluster, bench in KERNELS.items():

    rule:
        name:
            f"kernels_{cluster.replace('-', '_')}"
        output:
            [f"{KERNELS_DIR}/{cluster}/{raw}.csv" for raw in bench.raw],
        log:
            f"{LOGS_DIR}/kernels/{cluster}.log",
        conda:
            "../../envs/cpu.yaml"
        threads: 1024
        resources:
            **JOBS[cluster].of_one_node(MACHINES[cluster], bench.minutes),
            **JOBS[cluster].queue(os.environ),
            mpi="srun",
        params:
            cluster=cluster,
            command=bench.command,
            srun=shlex.quote(JOBS[cluster].srun),
            out=lambda _, output: Path(output[0]).parent,
        shell:
            "slurm/launch.sh {params.cluster:q} 1 1 {params.srun}"
            " python -m lowband {params.command} --out {params.out:q} > {log:q} 2>&1"


# Their rows together, by the tables in which shipped rows are shown: those of these clusters alone.
for kernel_table in sorted(
    {table for bench in KERNELS.values() for table in bench.tables}
):

    rule:
        name:
            f"kernels_{kernel_table}"
        input:
            raw=[
                f"{KERNELS_DIR}/{cluster}/{raw}.csv"
                for cluster, bench in KERNELS.items()
                if kernel_table in bench.tables
                for raw in bench.raw
            ],
            code=code_files(kernel_table),
        output:
            f"{KERNELS_DIR}/{kernel_table}.csv",
        log:
            f"{LOGS_DIR}/kernels/{kernel_table}.log",
        localrule: True
        conda:
            "../../envs/cpu.yaml"
        params:
            table=kernel_table,
            out=lambda _, output: Path(output[0]).parent,
        shell:
            "python -m lowband table {params.table:q} --tables {params.out:q} --out {params.out:q} > {log:q} 2>&1"


rule kernels:
    input:
        [
            f"{KERNELS_DIR}/{table}.csv"
            for bench in KERNELS.values()
            for table in bench.tables
        ],
    localrule: True
