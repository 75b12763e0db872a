# `snakemake -c2` builds everything that config/config.yaml asks for; the rules are in workflow/.


include: "workflow/Snakefile"


# Rules of an included file are never the default target: without this one nothing would run.
rule all:
    default_target: True
    input:
        rules.own_reproduction.input if IS_OWN else rules.whole_reproduction.input,
    localrule: True
