"""A client's requests under way, in the order in which they were asked, and the registrations that servers are to
have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from kvdepot.errors import DeadlineExceeded, KVDepotError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.layout import BY_CLIENT

COPY = wire.Store | wire.Retrieve | wire.Compare
_LATE = wire.EndSession | wire.Complete
"""Requests that a live server must get, however late: else it keeps what they release."""
_REPEATABLE = wire.Lookup | wire.Unregister | _LATE

Done: TypeAlias = Callable[[object], None]
"""Called once with the outcome of a request: its value, or a KVDepotError."""


@dataclass(slots=True)
class PendingRequest:
    """A request under way; its times are those of the connection's clock."""

    request: wire.Request
    frame: bytes
    done: Done
    deadline: float
    born: float
    refusals: int = 0  # how often a server has said that it does not know us
    may_repeat: bool = True
    """Whether it may be sent again when its answer is lost. A copy may once: it may be what crashes the server. A
    lookup may not once its session has ended, as nothing would release its pins, or once it was hurried, as it would
    end the pins of the later one."""


@dataclass(slots=True)
class _Registration:
    request: wire.Register
    is_withdrawn: bool = False  # no server is to map it again


class Requests:
    """The requests of one client by their numbers. `parked` are those that wait to be sent, or sent again."""

    def __init__(self) -> None:
        self.pending: dict[int, PendingRequest] = {}
        self.parked: set[int] = set()
        self._registrations: dict[int, _Registration] = {}  # by instance

    def note(self, request: wire.Request) -> None:
        """Record how a request that is about to be made changes registrations, and requests under way."""
        match request:
            case wire.Register():
                self._registrations[request.instance] = _Registration(request)
            case wire.Unregister() if request.instance in self._registrations:
                self._registrations[request.instance].is_withdrawn = True
                for number in sorted(self.parked & self.pending.keys()):  # not sent: must not follow the withdrawal
                    unsent = self.pending[number].request
                    if isinstance(unsent, wire.Register) and unsent.instance == request.instance:
                        self.end(number, Unavailable("its tensors were withdrawn before a server had them"))
            case wire.EndSession() | wire.Lookup(hurries=True):
                for item in self.pending.values():
                    if isinstance(item.request, wire.Lookup) and item.request.request == request.request:
                        item.may_repeat = False

    def registration(self, instance: int) -> wire.Register | None:
        """The registration under a number, unless it is being withdrawn."""
        known = self._registrations.get(instance)
        return known.request if known is not None and not known.is_withdrawn else None

    def device(self, instance: int) -> str:
        """The device of the tensors registered under a number: a GPU's UUID, empty for the processor's memory."""
        known = self._registrations.get(instance)
        return known.request.layout.device if known is not None else ""

    def settle(self, request: wire.Register | wire.Unregister, value: object) -> None:
        """A registration or withdrawal was answered: forget what no server has, or is to have, any more."""
        if isinstance(value, KVDepotError) == isinstance(request, wire.Register):
            self._registrations.pop(request.instance, None)

    def settle_own(self, instance: int) -> None:
        """Recovery has withdrawn tensors: forget them unless they are to be registered again."""
        if self.registration(instance) is None:
            self._registrations.pop(instance, None)

    def to_recover(self) -> list[wire.Unregister | wire.Register]:
        """Requests that withdraw the registrations, so that no copy touches their tensors, and renew them."""
        parked = [self.pending[number].request for number in self.parked if number in self.pending]
        unsent = {request.instance for request in parked if isinstance(request, wire.Register)}
        requests: list[wire.Unregister | wire.Register] = []
        for instance in self._registrations:
            requests.append(wire.Unregister(instance))
            register = self.registration(instance)
            if register is not None and instance not in unsent:
                requests.append(register)
        return requests

    def oldest_without_deadline(self) -> tuple[int | None, PendingRequest | None]:
        """The first lookup of a request that is only queued, by its number, and the first other request; of those that
        wait for their answers without a deadline."""
        queued = None
        for number, item in self.pending.items():
            if item.deadline == float("inf"):
                if not (isinstance(item.request, wire.Lookup) and item.request.queued):
                    return queued, item
                queued = number if queued is None else queued
        return queued, None

    def end(self, number: int, value: object) -> None:
        """End a request with its outcome, unless it has ended."""
        pending = self.pending.pop(number, None)
        if pending is not None:
            pending.done(value)

    def fail_overdue(self, now: float) -> None:
        for number, item in [(number, item) for number, item in self.pending.items() if item.deadline <= now]:
            self.end(number, DeadlineExceeded(f"no answer to {type(item.request).__name__} in time"))
        self.parked.intersection_update(self.pending)

    def fail_all(self, error: KVDepotError) -> None:
        self.parked.clear()
        for number in list(self.pending):
            self.end(number, error)

    def lose(self, error: KVDepotError, waits: Callable[[PendingRequest, bool], bool]) -> None:
        """The server is lost, but may still touch blocks or come back: fail the requests that cannot wait. Sent copies
        wait until no server can carry them out. What releases something is parked (servers hold it), others if
        `waits` returns True for the request, and whether it was never sent."""
        unsent, self.parked = self.parked, set()
        for number, item in list(self.pending.items()):
            is_unsent = number in unsent
            if number not in self.pending:
                continue
            if isinstance(item.request, _LATE) or waits(item, is_unsent):
                self.parked.add(number)
            elif is_unsent or not isinstance(item.request, COPY):
                self.end(number, error)

    def send_again(self, numbers: Iterable[int], now: float) -> None:
        """Park requests without an answer, or fail those that must not be sent again. No server works on them."""
        for number in numbers:
            pending = self.pending.get(number)
            if pending is None:
                continue
            request = pending.request
            if pending.may_repeat and isinstance(request, COPY | _REPEATABLE):
                # Where the client copies, the server that knows a store or retrieve answers it again.
                pending.may_repeat = not isinstance(request, COPY) or self.device(request.instance) == BY_CLIENT
                pending.born = now
                self.parked.add(number)
            else:
                self.end(number, Unavailable("the connection broke; the answer is lost"))
