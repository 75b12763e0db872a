"""Fine-tuning that sends one byte per worker and step. Workers are separate processes, which come and go.

python examples/one_byte.py --store localhost:29400 --worker 0 --begins 0 1 --hosts
python examples/one_byte.py --store localhost:29400 --worker 1 --begins 0 1
python examples/one_byte.py --store localhost:29400 --worker 2    # joins later
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from train import LENGTH, ByteModel

import lowband

BATCH, HELD_OUT = 4, 64  # sequences of a worker and step, and those of which the loss is printed


def sequences(text: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (count,), generator=random)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()


def loss_on(model: ByteModel, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: model(tokens)


def sha256(model: ByteModel) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", required=True, help="host:port at which the workers meet")
    parser.add_argument("--hosts", action="store_true", help="this worker hosts the store, and ends last")
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--begins", type=int, nargs="*", default=[], help="the workers of the first round")
    parser.add_argument("--weights", help="a state dict to begin with")
    parser.add_argument("--text", default=__file__, help="whose last tenth is held out")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--leaves", type=int, help="the round in which this worker leaves")
    parser.add_argument("--joins", type=int, help="the round that this worker waits for before it joins")
    parser.add_argument("--every", type=int, default=10, help="rounds from one printed line to the next")
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds that a round waits for a worker"
    )
    parser.add_argument("--seed", type=int, default=0, help="of directions and batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same values on every worker
    model = ByteModel()
    if options.weights:
        model.load_state_dict(torch.load(options.weights, weights_only=True))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    store = lowband.OneByte.store(options.store, options.hosts, options.patience)
    while options.joins and not store.check([f"one-byte/{options.joins}/record"]):
        time.sleep(0.05)
    one = lowband.OneByte(
        model, adam, store, options.worker, options.begins, patience_s=options.patience, seed=options.seed
    )
    text = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    held_out = sequences(text[cut:], HELD_OUT, seed=0)
    last = options.leaves or options.rounds
    while one.round < last:
        if one.round % options.every == 0:
            with torch.no_grad():
                state = {"round": one.round, "loss": float(model(held_out)), "workers": len(one.members)}
            print(json.dumps(state), flush=True)
        one.step(
            loss_on(model, sequences(text[:cut], BATCH, seed=hash((options.seed, one.round, one.worker))))
        )
    one.leave()
    with torch.no_grad():
        loss = float(model(held_out))
    print(
        json.dumps({"round": one.round, "loss": loss, "sent_bytes": one.sent_bytes, "sha256": sha256(model)})
    )
    if options.hosts:
        time.sleep(options.patience)  # others read the last round's record


if __name__ == "__main__":
    main()
