"""The simulated machine: what is in its shared memory, who holds which lock, and clients whose socket is made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from kvdepot.client import MessageQueueClient, MessagingFuture, contract
from kvdepot.client.connection import CHECK_S, DEADLINE_S, Connection
from kvdepot.client.requests import LASTING
from kvdepot.client.servers import Introduction
from kvdepot.config import Config
from kvdepot.core.index.chunk import Namespace
from kvdepot.errors import ArenaError, Unavailable
from kvdepot.memory.allocator import Extents
from kvdepot.memory.records import SLOT_BYTES
from kvdepot.memory.shm import SHM
from kvdepot.protocol import wire
from kvdepot.tiers.worker import TierTask
from tests.sim.content import CHUNK_TOKENS, Model, chunk_image
from tests.sim.groups import Hybrid
from tests.sim.server import Server
from tests.sim.shared import ArenaFile
from tests.sim.tiers import Forgettings, Store
from tests.sim.world import Link, Network, Process, World

ARENA = "arena"
GONE_S = 3.0
"""So long after a server's end a client that pumps has given up every request."""
LOST_S = DEADLINE_S + 15.0
"""The same where an answer was lost with a connection: a client that recovers may wait for it until its deadline."""


class LivenessFile:
    """A client's liveness file: a page, and a lock that goes with its owner."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.secret = blake3(name.encode()).digest(16)
        self.locked = True
        self.left = False  # it was closed


class ClientLiveness:
    """The client's side of its liveness file, as shm.LivenessFile."""

    def __init__(self, host: Host, page: LivenessFile) -> None:
        self._host = host
        self.page = page
        self.name = page.name

    def close(self) -> None:
        self.page.locked, self.page.left = False, True
        self._host.liveness_files.pop(self.name, None)


class Watch:
    """As header.Watch: whether the server of one boot still holds the arena's lock."""

    def __init__(self, host: Host, name: str, boot: bytes) -> None:
        file = host.files.get(name)
        if file is None:
            raise ArenaError(f"shared memory {name} cannot be opened")
        if file.owner is None or file.boot != boot:
            raise Unavailable("another server owns the arena, or none")
        self.secret = file.secret
        self._file = file
        self._boot = boot

    def is_gone(self) -> bool:
        return self._file.owner is None or self._file.boot != self._boot

    def close(self) -> None:
        pass


@dataclass
class Asked:
    """A future, and when it must be done."""

    future: MessagingFuture[Any]
    what: str
    deadline: float
    server: Server | None  # who was there when it was asked


class Client(MessageQueueClient):
    """The real client and its recovery, on a link of the simulation."""

    def __init__(self, host: Host, process: Process, name: str) -> None:
        self.host = host
        self.name = name
        self.server_url = "sim://"
        self.arena_dir = SHM
        self._has_key = False
        self.process = process
        self.processes = [process]  # whose threads use it: the engine's, and its lane's
        page = host.new_liveness(f"card-{name}")
        self.liveness = ClientLiveness(host, page)  # type: ignore[assignment]
        self.chains = contract.PromptChains()
        self._closed = False
        self._inbox: list[bytes | bool] = []  # frames, and that the connection was made (True) or broke
        self._hears_events = host.world.seed % 4 != 0
        """Else it finds a broken connection out by what it sends, and by silence, as where nobody tells of it."""
        self._asked: list[Asked] = []
        self._boot_heard = b""
        self.lookup_boots: dict[str, bytes] = {}  # request id -> the server that answered its lookup
        self._state: tuple[Server | None, bool] = (None, False)  # the server, and whether it serves us well
        self._state_since = 0.0
        self._state_seen = 0  # looks at it, a quarter of a second apart
        self._next_seen = 0.0
        self._next_check = 0.0
        self.link = Link(host.network, name, name.encode(), self._arrived, self._changed)
        self._connection = Connection(
            self.server_url,
            Introduction(page.name, page.secret, others_between=lambda: sum(name.encode()) % 2 == 0),
            self.link.send,
            lambda arena, boot: Watch(host, arena, boot),
            self.now,
        )
        host.clients.append(self)

    def now(self) -> float:
        return self.host.world.now

    def ask(
        self, request: wire.Request, convert: Callable[[Any], Any] | None = None, deadline_s: float | None = DEADLINE_S
    ) -> MessagingFuture[Any]:
        lasts = deadline_s is None or isinstance(request, LASTING)
        due = float("inf") if lasts or deadline_s is None else self.now() + deadline_s
        if isinstance(request, wire.Lookup) and not request.hurries:
            due += self._connection.welcome.lookup_s

        def hear(value: Any) -> Any:
            if isinstance(request, wire.TakeLease):
                return value if convert is None else convert((self._boot_heard, value))
            if isinstance(request, wire.Lookup):
                self.lookup_boots[request.request] = self._boot_heard
            return value if convert is None else convert(value)

        future: MessagingFuture[Any] = MessagingFuture(self, hear)
        self._asked.append(Asked(future, type(request).__name__, due, self.host.server))
        self._connection.ask(request, future._finish, deadline_s)
        return future

    def ask_then(
        self, request: wire.Request, done: Callable[[object], None], deadline_s: float | None = DEADLINE_S
    ) -> None:
        self._connection.ask(request, done, deadline_s)

    def _arrived(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self._poke()

    def _changed(self, up: bool) -> None:
        if self._hears_events:
            self._inbox.append(up)
            self._poke()

    def _poke(self) -> None:
        for process in self.processes:
            process.poke()

    def hears(self) -> bool:
        """Whether something has arrived that nobody has taken."""
        return bool(self._inbox)

    def running(self) -> Process:
        """The process whose thread runs now."""
        return next(each for each in self.processes if each.is_current())

    def pump(self) -> None:
        if self._closed:
            return
        self._receive()
        connection = self._connection
        welcomed = connection.welcomed
        connection.expire()
        if welcomed and not connection.welcomed:
            self.host.world.counters["client_doubts_its_server"] += 1
        self._check()

    def _receive(self) -> None:
        while self._inbox and not self._closed:
            frame = self._inbox.pop(0)
            if isinstance(frame, bool):
                (self._connection.connected if frame else self._connection.disconnected)()
                continue
            self._boot_heard = frame[wire.ID_BYTES : wire.ID_BYTES + wire.BOOT_BYTES]
            met, waiting = self._connection.has_met, bool(self._connection.requests.parked)
            self._connection.take(frame)
            if met and waiting and not self._connection.requests.parked:
                self.host.world.counters["recovered_with_repeats"] += 1

    def _check(self) -> None:
        """Futures are done by their deadlines, and soon after the server's end."""
        now = self.now()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        host = self.host
        server = host.server
        state = server, server is not None and self.link.up and server.is_well() and not server.is_busy_for(self.link)
        if state != self._state:
            self._state, self._state_since, self._state_seen = state, now, 0
        elif now >= self._next_seen:
            self._state_seen += 1
            self._next_seen = now + 0.25
        # Nobody is there, or somebody else is who has nothing to do for us.
        limit_s = GONE_S if now - self.link.cut_at > LOST_S else LOST_S
        forlorn = (server is None or state[1]) and self._state_seen > 8 and now - self._state_since > limit_s
        self._asked = [asked for asked in self._asked if not asked.future._done]
        for asked in self._asked:
            # Connection.expire looks every CHECK_S.
            assert now < asked.deadline + CHECK_S + 1e-6, f"{self.name}: {asked.what} is not done at its deadline"
            assert not forlorn or not self._connection.has_met or asked.server is server is not None, (
                f"{self.name}: {asked.what} is not done {now - self._state_since:.1f} s after its server's end"
            )

    def pending(self) -> list[str]:
        """What is not done."""
        return [asked.what for asked in self._asked if not asked.future._done]

    def wait(self, done: Callable[[], bool], timeout_s: float, also: int | None = None) -> bool:
        def is_done() -> bool:
            self.pump()  # as the real one: `done` need not listen
            return done()

        if is_done() or self._closed:
            return done()
        return self.running().wait(is_done, timeout_s, CHECK_S) or is_done()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.close()
            self.gone()

    def gone(self) -> None:
        """The kernel's part when its process ends, and the end of a close."""
        self.liveness.page.locked = False
        if self._closed:
            self.liveness.close()
        self.link.close()
        if self in self.host.clients:
            self.host.clients.remove(self)


@dataclass
class Pinned:
    """What an engine holds to be pinned: a lookup has matched it, and its session has not ended."""

    boot: bytes
    model: Hybrid
    parts: list[tuple[int, bytes]]
    """KV cache groups and keys."""
    tenant: str
    asked: float
    """When: what was forgotten or found broken since then, no pin keeps."""
    ends: float = float("inf")


class Processes:
    """The processes of one life of an engine: its own, those of its links, and its workers' lanes."""

    process: Process
    clients: list[Client]

    def end(self) -> None:
        """Let others know that it has ended."""
        raise NotImplementedError

    def kill(self) -> None:
        self.kill_processes()
        self.end()

    def kill_processes(self) -> None:
        for process in self.processes:
            process.kill()

    @property
    def processes(self) -> list[Process]:
        return list(dict.fromkeys([self.process, *(each for client in self.clients for each in client.processes)]))


@dataclass
class Host:
    """One machine and all that happens on it."""

    world: World
    config: Config
    arena_bytes: int
    table_slots: int
    validate_every: int = 8
    files: dict[str, ArenaFile] = field(default_factory=dict)
    liveness_files: dict[str, LivenessFile] = field(default_factory=dict)
    truth: dict[tuple[bytes, bytes], tuple[Model, tuple[bytes, ...]]] = field(default_factory=dict)
    """(layout fingerprint, key) -> whose chunk it is, and the seeds of its blocks."""
    clients: list[Client] = field(default_factory=list)
    pins: list[Pinned] = field(default_factory=list)
    named: dict[str, Pinned] = field(default_factory=dict)
    """What is known to be pinned by name."""
    ends: dict[bytes, set[int]] = field(default_factory=dict)
    """Tokens at which requests have ended, by the key of the chunk before."""
    stores: list[Store] = field(default_factory=list)
    forgettings: Forgettings = field(default_factory=Forgettings)
    carried: dict[tuple[bytes, bytes, int], list[Extents]] = field(default_factory=dict)
    """What workers have copied whole: by a server's boot, client and operation."""
    server: Server | None = None
    down_since: float = 0.0
    # Faults that last for a while.
    shm_full: bool = False
    copy_failures: float = 0.0
    map_failures: float = 0.0
    copies_slow: bool = False
    at_copy: Callable[[str], None] | None = None
    """To happen once, in the middle of the next copy; told whose it is."""
    at_tier_task: tuple[type[TierTask], Callable[[], None]] | None = None
    """To happen once, in the middle of a tier's next tier task of that kind."""
    network_slow: bool = False
    tenants: dict[str, str] = field(default_factory=dict)
    """Whose the engines are, by the beginning of their clients' names."""

    def __post_init__(self) -> None:
        self.network = Network(self.world, self._delay_s)
        self.has_storms = self.world.seed % 8 == 6  # many requests of an engine come at once
        self.has_tenants = self.world.seed % 5 < 3

    def image(self, layout: bytes, key: bytes, rank: int) -> bytes | None:
        """The bytes with which a shard must begin; None: nobody has named its chunk."""
        truth = self.truth.get((layout, key))
        return None if truth is None else chunk_image(truth[0], rank, truth[1])

    def _delay_s(self) -> float:
        spread = self.world.spread
        return spread(0.001, 0.4) if self.network_slow else spread(0.00002, 0.002)

    def copy_s(self, slow: bool = False) -> float:
        """How long half a piece takes."""
        spread = self.world.spread
        return spread(0.005, 1.0) if slow or self.copies_slow else spread(0.00002, 0.005)

    def new_liveness(self, name: str) -> LivenessFile:
        """A client's page, which it holds from now on."""
        liveness = self.liveness_files[name] = LivenessFile(name)
        return liveness

    def start_server(self) -> None:
        if self.server is not None:
            return
        file = self.files.get(ARENA)
        if file is None:
            table = self.table_slots * SLOT_BYTES
            file = self.files[ARENA] = ArenaFile(ARENA, np.zeros(table + 64 + self.arena_bytes, np.uint8), table)
        for store in self.stores:
            if self.world.chance(0.3):
                store.configure()
        self.server = Server(self, file)

    def server_wants_to_stop(self) -> None:
        """No engine has used it for `idle_exit`."""

    def strike(self, kind: type[TierTask]) -> None:
        """A tier's thread is in the middle of a tier task."""
        if self.at_tier_task is not None and self.at_tier_task[0] is kind:
            act, self.at_tier_task = self.at_tier_task[1], None
            self.world.after(0, act)

    def check_pins(self, server: Server) -> None:
        """What engines know to be pinned is there, whole, on all ranks."""
        for name, pinned in list(self.named.items()):
            is_there = server.depot.leases._find(pinned.tenant, name) is not None
            if pinned.boot == server.boot and self.world.now < pinned.ends and not is_there:
                assert pinned.ends < float("inf"), f"{name} was leased without end, and nobody knows of it"
                ended = server.ended_leases.get((pinned.tenant, name))
                assert ended in ("made room", "quota lowered"), f"{name} was leased, and has ended: {ended}"
                del self.named[name]
        by_group: dict[tuple[str, str, int, int], list[Namespace]] = {}
        for each in server.index.namespaces.all() if self.pins or self.named else ():
            by_group.setdefault((each.tenant, each.model, each.world_size, each.group), []).append(each)
        for pinned in (*self.pins, *self.named.values()):
            if pinned.boot == server.boot and self.world.now < pinned.ends:
                model, ranks = pinned.model.name, pinned.model.world_size
                for group, key in pinned.parts:
                    namespaces = by_group.get((pinned.tenant, model, ranks, group), ())
                    chunks = [namespace.chunks[key] for namespace in namespaces if key in namespace.chunks]
                    assert server.condemned.get(key, 0.0) >= pinned.asked or any(c.sealed == ranks for c in chunks), (
                        f"chunk {key.hex()[:8]} of {model}, group {group}, was pinned, and is gone"
                    )


def new_config(chunk_tokens: int = CHUNK_TOKENS, **settings: Any) -> Config:
    return Config(url="ipc:///simulated", chunk_size=chunk_tokens, arena_name=ARENA, **settings)
