"""Numbers in sentences of five documents (benchmarks to reliability) against their files."""

import json
import shutil
import sys

import pandas as pd
import pytest
from texts import Text

from lowband.cost.numbers import GIB
from lowband.evidence.claims.rehearsed import suite_ratios
from lowband.evidence.report.figures import own_figures
from lowband.evidence.tables.derived import peers
from lowband.predict.request import Grid
from lowband.predict.search.ratios import WITHIN
from lowband.spec.csv_tables import read_table
from lowband.spec.plain_data import read_yaml
from tests.all.parts import CAMPAIGNS
from tests.called import called
from tests.checkout import CONFIG, REFERENCE, ROOT

BENCHMARKS, PREDICTOR = Text("docs/benchmarks.md"), Text("docs/predictor-errors.md")
RUNNING, TESTING = Text("docs/running.md"), Text("docs/testing.md")
RELIABILITY = Text("docs/reliability.md")
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def shipped(name: str) -> pd.DataFrame:
    return read_table(REFERENCE / f"{name}.csv")


def test_where_a_peer_is_faster() -> None:
    table = peers.build(*(shipped(f"peers/{name}") for name in ("runs", "steps", "outside")))
    slower = table[table["step_time_ratio"] > 1]
    assert set(slower["scheme"]) == {"ddp"}
    ratio = slower.set_index(["peer", "ranks"])["step_time_ratio"]
    ddp, deepspeed = (
        [f"{ratio[peer, ranks]:.2f}" for ranks in sorted(ratio[peer].index)] for peer in ("ddp", "deepspeed")
    )
    assert sorted(ratio["ddp"].index) == [4, 8]
    assert sorted(ratio["deepspeed"].index) == [2, 4, 8]
    assert deepspeed[0] == "1.00"  # as fast
    BENCHMARKS.says(f"DDP on 4 and 8 ranks ({ddp[0]} and {ddp[1]} times our speed)")
    BENCHMARKS.says(f"DeepSpeed on 4 and 8 ({deepspeed[1]} and {deepspeed[2]} times; on 2 it is as fast)")
    [of_two] = table[(table["peer"] == "ddp") & (table["ranks"] == 2)]["step_time_ratio"]
    BENCHMARKS.says(
        f"each has [a run of its own](#our-engine-against-its-peers), {ddp[1]} times on 8, {ddp[0]} on 4 and "
        f"{of_two:.2f} on 2."
    )
    more = table[(table["scheme"] == "zero3") & (table["memory_ratio"] > 1)]
    [peer], [ranks], [ratio] = (more[name] for name in ("peer", "ranks", "memory_ratio"))
    assert peer == "fsdp2"
    BENCHMARKS.says(f"no more memory but for {100 * (ratio - 1):.1f} % beside FSDP2 on {ranks}.")
    runs = shipped("seldom-peers/runs")
    ms = 1e3 * runs.groupby(["scheme", "engine", "ranks"])["step_time_s"].median()
    BENCHMARKS.says(
        f"DDP's step takes {ms['ddp', 'ddp', 2]:.0f} ms on 2 ranks and {ms['ddp', 'ddp', 4]:.0f} on 4, "
        f"ours {ms['ddp', 'lowband', 2]:.0f} and {ms['ddp', 'lowband', 4]:.0f}"
    )
    torchs, ours = ([f"{ms['local-sgd', of, n]:.0f}" for n in (2, 4)] for of in ("ddp", "lowband"))
    BENCHMARKS.says(f"torch's Local SGD {torchs[0]} and {torchs[1]}, ours {ours[0]} and {ours[1]}")


def test_ddp_beside_torchs() -> None:
    rows = shipped("joined/steps").query("scheme == 'ddp'")
    rows = rows.set_index(["ranks", "engine", "step"]).sort_index()
    theirs = rows.xs("DDP", level="engine")

    def times(column: str, ranks: int, engine: str) -> str:
        return f"{(rows[column].loc[ranks, engine] / theirs[column].loc[ranks]).median():.2f}"

    def by_rank(column: str, engine: str) -> str:
        two, four, eight = (times(column, ranks, engine) for ranks in (2, 4, 8))
        return f"{two}, {four} and {eight} times"

    in_less = by_rank("held_bytes", "joined")
    BENCHMARKS.says(
        f"`ddp` takes {by_rank('step_s', 'hops')} DDP's step on 2, 4 and 8 ranks, and "
        f"{by_rank('held_bytes', 'hops')} its memory (joined {by_rank('step_s', 'joined')}, in {in_less} the "
        "memory)"
    )
    BENCHMARKS.says(f"**`ddp` takes more than DDP:** {times('step_s', 8, 'hops')} times its step on 8 ranks")
    BENCHMARKS.says(f"as one unit it is {times('step_s', 8, 'joined, one unit')} on 8 ranks")


def test_the_predictors_speed() -> None:
    bench = json.loads((REFERENCE / "predicted" / "bench.json").read_text())
    BENCHMARKS.says(
        f"A grid of {bench['grid_points']:,} jobs (9 schemes x 4 rank counts x micro-batch x accumulation "
        f"x outer bandwidth; time and memory of each): {bench['grid_predictions_per_s']:,.0f} predictions "
        f"per second, "
        f"{bench['grid_predictions_per_wall_s']:,.0f} by the wall clock. "
        f"One job at a time: {bench['single_predictions_per_s']:.0f} per second."
    )
    BENCHMARKS.says(f"on 2 shared cores (load {bench['load_average']:.0f})")
    BENCHMARKS.says(
        f"{bench['plan_candidates']:,} candidates in {bench['plan_cpu_s']:.1f} s of processor time "
        f"({bench['plan_wall_s']:.1f} s by the wall clock under that load)"
    )
    default, wider = bench["commands_cpu_s"].values()
    BENCHMARKS.says(f"16,384 H100 takes {default:.1f} s of processor time")
    BENCHMARKS.says(f"and {wider:.1f} s with a sequence of 8,192, a global batch of 2,048 and any software")


def test_cost_of_make_smoke() -> None:
    cost = pd.read_csv(REFERENCE / "workflow" / "smoke.csv").set_index("step")
    seconds, number = cost["processor_time_s"], cost["processes"].fillna(0).astype(int)
    everything = cost.loc["everything that was started"]
    BENCHMARKS.says(f"{everything['processor_time_s']:.1f} s of processor time in total")
    BENCHMARKS.says(f"and {everything['wall_time_s']:.1f} s by the wall clock")
    BENCHMARKS.says(
        f"{number['train']} runs {seconds['train']:.0f} s, {number['figure']} figures "
        f"{seconds['figure']:.0f} s, {number['table']} tables {seconds['table']:.0f} s"
    )


@pytest.mark.skipif(
    shutil.which("snakemake", path=sys.exec_prefix + "/bin") is None, reason="needs Snakemake"
)
def test_steps_of_make_smoke() -> None:
    whole, suite = _steps(), _steps("tables")
    BENCHMARKS.says(
        f"Today these are {whole['total']} steps, among them {whole['train']} runs, {whole['table']} tables "
        f"and {whole['figure']} figures."
    )
    assert whole["figure"] == len(own_figures(["smoke"]))
    BENCHMARKS.says(f"The suite alone takes {suite['total']} steps instead of {whole['total']}:")


def _steps(*targets: str) -> dict[str, int]:
    """Steps by rule of a smoke run that has made nothing yet."""
    command = [sys.exec_prefix + "/bin/snakemake", "-n", "--nolock", *targets]
    done = called(*command, "--config", "suites=[smoke]", "results=counted")
    lines = done.stdout.split("----------", 1)[1].splitlines()[1:]
    return {name: int(count) for name, count in (line.split() for line in lines[: lines.index("")])}


def test_what_snakemake_takes() -> None:
    rows = shipped("workflow/scheduler_share")
    share = rows["percent_of_a_core"][rows["runs_done"] >= 1]
    BENCHMARKS.says(f"takes {share.mean():.1f} % on average and {share.max():.1f} % at most of a core")


def test_many_runs() -> None:
    rows = shipped("load/load").set_index(["part", "size"])
    slowest = rows.loc[("import-log", 1_000_000), "cpu_s"]
    BENCHMARKS.says(f"takes {slowest / 10:.1f} times the processor time of its goal")


def test_mutants_of_one_commit() -> None:
    rows = shipped("mutants/mutants")
    commit, first = next(iter(rows["commit"].value_counts().items()))
    TESTING.says(f"The {len(rows)} mutants of one commit's sources ({str(commit)[:7]})")
    TESTING.says(f"{len(rows) - first} of them were tried again later")
    assert not [*rows[(rows["outcome"] == "survived") & rows["verdict"].isna()]["file"]]


def test_what_make_test_all_adds() -> None:
    cases = {name: campaign.command[-1] for name, campaign in CAMPAIGNS.items()}
    of_modules = f"{cases['wide']} of modules that users bring"
    TESTING.says(f"{int(cases['random']):,} random programs, {of_modules}, {cases['faults']} faults")
    for name in ("random", "wide", "fuzz"):
        TESTING.says(f"`python -m {' '.join(CAMPAIGNS[name].command)} --out FILE`")
    rows = shipped("fuzz/inputs")
    most = rows[rows["guided"].astype(bool)]["inputs"].max()
    TESTING.says(f"up to {most:,} guided inputs for each parser and verb")


def test_frontiers_ratios() -> None:
    stack = read_yaml(ROOT / "config" / "stacks" / "deepspeed-zero.yaml")["at"]["frontier"]["efficiency"]
    rows = shipped("predicted/validation")
    rows = rows[rows["source"] == "frontier"].set_index("row")["predicted"]
    zeropp, hier3 = rows["frontier: ZeRO++ / ZeRO-3"], rows["frontier: hier3 / ZeRO-3"]
    PREDICTOR.says(
        f"{stack['node']['value']} in a node and {stack['world']['value']} between nodes, "
        f"give {zeropp:.3f} and {hier3:.3f}"
    )
    PREDICTOR.says(f"fitted to the ratios, give 1 : {zeropp:.3f} : {hier3:.3f}")
    one = shipped("predicted/alternatives").set_index("alternative").loc["one share of all links"]
    PREDICTOR.says(f"and the efficiency is {one['efficiency']:.3f}")


def test_suites_of_make_reproduce() -> None:
    specs = {name: CONFIG.runs([name]) for name in ("default", "volume", "links")}
    ranks = {name: sorted({spec.ranks for spec in of}) for name, of in specs.items()}
    schemes = {name: len({spec.scheme.name for spec in of}) for name, of in specs.items()}
    assert schemes["default"] == 9
    assert schemes["links"] == 3
    RUNNING.says("nine schemes on {}, {}, {} and {} gloo ranks".format(*ranks["default"]))
    RUNNING.says("at {} ranks of Frontier with a 20B GPT".format(*ranks["volume"]))
    RUNNING.says("three schemes on {} ranks in the scale model of Frontier".format(*ranks["links"]))


def test_why_the_suite_frontier_starts_at_16() -> None:
    """`lowband predict` on 8 GCDs, with and without the runtime."""
    asked = (["gpt-20b"], ["hier3"], [8], [1], [1], [2048], ["full"])
    [row] = Grid(CONFIG, "frontier", *asked).records()
    held = (row["peak_memory_bytes"] - row["runtime_bytes"]) / GIB
    Text("config/suites/frontier.yaml").says(f"hier3 would hold {held:.1f} of 64 GiB (predicted)")
    assert not row["fits"]


def test_why_the_suite_frontier_has_few_plain_baselines() -> None:
    """ZeRO-2 on 16 GCDs, and ZeRO-1 with more passes on all 384."""

    def peak_gib(scheme: str, ranks: int, passes: int) -> float:
        asked = (["gpt-20b"], [scheme], [ranks], [1], [passes], [2048], ["full"])
        [row] = Grid(CONFIG, "frontier", *asked, stack="ours").records()
        return float(row["peak_memory_bytes"] / GIB)

    Text("config/suites/frontier.yaml").says(f"on 16 GCDs ZeRO-2 takes {peak_gib('zero2', 16, 1):.0f} GiB")
    assert peak_gib("zero1", 384, 1) < 64 < peak_gib("zero1", 384, 4)


def test_how_far_the_predictor_is_off() -> None:
    rows = shipped("predicted/accuracy")
    held = rows[rows["use"] == "held out"]
    low, high = held["mean_error_percent"].min(), held["mean_error_percent"].max()
    PREDICTOR.says(f"off by {low:.0f} to {high:.0f} % in the mean of a source")
    PREDICTOR.says(f"and by {held['max_error_percent'].max():.0f} % at most")
    validation = shipped("predicted/validation").query("source == 'torchtitan-h100'")
    row = validation["row"].str
    fp8, eager = row.contains("float8"), row.contains("eager")
    kinds = {"eager": eager, "fp8": fp8 & ~row.contains("rowwise"), "bf16": ~fp8 & ~eager}
    errors = {kind: validation[which]["error_percent"].abs().mean() for kind, which in kinds.items()}
    PREDICTOR.says(
        f"off by {errors['bf16']:.0f} % in the mean if compiled, in bf16, {errors['fp8']:.0f} % in fp8, and "
        f"{errors['eager']:.0f} % if eager"
    )
    alone = rows["machine_mean_error_percent"]
    PREDICTOR.says(f"they are off by {alone.min():.0f} to {alone.max():.0f} % in the mean")


def test_what_is_said_of_the_suite_frontier() -> None:
    """Its conditions, its jobs, and that no cell of one pass can decide."""
    runs = CONFIG.runs(["frontier"])
    sites = Text("docs/sites.md")
    assert len(CONFIG.job("frontier").allocations(runs)) == 3
    sites.says(f"three waits in the queue instead of {len(runs)}")
    passes = sorted({run.accumulation for run in runs})
    sites.says("has {}, {} and {} passes".format(*passes))
    ours = [row for row in suite_ratios(CONFIG, "frontier") if row.claim == "hier3-over-zeropp"]
    assert {row.foreseen for row in ours if row.accumulation == 1} == {"below"}
    assert {row.foreseen for row in ours if row.accumulation > 1} == {""}
    best = [row for row in suite_ratios(CONFIG, "frontier") if row.claim.startswith("frontier-ours-over")]
    assert {row.foreseen for row in best} == {"above"}
    sites.says(
        "our best is at least as fast as plain ZeRO-2 and as DeepSpeed's ZeRO++ is foreseen under every"
    )
    sites.says(f"Where the wanted number lies outside of it, within {100 * WITHIN:.0f} %")


def test_what_is_said_of_other_readings() -> None:
    rows = shipped("predicted/readings")
    gives = rows[rows["gives"]].groupby("reading").size().to_dict()
    assert gives == {"hier3": 4, "hier3, INT8 update": 6, "secondary within the node": 1}
    PREDICTOR.says(
        "With an INT8 update six alternatives give both ratios and the efficiency, four with hier3 itself"
    )
    at = rows.set_index(["reading", "alternative"])

    def shares(reading: str, alternative: str) -> list[str]:
        values = dict(part.split(" = ") for part in at.loc[(reading, alternative), "values"].split(", "))
        return [f"{100 * float(share):.0f} %" for place, share in values.items() if "efficiency" in place]

    best = at.loc[("hier3, INT8 update", "two shares of links (fitted again)")]
    assert best["largest_error_percent"] < 0.3
    node, world = shares("hier3, INT8 update", "two shares of links (fitted again)")
    PREDICTOR.says(
        f"off by less than 0.3 % where collectives reach {node} of the links in a node and {world} of"
    )
    [alone] = shares("hier3, INT8 update", "slow links in a node only")
    PREDICTOR.says(f"no slow links between nodes at all: {alone} in a node alone will do")
    node, world = shares("secondary within the node", "two shares of links, 16 passes")
    PREDICTOR.says(f"with {node} of the links in a node, {world} of those between nodes and 16 passes")
    other = at.loc[("optimizer in the node", "one share of all links, other passes")]
    assert (other["values"].endswith("accumulation = 8"), other["largest_error_percent"] < 1) == (True, True)
    PREDICTOR.says(f"fit with 8 passes, its efficiency ({other['efficiency']:.2f}) does not")
    costs = shipped("predicted/reading_costs").set_index(["reading", "passes"])
    left = 64 - costs.loc[("optimizer in the node", 4), "peak_memory_bytes"] / GIB
    PREDICTOR.says(f"it leaves {left:.0f} GiB of a GCD's memory")
    assert not rows[rows["alternative"].str.startswith("links as published")]["gives"].any()
    sent = costs["world_bytes"]
    assert sent["ZeRO++, secondary in the package", 4] == sent["zeropp", 4]
    assert sent["hier3", 1] > sent["zeropp", 1]
    assert sent["hier3", 1] == sent["hier3", 4] < sent["zeropp", 2]
    assert sent["hier3, INT8 update", 4] == sent["hier3, INT8 update", 1] == sent["zeropp", 1]


def test_links_as_published() -> None:
    rows = shipped("predicted/alternatives")
    most = rows[rows["alternative"].str.startswith("links as published")]["ratio_hier3_zero3"].max()
    PREDICTOR.says(f"hier3 is then at most {most:.2f} times as fast as ZeRO-3")
    [many] = rows[rows["alternative"] == "two shares of links, 16 passes"]["efficiency"]
    PREDICTOR.says(f"with an accumulation of 16 the model gives {many:.2f}")


def test_what_is_named_in_place_of_what_is_slow() -> None:
    trials = shipped("stragglers/trials")
    wrong = trials[~trials["is_right"]]
    assert set(wrong["kind"]) == {"path"}
    rank = wrong["named"].str.extract(r"^the messages of rank (\d+) with each other rank ")[0]
    assert rank.notna().all()
    victims = wrong["victim"].str.split()
    of_two = sum(one in both for one, both in zip(rank, victims, strict=True))
    RELIABILITY.says(
        f"In the {WORDS[len(wrong)]} trials that are not right messages between two ranks were slow"
    )
    RELIABILITY.says(f"{WORDS[of_two]} times of one of the two, twice of another")
    assert len(wrong) - of_two == 2
