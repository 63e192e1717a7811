"""Tokens by tenant and model: every list adds up to the total, and no number falls, however many there are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvdepot import status as status_module
from kvdepot.core.usage import Usages
from kvdepot.errors import BadRequest
from kvdepot.protocol import wire
from kvdepot.status import OTHERS, AnswersStatus, NamespaceStatus, Usage
from tests.core.desk import Desk, prompt, retrieve, store

NAMES = st.sampled_from(["", "a", "b", "c", "d", OTHERS])
REQUESTS = st.lists(st.tuples(NAMES, NAMES, *[st.integers(0, 1000)] * 3, st.booleans()), max_size=40)


def sums(shown: Sequence[Usage | NamespaceStatus]) -> tuple[int, int, int]:
    return (
        sum(each.asked_tokens for each in shown),
        sum(each.found_tokens for each in shown),
        sum(each.reused_tokens for each in shown),
    )


def by_name(shown: Sequence[Usage]) -> dict[tuple[str, str], tuple[int, int, int]]:
    named = {(each.tenant, each.model): (each.asked_tokens, each.found_tokens, each.reused_tokens) for each in shown}
    assert len(named) == len(shown), "a name is listed twice"
    return named


@given(REQUESTS)
def test_every_list_adds_up_to_the_total_and_no_entry_falls_or_goes(
    requests: list[tuple[str, str, int, int, int, bool]],
) -> None:
    usages = Usages(models=3, tenants=2)
    known: set[tuple[str, str]] = set()
    for tenant, model, asked, found, reused, is_known in requests:
        before = [by_name(usages.by_tenant()), by_name(usages.by_model())]
        usages.count(tenant, model, asked, found, reused, is_known)
        known |= {(tenant, model)} if is_known else set()
        total = usages.tokens.asked, usages.tokens.found, usages.tokens.reused
        for was, shown in zip(before, (usages.by_tenant(), usages.by_model()), strict=True):
            assert sums(shown) == total
            now = by_name(shown)
            assert all(one <= other for name in was for one, other in zip(was[name], now[name], strict=True))
        for own in {name for name, *_ in requests} - {"", OTHERS}:
            assert {each.tenant for each in usages.by_tenant(own)} <= {own}
            assert {(each.tenant, each.model) for each in usages.by_model(own)} <= known, "a made-up model has an entry"
        named = [each.tenant for each in usages.by_model() if each.tenant != OTHERS]
        assert all(named.count(each) <= 2 for each in named), "one tenant has taken all entries"
    assert len(usages.by_tenant()) <= 3 and len(usages.by_model()) <= 4


def look(chunks: int, request: str, model: str = "m", reports: bool = False) -> wire.Lookup:
    hashes = prompt("a", chunks).slice(0, chunks)
    return wire.Lookup(model, 1, 0, request, 1, hashes, True, reports=reports)


def test_an_engines_own_report_counts_instead_of_its_lookup() -> None:
    desk = Desk()
    desk.hello()
    desk.register(b"one")
    assert desk.ask(b"one", store(prompt("a", 3))) is True
    assert desk.ask(b"one", look(5, "r1", reports=True)) == 3
    assert desk.depot.status().model_usage == [Usage("", 0, 0, 0, "m")]  # from 0, for Prometheus
    desk.ask(b"one", wire.EndSession("r1", 2, 0.5, "m", wire.Asked(4, 2, 1)))  # it had one token itself
    status = desk.depot.status()
    assert status.model_usage == [Usage("", 4, 2, 2, "m")]
    assert (status.tokens.asked, status.tokens.found, status.tokens.reused) == (4, 2, 2)


def test_loads_count_as_reused_unless_the_engine_reports_itself() -> None:
    desk = Desk()
    desk.hello()
    desk.register(b"one")
    chain = prompt("a", 3)
    assert desk.ask(b"one", store(chain)) is True
    for unpins, reports, reused in ((True, False, 2), (False, False, 2), (False, True, 0)):
        before = desk.depot.status().tokens.reused
        assert desk.ask(b"one", look(3, "r1", reports=reports)) == 3
        load = msgspec.structs.replace(retrieve(chain, first=1, request="r1"), unpins=unpins)
        assert desk.ask(b"one", load) == [True] * 2
        assert desk.depot.client(b"one").sessions, "there is another chunk to load, or it ends by itself"
        desk.ask(b"one", wire.EndSession("r1"))
        assert desk.depot.status().tokens.reused == desk.depot.status().saved.tokens == before + reused


def test_a_model_shows_what_an_engine_said_last_of_its_answers() -> None:
    desk = Desk()
    desk.hello()
    desk.register(b"one")
    assert desk.ask(b"one", store(prompt("a", 3))) is True
    assert desk.ask(b"one", look(5, "r1")) == 3
    for said in (AnswersStatus("auto", True), AnswersStatus("auto", False, 0.01), None):
        desk.ask(b"one", wire.EndSession("r1", model="m", answers=said))
    status = desk.depot.status()
    assert status.namespaces[0].answers == status.model_usage[0].answers == AnswersStatus("auto", False, 0.01)
    assert status.usage[0].answers is None
    assert status_module.read(msgspec.to_builtins(status)) == status
    for bad in (AnswersStatus("x" * 17, True), AnswersStatus("auto", True, float("nan")), AnswersStatus("on", True, 2)):
        assert isinstance(desk.ask(b"one", wire.EndSession("r1", answers=bad)), BadRequest)


def test_a_report_that_makes_no_sense_is_refused_and_counts_nothing() -> None:
    desk = Desk()
    desk.hello()
    bad = (-1,), (1, 2), (1, 1, -1), (1, 1, 1, 2), (2, 2, 0, 2, 1), (1, 1, 0, 0, -1), (1 << 40,)
    for asked in (wire.Asked(*numbers) for numbers in bad):
        answer = desk.ask(b"one", wire.EndSession("r", 1, 0.0, "m", asked))
        assert "is out of range" in str(answer)
    answer = desk.ask(b"one", wire.EndSession("r", 1, 0.0, "m" * 5000))
    assert "a model name of 5000 characters" in str(answer)
    assert desk.depot.status().tokens.asked == desk.depot.status().saved.tokens == 0


def test_namespaces_beyond_those_that_are_listed_are_told_as_a_sum() -> None:
    desk = Desk(pages=512)
    desk.hello()
    desk.register(b"one")
    for number in range(103):
        assert desk.ask(b"one", store(prompt("a", 1 + (number > 2)), model=f"m{number}")) is True
        assert desk.ask(b"one", look(2, f"r{number}", f"m{number}")) == 1 + (number > 2)
    status = desk.depot.status()
    assert (len(status.namespaces), status.namespace_count) == (100, 103)
    assert status.other_namespaces is not None
    assert (status.other_namespaces.model, status.other_namespaces.chunks) == (OTHERS, 3)
    everything = [*status.namespaces, status.other_namespaces]
    assert sum(each.bytes for each in everything) == status.used_bytes
    assert sums(everything) == sums(status.model_usage) == (206, 203, 0)
    assert status.model_usage[-1] == Usage(OTHERS, 106, 106, 0, OTHERS)  # beyond the first 50


def test_a_lookup_that_pins_nothing_counts_at_once_what_its_engine_lacks() -> None:
    desk = Desk(settings={"max_sessions": 1})
    desk.hello()
    desk.register(b"one")
    assert desk.ask(b"one", store(prompt("a", 3))) is True
    for own, found in ((0, 3), (2, 1), (4, 0)):
        before = desk.depot.status().tokens
        lookup = msgspec.structs.replace(look(5, f"r{own}"), pins=False, own=own)
        assert desk.ask(b"one", lookup) == 3
        tokens, sessions = desk.depot.status().tokens, desk.depot.status().sessions
        assert (tokens.asked - before.asked, tokens.found - before.found, sessions) == (5 - own, found, 0)
    assert desk.depot.status().holds == 0
    for own in (-1, 6):
        assert isinstance(desk.ask(b"one", msgspec.structs.replace(look(5, "r"), own=own)), BadRequest)
