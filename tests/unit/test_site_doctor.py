"""`lowband doctor --site`: a login node with stand-ins for modules and accounts, and one with nothing."""

import os
from pathlib import Path

import pytest

from lowband.__main__ import main
from lowband.run import site
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by

# The function that a login shell defines; rccl-net-plugin brings a folder with the plugin.
MODULE = """module() {
  case "$2" in
    rocm/*) echo "Lmod: rocm/7.1.1 is unknown" >&2; return 1;;
    *) export LD_LIBRARY_PATH="$HOME/lib";;
  esac
}
export PATH="$HOME/bin:$PATH"
"""


FRONTIERS = ["PrgEnv-gnu/8.7.0", "cpe/26.03", "rocm/7.1.1", "craype-accel-amd-gfx90a", "rccl-net-plugin"]


def rows(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """The exit code, and by subject what is missing, or ok."""
    code = main(["doctor", "--site", name, "--root", str(ROOT)])
    lines = capsys.readouterr().out.splitlines()
    words = [[word.strip() for word in line.split("  ") if word.strip()] for line in lines]
    return code, {first: last for first, *_, last in words}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of torch takes half a minute and more beside enough other work."""
    monkeypatch.setattr(site, "LIMIT_S", 600)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for login shells."""
    for name in ("SLURM_PROJECT", "LD_LIBRARY_PATH", "CRAY_LD_LIBRARY_PATH", "NCCL_NET_PLUGIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "me")
    (tmp_path / ".bash_profile").touch()
    monkeypatch.setattr(site, "_imports", lambda _modules: iter([("import", "torch 2.13.0 ROCm 7.1", "")]))
    return tmp_path


@pytest.mark.usefixtures("home")
def test_where_nothing_is_each_piece_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "why_not", lambda: "no program sbatch")
    code, found = rows("frontier", capsys)
    assert code == 1
    assert found.pop("network plugin").startswith("missing: librccl-net*.so* or libnccl-net*.so* on LD_LIB")
    assert found == {
        "Slurm": "missing: no program sbatch",
        "account": "missing: SLURM_PROJECT, the project that pays for jobs",
        "module system": "missing: the command module",
        **{f"module {name}": "missing: the module system" for name in FRONTIERS},
        "import": "ok",
    }


def test_at_a_site_only_what_is_missing_is(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / ".bash_profile").write_text(MODULE)
    (home / "bin").mkdir()
    accounts = home / "bin" / "sacctmgr"
    accounts.write_text('#!/bin/sh\n[ "$5" = user=me ] && echo abc123\n')
    accounts.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_PROJECT", "abc123")
    monkeypatch.setattr(site, "why_not", lambda: "")
    (home / "lib").mkdir()
    (home / "lib" / "librccl-net.so").touch()
    code, found = rows("frontier", capsys)
    assert code == 1
    assert {name: said for name, said in found.items() if said != "ok"} == {
        "module rocm/7.1.1": "missing: Lmod: rocm/7.1.1 is unknown"
    }
    monkeypatch.setenv("SLURM_PROJECT", "abc124")
    assert (
        rows("frontier", capsys)[1]["account"] == "missing: an account of that name for you; Slurm has abc123"
    )
    assert rows("lumi", capsys)[0] == 1  # the same account
    monkeypatch.setenv("SLURM_PROJECT", "ABC123")  # Slurm's accounts have small letters
    code, found = rows("lumi", capsys)
    assert (code, set(found.values())) == (0, {"ok"})
    (home / "lib" / "librccl-net.so").unlink()
    assert rows("lumi", capsys)[1]["network plugin"].startswith("missing: librccl-net")


def test_a_torch_for_no_gpu_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """This machine's own, by the real import."""
    torch = pytest.importorskip("torch")
    if torch.version.hip or torch.version.cuda:
        pytest.skip("this torch is built for GPUs")
    _, found = rows("cuda", capsys)
    assert found["import"] == "missing: a torch built for the site's GPUs"


def test_away_from_a_checkout_it_says_where_sites_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed_by(capsys, "doctor", "--site", "lumi", "--root", str(tmp_path), code=2) == (
        f"lowband: {tmp_path}/slurm: no site 'lumi' (allowed: in the root of a checkout, its names)"
    )


def test_a_box_is_no_site(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--site", "frontier-box", "--root", str(ROOT)]) == 2
    assert "no site 'frontier-box' (allowed: cuda, frontier, lumi, perlmutter)" in capsys.readouterr().err
    assert CONFIG.has_slurm("frontier-box")
