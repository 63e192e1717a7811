"""The threads of one tier: they move shards between the arena and the tier, and check what they read.

core/tiering/ decides their tasks; loads run before saves, and outcomes are reported on these threads. Invariant: an
object's bytes are used only if its header and checksum match.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvdepot.errors import ConfigError, InternalError, KVDepotError, TierError
from kvdepot.eviction.ages import SKEW_S
from kvdepot.logs import Sparing
from kvdepot.memory.allocator import Extents
from kvdepot.memory.extents import Memory, checksum, views
from kvdepot.protocol.quotas import shortest
from kvdepot.tiers import Blob, Enforcing, Tier, TierConfig, TierUsage
from kvdepot.tiers.codec import SLACK, Codec, make_codec
from kvdepot.tiers.format import HEADER_BYTES, NO_SALT, NO_STAMP, Header, ShardFacts
from kvdepot.tiers.rules import Rules
from kvdepot.tiers.stamps import Stamps

log = logging.getLogger(__name__)
sparing_log = Sparing(log)

Bytes = npt.NDArray[np.uint8]
_T = TypeVar("_T")

_OPEN_S = 1.0
"""Seconds that a starting server waits for a tier to open."""
MOST_PARTS = 16


@dataclass(slots=True)
class Part:
    """One shard to load or save: its identity, and its place in the arena.

    For a save only: checksum: of the KV; 0: not known yet. born: when the chunk was computed, in seconds since 1970.
    writer: who has stored the chunk; empty: not known.
    """

    facts: ShardFacts
    salt: bytes
    key: bytes
    extents: Extents
    size: int
    checksum: int = 0
    born: int = 0
    writer: str = ""

    @property
    def name(self) -> str:
        return self.facts.name(self.salt, self.key)


# -- tier tasks


LOOKUPS, READS, WRITES, REMOVALS = "lookups", "reads", "writes", "removals"
"""The kinds of call, as they are shown."""


@dataclass(slots=True, eq=False)
class _Task:
    """A call of a tier; core/tiering/ has subclasses with the purpose of the call. tier: the tier's number. kind: kind
    of the call; empty for a probe."""

    tier: int
    kind: ClassVar[str] = REMOVALS


@dataclass(slots=True, eq=False)
class Find(_Task):
    """Check which objects (facts, key) of a salt exist. Outcome: Located, or Unwanted."""

    kind = LOOKUPS

    objects: list[tuple[ShardFacts, bytes]]
    salt: bytes

    def is_wanted(self) -> bool:
        """Whether the answer is still awaited, asked when a tier's thread starts the task: otherwise, the store is not
        called."""
        return True

    @property
    def names(self) -> list[str]:
        return [facts.name(self.salt, key) for facts, key in self.objects]


@dataclass(slots=True, eq=False)
class Load(_Task):
    """Read shards into the arena. Outcome: Loaded."""

    kind = READS

    parts: list[Part]


@dataclass(slots=True, eq=False)
class Save(_Task):
    """Write shards. Outcome: Written."""

    kind = WRITES

    parts: list[Part]


@dataclass(slots=True, eq=False)
class Erase(_Task):
    """Remove objects. Outcome: Erased."""

    names: list[str]


@dataclass(slots=True, eq=False)
class ForgetSpaces(_Task):
    """Remove the objects of a salt and of namespaces (prefixes of the second part of names). Outcome: Forgotten.

    stamps: spaces of writers' stamps; if there are any, only objects of these writers are removed, and counted as none.
    """

    salt: str
    namespaces: list[str]
    stamps: list[str]


@dataclass(slots=True, eq=False)
class Probe(_Task):
    """Check whether the tier responds. Outcome: its TierUsage."""

    kind = ""


@dataclass(slots=True, eq=False)
class Enforce(_Task):
    """Let a local tier follow these rules, and remove what they do not allow. Outcome: Enforced."""

    rules: Rules


TierTask: TypeAlias = Find | Load | Save | Erase | ForgetSpaces | Probe | Enforce


# -- outcomes


class NotLoaded(Enum):
    ABSENT = "gone, expired, or not readable with this server's options"
    CORRUPT = "the object is damaged or is not this shard"
    FORGOTTEN = "what its writer had stored was forgotten"


class Located(msgspec.Struct, frozen=True):
    """Whether each object of the Find exists."""

    there: list[bool]


class Unwanted(msgspec.Struct, frozen=True):
    """The tier was not queried, because no lookup waited for the answer any more."""


class Loaded(msgspec.Struct, frozen=True):
    """The header of each part of the Load whose shard is in the arena, intact; otherwise the reason why it is not.

    took_s: seconds of the call, with decoding and checksums; 0: not measured.
    """

    shards: list[Header | NotLoaded]
    took_s: float = 0.0


class Written(msgspec.Struct, frozen=True):
    """Whether the tier has each part of the Save now. took_s: see `Loaded`."""

    kept: list[bool]
    took_s: float = 0.0


class Erased(msgspec.Struct, frozen=True):
    """The objects are gone for every read that starts from now on."""


class Forgotten(msgspec.Struct, frozen=True):
    """The number of objects that were removed."""

    objects: int


class Enforced(msgspec.Struct, frozen=True):
    """The rules hold for all writes. is_behind: there may be more to remove."""

    is_behind: bool


TierOutcome: TypeAlias = (
    Located | Unwanted | Loaded | Written | Erased | Forgotten | TierUsage | Enforced | KVDepotError
)
"""A KVDepotError: the task failed, and the state of its objects is unknown."""


class TierWorker:
    """One tier's threads. They call `report(tier_task, outcome)` for every finished task."""

    def __init__(
        self, config: TierConfig, arena: Memory, report: Callable[[TierTask, TierOutcome], None], codec: Codec
    ) -> None:
        """Open the tier, in the background if that takes long; if it fails, each task tries again. Raises
        ConfigError."""
        self._tier: Tier | None = None
        self._opening = threading.Lock()
        self._config = config
        self._arena = arena
        self._report = report
        self._codec = codec
        self._stamps = Stamps(codec)
        self._ready = threading.Condition()
        self._urgent: deque[TierTask] = deque()
        self._later: deque[TierTask] = deque()
        self._stopping = False
        # One more than asked for: the first takes no saves, so that no load waits behind them all.
        count = config.options.threads + 1
        heads = np.zeros((count, MOST_PARTS, HEADER_BYTES + SLACK), np.uint8)
        self._memory = [memoryview(arena.bytes.data).cast("B"), memoryview(heads.data).cast("B")]
        config.module()  # imported here, however long it takes: a wrong URL must be found while `wait` waits
        opened: Future[Tier] = Future()
        name = f"kvdepot-{config.kind}-open"
        threading.Thread(target=self._open_first, args=(opened,), name=name, daemon=True).start()
        wait([opened], _OPEN_S)
        if opened.done() and isinstance(refused := opened.exception(), ConfigError):
            raise refused
        opened.add_done_callback(self._log_refused)  # runs now, or when opening has failed
        self._threads = [
            threading.Thread(target=self._run, args=(heads[i], i > 0), name=f"kvdepot-{config.kind}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tier_task: TierTask) -> None:
        """Queue a tier task. The deciding thread bounds the queue."""
        with self._ready:
            (self._urgent if isinstance(tier_task, Find | Load) else self._later).append(tier_task)
            self._ready.notify_all()  # wakes all threads, as one of them takes no saves

    def stop(self, timeout_s: float) -> None:
        """Finish running tasks, drop queued ones, and end the threads. Blocks for at most `timeout_s`."""
        with self._ready:
            self._stopping = True
            self._urgent.clear()
            self._later.clear()
            self._ready.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self.is_busy() and self._tier is not None:
            self._tier.close()

    def is_busy(self) -> bool:
        """Whether a thread still runs after `stop`, and may yet touch the arena."""
        return any(thread.is_alive() for thread in self._threads)

    def _open_first(self, opened: Future[Tier]) -> None:
        try:
            opened.set_result(self._open())
        except BaseException as exc:  # noqa: BLE001 - the top of a thread
            opened.set_exception(self._failure("opening it", exc))

    def _log_refused(self, opened: Future[Tier]) -> None:
        if (refused := opened.exception()) is not None:
            log.warning("tier %s is unavailable: %s", self._config.name, refused)

    def _open(self) -> Tier:
        with self._opening:
            if self._tier is None:
                tier = self._config.open()
                tier.attach(self._memory)
                self._tier = tier
            return self._tier

    def _next(self, takes_saves: bool) -> TierTask | None:
        with self._ready:
            while not self._stopping:
                if self._urgent:
                    return self._urgent.popleft()
                if takes_saves and self._later:
                    return self._later.popleft()
                self._ready.wait()
            return None

    def _run(self, heads: Bytes, takes_saves: bool) -> None:
        ttl_s = shortest(self._config.options.ttl_s, self._config.rules.ttl_s)
        while (tier_task := self._next(takes_saves)) is not None:
            outcome: TierOutcome
            began = time.monotonic()
            try:
                mover = Mover(self._tier or self._open(), self._arena, self._codec, heads, self._stamps, ttl_s)
                outcome = mover.run(tier_task, time.time())
            except BaseException as exc:  # noqa: BLE001 - the top of a thread: it answers, whatever is raised
                kind = next(each for each in type(tier_task).__mro__ if each.__module__ == __name__)
                outcome = self._failure(kind.__name__, exc)
            if isinstance(outcome, Loaded | Written):
                outcome = msgspec.structs.replace(outcome, took_s=time.monotonic() - began)
            self._report(tier_task, outcome)

    def _failure(self, what: str, exc: BaseException) -> KVDepotError:
        """The error to answer, without secrets. Logs an error that is not of this package. (A panic of a library's Rust
        code is a BaseException.)"""
        if isinstance(exc, KVDepotError):
            return type(exc)(str(exc))
        # Not log.exception: a library's exceptions, and their causes, may quote what it was given.
        calls = traceback.extract_tb(exc.__traceback__)
        where = " > ".join(f"{Path(call.filename).name}:{call.lineno}" for call in calls)
        kind = type(exc).__name__
        sparing_log.error(
            "tier %s: %s failed: %s: %s (%s)", self._config.name, what, kind, self._config.redact(exc), where
        )
        return InternalError(f"{what}: {kind}")


def start_workers(
    tiers: Sequence[TierConfig], rules: Rules, arena: Memory, report: Callable[[TierTask, TierOutcome], None]
) -> list[TierWorker]:
    """Start one worker per tier; a tier that is unavailable now may open later. rules: what local tiers follow from the
    start. Raises ConfigError."""
    workers: list[TierWorker] = []
    try:
        for tier in tiers:
            ruled = msgspec.structs.replace(tier, rules=rules)
            workers.append(TierWorker(ruled, arena, report, make_codec(tier.options)))
            log.info("tier %s: write %s", tier.name, tier.options.write, extra={"tier": tier.name})
    except BaseException:
        for worker in workers:
            worker.stop(0.1)
        raise
    return workers


def _complete(asked: Sequence[object], answers: list[_T]) -> list[_T]:
    if len(answers) != len(asked):
        raise TierError(f"{len(answers)} answers for {len(asked)} objects")
    return answers


@dataclass(frozen=True, slots=True)
class Mover:
    """Does tier tasks on one thread. heads: scratch memory, uint8[MOST_PARTS, HEADER_BYTES + SLACK]. stamps: the stamps
    of `tier`. ttl_s: seconds after which shards count as absent; 0: never."""

    tier: Tier
    arena: Memory
    codec: Codec
    heads: Bytes
    stamps: Stamps
    ttl_s: int = 0

    def run(self, tier_task: TierTask, wall: float) -> TierOutcome:
        """Do one tier task at `wall` (seconds since 1970) and return its outcome. Blocks. Raises TierError."""
        tier = self.tier
        match tier_task:
            case Find():
                if not tier_task.is_wanted():
                    return Unwanted()
                return Located(_complete(tier_task.objects, tier.find(tier_task.names)))
            case Load():
                return Loaded(self._load(tier_task.parts, wall))
            case Save():
                return Written(self._save(tier_task.parts, wall))
            case Erase():
                tier.remove(tier_task.names)
                return Erased()
            case ForgetSpaces() if tier_task.stamps:
                self.stamps.remove(tier, tier_task.stamps)
                return Forgotten(0)
            case ForgetSpaces():
                return Forgotten(sum(tier.forget(tier_task.salt, namespace) for namespace in tier_task.namespaces))
            case Probe():
                return tier.usage()
            case Enforce():
                assert isinstance(tier, Enforcing), f"{tier!r} is not a local tier"
                return Enforced(tier.enforce(tier_task.rules, wall))

    def _kv(self, part: Part) -> list[memoryview]:
        return [view.data for view in views(self.arena.bytes, part.extents, 0, part.size)]

    def _load(self, parts: list[Part], wall: float) -> list[Header | NotLoaded]:
        if not all(self.arena.ensure(*extent) for part in parts for extent in part.extents):
            return [NotLoaded.ABSENT] * len(parts)  # no failure of the tier
        end = HEADER_BYTES + self.codec.slack
        blobs = [
            Blob(part.name, [head[:HEADER_BYTES].data, *self._kv(part), head[HEADER_BYTES:end].data])
            for part, head in zip(parts, self.heads, strict=False)
        ]
        sizes = _complete(parts, self.tier.read(blobs))
        headers = [self._accept(*read, wall) for read in zip(parts, blobs, sizes, strict=True)]
        return [self._admit(*each, wall) for each in zip(parts, headers, strict=True)]

    def _admit(self, part: Part, header: Header | NotLoaded, wall: float) -> Header | NotLoaded:
        """The header, with the name of the writer, if the tier still has its stamp."""
        if isinstance(header, NotLoaded):
            return header
        writer = self.stamps.writer_of(self.tier, part.facts, header.stamp, wall)
        return NotLoaded.FORGOTTEN if writer is None else msgspec.structs.replace(header, writer=writer)

    def _accept(self, part: Part, blob: Blob, size: int | None, wall: float) -> Header | NotLoaded:
        if size is None:
            return NotLoaded.ABSENT
        header = Header.unpack(blob.buffers[0]) if HEADER_BYTES <= size <= blob.size else None
        is_this = header is not None and header.names(part.facts, part.salt or NO_SALT, part.key, part.size)
        if header is None or not is_this or header.stored != size - HEADER_BYTES:
            return NotLoaded.CORRUPT
        if self.ttl_s and not -SKEW_S <= wall - header.born <= self.ttl_s:  # dates in the future say nothing of the age
            return NotLoaded.ABSENT
        if why := self.codec.why_not(header):
            if not self.codec.has_logged:
                self.codec.has_logged = True
                log.warning("%s and similar objects count as misses: %s", part.name, why)
            return NotLoaded.ABSENT
        if header.coding:
            if not self.codec.decode(header, blob.buffers[1:], self._kv(part)):
                return NotLoaded.CORRUPT
        elif header.stored != part.size:
            return NotLoaded.CORRUPT
        is_intact = checksum(self.arena.bytes, part.extents, part.size) == header.checksum
        return header if is_intact else NotLoaded.CORRUPT

    def _save(self, parts: list[Part], wall: float) -> list[bool]:
        blobs = []
        stamps = [self.stamps.for_save(self.tier, part.facts, part.writer, wall) for part in parts]
        kept = [stamp is not None for stamp in stamps]
        stamped = [each for each in zip(parts, stamps, strict=True) if each[1] is not None]
        for (part, stamp), head in zip(stamped, self.heads, strict=False):
            total = part.checksum or checksum(self.arena.bytes, part.extents, part.size)
            identity = part.facts.digest, part.key, part.salt or NO_SALT
            header = Header(*identity, part.size, part.size, total, part.born, stamp=stamp or NO_STAMP)
            first, *rest = self.codec.encode(header, part.facts, self._kv(part))
            head[:HEADER_BYTES] = np.frombuffer(first, np.uint8)  # memory that the tier knows (`attach`)
            blobs.append(Blob(part.name, [head[:HEADER_BYTES].data, *rest], part.born))
        answers = iter(_complete(blobs, self.tier.write(blobs) if blobs else []))
        return [is_stamped and next(answers) for is_stamped in kept]
