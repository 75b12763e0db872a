"""`attention: flash2` in a run: the same training as with torch's, and refused where it cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.dist.started import begun, ended

ROOT = Path(__file__).parents[2]
SMALL = {"steps": 2, "warmup_steps": 1, "seq_len": 40, "attention": "flash2"}


def spec_of(**changes) -> RunSpec:
    """A run of one rank with heads of 32 values."""
    spec = next(spec for spec in Config(ROOT).runs(["smoke"]) if spec.ranks == 1)
    model = spec.model.model_copy(update={"layers": 1, "hidden": 64, "heads": 2})
    return RunSpec.parse({**spec.model_dump(), **SMALL, "model": model.model_dump(), **changes}, "test")


def train(folder: Path, spec: RunSpec) -> RunFolder:
    """A run that ends well. Triton reads TRITON_INTERPRET when it is imported: only what has no kernel of
    ours is forked from this process, which has imported it."""
    folder.mkdir()
    path = folder / "spec.json"
    path.write_text(spec.to_json())
    if spec.attention == "sdpa":
        code, error = ended(begun(path), path)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "lowband", "train", str(path)],
            capture_output=True,
            text=True,
            timeout=900,
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        code, error = done.returncode, done.stderr
    assert code == 0, error
    return RunFolder(folder)


def test_trains_as_with_torchs_attention(tmp_path: Path) -> None:
    losses = {}
    for attention in ("flash2", "sdpa"):
        run = train(tmp_path / attention, spec_of(attention=attention))
        losses[attention] = [(step.loss, step.grad_norm) for step in run.read_steps()]
    assert len(losses["flash2"]) == 2
    for ours, torchs in zip(losses["flash2"], losses["sdpa"], strict=True):
        assert ours == pytest.approx(torchs, rel=1e-5)
    assert losses["flash2"] != losses["sdpa"]  # another kernel, other roundings


WAYS = {"heads": (2, True), "gather": (2, False), "package=heads,node=ring": (4, True), "ring": (2, False)}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "ring" else [pytest.mark.wide]) for way in WAYS]
)
def test_blocks_of_keys_on_other_ranks_are_merged(tmp_path: Path, way: str) -> None:
    """Beside one process with torch's kernels."""
    ranks, zigzag = WAYS[way]
    found = []
    for name, axes in {
        "alone": {"attention": "sdpa"},
        "along": {"ranks": ranks, "context": ranks, "context_attention": way, "zigzag": zigzag},
    }.items():
        run = train(tmp_path / name, spec_of(micro_batch=1, seq_len=16, **axes))
        found.append([(step.loss, step.grad_norm) for step in run.read_steps()])
    assert len(found[0]) == len(found[1]) == 2
    for ours, torchs in zip(*found, strict=True):
        assert ours == pytest.approx(torchs, rel=1e-5)


def test_refused_in_one_line_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(spec_of().to_json())
    code, error = ended(begun(path, CUDA_VISIBLE_DEVICES=""), path)
    assert code == 2
    needs = "needs Triton and a CUDA or ROCm device, not cpu (allowed: attention: sdpa)"
    assert error == f"lowband: attention flash2: {needs}\n"
    assert not RunFolder(tmp_path).outcome.exists()


def test_what_cannot_be_is_refused_with_the_spec() -> None:
    with pytest.raises(UserError, match="flash2 cannot run on fake tensors"):
        spec_of(device="fake")
    with pytest.raises(UserError, match=r"attention: .*'sdpa' or 'flash2'"):
        spec_of(attention="flash3")
