"""`lowband predict`: predictions from names or files, for single values or lists."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from lowband.cost.lora import Lora
from lowband.cost.numbers import Num
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.predict.context_ways import ALL_WAYS, check_ways, in_ways
from lowband.predict.defaults import with_defaults
from lowband.predict.groups import check_replicated, check_sharded, over_groups, with_groups
from lowband.predict.prediction import predict
from lowband.predict.show.record import record
from lowband.predict.workload import Workload
from lowband.spec.axes import ONLY_DATA, Ways
from lowband.spec.config import BUILT_IN, Config
from lowband.spec.context import check_layout, layout_of
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import Recompute, States


def setting(config: Config, cluster: str, stack: str | None) -> tuple[Machine, Stack]:
    """The machine and the stack of names or files, with defaults for what they do not state.

    stack: None: the one that the machine names
    """
    machine = config.given_machine(cluster)
    return with_defaults(machine, config.given_stack(stack, machine))


def sequence(model: ModelSpec, given: int | None) -> int:
    """The sequence length: the one given, or the model's longest. Raises UserError for a longer one."""
    if given is not None and given > model.seq_len:
        longer = "".join(f", or --model {name}" for name in _longer(model, given))
        raise UserError(
            f"seq {given} is longer than the longest of '{model.name}'",
            allowed=f"{model.seq_len} at most{longer}",
        )
    return given or model.seq_len


def _longer(model: ModelSpec, given: int) -> list[str]:
    """Shipped models that differ from one in nothing but longer sequences."""
    shipped = Config(BUILT_IN)
    return [
        other.name
        for other in map(shipped.model, shipped.models)
        if other.seq_len >= given
        and other == model.model_copy(update={n: getattr(other, n) for n in ("name", "seq_len", "source")})
    ]


def job_of(
    machine: Machine,
    stack: Stack,
    model: ModelSpec,
    scheme: Scheme,
    ranks: int,
    micro_batch: Num,
    seq_len: Num,
    accumulation: Num = 1,
    recompute: Recompute = "full",
    axes: Ways = ONLY_DATA,
    software: Mapping[str, object] | None = None,
    imbalance: float = 1.0,
    recompute_layers: int | None = None,
    beyond: Beyond | None = None,
    lora: Lora | None = None,
) -> Workload:
    """The job of a question, and of a published run: both are predicted by this one.

    software: values in place of the stack's own (attention, dropout, ...); None: the stack's
    recompute_layers: that `recompute` is about; None: all
    beyond: the device: which states lie there
    lora: adapters, beside which all else is frozen
    """
    check_gated(software or {}, model)
    recomputed = 1.0 if recompute_layers is None else recompute_layers / model.layers
    told = stack.with_options(software or {})
    return Workload(
        machine, told, model, scheme.on(list(machine.sizes)), ranks, micro_batch, seq_len, accumulation,
        recompute, axes=told.axes(axes), imbalance=imbalance, recomputed=recomputed,
        beyond=beyond, lora=lora,
    )  # fmt: skip


def check_gated(software: Mapping[str, object], model: ModelSpec) -> None:
    """Raises UserError for an option about gated MLPs on a model without any."""
    if software.get("gated_kept") is not None and not model.gated:
        what = f"model '{model.name}' has no gated MLPs: it would change nothing"
        raise UserError(what, where="--gated-kept", allowed="models that have some")


# Of an option about an axis, the degree that it is about, and its option.
_ABOUT = {
    "--interleave": ("pipeline", "--pp"), "--schedule": ("pipeline", "--pp"),
    "--sequence-parallel": ("tensor", "--tp"),
    "--ways": ("context", "--cp"), "--states": ("context", "--cp"), "--route": ("expert", "--ep"),
    "--imbalance": ("expert", "--ep"), "--copies": ("expert", "--ep"),
}  # fmt: skip


def check_used(given: Mapping[str, object], axes: Sequence[Ways]) -> None:
    """Raises UserError for an option of which no job on any of the axes would show anything.

    given: by option, what is given of it; none: it is not
    """
    for option, value in given.items():
        degree, needed = _ABOUT[option]
        if value and all(getattr(one, degree) == 1 for one in axes):
            raise UserError("would change nothing", where=option, allowed=f"with {needed} 2 or more")


@dataclass(frozen=True)
class Grid:
    """The arguments of `lowband predict`: every combination of the lists' values is a point."""

    config: Config
    cluster: str
    model: Sequence[str]
    scheme: Sequence[str]
    gpus: Sequence[int]
    micro_batch: Sequence[int]
    accumulation: Sequence[int]
    seq: Sequence[int | None]
    recompute: Sequence[Recompute]
    axes: Sequence[Ways] = (ONLY_DATA,)
    ways: Sequence[str] = ()  # in which ranks along context attend; of `all`, those that are possible
    states: Sequence[States] = ()  # how those of linear layers travel, as `in_ways` has it
    imbalance: float = 1.0  # of experts, as Workload has it
    recompute_layers: int | None = None  # as `job_of` has it
    stack: str | None = None  # none: the machine's
    software: Mapping[str, object] = field(default_factory=dict)  # as `job_of` has it
    beyond: Beyond | None = None  # the device: which states lie there
    lora: Lora | None = None  # adapters, beside which all else is frozen
    groups: int | None = None  # of so many ranks, over which what lies over all ranks is sharded instead

    def jobs(self) -> Iterator[Workload]:
        machine, stack = setting(self.config, self.cluster, self.stack)
        models = [self.config.given_model(name) for name in self.model]
        check_ways(machine, self.ways)
        check_used({"--ways": self.ways, "--states": self.states}, self.axes)
        schemes = [self.config.given_scheme(name).on(list(machine.sizes)) for name in self.scheme]
        if self.groups is not None:
            check_sharded(schemes)
        for model, scheme, ranks, b, a, seq, recompute, axes in product(
            models, schemes, self.gpus, self.micro_batch, self.accumulation, self.seq, self.recompute,
            self.axes,
        ):  # fmt: skip
            length, here, there = sequence(model, seq), (machine, stack), scheme
            if self.groups is not None and (there := over_groups(scheme, self.groups)) is not scheme:
                here = with_groups(machine, stack, self.groups, ranks)
            for one in self._possible(here[0], model, ranks, axes, length):
                job = job_of(
                    *here, model, there, ranks, b, length, a, recompute, one, self.software,
                    self.imbalance, self.recompute_layers, self.beyond, self.lora,
                )  # fmt: skip
                yield job if there is scheme else check_replicated(job)

    def _possible(
        self, machine: Machine, model: ModelSpec, ranks: int, axes: Ways, seq_len: int
    ) -> list[Ways]:
        """The axes in each of the ways, without those that heads or tokens cannot be divided for if all were
        asked for. Raises UserError if none is left."""
        tried, found = in_ways(machine, model, ranks, axes, self.ways, self.states), list[Ways]()
        if ALL_WAYS not in self.ways:
            return tried
        for one in tried:
            try:
                check_layout(layout_of(machine.sizes, one, ranks), one, model, seq_len)
                found.append(one)
            except UserError:
                if one is tried[-1] and not found:
                    raise
        return found

    def records(self) -> list[dict[str, Any]]:
        """One record per point. Raises UserError for a point that is impossible or lacks a constant."""
        return [record(job, predict(job)) for job in self.jobs()]
