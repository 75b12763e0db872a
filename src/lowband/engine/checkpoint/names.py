"""Names of tensors in a manifest: of states of the optimizer, and of replicas that meet seldom.

Replicas differ: the tensors of the second one are named `replica.1.model.NAME` and so on.
"""

from typing import Any

from lowband.engine.checkpoint.manifest import Manifest
from lowband.errors import UserError

STEPS = "sync.steps"  # in every checkpoint of replicas that meet seldom


def of_replica(name: str, replica: int) -> str:
    """The name of a replica's tensor in a manifest, given that of the first one's."""
    is_own = name.partition(".")[0] in ("model", "optimizer", "swap", "buffer")
    return f"replica.{replica}.{name}" if is_own and replica else name


def seen_by(manifest: Manifest, replica: int) -> Manifest:
    """The manifest with this replica's tensors under the first one's names, and without those of others.

    Of a parameter that tensor ranks divided, only the first one's slice.
    """
    kept = manifest.firsts
    if STEPS in manifest.tensors:
        names = {seen_as(name, manifest, replica): name for name in kept if not name.startswith("replica.")}
        kept = {name: kept[full] for full, name in names.items() if full in kept}
    return manifest.model_copy(update={"tensors": kept})


def seen_as(name: str, manifest: Manifest, replica: int) -> str:
    """The name in the manifest of what a replica sees under the first one's name."""
    full = of_replica(name, replica) if STEPS in manifest.tensors else name
    # Older checkpoints have the buffers of the first replica alone.
    return name if name.startswith("buffer.") and full not in manifest.tensors else full


def replicas_in(manifest: Manifest) -> int:
    """How many replicas a checkpoint has; 1 without sync."""
    found = {name.split(".")[1] for name in manifest.tensors if name.startswith("replica.")}
    return 1 + len(found)


def state_name(key: Any, parameter: str) -> str:
    """Name of an optimizer state in the manifest. Raises UserError if its key is not an identifier."""
    if not isinstance(key, str) or not key.isidentifier():  # no dot, so that the name can be split
        raise UserError(f"state {key!r} cannot be saved", where="optimizer", allowed="names as in Python")
    return f"optimizer.{key}.{parameter}"


def state_of(full: str) -> tuple[str, str] | None:
    """(key, name of the parameter) from the manifest name of an optimizer state; None for other names."""
    kind, _, rest = full.partition(".")
    key, _, parameter = rest.partition(".")
    return (key, parameter) if kind == "optimizer" else None
