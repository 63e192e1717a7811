"""The table of counters: a new entry appears wherever counters are shown."""

from __future__ import annotations

import msgspec
import pytest

from kvdepot.protocol.counters import SERVER, TIER, Counted, Counters, losses, refusal
from kvdepot.protocol.status import Status, TierStatus

NOTHING = dict.fromkeys((field.name for field in msgspec.structs.fields(Status) if field.required), 0)


@pytest.mark.parametrize("table", [SERVER, TIER], ids=["server", "tier"])
def test_each_counter_stands_once_in_its_table_and_is_a_sentence(table: tuple[Counted, ...]) -> None:
    names = [counted.name for counted in table]
    assert len(set(names)) == len(names)
    for counted in table:
        assert counted.meaning.endswith(".") and not counted.meaning.endswith("..")
        assert not counted.advice or counted.advice.endswith(".")
        assert bool(counted.alert) == bool(counted.severity)
        assert not refusal(counted) or counted.loss


def test_a_counter_that_is_in_no_table_is_not_counted() -> None:
    with pytest.raises(KeyError):
        Counters()["lookup"] += 1


def test_losses_are_told_of_the_server_and_of_each_tier_and_not_those_of_0() -> None:
    tier = TierStatus("disk", "through", "up", 1, 2, 4, 0, 0, {"evicted": 2, "saved_chunks": 7, "late": 0})
    status = Status(**NOTHING, counters={**Counters(), "dropped_chunks": 1, "lookups": 9}, tiers=[tier])
    assert [(loss.where, loss.counter, loss.count) for loss in losses(status)] == [
        ("Memory", "dropped_chunks", 1), ("disk", "evicted", 2),
    ]  # fmt: skip
