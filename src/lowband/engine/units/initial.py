"""Initial values of parameters, also of those that are on the meta device and have none yet.

[Note: deferred initialisation] A module built under `torch.device("meta")` has shapes and no memory. Its
parameters are made one at a time on the rank's device, filled, cut into this rank's shards, and freed. A rank
that holds nothing of a parameter does not make it.

[Note: seeds] torch's default generators are seeded anew for each parameter, by the seed and the parameter's
name. So its values depend on nothing else: not on the ranks, the scheme, the order, or on the other
parameters. Values drawn on a GPU are not those drawn on a CPU.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowband.engine.transport.meter import MemoryMeter
from lowband.engine.units.slice_of import slice_of
from lowband.engine.units.tied_to import tie, tied_to
from lowband.errors import UserError


class Source(Protocol):
    """Values that are stored somewhere and read by ranges (checkpoint.safetensors_files)."""

    def flat(self, name: str, shape: torch.Size) -> AbstractContextManager[Any]:
        """A tensor's flattened values; `[start:stop]` of them is a tensor."""


Init = Callable[[str, torch.Tensor], object]  # fills a parameter or buffer, given its name, in place


def fill(name: str, tensor: torch.Tensor, init: Init, seed: int) -> None:
    """Fill a tensor by `init(name, tensor)`, its random numbers seeded by seed and name. See [Note: seeds].

    Raises UserError if a value of a floating-point tensor is not set, or is set to NaN.
    """
    is_checked = tensor.is_floating_point() and not isinstance(tensor, FakeTensor)
    with torch.no_grad(), _seeded(seed, name, tensor.device):
        if is_checked:
            tensor.fill_(torch.nan)
        init(name, tensor)
    if is_checked and bool(tensor.isnan().any()):
        raise UserError(f"init left values of '{name}' unset", allowed="init(name, tensor) fills the tensor")


class Initial:
    """Where a module's initial values come from: the module itself or, for what is on meta, `init`."""

    def __init__(
        self,
        module: nn.Module,
        init: Init | Source | None,
        seed: int,
        device: torch.device,
        meter: MemoryMeter,
    ) -> None:
        """Raises UserError if parameters or buffers are on the meta device and there is no `init`, or if none
        is, so that no file of `init` would be read."""
        self._init, self._seed, self._device, self._meter = init, seed, device, meter
        named = [*module.named_parameters(), *module.named_buffers()]
        on_meta = [name for name, tensor in named if tensor.is_meta]
        if on_meta and init is None:
            raise UserError(
                f"'{on_meta[0]}' is on the meta device and has no values",
                where=type(module).__name__,
                allowed="lowband.shard(..., init=...), which fills it",
            )
        if named and not on_meta and init is not None and not callable(init):
            what = "the module has values, so that no file of init would be read"
            raise UserError(what, where=type(module).__name__, allowed="a module on the meta device; no init")

    def fill_buffers(self, module: nn.Module) -> None:
        """Make the module's buffers real, where they are on the meta device."""
        for prefix, owner in module.named_modules():
            for attribute, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    name, tied = f"{prefix}.{attribute}" if prefix else attribute, tied_to(buffer)
                    made = self._made(name if tied is None else tied.name, buffer, buffer.shape)
                    owner._buffers[attribute] = made if tied is None else tie(made, tied)

    @contextmanager
    def values(self, name: str, parameter: nn.Parameter) -> Iterator[Any]:
        """A parameter's flattened values, of which `[start:stop]` is a tensor.

        They are made, or opened, for the time of the context if the parameter is on the meta device.
        """
        if not parameter.is_meta:
            yield parameter.detach().reshape(-1)
            return
        cut = slice_of(parameter)
        if cut is None and not callable(self._init):
            assert self._init is not None
            with self._init.flat(name, parameter.shape) as flat:
                yield flat
            return
        # A slice's values are those of the whole parameter, whatever the number of tensor ranks.
        made = self._meter.hold("start", self._made(name, parameter, cut.shape if cut else parameter.shape))
        if cut is None:
            yield made.view(-1)
        else:
            part = self._meter.hold("start", cut.cut(made).clone(memory_format=torch.contiguous_format))
            yield part.view(-1)
            self._meter.release("start", part.nbytes)
        self._meter.release("start", made.nbytes)

    def _made(self, name: str, like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        assert self._init is not None
        made = torch.empty(shape, dtype=like.dtype, device=self._device)
        if callable(self._init):
            fill(name, made, self._init, self._seed)
        else:
            with self._init.flat(name, shape) as flat, torch.no_grad():
                made.view(-1).copy_(flat[0 : made.numel()])
        return made


@contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of `device` for a while."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    for generator in generators:
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
