"""A client's requests under way, in the order in which they were asked, and the law of lost answers.

An answer is lost with the connection, or with its server. What becomes of the request depends on its kind alone, and on
nothing but `PendingRequest.waits` and `PendingRequest.repeats_at`, the columns of this table:

    request                    while no server can be asked                   once a server welcomes us (again)
    Store, Retrieve, Compare   waits while its server runs, then GRACE_S      sent again; to one other server at most
    Complete, EndSession       waits while its server runs, then GRACE_S      sent again
    Lookup                     waits for GRACE_S                              sent again, unless its session has ended
    Register, Unregister       waits for GRACE_S                              sent again, unless a later one replaces it
    others                     fails at once: it may have been carried out    fails
    not sent yet               waits for GRACE_S                              sent

A server that was sent a copy may have placed it, and then holds memory until the copy is completed. It answers a copy
that is sent again, under the same number, with the same Placement. So a copy does not fail while its server runs:
nobody would complete it. To another server it is a new copy, and that copy might be what crashes one server after the
other. A Complete or EndSession must reach the server that holds what it releases, however late; other servers ignore
it.

Registrations outlive their requests. Each server that welcomes us is sent all of them before anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvdepot.errors import Busy, DeadlineExceeded, KVDepotError, Unavailable, UnknownClient
from kvdepot.protocol import wire

LASTING = wire.Copying | wire.Complete | wire.EndSession
"""Requests that a server which holds memory must get or answer. They have no deadline."""
_REPEATED = LASTING | wire.Lookup | wire.Register | wire.Unregister

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
    server: bytes = b""  # the run of the server that may work on it, or holds what it releases; empty: none
    has_moved: bool = False  # it was sent to another server before
    refusals: int = 0  # how often a server has said that it does not know us
    may_repeat: bool = True
    """False for a lookup whose session has ended (nothing would release its pins) or that was hurried (it would end the
    later lookup's pins). Also False for a registration or withdrawal that a later one replaces."""

    def is_held_by(self, running: bytes) -> bool:
        """Whether the server of this run, which is alive (empty: none is), must get or answer it."""
        return bool(running) and running == self.server and isinstance(self.request, LASTING)

    def may_move(self) -> bool:
        """Whether another server may be asked in place of the one that is lost."""
        return not self.server or self._is_repeated()

    def repeats_at(self, server: bytes) -> bool:
        """Whether it is sent again to the server that has welcomed us."""
        is_spent = isinstance(self.request, wire.Copying) and self.has_moved and self.server != server
        return self._is_repeated() and not is_spent

    def _is_repeated(self) -> bool:
        return self.may_repeat and isinstance(self.request, _REPEATED)


class Requests:
    """The requests of one client by their numbers. `parked` are those that wait to be sent, or sent again."""

    def __init__(self) -> None:
        self.pending: dict[int, PendingRequest] = {}
        self.parked: set[int] = set()
        self.registrations: dict[int, wire.Register] = {}
        """Registrations that every server is to have, by instance."""

    def add(self, number: int, item: PendingRequest) -> None:
        self.pending[number] = item
        self.parked.add(number)

    def note(self, request: wire.Request) -> None:
        """Record how a request that is about to be added changes registrations, and requests under way."""
        match request:
            case wire.Register():
                self.registrations[request.instance] = request
                self._replace(wire.Unregister, request.instance, None)
            case wire.Unregister():
                self.registrations.pop(request.instance, None)
                withdrawn = Unavailable("its tensors were withdrawn before a server had them")
                self._replace(wire.Register, request.instance, withdrawn)
            case wire.EndSession() | wire.Lookup(hurries=True):
                for item in self.pending.values():
                    if isinstance(item.request, wire.Lookup) and item.request.request == request.request:
                        item.may_repeat = False

    def _replace(self, kind: type[wire.Register | wire.Unregister], instance: int, outcome: object) -> None:
        """Do not repeat earlier requests of this kind for the same tensors, as a new one is about to be added."""
        for number, item in list(self.pending.items()):
            if isinstance(item.request, kind) and item.request.instance == instance:
                item.may_repeat = False
                if number in self.parked:
                    self.end(number, outcome)

    def settle(self, request: wire.Register, value: object) -> None:
        """A registration was answered: forget it if the server has refused the registration itself."""
        is_refused = isinstance(value, KVDepotError) and not isinstance(value, Busy | Unavailable | UnknownClient)
        if is_refused and self.registrations.get(request.instance) is request:
            del self.registrations[request.instance]

    def unasked_registrations(self) -> list[wire.Register]:
        """Registrations without a request under way, which a server that has just welcomed us lacks."""
        asked = {id(item.request) for item in self.pending.values()}
        return [each for each in self.registrations.values() if id(each) not in asked]

    def to_send(self) -> list[tuple[int, PendingRequest]]:
        """Requests that are parked, in the order in which they were asked: an EndSession must not pass the lookup
        before it. But registrations come first."""
        parked = [(number, self.pending[number]) for number in sorted(self.parked & self.pending.keys())]
        return sorted(parked, key=lambda each: not isinstance(each[1].request, wire.Register))

    def oldest_without_deadline(self) -> tuple[int | None, PendingRequest | None]:
        """The number of the first queued lookup among the requests that wait without a deadline, and the first request
        that is no lookup."""
        queued = None
        for number, item in self.pending.items():
            if item.deadline == float("inf"):
                if not (isinstance(item.request, wire.Lookup) and item.request.queued):
                    return queued, item
                queued = number if queued is None else queued
        return queued, None

    def end(self, number: int, value: object) -> None:
        pending = self.pending.pop(number, None)
        self.parked.discard(number)
        if pending is not None:
            pending.done(value)

    def fail_overdue(self, now: float) -> None:
        for number, item in [(number, item) for number, item in self.pending.items() if item.deadline <= now]:
            self.end(number, DeadlineExceeded(f"no answer to {type(item.request).__name__} in time"))

    def fail_all(self, error: KVDepotError) -> None:
        self.lose(error, lambda item: False)

    def lose(self, error: KVDepotError, waits: Callable[[PendingRequest], bool]) -> None:
        """No server can be asked: park the requests that can wait for one, and fail the others."""
        for number, item in list(self.pending.items()):
            if not waits(item):
                self.end(number, error)
            elif number in self.pending:  # the end of another request has not ended this one
                self.parked.add(number)

    def repeat(self, number: int, item: PendingRequest, server: bytes, now: float) -> None:
        """Park a request whose answer is lost, or fail it. server: the run of the server that has welcomed us."""
        if item.repeats_at(server):
            item.has_moved |= item.server != server
            item.born = now
            self.parked.add(number)
        else:
            self.end(number, Unavailable("the connection broke; the answer is lost"))

    def repeat_all(self, server: bytes, now: float) -> None:
        """A server has welcomed us: no request that was sent before gets an answer any more."""
        for number, item in list(self.pending.items()):
            if item.server:
                self.repeat(number, item, server, now)
