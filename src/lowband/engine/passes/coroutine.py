"""A call that can be suspended from inside: a thread that runs only while the caller waits for it.

Python's own coroutines would need `await` in every function between the caller and the place of suspension,
and the forward of somebody else's module has none. Only one thread runs at a time, so the code inside needs
no locks. torch keeps part of its state by thread: the new thread starts with the caller's.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch

T = TypeVar("T")


class Coroutine(Generic[T]):
    """A call in a thread of its own. Its context variables are the caller's, too."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._prepare = call, _state_of_torch()
        self._turn, self._returned = threading.Semaphore(0), threading.Semaphore(0)
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._is_over = self._is_closed = self._is_running = False
        # A daemon: a process that is interrupted must not wait for a suspended call.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._main,), name="lowband-micro-batch", daemon=True
        )

    @property
    def runs_here(self) -> bool:
        """Whether the calling code runs inside of the call."""
        return threading.get_ident() == self._thread.ident

    def resume(self) -> bool:
        """Run until the call suspends itself (True) or ends (False). Raises what the call raises."""
        if self._thread.ident is None:
            self._thread.start()
        self._is_running = True
        self._turn.release()
        self._wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return not self._is_over

    def take_result(self) -> T:
        """What the call has returned; once."""
        return self._results.pop()

    def suspend(self) -> None:
        """Return to the caller of `resume`, from inside of the call."""
        self._returned.release()
        self._turn.acquire()
        if self._is_closed:
            raise GeneratorExit

    def close(self) -> None:
        """End a suspended call by an exception at the place where it is suspended."""
        if self._thread.ident is None:
            return
        if self._is_running:  # the caller was interrupted while it waited
            self._wait()
        while not self._is_over:  # a call may suspend itself again while the exception unwinds it
            self._is_closed = self._is_running = True
            self._turn.release()
            self._wait()
        self._thread.join()

    def _wait(self) -> None:
        self._returned.acquire()
        self._is_running = False

    def _main(self) -> None:
        self._turn.acquire()
        try:
            self._prepare()
            self._results.append(self._call())
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._returned.release()


def _state_of_torch() -> Callable[[], None]:
    """A function that gives another thread the state that torch keeps for this one."""
    threads = torch.get_num_threads()
    is_grad_enabled = torch.is_grad_enabled()
    devices = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    is_autocast_cached = torch.is_autocast_cache_enabled()
    dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
    function_modes = overrides._get_current_function_mode_stack()
    saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def prepare() -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(is_grad_enabled)
        for device, is_enabled, dtype in autocast:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(is_autocast_cached)
        if saved_tensors_hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*saved_tensors_hooks)
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        for mode in function_modes:
            overrides._push_mode(mode)
        for mode in dispatch_modes:
            _python_dispatch._push_mode(mode)

    return prepare
