# A target for each table, figure and claim:
# snakemake -c2 table_scaling figure_scaling claim_bytes_closed_form


# The runs of the requested suites, their tables and claims:
# snakemake -c2 tables --config 'suites=[x]' results=x
rule tables:
    input:
        rules.own_claims.input.tables,
        rules.own_claims.output,
    localrule: True


# Before an expensive suite: examine the nodes of its largest run.
rule preflight:
    input:
        [f"{RUNS_DIR}/{run}/preflight" for run in LARGEST.values()],
    localrule: True


for table in (*TABLES, *PREDICTED):

    rule:
        name:
            f"table_{table}"
        input:
            f"{TABLES_DIR}/{table}.csv",
        localrule: True


for figure in FIGURES:

    rule:
        name:
            f"figure_{figure}"
        input:
            f"{FIGURES_DIR}/{figure}.pdf",
        localrule: True


for claim in CLAIMS:

    rule:
        name:
            f"claim_{claim.replace('-', '_')}"
        input:
            f"results/{NAME}/claims/{claim}/claims.csv",
        localrule: True
