"""The generator: a seed to a case. Pure; the same seed gives the same case on any machine."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from lowband.spec.mesh import WORLD, Levels
from lowband.spec.scheme import Scheme
from lowband.spec.step import STEP
from lowband.spec.sync import Sync
from tests.random.cases import Case, Kind, Net, Part, gets_gradients_in_pieces
from tests.random.programs import program_of

# How often a case has each feature, where the others leave it room.
FEATURES = {
    "plain": 0.2,
    "two": 0.2,
    "flights": 0.25,
    "checkpoint": 0.4,
    "shared": 0.3,
    "tied": 0.3,
    "frozen": 0.35,
    "nested": 0.2,
    "bf16": 0.3,
    "bf16-sums": 0.25,
    "wires": 0.5,
    "quantized": 0.3,
    "accumulation": 0.6,
    "skipped": 0.3,
    "lost": 0.4,
    "broken-forward": 0.25,
    "broken-backward": 0.25,
    "state": 0.4,
    "clip": 0.4,
    "optimizers": 0.3,
    "modules-zero": 0.15,
    "no-overlap": 0.15,
    "outlives": 0.5,
    "slow": 0.25,
    "again": 0.1,
    "retained": 0.15,
    "outer-checkpoint": 0.15,
    "own-topologies": 0.5,
    "carried": 0.15,
    "breadth": 0.15,
    "matrices": 0.15,
    "sync": 0.2,
    "outer": 0.7,
}
# Of cases run on flat rings, and of the others on joined hops; drawn last, so that the rest stays as it was.
FLAT, JOINED = 0.15, 0.15
NOT_PLAIN = {
    "two",
    "flights",
    "shared",
    "frozen",
    "skipped",
    "lost",
    "broken-forward",
    "broken-backward",
    "state",
    "modules-zero",
    "again",
    "retained",
    "outer-checkpoint",
    "carried",
    "outlives",
}
# A chain of units, and one call of the module for each micro-batch.
NOT_BREADTH = {
    "two",
    "flights",
    "shared",
    "tied",
    "nested",
    "skipped",
    "again",
    "retained",
    "carried",
    "outer-checkpoint",
}
# Replicas count the steps of all of a module's parameters together. They send more than a plain step does.
NOT_SYNC = {"plain", "two", "optimizers", "matrices"}
NEEDS = {"breadth": "accumulation", "matrices": "optimizers"}
# What rounds, and what makes much of a rounding: not where results are compared within a bound.
AMPLIFY = {"bf16", "bf16-sums", "wires", "quantized", "matrices", "outer"}
# With these a pass may use what another has gathered: the same values only if both gathers have one wire.
MIXES_GATHERS = {"flights", "skipped", "again", "retained", "outer-checkpoint"}
MOMENTUM = {"outer": "momentum", "momentum": 0.7}
NESTEROV = {"outer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
RANKS = (1, 2, 2, 3, 3, 4, 4, 6, 8)  # large groups cost most and show little more
OPTIMIZERS = ("sgd", "momentum", "adamw", "adagrad")
KINDS: tuple[Kind, ...] = ("mlp", "mlp", "mlp", "norm", "scale", "branch", "aux")


def case(seed: int, without: frozenset[str] = frozenset()) -> Case:
    """The case of a seed, with none of the features `without`."""
    random = Random(seed)
    has = {name for name, share in FEATURES.items() if random.random() < share} - without
    has -= {name for name, needed in NEEDS.items() if needed in without}
    has = _compatible(has)
    ranks = random.choice(RANKS)
    inner = _inner(random, ranks)
    chains = [_chain(random, has) for _ in range(2 if "two" in has else 1)]
    program = program_of(random, has, [len(chain) for chain in chains])
    optimizers = tuple(random.choices(OPTIMIZERS, k=2 if "optimizers" in has else 1))
    if "matrices" in has:
        optimizers = ("muon", optimizers[1])
    outer = [_outer(random, has, net) for net in range(len(chains))]
    if gets_gradients_in_pieces(chains, outer, "again" in has, program):
        # Compared within a bound, which nothing may amplify.
        has -= AMPLIFY
        optimizers = ("sgd",) * len(optimizers)
    features = random.choice((1, 3, 5, 8, 17))
    nets = []
    for i, chain in enumerate(chains):
        is_fed_on = i < len(chains) - 1 or "again" in has
        returns = random.choice(("tensor", "dict", "tensor" if is_fed_on else "loss"))
        returns = "tensor" if outer[i] == "reentrant" else returns  # torch takes no other
        scheme = _scheme(random, has, Levels.fit(dict(inner), ranks))
        nets.append(Net(features, _stem(random, has, chain), chain, returns, scheme, outer[i]))
    slow = random.choice(("lane", "computation")) if "slow" in has else "nothing"
    is_flat = random.random() < FLAT and "flat" not in without
    if is_flat:  # a ring adds up in its own order: compared within a bound too
        has = (has - AMPLIFY) | {"flat"}
        optimizers = ("sgd",) * len(optimizers)
        nets = [replace(net, scheme=_plain(net.scheme)) for net in nets]
    elif random.random() < JOINED and "joined" not in without:
        has = has | {"joined"}
    return Case(
        seed=seed,
        features=tuple(name for name in (*FEATURES, "flat", "joined") if name in has),
        ranks=ranks,
        inner=inner,
        nets=tuple(nets),
        again="again" in has,
        own_topologies="own-topologies" in has,
        compute_dtype="bf16" if "bf16" in has else "fp32",
        reduce_dtype="bf16" if "bf16-sums" in has else "fp32",
        overlap="no-overlap" not in has,
        optimizers=optimizers,
        over=random.choice((None, "world")),
        program=program,
        slow=slow,
        collectives="flat" if is_flat else "joined" if "joined" in has else "hops",
    )


def _plain(scheme: Scheme) -> Scheme:
    """The scheme with every wire native, and without an outer optimizer."""
    sync = scheme.sync and scheme.sync.model_copy(
        update={"outer": "average", "learning_rate": 1.0, "momentum": 0.0}
    )
    return scheme.model_copy(update={"sync": sync, **{row.name: "native" for row in STEP}})


def _compatible(has: set[str]) -> set[str]:
    """The features without those that others leave no room."""
    left = set(has)
    if "breadth" in left:
        left -= NOT_BREADTH
    left -= NOT_SYNC if "sync" in left else {"outer"}
    if "matrices" in left:
        left -= {"plain"}
    left |= {needed for name, needed in NEEDS.items() if name in left}
    if "plain" in left:
        left -= NOT_PLAIN
    if left & {"checkpoint", "outer-checkpoint"}:
        left -= {"retained"}  # torch runs a checkpointed layer again only once
    if {
        "two",
        "carried",
    } <= left:  # the net that a broken backward has not reached would keep what is carried
        left -= {"broken-backward"}
    if not {"flights", "broken-backward"} <= left:
        left -= {"outlives"}
    if "two" not in left:
        left -= {"own-topologies"}
    return left


def _inner(random: Random, ranks: int) -> tuple[tuple[str, int], ...]:
    """Sizes of up to three levels inside the world; the outermost may be larger than the world."""
    sizes, size = [], 1
    for _ in range(random.randrange(4)):
        size = random.choice([n for n in range(size, ranks + 1) if n % size == 0 and ranks % n == 0])
        sizes.append(size)
    if sizes and random.random() < 0.1:
        sizes[-1] = 2 * ranks
    return tuple(zip("abc"[: len(sizes)], sizes, strict=True))


def _chain(random: Random, has: set[str]) -> tuple[Part, ...]:
    """Parts of a net. The last is always used, trains and has its own weights: gradients reach the loss."""
    parts: list[Part] = []
    count = random.randint(1, 6)
    kinds = ("none", "plain") if "breadth" in has else ("none", "reentrant", "plain")
    for place in range(count):
        is_last = place == count - 1
        kind = "mlp" if is_last else random.choice(KINDS)
        width = random.choice((1, 2, 7, 16, 40))
        firsts = [i for i, part in enumerate(parts) if part.shares is None]
        mlps = [i for i in firsts if parts[i].kind == "mlp"]
        shares = tied = None
        if "shared" in has and not is_last and firsts and random.random() < 0.5:
            shares = random.choice(firsts)
            kind = parts[shares].kind
        elif "tied" in has and not is_last and mlps and random.random() < 0.5:
            tied = random.choice(mlps)
            kind, width = "mlp", parts[tied].width
        is_frozen = "frozen" in has and not is_last and random.random() < 0.5
        parts.append(
            Part(
                kind=kind,
                width=width,
                wrapped=random.random() < 0.75 or "breadth" in has,
                nested="nested" in has and random.random() < 0.7,
                checkpoint=random.choice(kinds) if "checkpoint" in has else "none",
                residual=random.random() < 0.6 and "breadth" not in has,
                frozen=random.choice(("some", "all")) if is_frozen else "none",
                shares=shares,
                tied=tied,
            )
        )
    return tuple(parts)


def _outer(random: Random, has: set[str], net: int) -> str:
    """The first net's input has no gradient, which reentrant checkpointing needs."""
    if "outer-checkpoint" not in has:
        return "none"
    return random.choice(("none", "plain", "reentrant") if net > 0 else ("none", "plain", "plain"))


def _stem(random: Random, has: set[str], chain: tuple[Part, ...]) -> str:
    """A reentrantly checkpointed layer trains only if its input has a gradient."""
    if "plain" in has or any(part.checkpoint == "reentrant" for part in chain):
        return "trained"
    return random.choice(("none", "trained", "frozen" if "frozen" in has else "trained"))


def _scheme(random: Random, has: set[str], levels: Levels) -> Scheme:
    names = levels.names
    placed = _inside(names[:-1], levels) if "sync" in has else names
    weights, grads, optim = sorted(random.randrange(len(placed)) for _ in range(3))
    secondary = random.randrange(weights) if weights and random.random() < 0.4 else None
    sync = _sync(random, has, levels, _inside(names[optim:-1], levels)) if "sync" in has else None
    wires: dict[str, str] = {}
    if "wires" in has:
        exact = ("native", "native", "bf16", "fp32")
        quantized = ("int8", "int4") if "quantized" in has else ()
        for name in ("grad_reduce", "boundary_reduce", "replica_reduce", "update_gather", "forward_gather"):
            wires[name] = random.choice((*exact, *quantized))
        wires["backward_gather"] = random.choice((*exact, *quantized))
        if sync is not None:
            wires["sync_reduce" if sync.has_anchor else "sync_swap"] = random.choice((*exact, *quantized))
        if has & MIXES_GATHERS:
            wires["forward_gather"] = wires["backward_gather"] = random.choice(exact)
    return Scheme(
        name="drawn",
        weights=names[weights],
        grads=names[grads],
        optim=names[optim],
        secondary=None if secondary is None else names[secondary],
        block_size=random.choice((16, 64, 256)),
        sync=sync,
        **wires,
    )


def _inside(names: Sequence[str], levels: Levels) -> Sequence[str]:
    """Those smaller than the world, so that there are several; if there are none, all."""
    return [name for name in names if levels.size(name) < levels.world] or names


def _sync(random: Random, has: set[str], levels: Levels, replicas: Sequence[str]) -> Sync:
    """replicas: levels of which a replica's may be"""
    beyond = random.choice(replicas)
    every = random.choice((1, 2, 2, 3))
    fragments = random.choice([n for n in (1, 2, 3) if every % n == 0])
    delay = random.choice((0, 0, *range(1, every + 1)))
    hops = levels.hops(beyond, WORLD)
    if len(hops) == 1 and random.random() < 0.4:
        partners = random.choice(("exponential", "exponential" if hops[0].count % 2 else "ring"))
        return Sync(beyond=beyond, every=every, fragments=fragments, delay=delay, partners=partners)
    mix = 0.5 if delay == every else random.choice((0.0, 0.25))
    outer = random.choice(({}, MOMENTUM, NESTEROV)) if "outer" in has else {}
    return Sync(beyond=beyond, every=every, fragments=fragments, delay=delay, mix=mix, **outer)
