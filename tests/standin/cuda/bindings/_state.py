"""What the driver knows in this process, and what all of its functions have in common."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from cuda.bindings._memory import Memory
from cuda.bindings._process import Process, Refused
from cuda.bindings._streams import Event, Stream, Streams
from cuda.bindings._types import CUresult


class State:
    """What the driver knows in this process."""

    def __init__(self, lock: threading.RLock) -> None:
        self.process = Process()
        self.devices = self.process.visible()
        self.memory = Memory(self.process)
        self.streams = Streams(self.process, self.memory, lock)
        self.primary: dict[int, tuple[int, int]] = {}  # device -> context, how often it is retained
        self.contexts: dict[int, int] = {}  # context -> device
        self.events: dict[int, Event] = {}
        self.modules: dict[int, tuple[int, bytes]] = {}  # module -> context, image
        self.functions: dict[int, int] = {}  # function -> module
        self.shared: dict[int, int] = {}  # function -> dynamic shared memory it may have
        self.thread = threading.local()

    def stack(self) -> list[int]:
        if not hasattr(self.thread, "stack"):
            self.thread.stack = []
        found: list[int] = self.thread.stack
        return found

    def context(self) -> int:
        stack = self.stack()
        if not stack or stack[-1] not in self.contexts:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return stack[-1]

    def device(self, ordinal: Any) -> int:
        """The machine's GPU behind this process's number."""
        number = as_int(ordinal)
        if not 0 <= number < len(self.devices):
            raise Refused(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return self.devices[number]

    def here(self) -> tuple[int, int]:
        context = self.context()
        return context, self.contexts[context]

    def stream(self, number: Any) -> Stream:
        return self.streams.get(as_int(number), self.context())

    def new_handle(self) -> int:
        return 0x7000_0000 + 16 * self.memory.next()


lock = threading.RLock()
current: State | None = None


def as_int(value: Any) -> int:
    return 0 if value is None else int(value)


def leave() -> None:
    """Forget everything, as a process that ends does. The stand-in's own."""
    global current
    with lock:
        if current is not None:
            for context in list(current.contexts):
                end_context(current, context)
            current.process.leave()
        current = None


def call(values: int = 0, context: bool = True, always: bool = False) -> Callable[[Any], Any]:
    """What every function of the driver has in common.

    values: how many it answers with beside the result; context: needs a current one; always: works before cuInit.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            with lock:
                try:
                    if always:
                        answer = function(*args, **kwargs)
                    else:
                        # A process that forked has lost the driver.
                        if current is None or current.process.pid != os.getpid():
                            raise Refused(CUresult.CUDA_ERROR_NOT_INITIALIZED)
                        current.process.meet_faults(name)
                        if context:
                            current.streams.check(current.context())
                        answer = function(current, *args, **kwargs)
                except Refused as exc:
                    return (exc.result, *[None] * values)
            if values == 0:
                return (CUresult.CUDA_SUCCESS,)
            return (CUresult.CUDA_SUCCESS, *(answer if values > 1 else (answer,)))

        signature = inspect.signature(function)
        ours = list(signature.parameters.values())
        called.__signature__ = signature.replace(parameters=ours if always else ours[1:])  # type: ignore[attr-defined]
        return called

    return wrap


def end_context(s: State, context: int) -> None:
    device = s.contexts.pop(context)
    s.streams.leave_context(context)
    s.memory.leave_context(context)
    s.events = {number: event for number, event in s.events.items() if event.context != context}
    s.modules = {number: module for number, module in s.modules.items() if module[0] != context}
    del s.primary[device], s.process.contexts[str(device)]
    count(s)


def count(s: State) -> None:
    s.process.held["streams"] = sum(number > 0 for number in s.streams.all)
    s.process.held["events"] = len(s.events)
    s.process.held["modules"] = len(s.modules)
    s.process.write()


@call(always=True)
def cuInit(Flags: int) -> None:
    global current
    if Flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    if current is None:
        current = State(lock)
    if current.process.pid != os.getpid():
        raise Refused(CUresult.CUDA_ERROR_NOT_INITIALIZED)
    current.process.meet_faults("cuInit")
    if not current.devices:
        raise Refused(CUresult.CUDA_ERROR_NO_DEVICE)
