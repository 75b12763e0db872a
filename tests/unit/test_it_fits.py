"""Every run of every shipped suite of a real cluster fits its device, at the start and in the step."""

from dataclasses import replace

import pytest

from lowband.predict.prediction import predict
from lowband.predict.workload import workload_of
from tests.checkout import CONFIG

RUNTIME_GIB = 4  # for the runtime, collectives' libraries and the allocator's gaps
REAL = ["cuda", "frontier", "one-gpu"]  # suites that train on devices


@pytest.mark.parametrize("suite", REAL)
def test_every_run_fits(suite: str) -> None:
    specs = CONFIG.runs([suite])
    assert specs
    for spec in specs:
        found = predict(workload_of(spec))
        room = spec.machine.device.memory_gib - RUNTIME_GIB
        assert found.peak_memory_bytes <= room * 2**30, spec.run_id


def test_on_8_gcds_hier3_leaves_too_little_for_the_runtime() -> None:
    """The reason that the suite `frontier` gives for its smallest number of ranks."""
    [spec] = [
        s
        for s in CONFIG.runs(["frontier"])
        if (s.scheme.name, s.ranks, s.accumulation, s.collectives, s.repeat) == ("hier3", 16, 1, "hops", 1)
    ]
    found = predict(replace(workload_of(spec), ranks=8))
    assert f"{found.peak_memory_bytes / 2**30:.1f}" == "61.7"
