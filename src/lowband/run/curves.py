"""Training curves where people look: TensorBoard, Weights & Biases or MLflow, each by its own library.

Nothing leaves this machine, unless the libraries' own variables say so: WANDB_MODE, MLFLOW_TRACKING_URI.
"""

import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from lowband.errors import UserError, with_hint
from lowband.spec.records import Sent

PROJECT = "lowband"  # W&B's project, MLflow's experiment


class Tool(ABC):
    """The curves of one run under way."""

    leaves: str  # what is in the folder once one is there; {run}: its name

    @abstractmethod
    def __init__(self, folder: Path, run: str, options: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None: ...

    @abstractmethod
    def close(self, is_well: bool) -> None: ...


class TensorBoard(Tool):
    """An event file in folder/run: tensorboard --logdir FOLDER."""

    leaves = "{run}"

    def __init__(self, folder: Path, run: str, options: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder / run))

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=at_s, step=step, summary=Summary(value=points)))

    def close(self, is_well: bool) -> None:
        self._writer.close()


class WandB(Tool):
    """A folder in folder/wandb: wandb sync FOLDER/wandb/offline-run-*. Of this host nothing is recorded."""

    leaves = "wandb"

    def __init__(self, folder: Path, run: str, options: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=folder,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run,
            config=dict(options),
            reinit="create_new",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True,
                x_disable_meta=True, x_disable_machine_info=True,
            ),
        )  # fmt: skip

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        self._run.log({**values, "_timestamp": at_s}, step=step)

    def close(self, is_well: bool) -> None:
        self._run.finish(exit_code=0 if is_well else 1)


class MLflow(Tool):
    """A run of the experiment `lowband` in folder/mlflow.db: mlflow ui --backend-store-uri sqlite:///..."""

    leaves = "mlflow.db"

    def __init__(self, folder: Path, run: str, options: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder.mkdir(parents=True, exist_ok=True)
        own = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", own))
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(number, run_name=run).info.run_id
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in options.items()])

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        from mlflow.entities import Metric

        at = round(at_s * 1000)
        self._client.log_batch(self._id, [Metric(name, value, at, step) for name, value in values.items()])

    def close(self, is_well: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_well else "FAILED")


TOOLS: dict[str, type[Tool]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
_RUN = re.compile(r"[\w.=+-]+")


class Curves:
    """Curves of a training loop of your own, with the bytes that lowband has sent. Every rank calls it.

        with lowband.Curves("tensorboard", "curves", "first") as curves:
            curves.add(step, {"loss": loss.item()}, model)  # after each step

    tool:    tensorboard, wandb or mlflow: what the extra of that name installs
    folder:  to write into; rank 0 writes
    run:     its name; letters, digits and any of . _ = + -
    options: that the tool shows beside the curves; TensorBoard does not
    Nothing is sent from this machine, unless WANDB_MODE or MLFLOW_TRACKING_URI are set.
    Raises UserError for another tool or a name that cannot be a folder's.
    """

    def __init__(
        self, tool: str, folder: Path | str, run: str, options: Mapping[str, Any] | None = None
    ) -> None:
        if tool not in TOOLS:
            raise UserError(f"unknown tool '{tool}'", where="Curves", allowed=TOOLS)
        if not _RUN.fullmatch(run) or not run.strip("."):
            raise UserError(
                f"'{run}'", where="the run's name", allowed="letters, digits and any of . _ = + -"
            )
        try:
            self._tool = TOOLS[tool](Path(folder), run, options or {}) if _is_first() else None
        except ModuleNotFoundError as error:
            raise with_hint(error, f"Curves({tool!r})") from None

    def add(
        self, step: int, values: Mapping[str, float], module: Any = None, at_s: float | None = None
    ) -> None:
        """Add a point to each curve.

        module: a sharded one, to add `sent_bytes/<level>`: what rank 0 has sent for it since the last call;
                and `sent_bytes/tensor_not_counted`, not a number, if torch's parallelize_module sends, too
        at_s:   seconds since 1970; default: now
        """
        points = dict(values)
        if module is not None:
            from lowband.engine.passes.engine import engine_of

            ledger = engine_of(module).ledger
            points |= by_level(ledger.take())
            points |= {f"sent_bytes/{axis}_not_counted": math.nan for axis in ledger.not_counted}
        if self._tool is not None:
            self._tool.add(step, points, time.time() if at_s is None else at_s)

    def close(self, is_well: bool = True) -> None:
        """Write what is left. is_well: whether the run ended as it should"""
        if self._tool is not None:
            self._tool.close(is_well)
            self._tool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(is_well=kind is None)


def by_level(sent: Iterable[Sent]) -> dict[str, float]:
    """Bytes by the level whose links they went over, named `sent_bytes/<level>`."""
    totals: Counter[str] = Counter()
    for one in sent:
        totals[f"sent_bytes/{one.level}"] += one.bytes  # type: ignore[assignment]
    return dict(totals)


def _is_first() -> bool:
    """Whether this is rank 0, or there are no ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return True
    from lowband.engine.transport.everyone import speaks_for_all

    return speaks_for_all()
