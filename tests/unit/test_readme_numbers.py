"""README's numbers against the shipped files that it links."""

import re

import pandas as pd
import pytest
from texts import Text

from lowband.errors import UserError
from lowband.evidence.claims.experiments import read_experiments
from lowband.evidence.report.needs import disk
from lowband.evidence.report.page.placement import CELL, TALL, draw_placement
from lowband.evidence.report.page.schemes import STATES
from lowband.evidence.tables.derived import box
from lowband.spec.csv_tables import read_table
from tests import seconds
from tests.checkout import CONFIG, REFERENCE, ROOT

README = Text("README.md")


def test_the_status_is_in_the_first_lines() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:4]
    assert "never on several GPUs" in " ".join(first)


def test_zero3_beside_fsdp2() -> None:
    rows = read_table(REFERENCE / "joined" / "steps.csv").query("scheme == 'zero3'")
    times = rows.pivot_table("step_s", ["ranks", "step"], "engine")
    ratio = (times["hops"] / times["FSDP2"]).groupby("ranks").median()
    said = ", ".join(f"{each:.2f}" for each in ratio)
    README.says(f"{said} of FSDP2's on {', '.join(str(n) for n in ratio.index)} ranks")


def test_beside_one_process() -> None:
    rows = read_table(REFERENCE / "random" / "engine.csv")
    outcomes = rows["outcome"].value_counts()
    assert rows["wrong"].isna().all()
    assert set(outcomes.index) == {"ok", "ok within bound"}
    README.says(
        f"{outcomes['ok']} of {len(rows):,} equal bit for bit, {outcomes['ok within bound']} within rounding"
    )


def test_faults() -> None:
    rows = read_table(REFERENCE / "faults" / "injected.csv")
    right = rows["wrong"].isna() & rows["same_weights"].astype(bool)
    README.says(f"{right.sum()} of {len(rows)} recovered, with the weights of an undisturbed run")


def test_the_papers_ratio() -> None:
    points = box.build(read_table(REFERENCE / "box" / "runs.csv"))
    hier3 = points[points["scheme"] == "hier3"].set_index(["suite", "ranks", "accumulation"]).sort_index()
    nominal, passes, fitted = (
        f"{hier3.loc[key, 'over_zeropp'].squeeze():.2f}"
        for key in (("box", 16, 1), ("box-accumulation", 16, 8), ("box-attained", 32, 4))
    )
    README.says(
        f"{nominal} at nominal links, {passes} with 8 passes per step: **not met**; "
        f"{fitted} at link rates fitted to it"
    )


def test_what_the_two_commands_need() -> None:
    config = ROOT / "config"
    reproduce = read_experiments(config)["reproduce"]
    gib = disk(ROOT).split()[1]
    README.says(
        f"{reproduce.minutes(config):.0f} minutes of runs on 2 cores, then tables and figures; "
        f"{reproduce.memory_gib(config):.1f} GiB of memory, {gib} GiB of disk"
    )
    minutes = sum(seconds.recorded().values()) / 60
    README.says(f"{minutes:.0f} minutes of tests")
    cost = pd.read_csv(REFERENCE / "workflow" / "smoke.csv").set_index("step")
    minutes = cost.loc["everything that was started"] / 60
    README.says(f"({minutes['processor_time_s']:.1f} minutes of processor time, ")
    README.says(f", {minutes['wall_time_s']:.1f} by the wall clock)")


def test_the_picture() -> None:
    """Each rank's slices are as high as its share, and each state's is a part of the one before it."""
    machine = CONFIG.machine("frontier")
    picture = draw_placement(CONFIG.scheme("hier3"), machine)
    inside = [(0.0, float(TALL))] * 16
    for state, ranks in {"weights": 2, "grads": 8, "optim": 16}.items():
        slices = re.findall(rf'y="([\d.]+)" width="{CELL}" height="([\d.]+)" fill="{STATES[state]}"', picture)
        assert {float(height) for _, height in slices} == {TALL / ranks}
        assert (len(slices), len({top for top, _ in slices})) == (16, ranks)
        row = min(float(top) for top, _ in slices)
        held = [(float(top) - row, float(top) - row + float(height)) for top, height in slices]
        pairs = zip(held, inside, strict=True)
        assert all(
            top > outer_top - 1e-3 and end < outer_end + 1e-3 for (top, end), (outer_top, outer_end) in pairs
        )
        inside = held
    assert all(f"{level.link.gigabytes_per_s:g} GB/s" in picture for level in machine.levels)
    with pytest.raises(UserError, match="no level 'package'"):
        draw_placement(CONFIG.scheme("hier3"), CONFIG.machine("dgx2"))
