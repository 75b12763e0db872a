"""One replica of DiLoCo, under lowband.Quorum or torchft: `python worker.py OPTIONS.json`.

Both train the model of examples/train.py, in fp32, on the same batches, with the same optimizers. To `out` of
the options go: by exchange, when it was over and with how many replicas; the loss of each step; sums of what
remains.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from train import LENGTH, Block, ByteModel

BATCH, APART, REPLICAS = 4, 10**6, 100
RATE, OUTER_RATE, OUTER_MOMENTUM = 3e-3, 0.7, 0.9


class Replica:
    """What both systems need: the model, the data, the record."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.steps = options, 0
        torch.set_num_threads(1)
        torch.manual_seed(options["seed"])
        self.model = ByteModel()
        self.text = torch.tensor(list(Path(json.__file__).read_bytes()))
        self.record: dict[str, Any] = {"exchanges": {}, "losses": []}

    def step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """number: of this step in the run"""
        if number == self.options.get("dies"):
            os.kill(os.getpid(), getattr(signal, self.options.get("signal", "SIGKILL")))
        time.sleep(self.options["step_s"])
        of_replica = APART * (REPLICAS * self.options["seed"] + self.options["replica"])
        random = torch.Generator().manual_seed(of_replica + number)
        starts = torch.randint(len(self.text) - LENGTH, (BATCH,), generator=random)
        loss = self.model(torch.stack([self.text[s : s + LENGTH + 1] for s in starts]))
        loss.backward()
        self.record["losses"].append(loss.item())
        self.steps += 1
        optimizer.step()
        optimizer.zero_grad()

    def exchanged(self, number: int, replicas: int) -> None:
        """number: of the exchange"""
        self.record["exchanges"][number] = {"at": time.monotonic(), "replicas": replicas}

    def end(self, outer: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        self.record |= {"steps": self.steps, "outer": sha256(outer), "weights": sha256(weights)}
        Path(self.options["out"]).write_text(json.dumps(self.record))


def sha256(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def under_lowband(replica: Replica) -> None:
    import lowband
    from lowband.engine.passes.engine import engine_of

    options, every = replica.options, replica.options["every"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sync = {
        "beyond": "node", "every": every, "outer": "nesterov", "learning_rate": OUTER_RATE,
        "momentum": OUTER_MOMENTUM,
    }  # fmt: skip
    scheme = lowband.Scheme(name="diloco", weights="node", grads="node", optim="node", sync=sync)
    model = lowband.shard(
        replica.model, scheme, lowband.Topology({"node": 1}), Block, compute_dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    quorum = lowband.Quorum(
        model, optimizer, lowband.Quorum.store(options["address"]), options["replica"],
        range(options["replicas"]), options["patience_s"],
    )  # fmt: skip
    replica.record["began"] = quorum.steps // every
    while quorum.steps < every * options["exchanges"]:
        replica.step(quorum.steps, optimizer)
        if quorum.steps % every == 0:
            replica.exchanged(quorum.steps // every, len(quorum.members))
    quorum.leave()
    replicas = engine_of(model).replicas
    assert replicas is not None
    replica.end([each.momentum for each in replicas.exchanges], lowband.full_state_dict(model).values())  # type: ignore[attr-defined]


def under_torchft(replica: Replica) -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    options, every, model = replica.options, replica.options["every"], replica.model
    inner = torch.optim.AdamW(model.parameters(), lr=RATE)
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    states: dict[str, Any] = {"model": model, "inner": inner, "outer": outer}
    load: Callable[[dict[str, Any]], None] = lambda given: [  # noqa: E731
        states[name].load_state_dict(state) for name, state in given.items()
    ]  # type: ignore[assignment,return-value]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=options["patience_s"])
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=load,
        state_dict=lambda: {name: each.state_dict() for name, each in states.items()},
        min_replica_size=2, use_async_quorum=False, rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=options["address"], replica_id=f"replica_{options['replica']}",
        hostname="127.0.0.1", timeout=limit, quorum_timeout=timedelta(seconds=60), init_sync=False,
    )  # fmt: skip
    with DiLoCo(manager, [model], inner, outer, sync_every=every, pin_memory=False):
        done = 0
        while (before := manager.current_step()) < options["exchanges"]:
            replica.step(every * before + done, inner)
            done += 1
            if manager.current_step() != before or done == every:
                done = 0
                replica.record.setdefault("began", manager.current_step() - 1)
                replica.exchanged(manager.current_step(), manager.num_participants())
    momenta = [outer.state[p]["momentum_buffer"] for p in model.parameters() if p in outer.state]
    replica.end(momenta, model.state_dict().values())
    manager.shutdown(wait=False)


def main() -> None:
    replica = Replica(json.loads(Path(sys.argv[1]).read_text()))
    {"lowband": under_lowband, "torchft": under_torchft}[replica.options["system"]](replica)
    os._exit(0)  # threads of either may wait for their partners


if __name__ == "__main__":
    main()
