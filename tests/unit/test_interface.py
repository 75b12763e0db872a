"""The library's promise: `lowband.__all__` and the arguments of what it names; importing lowband is cheap."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import lowband

SNAPSHOT = Path(__file__).with_name("interface.txt")


def interface() -> str:
    """A line per public name, function or method: its arguments, those with a default marked by `=`."""
    lines = []
    for name in lowband.__all__:
        value = getattr(lowband, name)
        lines.append(f"{name}({arguments(value)})")
        if inspect.isclass(value) and value.__module__.startswith(("lowband.engine", "lowband.run")):
            methods = {key: getattr(value, key) for key in vars(value) if not key.startswith("_")}
            lines += [f"{name}.{key}({arguments(m)})" for key, m in sorted(methods.items()) if callable(m)]
    return "\n".join(lines) + "\n"


def arguments(function) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(one.name + ("" if one.default is inspect.Parameter.empty else "=") for one in parameters)


def test_the_interface_is_the_promised_one() -> None:
    """A difference is a new version's: change interface.txt and CHANGELOG.md with it."""
    assert interface() == SNAPSHOT.read_text(encoding="utf-8")


def test_dir_lists_the_interface() -> None:
    assert set(dir(lowband)) == {*lowband.__all__, "__version__"}
    assert not hasattr(lowband, "nothing")


def test_editors_know_the_types_of_all_names() -> None:
    stub = ast.parse(Path(lowband.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    typed = {
        alias.asname: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {name: getattr(lowband, name).__module__ for name in lowband.__all__}
    assert Path(lowband.__file__).with_name("py.typed").is_file()


def test_an_import_brings_little() -> None:
    """Its time, 0.1 s, is mostly Python's start; a package that it imported would be the rest of it."""
    code = "import sys; before = set(sys.modules); import lowband; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = set(done.stdout.split())
    assert {name for name in new if name.startswith("lowband")} == {"lowband", "lowband.errors"}
    assert {name.partition(".")[0] for name in new} - {"lowband"} <= sys.stdlib_module_names
    assert len(new) < 60
