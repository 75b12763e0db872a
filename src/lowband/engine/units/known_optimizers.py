"""Which optimizers are right on shards: the one list of known classes, and what is said of the others.

An optimizer that updates each element from that element's gradient and states alone is right on any part. One
that takes norms, means or products of whole parameters would take them of this rank's part. Functions of
shards and gradients notice that (units.by_element), but not those of an optimizer's own states.
"""

from weakref import WeakSet

from torch.optim.optimizer import Optimizer

from lowband.engine.transport.everyone import warn
from lowband.errors import UserError

IS_KNOWN = "_lowband_is_known"  # attribute of an optimizer of such a class that has shards

# package -> classes
_OF_PACKAGES = {
    "torch": "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta ASGD Rprop RMSprop",
    "lowband": "Lamb Adafactor AdamW",
    # Version 4.1; but for those that can be asked to centralize gradients of two dimensions (Lion, Adan).
    "pytorch_optimizer": (
        "AccSGD AdaBelief AdaBound AdaDelta AdaMax AdamC AdaMod AdaPNM AdaSmooth AdEMAMix ADOPT AggMo Ano "
        "BCOS DiffGrad DualAdam EXAdam FOCUS FTRL Grams GrokFastAdamW Kate LaProp MADGRAD MSVAG PAdam PID "
        "PNM QHAdam QHM RAdam ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD SGDW SignSGD "
        "SimplifiedAdEMAMix SRMM Tiger VSGD Yogi"
    ),
}
# Options of pytorch_optimizer's classes that take means or norms over a whole parameter.
_MIXING = "adanorm", "cautious", "stable_adamw"
BY_ELEMENT = {package: frozenset(names.split()) for package, names in _OF_PACKAGES.items()}

# What takes the place of a class, of any package, in lower case.
_WHOLE = (
    "adago adamuon adamp adatam apollo apollodqn a2grad came conda dash distributedmuon emofact fira fromage "
    "galore kron lars lorarite muon muonclip nero normuon racs ranger ranger21 rose scalableshampoo scion "
    "scionlight sgdp shampoo sm3 soap spam spectralsphere splus stablespam tam"
)
_SUMS_OVER_ALL = (
    "avagrad adai demo lbfgs prodigy dadaptadagrad dadaptadam dadaptadan dadaptlion dadaptsgd swats"
)
INSTEAD: dict[str, str] = {
    "adafactor": "lowband.Adafactor, which sums over all ranks",
    "lamb": "lowband.Lamb, which sums over all ranks",
    **dict.fromkeys(_WHOLE.split(), "lowband.Matrices, which gives it whole parameters"),
    **dict.fromkeys(_SUMS_OVER_ALL.split(), "optimizers that work element by element"),
}

_warned: set[type[Optimizer]] = set()
_warned_of_groups: WeakSet[Optimizer] = WeakSet()


def is_known(optimizer: Optimizer) -> bool:
    """Whether its class, and not only a base of it, is on the list."""
    kind = type(optimizer)
    return kind.__name__ in BY_ELEMENT.get(kind.__module__.partition(".")[0], ())


def check_class(optimizer: Optimizer) -> None:
    """Raises UserError for a class that needs whole parameters, or an option that does; warns, once, of one
    that is not known."""
    kind = type(optimizer)
    if is_known(optimizer):
        if kind.__module__.startswith("pytorch_optimizer"):
            _check_options(optimizer)
        return
    instead = INSTEAD.get(kind.__name__.lower())
    if instead is not None:
        raise UserError(
            "needs whole parameters, and each rank holds flat pieces of them",
            where=kind.__name__,
            allowed=instead,
        )
    if kind not in _warned:
        _warned.add(kind)
        warn(
            f"{kind.__name__} is not known to work element by element: norms, means and products of its "
            "states would be of this rank's part, whose shape is 1D; lowband.Matrices gives an optimizer "
            "whole parameters"
        )


def _check_options(optimizer: Optimizer) -> None:
    for option in _MIXING:
        if any(group.get(option) for group in optimizer.param_groups):
            raise UserError(
                f"'{option}' needs whole parameters, and each rank holds flat pieces of them",
                where=type(optimizer).__name__,
                allowed=f"without '{option}', or lowband.Matrices, which gives it whole parameters",
            )


def check_groups(optimizer: Optimizer, has_all_layers: bool) -> None:
    """Raises UserError if a group is empty because parameters were chosen by `p.shape`, which is a shard's.

    A choice by the number of dimensions leaves a group empty where all parameters have as many, as in LoRA.
    Where it was made by `p.shape`, a group is left that mixes vectors and matrices, or matrices got less
    weight decay than the empty group. So it is, too, on a pipeline's stage without the layers of a group,
    where the first such step warns only.
    """
    groups = optimizer.param_groups
    for place, empty in enumerate(groups):
        if empty["params"]:
            continue
        for other in groups:
            is_matrix = {parameter.ndim > 1 for parameter in other["params"]}
            ours, theirs = (group.get("weight_decay", 0) for group in (empty, other))
            if True in is_matrix and (ours > theirs or (ours == theirs and len(is_matrix) == 2)):
                what = f"param group {place} is empty: shards are 1D, so len(p.shape) is always 1"
                where = type(optimizer).__name__
                allowed = "groups chosen by name, by p.ndim or by p.shard_of.shape"
                if has_all_layers:
                    raise UserError(what, where=where, allowed=allowed)
                if optimizer not in _warned_of_groups:
                    _warned_of_groups.add(optimizer)
                    warn(f"{where}, on this stage: {what} (allowed: {allowed}; layers of other stages)")
