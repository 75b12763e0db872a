"""Tests of all schemes try each on levels that it names, also where Frontier lacks one of them."""

from pathlib import Path

from named import INNER, levels_of

from lowband.spec.config import Config
from lowband.spec.files import write_whole

RACKS = """description: two racks of nodes
device: {name: a GPU, source: made up}
levels: [{name: package, size: 2}, {name: node, size: 8}, {name: rack, size: 32}, {name: world}]
"""


def test_levels_that_a_scheme_names(tmp_path: Path) -> None:
    scheme = "secondary: package\nweights: node\ngrads: rack\noptim: world\n"
    write_whole(tmp_path / "config" / "schemes" / "hier4.yaml", scheme)
    assert levels_of("hier4", config=Config(tmp_path)) == {}
    write_whole(tmp_path / "slurm" / "racks" / "machine.yaml", RACKS)
    assert levels_of("hier4", config=Config(tmp_path)) == {**INNER, "rack": 8}
    odd = {"package": 3, "node": 3}
    assert levels_of("hier4", odd, Config(tmp_path)) == {**odd, "rack": 6}
    assert levels_of("hier3", odd, Config(tmp_path)) == odd  # Frontier has these
    assert all(levels_of(name) == INNER for name in ("ddp", "zeropp", "hier3"))
