"""Requests to forget, clear and count: what is removed from memory, some chunks at a time, and what is answered.

Called by core/depot.py on the deciding thread; between two steps everything else is served. No I/O or clock. The one
law: what a removal that `hides` means is nobody's from the moment it begins, however long the removal takes, and what
is stored after that moment stays.

Chunks carry the number of removals that had begun when they came (`Chunk.generation`), and a removal means those from
before its own (`scope.Scope`). So the index can tell what is hidden without a mark on each, and whoever is in the way
of a store, or is to make room for one, goes at once (`Index.remove_forgotten`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_names, check_salt, tenant_salt
from kvdepot.core.clients import Client
from kvdepot.core.index.chunk import Chunk, Namespace, is_evictable
from kvdepot.core.index.index import Index
from kvdepot.core.index.outcomes import Reason
from kvdepot.core.index.scope import Scope
from kvdepot.core.report import SHOWN, Report
from kvdepot.core.sessions import Sessions
from kvdepot.core.tiering.forgetting import MOST_FORGETTINGS, Forgetting, NotForgotten
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.errors import Busy
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters

__all__ = ["STEP_CHUNKS", "Removal", "RemovalRequests", "Removals"]

STEP_CHUNKS = 256
"""So many chunks are looked at in one go: one or two milliseconds."""
_MOST = 16


@dataclass(slots=True, eq=False)
class Removal:
    """One that is under way. Where it hides, also what is held goes, once it is not; else that stays, and what it
    needs."""

    scope: Scope
    counts: bool  # nothing goes: `removed` is what would
    left: list[Chunk] = field(default_factory=list)  # to be looked at, from the end on
    counted_bytes: int = 0  # where it only counts

    @property
    def removed(self) -> int:
        """Chunks that were removed, hidden or counted so far."""
        return self.scope.removed


class Removals:
    """Those under way; the first goes first."""

    def __init__(self, index: Index, step_chunks: int = STEP_CHUNKS) -> None:
        self._index = index
        self._under_way: list[Removal] = []
        self.step_chunks = step_chunks

    def __repr__(self) -> str:
        return f"<Removals of {sum(len(removal.left) for removal in self._under_way)} chunks in {len(self)}>"

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, namespaces: Iterable[Namespace], salt: bytes | None, hides: bool, counts: bool = False) -> Removal:
        """Remove what is there now of these namespaces and of this salt, or count it. Nothing goes before `step`.

        Raises Busy with nothing done. The list of what is there is made at once: some ten milliseconds a million.
        """
        if len(self._under_way) >= _MOST:
            raise Busy(f"{len(self._under_way)} requests to forget or clear are under way: wait until they are through")
        removal = Removal(self._index.begin_removal(namespaces, salt, hides), counts)
        for namespace in removal.scope.namespaces:
            removal.left += namespace.chunks.values()
        self._under_way.append(removal)
        return removal

    def step(self) -> list[Removal]:
        """Go on; those that are through now."""
        through = []
        steps = self.step_chunks
        while self._under_way:
            removal = self._under_way[0]
            while removal.left and steps:
                steps -= 1
                # Those that came last are looked at first: what is behind a chunk came after it.
                self._look_at(removal.left.pop(), removal)
            if removal.left:
                break
            through.append(self._under_way.pop(0))
            self._index.end_removal(removal.scope)
        return through

    def _look_at(self, chunk: Chunk, removal: Removal) -> None:
        index, scope = self._index, removal.scope
        if removal.counts:
            if scope.means(chunk) and index.is_there(chunk):
                scope.removed += 1
                removal.counted_bytes += chunk.bytes
            return
        if chunk.gone or index.remove_forgotten(chunk) or scope.hides:
            return
        if not scope.means(chunk) or not is_evictable(chunk):
            return  # stored anew meanwhile, or held
        before = chunk.parent
        scope.removed += 1
        index.remove(chunk, Reason.DROPPED)
        if before is not None and scope.means(before):
            removal.left.append(before)  # it may have been looked at already, and kept for this one's sake


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that awaits the end of a removal."""

    client: Client
    number: bytes
    request: wire.Forget | wire.Clear | wire.Count
    forgetting: Forgetting | None = None  # of a Forget

    def reply(self, value: object) -> list[Action]:
        return [] if self.client.dead else [Reply(self.client.identity, self.number, value)]


class RemovalRequests:
    """Requests that remove chunks, from memory and tiers, or count what one would remove."""

    def __init__(
        self,
        config: Config,
        index: Index,
        removals: Removals,
        tiering: Tiering,
        sessions: Sessions,
        counters: Counters,
        report: Report,
    ) -> None:
        self._config = config
        self._index = index
        self._removals = removals
        self._tiering = tiering
        self._sessions = sessions
        self._counters = counters
        self._report = report
        self._removing: dict[Removal, _Asked] = {}  # what each removal is for
        self._forgetting: dict[Forgetting, _Asked] = {}  # and each forgetting, until it is answered

    def __repr__(self) -> str:
        return f"<RemovalRequests {len(self._removing)} removing, {len(self._forgetting)} forgetting>"

    def forget(self, client: Client, number: bytes, request: wire.Forget, now: float) -> list[Action]:
        """Forget in memory and tiers. Raises BadRequest, or Busy with nothing done."""
        namespaces, salt = self._named(client, request)
        if self._tiering.forgettings >= MOST_FORGETTINGS:
            raise Busy(f"{self._tiering.forgettings} models or salts are being forgotten: wait until they are")
        # Without keys there are no tenants; with them, a client may forget its own tenant's alone.
        tenant = client.tenant if self._config.keys or request.model else None
        forgetting = Forgetting(tenant, request.model, {namespace.model for namespace in namespaces}, salt)
        removal = self._removals.begin(namespaces, salt, hides=True)
        asked = _Asked(client, number, request, forgetting)
        self._removing[removal] = self._forgetting[forgetting] = asked
        self._sessions.forget()
        return [*self._tiering.forget(forgetting, now), *self.step()]

    def count(self, client: Client, number: bytes, request: wire.Count) -> list[Action]:
        """Count what a Forget would remove from memory. Raises BadRequest, or Busy with nothing done."""
        removal = self._removals.begin(*self._named(client, request), hides=False, counts=True)
        self._removing[removal] = _Asked(client, number, request)
        return self.step()

    def clear(self, client: Client, number: bytes, request: wire.Clear) -> list[Action]:
        """Remove from memory what nothing holds. Raises Busy with nothing done."""
        namespaces = [
            namespace
            for namespace in self._index.namespaces.all()
            if namespace.tenant == client.tenant and request.model in ("", namespace.model)
        ]
        removal = self._removals.begin(namespaces, None, hides=False)
        self._removing[removal] = _Asked(client, number, request)
        return self.step()

    def _named(self, client: Client, request: wire.Forget | wire.Count) -> tuple[list[Namespace], bytes | None]:
        """The namespaces and the salt that are meant, of the client's tenant; None: any salt. Raises BadRequest."""
        check_names("", request.model)
        check_salt(request.salt)
        salt = tenant_salt(client.tenant, request.salt) if request.salt else None
        tenants = [namespace for namespace in self._index.namespaces.all() if namespace.tenant == client.tenant]
        return [namespace for namespace in tenants if namespace.model.startswith(request.model)], salt

    def step(self) -> list[Action]:
        """Go on with what is being removed."""
        return [action for removal in self._removals.step() for action in self._through(removal)]

    def _through(self, removal: Removal) -> list[Action]:
        """Memory has been gone through."""
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
                self._report.note("forget", f"{what}: {chunks} chunks")
                assert asked.forgetting is not None
                is_last = self._tiering.forgotten_here(asked.forgetting, chunks)
                return self.answer(asked.forgetting) if is_last else []

    def answer(self, forgetting: Forgetting) -> list[Action]:
        """Memory and tiers have forgotten, or had their time."""
        return self._forgetting.pop(forgetting).reply(_answer(forgetting))


def _answer(forgetting: Forgetting) -> dict[str, int | str]:
    """What the wire carries of how it went (wire.Forget)."""
    answer: dict[str, int | str] = {"memory": forgetting.chunks or 0}
    for tier, objects in forgetting.objects.items():
        answer[tier] = f"not forgotten: {objects.reason}" if isinstance(objects, NotForgotten) else objects
    if trouble := forgetting.trouble():
        answer["error"] = trouble
    return answer
