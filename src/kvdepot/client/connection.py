"""One client's requests to its server: what is under way, when it has failed, what is sent again after a restart.

Driven by client/socket.py, and by the simulation with a network and a clock of its own; it has no socket, thread or
clock. Invariants: every request ends once, with a value or an error; nothing ends with the answer of a server that has
not proved itself. Lookups and most others have deadlines; copies, and what releases memory, end when the server has
answered, or has been gone for GRACE_S.

A server that restarted answers `UnknownClient`, or its connection breaks, which the socket reports (`disconnected`).
The connection then **recovers**: it says hello (client/servers.py), makes all registrations again, each of which
replaces the one before, and sends again what was refused, what was not sent, and what may be repeated: the table of
client/requests.py says so for each kind of request. No server touches an engine's memory, so nothing waits for the
proof of a server's death. A restart costs callers at most GRACE_S.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import msgspec

from kvdepot.client.phases import TRANSITIONS, Change, Phase
from kvdepot.client.requests import LASTING, Done, PendingRequest, Requests
from kvdepot.client.servers import Handshake, Introduction, LifeWatch, ServerRun
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
"""Deadline of requests that are neither lookups nor copies."""
_HELLO_S = 1.0
GRACE_S = 1.0
"""Requests wait this long for a lost server: a restarted one serves within half a second. After that, and until there
is a connection, they fail at once."""
_GONE_CHECK_S = 0.2
_IDLE_S = 0.5
"""Pause between a refused hello and the next, while nothing waits for the server."""
_STALE_S = 10.0
"""After this long without an answer, the answer is suspected lost although no broken connection was reported. A queued
lookup may take longer: it is sent again, and a server that still has it goes on with it."""
_MAX_REPEATS = 3
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
        """introduction: what our hello says about us. send: sends a frame; False without a connection. watch: watches
        the server of an arena and incarnation, or raises a KVDepotError."""
        self.phase = Phase.APART
        self._closed: KVDepotError = Unavailable("this client is closed")
        self.incarnation = b""  # of the server that last welcomed us
        self.arena = "", b""  # the name of that server's arena, and its incarnation
        self.welcomes = 0
        self.welcome = wire.Welcome(wire.VERSION, 0)  # the last welcome; a chunk size of 0 before the first
        self.heard = 0  # replies received and connections made: while it stays the same, asking again is useless
        self._until = 0.0  # the phase's deadline
        self._url = url
        self._send = send
        self._clock = clock
        self._handshake = Handshake(url, introduction, watch)
        self._server: ServerRun | None = None  # the last server that welcomed us, until it is seen to be gone
        self._numbers = itertools.count(1)
        self.requests = Requests()
        self._own: tuple[int, wire.Request] | None = None  # our hello or proof, while its answer is due
        self._is_connected = False  # as far as the socket has reported
        self._lost_at: float | None = None  # when the server that had welcomed us was lost
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
        """Seconds since the server that had welcomed us was lost; 0 while that server runs, even if it hangs."""
        if not self.has_met or self._lost_at is None or self._is_running():
            return 0.0
        return self._clock() - self._lost_at

    def _is_running(self) -> bool:
        """Whether the server that welcomed us last still runs, connected or not."""
        return self._server is not None and not self._server.watch.is_gone()

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
        """Enter APART, and expect no answer to our hello or proof any more."""
        self._own = None
        if self.phase not in (Phase.APART, Phase.CLOSED):
            self._go(Change.LOSE)

    # -- asking

    def ask(self, request: wire.Request, done: Done, deadline_s: float | None = DEADLINE_S) -> None:
        """Send a message. deadline_s None: wait until it is answered or the server is gone, as requests of the kinds
        `LASTING` always do."""
        if self.phase is Phase.CLOSED:
            done(self._closed)
            return
        if len(self) >= MAX_IN_FLIGHT:
            done(Busy(f"{len(self)} requests are in flight"))
            return
        if isinstance(request, LASTING):
            deadline_s = None
        elif isinstance(request, wire.Lookup) and not request.hurries and deadline_s is not None:
            deadline_s += self.welcome.lookup_s
        try:
            self._park(request, done, deadline_s)
        except KVDepotError as exc:
            done(exc)
            return
        if self.phase is Phase.APART:
            self._greet_or_lose()
        else:
            self._send_parked()

    def _park(self, request: wire.Request, done: Done, deadline_s: float | None) -> None:
        """Add a request, to be sent by `_send_parked`. Raises BadRequest for a request that cannot be encoded."""
        number, now = next(self._numbers), self._clock()
        frame = wire.encode_request(number, request)
        self.requests.note(request)
        deadline = now + deadline_s if deadline_s is not None else float("inf")
        item = PendingRequest(request, frame, done, deadline, now)
        if isinstance(request, wire.Complete):
            item.server = request.boot
        elif isinstance(request, wire.EndSession):
            item.server = self.incarnation
        self.requests.add(number, item)

    def _send_parked(self) -> None:
        if self.phase is not Phase.SERVING:
            return
        for number, item in self.requests.to_send():
            if not self._send(self._handshake.seal(item.frame)):
                self.lose(self._cut_off())
                return
            item.server = self.incarnation
            self.requests.parked.discard(number)

    def _ask_own(self, request: wire.Hello | wire.Prove) -> bool:
        """Send a message of the handshake. Returns whether it was sent."""
        number = next(self._numbers)
        if not self._send(wire.encode_request(number, request)):
            return False
        self._own = number, request
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
        server = self._handshake.finish()
        missing = self.requests.unasked_registrations()
        if self.has_met and missing:
            log.info("reconnected to %s; registering again", self._url)
        self._forget_server()
        self._server = server
        self.incarnation = server.incarnation
        self.arena = server.arena, server.incarnation
        self.welcomes += 1
        self._lost_at = None
        self._go(Change.WELCOME, _GONE_CHECK_S)
        self.requests.repeat_all(server.incarnation, self._clock())
        for request in missing:
            self._park(request, _nobody, None)
        self._send_parked()

    def _refused(self, error: KVDepotError) -> None:
        self.lose(error)
        if self.phase is Phase.APART:  # else a caller whose request failed has asked again, and we have said hello
            self._greet_again()

    def _greet_again(self) -> None:
        """Let `expire` say hello again: at once for requests that wait, after a pause for an idle client."""
        self._leave()
        self._until = self._clock() + (0.0 if self.requests.pending else _IDLE_S)

    # -- losing the server

    def lose(self, error: KVDepotError) -> None:
        """The server, or the connection to it, is lost; requests that cannot wait for its return fail."""
        self._leave()
        now = self._clock()
        self._lost_at = now if self._lost_at is None else self._lost_at
        is_returning = self.has_met and now < self._lost_at + GRACE_S
        running = self.incarnation if self._is_running() else b""
        self.requests.lose(error, lambda item: item.is_held_by(running) or (is_returning and item.may_move()))

    def lose_for_good(self, error: KVDepotError) -> None:
        """There will be no other connection: as `lose`, but nothing waits for the server's return."""
        self._lost_at = float("-inf")
        self._forget_server()
        self.lose(error)

    def _forget_server(self) -> None:
        if self._server is not None:
            self._server.watch.close()
            self._server = None

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
        if self._own is not None and self._own[0] == number:
            is_trusted = opened is not None or not self._handshake.is_sealed
            is_hello = isinstance(self._own[1], wire.Hello)
            if is_trusted or is_hello or isinstance(value, KVDepotError):
                self._own = None
                (self._take_proof if is_hello else self._take_welcome)(value, incarnation)
            return  # else the reply lacks its seal, which only an error may: its sender may not have the key yet
        pending = self.requests.pending.get(number)
        if pending is None:
            return  # the answer came after its deadline
        if number in self.requests.parked and self.phase is not Phase.SERVING:
            return  # the request waits to be sent: an answer now comes from a server that has not proved itself
        is_forged = self._handshake.is_sealed and opened is None
        if is_forged and (self._is_running() or not isinstance(value, UnknownClient)):
            if self.phase is Phase.SERVING:
                self._leave()  # a program in between, or a server that has lost our key: say hello again
            return
        if incarnation != self.incarnation:  # whatever this server says, it has not proved itself
            value = UnknownClient(f"another server has come to {self._url}")
        if isinstance(value, UnknownClient | UnknownInstance) and self._repeat(number, pending, value):
            return
        if isinstance(pending.request, wire.Register):
            self.requests.settle(pending.request, value)
        self.requests.end(number, value)

    def _repeat(self, number: int, pending: PendingRequest, value: KVDepotError) -> bool:
        """The server does not know us: say hello, and then send the request again. Returns whether that will happen."""
        request = pending.request
        is_known = isinstance(request, wire.Copying) and request.instance in self.requests.registrations
        is_wrong = isinstance(value, UnknownInstance) and not is_known
        if is_wrong or not pending.may_repeat or pending.refusals >= _MAX_REPEATS:
            return False
        if not isinstance(request, LASTING):
            pending.server = b""  # no server works on the request
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
        self._send_parked()
        self._check_server(now)
        if self._wants_to_greet():
            self._greet_or_lose()

    def _end_handshake(self) -> None:
        """The answer to our hello or proof is overdue."""
        assert self._own is not None
        if self.has_met:
            self._refused(DeadlineExceeded(f"no answer to {type(self._own[1]).__name__} in time"))
        else:
            self._leave()  # the server is slow to answer: say hello again while callers wait

    def _check_server(self, now: float) -> None:
        """Leave a server that is gone, or whose answers seem to be lost."""
        is_serving, is_waiting = self.phase is Phase.SERVING, bool(self.requests.pending or self._own)
        if is_waiting and self._server is not None and (now >= self._until or not is_serving):
            if is_serving:
                self._until = now + _GONE_CHECK_S
            if not self._is_running():
                # Its successor does not know us: what was sent to the old server waits for the next welcome.
                self._leave()
                self._lost_at = now if self._lost_at is None else self._lost_at
                self._forget_server()
        if self.phase is not Phase.SERVING:
            return
        # Only requests without deadline (copies, ends of sessions): recovery fails others that are merely slow, such as
        # a registration.
        queued, oldest = self.requests.oldest_without_deadline()
        if oldest is not None and now - oldest.born > _STALE_S:
            self._leave()  # its answer may be lost: recovery will show
            oldest.born = now
        elif queued is not None and now - self.requests.pending[queued].born > _STALE_S:
            self.requests.repeat(queued, self.requests.pending[queued], self.incarnation, now)
            self._send_parked()

    def close(self, error: KVDepotError | None = None) -> None:
        """Fail every request, later ones too, with this error or Unavailable. Safe twice."""
        if self.phase is not Phase.CLOSED:
            self._closed = error or self._closed
            self._own = None
            self._go(Change.CLOSE)
            self.requests.fail_all(self._closed)
            self._handshake.close()
            self._forget_server()


def _nobody(value: object) -> None:
    """Nobody waits for the outcome of a registration that the connection makes again."""
