"""One derived table per file: `build(raw tables) -> table`, pure, never reads or writes a file."""

# One experiment: what is compared with each other. A point of it is a scheme on a number of ranks.
EXPERIMENT = ["provenance", "suite", "cluster", "engine", "model", "seq_len", "compute_dtype"]
POINT = [*EXPERIMENT, "global_batch", "scheme", "ranks"]
