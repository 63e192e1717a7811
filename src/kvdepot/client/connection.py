"""One client's requests to its server: what is under way, when it has failed, what is sent again after a restart.

Driven by client/socket.py, and by the simulation with a network and a clock of its own; it has no socket, thread or
clock. Invariant: every request ends once, with a value or an error. Lookups and most others have deadlines; a store or
retrieve ends when the server has answered, or when the server provably touches no memory any more.

A server that restarted answers `UnknownClient`, or its connection breaks, which the socket reports (`disconnected`).
The connection then **recovers**: it says hello (client/servers.py), withdraws its registrations and renews them, except
those that its user is withdrawing, and sends again what was refused, what was not sent, and what may be repeated:
lookups, ends of sessions, withdrawals and, once, copies. The server answers `Unregister` only when no copy touches the
tensors; copies that were sent to a server which has died wait until its death is proved. So a restart costs callers at
most GRACE_S.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import msgspec

from kvdepot.client.phases import TRANSITIONS, Change, Phase
from kvdepot.client.requests import COPY, Done, PendingRequest, Requests
from kvdepot.client.servers import Handshake, Introduction, LifeWatch, ServerRuns
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

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 65536
DEADLINE_S = 30.0
"""Deadline of requests that are neither lookups nor copies: registering maps gigabytes."""
_HELLO_S = 1.0
_PATIENCE_S = 2.0
"""Deadline of the first attempt to register again. Its answer may be lost with the connection, and copies wait for it.
Each attempt without an answer doubles it."""
GRACE_S = 1.0
"""Requests wait this long for a lost server: a restarted one serves within half a second. After that, and until there
is a connection, they fail at once."""
_GONE_CHECK_S = 0.2
_PAUSE_S = 0.1
_IDLE_S = 0.5
"""Pause between a refused hello and the next, while nothing waits for the server."""
_STALE_S = 10.0
"""After this long without an answer, it is suspected lost although no broken connection was reported. Of a lookup whose
request is only queued this is no sign: it is sent again, and a server that still has it goes on with it."""
_MAX_REPEATS = 3
LINGER_S = 1.0
"""A server's GPUs may run copies that were queued with the driver until this long after its death: no lock shows when
the driver has torn a dead process's queues down."""
CHECK_S = 0.01
"""Least time between two checks in `expire`."""


class Connection:
    """One client's requests to the server at one address. Not thread-safe: client/socket.py holds a lock."""

    def __init__(
        self,
        url: str,
        introduction: Introduction,
        send: Callable[[bytes], bool],
        watch: Callable[[str, bytes], LifeWatch],
        clock: Callable[[], float],
    ) -> None:
        """introduction: what our hello says about us. send: sends a frame; False where there is no connection. watch:
        watches the server of an arena and incarnation, or raises a KVDepotError."""
        self.phase = Phase.APART
        self._closed: KVDepotError = Unavailable("this client is closed")
        self.incarnation = b""  # of the server that last welcomed us
        self.arena = "", b""  # its name, and that incarnation
        self.welcomes = 0
        self.welcome = wire.Welcome(wire.VERSION, 0)  # the last one; a chunk size of 0 before the first
        self.heard = 0  # replies received and connections made: while it stays the same, asking again is useless
        self._until = 0.0  # the phase's deadline
        self._url = url
        self._send = send
        self._clock = clock
        self._handshake = Handshake(url, introduction, watch)
        self._servers = ServerRuns(clock)
        self._numbers = itertools.count(1)
        self.requests = Requests()
        self._own: dict[int, wire.Request] = {}  # the connection's own requests in the current phase
        self._unanswered: list[int] = []  # sent before the last welcome
        self._is_connected = False  # as far as the socket has reported
        self._lost_at: float | None = None  # when the server that had welcomed us was lost
        self._patience_s = _PATIENCE_S
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self.requests.pending)

    @property
    def welcomed(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def has_met(self) -> bool:
        return bool(self.incarnation)

    @property
    def lost_s(self) -> float:
        """Seconds since the server that had welcomed us was lost; 0 if it is not, or only hangs."""
        if not self.has_met or self._lost_at is None or self._servers.may_run():
            return 0.0
        return self._clock() - self._lost_at

    def no_server(self) -> Unavailable:
        return Unavailable(
            f"no kvdepot server answers at {self._url}; start one with `kvdepot serve`. If one with --keys runs there, "
            "set KVDEPOT_KEY to the key file of this client"
        )

    def _cut_off(self) -> Unavailable:
        return Unavailable(f"the connection to {self._url} is down")

    # -- phases

    def _go(self, event: Change, within_s: float = 0.0) -> None:
        """Change the phase; the new one's deadline is `within_s` from now."""
        self.phase = TRANSITIONS[self.phase][event]
        self._until = self._clock() + within_s

    def _leave(self) -> None:
        """Go apart from a server, and expect no answers to our own requests."""
        self._own.clear()
        if self.phase not in (Phase.APART, Phase.CLOSED):
            self._go(Change.LOSE)

    # -- asking

    def ask(self, request: wire.Request, done: Done, deadline_s: float | None = DEADLINE_S) -> None:
        """Send a message. deadline_s None: wait until it is answered or the server is gone."""
        if isinstance(request, wire.Unregister):
            self.requests.note(request)  # whatever becomes of it
        if self.phase is Phase.CLOSED:
            done(self._closed)
            return
        if len(self) >= MAX_IN_FLIGHT:
            done(Busy(f"{len(self)} requests are in flight"))
            return
        self.requests.note(request)
        match request:
            case wire.Store() | wire.Retrieve() | wire.Compare():
                deadline_s = None
            case wire.Lookup(hurries=False) if deadline_s is not None:
                deadline_s += self.welcome.lookup_s
            case wire.Register() if request.layout.is_on_gpu:
                self._servers.linger_s = LINGER_S
        number, now = next(self._numbers), self._clock()
        try:
            frame = wire.encode_request(number, request)
        except KVDepotError as exc:
            done(exc)
            return
        deadline = now + deadline_s if deadline_s is not None else float("inf")
        self.requests.pending[number] = PendingRequest(request, frame, done, deadline, now)
        self.requests.parked.add(number)
        if self.phase is Phase.APART:
            self._greet_or_lose()
        else:
            self._send_parked()

    def _send_parked(self) -> None:
        """Send what waits, in the order in which it was asked: an EndSession must not pass the lookup before it."""
        if self.phase is not Phase.SERVING:
            return
        for number in sorted(self.requests.parked):
            pending = self.requests.pending.get(number)
            if pending is not None and not self._send(self._handshake.seal(pending.frame)):
                self.lose(self._cut_off())
                return
            self.requests.parked.discard(number)

    def _ask_own(self, request: wire.Request) -> bool:
        """Send a request of the connection's own; whether it was sent."""
        number = next(self._numbers)
        frame = wire.encode_request(number, request)
        if not self._send(frame if isinstance(request, wire.Hello | wire.Prove) else self._handshake.seal(frame)):
            return False
        self._own[number] = request
        return True

    # -- hello, and again after a restart

    def connected(self) -> None:
        """The socket has connected: say hello now, not at the next `expire`."""
        self.heard += 1
        self._is_connected = True
        if self.phase is Phase.APART:
            self._until = 0.0
            if self._wants_to_greet():
                self._greet()

    def disconnected(self) -> None:
        """The socket's connection broke, and messages in transit are lost."""
        self._is_connected = False
        if self.has_met:
            self.lose(self._cut_off())
        else:
            self._leave()

    def _wants_to_greet(self) -> bool:
        """Whether it is time for a hello: requests wait, or an idle client is to find the server that it has lost."""
        is_needed = bool(self.requests.pending) or (self._is_connected and self.has_met)
        return self.phase is Phase.APART and is_needed and self._clock() >= self._until

    def _greet(self) -> bool:
        if not self._ask_own(self._handshake.hello()):
            return False
        self._go(Change.GREET, _HELLO_S)
        return True

    def _greet_or_lose(self) -> None:
        if not self._greet() and self.has_met:
            self.lose(self.no_server())

    def _take_own(self, request: wire.Request, value: object, incarnation: bytes) -> None:
        match request:
            case wire.Hello():
                self._take_proof(value, incarnation)
            case wire.Prove():
                self._take_welcome(value, incarnation)
            case wire.Unregister() if isinstance(value, KVDepotError):
                self._recover_again(value)  # copies may still touch the tensors
            case _ if isinstance(value, Unavailable | DeadlineExceeded | UnknownClient):
                self._recover_again(value)
            case _:
                if isinstance(request, wire.Unregister):
                    self.requests.settle_own(request.instance)
                self._finish_recovery()

    def _take_proof(self, value: object, incarnation: bytes) -> None:
        """Handle the answer to our hello, which is not trusted before it is checked against the arena."""
        if isinstance(value, KVDepotError):
            self._refused(value)
            return
        try:
            prove, seal = self._handshake.check(value, incarnation)
        except Unavailable as exc:
            self._refused(exc)
            return
        if not self._ask_own(prove):
            self.lose(self._cut_off())
            return
        self._handshake.use(seal)
        self._go(Change.PROVE, _HELLO_S)

    def _take_welcome(self, value: object, incarnation: bytes) -> None:
        proved = self._handshake.proved
        if isinstance(value, UnknownClient) or proved is None or proved.incarnation != incarnation:
            self._greet_again()  # not the server that has proved itself: say hello to this one
            return
        if isinstance(value, KVDepotError):
            self._refused(value)
            return
        try:
            self.welcome = msgspec.convert(value, wire.Welcome)
        except msgspec.ValidationError as exc:
            self._refused(ProtocolError(f"the welcome from {self._url} is malformed: {exc}"))
            return
        recovery = self.requests.to_recover()
        if self.has_met and recovery:
            log.info("reconnected to %s; registering again", self._url)
        server = self._handshake.finish()
        self.incarnation = server.incarnation
        self.arena = server.arena, server.incarnation
        self.welcomes += 1
        # What follows is sent before the parked requests: what is unanswered when it is answered never will be.
        pending, held = self.requests.pending, self._servers.held_copies()
        self._unanswered = [number for number in pending if number not in self.requests.parked]
        copies = [n for n in self._unanswered if isinstance(pending[n].request, COPY) and n not in held]
        self._servers.succeed(server, copies)
        self._go(Change.WELCOME, self._patience_s)
        for request in recovery:
            if not self._ask_own(request):
                self.lose(self._cut_off())
                return
        self._finish_recovery()

    def _finish_recovery(self) -> None:
        """Serve the requests that wait once all of our own are answered."""
        if self._own:
            return
        held = self._servers.held_copies()
        self.requests.send_again([n for n in self._unanswered if n not in held], self._clock())
        self._unanswered.clear()
        self._patience_s = _PATIENCE_S
        self._lost_at = None
        self._go(Change.RECOVER, _GONE_CHECK_S)
        self._send_parked()

    def _refused(self, error: KVDepotError) -> None:
        self.lose(error)
        if self.phase is Phase.APART:  # else the end of a request has caused another, and with it a hello
            self._greet_again()

    def _greet_again(self) -> None:
        """Let `expire` say hello again: at once for requests that wait, after a pause for an idle client."""
        self._leave()
        self._until = self._clock() + (0.0 if self.requests.pending else _IDLE_S)

    def _recover_again(self, error: KVDepotError) -> None:
        """Recovery has failed: `expire` says hello again, after a pause where the server refused us."""
        self._greet_again()
        if self.requests.pending and not isinstance(error, Unavailable | DeadlineExceeded):
            self._until = self._clock() + _PAUSE_S
        self._patience_s = min(2 * self._patience_s, DEADLINE_S)

    # -- losing the server

    def lose(self, error: KVDepotError) -> None:
        """The server, or the connection to it, is lost; requests that cannot wait for its return fail."""
        self._leave()
        now = self._clock()
        self._lost_at = now if self._lost_at is None else self._lost_at
        may_come_back = self.has_met and now < self._lost_at + GRACE_S
        if not may_come_back and not self._servers.may_touch_blocks():
            self.requests.fail_all(error)
            return

        def waits(item: PendingRequest, is_unsent: bool) -> bool:
            is_repeatable = isinstance(item.request, wire.Lookup | wire.Unregister) and item.may_repeat
            return may_come_back and (is_unsent or is_repeatable)

        self.requests.lose(error, waits)

    def lose_for_good(self, error: KVDepotError) -> None:
        """There will be no other connection: as `lose`, but nothing waits for the server's return."""
        self._lost_at = float("-inf")
        self.lose(error)

    # -- hearing

    def take(self, frame: bytes) -> None:
        opened = self._handshake.open(frame)
        try:
            number, incarnation, value = wire.decode_reply(frame if opened is None else opened)
        except ProtocolError:
            log.warning("dropped %d bytes that are not a reply", len(frame))
            return
        self.heard += 1
        self._is_connected = True
        if self.phase is Phase.SERVING:
            self._until = self._clock() + _GONE_CHECK_S
        own, pending = self._own.get(number), self.requests.pending.get(number)
        request = own if own is not None else pending.request if pending is not None else None
        if request is None:
            return  # the answer came after its deadline
        if own is None and number in self.requests.parked and self.phase is not Phase.SERVING:
            return  # not sent yet, or to be sent again: an answer now comes from a server that has not proved itself
        if self._handshake.is_sealed and opened is None and not self._believes_unsealed(request, value):
            if self.phase is Phase.SERVING:
                self._leave()  # a program in between, or a server that has lost our key: say hello again
            return
        if own is not None:
            del self._own[number]
            self._take_own(own, value, incarnation)
            return
        assert pending is not None
        if isinstance(value, UnknownClient | UnknownInstance) and self._repeat(number, pending, value):
            return
        if isinstance(request, wire.Register | wire.Unregister):
            self.requests.settle(request, value)
        self.requests.end(number, value)

    def _believes_unsealed(self, request: wire.Request, value: object) -> bool:
        """Whether an unsealed answer to a sealed request is accepted: only where its sender cannot have a key. While a
        server may run, none ends a store or retrieve: that server may still touch blocks."""
        if isinstance(request, wire.Hello):
            return True
        if isinstance(request, wire.Prove):
            return isinstance(value, KVDepotError)
        return isinstance(value, UnknownClient) and not self._servers.may_run()

    def _repeat(self, number: int, pending: PendingRequest, value: KVDepotError) -> bool:
        """The server does not know us: say hello, then send this again. Whether it will be sent again."""
        request = pending.request
        is_known = isinstance(request, COPY) and self.requests.registration(request.instance) is not None
        is_over = isinstance(request, wire.Lookup) and not pending.may_repeat
        if (isinstance(value, UnknownInstance) and not is_known) or is_over or pending.refusals >= _MAX_REPEATS:
            return False
        pending.refusals += 1
        self.requests.parked.add(number)
        if self.phase is Phase.SERVING:
            self._leave()
        if self.phase is Phase.APART and not self._greet():
            self.lose(self._cut_off())
        return True

    # -- time

    def expire(self) -> None:
        """Fail overdue requests, find out whether the server is gone, start recovery. Cheap; call it often."""
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        self.requests.fail_overdue(now)
        if self._own and now >= self._until:
            self._end_handshake()
        self.requests.send_again(self._servers.release_copies(), now)
        self._send_parked()
        self._check_server(now)
        if self._wants_to_greet():
            self._greet_or_lose()

    def _end_handshake(self) -> None:
        """The answer to a request of our own is overdue."""
        error = DeadlineExceeded(f"no answer to {type(next(iter(self._own.values()))).__name__} in time")
        if self.phase is Phase.RECOVERING:
            self._recover_again(error)
        elif self.has_met:
            self._refused(error)
        else:
            self._leave()  # the server is slow to answer: say hello again while callers wait

    def _check_server(self, now: float) -> None:
        """Leave a server that is gone, or whose answers seem to be lost."""
        server, is_serving = self._servers.current, self.phase is Phase.SERVING
        if (self.requests.pending or self._own) and server is not None and (now >= self._until or not is_serving):
            if is_serving:
                self._until = now + _GONE_CHECK_S
            if self._servers.is_gone(server):
                # Its successor does not know us: what was sent to the old server waits for the next welcome.
                self._leave()
                self._lost_at = now if self._lost_at is None else self._lost_at
                self._servers.forget_current()
            elif server.gone_at is not None and is_serving:
                self.lose(self._cut_off())  # its process is gone, but its GPUs may still copy
        if self.phase is not Phase.SERVING:
            return
        # Only requests without deadline (copies, ends of sessions): recovery fails others that are merely slow, such as
        # a registration.
        queued, oldest = self.requests.oldest_without_deadline()
        if oldest is not None and now - oldest.born > _STALE_S:
            self._leave()  # its answer may be lost: recovery will show
            oldest.born = now
        elif queued is not None and now - self.requests.pending[queued].born > _STALE_S:
            self.requests.send_again([queued], now)
            self._send_parked()

    def close(self, error: KVDepotError | None = None) -> None:
        """Fail every request, later ones too, with this error or Unavailable. Safe twice."""
        if self.phase is not Phase.CLOSED:
            self._closed = error or self._closed
            self._own.clear()
            self._go(Change.CLOSE)
            self.requests.fail_all(self._closed)
            self._handshake.close()
            self._servers.close()
