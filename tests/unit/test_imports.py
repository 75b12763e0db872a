"""What import-linter does not say: no two modules import each other, and who may ask for the job's ranks."""

import re
import subprocess
import sys
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
    """The others are told, or know those along their axis: those of the job are more, with a second one.

    Benchmarks start ranks of their own, which have one axis; an error in ranks.py has no other way to know.
    """
    package = Path(lowband.__file__).parent
    asking = {
        path.relative_to(package)
        for path in package.rglob("*.py")
        if re.search(r"get_rank\(|get_world_size\(|group\.WORLD", path.read_text(encoding="utf-8"))
    }
    outside = {
        path for path in asking if path.parts[:2] != ("engine", "transport") and path.parts[0] != "bench"
    }
    assert outside == {Path("run/ranks.py")}


def test_the_workflow_needs_no_library_but_those_of_its_environment() -> None:
    """`make figures` makes one without the extras `dev` and `train`."""
    rules = Path(__file__).parents[2] / "workflow" / "rules" / "common.smk"
    modules = re.findall(r"^from (lowband[.\w]*) import", rules.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(modules) > 10
    missing = "import sys; sys.modules |= dict.fromkeys(['scipy', 'torch', 'hypothesis', 'transformers'])"
    asked = f"{missing}; import importlib; [importlib.import_module(name) for name in {modules}]"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
