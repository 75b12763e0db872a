"""What each Triton kernel takes on each machine of the papers, as compiled without it: nothing was run there.

One row per kernel, configuration and target: registers of a thread, bytes that it spills, share of what a
block may have of shared memory, and instructions of the matrix units in its code.
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
            "matrix_instructions", "triton",
        ]
    ].sort_values(["kernel", "target", "config"], ignore_index=True)  # fmt: skip
