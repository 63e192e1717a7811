"""The simulation holds, is deterministic, and notices when something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvdepot.core import transfers
from kvdepot.core.index import chunk as chunks
from kvdepot.core.index import index
from kvdepot.core.index.wants import Wants
from kvdepot.core.transfers import Transfers
from kvdepot.protocol import wire
from tests.sim.run import Broken, simulate


@pytest.mark.faults
def test_no_invariant_breaks_in_the_first_seeds_and_engines_use_the_depot() -> None:
    totals: Counter[str] = Counter()
    for seed in range(40):
        totals += simulate(seed).counters
    # Without these, the invariants would hold of engines that do nothing.
    used = "engine_shut_down", "load_done", "lookup_awaited_store", "lookup_awaited_room", "tier_loaded_chunks"
    assert all(totals[what] > 5 for what in used), {what: totals[what] for what in used}


@pytest.mark.faults
def test_the_same_seed_is_the_same_run_also_where_strings_hash_differently() -> None:
    seeds = [3, 11]
    here = [simulate(seed).digest() for seed in seeds]
    assert here == [simulate(seed).digest() for seed in seeds]
    code = f"from tests.sim.run import simulate\nprint(*[simulate(seed).digest() for seed in {seeds}])"
    for hash_seed in ("0", "7"):
        there = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        assert there.stdout.split() == here


# -- planted bugs: each breaks one function of the real code; tools/planted.jsonl has many more, for tools/mutants.py

Patch = pytest.MonkeyPatch


def seals_before_the_copy_has_ended(patch: Patch) -> None:
    place = Transfers._place

    def place_sealed(self: Any, operation: Any) -> Any:
        if isinstance(operation.request, wire.Store):
            for chunk, rank in operation.chunks:
                self._index.seal(chunk, rank)
        return place(self, operation)

    patch.setattr(Transfers, "_place", place_sealed)


def gives_memory_away_that_a_dead_workers_device_may_write(patch: Patch) -> None:
    patch.setattr(transfers, "LINGER_S", 0.0)


def evicts_what_is_held(patch: Patch) -> None:
    def is_evictable(chunk: Any) -> bool:
        return not chunk.children and not chunk.gone and not any(shard.is_open for shard in chunk.shards.values())

    patch.setattr(chunks, "is_evictable", is_evictable)
    patch.setattr(index, "is_evictable", is_evictable)


def evicts_what_is_wanted(patch: Patch) -> None:
    patch.setattr(chunks, "is_unwanted", chunks.is_evictable)


def evicts_for_whoever_asks(patch: Patch) -> None:
    patch.setattr(Wants, "depth_before", lambda self, namespace, keys: -1.0)


def writes_a_tail_over_the_one_that_it_continues(patch: Patch) -> None:
    reserve = index.Index.reserve

    def over(self: Any, namespace: Any, rank: int, run: Any, wall: Any) -> Any:
        made, old = reserve(self, namespace, rank, run, wall), namespace.chunks.get(run.continues)
        if old is not None and made.chunks and rank in old.shards and old.shards[rank].sealed:
            one, other = old.shards[rank], made.chunks[-1].shards[rank]
            one.extents, other.extents = other.extents, one.extents
        return made

    patch.setattr(index.Index, "reserve", over)


@pytest.mark.faults
@pytest.mark.parametrize(
    "plant",
    [
        seals_before_the_copy_has_ended,
        gives_memory_away_that_a_dead_workers_device_may_write,
        evicts_what_is_held,
        evicts_what_is_wanted,
        evicts_for_whoever_asks,
        writes_a_tail_over_the_one_that_it_continues,
    ],
)
def test_a_planted_bug_is_noticed(plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken) as broken:
        for seed in range(1000):
            simulate(seed)
    cause = broken.value.__cause__
    assert isinstance(cause, AssertionError), f"it was planted badly: {cause!r}"
