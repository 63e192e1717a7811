"""Handles Forget, Clear and Count: removes or counts chunks in memory, some at a time, and replies at the end.

Called by core/depot.py on the deciding thread, which serves other requests between steps. No I/O or clock. Invariant:
once a removal that `hides` begins, nobody gets a chunk that it covers, however long it takes; chunks stored later stay.

Each chunk carries the number of removals that had begun when it was created (`Chunk.generation`), and a removal covers
only older chunks (`Scope`). So the index knows what is hidden without marking every chunk, and a covered chunk
that blocks a store, or is evicted for one, is removed at once (`Index.remove_forgotten`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_names, check_salt
from kvdepot.core.clients import Client
from kvdepot.core.index.chunk import Chunk, Namespace, Scope, State, is_evictable, is_there
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index
from kvdepot.core.leases import Leases
from kvdepot.core.report import SHOWN, Report
from kvdepot.core.sessions import Sessions
from kvdepot.core.tiering.forgetting import MOST_FORGETTINGS, Forgetting, NotForgotten
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.errors import Busy
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.keys import tenant_salt
from kvdepot.values import plural

__all__ = ["STEP_CHUNKS", "Removal", "RemovalRequests", "Removals"]

STEP_CHUNKS = 256
"""Chunks that one step examines, in one or two milliseconds."""
_MOST = 16  # removals at a time


@dataclass(slots=True, eq=False)
class Removal:
    """One removal in progress. If it hides, held chunks are removed once released; otherwise held chunks stay, and so
    do the chunks before them."""

    scope: Scope
    counts: bool  # removes nothing: `removed` counts what a removal would remove
    left: list[Chunk] = field(default_factory=list)  # still to examine, last one first
    counted_bytes: int = 0  # if it only counts

    @property
    def removed(self) -> int:
        """Number of chunks removed, hidden or counted so far."""
        return self.scope.removed


class Removals:
    """The removals in progress, handled one after the other."""

    def __init__(self, index: Index, step_chunks: int = STEP_CHUNKS) -> None:
        self._index = index
        self._under_way: list[Removal] = []
        self.step_chunks = step_chunks

    def __repr__(self) -> str:
        return f"<Removals of {sum(len(removal.left) for removal in self._under_way)} chunks in {len(self)}>"

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, namespaces: Iterable[Namespace], salt: bytes | None, hides: bool, counts: bool = False) -> Removal:
        """Begin to remove, or count, the current chunks of these namespaces and this salt (None: any salt).

        `step` does the removing; this only lists the chunks, which takes some ten milliseconds per million. Raises
        Busy, and then changes nothing.
        """
        if len(self._under_way) >= _MOST:
            raise Busy(f"{len(self._under_way)} requests to forget, clear or count are in progress: retry later")
        removal = Removal(self._index.namespaces.begin_removal(namespaces, salt, hides), counts)
        for namespace in removal.scope.namespaces:
            removal.left += namespace.chunks.values()
        self._under_way.append(removal)
        return removal

    def step(self) -> list[Removal]:
        """Examine up to `step_chunks` chunks; returns the removals that this has finished."""
        through = []
        steps = self.step_chunks
        while self._under_way:
            removal = self._under_way[0]
            while removal.left and steps:
                steps -= 1
                # The newest chunk first: the chunks behind a chunk are newer than it.
                self._look_at(removal.left.pop(), removal)
            if removal.left:
                break
            through.append(self._under_way.pop(0))
            self._index.namespaces.end_removal(removal.scope)
        return through

    def _look_at(self, chunk: Chunk, removal: Removal) -> None:
        index, scope = self._index, removal.scope
        if removal.counts:
            if scope.means(chunk) and is_there(chunk):
                scope.removed += 1
                removal.counted_bytes += chunk.bytes
            return
        if chunk.gone or index.remove_forgotten(chunk) or scope.hides:
            return
        if not scope.means(chunk) or not is_evictable(chunk):
            return  # stored anew in the meantime, or held
        before = chunk.parent
        while before is not None and before.state is State.PENDING_REMOVAL:
            before = before.parent  # those in between go with the last chunk behind them
        scope.removed += 1
        index.remove(chunk, Reason.DROPPED)
        if before is not None and scope.means(before):
            removal.left.append(before)  # it may have been kept only because of this chunk


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that waits for the end of a removal."""

    client: Client
    number: bytes
    request: wire.Forget | wire.Clear | wire.Count
    forgetting: Forgetting | None = None  # of a Forget

    def reply(self, value: object) -> list[Action]:
        return [] if self.client.dead else [Reply(self.client.identity, self.number, value)]


class RemovalRequests:
    """Requests that remove chunks from memory and tiers, or count what a removal would remove."""

    def __init__(
        self,
        config: Config,
        index: Index,
        removals: Removals,
        tiering: Tiering,
        sessions: Sessions,
        leases: Leases,
        counters: Counters,
        report: Report,
    ) -> None:
        self._config = config
        self._index = index
        self._removals = removals
        self._tiering = tiering
        self._sessions = sessions
        self._leases = leases
        self._counters = counters
        self._report = report
        self._removing: dict[Removal, _Asked] = {}  # the request behind each removal
        self._forgetting: dict[Forgetting, _Asked] = {}  # and behind each forgetting, until it is answered

    def __repr__(self) -> str:
        return f"<RemovalRequests {len(self._removing)} removing, {len(self._forgetting)} forgetting>"

    def forget(self, client: Client, number: bytes, request: wire.Forget, now: float) -> list[Action]:
        """Forget chunks in memory and tiers. Raises BadRequest or Busy, and then changes nothing."""
        namespaces, salt = self._named(client, request)
        if self._tiering.forgettings >= MOST_FORGETTINGS:
            raise Busy(f"tiers are forgetting {self._tiering.forgettings} models or salts: retry later")
        # Without keys there are no tenants; with keys, a client may only forget chunks of its own tenant.
        tenant = client.tenant if self._config.keys or request.model else None
        forgetting = Forgetting(tenant, request.model, {namespace.model for namespace in namespaces}, salt)
        removal = self._removals.begin(namespaces, salt, hides=True)
        asked = _Asked(client, number, request, forgetting)
        self._removing[removal] = self._forgetting[forgetting] = asked
        self._leases.forget()
        actions = self._sessions.forget(now)
        return [*actions, *self._tiering.forget(forgetting, now), *self.step()]

    def count(self, client: Client, number: bytes, request: wire.Count) -> list[Action]:
        """Count what a Forget would remove from memory. Raises BadRequest or Busy."""
        removal = self._removals.begin(*self._named(client, request), hides=False, counts=True)
        self._removing[removal] = _Asked(client, number, request)
        return self.step()

    def clear(self, client: Client, number: bytes, request: wire.Clear) -> list[Action]:
        """Remove all chunks that nothing holds from memory. Raises Busy, and then changes nothing."""
        namespaces = [
            namespace
            for namespace in self._index.namespaces.all()
            if namespace.tenant == client.tenant and request.model in ("", namespace.model)
        ]
        removal = self._removals.begin(namespaces, None, hides=False)
        self._removing[removal] = _Asked(client, number, request)
        return self.step()

    def _named(self, client: Client, request: wire.Forget | wire.Count) -> tuple[list[Namespace], bytes | None]:
        """The request's namespaces and salt within the client's tenant; None: any salt. Raises BadRequest."""
        check_names("", request.model)
        check_salt(request.salt)
        salt = tenant_salt(client.tenant, request.salt) if request.salt else None
        tenants = [namespace for namespace in self._index.namespaces.all() if namespace.tenant == client.tenant]
        return [namespace for namespace in tenants if namespace.model.startswith(request.model)], salt

    def step(self) -> list[Action]:
        """Continue the removals, and reply to requests whose removal has ended."""
        return [action for removal in self._removals.step() for action in self._through(removal)]

    def _through(self, removal: Removal) -> list[Action]:
        """A removal has ended in memory."""
        asked, chunks = self._removing.pop(removal), removal.removed
        match asked.request:
            case wire.Clear():
                self._counters["cleared_chunks"] += chunks
                return asked.reply(None)
            case wire.Count():
                return asked.reply([chunks, removal.counted_bytes])
            case wire.Forget(model, salt):
                self._counters["forgotten_chunks"] += chunks
                what = f"{model[:SHOWN] or 'every model'}{', one salt' if salt else ''}"
                self._report.note("forget", f"forgot {plural(chunks, 'chunk')} of {what}")
                assert asked.forgetting is not None
                is_last = self._tiering.forgotten_here(asked.forgetting, chunks)
                return self.answer(asked.forgetting) if is_last else []

    def answer(self, forgetting: Forgetting) -> list[Action]:
        """Reply to a Forget: memory and tiers are done, or its time is up."""
        return self._forgetting.pop(forgetting).reply(_answer(forgetting))


def _answer(forgetting: Forgetting) -> dict[str, int | str]:
    """The reply to a Forget; see wire.Forget."""
    answer: dict[str, int | str] = {"memory": forgetting.chunks or 0}
    for tier, objects in forgetting.objects.items():
        answer[tier] = f"not forgotten: {objects.reason}" if isinstance(objects, NotForgotten) else objects
    if trouble := forgetting.trouble():
        answer["error"] = trouble
    return answer
