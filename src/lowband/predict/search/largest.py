"""The largest model that fits, and how slow it is, for each place of its states.

Models are of one family: the given model's head size, and layers in proportion to the width, so parameters
grow with its cube. For each place the widest of them that fits the device's memory and each tier's is found
by bisection, at the given batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.predict.prediction import Prediction, predict
from lowband.predict.search.parts import are_free, chosen_parts
from lowband.predict.workload import Workload
from lowband.spec.model import ModelSpec

PLACES: tuple[tuple[str, ...], ...] = (  # of states, from the nearest to the farthest
    (), ("optim@host",), ("optim@host", "weights@host"), ("optim@disk", "weights@host"),
    ("optim@disk", "weights@disk"),
)  # fmt: skip
MOST_HEADS = 2**12


@dataclass(frozen=True)
class Largest:
    """The largest model with its states at `places`; job and prediction are None if none fits."""

    places: tuple[str, ...]
    job: Workload | None
    prediction: Prediction | None


def of_width(model: ModelSpec, heads: int) -> ModelSpec:
    """The family's model with so many heads."""
    hidden = model.hidden // model.heads * heads
    layers = max(1, round(model.layers * hidden / model.hidden))
    values = {"name": f"{model.name} x {hidden}", "hidden": hidden, "heads": heads, "layers": layers}
    if model.kv_heads is not None:  # as many as heads
        values["kv_heads"] = heads
    if model.mlp_hidden is not None:
        values["mlp_hidden"] = model.mlp_hidden * heads // model.heads
    return model.model_copy(update=values)


def largest(
    job: Workload, places: Sequence[tuple[str, ...]] = PLACES, chooses: bool = False
) -> list[Largest]:
    """For each of the places whose tiers the machine states. Raises UserError for a family of other parts
    than a GPT's.

    job: with any model of the family; its degrees along tensor and pipeline are 1
    chooses: as plan has it; else all of the optimizer's states are there
    """
    model = job.model
    is_other = model.experts is not None or model.latent is not None
    if is_other or model.kv_heads not in (None, model.heads):
        what = f"model '{model.name}' has experts, latents or shared keys: its family is not known"
        raise UserError(what, allowed="a GPT, such as gpt-20b")
    found = []
    for words in places:
        beyond = Beyond.of(words)
        if beyond is None or set(beyond.tiers) <= set(job.machine.tiers):
            found.append(_largest(replace(job, beyond=beyond), words, chooses))
    return found


def _largest(job: Workload, words: tuple[str, ...], chooses: bool) -> Largest:
    fits, too_many, best = 0, MOST_HEADS, Largest(words, None, None)
    while too_many - fits > 1:
        heads = (fits + too_many) // 2
        tried = replace(job, model=of_width(job.model, heads))
        prediction, room = predict(tried, interval=False), job.machine.device.memory_gib
        if room is None:
            raise UserError(f"the device's memory of machine '{job.machine.name}' is not known")
        has_room = prediction.peak_memory_bytes <= room * GIB  # no part takes less of the device than all
        if chooses and has_room and are_free(tried):
            tried = replace(tried, beyond=chosen_parts(tried)[0].beyond)
            prediction = predict(tried, interval=False)
        if prediction.fits:
            fits, best = heads, Largest(words, tried, prediction)
        else:
            too_many = heads
    return best
