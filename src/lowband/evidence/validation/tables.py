"""`lowband validate`: the tables of predictions. No run is needed."""

from collections.abc import Callable
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
from lowband.evidence.validation.published_recipes import published_recipes
from lowband.evidence.validation.published_tiers import published_tiers
from lowband.evidence.validation.strong_scaling import strong_scaling
from lowband.evidence.validation.tier_efficiency import tier_efficiency
from lowband.evidence.validation.validate import validate
from lowband.evidence.validation.wan import wan_steps
from lowband.spec.config import Config
from lowband.spec.csv_tables import write_csv
from lowband.spec.files import write_whole
from lowband.spec.sourced import Fact

ROW_SEPARATOR = " ; "  # between the ids of rows in one cell


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


PREDICTED: dict[str, Callable[[Config], pd.DataFrame]] = {
    "validation": validate,
    "frontier_map": frontier_map,
    "alternatives": alternatives,
    "readings": readings,
    "reading_costs": reading_costs,
    "scale": scale,
    "largest": largest,
    "pareto": pareto,
    "low_communication": low_communication,
    "pipelines": pipelines,
    "context_balance": context_balance,
    "published_context": published_context,
    "published_experts": published_experts,
    "published_recipes": published_recipes,
    "longest_context": longest,
    "strong_scaling": strong_scaling,
    "tier_efficiency": tier_efficiency,
    "offload_logs": offload_logs,
    "offload_constants": offload_constants,
    "offload_strides": offload_strides,
    "largest_by_tier": largest_by_tier,
    "published_tiers": published_tiers,
    "eviction_gaps": lambda _: eviction.eviction_gaps(),
    "eviction_steps": lambda _: eviction.eviction_steps(),
    "eviction_swaps": lambda _: eviction.eviction_swaps(),
    "wan_steps": wan_steps,
    "constants": constants,
}


def write_predicted(config: Config, out: Path) -> None:
    """Write each table of PREDICTED into `out`."""
    for name, table in PREDICTED.items():
        write_csv(table(config), out / f"{name}.csv")
