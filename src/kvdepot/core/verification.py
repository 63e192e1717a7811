"""The results of comparing KV that engines computed with stored chunks: mismatches, and models in quarantine.

Called by core/transfers.py, when a comparison has ended, and by core/depot.py, on the deciding thread. An engine that
meets chunks of another for the first time compares some and draws its own consequences (integrations/vllm/trust.py). If
a sampled hit differs, the server draws them: lookups find no chunk of the model any more (quarantine). Nothing is
deleted, so that people can look at the chunks and end the quarantine. Invariant: a model in quarantine stays in it
until it is released, or the arena is gone.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Mapping

from kvdepot.core.clients import Client, CopyOperation
from kvdepot.core.index.chunk import Namespace, is_forgotten
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.core.report import SHOWN, Report
from kvdepot.core.usage import Usages
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.status import MOST_NAME, Mismatch, Status
from kvdepot.values import plural

log = logging.getLogger(__name__)

_MISMATCHES = 16
"""The number of a tenant's latest mismatches that the status lists."""
_QUIET_S = 60
"""Seconds after a mismatch in which another one of the same two engines is listed, but neither logged nor noted."""
_ENGINES = 256
"""The number of engines, the latest that registered, whose facts are remembered."""
_UNKNOWN = "unknown: stored by an earlier version, or by an engine that gives no name"


class Verification:
    def __init__(self, namespaces: Namespaces, counters: Counters, usages: Usages, report: Report) -> None:
        self.counters, self._usages = counters, usages
        self._namespaces, self._report = namespaces, report
        self._mismatches: deque[Mismatch] = deque()
        # By tenant and writer: the engine that has registered last, and its facts.
        self._facts: OrderedDict[tuple[str, str], tuple[str, dict[str, str]]] = OrderedDict()

    def learn(self, client: Client, request: wire.Register) -> None:
        """Remember the facts of an engine, to explain a later mismatch."""
        if request.writer:
            key = client.tenant, request.writer
            self._facts[key] = client.engine_called, {**request.facts, "host": client.host}
            self._facts.move_to_end(key)
            if len(self._facts) > _ENGINES:
                self._facts.popitem(last=False)

    def record(
        self, operation: CopyOperation, request: wire.Compare, differences: Mapping[int, list[float]]
    ) -> wire.Comparison:
        """Handle a comparison that has ended, and return its answer. differences: by number in `operation.chunks`."""
        worst: dict[int, float] = {}
        for i, (found, *_) in differences.items():
            chunk, rank = operation.chunks[i]
            if chunk.shards[rank].sealed and not is_forgotten(chunk):
                # Rounding decides which experts run: behind a prompt's first chunk, only infinite differences count.
                worst[i] = 0.0 if request.has_experts and chunk.position != 1 and found < math.inf else found
        there = [(found, i) for i, found in worst.items() if not math.isnan(found)]
        unknown = len(worst) - len(there)
        numbers = [part.depth + i + 1 for part in request.shards for i in range(len(part.hashes) // HASH_BYTES)]
        ends: dict[str, int] = {}
        for i in worst:
            chunk, rank = operation.chunks[i]
            ends[chunk.shards[rank].writer] = numbers[operation.positions[i]]  # the places ascend
        writers = tuple(wire.WriterRun(end, writer) for writer, end in ends.items())[: wire.MAX_WRITER_RUNS]
        if not there:
            return wire.Comparison(unknown=unknown, writers=writers)
        (found, i), differing = max(there), sum(found > request.limit for found, _ in there)
        chunk, rank = operation.chunks[i]
        self.counters["compared_chunks"] += len(there)
        self._usages.compare(chunk.namespace.tenant, chunk.namespace.model, len(there), differing)
        if differing:
            self.counters["differing_chunks"] += differing
            mismatch = self._describe(operation, chunk.shards[rank].writer)
            mismatch.model, mismatch.tenant = chunk.namespace.model, chunk.namespace.tenant
            mismatch.chunk, mismatch.rank, mismatch.is_sample = chunk.key.hex(), rank, request.is_sample
            mismatch.chunks, mismatch.worst = differing, min(found, 1e9)
            mismatch.limit = 1e8 if request.has_experts and chunk.position != 1 else request.limit
            mismatch.parts = [None if math.isnan(x) else min(x, 1e9) for x in differences[i][1:1025]]
            self._accuse(mismatch, chunk.namespace)
        return wire.Comparison(len(there), found, unknown, writers)

    def _describe(self, operation: CopyOperation, writer: str) -> Mismatch:
        """A mismatch between an operation's engine and the writer of a chunk, with the facts in which they differ."""
        tenant = operation.client.tenant
        (_, mine), (called, others) = (
            self._facts.get((tenant, each), ("", {})) for each in (operation.instance.writer, writer)
        )
        names = sorted(name for name in {*mine, *others} if mine.get(name) != others.get(name)) if others else []
        facts = [f"{name}: {mine.get(name, 'none')} | {others.get(name, 'none')}" for name in names]
        other = called or writer.partition(" ")[2] or writer or _UNKNOWN
        return Mismatch(
            wall_s=self._report.wall, engine=operation.client.engine_called, writer=other[:SHOWN], facts=facts
        )

    def _accuse(self, mismatch: Mismatch, namespace: Namespace) -> None:
        """Make a mismatch known, and put the model into quarantine if a sample has shown it."""
        own = [each for each in self._mismatches if each.tenant == mismatch.tenant]
        is_known = any(
            (each.model, each.engine, each.writer, each.is_sample)
            == (mismatch.model, mismatch.engine, mismatch.writer, mismatch.is_sample)
            and 0 <= mismatch.wall_s - each.wall_s < _QUIET_S
            for each in own
        )
        self._mismatches.appendleft(mismatch)
        if len(own) == _MISMATCHES:
            self._mismatches.remove(own[-1])
        consequence = "that engine no longer shares KV"
        if mismatch.is_sample:
            for each in self._namespaces.all():
                if (each.tenant, each.model) == (namespace.tenant, namespace.model):
                    self._namespaces.quarantine(each)
            consequence = "it is in quarantine: its chunks are misses until `kvdepot inspect --release` releases it"
        if is_known:
            return
        text = (
            f"KV of {mismatch.model[:SHOWN]} differs: {plural(mismatch.chunks, 'chunk')} by up to {mismatch.worst:.2g} "
            f"(limit {mismatch.limit:.2g}) between engine {mismatch.engine}, which computed it, and the one that "
            f"stored it ({mismatch.writer}); {consequence}"
        )
        facts = "; ".join(mismatch.facts) or "none that the engines reported"
        log.error("%s. Facts that differ: %s. Chunk %s, rank %d", text, facts, mismatch.chunk[:16], mismatch.rank)
        self._report.note("mismatch", text)

    def release(self, tenant: str, model: str) -> int:
        """End the quarantine of the models of a tenant (empty: of all) whose names begin so; returns their number."""
        held = [each for each in self._quarantined(tenant) if each.model.startswith(model)]
        for namespace in held:
            self._namespaces.release(namespace)
        released = {each.model for each in held}
        for name in released:
            self._report.note("release", f"the quarantine of {name[:SHOWN]} has ended")
        return len(released)

    def _quarantined(self, tenant: str) -> list[Namespace]:
        return [each for each in self._namespaces.all() if each.is_quarantined and tenant in ("", each.tenant)]

    def fill(self, status: Status, tenant: str) -> None:
        """Fill in the mismatches and quarantines that a tenant's client may see; empty: all of them."""
        status.mismatches = [each for each in self._mismatches if tenant in ("", each.tenant)]
        status.quarantined = sorted({each.model[:MOST_NAME] for each in self._quarantined(tenant)})
