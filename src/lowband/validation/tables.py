"""`lowband validate`: the tables of predictions. No run is needed."""

from pathlib import Path

import pandas as pd

from lowband.spec.config import Config
from lowband.spec.csv_tables import write_csv
from lowband.validation import SOURCES
from lowband.validation.frontier_maps import frontier_map, largest, machine_facts, scale
from lowband.validation.validate import validate

PREDICTED = ("validation", "frontier_map", "scale", "largest", "constants")  # names of the tables


def write_predicted(config: Config, out: Path) -> None:
    """Write each table of PREDICTED into `out`."""
    clusters = dict.fromkeys(source.cluster for source in SOURCES.values())
    write_csv(validate(config), out / "validation.csv")
    write_csv(frontier_map(config), out / "frontier_map.csv")
    write_csv(scale(config), out / "scale.csv")
    write_csv(largest(config), out / "largest.csv")
    write_csv(pd.concat([machine_facts(config.machine(c)) for c in clusters]), out / "constants.csv")
