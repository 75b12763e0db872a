"""What was published to have run fits what its devices have, as predicted: within the model's error, and
nearly always without it."""

import pytest
from test_command_rows import jobs

from lowband.evidence.validation import SOURCES
from lowband.predict.prediction import predict
from lowband.predict.room import room_of
from lowband.predict.workload import Workload

OTHERS = {"torchtitan-h100", "torchtitan-h100-memory"}  # of H100 with 96 GB
EVERY = 29  # of vtrain's 1,440 rows
SHORT = {"frontier": 1, "megatron-zero3": 1}  # by 2 of 64 GiB, and by 6 of 80, without the error


def of_rows(name: str) -> list[Workload]:
    return [job for _, _, each in jobs(SOURCES[name], EVERY if name == "vtrain" else 1) for job in each]


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in OTHERS])
def test_rows_that_ran_fit(name: str) -> None:
    rooms = [room_of(job, predict(job, interval=False)) for job in of_rows(name)]
    assert rooms and all(room is not None and room.high >= 0 for room in rooms)
    assert sum(room is not None and room.headroom < 0 for room in rooms) == SHORT.get(name, 0)
