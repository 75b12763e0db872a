"""What import-linter does not say: no two modules import each other, and who may ask for the job's ranks."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lowband


def test_no_circle() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("lowband", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports) > 300
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_only_transport_asks_for_the_ranks_of_the_job() -> None:
    """The rest of the engine knows those along its axis: those of the job are more, with a second one."""
    engine = Path(lowband.__file__).parent / "engine"
    asking = {
        path.relative_to(engine).parts[0]
        for path in engine.rglob("*.py")
        if re.search(r"get_rank\(|get_world_size\(|group\.WORLD", path.read_text(encoding="utf-8"))
    }
    assert asking == {"transport"}
