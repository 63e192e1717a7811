"""Events as engines send them: what each engine of this host can load, as if the engine itself published it.

Used by publisher.py, on its thread. Each topic stands for an engine (or for all engines of a host, if they name the
same). Routers compute their own keys from token ids, so a chunk is **credited** to the engines only once one of them
has described it (wire.Describe). Descriptions prove themselves: token ids are accepted only if they give the chunk's
key, in a chain from the root of prompts that depend on tokens alone. Invariants: whatever is credited, its parent is,
too, and was before it; each chunk is stored and removed in turn, because routers count.

A topic is also the engine's own, whose chunks on the GPU the depot does not know. So chunks are taken back one by one,
with their medium, never by `AllBlocksCleared`; only a listing for a subscriber that has lost messages begins with it.
Events are arrays with their type first, as in vLLM before 0.32: routers read these in all versions.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvdepot.core.index.chunk import Namespace
from kvdepot.kv_events.feed import Change, Topics
from kvdepot.protocol.keys import ROOT, split_tokens
from kvdepot.protocol.wire import Describe

BATCH = 128
"""The most changes that `EngineView.apply` is given, and the most chunks in one message."""
TOPIC = b"kvdepot"
"""The topic of heartbeats while no engine names one."""
_MEDIUM = "CPU"
_MOST_BYTES = 128 << 20
"""Token ids that are kept, of chunks that are credited or may be; beyond it, further chunks are not credited."""
_PASSED_OVER = 64
"""Credited chunks that are passed over in the search for token ids to drop."""


class _Stored(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    """Chunks were stored, each behind the one before it. The fields are vLLM's, up to the last one that is used."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class _Removed(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[bytes]
    medium: str


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


Event: TypeAlias = _Stored | _Removed | _Cleared
Message: TypeAlias = "tuple[list[bytes], list[Event]]"


@dataclass(eq=False)
class _Model:
    """The chunks of one namespace. Parents are None for a prompt's first chunk."""

    chunk_tokens: int
    topics: list[bytes] = field(default_factory=list)
    credited: dict[bytes, bytes | None] = field(default_factory=dict)  # parents by key
    others: dict[bytes, bytes | None] = field(default_factory=dict)  # in memory, but not credited: parents by key
    behind: dict[bytes, set[bytes]] = field(default_factory=dict)  # described ones among them, by their parent
    children: Counter[bytes] = field(default_factory=Counter)  # of credited chunks: credited ones behind them
    events: list[Event] = field(default_factory=list)  # not in a message yet
    pending: int = 0  # chunks in `events`


class EngineView:
    """The chunks that subscribers that have read every message credit engines with."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """most_bytes: keep at most this many bytes of token ids."""
        self._models: dict[Namespace, _Model] = {}
        self._tokens: OrderedDict[bytes, bytes] = OrderedDict()  # by key, the latest description last
        self._bytes = 0  # in `_tokens`
        self._most_bytes = most_bytes
        self._messages: list[Message] = []  # of the current call of `apply`

    @property
    def beat_topic(self) -> bytes:
        """The topic of a message without events: any of the engines' topics, because all have one sequence."""
        return next((topic for model in self._models.values() for topic in model.topics), TOPIC)

    # -- changes

    def apply(self, changes: list[Change]) -> Iterator[Message]:
        """Apply changes, and yield the messages that report them; take all of them before anything changes again."""
        for change in changes:
            if change is None:
                self._forget_all()
            elif isinstance(change, Describe):
                self._describe(change)
            elif isinstance(change, frozenset):
                yield from self._set_topics(change)
            else:
                is_there, namespace, key, parent = change
                if is_there:
                    self._add(namespace, key, parent)
                else:
                    self._remove(namespace, key)
            yield from self._take_messages()
        self._flush()
        yield from self._take_messages()

    def _take_messages(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages

    def _add(self, namespace: Namespace, key: bytes, parent: bytes | None) -> None:
        if parent == b"" or namespace.reach:
            return  # no chain of a prompt: routers could not place it
        model = self._models.get(namespace)
        if model is None:
            model = self._models[namespace] = _Model(namespace.chunk_tokens)
        if key not in model.credited:
            model.others[key] = parent
            self._credit(model, key)

    def _credit(self, model: _Model, first: bytes) -> None:
        """Credit a chunk of `others`, and those that waited for it, as far as they are described and have parents."""
        waiting = [first]
        while waiting:
            key = waiting.pop()
            parent, tokens = model.others[key], self._tokens.get(key)
            if tokens is None or len(tokens) != 4 * model.chunk_tokens:
                continue
            if parent is not None and parent not in model.credited:
                model.behind.setdefault(parent, set()).add(key)
                continue
            model.credited[key] = model.others.pop(key)
            if parent is not None:
                model.children[parent] += 1
            _add_stored(model.events, model.chunk_tokens, key, parent, tokens)
            self._count_pending(model)
            waiting += model.behind.pop(key, ())

    def _remove(self, namespace: Namespace, key: bytes) -> None:
        model = self._models.get(namespace)
        if model is None:
            return
        if key in model.credited:
            for each, before in _all_behind(model, key):
                self._uncredit(model, each)
                model.others[each] = before
                model.behind.setdefault(before, set()).add(each)
            self._uncredit(model, key)
        elif key in model.others:
            parent = model.others.pop(key)
            siblings = model.behind.get(parent) if parent is not None else None
            if parent is not None and siblings is not None:
                siblings.discard(key)
                if not siblings:
                    del model.behind[parent]
        self._drop_unused(namespace, model)

    def _uncredit(self, model: _Model, key: bytes) -> None:
        """Take a credited chunk back, behind which none is credited."""
        parent = model.credited.pop(key)
        if parent is not None:
            model.children[parent] -= 1
            if not model.children[parent]:
                del model.children[parent]
        last = model.events[-1] if model.events else None
        if isinstance(last, _Removed):
            last.block_hashes.append(key)
        else:
            model.events.append(_Removed([key], _MEDIUM))
        self._count_pending(model)

    def _drop_unused(self, namespace: Namespace, model: _Model) -> None:
        if not (model.topics or model.credited or model.others or model.events):
            del self._models[namespace]

    def _describe(self, described: Describe) -> None:
        if described.parent != ROOT and described.parent not in self._tokens:
            return
        for key, tokens in split_tokens(described.parent, described.hashes, described.tokens, described.chunk_tokens):
            if not self._keep(key, tokens):
                return
            for model in self._models.values():
                if key in model.others:
                    self._credit(model, key)

    def _keep(self, key: bytes, tokens: bytes) -> bool:
        """Keep token ids; drops the oldest ones of chunks that are not credited. False if there is no room."""
        if key in self._tokens:
            self._tokens.move_to_end(key)
            return True
        for _ in range(_PASSED_OVER):
            if self._bytes + len(tokens) <= self._most_bytes or not self._tokens:
                break
            oldest = next(iter(self._tokens))
            if any(oldest in model.credited for model in self._models.values()):
                self._tokens.move_to_end(oldest)
            else:
                self._bytes -= len(self._tokens.pop(oldest))
        if self._bytes + len(tokens) > self._most_bytes:
            return False
        self._tokens[key] = tokens
        self._bytes += len(tokens)
        return True

    def _set_topics(self, topics: Topics) -> Iterator[Message]:
        self._flush()
        yield from self._take_messages()
        by_namespace: dict[Namespace, set[bytes]] = {}
        for topic, namespace in topics:
            by_namespace.setdefault(namespace, set()).add(topic.encode())
        for namespace in by_namespace.keys() - self._models.keys():
            self._models[namespace] = _Model(namespace.chunk_tokens)
        come: list[tuple[_Model, list[bytes]]] = []
        for namespace, model in list(self._models.items()):
            old, new = set(model.topics), by_namespace.get(namespace, set())
            model.topics = sorted(new)  # first: what is sent from here on must be kept for a listing with these topics
            if left := sorted(old - new):
                yield from ((left, [event]) for event in _removals(model.credited))
            if new - old:
                come.append((model, sorted(new - old)))
            self._drop_unused(namespace, model)
        for model, added in come:  # last: a topic may have left one model for another
            yield from ((added, events) for events in self._list(model))

    def _forget_all(self) -> None:
        for model in self._models.values():
            self._flush_model(model)
            if model.topics:
                self._messages += ((model.topics, [event]) for event in _removals(model.credited))
            model.credited.clear()
            model.others.clear()
            model.behind.clear()
            model.children.clear()
        self._models = {namespace: model for namespace, model in self._models.items() if model.topics}

    # -- events

    def _count_pending(self, model: _Model) -> None:
        model.pending += 1
        if model.pending >= BATCH:
            self._flush_model(model)

    def _flush(self) -> None:
        for namespace, model in list(self._models.items()):
            self._flush_model(model)
            self._drop_unused(namespace, model)

    def _flush_model(self, model: _Model) -> None:
        if model.events and model.topics:
            self._messages.append((list(model.topics), model.events))
        model.events, model.pending = [], 0

    # -- listings

    def _list(self, model: _Model) -> Iterator[list[Event]]:
        """The chunks credited as of now, in batches of one message; at least one, which may be empty."""
        known = [(key, parent, self._tokens[key]) for key, parent in model.credited.items()]  # parents come first
        return (
            _stored(known[first : first + BATCH], model.chunk_tokens) for first in range(0, max(1, len(known)), BATCH)
        )

    def listing(self) -> Iterator[tuple[bytes, list[Event]]]:
        """`messages` messages that list all chunks as of now, for a subscriber that has lost some."""
        lists = [(list(model.topics), self._list(model)) for model in self._models.values() if model.topics]
        return _with_clears(lists) if lists else iter([(TOPIC, [])])

    @property
    def messages(self) -> int:
        """The number of messages in a listing; never more than were sent."""
        models = self._models.values()
        return max(1, sum(len(model.topics) * max(1, -(-len(model.credited) // BATCH)) for model in models))


def _with_clears(lists: list[tuple[list[bytes], Iterator[list[Event]]]]) -> Iterator[tuple[bytes, list[Event]]]:
    """Messages of each topic in turn, the first of which takes back all that was said before."""
    begun: set[bytes] = set()
    for topics, batches in lists:
        for events in batches:
            yield from ((topic, events if topic in begun else [_Cleared(), *events]) for topic in topics)
            begun.update(topics)


def _stored(chunks: Iterable[tuple[bytes, bytes | None, bytes]], chunk_tokens: int) -> list[Event]:
    events: list[Event] = []
    for key, parent, ids in chunks:
        _add_stored(events, chunk_tokens, key, parent, ids)
    return events


def _add_stored(events: list[Event], chunk_tokens: int, key: bytes, parent: bytes | None, tokens: bytes) -> None:
    ids = memoryview(tokens).cast("I").tolist()
    last = events[-1] if events else None
    if isinstance(last, _Stored) and parent == last.block_hashes[-1]:
        last.block_hashes.append(key)
        last.token_ids += ids
    else:
        events.append(_Stored([key], parent, ids, chunk_tokens, None, _MEDIUM))


def _removals(keys: Iterable[bytes]) -> Iterator[Event]:
    """Events that take these chunks back, each for one message; those at the end of chains first."""
    ordered = list(reversed(list(keys)))
    for first in range(0, len(ordered), BATCH):
        yield _Removed(ordered[first : first + BATCH], _MEDIUM)


def _all_behind(model: _Model, key: bytes) -> list[tuple[bytes, bytes]]:
    """The credited chunks behind a credited one and their parents, those at the end of chains first. There are none if
    a chunk is evicted; a pass over all chunks is for one that was forgotten or is corrupt."""
    if not model.children[key]:
        return []
    by_parent: dict[bytes, list[bytes]] = {}
    for each, parent in model.credited.items():
        if parent is not None:
            by_parent.setdefault(parent, []).append(each)
    found: list[tuple[bytes, bytes]] = []
    waiting = [key]
    while waiting:
        parent = waiting.pop()
        children = by_parent.get(parent, [])
        found += ((child, parent) for child in children)
        waiting += children
    return found[::-1]
