"""FlexSP's published speedups on Wikipedia's lengths, by its solver's own constants; nothing is fitted.

Its cost model (arXiv 2412.01523, galvatron/flexsp_solver/solver.py): a sequence of s tokens takes
(a s^2 + b s) / d on each of d ranks, its all-to-alls what the closed form of `heads` sends (cost/context.py)
at a rate by degree, a micro-step c in addition. The rate is of a whole tensor, so what a rank sends is
multiplied by d / (d - 1). States are 16 bytes a parameter, on all ranks. The rate of degree 32 is not in our
data: the geometric mean of its neighbours.

    DeepSpeed        degree 64 for all batches, as in the solver's script
    FlexSP-BatchAda  the best degree of each batch; 32 is not tried up to 192K, as in the script
    FlexSP           groups, of 2 ranks at least
    zones            Zeppelin's, which no row publishes: ours beside them

Lengths are the first batches of the repository's own file, in its order and padding. Published are times of
a machine over 40 batches; these are a solver's. GitHub's and CommonCrawl's lengths are not in our data.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lowband.cost.context import parts
from lowband.evidence.validation import reported
from lowband.predict.search.lengths import best_of_one_degree, plan_lengths
from lowband.predict.search.lengths_step import Costs
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.context import layout_of
from lowband.spec.model import ModelSpec

RANKS, STATIC, UNTRIED, UNTRIED_TO = 64, 64, 32, 192_000
DEGREES = [1, 2, 4, 8, 16, 32, 64]
STATE_BYTES = 16
BATCHES = 4  # of the published ones, those that are predicted
PAD = 2 * RANKS  # a length is padded to a multiple, as the solver does


def flexsp(config: Config) -> pd.DataFrame:
    """One row per published ratio: predicted, off in % of what was published, and that of zones beside."""
    printed = reported(config, "12_flexsp.csv")
    lengths = reported(config, "12_flexsp_lengths.csv")["lengths"][:BATCHES]
    padded = [[-(-int(n) // PAD) * PAD for n in line.split()] for line in lengths]
    published = printed[printed["metric"] == "speedup"]
    rows = []

    for keys, of_setting in published.groupby(["model", "longest"], sort=False):
        model, longest = str(keys[0]), int(keys[1])
        seconds = _seconds(costs(printed, model, longest), padded, longest)
        for row in of_setting.itertuples():
            ratio, ours = float(row.value), seconds["DeepSpeed"] / seconds[str(row.system)]
            rows.append(
                {
                    "arxiv": row.arxiv, "artifact": row.artifact, "model": model, "longest": longest,
                    "system": row.system, "published": ratio, "predicted": ours,
                    "off_percent": 100 * (ours / ratio - 1),
                    "zones": seconds["DeepSpeed"] / seconds["zones"],
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def costs(printed: Any, model: str, longest: int) -> Costs:
    """FlexSP's cost model of one of its models, for lengths up to `longest` tokens."""
    of_model = printed[(printed["model"] == model) & printed["longest"].isin(["", str(longest)])]
    known = of_model[of_model["metric"] != "speedup"].set_index("metric")["value"].astype(float)
    rates = printed[printed["metric"] == "all-to-all rate"]
    rate = {int(row.ranks): float(row.value) for row in rates.itertuples()}
    rate.setdefault(32, (rate[16] * rate[64]) ** 0.5)
    memory = float(printed[printed["metric"] == "memory limit"]["value"].iloc[0])
    states = known["parameters"] * STATE_BYTES * 1024 / RANKS  # MiB
    room = (memory * 1024 - states) / known["activation memory per token"]
    hidden, layers = int(known["hidden size"]), int(known["layers"])
    shape = ModelSpec(
        name=model, layers=layers, hidden=hidden, heads=hidden // 32, vocab=1, seq_len=longest,
        source="arXiv 2412.01523; only hidden size and layers matter",
    )  # fmt: skip

    def seconds(degree: int) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
        sent_s = _all_to_all_s(shape, degree, rate)

        def of(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
            s = lengths.astype(float)
            computed_ms = known["quadratic time"] * s**2 + known["linear time"] * s
            return np.asarray((computed_ms / 1000 + sent_s * s) / degree)

        return of

    return Costs({d: seconds(d) for d in DEGREES}, room, known["time of a micro-step"] / 1000)


def _all_to_all_s(model: ModelSpec, degree: int, rate: dict[int, float]) -> float:
    """Seconds for each token of a rank, forward and backward, in all layers."""
    if degree == 1:
        return 0.0
    one = Ways.of_options(cp=degree).model_copy(update={"context_attention": "heads"})
    sent = sum(float(part.bytes) for part in parts(model, 1, layout_of({}, one, degree), "bf16"))
    return sent * degree / (degree - 1) * model.layers / 2**20 / rate[degree] / 1000


def _seconds(cost: Costs, batches: list[list[int]], longest: int) -> dict[str, float]:
    """Of all batches, by system."""
    found = dict.fromkeys(("DeepSpeed", "FlexSP-BatchAda", "FlexSP", "zones"), 0.0)
    single = [d for d in DEGREES if not (d == UNTRIED and longest <= UNTRIED_TO)]
    for batch in batches:
        ada = best_of_one_degree(batch, RANKS, cost, single)
        groups = plan_lengths(batch, RANKS, cost, DEGREES[1:], False, ada)
        found["DeepSpeed"] += plan_lengths(batch, RANKS, cost, [STATIC], False).seconds
        found["FlexSP-BatchAda"] += ada.seconds
        found["FlexSP"] += groups.seconds
        found["zones"] += plan_lengths(batch, RANKS, cost, DEGREES, True, groups).seconds
    return found
