"""A machine's hardware as data: levels, links, device, storage. Software is a stack (spec/stack.py)."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from lowband.errors import UserError
from lowband.spec.mesh import MOST_RANKS, SELF, WORLD
from lowband.spec.sourced import LEAST, Fact, Magnitude, divides, facts_of
from lowband.spec.stack import OURS
from lowband.spec.tiers import TIERS
from lowband.spec.yaml_model import Strict

# A GPU of 2025 has some 15,000 in 4 bits, a whole wafer 125,000 (Cerebras WSE-3): more is a typing error.
MOST_TFLOPS = 1e6
Tflops = Annotated[float, Field(ge=LEAST, le=MOST_TFLOPS)]


class Link(Strict):
    """The link that one rank gets when it sends to a partner in the same group of this level."""

    gigabytes_per_s: Magnitude = Field(description="10^9 bytes per second, one direction, per rank")
    source: str = Field(min_length=1, description="where the number comes from")
    efficiency: Fact | None = Field(
        default=None, description="share of the rate that large messages reach; none: all of it"
    )
    latency_us: Fact | None = Field(default=None, description="of one step of a collective; none: 0")
    efficiency_by_cards: dict[PositiveInt, Fact] = Field(
        default={},
        description="cards in use -> factor on the efficiency, interpolated in their logarithm; {}: 1",
    )
    cards: PositiveInt | None = Field(
        default=None,
        description="network cards that the ranks of one inner group share; none: a rank has its own",
    )

    _divide = field_validator("efficiency", "efficiency_by_cards")(divides)


class Level(Strict):
    """One step of the hierarchy. The outermost is `world` and has no size."""

    name: str
    size: PositiveInt | None = Field(
        default=None, le=MOST_RANKS, description="ranks in one group; none for world"
    )
    link: Link | None = Field(default=None, description="none: this level's link has no known rate")


class Power(Strict):
    """Of one device, in watts."""

    peak_watts: Fact = Field(description="at most")
    idle_watts: Fact | None = Field(default=None, description="while it waits; none: not known, 0 or more")

    @model_validator(mode="after")
    def _ordered(self) -> "Power":
        idle, peak = self.idle_watts, self.peak_watts
        for name, fact in (("peak_watts", peak), ("idle_watts", idle)):
            if fact is not None and (fact.low is not None or fact.high is not None):
                raise ValueError(f"{name} has no interval: an energy is told without one")
        if idle is not None and idle.value > peak.value:
            raise ValueError(f"idle_watts {idle.value:g} is above peak_watts {peak.value:g}")
        return self

    @property
    def source(self) -> str:
        """Of both."""
        idle = "" if self.idle_watts is None else f"; idle: {self.idle_watts.source}"
        return self.peak_watts.source + idle


def _words(name: str) -> list[str]:
    return re.split(r"[^A-Z0-9]+", name.upper())


class Device(Strict):
    """The device that one rank runs on."""

    name: str
    memory_gib: Magnitude | None = Field(default=None, description="none: the host's memory, shared")
    peak_tflops: dict[str, Tflops] = Field(default={}, description="10^12 FLOP/s by dtype; {}: unknown")
    source: str = Field(min_length=1)
    memory_gigabytes_per_s: Fact | None = Field(
        default=None, description="10^9 bytes per second; none: work bound by memory takes no time"
    )
    memory_efficiency: Fact | None = Field(default=None, description="share of it reached; none: all of it")
    matmul_efficiency: Fact | None = Field(
        default=None, description="share of the peak that large matrix products reach; none: all of it"
    )
    attention_efficiency: Fact | None = Field(
        default=None, description="share of the peak that a fused attention kernel reaches; none: as matmuls"
    )
    kernel_us: Fact | None = Field(default=None, description="fixed time of one kernel; none: 0")
    speed_spread: Fact | None = Field(
        default=None,
        description="standard deviation of a device's time for the same work, as a share of it; a step waits "
        "for the slowest; none: 0",
    )
    framework_gib: Fact | None = Field(
        default=None, description="memory that the runtime itself uses; none: 0"
    )
    power: Power | None = Field(default=None, description="none: not known")

    def is_of(self, gpu: str) -> bool:
        """Whether a GPU that gives this name is such a device: it has its first word (H100, MI300X), and no
        other memory. Not one of another form (PCIe, NVL) or a part of a GPU, which are slower.
        """
        words, (chip, *rest) = _words(gpu), _words(self.name)
        memory = {word for word in words if re.fullmatch(r"\d+GB", word)}
        is_chip = chip in words and any(letter.isdigit() for letter in chip)
        return is_chip and memory <= set(rest) and not {"PCIE", "NVL", "MIG"} & set(words)

    _divide = field_validator(
        "memory_gigabytes_per_s", "memory_efficiency", "matmul_efficiency", "attention_efficiency"
    )(divides)


class Storage(Strict):
    """The file system that all nodes share, and how fast a rank prepares what it writes there."""

    write_gigabytes_per_s: Fact = Field(description="10^9 bytes per second of the whole file system")
    read_gigabytes_per_s: Fact
    node_gigabytes_per_s: Fact = Field(description="that one node reads or writes at most")
    sha256_gigabytes_per_s: Fact = Field(description="of one rank's checksums")
    copy_gigabytes_per_s: Fact | None = Field(
        default=None, description="device to host, one rank; none: ranks compute in host memory"
    )

    _divide = field_validator("*")(divides)


TierName = Literal["host", "disk"]  # from the device outwards: what lies on the disk passes through the host


class Tier(Strict):
    """Memory of a node beyond its devices': the host's, or a disk's. Rates are of large transfers."""

    capacity_gib: Magnitude = Field(description="of a node")
    source: str = Field(min_length=1, description="where the capacity comes from")
    fetch_gigabytes_per_s: Fact = Field(
        description="10^9 bytes per second towards the device, one rank alone"
    )
    stash_gigabytes_per_s: Fact = Field(description="likewise away from it")
    node_fetch_gigabytes_per_s: Fact | None = Field(
        default=None, description="of all ranks of a node together; none: each has a link of its own"
    )
    node_stash_gigabytes_per_s: Fact | None = Field(default=None, description="likewise away from the device")
    update_gigabytes_per_s: Fact | None = Field(
        default=None,
        description="at which one rank's cores update parameters where they lie, counted as Adam's 28 bytes "
        "each; none: a default in the host's memory, and no update on a disk",
    )
    node_update_gigabytes_per_s: Fact | None = Field(
        default=None, description="of all ranks of a node together"
    )

    _divide = field_validator(
        "fetch_gigabytes_per_s", "stash_gigabytes_per_s", "node_fetch_gigabytes_per_s",
        "node_stash_gigabytes_per_s", "update_gigabytes_per_s", "node_update_gigabytes_per_s",
    )(divides)  # fmt: skip


class Box(Strict):
    """A scale model of a machine on one computer: computation and links at the machine's rates / scale."""

    scale: Magnitude = Field(description="one factor, for computation and for every link")
    nodes: PositiveInt = Field(description="groups of the level below world, at most")
    tflops: Tflops = Field(description="10^12 FLOP/s of a rank's matrix products, at full scale")
    source: str = Field(min_length=1, description="where tflops comes from")


class Machine(Strict):
    """A cluster file, `slurm/<cluster>/machine.yaml`. A box's file names the machine it is `like`."""

    name: str
    description: str
    box: Box | None = Field(default=None, description="none: the machine itself")
    device: Device
    levels: tuple[Level, ...] = Field(min_length=1, description="inner to outer")
    stack: str = Field(
        default=OURS.name,
        description="the stack that is predicted if none is named: a file of config/stacks/",
    )
    storage: Storage | None = Field(default=None, description="none: its rates are not known")
    tiers: dict[TierName, Tier] = Field(
        default={}, description="memory beyond the devices'; of a name that is missing nothing is known"
    )

    @field_validator("levels")
    @classmethod
    def _ordered(cls, levels: tuple[Level, ...]) -> tuple[Level, ...]:
        names = [level.name for level in levels]
        if names[-1] != WORLD or levels[-1].size is not None:
            raise ValueError("the last level is 'world', without a size")
        if len(set(names)) < len(names) or {SELF, *TIERS} & set(names):
            raise ValueError(f"level names are unique and none is {' or '.join((SELF, *TIERS))}")
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
    def hardware(self) -> dict[str, Any]:
        """What a run on this machine depends on: names, sizes, rates, the box.

        Left out is what only a prediction or a reader needs: constants with a source of their own (Fact), the
        stack, sentences. A better source or a new constant must not part a point's repeats.
        """
        return _stated(self)

    @property
    def facts(self) -> dict[str, Fact]:
        """Every constant with a source, by its path: device.<key>, <level>.<key>, storage.<key>,
        tiers.<tier>.<key>. Without the device's power, on which no step depends."""
        found = facts_of("device", self.device)
        for level in self.levels:
            if level.link is not None:
                found |= facts_of(level.name, level.link)
                by_cards = level.link.efficiency_by_cards.items()
                found |= {f"{level.name}.efficiency_by_cards.{cards}": fact for cards, fact in by_cards}
        if self.storage is not None:
            found |= facts_of("storage", self.storage)
        for name, tier in self.tiers.items():
            found |= facts_of(f"tiers.{name}", tier)
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the inner levels, inner to outer, without world."""
        return {level.name: level.size for level in self.levels if level.size is not None}

    @property
    def node_size(self) -> int:
        """Ranks per node: per group of the level just inside world; 1 if there is no such level."""
        return max(self.sizes.values(), default=1)

    def with_outer_link(self, factor: float) -> "Machine":
        """The machine with the rate of world's link multiplied by `factor`."""
        *inner, world = self.levels
        if world.link is None:
            raise UserError(f"cluster '{self.name}' has no link for level world", allowed="outer_link: 1")
        rate = world.link.gigabytes_per_s * factor
        link = world.link.model_copy(update={"gigabytes_per_s": rate})
        return self.model_copy(update={"levels": (*inner, world.model_copy(update={"link": link}))})

    def link(self, level: str) -> Link:
        """The link of a level. Raises UserError if its rate is not known."""
        for known in self.levels:
            if known.name == level and known.link is not None:
                return known.link
        raise UserError(f"the link of level '{level}' has no rate", where=f"machine '{self.name}'")

    def tier(self, name: TierName) -> Tier:
        """A tier. Raises UserError if the machine states none of that name."""
        if name not in self.tiers:
            allowed = f"tiers: {{{name}: ..}} in its machine.yaml"
            raise UserError(f"tier '{name}' has no rates", where=f"machine '{self.name}'", allowed=allowed)
        return self.tiers[name]


_NOT_HARDWARE = ("description", "source", "stack")


def _stated(part: Strict) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in type(part).model_fields:
        value = getattr(part, key)
        if key in _NOT_HARDWARE or isinstance(value, Fact):
            continue
        if isinstance(value, str | int | float):
            found[key] = value
        elif isinstance(value, tuple):
            found[key] = [_stated(each) for each in value]
        elif isinstance(value, Strict) and (inner := _stated(value)):
            found[key] = inner
    return found
