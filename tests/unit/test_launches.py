"""Every launch of a kernel happens on the GPU that its tensors are on."""

import ast

import pytest

from tests.checkout import ROOT

MODULES = sorted((ROOT / "src/lowband/kernels").glob("*_triton.py"))


def launches(function: ast.FunctionDef) -> bool:
    """Whether it calls what has a grid: kernel[grid](...)."""
    return any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Subscript) for each in ast.walk(function)
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_launch_is_on_its_tensors_device(path) -> None:
    functions = [each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)]
    found = {
        each.name: [ast.unparse(mark) for mark in each.decorator_list] for each in functions if launches(each)
    }
    assert found
    assert all(marks == ["on_its_device"] for marks in found.values()), found
