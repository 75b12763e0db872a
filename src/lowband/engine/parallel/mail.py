"""What a rank's stages hand on: outputs to the next stage, gradients of inputs to the one before.

A result for another rank is sent when it has been computed, and nobody waits for that. A receive is posted
when the action that takes it is next, with those that the sender computes before, and awaited when the action
begins. A sent tensor is freed once a later message shows that its receiver has it.

Every micro-batch has the same shapes. They pass once, before the first output: in the first step, and in the
first one without gradients.
"""

import json
from collections import deque
from typing import Any, NamedTuple

import torch

from lowband.engine.parallel.plan import Plan
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.messages import Messages, Posted
from lowband.errors import UserError
from lowband.spec.activations import STAGE_GRAD, STAGE_OUTPUT
from lowband.spec.schedule import Action, Done


class Format(NamedTuple):
    """A stage's output: of each tensor the shape, the dtype and whether it requires a gradient."""

    is_tuple: bool
    tensors: tuple[tuple[tuple[int, ...], str, bool], ...]

    @classmethod
    def of(cls, output: Any) -> "Format | None":
        """None for what is neither a tensor nor a tuple of tensors."""
        values = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(value, torch.Tensor) for value in values):
            return None
        facts = ((tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in values)
        return cls(isinstance(output, tuple), tuple(facts))

    @classmethod
    def parsed(cls, text: bytes) -> "Format":
        is_tuple, tensors = json.loads(text)
        return cls(is_tuple, tuple((tuple(shape), dtype, trains) for shape, dtype, trains in tensors))

    def __str__(self) -> str:
        frozen = "", " without a gradient"
        return ", ".join(f"{dtype}{list(shape)}{frozen[not trains]}" for shape, dtype, trains in self.tensors)


class Mail:
    """The results that go between stages, those of one rank included."""

    def __init__(
        self,
        plan: Plan,
        axis: Axis,
        messages: Messages,
        ledger: Ledger,
        device: torch.device,
        name: str,
    ) -> None:
        """name: of the pipeline, the same on its ranks, and another one for those beside it"""
        self._plan, self._axis, self._ledger, self._device, self._name = plan, axis, ledger, device, name
        self._messages = messages
        self._formats: dict[tuple[int, bool], Format] = {}  # by stage, and whether it trains
        self.trained = -1  # training steps so far, the present one included
        self.begin(0, trains=True)

    def begin(self, step: int, trains: bool) -> None:
        """A step begins. Without training there are no gradients."""
        self._step, self._trains = step, trains
        self.trained += trains
        self._incoming = {
            source: deque(done for done in of_it if trains or done[0] == "forward")
            for source, of_it in self._plan.incoming.items()
        }
        self._arriving: dict[Done, list[Posted]] = {}
        self._kept: dict[Done, list[torch.Tensor]] = {}  # for stages of this rank
        self._leaving: dict[int, dict[Done, list[Posted]]] = {source: {} for source in self._incoming}
        self._leaving_formats: list[Posted] = []

    def end(self) -> None:
        """Wait until everything sent has been received."""
        outputs = (posted for of_rank in self._leaving.values() for posted in of_rank.values())
        for message in [*self._leaving_formats, *(message for posted in outputs for message in posted)]:
            message.wait()

    # ---- outputs

    def give_output(self, stage: int, micro_batch: int, output: Any) -> list[torch.Tensor]:
        """Hand a stage's output on; returns its tensors that require gradients.

        Raises UserError for what cannot be handed on, or has another form than the first micro-batch's.
        """
        found, place = Format.of(output), (stage, self._trains)
        if found is None:
            of = ", ".join(type(value).__name__ for value in output) if isinstance(output, tuple) else ""
            raise UserError(
                f"its output is a {type(output).__name__}{of and f' of {of}'}",
                where=f"stage {stage} of a pipeline",
                allowed="a tensor or a tuple of tensors, which the next module takes as its arguments",
            )
        done: Done = ("forward", stage, micro_batch)
        if place not in self._formats:
            self._formats[place] = found
            self._send_format(found, done)
        if self._formats[place] != found:
            raise UserError(
                f"micro-batch {micro_batch} leaves it as {found}, not {self._formats[place]} as the first",
                where=f"stage {stage} of a pipeline",
                allowed="micro-batches of one shape in all steps, all with gradients or none",
            )
        tensors = list(output) if found.is_tuple else [output]
        self._give(done, tensors)
        return [tensor for tensor in tensors if tensor.requires_grad]

    def take_output(self, stage: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """The output of the stage before, as leaves of a new graph."""
        tensors = self._take(("forward", stage - 1, micro_batch))
        facts = self._format(stage - 1).tensors
        return tuple(t.requires_grad_(trains) for t, (_, _, trains) in zip(tensors, facts, strict=True))

    # ---- gradients

    def give_grads(self, stage: int, micro_batch: int, grads: list[torch.Tensor]) -> None:
        """Hand on the gradients of a stage's inputs, of those that require them."""
        self._give(("input", stage, micro_batch), grads)

    def take_grads(self, stage: int, micro_batch: int) -> list[torch.Tensor]:
        """The gradients of a stage's outputs, of those that require them."""
        return self._take(("input", stage + 1, micro_batch))

    # ---- both

    def post(self, action: Action) -> None:
        """Post the receives of an action."""
        for done in self._plan.awaited(action):
            self._post_until(done)

    def post_early(self, action: Action) -> None:
        """The same, unless that would have to wait for shapes."""
        for done in self._plan.awaited(action):
            before = self._incoming[self._plan.rank_of[done[1]]]
            if all(self._boundary(each) in self._formats for each in before):
                self._post_until(done)

    def _post_until(self, done: Done) -> None:
        source = self._plan.rank_of[done[1]]
        while done not in self._arriving:
            each = self._incoming[source].popleft()
            self._arriving[each] = [
                self._messages.receive(shape, getattr(torch, dtype), self._device, source, name)
                for shape, dtype, name in self._parts(each)
            ]

    def _parts(self, done: Done) -> list[tuple[tuple[int, ...], str, str]]:
        """Shape, dtype and name of each message of a result from another rank."""
        part, stage, _ = done
        tensors = self._format(stage if part == "forward" else stage - 1).tensors
        sent = [facts for facts in tensors if part == "forward" or facts[2]]
        return [(shape, dtype, self._name_of(done, k)) for k, (shape, dtype, _) in enumerate(sent)]

    def _give(self, done: Done, tensors: list[torch.Tensor]) -> None:
        receiver = self._plan.receiver(done)
        if receiver is None:
            self._kept[done] = [tensor.detach() for tensor in tensors]
            return
        level = self._axis.levels.common(self._axis.rank, self._axis.ranks[receiver])
        row = STAGE_OUTPUT if done[0] == "forward" else STAGE_GRAD
        for tensor in tensors:
            self._ledger.add(level, row.name, "native", tensor.nbytes)
        self._leaving[receiver][done] = [
            self._messages.send(tensor, receiver, self._name_of(done, k)) for k, tensor in enumerate(tensors)
        ]

    def _take(self, done: Done) -> list[torch.Tensor]:
        if done in self._kept:
            return self._kept.pop(done)
        tensors = [message.wait().to(self._device) for message in self._arriving.pop(done)]
        leaving = self._leaving[self._plan.rank_of[done[1]]]
        for sent in [each for each in leaving if self._plan.is_taken(each, done)]:
            for message in leaving.pop(sent):
                message.wait()
        return tensors

    def _name_of(self, done: Done, tensor: int) -> str:
        part, stage, i = done
        what = "output" if part == "forward" else "input's gradient"
        return f"the {what} {tensor} of stage {stage}, micro-batch {i} (step {self._step} of {self._name})"

    def _boundary(self, done: Done) -> tuple[int, bool]:
        return done[1] if done[0] == "forward" else done[1] - 1, self._trains

    # ---- formats

    def _format(self, stage: int) -> Format:
        """The format of a stage's output; waits for the rank that computes the first one."""
        place = stage, self._trains
        if place not in self._formats:
            size = self._received((1,), "int64", stage, "size of the format")
            text = self._received((int(size),), "uint8", stage, "format")
            self._formats[place] = Format.parsed(bytes(text.tolist()))
        return self._formats[place]

    def _received(self, shape: tuple[int, ...], dtype: str, stage: int, what: str) -> torch.Tensor:
        source, name = self._plan.rank_of[stage], self._name_of_format(what, stage)
        return self._messages.receive(shape, getattr(torch, dtype), self._device, source, name).wait()

    def _send_format(self, found: Format, done: Done) -> None:
        receiver = self._plan.receiver(done)
        if receiver is not None:
            text = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8, device=self._device)
            size = torch.tensor([len(text)], device=self._device)
            parts = (("size of the format", size), ("format", text))
            for what, tensor in parts:
                name = self._name_of_format(what, done[1])
                self._leaving_formats.append(self._messages.send(tensor, receiver, name))

    def _name_of_format(self, what: str, stage: int) -> str:
        return f"the {what} of stage {stage}'s output (step {self._step} of {self._name})"
