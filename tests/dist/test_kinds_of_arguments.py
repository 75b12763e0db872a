"""Arguments of another kind than the library's functions take are refused in one line, which names them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks

Given = Callable[[], object]


def sharded(**given: Any) -> nn.Module:
    given = {"scheme": "zero3", "topology": lowband.Topology({}), "wrap": nn.Linear, **given}
    return lowband.shard(given.pop("module", nn.Sequential(nn.Linear(4, 4))), **given)


def piped(**given: Any) -> lowband.Pipeline:
    given = {"chain": [nn.Linear(4, 4)], "topology": lowband.Topology({}), "micro_batches": 1, **given}
    return lowband.Pipeline(**{"loss": nn.functional.mse_loss, "scheme": "zero3", **given})


def topology_of(*given: Any) -> object:
    return lowband.Topology(*given)


WRONG: dict[str, Given] = {
    "module is <class": lambda: sharded(module=nn.Linear),
    "scheme is {'weights': 'world'}": lambda: sharded(scheme={"weights": "world"}),
    "topology is {'node': 1}": lambda: sharded(topology={"node": 1}),
    "wrap is [<class": lambda: sharded(wrap=[nn.Linear]),
    "wrap is 'Linear'": lambda: sharded(wrap="Linear"),
    "wrap is None": lambda: sharded(wrap=None),
    "wrap is of type ModuleList": lambda: sharded(wrap=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])),
    "placement_of is {'0': 'ddp'}": lambda: sharded(placement_of={"0": "ddp"}),
    "device is 'gpu'": lambda: sharded(device="gpu"),
    "disk is 5": lambda: sharded(disk=5),
    "micro_batches is of type Tensor": lambda: lowband.accumulate(
        sharded(), torch.zeros(9, 9, 9), lambda x: x
    ),
    "max_norm is None": lambda: lowband.clip_grad_norm_(sharded(), None),
    "chain is Linear(": lambda: piped(chain=nn.Linear(4, 4)),
    "chain is of type dict": lambda: piped(chain={"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)}),
    "chain[1] is <class": lambda: piped(chain=[nn.Linear(4, 4), nn.Linear]),
    "loss is None": lambda: piped(loss=None),
    "scheme is 3": lambda: piped(scheme=3),
    "topology is None": lambda: piped(topology=None),
    "micro_batches is 1.5": lambda: piped(micro_batches=1.5),
    "schedule is None": lambda: piped(schedule=None),
    "chunks is '2'": lambda: piped(chunks="2"),
    "layers is 1": lambda: piped(layers=1),
    "micro_batches is 1": lambda: piped().step(1),
    "micro_batches[0] is of type Tensor": lambda: piped().step([torch.zeros(2, 4, 4)]),
    "inner is 2": lambda: topology_of(2),
    "inner['node'] is '2'": lambda: topology_of({"node": "2"}),
    "axes is {'tensor': 1}": lambda: topology_of({}, {"tensor": 1}),
}


def refusals() -> dict[str, str]:
    found = {}
    for said, given in WRONG.items():
        with pytest.raises(lowband.UserError) as error:
            given()
        found[said] = str(error.value)
    return found


def test_they_are_refused_by_name() -> None:
    [found] = on_ranks(1, refusals)
    for said, text in found.items():
        assert said in text
        assert "allowed: " in text
        assert "\n" not in text
