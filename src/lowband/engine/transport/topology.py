"""The ranks of a job on the levels of its machine and along its axes of parallelism."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowband.engine.arguments import check_kind
from lowband.engine.transport.axis import Axis, new_group
from lowband.engine.transport.consistency import check_same, is_alone
from lowband.engine.transport.hosts import check_hosts
from lowband.spec.axes import Axes, AxisName
from lowband.spec.config import Config
from lowband.spec.mesh import Hop, Levels, Mesh

_TOPOLOGIES = itertools.count()


@dataclass
class Topology:
    """The levels and axes of this job's ranks, with their process groups and lanes.

    inner: sizes of the levels inside the world, inner to outer, e.g. {"package": 2, "node": 8}
    axes:  of parallelism beside data; schemes are placed on the data axis, with the ranks along context

    levels: as the ranks along the data axis see them
    rank:   this rank's number in the job

    Modules in one program may share a topology: their collectives then have one order. torch.distributed must
    be initialised; groups inherit the timeout of its default group. Every rank must build the same
    topologies in the same order, because building one creates process groups. Raises UserError if the ranks
    do not fill whole groups, differ in the levels' sizes or in axes, or are not numbered host after host.
    """

    inner: Mapping[str, int]
    axes: Axes = field(default_factory=Axes)
    levels: Levels = field(init=False)
    rank: int = field(init=False)
    _number: int = field(init=False, default_factory=lambda: next(_TOPOLOGIES))
    _mesh: Mesh = field(init=False)
    _axes: dict[AxisName, Axis] = field(init=False, default_factory=dict)
    _device_meshes: dict[str, DeviceMesh] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        where, sizes = "lowband.Topology", 'sizes of levels by name, such as {"node": 8}'
        check_kind(where, "inner", self.inner, Mapping, sizes)
        for level, size in self.inner.items():
            check_kind(where, f"inner['{level}']", size, Integral, "a number of ranks")
        check_kind(where, "axes", self.axes, Axes, "lowband.Axes(...)")
        ranks = dist.get_world_size()
        machine = Levels.fit(self.inner, ranks)
        self._mesh = Mesh.fit(self.inner, self.axes.degrees(ranks))
        if not is_alone():
            same = {"sizes of levels": dict(self.inner), "axes": self.axes.model_dump()}
            check_hosts(check_same(same), machine)
        self.rank, self.levels = dist.get_rank(), self.along("data").levels

    @classmethod
    def from_cluster(cls, name: str, root: Path = Path()) -> "Topology":
        """The levels of `slurm/<name>/machine.yaml` in `root` (default: working directory), or built in."""
        return cls(Config(root).machine(name).sizes)

    def along(self, axis: AxisName) -> Axis:
        """The ranks along an axis. Every rank must call this: the first call creates process groups."""
        if axis not in self._axes:
            mesh = self._mesh
            if axis == "context":
                mesh = Mesh.fit(self.inner, self.axes.with_context(dist.get_world_size()))
            elif axis in ("expert", "alike"):
                mesh = Mesh.fit(self.inner, self.axes.with_experts(dist.get_world_size()))
            self._axes[axis] = Axis(axis, mesh, self._number, self.axes.beside)
        return self._axes[axis]

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """torch's view of the same ranks, for DTensor and code that is built on it.

        One dimension per level with more than one partner, named after it, outermost first; only ["world"]
        for a single rank. Those of other axes than data are named after both, e.g. "tensor_node". Its groups
        have the job's timeout and carry none of the engine's messages. Every rank must call this, because the
        first call for a device type creates process groups.
        """
        if device_type not in self._device_meshes:
            self._device_meshes[device_type] = self._new_device_mesh(device_type)
        return self._device_meshes[device_type]

    def _new_device_mesh(self, device_type: str) -> DeviceMesh:
        digits = self._mesh.digits[::-1]
        if not digits:
            return init_device_mesh(device_type, (1,), mesh_dim_names=("world",))
        ranks = torch.arange(dist.get_world_size()).view([digit.count for digit in digits])
        groups = [new_group(Hop(digit.level, digit.count, digit.stride)) for digit in digits]
        names = [each.level if each.axis == "data" else f"{each.axis}_{each.level}" for each in digits]
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], device_type, ranks, mesh_dim_names=tuple(names)
        )
