"""Preemption storms, aborts between every two steps, duplicate finished ids: no leak, no wrong byte."""

from __future__ import annotations

from collections import Counter

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
    totals = [Counter[str]() for _ in drivers]
    wanted = {
        "requests": 31, "loaded_blocks": 51, "preemptions": 500 * preempt - 100, "aborts": 500 * abort - 100,
        "stores_given_up": 5 if preempt > 0.1 else 0,
    }  # fmt: skip

    def storm() -> None:
        for driver in drivers:
            driver.send("run", steps=500, preempt=preempt, abort=abort, families=100, running=10)
        for driver, total in zip(drivers, totals, strict=True):
            stats = driver.answer()
            assert not stats["wrong"]
            total.update({name: count for name, count in stats.items() if isinstance(count, int)})
            total["stores_given_up"] = stats["worker"].get("stores_given_up", 0)  # so far

    sizes = []
    for _ in range(3):
        storm()
        sizes.append(resident_kib(depot.process.pid))
    for _ in range(20):  # beside other work, transfers are slow, so that few requests run and can be preempted
        if not any(total[name] < count for total in totals for name, count in wanted.items()):
            break
        storm()
    else:
        pytest.fail(f"{totals}, and {wanted} were expected")
    for driver in drivers:
        assert driver.tell("hits", families=list(range(100)), chunks=6) > 0
        assert not driver.tell("stats")["wrong"]
    assert settled(depot)["evicted_chunks"] > 100
    assert sizes[2] - sizes[1] < MOST_GROWTH_KIB, sizes
