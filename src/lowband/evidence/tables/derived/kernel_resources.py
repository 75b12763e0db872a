"""Resources of each Triton kernel on each of the papers' machines, from cross-compilation: nothing was run.

One row per kernel, configuration and target: registers and spilled bytes per thread, share of the shared
memory that a block may use, matrix-unit instructions in its code, and notes that these wait for each other.
"""

import pandas as pd


def build(compiled: pd.DataFrame) -> pd.DataFrame:
    """compiled: results/reference/kernels/compiled.csv"""
    rows = compiled.assign(
        provenance="compiled", shared_share=compiled["shared_bytes"] / compiled["shared_limit_bytes"]
    )
    return rows[
        [
            "provenance", "kernel", "config", "target", "registers", "spilled_bytes", "shared_share",
            "matrix_instructions", "serialized", "triton",
        ]
    ].sort_values(["kernel", "target", "config"], ignore_index=True)  # fmt: skip
