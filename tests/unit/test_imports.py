"""What import-linter does not say: no two modules import each other, and who may ask for the job's ranks."""

import re
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import lowband
from tests import environments
from tests.checkout import ROOT


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


def test_what_plans_and_reports_imports_packages_of_the_extra_report() -> None:
    """Of its own choice, wherever in a module: `make figures` makes an environment without all others."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("lowband", include_external_packages=True, cache_dir=None)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [wings] = [
        contract["source_modules"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "forbidden"
    ]
    of_package = packages_distributions()
    installed = environments.required("report")
    outside = {
        f"{importer} imports {package}"
        for package in graph.modules - {"simgrid"}  # Debian's, of an interpreter of its own
        if not package.startswith("lowband") and package not in sys.stdlib_module_names
        for importer in graph.find_modules_that_directly_import(package)
        if importer.startswith(tuple(wings))
        and installed.isdisjoint(map(canonicalize_name, of_package.get(package, [])))
    }
    assert outside == set()
    assert "scipy" in graph.modules
