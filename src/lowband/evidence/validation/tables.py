"""`lowband validate`: the tables of predictions. No run is needed."""

from pathlib import Path

import pandas as pd

from lowband.evidence.validation import SOURCES, context_cells, eviction
from lowband.evidence.validation.context import context_balance
from lowband.evidence.validation.frontier_alternatives import alternatives
from lowband.evidence.validation.frontier_maps import frontier_map, largest, scale
from lowband.evidence.validation.frontier_pareto import pareto
from lowband.evidence.validation.frontier_readings import reading_costs, readings
from lowband.evidence.validation.largest_by_tier import largest_by_tier
from lowband.evidence.validation.longest import longest
from lowband.evidence.validation.low_communication import low_communication
from lowband.evidence.validation.offload_logs import offload_constants, offload_logs, offload_strides
from lowband.evidence.validation.pipelines import pipelines
from lowband.evidence.validation.published_context import published_context, published_lengths
from lowband.evidence.validation.published_experts import published_experts
from lowband.evidence.validation.published_tiers import published_tiers
from lowband.evidence.validation.strong_scaling import strong_scaling
from lowband.evidence.validation.tier_efficiency import tier_efficiency
from lowband.evidence.validation.validate import validate
from lowband.evidence.validation.wan import wan_steps
from lowband.spec.config import Config
from lowband.spec.csv_tables import write_csv
from lowband.spec.files import write_whole
from lowband.spec.sourced import Fact

PREDICTED = (  # names of the tables
    "validation", "frontier_map", "alternatives", "readings", "reading_costs", "scale", "largest",
    "pareto", "low_communication", "pipelines", "context_balance", "published_context", "published_experts",
    "longest_context", "strong_scaling", "tier_efficiency", "largest_by_tier", "published_tiers",
    "offload_logs", "offload_constants", "offload_strides", "eviction_gaps", "eviction_steps",
    "eviction_swaps", "wan_steps", "constants",
)  # fmt: skip

ROW_SEPARATOR = " ; "  # between the ids of rows in one cell


def write_predicted(config: Config, out: Path) -> None:
    """Write each table of PREDICTED into `out`."""
    write_csv(validate(config), out / "validation.csv")
    write_csv(frontier_map(config), out / "frontier_map.csv")
    write_csv(alternatives(config), out / "alternatives.csv")
    write_csv(readings(config), out / "readings.csv")
    write_csv(reading_costs(config), out / "reading_costs.csv")
    write_csv(scale(config), out / "scale.csv")
    write_csv(largest(config), out / "largest.csv")
    write_csv(pareto(config), out / "pareto.csv")
    write_csv(low_communication(config), out / "low_communication.csv")
    write_csv(pipelines(config), out / "pipelines.csv")
    write_csv(context_balance(config), out / "context_balance.csv")
    write_csv(published_context(config), out / "published_context.csv")
    write_csv(published_experts(config), out / "published_experts.csv")
    write_csv(longest(config), out / "longest_context.csv")
    write_csv(strong_scaling(config), out / "strong_scaling.csv")
    write_csv(tier_efficiency(config), out / "tier_efficiency.csv")
    write_csv(offload_logs(config), out / "offload_logs.csv")
    write_csv(offload_constants(config), out / "offload_constants.csv")
    write_csv(offload_strides(config), out / "offload_strides.csv")
    write_csv(largest_by_tier(config), out / "largest_by_tier.csv")
    write_csv(published_tiers(config), out / "published_tiers.csv")
    write_csv(eviction.eviction_gaps(), out / "eviction_gaps.csv")
    write_csv(eviction.eviction_steps(), out / "eviction_steps.csv")
    write_csv(eviction.eviction_swaps(), out / "eviction_swaps.csv")
    write_csv(wan_steps(config), out / "wan_steps.csv")
    write_csv(constants(config), out / "constants.csv")


def write_lengths(config: Config, out: Path) -> None:
    """Write published_lengths.csv into `out`."""
    write_csv(published_lengths(config), out / "published_lengths.csv")


def write_cells(config: Config, out: Path) -> None:
    """Write context_cells.csv and the suite of these cells, box-context.yaml, into `out`."""
    cells = context_cells.drawn(config)
    write_csv(context_cells.table(cells), out / "context_cells.csv")
    write_whole(out / f"{context_cells.SUITE}.yaml", context_cells.text(cells))


def constants(config: Config) -> pd.DataFrame:
    """Every constant of the machines and stacks that published runs are predicted for, with its source.

    A machine's own constants have no stack. A fitted one has the rows it was fitted on, its bounds and its
    place in them.
    """
    places: dict[tuple[str, str], dict[str, Fact]] = {}
    for source in SOURCES.values():
        machine, stack = source.on(config)
        places[machine.name, ""] = machine.facts
        places[machine.name, stack.name] = stack.facts
    return pd.DataFrame(
        [
            {
                "cluster": cluster,
                "stack": stack,
                "constant": place,
                "value": fact.value,
                "low": fact.low,
                "high": fact.high,
                "source": fact.source,
                "calibrated_on": ROW_SEPARATOR.join(fact.calibrated_on),
                "lower_bound": fact.bounds and fact.bounds.low,
                "upper_bound": fact.bounds and fact.bounds.high,
                "bounds_source": fact.bounds and fact.bounds.source,
                "place": fact.place,
            }
            for (cluster, stack), facts in places.items()
            for place, fact in facts.items()
        ]
    )
