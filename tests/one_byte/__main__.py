"""`python -m tests.one_byte --out FOLDER`: one byte per worker and step, beside data parallel.

A byte model of examples/train.py is trained on Python's modules, then fine-tuned on its manual's text by
examples/one_byte.py: four workers begin, one leaves, one is killed, one joins. Data parallel trains the same
weights on the same batches' gradients in one process. A row is the loss on held-out text after a round.
"""

import argparse
import json
import sys
import sysconfig
import tempfile
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from tests import warm
from tests.campaign_rows import commit, write, write_environment
from tests.checkout import ROOT
from tests.ports import held_port

EXAMPLES = ROOT / "examples"
STDLIB = Path(sysconfig.get_path("stdlib"))
COLUMNS = ("method", "seed", "round", "workers", "loss", "sent_bytes", "same_weights", "commit")
WORKERS = 4
PRETRAINED, PRETRAINING_BATCH = 1000, 16  # steps, sequences
LONGEST_S = 1800  # of one run
PATIENCE_S = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.one_byte", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--steps", type=int, default=PRETRAINED, help="of the training before")
    parser.add_argument("--out", type=Path, required=True, help="folder of rounds.csv, env.json")
    options = parser.parse_args()
    write_environment(options.out, "loopback")
    every = max(5, options.rounds // 24)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, get_context("fork").Pool(1) as pool:
        folder = Path(name)
        text = folder / "text"
        text.write_bytes((STDLIB / "pydoc_data" / "topics.py").read_bytes())
        pool.apply(_pretrain, (folder / "weights.pt", options.steps))
        for seed in range(options.seeds):
            ours = _one_byte(folder, text, seed, options.rounds, every)
            theirs = pool.apply(_data_parallel, (folder / "weights.pt", text, seed, options.rounds, every))
            rows += [{**row, "commit": commit()} for row in ours + theirs]
            write(options.out / "rounds.csv", COLUMNS, rows)
            print(seed, ours[0]["loss"], ours[-1]["loss"], theirs[-1]["loss"], flush=True)
    return 0


def _one_byte(folder: Path, text: Path, seed: int, rounds: int, every: int) -> list[dict[str, Any]]:
    """Rows of worker 0, the last with whether the workers that are left have the same weights."""
    store, joins = f"localhost:{held_port()}", rounds * 7 // 12
    begun: dict[int, ForkServerProcess] = {}

    def begin(worker: int, *more: str) -> None:
        command = [
            "-m", "tests.one_byte.worker", "--store", store, "--worker", worker, "--weights",
            folder / "weights.pt", "--text", text, "--rounds", rounds, "--every", every, "--patience",
            PATIENCE_S, "--seed", seed, *more,
        ]  # fmt: skip
        begun[worker] = warm.begun([str(word) for word in command], folder / f"output.{worker}")

    begins = ["--begins", *map(str, range(WORKERS)), "--waits", str(joins + 1)]
    try:
        begin(0, "--hosts", *begins)
        begin(1, *begins)
        begin(2, "--dies", str(rounds * 5 // 12), *begins)
        begin(3, "--leaves", str(rounds // 4), *begins)
        begin(WORKERS, "--joins", str(joins))
        for worker in (0, 1, WORKERS):
            begun[worker].join(LONGEST_S)
            if begun[worker].exitcode != 0:
                raise RuntimeError((folder / f"output.{worker}").read_text())
    finally:
        for process in begun.values():
            warm.killed(process)
    ends = [_states(folder, worker)[-1] for worker in (0, 1, WORKERS)]
    rows = []
    for state in _states(folder, 0):
        values = {"method": "one byte", "seed": seed, "round": state["round"], "loss": state["loss"]}
        rows.append({**values, "workers": state.get("workers", ""), "sent_bytes": state["round"]})
    rows[-1]["same_weights"] = len({end["sha256"] for end in ends}) == 1
    rows[-1]["sent_bytes"] = ends[0]["sent_bytes"]
    return rows


def _states(folder: Path, worker: int) -> list[dict[str, Any]]:
    lines = (folder / f"output.{worker}").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _example() -> Any:
    """The module examples/one_byte.py, in a process whose imports it may change."""
    sys.path.insert(0, str(EXAMPLES))
    import one_byte

    torch.set_num_threads(1)  # threads that wait for each other on a busy machine take fifty times as long
    torch.manual_seed(0)
    return one_byte


def _pretrain(path: Path, steps: int) -> None:
    example = _example()
    code = b"".join(file.read_bytes() for file in sorted(STDLIB.glob("*.py")))
    text, model = torch.frombuffer(bytearray(code), dtype=torch.uint8), example.ByteModel()
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        model(example.sequences(text, PRETRAINING_BATCH, seed=step)).backward()
        adam.step()
        adam.zero_grad()
    torch.save(model.state_dict(), path)


def _data_parallel(weights: Path, text: Path, seed: int, rounds: int, every: int) -> list[dict[str, Any]]:
    """The same start and batches with exact gradients, averaged over the workers in every step."""
    example = _example()
    data, model = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8), example.ByteModel()
    model.load_state_dict(torch.load(weights, weights_only=True))
    cut = len(data) * 9 // 10
    held_out, adam = (
        example.sequences(data[cut:], example.HELD_OUT, seed=0),
        torch.optim.Adam(model.parameters(), lr=1e-3),
    )
    # What a rank sends of its fp32 gradients in an all-reduce.
    sent = 2 * 4 * sum(p.numel() for p in model.parameters()) * (WORKERS - 1) // WORKERS
    rows = []
    for round_ in range(rounds + 1):
        if round_ % every == 0:
            with torch.no_grad():
                loss = float(model(held_out))
            values = {"method": "data parallel", "seed": seed, "round": round_, "workers": WORKERS}
            rows.append({**values, "loss": loss, "sent_bytes": sent * round_})
        batches = [
            example.sequences(data[:cut], example.BATCH, hash((seed, round_, w))) for w in range(WORKERS)
        ]
        model(torch.cat(batches)).backward()
        adam.step()
        adam.zero_grad()
    return rows


if __name__ == "__main__":
    sys.exit(main())
