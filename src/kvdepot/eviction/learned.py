"""The policy `learned`: evicts what is least likely to be used soon, and follows LRU where it has done better.

Two **shadows** (shadows.py) contain as many chunks as the cache: those that LRU would keep, and those that a policy
would keep that learns how soon chunks come back. So their misses on the same requests are known, and this policy
follows one of them, the **leader**. It evicts chunks that the leader does not contain, in the order in which the leader
evicted them. After a change, the cache moves to the new leader's chunks as new chunks need space.

The leader is the shadow with the fewest misses in the last few turnovers of the cache. The first leader is the shadow
that learns, or LRU if there is room for few prompts. But once this policy itself has had more misses than LRU, by 0.2 %
and by a hundredth of the chunks, it follows LRU. It does so until half of this excess is made up for, or the learning
shadow has a clear lead. In small caches, a lead must be at least the misses of a few requests.

Nothing depends on the time: the same calls give the same evictions, as long as no two keys are confused (runs.py).

**Known weaknesses.** The hits that LRU gains before it leads are lost, and a change of leader costs up to as many
misses as there are chunks. So in traces of a few turnovers, the hit rate can be a point below that of LRU, mostly in a
cache for a few dozen prompts. If chunks differ in size, or many are pinned, the shadows are inexact, because they count
chunks and know no pins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import exp, inf

from kvdepot.eviction.hazards import EPOCHS
from kvdepot.eviction.policy import Victim
from kvdepot.eviction.runs import Links, Runs
from kvdepot.eviction.shadows import LearningShadow, LruShadow, Shadow

__all__ = ["Learned"]

_RECENT = exp(-1 / (4 * EPOCHS))
_LONG = exp(-1 / (100 * EPOCHS))
"""The shares of counts of misses that are left after an epoch: they matter for 4 turnovers, or for 100."""
_LEAD, _CLEAR_LEAD = 0.002, 0.04
"""The leads in recent misses, per chunk, that make a shadow the leader: normally, and after the budget is spent."""
_BUDGET, _ALLOWANCE = 0.002, 0.01
"""The misses that this policy may have beyond those of LRU: per miss of its own, and per chunk."""
_CHANCE, _MOST = 4.0, 0.05
"""Lead and allowance are at least `_CHANCE` runs of missing chunks, because less is chance, but at most the share
`_MOST` of the chunks."""
_FEW = 48
"""With room for fewer runs than this, LRU is the first leader, because the first measurements are chance."""
_PASSED_OVER = 64
"""The most queued chunks that the search for one victim passes over."""
_MOST_USES = 64
"""The most uses that wait until the next other call."""
_RUN_HASHES, _MOST_HASHES = 25, 40
"""The memory of a run, and the most memory of all runs per existing chunk, in hashes of 4 bytes."""
_AT_ONCE = 16
"""The most chunks that a shadow evicts at once, at most a 256th of all."""


class Learned:
    """Follows the better of LRU and the learning shadow."""

    def __init__(self) -> None:
        self._runs = runs = Runs()
        self._lru = LruShadow(runs)
        self._learning = LearningShadow(runs)
        self._shadows: tuple[Shadow, Shadow] = (self._lru, self._learning)
        self._leader: Shadow = self._learning
        self._epoch = self._learning.epoch
        self._misses = 0.0  # misses of this policy, as `Shadow.misses`
        self._entered = 0
        self._missing_runs = 0.0  # runs of missed chunks; a chunk whose key was known counts as a run
        self._is_behind = False  # the budget is spent, and LRU leads
        self._is_first = True  # no leader has been chosen yet
        self._is_new = True  # no leader has been chosen in this request yet
        self._born: Victim | None = None  # the last new chunk of the current request, if its key was not known
        self._within: Victim | None = None  # the last chunk of the current request, if it is within a run
        self._uses: list[Victim] = []  # uses that the shadows have not seen yet
        self._chunks = 0
        self._known = 0  # chunks in `_runs`
        self._room: float = inf  # the number of chunks that fit, as far as known
        self._has_grown = False  # chunks were inserted since the last eviction
        # By run: its last chunk. (Plain dicts would find their first key by skipping all deleted keys.)
        self._queued: OrderedDict[int, Victim] = OrderedDict()
        self._outside: OrderedDict[int, None] = OrderedDict()  # runs that the leader evicted from, in this order
        self._unseen = 0  # queued runs that may be outside too, since the leader changed
        self._gone = runs.column("I")  # chunks of each run that do not exist and that no shadow contains
        self._gone_count = 0  # the sum of `_gone`
        self._gone_links = Links(runs)
        self._gone_runs = self._gone_links.make(runs.new())  # oldest first, hence a run before its parent

    @property
    def queued(self) -> int:
        return len(self._queued)

    def insert(self, chunks: Sequence[Victim]) -> None:
        self._settle()
        self._chunks += len(chunks)
        self._has_grown = True
        self._entered += len(chunks)
        at = 0
        while at < len(chunks):
            chunk = chunks[at]
            before: Victim | None = chunk.parent
            at += 1
            if before is None or before is not self._born or before.key == chunk.key:
                self._begin(chunk, before)
                continue
            first = at - 1
            while at < len(chunks) and chunks[at].parent is chunks[at - 1]:  # others have stored the chunks in a gap
                at += 1
            self._extend(before, chunks[first:at])
        for shadow in self._shadows:
            if shadow.count > self._room:
                self._shrink(shadow, self._room)

    def _extend(self, last: Victim, chunks: Sequence[Victim]) -> None:
        """Insert chunks behind `last`, which never had a chunk behind it."""
        run, number = last.place, last.number
        self._runs.extend(run, chunks)
        self._known += len(chunks)
        for chunk in chunks:
            number += 1
            chunk.place, chunk.number = run, number
        self._lru.extend(run, len(chunks))
        self._learning.extend(run, len(chunks))
        self._born = chunks[-1]

    def _begin(self, chunk: Victim, before: Victim | None) -> None:
        """Insert a chunk whose key may be known, or that begins a run."""
        self._is_new = True
        self._missing_runs += 1
        self._born = None
        if self._within is not before:
            self._end_request()
        run = self._enter(chunk, before)
        runs = self._runs
        count = runs.real[run]
        for shadow in self._shadows:
            shadow.insert(run, count)
        self._note_gone(run)
        self._within = chunk if count < runs.size[run] else None

    def _enter(self, chunk: Victim, before: Victim | None) -> int:
        """Add a chunk that now exists to a run; returns the run."""
        runs = self._runs
        parent = before.place if before is not None else 0
        is_part = before is not None and before.key == chunk.key
        chunk.number = before.number + 1 if before is not None and parent else 0
        if parent and before is not None:
            count = chunk.number - runs.start[parent]
            if count < runs.size[parent]:
                if runs.real[parent] == count and not is_part and runs.is_next(parent, chunk.key):
                    runs.real[parent] += 1
                    chunk.place = parent
                    return parent
                parent = self._split(before, count)
        run = runs.find(chunk.key, is_part, parent)
        if run:
            runs.real[run] = 1
        else:
            run = runs.enter(chunk.key, is_part, parent, chunk.number)
            self._known += 1
            self._learning.note_new(run, is_part)
            self._born = None if is_part else chunk
        chunk.place = run
        return run

    def use(self, chunk: Victim) -> None:
        self._uses.append(chunk)  # a lookup waits for this call, so the work is left to the next call
        if len(self._uses) == _MOST_USES:
            self._settle()

    def _settle(self) -> None:
        """Show the waiting uses to the shadows, in their order. Every other call begins with this."""
        if self._uses:
            uses, self._uses = self._uses, []
            for chunk in uses:
                self._use(chunk)

    def _use(self, chunk: Victim) -> None:
        self._is_new = True
        self._born = None
        if self._within is not None:
            self._end_request()
        run, runs = chunk.place, self._runs
        count = chunk.number - runs.start[run] + 1
        if count < runs.size[run]:
            run = self._split(chunk, count)
        for shadow in self._shadows:
            shadow.use(run)
            if shadow.count > self._room:
                self._shrink(shadow, self._room)
        if self._gone[run] or runs.real[run] < runs.size[run]:
            self._note_gone(run)

    def add(self, chunk: Victim) -> None:
        self._settle()
        run = chunk.place
        if chunk.queued or chunk.number - self._runs.start[run] + 1 < self._runs.real[run]:
            return  # other chunks of its run are behind it
        old = self._queued.get(run)
        if old is not None:
            old.queued = False  # it is not its run's last chunk any more
        chunk.queued = True
        self._queued[run] = chunk
        if self._leader.held[run] < self._runs.real[run]:
            self._outside[run] = None
            self._outside.move_to_end(run, last=False)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        self._settle()
        if self._has_grown:  # the first eviction for a run; later ones make room for the same run
            self._room, self._has_grown = self._chunks, False
        if self._is_new:
            self._is_new = False
            leader = self._choose()
            if leader is not self._leader:
                self._leader = leader
                self._outside.clear()
                self._unseen = len(self._queued)
        while self._queued:
            chunk = self._queued[self._next()]
            self._leave(chunk)
            if not chunk.gone and evictable(chunk):
                return chunk
        return None

    def _next(self) -> int:
        """The queued run to evict from: a run of which the leader contains fewer chunks than exist.

        After a change of leader, this searches for such runs, a few at a time. If there is none, the leader evicts
        too.
        """
        real, held, outside, queued = self._runs.real, self._leader.held, self._outside, self._queued
        if self._unseen:
            for _ in range(min(self._unseen, _PASSED_OVER)):
                self._unseen -= 1
                run = next(iter(queued))
                if held[run] < real[run]:
                    return run
                queued.move_to_end(run)
        for _ in range(_AT_ONCE):
            while outside:
                run = next(iter(outside))
                if held[run] < real[run]:
                    return run
                del outside[run]
            self._shrink(self._leader, max(0, self._leader.count - 1 - min(self._chunks >> 8, _AT_ONCE)))
        return next(iter(queued))  # all other chunks are held, or chunks differ in size

    def remove(self, chunk: Victim, evicted: bool) -> None:
        self._settle()
        self._chunks -= 1
        if chunk.queued:
            self._leave(chunk)
        if chunk is self._born:
            self._born = None
        if chunk is self._within:
            self._within = None
        runs = self._runs
        count = chunk.number - runs.start[chunk.place] + 1
        if count < runs.real[chunk.place]:  # the chunks behind it stay, and it becomes a run of its own
            self._split(chunk, count)
            if count > 1:
                assert chunk.parent is not None
                self._split(chunk.parent, count - 1)
                count = 1
        run, chunk.place = chunk.place, 0
        runs.real[run] -= 1
        if not evicted:
            for shadow in self._shadows:
                shadow.drop(run, count)
        self._note_gone(run)
        if self._excess() > 0:
            self._forget()

    def _leave(self, chunk: Victim) -> None:
        chunk.queued = False
        del self._queued[chunk.place]
        self._outside.pop(chunk.place, None)

    def _end_request(self) -> None:
        chunk = self._within
        if chunk is not None:
            count = chunk.number - self._runs.start[chunk.place] + 1
            if count < self._runs.size[chunk.place]:
                self._split(chunk, count)
            self._within = None

    def _split(self, last: Victim, count: int) -> int:
        """Make the first `count` chunks of a run, up to `last`, a new run, and return it."""
        run = last.place
        head = self._runs.split(run, count)
        for shadow in self._shadows:
            shadow.split(run, head, last is self._within)
        chunk: Victim | None = last
        for _ in range(count):
            assert chunk is not None
            chunk.place, chunk = head, chunk.parent
        queued = self._queued.pop(run, None)
        was_outside = self._outside.pop(run, 0) is None
        if queued is not None:
            self._queued[queued.place] = queued
            if was_outside:
                self._outside[queued.place] = None
        self._note_gone(run)
        return head

    def _shrink(self, shadow: Shadow, count: float) -> None:
        while shadow.count > count:
            run = shadow.evict(int(shadow.count - count))
            if not run:
                return
            self._note_gone(run)
            if shadow is self._leader and run in self._queued:
                self._outside[run] = None

    def _choose(self) -> Shadow:
        """Choose the leader, with new counts of misses if an epoch has ended."""
        lru, learning = self._lru, self._learning
        if self._epoch != learning.epoch:
            self._epoch = learning.epoch
            self._misses = _LONG * (self._misses + self._entered)
            self._entered = 0
            self._missing_runs *= _LONG
            for shadow in self._shadows:
                shadow.age(_LONG, _RECENT)
        own = self._misses + self._entered
        run = own / max(1.0, self._missing_runs)
        chance = min(_CHANCE * run, _MOST * self._chunks)
        budget = _BUDGET * own + max(_ALLOWANCE * self._chunks, chance)
        behind = own - lru.misses - lru.entered
        self._is_behind = behind > (budget / 2 if self._is_behind else budget)
        lead = lru.recent_misses + lru.entered - learning.recent_misses - learning.entered
        if self._is_behind and lead <= _CLEAR_LEAD * self._chunks:
            return lru
        if self._is_first:
            self._is_first = False
            return lru if self._chunks < _FEW * run else learning
        if abs(lead) > max(_LEAD * self._chunks, chance):
            return learning if lead > 0 else lru
        return self._leader

    # -- ghosts

    def _note_gone(self, run: int) -> None:
        """Count the chunks of a run that do not exist and that no shadow contains."""
        runs = self._runs
        gone = runs.size[run] - max(runs.real[run], self._lru.held[run], self._learning.held[run])
        if gone != self._gone[run]:
            self._gone_count += gone - self._gone[run]
            if not gone:
                self._gone_links.unlink(run)
            elif not self._gone[run]:
                self._gone_links.append(self._gone_runs, run)
            self._gone[run] = gone

    def _excess(self) -> int:
        """The memory of all runs beyond the limit, in hashes of 4 bytes."""
        return _RUN_HASHES * self._runs.used + self._known - _MOST_HASHES * self._chunks

    def _forget(self) -> None:
        """Forget chunks that do not exist and that no shadow contains, ends first, while runs take too much memory."""
        runs, links = self._runs, self._gone_links
        while self._gone_count and (excess := self._excess()) > 0:
            run = links.first(self._gone_runs)
            count = min(self._gone[run], excess)
            if count == runs.size[run] and runs.children[run]:  # its chunk failed, but chunks behind it exist
                self._gone_count -= self._gone[run]
                self._gone[run] = 0
                links.unlink(run)
                continue
            self._gone_count -= count
            self._known -= count
            self._gone[run] -= count
            for shadow in self._shadows:
                shadow.forget(run, count)
            if not self._gone[run]:
                links.unlink(run)
            if count < runs.size[run]:
                runs.shorten(run, count)
            else:
                parent = runs.parent[run]
                runs.free(run)
                if parent:
                    self._note_gone(parent)
