"""Suites expand to complete specs; every mistake is one line that names file, key and what is allowed."""

import re
import shutil
import string
from pathlib import Path

import pytest
import yaml

from lowband.errors import UserError
from lowband.evidence.tables.points import identity
from lowband.spec.config import Config
from lowband.spec.run import RunSpec
from lowband.spec.suites import Decides
from tests.checkout import CONFIG, ROOT
from tests.refused import refusal


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "config", tmp_path / "config")
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    return tmp_path


@pytest.mark.parametrize("suite", sorted(p.stem for p in (ROOT / "config" / "suites").glob("*.yaml")))
def test_every_suite_expands_to_unique_complete_specs(suite: str, tmp_path: Path) -> None:
    specs = CONFIG.runs([suite])
    assert len({spec.run_id for spec in specs}) == len(specs) > 0
    path = tmp_path / "spec.json"
    for spec in specs:
        path.write_text(spec.to_json())
        assert RunSpec.read_json(path) == spec


def test_strong_scaling_keeps_the_global_batch() -> None:
    batches = {spec.global_batch for spec in CONFIG.runs(["default"])}
    assert batches == {8}


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("suites/smoke.yaml", "  steps: 6", "  stepz: 6", ("smoke.yaml", "unknown key 'stepz'", "steps")),
        ("suites/smoke.yaml", "hier3-exact]", "hier9]", ("schemes.yaml", "no entry 'hier9'", "zero3")),
        ("suites/smoke.yaml", "gpt-200k", "gpt-2k", ("models.yaml", "no entry 'gpt-2k'", "gpt-20b")),
        ("suites/smoke.yaml", "cluster: local", "cluster: here", ("no cluster 'here'", "frontier")),
        ("suites/smoke.yaml", "ranks: [1, 4, 8]", "ranks: [1, 3, 8]", ("is not a multiple of 3 ranks",)),
        ("suites/smoke.yaml", "global_batch: 8", "global_batch: 9", ("global_batch 9", "multiples of 4")),
        (
            "suites/smoke.yaml",
            "global_batch: 8",
            "global_batch: 8\n  micro_batch: 1",
            ("one of micro_batch",),
        ),
        ("suites/smoke.yaml", "  steps: 6\n", "", ("smoke.yaml", "key 'steps' is missing")),
        ("suites/smoke.yaml", "seq_len: 64", "seq_len: 65", ("seq_len (65)", "longest (64)")),
        ("suites/smoke.yaml", "warmup_steps: 2", "warmup_steps: 6", ("leave none of the 6 steps",)),
        ("suites/smoke.yaml", "axes:", "axes:\n  steps: [6, 8]", ("'steps' is in both fixed and axes",)),
        ("suites/smoke.yaml", "ranks: 1}", "rank: 1}", ("'rank' is not an axis", "scheme, ranks")),
        ("suites/smoke.yaml", "axes:", "axes: [", ("smoke.yaml:", "is not YAML")),
        (
            "suites/smoke.yaml",
            "axes:",
            "axes:\n  collectives: [ring]",
            ("collectives: ", "'hops', 'flat' or 'joined'"),
        ),
        ("schemes.yaml", "weights: package", "weights: world", ("from inner to outer",)),
        ("schemes.yaml", "secondary: node", "secondary: world", ("secondary", "save nothing")),
        ("schemes.yaml", "grads: node", "grads: rack", ("no level 'rack'", "package, node, world")),
        ("schemes.yaml", "weights: package", "weight: package", ("unknown key 'weight'",)),
        ("models.yaml", "heads: 4,", "heads: 5,", ("hidden (64) is not a multiple of heads (5)",)),
    ],
)
def test_mistakes(root: Path, file: str, old: str, new: str, words: tuple[str, ...]) -> None:
    path = root / "config" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    message = refusal(lambda: Config(root).runs(["smoke"]))
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("of", [{}, {"over": "ddp", "over_ranks": 8}])
def test_a_ratio_is_over_another_scheme_or_fewer_ranks(of: dict[str, object]) -> None:
    with pytest.raises(UserError, match="give one of over and over_ranks"):
        Decides(scheme="zero3", ranks=16, **of)


def test_a_configuration_lists_its_suites(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    for text, words in (("other: 1", "no key 'suites'"), ("suites: x", "suites"), ("suites: [1]", "suites")):
        (tmp_path / "config" / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=words):
            _ = Config(tmp_path).default_suites


def test_an_unknown_suite_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no suite 'x' .allowed: in the root of a checkout, its names"):
        Config(tmp_path).suite("x")
    with pytest.raises(UserError, match=r"no suite 'nope' .allowed: .*smoke"):
        CONFIG.runs(["nope"])


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "fake"},
        {"checkpoint_every": 2},
        {"overlap": False},
        {"collectives": "flat"},
        {"collectives": "joined"},
        {"order": "breadth"},
        {"device": "fake", "tensor": 2, "ranks": 8},
    ],
)
def test_what_a_peers_engine_cannot_do_here_is_refused(changes: dict[str, object]) -> None:
    [spec, *_] = CONFIG.runs(["smoke"])
    values = {**spec.model_dump(mode="json"), "engine": "fsdp2"}
    assert RunSpec.parse(values, "test").engine == "fsdp2"
    with pytest.raises(UserError, match="engine fsdp2 supports neither device fake nor checkpoints"):
        RunSpec.parse({**values, **changes}, "test")
    RunSpec.parse({**values, **changes, "engine": "lowband"}, "test")


def test_the_axes_of_a_run(root: Path) -> None:
    """A batch belongs to a rank of the data axis, and axes of one rank change no name and no checksum."""
    file = root / "config" / "suites" / "smoke.yaml"
    before = Config(root).runs(["smoke"])
    text = file.read_text()
    file.write_text(text.replace("fixed:\n", "fixed:\n  tensor: 1\n"))
    assert [spec.to_json() for spec in Config(root).runs(["smoke"])] == [spec.to_json() for spec in before]
    text = text.replace("ranks: [1, 4, 8]", "ranks: [12, 24]\n  tensor: [1, 2]\n  pipeline: [1, 3]")
    text = re.sub(r"\nexclude:.*", "\n", text, flags=re.DOTALL)
    file.write_text(text.replace("global_batch: 8", "global_batch: 24"))
    specs = Config(root).runs(["smoke"])
    assert {spec.global_batch for spec in specs} == {24}
    assert {(s.ranks, s.tensor, s.pipeline, s.micro_batch * s.accumulation) for s in specs} == {
        (n, t, p, 24 * t * p // n) for n in (12, 24) for t in (1, 2) for p in (1, 3)
    }
    assert len({spec.run_id for spec in specs}) == len(specs)
    assert {identity(spec)["tensor"] for spec in specs} == {1, 2}
    assert {spec.stages for spec in specs} == {1, 3}
    values = {**specs[0].model_dump(), "tensor": 2, "ranks": 2, "sequence_parallel": True}
    for changed, words in (
        ({"model": {**values["model"], "vocab": 257}}, "257 rows of the vocabulary cannot be divided"),
        ({"seq_len": 31}, "31 tokens cannot be divided over tensor 2"),
        ({"model": {**values["model"], "heads": 1}}, "1 heads cannot be divided over tensor 2"),
        ({"pipeline": 3}, "2 ranks are no multiple of tensor 2 x pipeline 3"),
        ({"tensor": 1, "pipeline": 2}, "3 layers cannot be divided over 2 stages"),
        ({"tensor": 1, "pipeline": 2, "schedule": "zb-h1", "chunks": 2}, "'zb-h1' with 2 chunks"),
        (
            {"schedule": "zb-v"},
            "pipeline 1: schedule zb-v, chunks 0 .allowed: pipeline 2 or more, or neither",
        ),
        ({"chunks": 2}, "pipeline 1: schedule 1f1b, chunks 2 .allowed: pipeline 2 or more, or neither"),
        (
            {"tensor": 1, "pipeline": 3, "ranks": 12, "device": "fake"},
            "pipeline 3: device fake plays one rank for all, and stages differ .allowed: pipeline 1",
        ),
        ({"tensor": 1, "pipeline": 2, "order": "breadth"}, "order breadth, collectives hops"),
        ({"tensor": 1, "pipeline": 3, "ranks": 3, "engine": "deepspeed"}, "its only axis is data"),
        (
            {"tensor": 1, "pipeline": 2, "scheme": CONFIG.scheme("local-sgd"), "steps": 32},
            "scheme 'local-sgd': replicas that meet seldom have no stages",
        ),
    ):
        with pytest.raises(UserError, match=words):
            RunSpec.parse({**values, **changed}, "test")


def test_the_layers_of_stages(root: Path) -> None:
    """A model's seven blocks over two or four stages, one number a stage, in names as a sum."""
    model = root / "config" / "models.yaml"
    model.write_text(model.read_text().replace("gpt-240k: {layers: 4", "gpt-240k: {layers: 7"))
    file = root / "config" / "suites" / "pipeline.yaml"
    text = file.read_text()

    def specs(text: str) -> list[RunSpec]:
        file.write_text(text)
        return Config(root).runs(["pipeline"])

    with pytest.raises(UserError, match=r"pipeline.yaml.*: 7 layers cannot be divided over 2 stages"):
        specs(text)
    of_two = re.sub(r"\n  schedule: .*", "\n  schedule: [1f1b, zb-h1]\n  layers: [[4, 3], [6, 1]]", text)
    found = specs(of_two)
    assert {spec.layers for spec in found} == {(4, 3), (6, 1)} == {s.blocks(s.model) for s in found}
    assert len({spec.run_id for spec in found}) == len(found)
    assert all("+".join(map(str, spec.layers)) in spec.run_id for spec in found)
    assert {spec.condition for spec in found} >= {"schedule 1f1b, layers 4+3", "schedule zb-h1, layers 6+1"}
    assert {identity(spec)["layers"] for spec in found} == {"4+3", "6+1"}
    assert len({identity(spec)["point"] for spec in found}) == len(found)
    for left_out in ("[6, 1]", "[[6, 1]]", "[[6, 1], [5, 2]]"):
        left = specs(f"{of_two.rstrip()}\nexclude:\n  - {{layers: {left_out}}}\n")
        assert left == [spec for spec in found if spec.layers == (4, 3)]
    zb_v = re.sub(r"\n  schedule: .*", "\n  schedule: [zb-v]", text).replace(
        "fixed:\n", "fixed:\n  layers: [3, 2, 1, 1]\n"
    )
    assert {spec.blocks(spec.model) for spec in specs(zb_v)} == {(3, 2, 1, 1)}
    values = found[0].model_dump()
    assert RunSpec.parse(RunSpec.parse(values, "test").model_dump(mode="json"), "test") == found[0]
    for changes, words in (
        (
            {"layers": [4, 2, 1]},
            r"layers \[4, 2, 1\] for 2 stages of 7 layers .allowed: layers: 2 numbers",
        ),
        ({"layers": [4, 4]}, r"layers \[4, 4\] for 2 stages of 7 layers .allowed: .* whose sum is 7"),
        ({"layers": [7, 0]}, "layers.1: Input should be greater than 0, not 0"),
        ({"layers": [8, -1]}, "layers.1: Input should be greater than 0, not -1"),
        ({"layers": 7}, "layers: Input should be a valid tuple, not 7"),
        ({"layers": [4, 3], "schedule": "zb-v"}, r"layers \[4, 3\] for 4 stages of 7 layers"),
        ({"layers": [4, 3], "pipeline": 1}, r"layers \[4, 3\] with pipeline 1 .allowed: pipeline 2 or more"),
        (
            {"layers": [], "pipeline": 4},
            "cannot be divided over 4 stages .allowed: layers: 4 numbers",
        ),
        ({"layers": [], "chunks": 4, "schedule": "interleaved"}, "8 stages .allowed: at most 7 stages"),
    ):
        with pytest.raises(UserError, match=words):
            RunSpec.parse({**values, **changes}, "test")
    without = found[0].model_copy(update={"layers": ()})
    assert not any("layers" in dumped for dumped in (without.model_dump(), without.model_dump(mode="json")))
    assert "layers" not in without.point


def test_a_run_ends_with_an_exchange() -> None:
    [spec, *_] = CONFIG.runs(["smoke"])
    values = {**spec.model_dump(), "scheme": CONFIG.scheme("local-sgd")}
    assert RunSpec.parse({**values, "steps": 32}, "test").scheme.period == 16
    with pytest.raises(
        UserError, match=r"steps .24. are no multiple of 16, the period of scheme 'local-sgd'"
    ):
        RunSpec.parse({**values, "steps": 24}, "test")


def test_more_ranks_than_a_box_has_are_refused() -> None:
    [spec, *_] = CONFIG.runs(["box"])
    assert RunSpec.parse({**spec.model_dump(), "ranks": 32}, "test").ranks == 32
    with pytest.raises(UserError, match="the box of frontier-box has 32 ranks"):
        RunSpec.parse({**spec.model_dump(), "ranks": 64}, "test")


def test_broken_machine_files_are_refused(root: Path) -> None:
    path = root / "slurm" / "local" / "machine.yaml"
    for text, words in (
        ("- a\n", "is not a mapping"),
        (path.read_text().replace("  - {name: world}\n", ""), "the last level is 'world'"),
        (path.read_text().replace("size: 2", "size: -2"), "levels.0.size"),
        (path.read_text().replace("name: node", "name: package"), "unique"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            Config(root).runs(["smoke"])
        shutil.copy(ROOT / "slurm" / "local" / "machine.yaml", path)


@pytest.mark.parametrize(
    ("clusters", "circle"),
    [({"own": "own"}, "own -> own"), ({"own": "other", "other": "own"}, "own -> other -> own")],
)
def test_machines_that_are_like_each_other_in_a_circle(
    root: Path, clusters: dict[str, str], circle: str
) -> None:
    for cluster, like in clusters.items():
        (root / "slurm" / cluster).mkdir()
        (root / "slurm" / cluster / "machine.yaml").write_text(f"like: {like}\n")
    suite = root / "config" / "suites" / "smoke.yaml"
    suite.write_text(suite.read_text().replace("cluster: local", "cluster: own"))
    with pytest.raises(UserError, match="like") as error:
        Config(root).runs(["smoke"])
    assert circle in str(error.value)
    assert "\n" not in str(error.value)


ODD = ["../data/my text.txt", 'it\'s "q"; rm -rf $HOME', "a*b?[c]{d}", "tab\tand\nline", "größe.txt"]


def test_odd_values_make_one_safe_name_each(root: Path) -> None:
    path = root / "config" / "suites" / "smoke.yaml"
    suite = yaml.safe_load(path.read_text())
    suite["axes"] = {"text": ODD, "learning_rate": [1e-3, 1e20]}
    suite["fixed"] |= {"scheme": "zero3", "ranks": 4}
    del suite["exclude"]
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    specs = Config(root).runs(["smoke"])
    assert [spec.text for spec in specs] == [text for text in ODD for _ in range(2)]
    assert len({spec.run_id for spec in specs}) == 2 * len(ODD)
    for spec in specs:
        assert set(spec.run_id) <= set(string.ascii_letters + string.digits + "._+-"), spec.run_id


def test_values_that_make_the_same_name_are_refused(root: Path) -> None:
    path = root / "config" / "suites" / "smoke.yaml"
    path.write_text(path.read_text().replace("axes:", "axes:\n  text: [a b, a/b]"))
    with pytest.raises(UserError, match=r"two points are named 'smoke-.*text_a_b-r1'"):
        Config(root).runs(["smoke"])


def test_a_spec_that_is_no_json_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text("{\n")
    with pytest.raises(UserError, match=r"spec.json:2: is not JSON"):
        RunSpec.read_json(path)
