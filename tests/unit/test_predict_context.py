"""What the predictor says of ranks along context: brute force, closed forms by hand, limits."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import SIZES, machine

from lowband.cost.collectives import Network
from lowband.cost.compute import Computer, Work, work
from lowband.cost.contents import step_bytes
from lowband.cost.context import elements, parts
from lowband.cost.context_load import attended, held_more, kept_more
from lowband.errors import UserError
from lowband.evidence.validation.scale_model import bare, box_step_s
from lowband.predict.context import context_sent, waits
from lowband.predict.footprint import memory_items
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.search.rehearsal import rehearse
from lowband.predict.time import step_time
from lowband.predict.workload import Workload, workload_of
from lowband.spec.axes import Ways
from lowband.spec.context import Layout, ways_of
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.spec.stack import OURS
from tests.checkout import CONFIG
from tests.printed import printed_by

GPT = ModelSpec(name="small", layers=4, hidden=64, heads=8, vocab=128, seq_len=4096, source="none")
GROUPED = GPT.model_copy(update={"kv_heads": 2})
RUN = CONFIG.runs(["context"])[0]
MIXED = ["ring", "gather", "heads", "package=heads,node=ring", "package=gather,node=ring"]


def job(context: int = 4, way: str = "ring", **changes: Any) -> Workload:
    zigzag = changes.pop("zigzag", True)
    given = {"model": GPT, "machine": machine(), "ranks": 8, "micro_batch": 1, "seq_len": 256} | changes
    axes = Ways(context=context, context_attention=way, zigzag=zigzag)
    return Workload(stack=OURS, scheme=CONFIG.scheme("ddp"), axes=axes, **given)


def run(**changes: Any) -> RunSpec:
    given = {"model": GPT.model_dump(), "ranks": 8, "context": 4, "seq_len": 256, "micro_batch": 2}
    given["machine"] = machine().model_dump()
    return RunSpec.parse({**RUN.model_dump(), **given, **changes}, "test")


# ---- bytes


@pytest.mark.parametrize("way", MIXED)
@pytest.mark.parametrize(("tensor", "recompute"), [(1, "none"), (1, "full"), (2, "full")])
def test_bytes_are_those_of_a_run(way: str, tensor: int, recompute: str) -> None:
    """`step_bytes` is what the engine counts (tests/dist/test_context_gpt.py)."""
    way = way.replace("node", "world").replace("package", "node") if tensor == 2 else way
    spec = run(context_attention=way, tensor=tensor, recompute=recompute, accumulation=3)
    check_bytes(spec)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_bytes_of_stages_are_those_of_a_run(schedule: str) -> None:
    check_bytes(run(pipeline=2, schedule=schedule, context=2, accumulation=4, recompute="full"))


def test_a_run_keeps_its_stages() -> None:
    """Two on each rank in ZB-V and where chunks say so, else one."""
    in_stages = {"pipeline": 2, "context": 2, "accumulation": 4}
    runs = [
        run(**in_stages, schedule="interleaved", chunks=2),
        run(**in_stages, schedule="zb-v"), run(**in_stages, schedule="1f1b"),
    ]  # fmt: skip
    assert [workload_of(spec).axes.stages for spec in runs] == [4, 4, 2]


def check_bytes(spec: RunSpec) -> None:
    found = context_sent(workload_of(spec))
    assert found == {
        key: n for key, n in step_bytes(spec).items() if key[1].startswith(("context", "tokens"))
    }
    assert found


def one_by_one(layout: Layout, keys: int, queries: int) -> Counter[tuple[str, str]]:
    """Values that all ranks send in a block's passes, message by message: (level, row) -> values."""
    sent: Counter[tuple[str, str]] = Counter()
    levels, ranks = layout.levels, range(layout.levels.world)
    ring, heads = layout.ranks("ring"), layout.ranks("heads")
    inside = layout.levels.world // ring
    for rank in ranks:
        for hop in levels.hops(*layout.span("heads")):
            for partner in hop.partners(rank):
                if partner != rank:
                    sent[hop.level, "context_heads"] += (2 * queries + 2 * keys) // hop.count
        have = 2 * keys
        for hop in reversed(levels.hops(*layout.span("gather"))):  # from the outside, what it has so far
            for partner in hop.partners(rank):
                sent[hop.level, "context_gather"] += have * ring * (partner != rank)
            have *= hop.count
        to = (rank + inside) % layout.levels.world
        if ring > 1:
            sent[levels.common(rank, to), "context_ring"] += 2 * keys * (ring - 1)
            sent[levels.common(rank, to), "context_ring_grad"] += 2 * keys * ring
    assert heads * layout.parts == levels.world
    return sent


@pytest.mark.parametrize("model", [GPT, GROUPED])
@pytest.mark.parametrize(
    "way", [*MIXED, "package=heads,node=gather,world=ring", "package=ring,node=ring,world=ring"]
)
def test_a_block_sends_what_its_messages_add_up_to(model: ModelSpec, way: str) -> None:
    crossed = 8 if "world" in way else 4
    levels = Levels.fit(SIZES, crossed)
    layout = Layout(levels, ways_of(way, levels), zigzag=True)
    queries, keys = (int(16 * each) for each in elements(model, 1, layout))
    if model is GROUPED and layout.ranks("heads") > 2:
        assert keys == 16 * 4 * 8  # repeated: a head of keys on each of four ranks
    expected = one_by_one(layout, keys, queries)
    found = {(part.hop.level, part.row.name): part for part in parts(model, 1, layout, "bf16")}
    for (level, row), values in expected.items():
        width = 4 if row.endswith("grad") else 2
        assert found.pop((level, row)).bytes * 16 * crossed == values * width
    twins = {"context_heads_grad", "context_gather_again", "context_scatter", "context_ring_again"}
    assert {row for _, row in found} <= twins


# ---- attention's load


@pytest.mark.parametrize(
    ("gathered", "ring"), [(1, 2), (2, 1), (1, 4), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8)]
)
@pytest.mark.parametrize(("zigzag", "masked_too"), list(product([True, False], repeat=2)))
def test_loads_are_the_pairs_of_the_rank_with_most(
    gathered: int, ring: int, zigzag: bool, masked_too: bool
) -> None:
    levels = Levels(("self", "node", "world"), (1, gathered, gathered * ring))
    layout = Layout(levels, ways_of({"node": "gather", "world": "ring"}, levels), zigzag)
    n, length = gathered * ring, 16 * gathered * ring
    by_rank = []
    for part in range(n):
        steps = []
        for step in range(ring):
            source = (part // gathered - step) % ring
            pairs = Fraction(0)
            for rows in layout.runs(part, length):
                for other in range(source * gathered, (source + 1) * gathered):
                    for columns in layout.runs(other, length):
                        area = (rows[1] - rows[0]) * (columns[1] - columns[0])
                        if columns == rows:
                            pairs += Fraction(area, 1 if masked_too else 2)
                        elif columns < rows:
                            pairs += area
            steps.append(pairs)
        by_rank.append(steps)
    most = max(by_rank, key=sum)
    mean = Fraction(length**2, n * (1 if masked_too else 2))
    assert attended(layout, masked_too) == [pairs / mean for pairs in most]
    if not masked_too:
        assert 1 / sum(attended(layout)) == (1 if zigzag else Fraction(n, 2 * n - 1))


def test_without_balance_attention_is_as_efficient_as_is_known() -> None:
    """N / (2 N - 1): of 8 ranks 53.3 %; ring-flash-attention prints 51.4 to 53.9 % (families.md C)."""
    even, uneven = (step_time(job(8, zigzag=zigzag, seq_len=4096)).items for zigzag in (True, False))
    products = work(Computer(machine(), "bf16"), GPT, 1, 4096, "full", "flash", Ways(context=8))
    core = 4 * products.attention
    assert even["forward"] == pytest.approx(4 * products.forward + products.head_forward)
    assert uneven["forward"] - even["forward"] == pytest.approx(core * (15 / 8 - 1))


LLAMA = GPT.model_copy(
    update={"layers": 1, "hidden": 4096, "heads": 32, "kv_heads": 8, "seq_len": 2**16, "positions": "rotary"}
)


@pytest.mark.parametrize(("zigzag", "reached"), [(False, (24.0, 6.2)), (True, (38.2, 10.6))])
def test_what_ring_flash_attention_prints(zigzag: bool, reached: tuple[float, float]) -> None:
    """Iterations per second of attention on 8 A100, 8K tokens each, forward, and forward and backward, as
    shares of an eighth of one card's (zhuzilin/ring-flash-attention, README, batch API). None is fitted."""
    ideal = 46.7, 11.8
    device, stack = setting(CONFIG, "dgx-a100", "ours")
    one = job(8, model=LLAMA, machine=device, seq_len=2**16, zigzag=zigzag, recompute="none")
    one, load = replace(one, stack=stack), float(sum(attended(one.layout)))
    computer, shape = Computer(device, "bf16"), (LLAMA, 1, 2**16, "none", "flash", one.axes)
    even, own = work(computer, *shape), work(computer, *shape, attended=attended(one.layout), merges=8)
    found = waits(one, Network(device, stack, shards=False), own, overlap=1.0)
    merged = own.forward - even.forward - (own.attention - even.attention)
    forward = found.forward + merged
    more = forward, forward + found.backward + 2 * merged
    for best, rate, seconds in zip(ideal, reached, more, strict=True):
        predicted, printed = 100 / (load + best * seconds), 100 * rate / best
        assert predicted == pytest.approx(printed, abs=6)
        if not zigzag:
            assert 100 / load == pytest.approx(printed, abs=3)


# ---- time


def test_one_rank_is_as_without_the_axis() -> None:
    without = replace(job(1), axes=Ways())
    for way in ("ring", "heads", "gather"):
        found, expected = predict(job(1, way, zigzag=False)), predict(without)
        assert found == expected
        assert found.time_s["context"] == 0
        assert "context" not in found.memory_bytes


def test_without_links_a_rank_computes_its_part() -> None:
    """Links so fast that nothing waits: products and attention are a quarter, and no exchange is left."""
    fast = machine(rate=1e12)
    alone = step_time(job(1, machine=fast, ranks=2, seq_len=1024)).items
    for way in MIXED:
        found = step_time(job(4, way, machine=fast, seq_len=1024)).items
        assert found["context"] == pytest.approx(0, abs=1e-12)
        for item in ("forward", "backward", "recompute"):
            assert found[item] == pytest.approx(alone[item] / 4)


def test_a_ring_of_two_by_hand() -> None:
    """One block of keys travels behind the first step, gradients behind the second, and home behind none."""
    one = job(2, micro_batch=3, recompute="none")
    tokens, width = 3 * 128, GPT.hidden
    passed = 5e-6 + 2 * tokens * width * 2 / 4e9
    home = 5e-6 + 2 * tokens * width * 4 / 4e9
    slow = replace(one, machine=machine(latency_us=5))
    computed = work(Computer(slow.machine, "bf16"), GPT, 3, 256, "none", "flash", one.axes)
    network = Network(slow.machine, OURS, shards=False)
    found = waits(slow, network, computed, overlap=1.0)
    attention = computed.attention
    assert found.forward == pytest.approx(max(passed - attention / 2, 0))
    behind = 2.5 * attention / 2
    assert found.backward == pytest.approx(max(passed - behind, 0) + max(home - behind, 0) + home)
    assert 0 < found.forward < passed
    everything = waits(slow, network, computed, overlap=0.0)
    assert everything.forward == pytest.approx(passed)
    assert everything.backward == pytest.approx(passed + 2 * home)
    assert found.lane["context_ring"] == pytest.approx(4 * passed)
    assert found.lane["context_ring_grad"] == pytest.approx(4 * 2 * home)
    again = waits(replace(slow, recompute="full"), network, computed, overlap=1.0)
    assert again.backward == pytest.approx(found.backward + found.forward)


def test_heads_and_gather_are_waited_for() -> None:
    slow = {"machine": machine(latency_us=5), "recompute": "none"}
    network = Network(slow["machine"], OURS, shards=False)
    computed = work(Computer(slow["machine"], "bf16"), GPT, 1, 256, "none", "flash", Ways(context=2))
    x, k = 128 * 64, 2 * 128 * 64
    heads = waits(job(2, "heads", **slow), network, computed, overlap=1.0)
    swap = 4 * 5e-6 + 4 * x * 2 / 2 / 4e9
    assert (heads.forward, heads.backward) == pytest.approx((swap, swap))
    gather = waits(job(2, "gather", **slow), network, computed, overlap=1.0)
    assert gather.forward == pytest.approx(5e-6 + k * 2 / 4e9)
    assert gather.backward == pytest.approx(2 * 5e-6 + k * (2 + 4) / 4e9)
    assert gather.once == pytest.approx(3 * 5e-6 + 4 * 8 / 4e9 + 2 * 8 / 2e9 + 8 / 1e9)


@pytest.mark.parametrize("way", MIXED)
def test_waits_grow_as_links_slow_down(way: str) -> None:
    found = [
        float(step_time(job(4, way, machine=machine(rate=rate))).items["context"]) for rate in (1, 4, 16)
    ]
    assert found[0] > found[1] > found[2] > 0
    late = float(step_time(job(4, way, machine=machine(latency_us=10))).items["context"])
    assert late > found[0]


def test_a_ring_waits_for_its_slowest_link() -> None:
    """Of a group one rank sends outside: over its own card, or in a box over what its neighbours leave."""
    hops = Levels.fit(SIZES, 8).hops(SELF, WORLD)
    own, shared = machine(), CONFIG.machine("frontier-box")
    bared = bare(shared, "bf16")
    assert Network(own, OURS).pass_on_s(hops, 1e9) == pytest.approx(1.0)
    world = bared.link("world").gigabytes_per_s
    assert Network(bared, OURS).pass_on_s(hops, 1e9) == pytest.approx(
        max(1 / (4 * world), 1 / (2 * bared.link("node").gigabytes_per_s))
    )
    cards = own.model_copy(update={"levels": (*own.levels[:2], own.levels[2].model_copy(
        update={"link": own.link("world").model_copy(update={"cards": 2})})) })  # fmt: skip
    assert Network(cards, OURS).pass_on_s(hops, 1e9) == pytest.approx(0.5)


def test_a_stage_waits_for_its_own_layers() -> None:
    """Half of the layers on each of two ranks; activations of a rank's tokens travel between them, and once a
    step the gradient of the tied head."""
    alone = job(2, machine=machine(latency_us=5), ranks=4, accumulation=4, recompute="none")
    staged = replace(alone, axes=alone.axes.model_copy(update={"pipeline": 2}), ranks=8)
    whole, half = step_time(alone), step_time(staged)
    count = 4 * waits(alone, Network(alone.machine, OURS, shards=False), *_computed(alone)).once
    assert half.items["context"] - count == pytest.approx((whole.items["context"] - count) / 2)
    assert half.lane["context_ring"] == pytest.approx(whole.lane["context_ring"] / 2)
    tied = 5e-6 + 4 * GPT.vocab * 64 / 1e9
    in_line = replace(staged, stack=OURS.with_options({"hidden_sends": "none"}))
    exchange = step_time(in_line).items["pipeline_exchange"]
    assert exchange == pytest.approx(4 * 2 * (5e-6 + 2 * 128 * 64 / 1e9) + tied)


def _computed(one: Workload) -> tuple[Work, float]:
    return work(Computer(one.machine, "bf16"), GPT, 1, one.seq_len, "none", "flash", one.axes), 1.0


# ---- memory


def test_activations_are_divided_and_a_way_holds_more() -> None:
    alone = memory_items(job(1, ranks=2, recompute="none"))
    for way in MIXED:
        one = job(4, way, recompute="none")
        found = memory_items(one)
        more = kept_more(GPT, 1, one.layout, "bf16")
        assert more == 2 * 64
        assert found["activations"] == float(alone["activations"]) / 4 + 64 * 4 * more
        assert found["logits"] == float(alone["logits"]) / 4
        assert found["context"] == 64 * held_more(GPT, 1, one.layout, "bf16")
    ring, gather = (job(4, way).layout for way in ("ring", "gather"))
    assert held_more(GPT, 1, ring, "bf16") == 2 * (4 * 64 + 2 * 64 + 4 * 64) + 4 * (64 + 4 * 64 + 2 * 64)
    assert held_more(GPT, 1, gather, "bf16") == 2 * (2 * 64 + 3 * 512 + 2 * 64) + 4 * (64 + 2 * 64 + 3 * 512)
    heads = job(4, "heads", model=GROUPED).layout
    assert kept_more(GROUPED, 1, heads, "bf16") == 2 * (64 + 2 * (4 * 8 - 2 * 8))


def test_the_longest_sequence_grows_with_the_ranks() -> None:
    def peak(context: int, seq_len: int) -> float:
        return float(predict(job(context, seq_len=seq_len), interval=False).peak_memory_bytes)

    assert peak(8, 4096) < peak(4, 4096) < peak(2, 4096) < peak(1, 4096)
    assert peak(8, 4096) < 1.2 * peak(1, 512) + held_more(GPT, 1, job(8).layout, "bf16") * 512


# ---- what uses it


def test_tokens_are_counted_once() -> None:
    found = predict(job(4, micro_batch=2, accumulation=3))
    assert float(found.tokens_per_s_per_gpu * found.step_time_s) * 8 == pytest.approx(2 * 256 * 3 * 2)
    assert run(accumulation=3).tokens_per_step == 2 * 256 * 3 * 2


def test_a_suite_with_context_is_rehearsed() -> None:
    frontier = CONFIG.machine("frontier").model_dump()
    specs = [run(machine=frontier, context_attention=way, compute_dtype="bf16") for way in ("ring", "heads")]
    specs = [spec.model_copy(update={"repeat": 1, "run_id": f"{i}-r1"}) for i, spec in enumerate(specs)]
    for row, spec in zip(rehearse(specs, None), specs, strict=True):
        assert row.fits
        assert row.step_s > float(predict(workload_of(spec), interval=False).time_s["context"]) > 0


def test_a_run_in_a_box_is_predicted() -> None:
    """There every pair that a kernel computes counts, masked ones too (run/pacing.py)."""
    box = CONFIG.machine("frontier-box").model_dump()
    specs = [run(machine=box, context_attention=way) for way in ("ring", "heads", "gather")]
    found = [box_step_s(spec) for spec in specs]
    assert all(found)
    assert len(set(found)) == 3


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match="250 tokens cannot be divided"):
        job(4, seq_len=250)
    with pytest.raises(UserError, match="8 heads with 3 of keys cannot be divided over 2 ranks of heads"):
        job(2, "heads", model=GPT.model_construct(**{**GPT.model_dump(), "kv_heads": 3}))
    with pytest.raises(UserError, match="crosses replicas"):
        replace(job(1), scheme=CONFIG.scheme("local-sgd"), axes=Ways(context=8))


FRONTIER = ["--cluster", "frontier", "--model", "gpt-10b", "--scheme", "hier3", "--gpus", "64"]


def said(capsys: pytest.CaptureFixture[str], *words: str, fails: bool = False) -> str:
    """What `lowband predict` prints of the 10B model on 64 GCDs."""
    return printed_by(capsys, "predict", *FRONTIER, "--root", str(CONFIG.root), *words, code=2 * fails)


def test_the_command_names_bytes_by_level(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--cp", "16", "--ways", "node=heads,package=heads,world=ring")
    assert "dp 4\n" in found
    assert "cp 16, node=heads,package=heads,world=ring, zigzag: a rank sends" in found
    assert "no way for level 'package'" in said(capsys, "--cp", "16", "--ways", "world=ring", fails=True)
    for along in ("1", "2"):
        assert "unknown way 'rings'" in said(capsys, "--cp", along, "--ways", "ring", "rings", fails=True)
        assert "no level 'nod'" in said(capsys, "--cp", along, "--ways", "nod=ring", fails=True)
        assert "unknown way ''" in said(capsys, "--cp", along, "--ways", "node=", fails=True)
    assert "context_states" in said(capsys, "--cp", "2", "--ways", "state", fails=True)
    assert "are no multiple of context 3" in said(capsys, "--cp", "3", fails=True)


def test_the_command_names_the_best_way_of_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--cp", "1", "8", "--ways", "all", "--seq", "512", "2048"]
    rows = json.loads(said(capsys, *asked, "--json"))
    by_length: dict[int, dict[str, float]] = {512: {}, 2048: {}}
    for row in rows:
        if "context" in row:
            by_length[row["seq_len"]][row["context"]["ways"]] = row["step_time_s"]
    ways = {"heads", "gather", "ring", "package=heads,node=gather", "package=heads,node=ring"}
    assert all(found.keys() == ways | {"package=gather,node=ring"} for found in by_length.values())
    assert len(rows) == 2 * (1 + 6)
    lines = said(capsys, *asked).splitlines()
    heading = next(i for i, line in enumerate(lines) if "best way" in line)
    for (length, times), line in zip(by_length.items(), lines[heading + 1 :], strict=False):
        best, second = sorted(times, key=lambda way: times[way])[:2]
        words = line.split()
        assert words[6] == str(length)
        slower = 100 * (times[second] / times[best] - 1)
        assert words[-6:] == ["8", best, f"{times[best]:.4g}", second, f"{slower:+.1f}", "%"]
    columns = said(capsys, *asked, "--csv").splitlines()
    assert len(columns) == 1 + len(rows)
    assert "context.ways" in columns[0].split(",")


def test_ways_that_cannot_be_are_left_out_of_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Six heads on four ranks have no way with heads; named, it is refused."""
    six = GPT.model_copy(update={"hidden": 48, "heads": 6})
    file = tmp_path / "six.yaml"
    file.write_text(yaml.safe_dump(six.model_dump(exclude={"name"})))
    asked = ["--model", str(file), "--cp", "4", "--seq", "64"]
    found = said(capsys, *asked, "--ways", "all")
    assert "ring" in found
    assert "package=heads" in found
    assert " heads " not in found
    assert "6 heads cannot be divided over 4" in said(capsys, *asked, "--ways", "heads", fails=True)
    assert "50 tokens cannot be divided" in said(capsys, *asked, "--seq", "50", "--ways", "all", fails=True)
