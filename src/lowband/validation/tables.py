"""`lowband validate`: the tables of predictions. No run is needed."""

from pathlib import Path

import pandas as pd

from lowband.spec.csv_tables import write_csv
from lowband.spec.machine import read_machine
from lowband.validation import SOURCES
from lowband.validation.frontier_maps import frontier_map, largest, machine_facts, scale
from lowband.validation.validate import validate

PREDICTED = ("validation", "frontier_map", "scale", "largest", "constants")  # names of the tables


def write_predicted(root: Path, out: Path) -> None:
    """Write each table of PREDICTED into `out`."""
    clusters = dict.fromkeys(source.cluster for source in SOURCES.values())
    write_csv(validate(root), out / "validation.csv")
    write_csv(frontier_map(root), out / "frontier_map.csv")
    write_csv(scale(root), out / "scale.csv")
    write_csv(largest(root), out / "largest.csv")
    write_csv(pd.concat([machine_facts(read_machine(root, c)) for c in clusters]), out / "constants.csv")
