"""What a replica that joins is given: what a checkpoint has of one job, sent from rank to rank.

The states of random number generators are not among it: each replica has its own data and its own dropout.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowband.engine.checkpoint.fit import check_fit
from lowband.engine.checkpoint.json_values import check_json
from lowband.engine.checkpoint.logical_tensors import Logical
from lowband.engine.checkpoint.manifest import Manifest
from lowband.engine.checkpoint.restore import new_states, overwrite, ranges
from lowband.engine.jobs.link import Link
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport.meeting import Tick
from lowband.errors import UserError

FROM = Path("state of another replica")  # in messages


class State:
    """The state of a sharded module and its optimizer, and of further objects."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, also: Mapping[str, Any]) -> None:
        self._module, self._optimizer, self._also = module, optimizer, also

    def sum(self, has_trained: bool) -> str:
        """A checksum of this rank's part of what replicas share: anchors, frozen parameters, and of a new run
        buffers; later each replica has those of its own batches."""
        digest, here = hashlib.sha256(), Logical.of(self._module, self._optimizer)
        for name, piece in sorted(here.pieces.items()):
            kind, _, parameter = name.partition(".")
            is_frozen = kind == "model" and not here.shards[parameter].requires_grad
            is_shared = kind == "sync" or is_frozen or (kind == "buffer" and not has_trained)
            if is_shared:
                digest.update(name.encode())
                digest.update(piece.local.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def content(self, step: int) -> str:
        """What it consists of, without the tensors' values; JSON. Raises UserError if JSON cannot have it."""
        here = Logical.of(self._module, self._optimizer)
        extra = {name: each.state_dict() for name, each in self._also.items()}
        check_json("also", extra)
        for i, group in enumerate(here.groups):
            check_json(f"param group {i}", group.options)
        content = here.content(step).model_dump(mode="json")
        return json.dumps({**content, "format": 2, "extra": extra, "files": [], "sha256": ""})

    def send(self, content: str, link: Link, tick: Tick) -> None:
        """Send this rank's values. content: the result of `content` on rank 0"""
        pieces = Logical.of(self._module, self._optimizer).pieces
        for name in json.loads(content)["tensors"]:
            link.send(pieces[name].local)
            tick()

    def receive(self, content: str, link: Link, tick: Tick) -> "Received":
        """Raises UserError if it does not fit; nothing is changed."""
        manifest = Manifest.model_validate(json.loads(content))
        here = Logical.of(self._module, self._optimizer)
        check_fit(manifest, FROM, here, {})
        if set(manifest.extra) != set(self._also):
            raise UserError(
                f"`also` has {sorted(self._also)}, there {sorted(manifest.extra)}",
                where=FROM,
                allowed="the same",
            )
        wanted, values = ranges(manifest, here, {}), {}
        for name, saved in manifest.tensors.items():
            values[name] = torch.empty(wanted[name].count, dtype=saved.torch_dtype)
            link.receive(values[name])
            tick()
        return Received(manifest, here, values)

    def put(self, received: "Received") -> None:
        """Put it in place."""
        manifest, here = received.manifest, received.here
        made = new_states(manifest, here)
        with torch.no_grad():
            overwrite(
                manifest, received.values, made, here, {}, self._module, self._optimizer,
                engine_of(self._module).device,
            )  # fmt: skip
        for name, each in self._also.items():
            each.load_state_dict(manifest.extra[name])


class Received:
    """A state that fits, not put in place yet."""

    def __init__(self, manifest: Manifest, here: Logical, values: dict[str, torch.Tensor]) -> None:
        self.manifest, self.here, self.values = manifest, here, values
