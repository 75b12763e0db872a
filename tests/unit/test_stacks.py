"""Stacks apart from machines, and fitted constants inside their bounds."""

from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.evidence.report.documents import read_blocks
from lowband.evidence.validation import SOURCES
from lowband.evidence.validation.tables import constants
from lowband.spec.sourced import Bounds, Fact
from lowband.spec.stack import OURS, Stack
from tests.checkout import CONFIG, ROOT

BOUNDS = {"low": 0.2, "high": 0.7, "source": "made up"}


@pytest.mark.parametrize("cluster", CONFIG.clusters)
def test_every_machines_default_stack_exists(cluster: str) -> None:
    machine = CONFIG.machine(cluster)
    assert CONFIG.given_stack(None, machine).name == machine.stack
    assert CONFIG.given_stack("ours", machine) is OURS


def test_constants_of_a_machine_hold_on_machines_like_it() -> None:
    there, alike = (CONFIG.stack_on("deepspeed-zero", name) for name in ("dgx2", "dgx2-box"))
    assert there == alike
    assert there.facts["stack.overlap"].calibrated_on
    elsewhere = CONFIG.stack_on("deepspeed-zero", "dgx-a100")
    assert elsewhere.unit_us == there.unit_us
    assert elsewhere.overlap is not None
    assert (elsewhere.overlap.at("low"), elsewhere.overlap.at("high")) == (0, 1)
    # What `at` leaves out holds as everywhere.
    vtrain = CONFIG.stack_on("megatron-lm-2021", "vtrain-a100")
    assert vtrain.facts["stack.overlap"] == CONFIG.stack_on("megatron-lm-2021", "selene-2022").overlap


def test_runs_of_a_stack_are_known_where_a_constant_was_fitted_or_errors_were_counted() -> None:
    fitted = CONFIG.stack_on("deepspeed-zero", "frontier")
    assert fitted.error_factor is None and fitted.has_evidence
    assert not all(fact.calibrated_on for fact in fitted.facts.values())
    counted, elsewhere = (CONFIG.stack_on("deepspeed-zero", name) for name in ("dgx2", "dgx-a100"))
    assert counted.error_factor is not None and counted.has_evidence
    assert not elsewhere.has_evidence


def test_a_stack_file_and_an_unknown_stack(tmp_path: Path) -> None:
    machine = CONFIG.machine("frontier")
    own = tmp_path / "mine.yaml"
    own.write_text("description: mine\ncollectives: flat\nat: {frontier: {unit_us: {value: 3, source: s}}}\n")
    found = CONFIG.given_stack(str(own), machine)
    assert (found.name, found.collectives, found.facts["stack.unit_us"].value) == ("mine", "flat", 3)
    with pytest.raises(UserError, match="no stack 'enginee'"):
        CONFIG.given_stack("enginee", machine)


@pytest.mark.parametrize("name", ["../stacks/deepspeed-zero", ".", "", "a" * 300, "two\nlines"])
def test_what_is_no_name_is_no_stack_and_no_cluster(name: str) -> None:
    with pytest.raises(UserError, match="no stack '"):
        CONFIG.stack_on(name, "frontier")
    with pytest.raises(UserError, match="no cluster '"):
        CONFIG.machine(name)


def test_a_scheme_is_drawn_on_a_machine_with_its_levels() -> None:
    """On the one asked for if it has them; else on that with the smallest nodes."""
    hier3, flat = CONFIG.scheme("hier3"), CONFIG.scheme("zero3")
    has = {name for name in CONFIG.clusters if hier3.machine_levels <= set(CONFIG.machine(name).sizes)}
    without = sorted(set(CONFIG.clusters) - has)
    assert "frontier" in has and without
    for preferred in (without[0], *has):
        drawn = CONFIG.machine_for(hier3, preferred)
        assert drawn is not None
        if preferred in has:
            assert drawn.name == preferred
        else:
            assert drawn.node_size == min(CONFIG.machine(name).node_size for name in has)
    assert CONFIG.machine_for(flat, without[0]) == CONFIG.machine(without[0])
    nowhere = flat.model_copy(update={"grads": "no such level"})
    assert CONFIG.machine_for(nowhere, "frontier") is None


def test_a_fitted_constant_without_bounds_is_refused() -> None:
    fitted = {"value": 0.5, "source": "fitted", "calibrated_on": ["a row"]}
    with pytest.raises(ValueError, match="has bounds if it was fitted"):
        Fact.model_validate(fitted)
    with pytest.raises(ValueError, match="has bounds if it was fitted"):
        Fact.model_validate({"value": 0.5, "source": "measured", "bounds": BOUNDS})
    with pytest.raises(UserError, match="low < high"):
        Bounds(low=1, high=1, source="made up")
    assert Fact.model_validate({**fitted, "bounds": BOUNDS}).place == "inside"


@pytest.mark.parametrize(
    ("value", "place"),
    [(0.1, "outside"), (0.2, "on a bound"), (0.206, "inside"), (0.696, "on a bound"), (0.98, "outside")],
)
def test_on_a_bound_is_within_1_percent_of_the_range(value: float, place: str) -> None:
    assert Bounds.model_validate(BOUNDS).place(value) == place


def test_the_document_lists_every_constant_beyond_its_bounds() -> None:
    """Shrinking the list takes a mechanism and a new fit; it is never edited by hand."""
    found = constants(CONFIG)
    beyond = found[found["place"].isin(["on a bound", "outside"])]
    block = read_blocks(ROOT)["beyond"]
    text = (ROOT / block.document).read_text()
    listed = text.split("<!-- beyond:begin -->")[1].split("<!-- beyond:end -->")[0].strip().splitlines()
    assert listed == block.all_lines(ROOT, ROOT)
    assert len(listed) - 2 == len(beyond)
    for row, line in zip(beyond.itertuples(), listed[2:], strict=True):
        assert f"| {row.cluster} | {row.stack}" in line
        assert f"| {row.constant} | {row.value:g} |" in line


def test_every_fitted_row_is_published() -> None:
    named = {row.id for source in SOURCES.values() for row in source.rows(CONFIG, *source.on(CONFIG))}
    fitted = constants(CONFIG)["calibrated_on"]
    assert {row for cell in fitted if cell for row in cell.split(" ; ")} <= named


@pytest.mark.parametrize("key", ["gathers", "reductions", "error_factor", "efficiency"])
def test_what_is_divided_by_is_above_zero(key: str) -> None:
    zero = {"value": 0, "source": "made up"}
    with pytest.raises(UserError, match=f"^file: {key}: .*nothing could be divided by it"):
        Stack.parse(
            {"name": "x", "description": "x", key: {"world": zero} if key == "efficiency" else zero}, "file"
        )
