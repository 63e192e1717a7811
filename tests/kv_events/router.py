"""A router's index of KV events by the published rules of llm-d (kv-cache 0.8, router): what engine has which prefix.

Written from the rules, to share nothing with what it checks:

- A topic is `kv@POD@MODEL`; messages with another one are nobody's. A batch is an array of exactly three.
- Events are arrays with their tag first, or maps with `type`. Of a hash, the last 8 bytes count.
- A router computes keys of its own (**request keys**) from a stored block's token ids, in blocks of its own size, and
  chained: a block's parent is found by its hash. A block whose parent is unknown is passed over; one without token ids
  counts for what its hash is known to stand for.
- A pod has a request key in each tier that was stored and not removed again. Later versions count: a hash that was
  stored twice is there until it is removed twice.
- `AllBlocksCleared` means nothing in 0.8; later, it clears the pod in all tiers.
- A pod's score is the number of consecutive request keys that it has from a prompt's start, weighted by its best tier.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

BLOCK = 16
"""Tokens per request key."""
WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class Malformed(Exception):
    """A message that llm-d does not read."""


def split_topic(topic: bytes) -> tuple[str, str] | None:
    """Pod and model; None if the topic is not of the form that names them."""
    parts = topic.decode().split("@")
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "kv" else None


def request_keys(parent: int, tokens: Sequence[int], model: str) -> list[int]:
    """Keys of the whole blocks of these tokens, behind `parent` (0: a prompt's start)."""
    keys, key = [], parent or _digest(model.encode())
    for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = _digest(struct.pack(f">Q{BLOCK}I", key, *tokens[first : first + BLOCK]))
        keys.append(key)
    return keys


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") or 1


def _short(block_hash: bytes | int) -> int:
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


@dataclass
class Router:
    """What a router believes after the messages that it took. clears: whether `AllBlocksCleared` means something."""

    clears: bool = True
    pods: dict[int, set[tuple[str, str]]] = field(default_factory=dict)  # request key -> (pod, tier)
    meant: dict[int, list[int]] = field(default_factory=dict)  # engine's hash -> its request keys
    counts: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # (pod, tier, engine's hash)
    passed_over: int = 0  # blocks with an unknown parent
    twice: list[tuple[str, str, int]] = field(default_factory=list)  # blocks stored again without being removed

    def take(self, topic: bytes, payload: bytes) -> None:
        """Take one message. Raises Malformed."""
        named = split_topic(topic)
        batch = msgspec.msgpack.decode(payload)
        if not isinstance(batch, list) or len(batch) != 3:
            raise Malformed(f"a batch of {batch!r:.80}")
        if named is None:
            return
        for event in batch[1]:
            self._take(*named, *_parse(event))

    def _take(self, pod: str, model: str, tag: str, fields: dict[str, Any]) -> None:
        tier = (fields.get("medium") or "gpu").lower()
        match tag:
            case "BlockStored":
                self._store(pod, tier, fields.get("lora_name") or model, fields)
            case "BlockRemoved":
                for block_hash in map(_short, fields["block_hashes"]):
                    self._remove(pod, tier, block_hash)
            case "AllBlocksCleared" if self.clears:
                self._clear(pod)

    def _store(self, pod: str, tier: str, model: str, fields: dict[str, Any]) -> None:
        hashes = [_short(each) for each in fields["block_hashes"]]
        tokens, parent = fields["token_ids"], fields["parent_block_hash"]
        behind = self.meant.get(_short(parent)) if parent is not None else [0]
        if behind is None:
            self.passed_over += len(hashes)
            return
        keys = request_keys(behind[-1], tokens, model)
        if keys:
            each = len(keys) / len(hashes)
            for i, block_hash in enumerate(hashes):
                self.meant[block_hash] = keys[int(i * each) : int((i + 1) * each)] or [keys[int(i * each)]]
        elif not tokens:
            keys = [key for block_hash in hashes for key in self.meant.get(block_hash, ())]
        for key in keys:
            self.pods.setdefault(key, set()).add((pod, tier))
        for block_hash in hashes if keys else ():
            counted = pod, tier, block_hash
            self.counts[counted] += 1
            if self.counts[counted] > 1:
                self.twice.append(counted)

    def _remove(self, pod: str, tier: str, block_hash: int) -> None:
        counted = pod, tier, block_hash
        if self.counts[counted] > 1:
            self.counts[counted] -= 1
            return
        del self.counts[counted]
        keys = self.meant.get(block_hash, [])
        for key in keys:
            self.pods.get(key, set()).discard((pod, tier))
        if not any(self.pods.get(key) for key in keys):
            self.meant.pop(block_hash, None)

    def _clear(self, pod: str) -> None:
        for entries in self.pods.values():
            entries.difference_update({entry for entry in entries if entry[0] == pod})
        for counted in [counted for counted in self.counts if counted[0] == pod]:
            del self.counts[counted]

    def score(self, tokens: Sequence[int], model: str) -> dict[str, float]:
        """The score of each pod for a prompt; only those that have its first block."""
        scores: dict[str, float] = {}
        active: set[str] | None = None
        for key in request_keys(0, tokens, model):
            best: dict[str, float] = {}
            for pod, tier in self.pods.get(key, ()):
                best[pod] = max(best.get(pod, 0.0), WEIGHTS.get(tier, 1.0))
            active = set(best) if active is None else active & set(best)
            if not active:
                break
            for pod in active:
                scores[pod] = scores.get(pod, 0.0) + best[pod]
        return scores

    def blocks(self, tokens: Sequence[int], model: str, tier: str = "cpu") -> dict[str, int]:
        """The length of each pod's prefix in this tier, in request keys."""
        scores = self.score(tokens, model)
        return {pod: round(score / WEIGHTS[tier]) for pod, score in scores.items()}


def _parse(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        fields = dict(event)
        tag = fields.pop("type", None)
    elif isinstance(event, list) and event:
        tag = event[0]
        fields = dict(zip(_FIELDS.get(tag, ()), event[1:], strict=False))
    else:
        raise Malformed(f"an event {event!r:.80}")
    if tag not in _FIELDS:
        raise Malformed(f"an event with the tag {tag!r}")
    return tag, fields
