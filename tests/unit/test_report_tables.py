"""Derived tables against numbers worked out by hand."""

from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
from report_runs import smoke_specs, write_failure, write_run

from lowband.errors import UserError
from lowband.evidence.tables.build import code_of, reads_config, tables_of_runs, write_table
from lowband.evidence.tables.collect import collect
from lowband.evidence.tables.derived import box_hops, communication
from lowband.evidence.tables.points import POINT
from lowband.spec.csv_tables import read_table
from lowband.spec.records import Outcome
from tests.checkout import CONFIG, REFERENCE

TOKENS = 8 * 64  # per step of the smoke suite: global batch x sequence


def test_scaling_names_its_base(tables: Path) -> None:
    df = read_table(tables / "scaling.csv").set_index(["scheme", "ranks"])
    # zero3 ran on 1 rank, 1 s a step; on 8 ranks 0.4 s: speed-up 2.5, over 8 times the ranks.
    assert df.loc[("zero3", 8), "base_ranks"] == 1
    assert df.loc[("zero3", 8), "tokens_per_s"] == pytest.approx(TOKENS / 0.4)
    assert df.loc[("zero3", 8), "speedup"] == pytest.approx(2.5)
    assert df.loc[("zero3", 8), "efficiency"] == pytest.approx(2.5 / 8)
    # hpz ran on 4 ranks at least, 0.5 s a step: speed-up 1.25, over twice the ranks.
    assert df.loc[("hpz", 8), "base_ranks"] == 4
    assert df.loc[("hpz", 8), "efficiency"] == pytest.approx(1.25 / 2)
    assert (df["exposed_comm_share"] == 0.25).all()


def test_a_table_is_made_again_where_what_it_imports_changes() -> None:
    assert "evidence/tables/derived/box.py" in code_of("box_ratios")
    derived = "evidence/tables/derived"
    assert {f"{derived}/wan_losses.py", f"{derived}/convergence.py"} <= {*code_of("delays")}
    assert {"evidence/validation/products.py", "cost/products.py"} <= {*code_of("products")}
    assert "evidence/validation/__init__.py" in code_of("accuracy")  # of a package, by its name
    assert code_of("joined") == ["evidence/tables/tables.yaml", "evidence/tables/view.py"]


def test_a_table_is_made_again_where_the_rates_of_links_change() -> None:
    assert reads_config("communication")
    assert not reads_config("scaling") and not reads_config("joined")


def test_flops_name_their_convention(tables: Path) -> None:
    df = read_table(tables / "scaling.csv").set_index(["scheme", "ranks"])
    # gpt-200k: 6 (170,560 - 64 positions x 64) + 12 x 3 layers x 64 x 64 = 1,146,240 FLOP per token
    assert df.loc[("zero3", 8), "model_flop_per_s_per_rank"] == pytest.approx(1_146_240 * TOKENS / 0.4 / 8)
    assert df["flop_convention"].str.contains("no recomputation").all()
    assert df["mfu"].isna().all()  # this machine states no peak


def test_communication_and_memory_are_at_every_number_of_ranks(tables: Path) -> None:
    """A figure shows the largest. One rank sends nothing."""
    for name, ranks in (("communication", {4, 8}), ("memory", {1, 4, 8})):
        df = read_table(tables / f"{name}.csv")
        assert set(df["ranks"]) == ranks
        drawn = import_module(f"lowband.evidence.report.figures.{name}").data(df)
        assert set(drawn["ranks"]) == {8}
        assert len(drawn) < len(df)
        assert df["difference_bytes"].max() == 0


def test_bytes_have_the_rate_of_their_link(tables: Path) -> None:
    """Ranks that share a computer's memory have no links: Frontier's stand for them, by name."""
    df = read_table(tables / "communication.csv")
    assert set(df["rates_of"]) == {"frontier"}
    rates = df.groupby("level")["link_bytes_per_s"].unique().map(list).to_dict()
    assert rates == {"package": [200e9], "node": [50e9], "world": [12.5e9]}
    runs = read_table(tables / "runs.csv")
    box = communication.build(df[[*BYTES]].assign(cluster="frontier-box"), runs)
    assert set(box["rates_of"]) == {"frontier-box"}
    assert box["link_bytes_per_s"].tolist() == [rate / 160_000 for rate in df["link_bytes_per_s"]]
    nowhere = communication.build(df[[*BYTES]].assign(level="rack"), runs)
    assert nowhere["link_bytes_per_s"].isna().all()
    assert len(nowhere)


def test_bytes_have_the_rate_of_the_link_that_their_run_had() -> None:
    """An eighth and a half of the machine's, over its outermost level."""
    of_suite = "suite == 'box-dgx2'"
    sent, runs = (read_table(REFERENCE / "box" / f"{name}.csv").query(of_suite) for name in ("bytes", "runs"))
    df = communication.build(sent, runs)
    rates = df.groupby(["level", "condition"])["link_bytes_per_s"].unique().map(list)
    whole = CONFIG.machine("dgx2-box").link("world").gigabytes_per_s * 1e9 / 160_000
    assert rates["world"].tolist() == [[whole / 8], [whole / 2]]
    assert len({rate for [rate] in rates["node"]}) == 1


def test_bytes_between_nodes_are_those_of_one_repeat() -> None:
    of_suite = "suite == 'box-hops'"
    runs, sent = (read_table(REFERENCE / "box" / f"{name}.csv").query(of_suite) for name in ("runs", "bytes"))
    again = [df.assign(run_id=df["run_id"] + " again", repeat=2) for df in (runs, sent)]
    once = box_hops.build(runs, sent)
    twice = box_hops.build(pd.concat([runs, again[0]]), pd.concat([sent, again[1]]))
    assert len(once)
    assert twice["between_nodes_bytes"].tolist() == once["between_nodes_bytes"].tolist()


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("engine", ["lowband", "fsdp2"])
def test_a_peer_is_compared_by_the_repeats_that_ended_ok(tmp_path: Path, engine: str, lost: int) -> None:
    late = Outcome(status="timeout", cause="the run took longer than its time_limit_s", steps=3)
    wanted = {"ranks": 4, "compute_dtype": "fp32"}
    specs = [
        spec
        for spec in CONFIG.runs(["peers"])
        if spec.engine in ("lowband", "fsdp2") and spec.scheme.name == "zero3" and spec.repeat <= 2
        if all(getattr(spec, key) == value for key, value in wanted.items())
    ]
    assert len(specs) == 4
    runs = [
        write_failure(tmp_path, spec, late)
        if (spec.engine, spec.repeat) == (engine, lost)
        else write_run(tmp_path, spec, 1.0, 2.0)
        for spec in specs
    ]
    collect(runs, tmp_path)
    write_table("peers", tmp_path)
    [row] = read_table(tmp_path / "peers.csv").to_dict("records")
    assert (row["peer"], row["status"], row["step_time_ratio"]) == ("fsdp2", "ok", 1)
    assert pd.isna(row["cause"])


def test_a_run_is_collected_once(tmp_path: Path) -> None:
    first, again = (write_run(tmp_path / name, smoke_specs()[0], 1.0, 2.0) for name in "ab")
    with pytest.raises(UserError) as error:
        collect([first, again], tmp_path / "tables")
    assert str(error.value).startswith(f"{again}: run {smoke_specs()[0].run_id} again (allowed: once")
    assert not (tmp_path / "tables" / "runs.csv").exists()


BYTES = [*POINT, "level", "collective", "wire", "counted_bytes", "closed_form_bytes", "difference_bytes"]


def test_hpz_gathers_for_the_backward_inside_the_node(tables: Path) -> None:
    df = read_table(tables / "communication.csv").query("ranks == 8")
    df = df.set_index(["scheme", "level", "collective", "wire"])
    assert df.loc[("hpz", "world", "backward_gather", "native"), "counted_bytes"] == 0
    assert df.loc[("zero3", "world", "backward_gather", "native"), "counted_bytes"] > 0


def test_losses_are_compared_with_the_fewest_ranks(tables: Path) -> None:
    df = read_table(tables / "loss.csv")
    assert set(df["reference_scheme"]) == {"zero3"}
    assert set(df["reference_ranks"]) == {1}
    assert (df["loss_difference"] == (df["ranks"] - 1) * 2.0**-20).all()


@pytest.mark.parametrize("schemes", [("zero3", "zeropp"), ("zeropp", "zero3")])
def test_losses_are_compared_with_a_run_that_rounds_nothing(tmp_path: Path, schemes: tuple[str, str]) -> None:
    """However the folders are ordered."""
    [spec] = [spec for spec in CONFIG.runs(["smoke"]) if (spec.scheme.name, spec.ranks) == ("zero3", 8)]
    specs = [spec.model_copy(update={"scheme": CONFIG.scheme(name), "run_id": name}) for name in schemes]
    collect([write_run(tmp_path, s, 1.0, loss=1.0) for s in specs], tmp_path)
    write_table("loss", tmp_path)
    df = read_table(tmp_path / "loss.csv")
    assert set(df["reference_scheme"]) == {"zero3"}


def test_parity_counts_different_weights_per_rank_count(tables: Path) -> None:
    df = read_table(tables / "parity.csv").set_index("ranks")
    assert list(df.loc[[1, 4, 8], "schemes"]) == [1, 4, 4]
    assert set(df["distinct_weights"]) == {1}
    assert df.loc[8, "max_loss_difference"] == 7 * 2.0**-20


def test_what_the_runs_of_a_suite_show_by_themselves() -> None:
    of_any = ["scaling", "communication", "memory", "loss", "parity"]
    assert tables_of_runs(["smoke"]) == [*of_any]
    assert tables_of_runs(["convergence"]) == [*of_any, "convergence", "convergence_curves"]
    assert tables_of_runs(["peers-box"]) == [*of_any, "peers", "peer_bytes"]
    assert tables_of_runs(["box-sweep"]) == [*of_any, "box", "box_hops", "box_ratios"]
    assert tables_of_runs(["default"]) == [*of_any]  # softmax is a benchmark, no run


def test_a_table_without_a_column_is_refused_in_one_line(tables: Path, tmp_path: Path) -> None:
    for name in ("runs", "steps"):
        read_table(tables / f"{name}.csv").drop(columns="tokens_per_step", errors="ignore").to_csv(
            tmp_path / f"{name}.csv"
        )
    with pytest.raises(UserError, match=r"cannot be used: KeyError.*tokens_per_step") as error:
        write_table("scaling", tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(error.value)


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table 'nope'") as error:
        write_table("nope", tmp_path)
    assert "scaling" in str(error.value)
