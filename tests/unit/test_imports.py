"""No two modules of the package import each other, not even for types; what is above what: import-linter."""

from graphlib import TopologicalSorter

import pytest


def test_no_circle() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("lowband", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports) > 300
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
