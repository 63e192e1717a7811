"""One client's requests to its server: what is under way, when it has failed, what is sent again after a restart.

Driven by client/socket.py, and by the simulation with a network and a clock of its own; it has no socket, thread or
clock. Invariant: every request ends once, with a value or an error. Lookups and most others have deadlines; a store or
retrieve ends when the server has answered, or when the server provably touches no memory any more (its lock on the
arena is free, see memory/shm.py; with tensors on a GPU, LINGER_S later).

A server that restarted answers `UnknownClient`, or its connection breaks, which the socket reports (`disconnected`).
The connection then **recovers**: it says hello (client/handshake.py), withdraws its registrations and makes them anew,
except those that its user is withdrawing, and sends again what was refused, what was not sent, and what may be
repeated: lookups, ends of sessions, withdrawals and, once, copies. The server answers `Unregister` only when no copy
touches the tensors; copies that were sent to a server which has died wait until its death is proved
(client/servers.py). So a restart costs callers at most GRACE_S.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from kvdepot.client.handshake import Handshake
from kvdepot.client.servers import Servers, Watch
from kvdepot.errors import (
    Busy,
    DeadlineExceeded,
    KVDepotError,
    ProtocolError,
    Unavailable,
    UnknownClient,
    UnknownInstance,
)
from kvdepot.protocol import wire
from kvdepot.protocol.leases import HINT_S, NORMAL

__all__ = ["MAX_IN_FLIGHT", "Connection", "Done"]

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 65536
DEADLINE_S = 30.0
"""For requests that are neither lookups nor copies: registering maps gigabytes."""
_HELLO_S = 1.0
_PATIENCE_S = 2.0
"""For the first attempt to register again. Its answer may be lost with the connection, and all copies wait for it."""
GRACE_S = 1.0
"""How long requests wait for a lost server: a restarted one serves within half a second. After that, and until there is
a connection, they fail at once."""
_GONE_CHECK_S = 0.2
_PAUSE_S = 0.1
"""Between a failed recovery and the next."""
_IDLE_S = 0.5
"""Between a refused hello and the next, while nothing waits for the server."""
_STALE_S = 10.0
"""After this long without an answer, a copy's answer is suspected lost although no broken connection was reported."""
_MAX_REPEATS = 3
LINGER_S = 1.0
"""How long after a server's death its GPUs may still run copies that were queued with the driver: no lock tells when
the driver has torn a dead process's queues down."""
CHECK_S = 0.01
"""Least time between two checks in `expire`."""

Done: TypeAlias = Callable[[object], None]
"""Called once with the outcome of a request: its value, or a KVDepotError."""


@dataclass(slots=True)
class _Pending:
    request: wire.Request
    frame: bytes
    done: Done
    deadline: float
    born: float
    repeats: int = 0
    may_repeat: bool = True
    """Whether it may be sent again when its answer is lost. A copy may once: it may be what crashes the server. A
    lookup may not once its session has ended: nothing would release its pins."""


class Connection:
    """One client's requests to the server at one address. Not thread-safe: client/socket.py holds a lock."""

    def __init__(
        self,
        url: str,
        liveness: str,
        send: Callable[[bytes], bool],
        watch: Callable[[str, bytes], Watch],
        clock: Callable[[], float],
        secret: bytes = b"",
        others_between: Callable[[], bool] = bool,
        engine: str = "",
    ) -> None:
        """liveness, secret: name and secret of the client's liveness file (memory/shm.py). engine: as in wire.Hello.

        send: sends a frame; False where there is no connection. watch: opens a Watch of an arena and incarnation, or
        raises a KVDepotError. others_between: called at each hello: whether another user's process could be in between.
        """
        self.incarnation = b""
        self.chunk_size = 0  # tokens; known once welcomed
        self.wants_tokens = False  # whether the server wants chunks to be described; known once welcomed
        self.lookup_s = 0.0  # how long the server may search its tiers; known once welcomed
        self.max_hint_s = HINT_S  # as in wire.Welcome, of the last one
        self.max_hint_priority = NORMAL
        self.heard = 0  # replies received and connections made: while it stays the same, asking again is useless
        self.welcomed = False
        self._url = url
        self._send = send
        self._clock = clock
        self._handshake = Handshake(url, liveness, secret, watch, others_between, engine)
        self._servers = Servers(clock)
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._parked: deque[int] = deque()  # pending numbers that wait for the welcome
        # By instance: what every server is to map, until it refuses it or it is withdrawn.
        self._registered: dict[int, wire.Register] = {}
        self._withdrawn: set[int] = set()  # of these: no server is to map them again
        self._recovering: set[int] = set()  # numbers of our own hello and registrations
        self._answered = b""  # the incarnation that the last answer in recovery came from
        self._lost: list[int] = []  # sent before the last reconnection, unanswered
        self._greet_at = 0.0
        self._met = False  # a server has welcomed us at least once
        self._lost_at: float | None = None  # when a server that had welcomed us was found to be lost
        self._owes_hello = False  # connected, but no hello was answered yet
        self._closed = False
        self._patience_s = _PATIENCE_S  # for an answer in recovery; doubled each time that none comes
        self._last_reply = 0.0
        self._next_check = 0.0

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._pending)

    def device(self, instance: int) -> str:
        """The device of the tensors registered under this number: a GPU's UUID, empty for the processor's memory."""
        register = self._registered.get(instance)
        return register.layout.device if register is not None else ""

    # -- asking

    def ask(self, request: wire.Request, done: Done, deadline_s: float | None = DEADLINE_S) -> None:
        """Send a message. deadline_s None: wait until it is answered or the server is gone."""
        if isinstance(request, wire.Unregister) and request.instance in self._registered:
            self._withdrawn.add(request.instance)
        if self._closed:
            done(Unavailable("this client is closed"))
        elif len(self._pending) >= MAX_IN_FLIGHT:
            done(Busy(f"{len(self._pending)} requests are in flight"))
        else:
            if isinstance(request, wire.Store | wire.Retrieve):
                deadline_s = None
            elif isinstance(request, wire.Lookup) and deadline_s is not None:
                deadline_s += self.lookup_s
            if isinstance(request, wire.Register):
                self._registered[request.instance] = request
                self._withdrawn.discard(request.instance)
                if request.layout.device:
                    self._servers.linger_s = LINGER_S
            if isinstance(request, wire.EndSession):
                for item in self._pending.values():
                    if isinstance(item.request, wire.Lookup) and item.request.request == request.request:
                        item.may_repeat = False
            now = self._clock()
            number = next(self._numbers)
            try:
                frame = wire.encode_request(number, request)
            except KVDepotError as exc:
                done(exc)
                return
            deadline = now + deadline_s if deadline_s is not None else float("inf")
            self._pending[number] = _Pending(request, frame, done, deadline, now)
            self._dispatch(number)

    def _dispatch(self, number: int) -> None:
        self._parked.append(number)
        if self.welcomed:
            self._send_parked()
        elif not self._recovering and not self._greet() and self._met:
            self.lose(self.no_server())

    def _send_parked(self) -> None:
        while self._parked and self.welcomed:
            if self._parked[0] in self._pending and not self._transmit(self._parked[0]):
                self.lose(self._cut_off())
                return
            self._parked.popleft()

    def _transmit(self, number: int) -> bool:
        pending = self._pending[number]
        is_handshake = isinstance(pending.request, wire.Hello | wire.Prove)
        return self._send(pending.frame if is_handshake else self._handshake.seal(pending.frame))

    def _cut_off(self) -> Unavailable:
        return Unavailable(f"the connection to {self._url} is down")

    @property
    def lost_s(self) -> float:
        """For how many seconds the server that had welcomed us has been lost; 0 if it is not, or only hangs."""
        if not self._met or self._lost_at is None or self._servers.may_run():
            return 0.0
        return self._clock() - self._lost_at

    def no_server(self) -> Unavailable:
        """The error for a server that does not answer."""
        return Unavailable(
            f"no kvdepot server answers at {self._url}; start one with `kvdepot serve` (one with --keys answers only "
            "clients whose key it knows: KVDEPOT_KEY)"
        )

    # -- hello, and again after a restart

    def connected(self) -> None:
        """The socket has connected: say hello now, not at the next `expire`."""
        self.heard += 1
        self._owes_hello, self._greet_at = self._met, 0.0
        if self._waits_to_greet():
            self._greet()

    def disconnected(self) -> None:
        """The socket's connection broke, and messages in transit are lost."""
        self._owes_hello = False
        if self._met:
            self.lose(self._cut_off())
        else:
            self._drop_own()

    def _waits_to_greet(self) -> bool:
        waits = bool(self._pending or self._owes_hello) and not self.welcomed and not self._recovering
        return waits and self._clock() >= self._greet_at

    def _greet(self) -> bool:
        """Say hello; whether it was sent."""
        return self._ask_own(self._handshake.hello(), self._on_proof, _HELLO_S)

    def _ask_own(self, request: wire.Request, then: Done, deadline_s: float = DEADLINE_S) -> bool:
        """Send a request of the connection's own; whether it was sent. `then` gets the value or the error."""
        number = next(self._numbers)
        now = self._clock()
        frame = wire.encode_request(number, request)
        self._pending[number] = _Pending(request, frame, then, now + deadline_s, now)
        self._recovering.add(number)
        if self._transmit(number):
            return True
        del self._pending[number]
        self._recovering.discard(number)
        return False

    def _drop_own(self) -> None:
        """Forget our own requests: nobody will answer them."""
        for number in self._recovering:
            self._pending.pop(number, None)
        self._recovering.clear()

    def _on_proof(self, value: object) -> None:
        """The answer to our hello, which is not trusted before it is checked against the arena."""
        if isinstance(value, DeadlineExceeded) and not self._met:
            self._owes_hello = True
            return  # the server is slow to answer: `expire` says hello again while callers wait
        if isinstance(value, KVDepotError):
            self._refused(value)
            return
        self._owes_hello = self._met  # until the welcome: what comes between must not end the handshake for good
        try:
            prove, seal = self._handshake.check(value, self._answered)
        except Unavailable as exc:
            self._refused(exc)
            return
        if not self._ask_own(prove, self._on_welcome, _HELLO_S):
            self.lose(self._cut_off())
            return
        self._handshake.use(seal)

    def _on_welcome(self, value: object) -> None:
        proved = self._handshake.proved
        self._owes_hello = isinstance(value, DeadlineExceeded)
        if isinstance(value, DeadlineExceeded):
            if not self._met:
                return  # as in `_on_proof`
        elif isinstance(value, UnknownClient) or proved is None or proved.incarnation != self._answered:
            self._greet_again()  # not the server that has proved itself: `expire` says hello to this one
            return
        if isinstance(value, KVDepotError):
            self._refused(value)
            return
        try:
            welcome = msgspec.convert(value, wire.Welcome)
        except msgspec.ValidationError as exc:
            self.lose(ProtocolError(f"the welcome from {self._url} is malformed: {exc}"))
            return
        server = self._handshake.finish()
        self.incarnation = server.incarnation
        self._servers.succeed(server, self._unanswered_copies())
        self.chunk_size = welcome.chunk_size
        self.lookup_s = welcome.lookup_s
        self.wants_tokens = welcome.wants_tokens
        self.max_hint_s, self.max_hint_priority = welcome.max_hint_s, welcome.max_hint_priority
        if self._met and self._registered:
            log.info("reconnected to %s; registering again", self._url)
        self._met = True
        # These are sent before the parked requests: what is unanswered when they are answered never will be.
        waiting = {*self._parked, *self._recovering}
        self._lost = [number for number in self._pending if number not in waiting]
        for request in self._to_recover():
            then = self._on_taken_back if isinstance(request, wire.Unregister) else self._on_recovered
            if not self._ask_own(request, then, self._patience_s):
                self.lose(self._cut_off())
                return
        self._on_recovered(None)

    def _to_recover(self) -> list[wire.Unregister | wire.Register]:
        """What takes the registrations back, so that no copy touches their tensors, and makes them anew."""
        parked = [self._pending[number].request for number in self._parked if number in self._pending]
        unsent = {request.instance for request in parked if isinstance(request, wire.Register)}
        requests: list[wire.Unregister | wire.Register] = []
        for instance, register in self._registered.items():
            requests.append(wire.Unregister(instance))
            if instance not in self._withdrawn and instance not in unsent:
                requests.append(register)
        return requests

    def _unanswered_copies(self) -> list[int]:
        """Stores and retrieves that were sent to the current server: neither parked nor held by a former one."""
        elsewhere = {*self._parked, *self._servers.held_copies()}
        return [
            number
            for number, pending in self._pending.items()
            if isinstance(pending.request, wire.Store | wire.Retrieve) and number not in elsewhere
        ]

    def _refused(self, error: KVDepotError) -> None:
        """A handshake has failed."""
        self.lose(error)
        self._greet_again()

    def _greet_again(self) -> None:
        """Let `expire` say hello again, also where no request waits: a client that is idle has to find its server."""
        self._owes_hello = self._met
        if not self._pending:
            self._greet_at = self._clock() + _IDLE_S

    def _on_taken_back(self, value: object) -> None:
        """The answer to an Unregister: until it succeeds, copies may still touch the tensors."""
        if isinstance(value, KVDepotError):
            self._begin_anew(value)
        else:
            self._on_recovered(value)

    def _begin_anew(self, error: KVDepotError) -> None:
        """Recovery has failed: `expire` says hello again, after a pause where the server refused us."""
        self._drop_own()
        self._greet_again()
        if self._pending and not isinstance(error, Unavailable | DeadlineExceeded):
            self._greet_at = self._clock() + _PAUSE_S
        self._patience_s = min(2 * self._patience_s, DEADLINE_S)

    def _on_recovered(self, value: object) -> None:
        if isinstance(value, Unavailable | DeadlineExceeded | UnknownClient):
            self._begin_anew(value)
        elif not self._recovering:
            held = self._servers.held_copies()
            for number in self._lost:
                pending = self._pending.get(number)
                if pending is not None and number not in held:
                    self._send_again(number, pending)
            self._lost.clear()
            self._patience_s = _PATIENCE_S
            self._lost_at = None
            # In the order in which they were asked: nothing releases the pins of a lookup sent after its EndSession.
            self._parked = deque(sorted(self._parked))
            self.welcomed = True
            self._send_parked()

    def _send_again(self, number: int, pending: _Pending) -> None:
        """Its answer is lost, and the server does nothing for it any more: park it to be sent again, or fail it."""
        is_copy = isinstance(pending.request, wire.Store | wire.Retrieve)
        if pending.may_repeat and (
            is_copy or isinstance(pending.request, wire.Lookup | wire.EndSession | wire.Unregister)
        ):
            pending.may_repeat = not is_copy
            pending.born = self._clock()
            self._parked.append(number)
        else:
            del self._pending[number]
            pending.done(Unavailable("the connection broke; the answer is lost"))

    def lose(self, error: KVDepotError, for_good: bool = False) -> None:
        """The server, or the connection to it, is lost. for_good: there will be no other connection."""
        self.welcomed = False
        self._drop_own()
        if self._lost_at is None:
            self._lost_at = self._clock()
        may_come_back = self._met and not for_good and self._clock() < self._lost_at + GRACE_S
        if not may_come_back and not self._servers.may_touch_blocks():
            self._fail_all(error)
            return
        # The server may still touch blocks: copies that were sent wait until that is known. It holds pins, too: ends of
        # sessions are sent after the next welcome.
        unsent, self._parked = set(self._parked), deque()
        for number, pending in list(self._pending.items()):
            request = pending.request
            if number not in self._pending:
                continue
            if isinstance(request, wire.EndSession) or (
                may_come_back
                and (number in unsent or (isinstance(request, wire.Lookup | wire.Unregister) and pending.may_repeat))
            ):
                self._parked.append(number)
            elif number in unsent or not isinstance(request, wire.Store | wire.Retrieve):
                del self._pending[number]
                pending.done(error)

    def _fail_all(self, error: KVDepotError) -> None:
        self._parked.clear()
        self._recovering.clear()
        pending, self._pending = self._pending, {}
        for item in pending.values():
            item.done(error)

    # -- hearing

    def take(self, frame: bytes) -> None:
        """Handle a frame that has arrived."""
        opened = self._handshake.open(frame)
        try:
            number, incarnation, value = wire.decode_reply(frame if opened is None else opened)
        except ProtocolError:
            log.warning("dropped %d bytes that are not a reply", len(frame))
            return
        self._last_reply = self._clock()
        self.heard += 1
        pending = self._pending.get(number)
        if pending is None:
            return  # the answer came after its deadline
        if not self.welcomed and number in self._parked:
            return  # not sent yet, or to be sent again: an answer now comes from a server that has not proved itself
        if self._handshake.is_sealed and opened is None and not self._believes_unsealed(pending.request, value):
            self.welcomed = False  # a program in between, or a server that has lost our key: say hello again
            return
        if isinstance(value, UnknownClient | UnknownInstance) and self._repeat(number, pending, value):
            return
        del self._pending[number]
        if number in self._recovering:
            self._recovering.discard(number)
            self._answered = incarnation
            if isinstance(pending.request, wire.Unregister) and not isinstance(value, KVDepotError):
                self._forget_withdrawn(pending.request.instance)
        elif isinstance(pending.request, wire.Register | wire.Unregister):
            is_refused, instance = isinstance(value, KVDepotError), pending.request.instance
            if is_refused == isinstance(pending.request, wire.Register):  # no server has it, or is to have it, any more
                self._registered.pop(instance, None)
                self._withdrawn.discard(instance)
        pending.done(value)

    def _forget_withdrawn(self, instance: int) -> None:
        """A recovery has withdrawn it, and is not to register it again."""
        if instance in self._withdrawn:
            self._registered.pop(instance, None)
            self._withdrawn.discard(instance)

    def _believes_unsealed(self, request: wire.Request, value: object) -> bool:
        """Whether an unsealed answer to a sealed request is accepted: only where its sender cannot have a key.

        While a server may run, no unsealed answer ends a store or retrieve: that server may still touch blocks.
        """
        if isinstance(request, wire.Hello):
            return True
        if isinstance(request, wire.Prove):
            return isinstance(value, KVDepotError)
        return isinstance(value, UnknownClient) and not self._servers.may_run()

    def _repeat(self, number: int, pending: _Pending, value: KVDepotError) -> bool:
        """The server does not know us: say hello, then send this again. Whether it will be sent again."""
        known = not isinstance(value, UnknownInstance) or (
            isinstance(pending.request, wire.Store | wire.Retrieve)
            and pending.request.instance in self._registered.keys() - self._withdrawn
        )
        if not known or number in self._recovering or pending.repeats >= _MAX_REPEATS:
            return False
        pending.repeats += 1
        self.welcomed = False
        self._parked.append(number)
        if not self._recovering and not self._greet():
            self.lose(self._cut_off())
        return True

    def expire(self) -> None:
        """Fail overdue requests, find out whether the server is gone, start recovery. Cheap; call it often."""
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        for number in [n for n, item in self._pending.items() if item.deadline <= now]:
            pending = self._pending.pop(number, None)
            if pending is None:
                continue  # our own hello was overdue too, and its failure failed this one
            self._recovering.discard(number)
            pending.done(DeadlineExceeded(f"no answer to {type(pending.request).__name__} in time"))
        if self._parked:
            self._parked = deque(n for n in self._parked if n in self._pending)
        for number in self._servers.release_copies():
            if (pending := self._pending.get(number)) is not None:
                self._send_again(number, pending)
        self._send_parked()
        silent = not self.welcomed or now - self._last_reply > _GONE_CHECK_S
        server = self._servers.current
        if self._pending and silent and server is not None:
            self._last_reply = now
            if self._servers.is_gone(server):
                # Its successor does not know us: what was sent to the old server waits for the next welcome.
                self.welcomed = False
                if self._lost_at is None:
                    self._lost_at = now
                self._servers.forget_current()
                self._drop_own()
            elif server.gone_at is not None and self.welcomed:
                self.lose(self._cut_off())  # its process is gone, but its GPUs may still copy
        # Only requests without deadline (copies, ends of sessions): recovery fails others that are merely slow, such as
        # a registration.
        endless = (item for item in self._pending.values() if item.deadline == float("inf"))
        oldest = next(endless, None) if self.welcomed else None
        if oldest is not None and now - oldest.born > _STALE_S:
            self.welcomed = False  # its answer may be lost: recovery will tell
            oldest.born = now
        if self._waits_to_greet() and not self._greet() and self._met:
            self.lose(self.no_server())

    def close(self) -> None:
        """Fail every request with Unavailable. Safe twice."""
        if not self._closed:
            self._closed = True
            self._fail_all(Unavailable("this client is closed"))
            self._handshake.close()
            self._servers.close()
