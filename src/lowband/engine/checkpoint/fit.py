"""Check that a checkpoint fits a module and its optimizer, completely, before anything is overwritten."""

from collections.abc import Collection
from pathlib import Path

from lowband.engine.checkpoint.logical_tensors import Logical, Piece
from lowband.engine.checkpoint.manifest import EXTRA, Group, Manifest, Saved
from lowband.engine.checkpoint.names import STEPS, replicas_in, state_of
from lowband.errors import UserError


def check_fit(manifest: Manifest, folder: Path, here: Logical, random: dict[str, Piece]) -> None:
    """Raise UserError, naming the checkpoint and the tensor or param group, unless everything fits.

    random: states of this rank's random number generators; empty if they will not be restored
    """
    kinds = {"model", "optimizer", "buffer", "extra", "rng", "sync", "swap"}
    for name in [*manifest.tensors, *manifest.numbers]:
        if name.partition(".")[0] not in kinds or (name in manifest.numbers and state_of(name) is None):
            raise UserError(f"'{name}' is of an unknown kind", where=folder, allowed=sorted(kinds))
    # A checkpoint of other schemes has no sync; then all replicas start a period from its weights.
    for kind in ("model.", "buffer.", *(["sync."] if STEPS in manifest.tensors else [])):
        mine = [name for name in here.pieces if name.startswith(kind) and name not in here.updates]
        theirs = [name for name in manifest.tensors if name.startswith(kind) and name not in here.updates]
        _check_names("", mine, theirs, folder)
        for name in mine:
            _check_same(name, here.pieces[name].saved, manifest.tensors[name], folder)
    extra = ([name for name in found if name.startswith(EXTRA)] for found in (here.pieces, manifest.tensors))
    _check_names("", *extra, folder)  # how many bytes each has may change
    _check_updates(manifest, folder, here)
    for name, piece in random.items():
        if name not in manifest.tensors:
            raise UserError(f"'{name}' is not in the checkpoint", where=folder)
        _check_same(name, piece.saved, manifest.tensors[name], folder)
    if manifest.optimizer != here.optimizer:
        raise UserError(
            f"was saved with optimizer {manifest.optimizer}", where=folder, allowed=here.optimizer
        )
    _check_groups(here.groups, manifest.groups, folder)
    _check_states(manifest, folder, here)


def _check_updates(manifest: Manifest, folder: Path, here: Logical) -> None:
    """What had not arrived must be of parameters that replicas exchange here, in the same way."""
    for name in manifest.tensors:
        if name in here.updates:
            _check_same(name, here.updates[name].saved, manifest.tensors[name], folder)
        elif name.startswith("swap."):
            raise UserError(f"'{name}' is only in the checkpoint", where=folder)


def check_replicas(manifest: Manifest, folder: Path, here: Logical) -> None:
    """Raise UserError if the checkpoint is of replicas that meet seldom, and there are not as many here."""
    saved, has_sync = replicas_in(manifest), STEPS in manifest.tensors
    if has_sync and (STEPS not in here.pieces or saved != here.replicas):
        raise UserError(
            f"was saved by {saved} replicas that meet seldom",
            where=folder,
            allowed=f"a scheme with sync and {saved} replicas",
        )


def _check_groups(mine: tuple[Group, ...], theirs: tuple[Group, ...], folder: Path) -> None:
    """A group will get options that only the checkpoint has: an optimizer's first step, which may count its
    steps there, or a scheduler has added them.
    """
    if len(mine) != len(theirs):
        raise UserError(
            f"the optimizer has {len(mine)} param groups, the checkpoint {len(theirs)}", where=folder
        )
    for i, (group, saved) in enumerate(zip(mine, theirs, strict=True)):
        _check_names(f" in param group {i}", group.parameters, saved.parameters, folder)
        _check_missing(f" among the options of param group {i}", group.options, saved.options, folder)


def _check_states(manifest: Manifest, folder: Path, here: Logical) -> None:
    """A parameter without optimizer states will get the checkpoint's; existing states must match them."""
    mine, theirs = _keys([*here.pieces, *here.numbers]), _keys([*manifest.tensors, *manifest.numbers])
    for parameter, keys in theirs.items():
        if parameter not in here.parameters:
            raise UserError(f"has optimizer states of '{parameter}', which is not a parameter", where=folder)
        if parameter in mine:
            _check_names(f" among the optimizer states of '{parameter}'", mine[parameter], keys, folder)
    for name, saved in manifest.tensors.items():
        state = state_of(name)
        if state is None:
            continue
        if saved.sharded and saved.whole != here.parameters[state[1]].saved.whole:
            raise UserError(f"'{name}' does not have the shape of its parameter", where=folder)
        if name in here.numbers:
            raise UserError(f"'{name}' is a number, but a tensor in the checkpoint", where=folder)
        if name in here.pieces:
            _check_same(name, here.pieces[name].saved, saved, folder)
    for name in manifest.numbers:
        if name in here.pieces:
            raise UserError(f"'{name}' is a tensor, but a number in the checkpoint", where=folder)


def _keys(names: list[str]) -> dict[str, list[str]]:
    """The keys of the optimizer states among `names`, by parameter."""
    keys: dict[str, list[str]] = {}
    for key, parameter in filter(None, map(state_of, names)):
        keys.setdefault(parameter, []).append(key)
    return keys


def _check_names(place: str, mine: Collection[str], theirs: Collection[str], folder: Path) -> None:
    _check_missing(place, mine, theirs, folder)
    if unknown := sorted(set(theirs) - set(mine)):
        raise UserError(f"'{unknown[0]}'{place} is only in the checkpoint", where=folder)


def _check_missing(place: str, mine: Collection[str], theirs: Collection[str], folder: Path) -> None:
    if missing := sorted(set(mine) - set(theirs)):
        raise UserError(f"'{missing[0]}'{place} is not in the checkpoint", where=folder)


def _check_same(name: str, mine: Saved, saved: Saved, folder: Path) -> None:
    for what, here, there in (
        ("shape", list(mine.whole), list(saved.whole)),
        ("dtype", mine.dtype, saved.dtype),
        ("sharding", mine.sharded, saved.sharded),
    ):
        if here != there:
            raise UserError(f"'{name}' has {what} {here}, but {there} in the checkpoint", where=folder)
