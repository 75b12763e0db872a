"""The errors of torchtitan's rows that fsdp2's file states are those of today's predictions."""

import numpy as np
import pytest

from lowband.evidence.validation.intervals import factor
from lowband.spec.csv_tables import read_table
from tests.checkout import CONFIG, REFERENCE


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-a100"])
def test_the_stack_states_the_factor_of_its_rows(cluster: str) -> None:
    rows = read_table(REFERENCE / "predicted" / "validation.csv")
    rows = rows[(rows["cluster"] == cluster) & (rows["stack"] == "fsdp2") & (rows["quantity"] != "peak GiB")]
    stated = CONFIG.stack_on("fsdp2", cluster).error_factor
    assert stated is not None
    assert stated.value == pytest.approx(factor(abs(np.log(rows["predicted"] / rows["published"]))), abs=6e-4)
