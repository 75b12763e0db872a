"""A backward in two parts: first the gradient of a stage's input, later those of its linear layers' weights.

While a module without submodules computes, a function mode replaces `F.linear` of a trained parameter by a
function whose backward computes the gradient of its input and keeps the two factors of the weight's. All
other parameters (norms, embeddings, products that torch makes out of sight, as in
`F.multi_head_attention_forward`) get their gradients in the first part, which is right: less is put off.
Under autocast nothing is, because the factors have different dtypes; nor under `torch.func`, whose transforms
know no such function; nor of a weight with a hook, which would be given None. Nor does `torch.autograd.grad`
inside of a forward put anything off: it returns gradients, and adds none to the weights'. Nor is anything of
what torch.compile has compiled, whose graph has a backward in one part.

The mode is opened by the modules themselves, not around the stage: activation checkpointing computes them
again inside of autograd, which closes all modes and on a GPU has threads of its own. What a module itself
checkpoints inside of its forward is computed again without the mode, and so is not put off: hooks of saved
tensors that were opened since the module began tell.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


class Deferring:
    """What opens the mode in the modules of a rank's stages."""

    def __init__(self, modules: Iterator[nn.Module]) -> None:
        self._into: Deferred | None = None
        for module in modules:
            if not any(module.children()) and any(True for _ in module.parameters()):
                module.forward = partial(self._run, module.forward)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._into is None:
            return forward(*args, **kwargs)
        with self._into.in_module():
            return forward(*args, **kwargs)

    @contextmanager
    def into(self, deferred: "Deferred | None") -> Iterator[None]:
        """In here modules put their weight gradients off, if there is where to."""
        self._into = deferred
        try:
            yield
        finally:
            self._into = None


class Deferred(TorchFunctionMode):
    """The weight gradients of one stage and micro-batch that are still to be computed."""

    def __init__(self, defers: Callable[[torch.Tensor], bool]) -> None:
        """defers: whether a tensor is a parameter whose gradient may come later"""
        super().__init__()
        self._defers = defers
        self._factors: deque[tuple[nn.Parameter, nn.Parameter | None, torch.Tensor, torch.Tensor]] = deque()
        self._anchor = torch.empty(0, requires_grad=True)  # without it a layer on the data needs no gradient
        self._saving: Any = None  # hooks of saved tensors when the module began

    @contextmanager
    def in_module(self) -> Iterator[None]:
        """In here a module computes."""
        before, self._saving = self._saving, _saving()
        try:
            with self:
                yield
        finally:
            self._saving = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled() and self._takes(*args, **kwargs):
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _takes(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
        is_plain = all(
            each.requires_grad and self._defers(each) for each in (weight, bias) if each is not None
        )
        is_plain &= torch._C._functorch.peek_interpreter_stack() is None and _saving() == self._saving
        return is_plain and not torch.is_autocast_enabled(input.device.type)

    def _linear(self, input: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Any:
        keep = lambda x, grad: self._factors.append((weight, bias, x, grad))  # noqa: E731
        return _Linear.apply(self._anchor, input, weight, bias, keep)

    @torch.no_grad()
    def run(self) -> None:
        """Compute what was put off, and add it to the parameters' gradients."""
        while self._factors:
            weight, bias, x, grad = self._factors.popleft()
            _add(weight, _of_weight(x, grad))
            if bias is not None:
                _add(bias, _of_bias(grad))


def _saving() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _of_weight(input: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A linear layer's gradient. grad: of its output"""
    rows, of_rows = input.reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return of_rows.t() @ rows


def _of_bias(grad: torch.Tensor) -> torch.Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def _add(parameter: nn.Parameter, grad: torch.Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        keep: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.keep = keep
        return F.linear(input, weight, bias).detach()  # a view from in here could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        of_input = grad @ weight if ctx.needs_input_grad[1] else None
        [(anchor, _), *_] = ctx.next_functions
        if torch._C._will_engine_execute_node(anchor):  # a backward to all leaves: nobody asks for this one
            ctx.keep(input.detach(), grad)
            return None, of_input, None, None, None
        of_bias = _of_bias(grad) if ctx.needs_input_grad[3] else None
        return None, of_input, _of_weight(input, grad), of_bias, None
