"""Speed of the predictor on this machine, as `lowband bench-predict` measures it."""

import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lowband.predict.prediction import predict
from lowband.predict.search.plan import plan
from lowband.predict.workload import Workload
from lowband.spec.config import Config

SCHEMES = ("ddp", "zero1", "zero2", "zero3", "hpz", "zeropp", "hsdp", "hier3-exact", "hier3")
RANKS = (8, 64, 384, 1024)
REPEATS = 3
# The largest plans of docs/predictor.md, as a user starts them.
LARGE = "plan --cluster eos-2024 --model llama-3.1-405b --gpus 16384"
COMMANDS = LARGE, f"{LARGE} --seq 8192 --global-batch 2048 --software any"


def bench(root: Path) -> dict[str, Any]:
    """Time and memory of gpt-20b on Frontier over a grid, best of 3; a plan of gpt-175b on 512 GPUs; whole
    commands, Python's start with them.

    Rates are per second of the single thread's CPU time, so other work on the machine does not count.
    """
    config = Config(root)
    machine, model = config.machine("frontier"), config.model("gpt-20b")
    stack = config.given_stack(None, machine)
    schemes = [config.scheme(name) for name in SCHEMES]
    micro_batch, accumulation, faster = np.meshgrid(
        np.arange(1, 17), 2 ** np.arange(8), np.linspace(0.1, 2, 20), indexing="ij"
    )
    points = 0
    seconds, wall = [], []
    for _ in range(REPEATS):
        start, start_wall, points = time.process_time(), time.perf_counter(), 0
        for scheme in schemes:
            for ranks in RANKS:
                job = Workload(
                    machine, stack, model, scheme, ranks, micro_batch, 2048, accumulation,
                    faster={"world": faster},
                )  # fmt: skip
                points += np.size(predict(job, interval=False).step_time_s)
        seconds.append(time.process_time() - start)
        wall.append(time.perf_counter() - start_wall)
    one = Workload(machine, stack, model, schemes[-1], 384, 1, 2048, 4)
    start = time.process_time()
    for _ in range(200):
        predict(one, interval=False)
    single = (time.process_time() - start) / 200
    start, start_wall = time.process_time(), time.perf_counter()
    selene = config.machine("selene-2021")
    found = plan(selene, config.given_stack(None, selene), config.model("gpt-175b"), 512, 2048, 1024)
    return {
        "provenance": "measured",
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cores": 1,
        "grid_points": points,
        "grid_predictions_per_s": points / min(seconds),
        "grid_predictions_per_wall_s": points / min(wall),
        "load_average": os.getloadavg()[0],
        "single_predictions_per_s": 1 / single,
        "plan": "gpt-175b on 512 GPUs of selene-2021, sequence 2048, global batch 1024",
        "plan_candidates": len(found.candidates),
        "plan_cpu_s": time.process_time() - start,
        "plan_wall_s": time.perf_counter() - start_wall,
        "commands_cpu_s": {command: _processor_s(command, root) for command in COMMANDS},
    }


def _processor_s(command: str, root: Path) -> float:
    """Processor seconds of `lowband` with these arguments, of user and system."""
    start = _of_children()
    told = [sys.executable, "-m", "lowband", *command.split(), "--root", str(root)]
    subprocess.run(told, check=True, stdout=subprocess.DEVNULL)
    return _of_children() - start


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
