"""Who records how a run ended, and what it is recorded as."""

from pathlib import Path

import pytest

from lowband.run import train
from lowband.run.ending import failure
from lowband.run.ranks import is_first_process, job_id
from lowband.spec.lock import hold
from lowband.spec.records import Outcome
from lowband.spec.run_folder import RunFolder


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "oom"),
        ("rank 0: RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate", "oom"),
        ("rank 0: MemoryError: ", "oom"),
        ("rank 0: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "oom"),
        ("rank 0: DistBackendError: NCCL error\nunhandled cuda error\nCuda failure 2 'Out Of Memory'", "oom"),
        ("rank 0: ValueError: a broken rank", "error"),
    ],
)
def test_out_of_memory_is_found_on_any_line(error: str, status: str, tmp_path: Path) -> None:
    outcome = failure(error, RunFolder(tmp_path))
    assert (outcome.status, outcome.cause) == (status, error.splitlines()[0])


@pytest.fixture
def rank_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one that torchrun started, with Slurm's first task around it."""
    for name, value in {"RANK": "3", "SLURM_PROCID": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "SEEN_S", 0.3)


@pytest.mark.usefixtures("rank_3")
@pytest.mark.parametrize("is_ours", [True, False])
def test_only_the_job_that_holds_the_folder_records_its_failures(tmp_path: Path, is_ours: bool) -> None:
    """Rank 3 may fail before it has met rank 0, which is refused where another job runs the folder."""
    folder = RunFolder(tmp_path)
    lost = Outcome(status="error", cause="rank 3: no device", steps=0)
    with hold(folder.lock, job_id() if is_ours else "another"):
        assert train._record(lost, folder).cause == lost.cause
    assert folder.outcome.exists() == is_ours


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"RANK": "0", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, True),
        ({"RANK": "1", "SLURM_PROCID": "0"}, False),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, False),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, True),
    ],
)
def test_one_process_of_a_job_is_the_first(
    variables: dict[str, str], is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torchrun's ranks rank 0, wherever Slurm has put it."""
    for name in ("RANK", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() is is_first
