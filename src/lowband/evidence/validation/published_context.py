"""What papers on long sequences print, predicted: LASP-2 and ring self-attention; and, apart because a
solver takes a minute, FlexSP's ratios, with the order of Zeppelin's methods.

Of Zeppelin (arXiv 2509.21841) the order alone is known to us, at second hand: its zones are faster than
groups. `published` is empty there, and `predicted` the ratio.
"""

import pandas as pd

from lowband.evidence.validation.flexsp import flexsp
from lowband.evidence.validation.lasp2 import lasp2
from lowband.evidence.validation.rsa import rsa
from lowband.spec.config import Config

COLUMNS = (
    "provenance", "source", "artifact", "quantity", "use", "setting", "unit", "published", "predicted",
    "off_percent",
)  # fmt: skip


def published_context(config: Config) -> pd.DataFrame:
    """A row per published number and prediction of it; off_percent: of what was published."""
    return pd.concat([lasp2(config), rsa(config)], ignore_index=True)


def published_lengths(config: Config) -> pd.DataFrame:
    """The same of FlexSP's ratios, and per setting that of zones over groups."""
    found = flexsp(config)
    setting = found["model"] + ", up to " + (found["longest"] // 1000).astype(str) + "K"
    ratios = found.assign(
        provenance="predicted", use="as it is", setting=setting, unit="x",
        source="arXiv " + found["arxiv"], quantity="speedup of " + found["system"],
    )  # fmt: skip
    groups = ratios[found["system"] == "FlexSP"]
    order = groups.assign(
        source="arXiv 2509.21841", artifact="order of methods", quantity="zones over groups",
        published=float("nan"), predicted=groups["zones"] / groups["predicted"], off_percent=float("nan"),
    )  # fmt: skip
    return pd.concat([ratios, order], ignore_index=True)[list(COLUMNS)]
