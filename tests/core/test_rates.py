"""How many requests a client may make: by count, by size, by what they cost."""

from __future__ import annotations

from kvdepot.core.connections import Rates


def test_a_client_is_served_so_many_requests_a_second_and_others_as_many() -> None:
    rates = Rates(10)
    assert [rates.count(b"a", 100) for _ in range(12)] == [True] * 10 + [False] * 2
    assert rates.count(b"b", 100)


def test_a_message_counts_once_more_for_each_four_kib() -> None:
    rates = Rates(10)
    assert rates.count(b"a", 8 * 4096)
    assert [rates.count(b"a", 0) for _ in range(2)] == [True, False]


def test_a_flood_of_costly_requests_gets_a_hundredth_until_it_keeps_to_that() -> None:
    rates = Rates(1000)
    while rates.count(b"a", 10) and rates.charge(b"a", 3):
        pass
    rates.tick()
    assert [rates.count(b"a", 10) and rates.charge(b"a", 3) for _ in range(3)] == [True, True, False]
    rates.tick()
    assert rates.count(b"a", 10)
    rates.tick()
    assert all(rates.count(b"a", 10) for _ in range(1000))


def test_the_server_rests_only_when_each_flooding_client_has_had_a_turn() -> None:
    rates = Rates(1)
    for client in (b"a", b"b"):
        assert rates.count(client, 0)
    turns = []
    for _ in range(2):
        for client in (b"a", b"b"):
            assert not rates.count(client, 0)
            turns.append(rates.only_floods())
    assert turns == [False, False, True, False]
    assert rates.count(b"c", 0) and not rates.only_floods()
