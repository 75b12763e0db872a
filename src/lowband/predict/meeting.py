"""What replicas that meet seldom (spec.sync) wait for each other, in the mean over a period.

They exchange each fragment of the weights every H steps, x seconds, behind d = min(delay, H / fragments)
steps of c seconds each without it: of what is exposed, join(d c, x) - d c, a step has the H-th part. From the
next fragment's start on an exchange shares the lane, so for longer delays and unequal fragments this is an
upper bound. What gathers new weights in a replica afterwards is behind nothing.
"""

from lowband.cost.numbers import Num, join
from lowband.predict.exposed import Lane
from lowband.predict.place import Place
from lowband.predict.workload import Workload
from lowband.spec.step import ANCHOR_GATHER


def meeting_s(
    job: Workload, place: Place, root: Lane, block: Lane, alone_s: Num, overlap: float
) -> dict[str, Num]:
    """What a step waits for exchanges between replicas, in the mean over a period; nothing without sync.

    alone_s: of a step without them
    """
    sync = job.scheme.sync
    if sync is None:
        return {}

    def lane_s(name: str, fragment: int) -> Num:
        in_it = sum(sync.fragment_of(unit) == fragment for unit in range(1, place.blocks + 1))
        return in_it * block.get(name, 0.0) + (root.get(name, 0.0) if fragment == 0 else 0.0)

    row, hidden = job.scheme.meeting, min(sync.delay, sync.gap) * alone_s
    met: Num = 0.0
    gathered: Num = 0.0
    for fragment in range(sync.fragments):
        met = met + join(hidden, lane_s(row.name, fragment), overlap) - hidden
        gathered = gathered + lane_s(ANCHOR_GATHER.name, fragment)
    names = {row.name: met, ANCHOR_GATHER.name: gathered}
    return {f"exposed_{name}": time / sync.every for name, time in names.items()}
