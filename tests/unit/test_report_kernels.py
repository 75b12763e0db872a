"""Tables of kernels: attention beside the paper's as it counts, rates beside a copy, hops beside links."""

import operator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from texts import Text

from lowband.evidence.claims.grade import grade_claims
from lowband.evidence.report.figures import FIGURES
from lowband.evidence.tables.build import source_paths, write_table
from lowband.evidence.tables.derived import attention, kernel_rates, quantized_hops, training_speed
from lowband.spec.csv_tables import read_benchmark, read_table
from tests.checkout import CONFIG, REFERENCE, ROOT

REPORTED = read_table(ROOT / "results" / "reported" / "03_flashattention2_2307.08691.csv")


def measured(**changes) -> pd.DataFrame:
    """What `lowband bench-kernel` writes of one point: 2 TFLOP in 5 ms forward, 5 TFLOP in 15 ms backward."""
    row = {
        "part": "attention", "implementation": "triton", "device": "NVIDIA H200", "seq_len": 4096,
        "head_dim": 128, "causal": True, "outcome": "ok", **changes,
    }  # fmt: skip
    forward = {"operation": "forward", "flops": 2e12, "time_s": 0.005}
    backward = {"operation": "backward", "flops": 5e12, "time_s": 0.015}
    other = {**row, **forward, "part": "softmax"}
    return pd.DataFrame([{**row, **forward}, {**row, **backward}, other])


def test_the_papers_rows_are_as_printed() -> None:
    table = attention.build(pd.DataFrame(), REPORTED)
    assert set(table["provenance"]) == {"reported"}
    rows = table.set_index(["device", "method", "head_dim", "is_causal", "seq_len", "direction"])["tflops"]
    assert rows["A100 80GB SXM4", "FlashAttention-2", 64, False, 16384, "fwd+bwd"] == 176
    assert rows["A100 80GB SXM4", "FlashAttention-2", 128, True, 512, "fwd+bwd"] == 99
    assert rows["H100 80GB SXM5", "FlashAttention-2", 128, True, 16384, "fwd+bwd"] == 328
    assert np.isnan(rows["H100 80GB SXM5", "PyTorch", 64, False, 16384, "fwd+bwd"])


def test_both_directions_are_over_the_time_of_both() -> None:
    table = attention.build(measured(), REPORTED)
    ours = table[table["provenance"] == "measured"].set_index("direction")
    assert ours["tflops"].to_dict() == pytest.approx({"fwd": 400, "bwd": 5000 / 15, "fwd+bwd": 350})
    assert set(ours["method"]) == {"lowband flash2"}
    assert set(ours["device"]) == {"NVIDIA H200"}


def test_a_rate_is_over_its_peers_on_the_same_point_alone() -> None:
    """7 TFLOP in 20 ms; peers in 40 and in 16 ms there, and of other masks, lengths and devices."""

    def of(implementation: str, slower: float, **changes: object) -> pd.DataFrame:
        rows = measured(implementation=implementation, **changes)
        return rows.assign(time_s=rows["time_s"] * slower)

    elsewhere = ({"causal": False}, {"seq_len": 8192}, {"head_dim": 64}, {"device": "NVIDIA H100 80GB HBM3"})
    others = [of("torch cudnn", 9, **changes) for changes in elsewhere]
    peers = [of("torch flash", 2), of("torch cudnn", 0.8)]
    table = attention.build(pd.concat([measured(), *peers, *others]), REPORTED)
    ours = table[table["method"] == "lowband flash2"].set_index("direction")
    for direction in ("fwd", "bwd", "fwd+bwd"):
        assert ours.loc[direction, ["over_flash", "over_cudnn"]].tolist() == pytest.approx([2, 0.8])
    alone = attention.build(measured(), REPORTED)
    assert alone.loc[alone["provenance"] == "measured", ["over_flash", "over_cudnn"]].isna().all(axis=None)


def test_a_failed_direction_leaves_no_speed_of_both() -> None:
    failed = measured()
    failed.loc[1, ["time_s", "outcome"]] = [np.nan, "oom"]
    table = attention.build(failed, REPORTED)
    ours = table[table["provenance"] == "measured"].set_index("direction")
    assert ours.loc["fwd", "tflops"] == pytest.approx(400)
    assert np.isnan(ours.loc["fwd+bwd", "tflops"])
    assert ours.loc["fwd+bwd", "outcome"] == "oom"


def test_the_figure_shows_what_has_a_speed() -> None:
    figure = FIGURES["attention"]
    drawn = figure.rows(attention.build(measured(), REPORTED))
    assert set(drawn["direction"]) == {"fwd+bwd"}
    assert set(drawn["provenance"]) == {"measured", "reported"}
    assert drawn["tflops"].notna().all()
    labels = [text.get_text() for text in figure.code("draw")(drawn).legends[0].get_texts()]
    assert "lowband flash2, measured" in labels
    assert "FlashAttention-2, reported" in labels


def test_training_stands_beside_table_1() -> None:
    """2 TFLOP by the paper's count in 10 ms."""
    step = {
        "part": "training", "operation": "step", "model": "gpt-1.3b", "seq_len": 2048, "device": "H200",
        "outcome": "ok", "reason": np.nan,
    }  # fmt: skip
    rows = [
        {**step, "implementation": "flash2", "paper_flops": 2e12, "time_s": 0.01},
        {**step, "implementation": "sdpa", "outcome": "oom", "reason": "OutOfMemoryError: x"},
    ]
    empty = training_speed.build(pd.DataFrame(), REPORTED)
    assert len(empty) == 12
    table = training_speed.build(pd.DataFrame(rows), REPORTED)
    point = table[(table["model"] == "gpt-1.3b") & (table["seq_len"] == 2048)].set_index("method")
    assert point["tflops"].dropna().to_dict() == {
        "lowband flash2": 200, "without FlashAttention": 142, "FlashAttention": 189, "FlashAttention-2": 196,
    }  # fmt: skip
    assert point.loc["torch SDPA", "reason"] == "OutOfMemoryError: x"


def test_rates_are_over_the_copy_and_torch_of_the_same_run() -> None:
    size = {"part": "softmax", "operation": "forward", "dtype": "float32", "rows": 8, "columns": 1000}
    rows = pd.DataFrame(
        [
            {"part": "ceilings", "operation": "copy", "bytes": 8e9, "time_s": 0.002},
            {**size, "implementation": "triton online", "bytes": 3e9, "least_bytes": 2e9, "time_s": 0.001},
            {**size, "implementation": "torch", "least_bytes": 2e9, "time_s": 0.004},
            {**size, "implementation": "torch.compile", "least_bytes": 2e9, "outcome": "error"},
        ]
    )
    defaults = {"partners": np.nan, "outcome": "ok", "reason": np.nan, "device": "H200", "commit": "c"}
    for column, value in defaults.items():
        rows[column] = rows[column].fillna(value) if column in rows else value
    table = kernel_rates.build(rows).set_index("implementation")
    ours = table.loc["triton online"]
    assert (ours["bytes_per_s"], ours["of_copy"], ours["over_torch"]) == pytest.approx((3e12, 0.75, 4))
    assert table.loc["torch", "of_copy"] == pytest.approx(0.125)
    assert np.isnan(table.loc["torch.compile", "over_torch"])
    assert kernel_rates.build(pd.DataFrame()).empty


def test_a_rate_is_over_that_of_the_copy_nearest_in_bytes() -> None:
    def row(part: str, device: str, moved: float, seconds: float) -> dict[str, object]:
        return {
            "part": part, "operation": "copy" if part == "ceilings" else "encode",
            "implementation": "x", "dtype": "d", "device": device, "rows": 1, "columns": int(moved),
            "bytes": moved, "least_bytes": moved, "time_s": seconds, "outcome": "ok", "reason": "",
            "commit": "c", "partners": 1,
        }  # fmt: skip

    copies = [row("ceilings", "a", 1e6, 1e-3), row("ceilings", "a", 1e9, 0.1), row("ceilings", "b", 1e9, 1.0)]
    kernels = [row("block_quant", device, moved, 1.0) for device in "ab" for moved in (2e6, 9e8)]
    table = kernel_rates.build(pd.DataFrame([*copies, *kernels])).set_index(["device", "columns"])["of_copy"]
    assert table.to_dict() == pytest.approx(
        {("a", 2e6): 2e6 / 1e9, ("a", 9e8): 9e8 / 1e10, ("b", 2e6): 2e6 / 1e9, ("b", 9e8): 9e8 / 1e9}
    )


def test_a_hop_in_blocks_by_hand() -> None:
    """4 ranks on an H100, two sizes: 4 messages encoded, 3 sent; other rows are of no machine or outcome."""

    def row(operation: str, seconds: float, **other: object) -> dict[str, object]:
        return {
            "part": "block_quant", "operation": operation, "implementation": "triton", "columns": 2**26,
            "partners": 4, "device": "NVIDIA H100 80GB HBM3", "outcome": "ok", "commit": "c",
            "time_s": seconds,
        } | other  # fmt: skip

    both = [row("encode int4", 1e-4), row("sum_encode int4", 2e-4), row("encode int8", 1.0)]
    others = [
        {**each, **other}
        for each in both[:2]
        for other in (
            {"device": "NVIDIA H100 PCIe"},
            {"columns": 2**28, "operation": "encode int4"},
            {"implementation": "torch"},
        )
    ]
    failed = row("sum_encode int8", np.nan, outcome="error")
    small = [
        row("encode int4", 1e-5, columns=2**22, commit="b"), row("sum_encode int4", 3e-5, columns=2**22),
    ]  # fmt: skip
    table = quantized_hops.build(pd.DataFrame([*both, *others, failed, *small]))
    assert set(table["wire"]) == {"int4"} and "cuda" not in set(table["cluster"])
    rows = table[table["cluster"] == "dgx-h100"].set_index(["message_values", "level"])
    assert sorted(rows.index) == [(2**22, "node"), (2**22, "world"), (2**26, "node"), (2**26, "world")]
    for (values, level), found in rows.iterrows():
        rate = {"node": 450e9, "world": 50e9}[level]
        kernels_s, commits = {2**22: (7e-5, "b c"), 2**26: (6e-4, "c")}[values]
        wire_s = 3 * (values / 2 + 4 * values / 256) / rate  # half a byte a value, a scale for 256
        assert (found["kernels_s"], found["wire_s"]) == pytest.approx((kernels_s, wire_s))
        assert found["over_wire"] == pytest.approx(kernels_s / wire_s)
        assert found["gain"] == pytest.approx(3 * 2 * values / rate / (kernels_s + wire_s))
        assert found["commit"] == commits
    assert quantized_hops.build(pd.DataFrame()).empty


def test_goals_are_graded_on_the_shipped_rows(tmp_path: Path) -> None:
    """Each claim's value by hand, of all rows that it is about; none is `not run`."""
    for name in ("attention", "quantized_hops"):
        write_table(name, tmp_path, root=ROOT)
    paths = {device: REFERENCE / device / "kernels.csv" for device in ("h100", "h200")}
    ours = {device: read_benchmark(path).query("outcome == 'ok'") for device, path in paths.items()}

    def kernels_over(values: int, bits: int, rate: float) -> tuple[float, float]:
        """Largest share of the wire's time, and least gain over 16 bits, of 8 ranks."""
        wire_s = 7 * (values * bits / 8 + values / 64) / rate
        kernels_s = [
            8 * of[f"encode int{bits}"] + of[f"sum_encode int{bits}"]
            for rows in ours.values()
            for of in [
                rows[(rows["implementation"] == "triton") & (rows["columns"] == values)]
                .set_index("operation")["time_s"]
            ]
        ]  # fmt: skip
        return max(kernels_s) / wire_s, 7 * 2 * values / rate / (max(kernels_s) + wire_s)

    rows = ours["h100"].query("part == 'attention' and seq_len >= 4096")
    ids = ["implementation", "head_dim", "causal", "seq_len"]
    times = rows.pivot_table(index=ids, columns="operation", values="time_s")
    flops = rows.pivot_table(index=ids, columns="operation", values="flops")
    forward = (flops["forward"] / times["forward"] / 1e12).loc["triton", 128].xs(16384, level="seq_len")
    over = times.sum(axis=1).loc["torch cudnn"] / times.sum(axis=1).loc["triton"]
    links = [(bits, rate) for bits in (8, 4) for rate in (50e9, 450e9)]
    expected = {
        "flash2-forward-h100": forward.min(),
        "flash2-over-cudnn": over.min(),
        "quantized-hop-gain": min(kernels_over(2**26, *link)[1] for link in links),
        "quantized-hop-gain-small": min(kernels_over(2**22, *link)[1] for link in links),
        "quantized-hop-over-wire": max(kernels_over(2**26, *link)[0] for link in links),
        "quantized-hop-over-network": max(kernels_over(2**26, bits, 50e9)[0] for bits in (8, 4)),
    }
    graded = grade_claims(ROOT / "config" / "claims.yaml", tmp_path, expected, ROOT).set_index("id")
    assert graded["ours"].to_dict() == pytest.approx(expected)
    holds = {"<=": operator.le, ">=": operator.ge}
    for name, claim in graded.iterrows():
        is_met = holds[claim["relation"]](expected[str(name)], claim["target"])
        assert claim["verdict"] == ("met" if is_met else "not met"), name


def test_what_is_said_of_kernels_beside_links() -> None:
    text = Text("docs/kernels.md")
    rows = pd.concat(map(read_benchmark, sorted(REFERENCE.glob("*/kernels.csv"))))
    hops = quantized_hops.build(rows)

    def said(values: int, level: str, column: str, digits: int) -> list[str]:
        of = hops[(hops["message_values"] == values) & (hops["level"] == level)].groupby("wire")[column]
        ends = (of.agg(["min", "max"]).loc[wire] for wire in ("int8", "int4"))
        return [" to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in both)) for both in ends]

    assert set(hops[hops["level"] == "world"]["link_bytes_per_s"]) == {50e9}
    (*outside, out8, out4), (*inside, in8, in4), (*small, small8, small4), (*near, near8, near4) = (
        [*said(values, level, "over_wire", 2), *said(values, level, "gain", digits)]
        for values in (2**26, 2**22)
        for level, digits in (("world", 1), ("node", 2))
    )
    text.says(
        f"its kernels take {outside[0]} of the messages' time with INT8 blocks and {outside[1]} with INT4; "
        f"the hop is {out8} and {out4} times as fast as in 16 bits. Over NVLink they take "
        f"{inside[0]} and {inside[1]} of it, and the hop is {in8} and {in4} times as fast."
    )
    text.says(
        f"they take {small[0]} and {small[1]} between nodes, where the hop is {small8} and {small4} times as "
        f"fast as in 16 bits. Over NVLink they take {near[0]} and {near[1]}, and the hop is {near8} and "
        f"{near4} times as fast: INT8 loses there."
    )
    copies = rows[rows["operation"] == "copy"].sort_values("bytes").groupby("device").last()
    of_values = rows[(rows["columns"] == 2**26) & (rows["implementation"] == "triton")]
    moved = of_values.pivot_table(index="device", columns="operation", values="bytes")
    copied_s = (8 * moved["encode int4"] + moved["sum_encode int4"]) * copies["time_s"] / copies["bytes"]
    over = copied_s / (7 * (2**25 + 2**20) / 50e9)
    h100, h200 = (f"{over[device]:.2f}" for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    text.says(f"the bytes that INT4's kernels move takes {h100} on the H100 and {h200} on the H200")
    assert float(h200) < 0.1 < float(h100)
    values = 12 * CONFIG.model("gpt-1.3b").hidden ** 2 / 8  # a block has matrices of 12 h^2
    text.says(f"over 8 ranks has messages of {values / 1e6:.0f} million values.")


def test_shipped_sources_are_of_every_device(tmp_path: Path) -> None:
    assert source_paths("shipped/kernels", tmp_path, tmp_path) == []
    for device in ("h200", "a100"):
        folder = tmp_path / "results" / "reference" / device
        folder.mkdir(parents=True)
        (folder / "kernels.csv").write_text("part\n")
    found = source_paths("shipped/kernels", tmp_path, tmp_path)
    assert [path.parent.name for path in found] == ["a100", "h200"]
