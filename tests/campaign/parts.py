"""What a campaign measures, part by part, in this order."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lowband.evidence.tables.collect import COLUMNS, KEYS


class Step(NamedTuple):
    """A module that writes a row for each case.

    command: its words; {out} is the part's folder
    file:    of that folder; with `rows` rows once the command has ended, of these seeds if
             it has others too; how many is not known (None): it has ended if its exit code was 0
    goes_on: given again, the command keeps the rows that are there: it may be cut
    """

    command: tuple[str, ...]
    file: str
    rows: int | None
    seeds: range | None = None
    goes_on: bool = True


class Part(NamedTuple):
    """Runs of suites, or steps. Runs are sides of ratios: all are of one boot of one machine.

    repeat:    of the suites' runs, so that both sides of a ratio of such runs are of one boot; 0: all runs
    folder:    of results/reference, whose tables get the rows
    is_alone:  its times count: nothing else may run beside it
    left_out:  columns of steps.csv that are not shipped
    table:     the table that gets the steps' rows
    is_wrong:  whether a row is one that should not be
    at_once:   so many cases run at once: their seconds pass together
    experiment: an entry of config/experiments.yaml that says how long it takes, where no row does
    """

    folder: str
    is_alone: bool
    suites: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    table: str = ""
    is_wrong: Callable[[Mapping[str, str]], bool] = lambda row: row["status"] not in ("ok", "not run")
    at_once: int = 1
    experiment: str = ""
    repeat: int = 0

    def has(self, row: Mapping[str, str]) -> bool:
        """Whether a row of its tables is of this part: one of steps by its seed, where these have some."""
        if not self.steps:
            return row["suite"] in self.suites and self.has_run(row["run_id"])
        return any(step.seeds is None or int(row["seed"]) in step.seeds for step in self.steps)

    def has_run(self, run_id: str) -> bool:
        """Whether one of its suites' runs is of its repeat."""
        return not self.repeat or run_id.endswith(f"-r{self.repeat}")


_TIMES = ("grad_norm", "step_time_s", "compute_time_s", "exposed_comm_time_s", "hidden_comm_time_s")
_OF_WAN = ("run_id", "point", "suite", "step", "is_warmup", "loss", "step_time_s")
_CASES, _AT_A_TIME = 1000, 100

PARTS = {
    **{
        suite: Part("box", True, (suite,))
        for suite in ("box", "box-accumulation", "box-order", "box-planned")
    },
    **{f"box-attained-{n}": Part("box", True, ("box-attained",), repeat=n) for n in (1, 2, 3)},  # 1 h each
    "peers": Part("peers", True, ("peers",)),
    "peers-box": Part("peers", True, ("peers-box",)),
    "local": Part("local/tables", True, ("default", "volume", "links", "order")),
    "convergence": Part("convergence", False, ("convergence",), _TIMES),
    "wan": Part("wan", False, ("wan",), tuple({*KEYS, *COLUMNS["steps"]} - {*_OF_WAN})),
    **{
        name: Part(
            "faults",
            False,
            steps=(Step((*command, "--out", "{out}"), "injected.csv", rows, seeds),),
            table="injected.csv",
            is_wrong=lambda row: bool(row["wrong"]),
        )
        for name, command, rows, seeds in [
            ("faults", ("tests.faults", "--cases", "200"), 200, range(1000)),
            ("faults-slurm", ("tests.faults.under_slurm", "--rounds", "3"), 12, range(1000, 2000)),
            ("faults-replicas", ("tests.faults.of_replicas", "--cases", "24"), 24, range(2000, 3000)),
        ]
    },
    "stragglers": Part(
        "stragglers",
        False,
        steps=(Step(("tests.stragglers", "--trials", "100", "--out", "{out}"), "trials.csv", 200),),
        table="trials.csv",
        is_wrong=lambda row: row["is_right"] != "True",
        at_once=5,
    ),
    "twice": Part(
        "twice",
        False,
        steps=(Step(("tests.twice", "--work", "{out}/runs", "--out", "{out}"), "twice.csv", None),),
        table="twice.csv",
        is_wrong=lambda row: (row["is_promised"], row["same"]) == ("True", "False"),
        experiment="twice",
    ),
    "random": Part(
        "random",
        False,
        steps=tuple(
            Step(
                ("tests.random", "--cases", str(_AT_A_TIME), "--first", str(first),
                 "--out", f"{{out}}/{first:03}.csv"),
                f"{first:03}.csv", _AT_A_TIME, goes_on=False,
            )
            for first in range(0, _CASES, _AT_A_TIME)
        ),
        table="engine.csv",
        is_wrong=lambda row: row["outcome"] == "failed",
    ),
}  # fmt: skip
