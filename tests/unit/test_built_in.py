"""What a root's config/ and slurm/ have comes before what is built in, by name."""

from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.predict.search.plan import plan
from lowband.predict.show.plan_files import write as write_plan
from lowband.spec.axes import ONLY_DATA
from lowband.spec.config import BUILT_IN, Config

ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_names_are_found_in_an_empty_folder(tmp_path: Path) -> None:
    here, there = Config(tmp_path), Config(ROOT)
    assert here.schemes == there.schemes
    assert here.models == there.models
    assert here.clusters == there.clusters
    assert here.stacks == there.stacks
    assert here.scheme("hier3") == there.scheme("hier3")
    assert here.model("gpt-20b") == there.model("gpt-20b")
    for cluster in there.clusters:
        assert here.machine(cluster) == there.machine(cluster)
        assert here.given_stack(None, here.machine(cluster)) == there.given_stack(
            None, there.machine(cluster)
        )
        assert here.job(cluster) == there.job(cluster)
    assert here.suites == []


def test_an_entry_in_a_file_of_its_own_may_stand_below_its_name(tmp_path: Path) -> None:
    """As it stands in the file of all entries."""
    entry = "  weights: node\n  grads: node\n  optim: world\n"
    write(tmp_path / "config" / "schemes" / "mine.yaml", f"mine:\n{entry}")
    write(tmp_path / "config" / "schemes" / "bare.yaml", entry.replace("  ", ""))
    write(tmp_path / "config" / "schemes" / "other.yaml", f"mine:\n{entry}")
    config = Config(tmp_path)
    assert config.scheme("mine").model_copy(update={"name": "bare"}) == config.scheme("bare")
    assert config.given_scheme(str(tmp_path / "config/schemes/mine.yaml")) == config.scheme("mine")
    with pytest.raises(UserError, match="unknown key 'mine'"):  # another entry's name
        config.scheme("other")


def test_own_files_come_first(tmp_path: Path) -> None:
    write(
        tmp_path / "config" / "schemes.yaml", "hier3: {weights: node, grads: node, optim: world}\nmine: {}\n"
    )
    write(tmp_path / "config" / "stacks" / "fsdp2.yaml", (BUILT_IN / "config/stacks/fsdp.yaml").read_text())
    own = (BUILT_IN / "slurm/local/machine.yaml").read_text()
    write(tmp_path / "slurm" / "frontier" / "machine.yaml", own)
    write(tmp_path / "slurm" / "copy" / "machine.yaml", "like: frontier\n")
    config = Config(tmp_path)
    assert config.scheme("hier3").weights == "node"
    assert config.scheme("zero3") == Config(ROOT).scheme("zero3")
    assert config.schemes.count("hier3") == 1
    assert "mine" in config.schemes
    assert (
        config.machine("frontier").levels
        == Config(ROOT).machine("local").levels
        == config.machine("copy").levels
    )
    assert not config.has_slurm("frontier")  # a cluster's folder counts as a whole
    fsdp, ours = Config(ROOT).stack_on("fsdp", "local"), config.stack_on("fsdp2", "local")
    assert ours == fsdp.model_copy(update={"name": "fsdp2"})


def test_an_unknown_name_lists_all(tmp_path: Path) -> None:
    write(tmp_path / "config" / "schemes.yaml", "mine: {}\n")
    with pytest.raises(UserError, match="no entry 'none'") as error:
        Config(tmp_path).scheme("none")
    assert {"mine", "hier3"} <= set(error.value.allowed.split(", "))
    with pytest.raises(UserError, match="no cluster 'none'") as error:
        Config(tmp_path).machine("none")
    assert "frontier" in error.value.allowed


def test_a_plan_is_written_into_an_empty_folder_and_read_back(tmp_path: Path) -> None:
    config = Config(tmp_path)
    machine = config.machine("frontier")
    found = plan(
        machine,
        config.given_stack(None, machine),
        config.model("gpt-20b"),
        64,
        2048,
        256,
        [ONLY_DATA],
        [4],
        ["full"],
    )
    write_plan(found.ranked[0], "mine", config)
    [run] = Config(tmp_path).runs(["mine"])
    assert run.scheme == found.ranked[0].job.scheme.model_copy(
        update={"name": "mine", "known_as": run.scheme.known_as}
    )
    with pytest.raises(UserError, match="'mine' is taken"):
        write_plan(found.ranked[0], "mine", Config(tmp_path))
