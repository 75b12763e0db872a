"""A machine as data (levels, links, device) and the arithmetic of its levels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lowband.errors import UserError
from lowband.spec.strict import Strict, read_yaml

SELF, WORLD = "self", "world"  # the level of one rank; the level of all ranks


class Link(Strict):
    """What one rank gets when it sends to a partner in the same group of this level."""

    gigabytes_per_s: PositiveFloat = Field(description="10^9 bytes per second, one direction, per rank")
    source: str = Field(min_length=1, description="where the number stands")


class Level(Strict):
    """One step of the hierarchy. The outermost is `world` and has no size."""

    name: str
    size: PositiveInt | None = Field(default=None, description="ranks in one group; none for world")
    link: Link | None = Field(default=None, description="none: this level's link has no known rate")


class Device(Strict):
    """What one rank runs on."""

    name: str
    memory_gib: PositiveFloat | None = Field(default=None, description="none: the host's memory, shared")
    peak_tflops: dict[str, PositiveFloat] = Field(
        default={}, description="10^12 FLOP/s by dtype; {}: unknown"
    )
    source: str = Field(min_length=1)


class Box(Strict):
    """A scale model of a machine on one computer: ranks compute and links carry at the machine's rate /
    scale.
    """

    scale: PositiveFloat = Field(description="one factor, for computation and for every link")
    nodes: PositiveInt = Field(description="groups of the level below world, at most")
    tflops: PositiveFloat = Field(description="10^12 FLOP/s of a rank's matrix products, at full scale")
    source: str = Field(min_length=1, description="where tflops stands")


class Machine(Strict):
    """A cluster file, `slurm/<cluster>/machine.yaml`. A box's file says which it is `like`."""

    name: str
    description: str
    box: Box | None = Field(default=None, description="none: the machine itself")
    device: Device
    levels: tuple[Level, ...] = Field(min_length=1, description="inner to outer")

    @field_validator("levels")
    @classmethod
    def _ordered(cls, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        names = [level.name for level in levels]
        if names[-1] != WORLD or levels[-1].size is not None:
            raise ValueError("the last level is 'world', without a size")
        if len(set(names)) < len(names) or SELF in names:
            raise ValueError("level names are unique and none is 'self'")
        if any(level.size is None for level in levels[:-1]):
            raise ValueError("every level but world has a size")
        return levels

    @model_validator(mode="after")
    def _box_has_links(self) -> "Machine":
        if self.box is not None and (
            len(self.levels) < 2 or any(level.link is None for level in self.levels)
        ):
            raise ValueError("a box has a level inside world, and every level a link")
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the inner levels, inner to outer, without world."""
        return {level.name: level.size for level in self.levels if level.size is not None}

    @property
    def node_size(self) -> int:
        """Ranks of a node: of a group of the level inside world; 1 where there is none."""
        return max(self.sizes.values(), default=1)

    def with_outer_link(self, factor: float) -> "Machine":
        """The same machine with the link of world times `factor`."""
        *inner, world = self.levels
        if world.link is None:
            raise UserError(f"cluster '{self.name}' states no link of world", allowed="outer_link: 1")
        rate = world.link.gigabytes_per_s * factor
        link = world.link.model_copy(update={"gigabytes_per_s": rate})
        return self.model_copy(update={"levels": (*inner, world.model_copy(update={"link": link}))})


def read_machine(root: Path, cluster: str) -> Machine:
    """The machine of `slurm/<cluster>/`. Raises UserError naming the clusters there are."""
    path = root / "slurm" / cluster / "machine.yaml"
    if not path.exists():
        known = sorted(p.parent.name for p in (root / "slurm").glob("*/machine.yaml"))
        raise UserError(f"no cluster '{cluster}'", where=root / "slurm", allowed=known)
    text = read_yaml(path)
    if "like" in text:
        text = read_machine(root, text.pop("like")).model_dump(exclude_none=True) | text
    return Machine.parse(text | {"name": cluster}, path)


@dataclass(frozen=True)
class Hop:
    """One collective's step between two neighbouring levels.

    level:  the outer of the two; the hop's messages travel on that level's links
    count:  partners in a group
    stride: ranks between neighbouring partners
    """

    level: str
    count: int
    stride: int

    def partners(self, rank: int) -> list[int]:
        """The group of `rank`, in order of coordinate."""
        block = self.stride * self.count
        base = rank // block * block + rank % self.stride
        return [base + i * self.stride for i in range(self.count)]

    def coordinate(self, rank: int) -> int:
        """The place of `rank` in its group."""
        return rank // self.stride % self.count


@dataclass(frozen=True)
class Levels:
    """Level names and sizes (ranks in one group), from `self` (1) out to `world` (all ranks)."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def fit(cls, inner: Mapping[str, int], world: int) -> "Levels":
        """Levels of `world` ranks. A level larger than the world is cut to it: 4 ranks fill half a node of 8.

        inner: sizes of the levels inside the world, inner to outer
        Raises UserError if the ranks do not fill whole groups.
        """
        if world < 1:
            raise UserError(f"{world} ranks", allowed="1 or more")
        if any(size < 1 for size in inner.values()) or {SELF, WORLD} & set(inner):
            raise UserError(
                f"inner levels {dict(inner)}", allowed="sizes of 1 or more; names but self and world"
            )
        names = (SELF, *inner, WORLD)
        sizes = (1, *(min(size, world) for size in inner.values()), world)
        for (name_in, in_), (name_out, out) in pairwise(zip(names, sizes, strict=True)):
            if out % in_:
                raise UserError(
                    f"{world} ranks do not fit the levels: '{name_out}' ({out}) is no multiple of "
                    f"'{name_in}' ({in_})",
                    allowed=f"rank counts that fill whole groups of {dict(inner)}",
                )
        return cls(names, sizes)

    @property
    def world(self) -> int:
        return self.sizes[-1]

    def index(self, level: str) -> int:
        """Position of a level, 0 for `self`. Raises UserError for a level that is not there."""
        if level not in self.names:
            raise UserError(f"no level '{level}'", allowed=self.names)
        return self.names.index(level)

    def size(self, level: str) -> int:
        return self.sizes[self.index(level)]

    def hops(self, inner: str, outer: str) -> Sequence[Hop]:
        """The steps from one level out to another, inner first; steps among one partner are left out."""
        first, last = self.index(inner), self.index(outer)
        steps = (
            Hop(self.names[i], self.sizes[i] // self.sizes[i - 1], self.sizes[i - 1])
            for i in range(first + 1, last + 1)
        )
        return [hop for hop in steps if hop.count > 1]
