"""Stores behind memory, and a server's threads for them, on the simulation's clock.

A `Store` outlives servers, as a disk or a shared store does: real objects behind real faults. A `TierWorker` does what
tiers.worker.TierWorker does: it has the same number of threads, takes tier tasks in the same order, and does them with
the same code, each in steps of drawn length, between which anything may happen. `Forgettings` knows what must not come
back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.errors import KVDepotError
from kvdepot.memory.extents import checksum, views
from kvdepot.protocol.keys import tenant_salt
from kvdepot.tiers import TierConfig, parse
from kvdepot.tiers.codec import SLACK, make_codec
from kvdepot.tiers.format import HEADER_BYTES, NO_SALT, Header, ShardFacts
from kvdepot.tiers.stamps import Stamps
from kvdepot.tiers.worker import (
    MOST_PARTS,
    Enforce,
    Erase,
    Erased,
    Find,
    Forgotten,
    Load,
    Loaded,
    Located,
    Mover,
    NotLoaded,
    Part,
    Probe,
    Save,
    TierOutcome,
    TierTask,
    Unwanted,
    Written,
)  # fmt: skip
from tests.sim.content import Memory, chunk_image
from tests.tiers.faulty import FAULTS, MemoryTier

if TYPE_CHECKING:
    from tests.sim.server import Server
    from tests.sim.world import World

WALL = 1_790_000_000.0
"""Seconds since 1970 at the world's time 0."""
WRITES = ("through", "through", "on_evict", "on_evict", "off")
TENANTS = ("", "another")
"""Of engines."""
ShardName: TypeAlias = tuple[str, bytes, bytes, int]  # tenant, layout fingerprint, key, rank


@dataclass(eq=False)
class Store:
    """One tier's store."""

    world: World
    number: int
    config: TierConfig = field(init=False)
    tier: MemoryTier = field(init=False)
    hangs: bool = False
    slow: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Calls under way while it hangs."""

    def __post_init__(self) -> None:
        draw = self.world.random
        self.tier = MemoryTier(draw.choice([None, None, 60_000, 200_000]), draw.getrandbits(32))
        self.configure()

    def configure(self) -> None:
        """What the settings say of it; the next server may find them changed."""
        draw = self.world.random
        options = f"write={draw.choice(WRITES)}&threads={draw.randint(1, 3)}&queue_mib=1"
        ttl_s = draw.choice([0, 0, 0, 0, 3])
        config = parse(f"disk:///simulated-{self.number}?{options}&ttl_s={ttl_s}")
        if draw.random() < 0.1:  # a MiB is more than most runs ever store: a queue that is always full
            config = msgspec.structs.replace(config, options=msgspec.structs.replace(config.options, queue_mib=0))
        self.config = config

    def put(self, tenant: str, memory: Memory, key: bytes, salt: bytes, seeds: list[bytes]) -> Part:
        """Another host stores a chunk that it has computed. salt: the tag that its engine sends."""
        model, salt = memory.model, tenant_salt(tenant, salt)
        facts = ShardFacts(
            tenant,
            model.name,
            model.world_size,
            memory.rank,
            model.blocks_in_chunk,
            model.chunk_tokens,
            memory.layout.fingerprint,
        )
        data = chunk_image(model, memory.rank, tuple(seeds))
        part = Part(facts, salt, key, ((0, len(data)),), len(data), born=int(WALL + self.world.now))
        total = checksum(np.frombuffer(data, np.uint8), part.extents, part.size)
        header = Header(facts.digest, key, salt or NO_SALT, len(data), len(data), total, part.born)
        self.tier.put(part.name, header.pack(facts) + bytes(data), part.born)
        return part

    def hang(self) -> None:
        self.hangs = True

    def go_on(self) -> None:
        self.hangs = False
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            self.world.after(self.world.spread(0.0001, 0.05), call)

    def spoil(self) -> None:
        """Some faults, each now and then."""
        draw = self.world.random
        names = [name for name in FAULTS if draw.random() < 0.3]
        self.tier.inject(**{name: self.world.spread(0.02, 0.6) for name in names})

    def mix_up(self) -> bool:
        """Two objects change places; if it can be, two of one key."""
        by_key: dict[str, list[str]] = {}
        by_size: dict[str, list[str]] = {}
        for name, data in self.tier.objects.items():
            by_key.setdefault(f"{name.rpartition('/')[2].partition('.')[0]} {len(data)}", []).append(name)
            by_size.setdefault(str(len(data)), []).append(name)
        draw = self.world.random
        for groups in (by_key, by_size):
            alike = [names for names in groups.values() if len(names) > 1]
            if alike:
                one, other = draw.sample(draw.choice(alike), 2)
                objects = self.tier.objects
                objects[one], objects[other] = objects[other], objects[one]
                return True
        return False


@dataclass(eq=False)
class _Running:
    """A tier task that a thread is at."""

    tier_task: TierTask
    thread: int
    begun: bool = False  # some of a load's bytes lie in the arena
    ended: bool = False
    outcome: Any = None


class TierWorker:
    """One server's threads for one store."""

    def __init__(self, server: Server, store: Store, ttl_s: int) -> None:
        """ttl_s: after which objects count as gone; 0: never."""
        self.store = store
        self._server = server
        self._world = server.world
        self._ttl_s = ttl_s
        # One more than asked for, which takes no saves.
        self._idle = list(range(store.config.options.threads + 1))
        self._urgent: deque[TierTask] = deque()
        self._later: deque[TierTask] = deque()
        self._stopping = False
        self.running: list[_Running] = []
        self._heads = np.zeros((MOST_PARTS, HEADER_BYTES + SLACK), np.uint8)
        self._codec = make_codec(store.config.options)
        self._stamps = Stamps(self._codec)

    def submit(self, tier_task: TierTask) -> None:
        (self._urgent if isinstance(tier_task, Find | Load) else self._later).append(tier_task)
        self._start()

    def stop(self) -> None:
        """What waits is dropped; what is under way goes on."""
        self._stopping = True
        self._server.host.forgettings.excuse(self.unfinished())

    def unfinished(self) -> Iterator[TierTask]:
        """What waits, and what is under way."""
        yield from self._urgent
        yield from self._later
        for running in self.running:
            yield running.tier_task

    def _start(self) -> None:
        while self._idle and not self._stopping:
            if self._urgent:
                tier_task, thread = self._urgent.popleft(), self._world.random.choice(self._idle)
            elif self._later and (threads := [i for i in self._idle if i]):
                tier_task, thread = self._later.popleft(), threads[0]
            else:
                return
            self._idle.remove(thread)
            running = _Running(tier_task, thread)
            self.running.append(running)
            self._next(running)

    def _next(self, running: _Running) -> None:
        spread = self._world.spread
        dawdles = self.store.slow or self._world.chance(0.1 if isinstance(running.tier_task, Load) else 0.02)
        takes_s = spread(0.02, 3.0) if dawdles else spread(0.0001, 0.01)
        self._world.after(takes_s, self._server._event, self._advance, running)

    def _advance(self, running: _Running) -> None:
        """The next step: some bytes of a load; the call's end at the store; its end here."""
        if self.store.hangs:
            self._world.counters["errand_hung"] += 1
            self.store.waiting.append(lambda: self._server._event(self._advance, running))
            return
        tier_task = running.tier_task
        self._server.host.strike(type(tier_task))
        if running.ended:
            self._finish(running)
            return
        if isinstance(tier_task, Load):
            self._server.check_reserved(tier_task)
        elif isinstance(tier_task, Save) and not running.ended:
            self._server.check_saved(tier_task.parts)
        if isinstance(tier_task, Load) and not running.begun and self._world.chance(0.5):
            running.begun = True
            self._load_some(tier_task)
        else:
            running.ended = True
            running.outcome = self._run(tier_task)
        self._next(running)

    def _finish(self, running: _Running) -> None:
        self.running.remove(running)
        self._idle.append(running.thread)
        self._idle.sort()
        self._world.note(f"{self.store.config.name} {_short(running.tier_task)}: {_short_outcome(running.outcome)}")
        if isinstance(running.outcome, KVDepotError) and isinstance(running.tier_task, Erase):
            self._server.host.forgettings.excuse([running.tier_task])
        self._server.tier_task_ended(running.tier_task, running.outcome)
        self._start()

    def _run(self, tier_task: TierTask) -> TierOutcome:
        mover = Mover(self.store.tier, self._server, self._codec, self._heads, self._stamps, self._ttl_s)
        try:
            return mover.run(tier_task, WALL + self._world.now)
        except KVDepotError as exc:
            return exc

    def _load_some(self, load: Load) -> None:
        """A beginning of the bytes has arrived, and then whoever wants may stop the world."""
        memory = self._server.bytes
        cut = self._world.random.randrange(len(load.parts))
        later = []
        for i, part in enumerate(load.parts[cut:]):
            start = self._world.random.randrange(part.size) if not i else 0
            later += [(view, view.copy()) for view in views(memory, part.extents, start, part.size - start)]
        self._run(load)
        for view, before in later:
            view[:] = before


@dataclass(eq=False)
class Forgot:
    """One Forget as the server took it."""

    when: int
    tenant: str
    model: str
    salt: bytes
    clean: bool = False
    """Every tier has said that it is done."""
    through: bool = False
    """The server has gone through its memory. Before, it must give the forgotten chunks in memory to nobody."""
    void: bool = False
    """The server died before: its memory may come back."""

    def covers(self, where: Namespace | ShardFacts, salt: bytes) -> bool:
        return where.tenant == self.tenant and where.model.startswith(self.model) and self.salt in (b"", salt)


class Forgettings:
    """What was forgotten when, and when what came into being: from it follows what must not be there any more.

    Times are running numbers. A shard **arrives** in memory, from an engine or a tier; it is **stored** when it comes
    from an engine. Tiers may keep what they could not be told to erase: those objects are excused.
    """

    def __init__(self) -> None:
        self.all: list[Forgot] = []
        self._now = 0
        self._arrived: dict[tuple[int, bytes, int], int] = {}  # by number of the namespace, key, rank
        self._stored: dict[ShardName, int] = {}
        self._excused: set[str] = set()
        self._objects: dict[str, Part] = {}  # by name

    def begin(self, tenant: str, model: str, salt: bytes) -> Forgot:
        self._now += 1
        forgot = Forgot(self._now, tenant, model, tenant_salt(tenant, salt))
        self.all.append(forgot)
        return forgot

    def since(self, chunk: Chunk) -> int:
        """When the first of a chunk's shards that are in memory arrived."""
        number = chunk.namespace.number
        sealed = [rank for rank, shard in chunk.shards.items() if shard.sealed]
        return min((self._arrived[number, chunk.key, rank] for rank in sealed), default=self._now + 1)

    def may_be_given(self, namespace: Namespace, salt: bytes, since: int) -> bool:
        """Whether nobody has asked to forget what is in memory since then."""
        return not any(forgot.when > since and forgot.covers(namespace, salt) for forgot in self.all if not forgot.void)

    def arrived(self, chunk: Chunk, rank: int, from_tier: bool) -> None:
        self._now += 1
        self._arrived[chunk.namespace.number, chunk.key, rank] = self._now
        if not from_tier:
            self._stored[_shard(chunk, rank)] = self._now

    def saved(self, part: Part, elsewhere: bool = False) -> None:
        """elsewhere: by another host, which has computed it now."""
        if elsewhere:
            self._now += 1
            self._stored[_shard_of(part)] = self._now
        self._objects[part.name] = part
        self._excused.discard(part.name)

    def excuse(self, tier_tasks: Iterator[TierTask] | list[TierTask]) -> None:
        """These may or may not have happened."""
        for tier_task in tier_tasks:
            if isinstance(tier_task, Save):
                self._excused.update(part.name for part in tier_task.parts)
            elif isinstance(tier_task, Erase):
                self._excused.update(tier_task.names)

    def check_chunk(self, chunk: Chunk, rank: int) -> None:
        """A sealed shard in memory may be there."""
        if not self.all:
            return
        namespace = chunk.namespace
        arrived = self._arrived[namespace.number, chunk.key, rank]
        stored = self._stored[_shard(chunk, rank)]
        for forgot in self.all:
            if forgot.when > stored and forgot.covers(namespace, chunk.salt):
                gone = forgot.through and not forgot.void
                assert forgot.when < arrived or not gone, f"{chunk.key.hex()[:8]} was forgotten, and is still in memory"
                assert not forgot.clean or _name(chunk, rank) in self._excused, (
                    f"{chunk.key.hex()[:8]} was forgotten, and has come back from a tier"
                )

    def check_store(self, store: Store) -> None:
        """Every shard in a store may be there."""
        shards = store.tier.objects.keys() & self._objects.keys()  # without the stamps of writers
        for name in shards if self.all else ():
            part = self._objects[name]
            for forgot in self.all:
                late = (
                    forgot.clean
                    and forgot.when > self._stored[_shard_of(part)]
                    and forgot.covers(part.facts, part.salt)
                )
                assert not late or name in self._excused, f"{name} was forgotten, and is still in {store.config.name}"


def _shard(chunk: Chunk, rank: int) -> ShardName:
    return chunk.namespace.tenant, chunk.namespace.layouts[rank], chunk.key, rank


def _shard_of(part: Part) -> ShardName:
    return part.facts.tenant, part.facts.layout, part.key, part.facts.rank


def _name(chunk: Chunk, rank: int) -> str:
    namespace = chunk.namespace
    facts = ShardFacts(
        namespace.tenant,
        namespace.model,
        namespace.world_size,
        rank,
        namespace.blocks_in_chunk,
        namespace.chunk_tokens,
        namespace.layouts[rank],
    )
    return facts.name(chunk.salt or NO_SALT, chunk.key)


def new_stores(world: World) -> list[Store]:
    """Two, or in some runs one or none."""
    count = world.random.choice([0, 1, 2, 2, 2])
    return [Store(world, number) for number in range(count)]


def _short(tier_task: TierTask) -> str:
    match tier_task:
        case Find() | Erase():
            return f"{type(tier_task).__name__} {len(tier_task.names)}"
        case Load() | Save():
            return f"{type(tier_task).__name__} {' '.join(part.key.hex()[:4] for part in tier_task.parts)}"
        case Probe() | Enforce():
            return type(tier_task).__name__
    return f"Forget {tier_task.salt[:4]} {' '.join(namespace[:4] for namespace in tier_task.namespaces)}"


def _short_outcome(outcome: TierOutcome) -> str:
    match outcome:
        case Located():
            return "".join("+" if there else "x" for there in outcome.there)
        case Loaded():
            marks = {NotLoaded.ABSENT: "-", NotLoaded.CORRUPT: "x", NotLoaded.FORGOTTEN: "f"}
            return "".join(marks[shard] if isinstance(shard, NotLoaded) else "+" for shard in outcome.shards)
        case Written():
            return "".join("+" if kept else "x" for kept in outcome.kept)
        case Forgotten():
            return str(outcome.objects)
        case Erased():
            return "True"  # this and the next as in older logs, whose digests can so be compared
        case Unwanted():
            return "NoneType"
        case KVDepotError():
            return str(outcome)
    return type(outcome).__name__
