"""The core of a server without sockets, threads or clocks: takes frames, gives replies and tasks.

Unit tests and the simulation drive the core with it; each carries out actions in its own way. It asserts what
holds for any server: each request is answered at most once, and dead clients get no answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from kvdepot.config import Config
from kvdepot.core.actions import Action, Prepare, Reply, Stop
from kvdepot.core.clients import Liveness
from kvdepot.core.connections import Connections, OwnArena
from kvdepot.core.depot import Depot
from kvdepot.core.forgetting import STEP_CHUNKS
from kvdepot.core.index.index import Index
from kvdepot.core.lookups.phases import SearchPhase
from kvdepot.core.report import ServerFacts
from kvdepot.errors import KVDepotError, LayoutError
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import SECRET_BYTES, Offer
from kvdepot.tiers import TierConfig
from kvdepot.tiers.worker import TierTask
from tests.core.heard import Heard

__all__ = ["ArenaName", "Harness", "PlainLiveness", "kind_of"]


def kind_of(tier_task: TierTask) -> str:
    """Find, Load, Save, ...: the name of its class in tiers/worker.py."""
    return next(str(kind.__name__) for kind in get_args(TierTask) if isinstance(tier_task, kind))


@dataclass
class ArenaName:
    """An arena's name and secret, without an arena in /dev/shm."""

    name: str = "arena"
    secret: bytes = b"a" * SECRET_BYTES
    lost: bool = False

    @property
    def path(self) -> Path:
        return Path(self.name)

    def is_lost(self) -> bool:
        return self.lost


@dataclass(eq=False)
class PlainLiveness:
    """Stands in for a client's liveness file, on both ends."""

    name: str
    secret: bytes = b"l" * 16
    alive: bool = True
    left: bool = False
    removed: bool = field(default=False, init=False)

    def is_alive(self) -> bool:
        return self.alive

    def has_left(self) -> bool:
        return self.left

    def close(self, remove: bool) -> None:
        self.removed |= remove


class Harness:
    """One core. Override `replied`, `submitted`, `submitted_to_tier` and `stopped` to handle actions."""

    def __init__(
        self,
        config: Config,
        index: Index,
        tiers: Sequence[TierConfig] = (),
        *,
        boot: bytes = b"\1" * wire.BOOT_BYTES,
        arena: OwnArena | None = None,
        open_liveness: Callable[[str], Liveness] | None = None,
        tenant: Callable[[str], str] = lambda user: "",
        step_chunks: int = STEP_CHUNKS,
    ) -> None:
        """arena, open_liveness: by default those of this file. For the other parameters, see Depot and Connections."""
        self.index = index
        self.boot = boot
        self.arena_name = arena or ArenaName()
        self.liveness_files: dict[bytes, PlainLiveness] = {}  # of clients that `hello` admitted, by identity
        self.users: dict[bytes, str] = {}  # by connection, the user whose key it has
        self.heard = Heard(index.namespaces.all())  # what the events say, to be compared with the index
        self.depot = Depot(config, index, tiers, ServerFacts(boot), step_chunks, readers=[self.heard])
        self.connections = Connections(
            config, self.depot, boot, self.arena_name, open_liveness or self._open_liveness, tenant
        )
        self.now = 0.0
        self.answers: dict[tuple[bytes, bytes], object] = {}  # by client and number
        self.prepares: list[Prepare] = []
        self.tier_tasks: list[TierTask] = []
        self.stops: list[Stop] = []
        self.described: list[wire.Describe] = []
        self.unanswered: Counter[tuple[bytes, bytes]] = Counter()
        self.next_number = 1

    def _open_liveness(self, name: str) -> Liveness:
        for liveness in self.liveness_files.values():
            if liveness.name == name:
                return liveness
        raise LayoutError(f"shared memory {name} cannot be opened")

    # -- actions

    def replied(self, reply: Reply, frame: bytes) -> None:
        """Called with each reply; frame: the message to the client. A hit of whole chunks, of which nothing else is
        said, reads as their number."""
        hit = reply.value
        is_plain = isinstance(hit, wire.Hit) and hit == wire.Hit(hit.chunks)
        self.answers[reply.client, reply.number] = hit.chunks if is_plain else hit  # type: ignore[attr-defined]

    def submitted(self, task: Prepare) -> None:
        """Called when the core wants memory to be allocated. The outcome goes to `finished`."""
        self.prepares.append(task)

    def submitted_to_tier(self, task: TierTask) -> None:
        """Called with each task for a tier's thread. Its outcome goes to `finished`."""
        self.tier_tasks.append(task)

    def stopped(self, stop: Stop) -> None:
        """Called when the core wants the server to stop."""
        self.stops.append(stop)

    def act(self, actions: list[Action]) -> None:
        """Handle actions as the server's loop does."""
        assert not self.index.events, "something happened that no reader was told"
        for action in actions:
            match action:
                case Reply():
                    asked = action.client, action.number
                    assert self.unanswered[asked] > 0, f"{asked} is answered more often than it was asked"
                    self.unanswered[asked] -= 1
                    self._check_lives(action)
                    self.replied(action, self.connections.encode(action, self.now))
                case Prepare():
                    self.submitted(action)
                case Stop():
                    self.stopped(action)
                case wire.Describe():
                    self.described.append(action)
                case _:
                    self.submitted_to_tier(action)

    def _check_lives(self, reply: Reply) -> None:
        said_to_a_stranger = isinstance(reply.value, KVDepotError | wire.Proof)
        assert said_to_a_stranger or self.depot.client(reply.client) is not None, f"{reply} to a dead client"

    # -- events

    def deliver(self, identity: bytes, frame: bytes) -> None:
        """Deliver a message to the core. A lookup or copy that is delivered again while it waits is one request."""
        client, number = self.depot.client(identity), wire.number_of(frame)
        lookups = [each for each in self.depot.lookups._searches.values() if each.client is client]
        copies = () if client is None else client.operations.values()
        waiting = [*(each.number for each in lookups), *(each.number for each in copies if each.placement is None)]
        self.unanswered[identity, number] += number not in waiting
        self.act(self.connections.receive([identity, frame], self.users.get(identity, ""), self.now))

    def finished(self, token: Any, outcome: Any) -> None:
        """Report the outcome of a task."""
        self.act(self.depot.finished(token, outcome, self.now))

    def expire(self) -> None:
        """Run a turn of the server's loop without a message."""
        self.act(self.depot.expire(self.now))

    def tick(self, now: float, wall: float) -> None:
        """Let a second pass. wall: seconds since 1970."""
        self.now = now
        self.act(self.connections.tick(now, wall))
        self._forget_dead()

    def check_budget(self) -> None:
        """The pin budget counts what lookups and waiting requests hold, and lets a client that holds nothing begin."""
        lookups, budget = self.depot.lookups, self.depot.pins.budget
        sessions = [session for client in self.depot.clients for session in client.sessions.values()]
        shares = [each.share for each in (*lookups._searches.values(), *sessions) if each.share is not None]
        budget.validate(shares)
        owners = {share.client for share in shares}
        may_go_on = budget.has_freed or self.depot.tiering.loads.is_full
        roomless = [*lookups._in[SearchPhase.ROOM], *lookups._in[SearchPhase.WANTED]]
        assert may_go_on or all(each.client in owners for each in roomless)
        for search in lookups._searches.values():
            row = lookups._rows[search.phase]
            assert [phase for phase, those in lookups._in.items() if search in those] == [search.phase]
            assert row.holds or not search.held, "a search holds what its phase does not"
            assert (search.want is not None) == (search.request.queued and row.wants)
        assert len(lookups) == sum(map(len, lookups._in.values())), "a search is in no phase"
        assert len(self.index.wants) == sum(each.want is not None for each in lookups._searches.values())

    def _forget_dead(self) -> None:
        """Drop requests that are answered, and those of dead clients."""
        for asked in [asked for asked, count in self.unanswered.items() if not count or not self._lives(asked[0])]:
            del self.unanswered[asked]

    def _lives(self, identity: bytes) -> bool:
        return self.depot.client(identity) is not None

    # -- a client's side

    def send(self, identity: bytes, request: wire.Request) -> tuple[bytes, bytes]:
        """Send a request under a new number; returns the key of its answer in `answers`."""
        number = self.next_number
        self.next_number += 1
        self.deliver(identity, wire.encode_request(number, request))
        return identity, number.to_bytes(wire.ID_BYTES, "little")

    def hello(self, identity: bytes = b"one", user: str = "", engine: str = "") -> bytes:
        """Run a client's handshake, with its liveness file or a new one. Raises the error that the server replies.

        user: the user whose key its connection has. engine: the one that it says it belongs to.
        """
        self.users[identity] = user
        liveness = self.liveness_files.get(identity)
        if liveness is None:
            liveness = self.liveness_files[identity] = PlainLiveness(f"liveness {self.next_number} of {identity!r}")
        try:
            offer = Offer(liveness.name, liveness.secret, False, engine)
            proof = self._asked(identity, offer.hello)
            assert isinstance(proof, wire.Proof), f"{proof!r} is no proof"
            prove, _ = offer.accept(proof, self.boot, self.arena_name.secret)
            self._asked(identity, prove)
        except KVDepotError:
            if not self._lives(identity):
                del self.liveness_files[identity]
            raise
        return identity

    def _asked(self, identity: bytes, request: wire.Request) -> object:
        value = self.answers.pop(self.send(identity, request))
        if isinstance(value, KVDepotError):
            raise value
        return value

    def die(self, identity: bytes) -> None:
        """Let a client die, and the server notice."""
        liveness = self.liveness_files.pop(identity, None)
        if liveness is not None:
            liveness.alive = False
        self.act(self.connections.drop_dead())
        self._forget_dead()
