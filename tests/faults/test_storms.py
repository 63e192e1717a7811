"""Preemption storms, aborts between every two steps, duplicate finished ids: no leak, no wrong byte."""

from __future__ import annotations

import pytest

from tests.conftest import StartDepot
from tests.faults.conftest import StartDriver, resident_kib, settled

pytestmark = pytest.mark.faults

MOST_GROWTH_KIB = 512
"""What the heap of a server may grow by in the last third of a storm."""


@pytest.mark.parametrize(
    ("preempt", "abort"), [(0.6, 0.02), (0.02, 0.5), (0.4, 0.4)], ids=["preemptions", "aborts", "both"]
)
def test_storms_of_preemptions_and_aborts_leak_nothing_and_change_no_byte(
    start_depot: StartDepot, start_driver: StartDriver, preempt: float, abort: float
) -> None:
    depot = start_depot(arena_mib=8, chunk_size=64)  # a quarter of the prompts: it evicts all the time
    drivers = [start_driver(depot.url, seed=seed, blocks=160, width=64) for seed in range(2)]
    sizes = []
    for _ in range(3):
        for driver in drivers:
            driver.send("run", steps=500, preempt=preempt, abort=abort, families=100, running=10)
        for driver in drivers:
            stats = driver.answer()
            print(stats)
            assert not stats["wrong"]
            assert stats["requests"] > 10 and stats["loaded_blocks"] > 15
            # Beside other work, transfers are slow and few requests run: then few are there to be preempted.
            assert stats.get("preemptions", 0) >= 25 * preempt and stats["aborts"] >= 150 * abort - 30
        sizes.append(resident_kib(depot.process.pid))
    print(sizes)
    for driver in drivers:
        assert driver.tell("hits", families=list(range(100)), chunks=6) > 0
        stats = driver.tell("stats")
        assert not stats["wrong"] and stats["worker"].get("stores_given_up", 0) >= (5 if preempt > 0.1 else 0)
    assert settled(depot)["evicted_chunks"] > 100
    assert sizes[2] - sizes[1] < MOST_GROWTH_KIB, sizes
