"""Predictions of pipelines against what was published, by paper and quantity; calibration rows apart.

off: in points where the quantity is a share or a gain (bubble rates, gains, shares of peak), otherwise in %
least_predicted: of the rows, for a quantity that a paper states as a least one
"""

import pandas as pd

from lowband.evidence.tables.points import EXPERIMENT

DASH = "arXiv 2312.12705"


def build(pipelines: pd.DataFrame, validation: pd.DataFrame) -> pd.DataFrame:
    """One row per paper, quantity and use; of arXiv 2312.12705 one per model. Experiment columns are "-"."""
    dash = validation[validation["source"] == "dash"]
    shares = pd.DataFrame(
        {
            "paper": DASH,
            "quantity": "share of peak, " + dash["row"].str.removeprefix("dash: "),
            "use": dash["use"],
            "published": dash["published"],
            "predicted": dash["predicted"],
            "off": dash["predicted"] - dash["published"],
        }
    )
    papers = "arXiv " + pipelines["arxiv"].astype(float).map("{:.5f}".format)
    rows = pd.concat([pipelines.assign(paper=papers), shares])
    rows["distance"] = rows["off"].abs()
    out = rows.groupby(["paper", "quantity", "use"], sort=False).agg(
        rows=("off", "size"),
        mean_off=("distance", "mean"),
        max_off=("distance", "max"),
        least_predicted=("predicted", "min"),
        most_predicted=("predicted", "max"),
    )
    experiment = dict.fromkeys(EXPERIMENT, "-") | {"provenance": "predicted", "seq_len": 0}
    return out.reset_index().assign(**experiment)[[*EXPERIMENT, *out.index.names, *out.columns]]
