"""Conda's environments: what the package, its engine and its report ask for, and no more."""

import re
import tomllib

import pytest
import yaml

from tests.checkout import ROOT

# Beside those of all: rocm.yaml says where its torch and Triton come from.
OWN = {"cpu": {"torch"}, "cuda": {"torch", "triton", "deepspeed"}, "rocm": {"torch", "deepspeed"}}


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[<>=]", requirement)[0] for requirement in requirements]


@pytest.mark.parametrize("name", OWN)
def test_packages_are_those_of_pyproject(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {*names(project["dependencies"]), *names(extras["train"]), *names(extras["report"])}
    *_, pip = yaml.safe_load((ROOT / "envs" / f"{name}.yaml").read_text())["dependencies"]
    listed = names(pip["pip"])
    assert len(listed) == len(set(listed))
    assert set(listed) == (asked - {"torch"}) | OWN[name]


def test_every_environment_is_checked() -> None:
    assert {path.stem for path in (ROOT / "envs").glob("*.yaml")} == {*OWN}
