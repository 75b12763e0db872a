"""The types of the interface, for editors; at run time a name is imported when it is first used."""

from lowband.cost.slow_sends import lists_for_sends as lists_for_sends
from lowband.engine.api import accumulate as accumulate
from lowband.engine.api import clip_grad_norm_ as clip_grad_norm_
from lowband.engine.api import consensus_distance as consensus_distance
from lowband.engine.api import full_state_dict as full_state_dict
from lowband.engine.api import no_sync as no_sync
from lowband.engine.api import shard as shard
from lowband.engine.api import sync_replicas as sync_replicas
from lowband.engine.checkpoint.checkpointer import Checkpointer as Checkpointer
from lowband.engine.checkpoint.peer_checkpoint import load_peer_checkpoint as load_peer_checkpoint
from lowband.engine.checkpoint.safetensors_files import Safetensors as Safetensors
from lowband.engine.checkpoint.safetensors_files import save_safetensors as save_safetensors
from lowband.engine.jobs.one_byte import OneByte as OneByte
from lowband.engine.jobs.quorum import Quorum as Quorum
from lowband.engine.optimizers.adafactor import Adafactor as Adafactor
from lowband.engine.optimizers.adamw import AdamW as AdamW
from lowband.engine.optimizers.lamb import Lamb as Lamb
from lowband.engine.optimizers.matrices import Matrices as Matrices
from lowband.engine.parallel.context import Context as Context
from lowband.engine.parallel.experts import MixtureOfExperts as MixtureOfExperts
from lowband.engine.parallel.experts import balance_experts as balance_experts
from lowband.engine.parallel.experts import spread_experts as spread_experts
from lowband.engine.parallel.pipeline import Pipeline as Pipeline
from lowband.engine.parallel.tensor import parallelize as parallelize
from lowband.engine.transport.topology import Topology as Topology
from lowband.engine.units.shard_sums import norms as norms
from lowband.errors import UserError as UserError
from lowband.run.curves import Curves as Curves
from lowband.run.ranks import one_line_errors as one_line_errors
from lowband.spec.axes import Axes as Axes
from lowband.spec.routing import Routing as Routing
from lowband.spec.scheme import Scheme as Scheme
from lowband.spec.tensor import Column as Column
from lowband.spec.tensor import Enter as Enter
from lowband.spec.tensor import Join as Join
from lowband.spec.tensor import Partial as Partial
from lowband.spec.tensor import Row as Row
from lowband.spec.tensor import Split as Split
from lowband.spec.tensor import Tokens as Tokens
from lowband.spec.tensor import Vocabulary as Vocabulary
from lowband.spec.tensor import Whole as Whole

__version__: str
__all__: list[str]
