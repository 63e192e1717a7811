"""The web page in a real Chromium: its text, tables and charts show the server's status."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvdepot.metrics import BOUNDS_S, Event
from kvdepot.protocol.counters import SERVER
from kvdepot.status import Engine, NamespaceStatus, Saved
from tests.conftest import StartDepot, eventually
from tests.ports import free_port
from tests.web.browser import chromium, executable
from tests.web.site import Site, a_lease, empty_status, example_history, example_status

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.faults

WAIT_MS = 15_000
NONE = "\N{EN DASH}"


def _needed(is_there: bool, what: str) -> None:
    """Skip the test where something is missing; where all must be there, fail."""
    if not is_there:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{what} is missing")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        _needed(False, "Playwright")
    _needed(executable() is not None, "Chromium")
    with chromium() as started:
        yield started


@pytest.fixture
def site() -> Iterator[Site]:
    served = Site()
    yield served
    served.close()


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, site: Site) -> Iterator[OpenPage]:
    """Open the site in a browser without any stored data: `open_page(width=400, color_scheme="dark")`."""
    contexts = []

    def open_(address: str = "", width: int = 1280, wait_for: str = "h1:has-text('Working')", **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.goto(address or site.url)
        page.wait_for_selector(wait_for)
        return page

    yield open_
    for context in contexts:
        context.close()


def text(page: Page, selector: str) -> str:
    return " ".join(page.inner_text(selector).split())


def shows(page: Page, selector: str, wanted: str) -> None:
    """Wait until an element's text contains this."""
    page.locator(selector, has_text=wanted).first.wait_for()


def rows(page: Page, table: str) -> list[list[str]]:
    """The texts of a table's body."""
    found: list[list[str]] = page.eval_on_selector_all(
        f"#{table} tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


# -- what it says


def test_the_page_says_that_it_works_since_when_in_which_version_and_with_how_many_engines(
    site: Site, open_page: OpenPage
) -> None:
    page = open_page()
    assert text(page, "#state") == "Working"
    assert re.fullmatch(r"version 0\.1\.0, since \d+ \w+, [\d:]+ \(3 d 4 h\)", text(page, "#since"))
    facts = text(page, "#facts")
    assert "Engine processes 5" in facts and "Chunks 31.5K" in facts


def test_what_is_gained_is_what_engines_reused_in_the_last_hour_and_what_was_saved(
    site: Site, open_page: OpenPage
) -> None:
    page = open_page()
    assert text(page, "#hit-rate") == "55.1%"
    assert "Found there: 72.4% of the chunks; upper bound (infinite cache) about 81.1%" in text(page, "#hit-ceiling")
    assert page.get_attribute("#hit-bar", "aria-valuenow") == "55.1"
    assert text(page, "#hit-windows [data-row=reuse]") == "Reused 61.0% 58.2% 55.1% 53.5%"
    assert text(page, "#hit-windows [data-row=hit]") == "Found in the depot 78.1% 75.2% 72.4% 69.8%"
    assert text(page, "#hit-windows [data-row=ceiling]") == "Upper bound 84.2% 82.9% 81.1% 83.4%"
    assert text(page, "#saved-tokens") == "198.7M"
    assert text(page, "#saved-prefill") == "11 h 27 min"


def test_memory_and_each_tier_say_how_full_they_are_in_numbers_and_bars(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    cards = page.locator("#stores .card")
    assert cards.count() == 3
    memory, disk, s3 = (" ".join(cards.nth(i).inner_text().split()) for i in range(3))
    assert memory.startswith("Memory 241 GiB 94.3% of 256 GiB")
    assert disk.startswith("disk up 1.43 TiB 71.5% of 2 TiB") and "Queued 3 MiB" in disk
    assert "capacity unknown" in s3
    bars = page.locator("#stores [role=meter]:visible")
    assert [bars.nth(i).get_attribute("aria-valuenow") for i in range(bars.count())] == ["94.3", "71.5"]


def test_what_has_one_name_is_listed_once_each_however_long_the_page_is_open(site: Site, open_page: OpenPage) -> None:
    """Namespaces of one model that differ, for example, in the type of the KV cache."""
    twins = [NamespaceStatus("", "twin", 1, 1, chunks, 2**20, 1) for chunks in (1, 2)]
    tiers = [msgspec.structs.replace(tier, name="twin") for tier in site.status.tiers]
    site.status = msgspec.structs.replace(site.status, namespaces=twins, tiers=tiers)
    page = open_page()
    asked = site.asked.count("/v1/status")
    eventually(lambda: site.asked.count("/v1/status") > asked + 2)
    assert [row[3] for row in rows(page, "namespaces")] == ["1", "2"]
    assert page.locator("#stores .card").count() == 3


def test_engines_stay_in_their_places_whoever_was_heard_last(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    before = rows(page, "engines")
    site.status = msgspec.structs.replace(site.status, engines=site.status.engines[::-1])
    asked = site.asked.count("/v1/status")
    eventually(lambda: site.asked.count("/v1/status") > asked + 1)
    assert rows(page, "engines") == before


def test_engines_and_namespaces_are_listed_with_their_state_bytes_and_hits(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    assert [row[:3] for row in rows(page, "engines")] == [
        ["scheduler", "9f31c2aa", "serving"],
        ["worker 0", "4b7d0e15", "copying"],
        ["worker 1", "c80a9d42", "copying"],
        ["scheduler", "17e5f6b9", "serving"],
        ["worker 0", "e2c4418d", "idle 10 min"],
    ]
    assert rows(page, "namespaces") == [
        ["meta-llama/Llama-3.3-70B", "150 GiB", "58.7%", "19.2K", "75.2%", "2"],
        ["Qwen/Qwen3-32B", "75.1 GiB", "29.3%", "9,610", "63.7%", "1"],
        ["research: mistralai/Mistral-Small-24B", "15.8 GiB", "6.2%", "2,628", "55.8%", "0"],
    ]


def test_leases_are_listed_with_what_they_hold_and_saved_below_their_sums_by_tenant_and_kind(
    site: Site, open_page: OpenPage
) -> None:
    page = open_page()
    assert rows(page, "lease-sums") == [["no tenant", "retain", "2 of 31", "5.9 GiB", "412K", "12 GiB"]]
    assert rows(page, "leases") == [
        ["system-prompt", "retain", "1.2 GiB", "never", "0"],
        ["handbook", "retain", "4.7 GiB", "1 h 30 min", "0"],
    ]
    site.status = msgspec.structs.replace(site.status, leases=[], lease_sums=[])
    eventually(lambda: not page.locator("#leases-part").is_visible())


def test_tenants_with_quotas_are_listed_with_the_others_in_one_row_and_without_quotas_not_at_all(
    site: Site, open_page: OpenPage
) -> None:
    page = open_page()
    assert rows(page, "tenants") == [
        ["others", "226 GiB", "0 B", "\u2013", "10K", "0"],
        ["research", "15.8 GiB", "8 GiB", "16 GiB", "3,411", "12"],
    ]
    site.status = msgspec.structs.replace(site.status, tenants=[])
    eventually(lambda: not page.locator("#tenants-part").is_visible())


def test_events_are_listed_the_latest_first(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    texts = page.locator("#events li span:last-child").all_inner_texts()
    assert texts == [event.text for event in reversed(site.status.events)]


def test_what_was_dropped_is_told_with_where_and_why(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    losses = rows(page, "losses")
    assert ["Memory", "dropped: memory was full", "12"] in losses
    assert ["disk", "not saved: queue full", "311"] in losses
    assert ["s3", "failed calls", "12"] in losses
    assert not any(value == "0" for _, _, value in losses)


def test_a_server_that_has_just_started_shows_no_figures_that_it_does_not_have(site: Site, open_page: OpenPage) -> None:
    site.status = empty_status()
    page = open_page()
    assert text(page, "#hit-rate") == NONE
    assert "Nothing has been looked up yet" in text(page, "#hit-ceiling")
    assert "No engine is connected" in text(page, "#engines-none")
    assert page.is_hidden("#engines")
    assert not re.search(r"NaN|undefined|Infinity|null", page.inner_text("body"))


def test_the_next_status_is_shown_a_second_later(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    site.status = msgspec.structs.replace(
        site.status, wall_s=site.status.wall_s + 1, saved=Saved(1234, 61.0), engines=site.status.engines[:1]
    )
    shows(page, "#saved-tokens", "1,234")
    assert text(page, "#saved-prefill") == "1 min 1 s"
    assert [row[1] for row in rows(page, "engines")] == ["9f31c2aa"]


def test_names_that_look_like_markup_are_text(site: Site, open_page: OpenPage) -> None:
    evil = "<img src=x onerror=alert(1)>"
    site.status = msgspec.structs.replace(
        site.status,
        namespaces=[NamespaceStatus(evil, evil, 1, 1, 1, 1, 1)],
        engines=[Engine(evil, 1.0, 1.0, [evil], [], evil, evil, 0, 0, 0)],
        events=[Event(site.status.wall_s, evil, evil)],
    )
    page = open_page()
    assert rows(page, "namespaces")[0][0] == f"{evil}: {evil}"
    assert page.locator("#engines img, #namespaces img, #events img").count() == 0


# -- when things go wrong


def test_a_tier_left_alone_is_something_to_look_at(site: Site, open_page: OpenPage) -> None:
    disk, s3 = site.status.tiers
    site.status = msgspec.structs.replace(
        site.status, tiers=[disk, msgspec.structs.replace(s3, state="circuit breaker open")]
    )
    page = open_page()
    assert text(page, "#state") == "Working, with warnings"
    assert "s3: circuit breaker open" in text(page, "#reasons")
    assert page.get_attribute("#verdict", "data-level") == "look"


def test_the_page_survives_a_restart_of_the_server_and_says_so(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    site.close()
    shows(page, "#state", "Not reachable")
    assert text(page, "#hit-rate") == "55.1%"  # the old figures stay, and are said to be old
    assert "The figures below are from" in text(page, "#since")
    again = Site(site.port)
    try:
        again.status = empty_status()
        page.wait_for_selector(".verdict[data-level=good]")
        assert text(page, "#hit-rate") == NONE
        assert "/v1/history" in again.asked
    finally:
        again.close()


def test_the_page_of_an_older_server_loads_itself_anew(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate("window.old = true")
    site.status = msgspec.structs.replace(site.status, version="0.2.0")
    shows(page, "#since", "version 0.2.0")
    page.wait_for_function("window.old === undefined")


def test_an_answer_that_is_no_status_does_not_end_the_asking(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    site.gibberish = True
    shows(page, "#state", "Not reachable")
    site.gibberish = False
    page.wait_for_selector(".verdict[data-level=good]")


def test_a_depot_that_does_not_answer_is_told_from_a_page_that_is_not_served(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    site.trouble = "the server has not answered for 4.2 s"
    shows(page, "#state", "Not answering")
    assert text(page, "#reasons").startswith("The server has not answered for 4.2 s. Engines recompute everything")
    assert "The figures below are from" in text(page, "#since")
    site.trouble = ""
    page.wait_for_selector(".verdict[data-level=good]")


def test_a_depot_that_is_slow_to_answer_is_something_to_look_at(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    site.lag = "the server lags: its last answer took 1.4 s"
    shows(page, "#state", "Working, with warnings")
    assert text(page, "#reasons") == "The server lags: its last answer took 1.4 s."
    site.lag = ""
    page.wait_for_selector(".verdict[data-level=good]")


def test_what_the_page_cannot_show_does_not_leave_it_saying_that_all_is_well(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    good, site.status = site.status, msgspec.structs.replace(site.status, engines=None)  # type: ignore[arg-type]
    shows(page, "#state", "Page error")
    assert page.get_attribute("#verdict", "data-level") == "bad"
    site.status = good
    page.wait_for_selector(".verdict[data-level=good]")


def test_chunks_that_find_no_room_are_something_to_look_at_for_as_long_as_it_lasts(
    site: Site, open_page: OpenPage
) -> None:
    now, site.ticks = site.status.wall_s, False
    times = [now - 400 + i for i in range(401)]
    drops = [3.0 if i > 390 else 0.0 for i in range(401)]
    site.history = {"times_s": times, "series": {"dropped_chunks_s": drops}}
    page = open_page(wait_for="h1:has-text('with warnings')")
    assert "30 chunks were dropped in the last 5 min" in text(page, "#reasons")
    drops.reverse()
    page.reload()
    page.wait_for_selector(".verdict[data-level=good]")


def test_a_token_is_taken_from_the_address_and_does_not_stay_there(site: Site, open_page: OpenPage) -> None:
    site.token = "s3cret"
    page = open_page(f"{site.url}#token=s3cret")
    assert page.url == site.url
    page.reload()
    page.wait_for_selector(".verdict[data-level=good]")  # it is known as long as the tab is open


def test_a_token_that_is_missing_can_be_typed(site: Site, open_page: OpenPage) -> None:
    site.token = "s3cret"
    page = open_page(wait_for="h1:has-text('Token required')")
    page.get_by_label("Token", exact=True).fill("secret")
    page.keyboard.press("Enter")
    shows(page, "#state", "Wrong token")
    page.get_by_label("Token", exact=True).fill("s3cret")
    page.get_by_role("button", name="Open").click()
    page.wait_for_selector(".verdict[data-level=good]")
    assert page.is_hidden("#token")


def test_a_page_that_nobody_looks_at_asks_nothing(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    hide = "value => { Object.defineProperty(document, 'hidden', { value, configurable: true });"
    page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange')); }", True)

    def asks_nothing() -> bool:
        before = len(site.asked)
        page.wait_for_timeout(2500)
        return len(site.asked) == before

    eventually(asks_nothing)  # once what was under way has come
    asked = len(site.asked)
    page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange')); }", False)
    eventually(lambda: len(site.asked) > asked)


def test_the_page_asks_one_thing_a_second_however_often_it_is_hidden_and_shown(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    show = "document.dispatchEvent(new Event('visibilitychange'))"
    for _ in range(20):
        page.evaluate(show)
    page.wait_for_timeout(1500)  # what was under way
    before, turn = len(site.asked), site.turn()
    page.wait_for_timeout(3500)
    eventually(lambda: len(site.asked) >= before + 2)
    asked = site.asked[before:]
    assert set(asked) == {"/v1/status"}
    assert len(asked) <= site.turn() - turn + 2, "more than once a turn"


@pytest.mark.parametrize("what", ["trouble", "gibberish"])
def test_where_there_is_no_status_the_page_waits_a_second_before_it_asks_again(
    site: Site, open_page: OpenPage, what: str
) -> None:
    page = open_page()
    setattr(site, what, what == "gibberish" or "it hangs")
    shows(page, "#state", "Not")
    before, turn = len(site.asked), site.turn()
    page.wait_for_timeout(3500)
    eventually(lambda: len(site.asked) > before)
    asked = len(site.asked) - before
    assert asked <= site.turn() - turn + 2, "more than once a turn"


def test_the_same_turn_again_is_not_asked_for_at_once(site: Site, open_page: OpenPage) -> None:
    """A server or proxy that answers at once must not be flooded with requests."""
    site.waits = False
    open_page()
    before, turn = len(site.asked), site.turn()
    eventually(lambda: len(site.asked) > before + 3)
    assert site.turn() > turn


# -- over time


def test_charts_are_drawn_from_the_history_and_have_tables_behind_them(site: Site, open_page: OpenPage) -> None:
    site.ticks = False
    site.history = example_history(site.status.wall_s)
    page = open_page()
    assert page.locator("#charts canvas").count() == page.locator("#charts figure").count() == 7
    drawn = page.eval_on_selector_all(
        "#charts canvas",
        "all => all.map(canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
        ".data.some(value => value))",
    )
    assert all(drawn)
    figure = page.locator("#charts figure").first
    last = site.history["series"]["reuse_rate"][-1]
    assert f"{100 * last:.1f}%" in " ".join(figure.locator(".legend").inner_text().split())
    assert f"Reused {100 * last:.1f}%" in (figure.locator(".plot").get_attribute("aria-label") or "")
    figure.locator("summary").click()
    figure.locator("tbody tr").first.wait_for()
    cells = figure.locator("tbody tr").first.locator("th, td").all_inner_texts()
    assert cells[1] == f"{100 * last:.1f}%"


def test_lines_go_on_from_one_status_to_the_next(site: Site, open_page: OpenPage) -> None:
    before, site.ticks = site.status, False
    site.history = example_history(before.wall_s)
    page = open_page()
    site.status = msgspec.structs.replace(
        before,
        wall_s=before.wall_s + 2,
        uptime_s=before.uptime_s + 2,
        stored_bytes=before.stored_bytes + 4 * 10**9,
    )
    stored = page.locator("#charts figure", has_text="Stored and retrieved").locator(".legend")
    stored.filter(has_text="2 GB/s").wait_for()
    assert site.asked.count("/v1/history") == 1


def test_what_happens_between_two_ticks_of_the_servers_clock_is_drawn(site: Site, open_page: OpenPage) -> None:
    """A status has the time of the last tick in whole seconds, but its exact uptime."""
    before, site.ticks = site.status, False
    ends = before.wall_s + 1  # the web process's clock is the exact one
    site.history = {"times_s": [ends - 1, ends], "series": {"stored_bytes_s": [0.0, 0.0]}}
    page = open_page()
    stored = page.locator("#charts figure", has_text="Stored and retrieved").locator(".legend")
    for ticked_s, gone_s, moved, shown in ((0, 1, 3, "3 GB/s"), (2, 2, 7, "4 GB/s"), (2, 4, 19, "6 GB/s")):
        site.status = msgspec.structs.replace(
            before,
            wall_s=before.wall_s + ticked_s,
            uptime_s=before.uptime_s + gone_s,
            stored_bytes=before.stored_bytes + moved * 10**9,
        )
        stored.filter(has_text=shown).wait_for()
    assert site.asked.count("/v1/history") == 1


def test_a_clock_that_was_set_makes_the_page_ask_for_the_points_anew(site: Site, open_page: OpenPage) -> None:
    now = site.status.wall_s
    site.history = {"times_s": [now - 1, now], "series": {"used_bytes": [2**30, 2**30]}}
    page = open_page()
    site.history = {"times_s": [now - 7201, now - 7200], "series": {"used_bytes": [2**31, 2**31]}}
    site.status = msgspec.structs.replace(site.status, wall_s=now - 7200)
    eventually(lambda: site.asked.count("/v1/history") == 2)
    page.locator("#charts figure", has_text="Bytes used").locator("summary").click()
    shows(page, "#charts figure:has-text('Bytes used') tbody", "2 GiB")
    turns = site.asked.count("/v1/status")
    eventually(lambda: site.asked.count("/v1/status") > turns + 2)
    assert site.asked.count("/v1/history") == 2


def test_what_was_before_a_restart_stays_in_the_charts(site: Site, open_page: OpenPage) -> None:
    now = site.status.wall_s
    site.history = {"times_s": [now - 60, now - 59], "series": {"used_bytes": [3 * 2**30, 3 * 2**30]}}
    page = open_page()
    site.history = {"times_s": [now], "series": {"used_bytes": [2**30]}}
    site.status = msgspec.structs.replace(site.status, boot="b2")
    eventually(lambda: site.asked.count("/v1/history") == 2)
    figure = page.locator("#charts figure", has_text="Bytes used")
    figure.locator("summary").click()
    shows(page, "#charts figure:has-text('Bytes used') tbody", "3 GiB")
    texts = figure.locator("tbody tr td:nth-child(2)").all_inner_texts()
    assert texts[-4:] == ["1 GiB", NONE, "3 GiB", "3 GiB"]  # and nothing is drawn between the two


def test_a_page_that_is_open_for_long_keeps_as_much_as_its_charts_show(open_page: OpenPage) -> None:
    page = open_page()
    kept, first, last = page.evaluate(
        "import('/series.js').then(({ History }) => { const all = new History();"
        " for (let i = 0; i <= 30000; i++) all.add(i, { one: i });"
        " return [all.times.length, all.times[0], all.window(['one'], 21600)[1][0]]; })"
    )
    assert (kept, first, last) == (21601, 8400, 8400)


def test_a_value_with_none_beside_it_is_drawn(site: Site, open_page: OpenPage) -> None:
    """This happens with few requests: most seconds have no percentile."""
    now, site.ticks = site.status.wall_s, False
    times = [now - 800 + i for i in range(801)]
    values = [0.01 if i % 40 == 0 else None for i in range(801)]
    site.history = {"times_s": times, "series": {"retrieve_p50_s": values}}
    page = open_page(color_scheme="light")
    orange = page.eval_on_selector(
        "figure:has-text('Request latency') canvas",
        "canvas => { const all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        " let found = 0; for (let i = 0; i < all.length; i += 4)"
        " if (all[i + 3] > 200 && all[i] - all[i + 2] > 100) found++; return found; }",
    )
    assert orange > 20


def test_saved_tokens_are_drawn_from_the_beginning_of_the_time_shown(site: Site, open_page: OpenPage) -> None:
    now, site.ticks = site.status.wall_s, False
    times = [now - 100, now - 50, now]
    site.history = {
        "times_s": times,
        "series": {"saved_tokens": [5000, 7000, 8500], "saved_prefill_s": [100, 101, 104]},
    }
    page = open_page()
    legends = " ".join(" ".join(page.locator("#charts .legend").all_inner_texts()).split())
    assert "Tokens 3,500" in legends
    assert "Time 4 s" in legends


def test_a_restart_is_told_by_the_boot_id_not_by_a_counter_that_falls(site: Site, open_page: OpenPage) -> None:
    now, site.ticks = site.status.wall_s, False
    site.history = {
        "times_s": [now - 30, now - 20, now - 10, now],
        # The second server has saved more by the first look at it than the one before had.
        "series": {"boot": [1, 1, 2, 2], "saved_tokens": [1000, 1500, 2000, 2500], "saved_prefill_s": [10, 12, 3, 4]},
    }
    page = open_page()
    legends = " ".join(" ".join(page.locator("#charts .legend").all_inner_texts()).split())
    assert "Tokens 3,000" in legends
    assert "Time 6 s" in legends


def test_without_uplot_the_page_says_what_is_missing_and_shows_tables(site: Site, open_page: OpenPage) -> None:
    site.missing = "/vendor/"
    site.history = example_history(site.status.wall_s)
    page = open_page()
    assert "uPlot could not be loaded" in text(page, "#charts-missing")
    assert page.locator("#charts canvas").count() == 0
    first = page.locator("#charts figure").first.locator("tbody tr").first.inner_text()
    assert "%" in first


def test_the_page_counts_latencies_in_the_same_buckets_as_the_server(open_page: OpenPage) -> None:
    page = open_page()
    bounds = page.evaluate("import('/series.js').then(module => module.BOUNDS_S)")
    assert bounds == list(BOUNDS_S)


def test_the_page_says_why_chunks_were_lost_in_the_same_words_as_the_terminal(site: Site, open_page: OpenPage) -> None:
    from kvdepot.cli import view

    names = [counted.name for counted in SERVER]
    site.status = msgspec.structs.replace(site.status, tiers=[], counters=dict.fromkeys(names, 1))
    page = open_page()
    listing = next(each for each in view.listings(site.status) if each.heads[0] == view.LOST)
    assert rows(page, "losses") == [[where, why, count] for why, count, where, _ in listing.rows]


# -- for everybody


def test_nothing_is_asked_of_others_and_no_rule_for_content_is_broken(
    browser: Browser, site: Site, open_page: OpenPage
) -> None:
    site.history = example_history(site.status.wall_s)
    page = browser.new_page()
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(site.url)
    page.wait_for_selector("h1:has-text('Working')")
    page.check("input[value=dark]")
    page.check("input[value='3600']")
    page.locator("summary").first.click()
    page.close()
    assert problems == []
    assert asked and all(url.startswith((site.url, "data:")) for url in asked)


def test_figures_are_rounded_to_what_is_true(open_page: OpenPage) -> None:
    page = open_page()
    said = page.evaluate(
        "import('/format.js').then(({ bytes, byteRate, share, duration, latency }) => ["
        " bytes(2 ** 30 - 1), byteRate(999.96e6), share(0), share(0.00001), share(0.99999), share(1),"
        " duration(0.99991), latency(0.00004), latency(0.004), latency(10), latency(null)])"
    )
    assert said == [
        "1 GiB", "1 GB/s", "0%", "<0.1%", ">99.9%", "100.0%", "1 s", "<0.1 ms", "4 ms",
        "\N{GREATER-THAN OR EQUAL TO}10 s", NONE,
    ]  # fmt: skip


@pytest.mark.parametrize("look", ["light", "dark", "narrow", "empty", "down", "no charts"])
def test_axe_finds_no_fault(site: Site, open_page: OpenPage, look: str) -> None:
    pytest.importorskip("axe_playwright_python") if not os.environ.get("CI") else None
    from axe_playwright_python.sync_playwright import Axe

    site.history = example_history(site.status.wall_s)
    if look == "empty":
        site.status, site.history = empty_status(), {"times_s": [], "series": {}}
    if look == "no charts":
        site.missing = "/vendor/"
    page = open_page(width=400 if look == "narrow" else 1280, color_scheme="dark" if look == "dark" else "light")
    if look == "down":
        site.trouble = "it hangs"
        shows(page, "#state", "Not answering")
    page.locator("summary").first.click()
    found = Axe().run(page).response["violations"]
    faults = [(fault["id"], fault["impact"], [node["html"] for node in fault["nodes"]][:3]) for fault in found]
    assert faults == [], json.dumps(faults, indent=1)


@pytest.mark.parametrize("width", [320, 400, 768, 1280, 2560])
def test_no_width_needs_scrolling_sideways(site: Site, open_page: OpenPage, width: int) -> None:
    site.history = example_history(site.status.wall_s)
    page = open_page(width=width)
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= seen
    outside = page.eval_on_selector_all(
        ".card, .verdict, canvas",
        f"all => all.filter(e => e.getBoundingClientRect().right > {width} + 0.5).map(e => e.textContent.slice(0, 40))",
    )
    assert outside == []


@pytest.mark.parametrize("width", [400, 1440])
def test_names_without_end_do_not_widen_the_page(site: Site, open_page: OpenPage, width: int) -> None:
    name = "\N{RIGHT-TO-LEFT OVERRIDE}" + 250 * "x"
    site.history = example_history(site.status.wall_s)
    site.status = msgspec.structs.replace(
        site.status,
        tiers=[msgspec.structs.replace(site.status.tiers[0], name=name, state=name)],
        namespaces=[NamespaceStatus(name, name, 1, 1, 1, 1, 1)],
        engines=[Engine(name, 1.0, 1.0, [name], [0], "", name, 0, 0, 0)],
        leases=[a_lease(name, 1, None)],
        events=[Event(site.status.wall_s, name, name)],
    )
    page = open_page(width=width)
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= seen


def test_a_first_look_shows_all_four_answers_without_scrolling(site: Site, open_page: OpenPage) -> None:
    page = open_page(width=1440)
    for table in ("#state", "#saved-tokens", "#stores .of", "#engines tbody tr:nth-child(3)"):
        box = page.locator(table).first.bounding_box()
        assert box is not None and box["y"] + box["height"] <= 900, table


def test_readers_of_screens_are_told_of_states_and_not_of_each_second(site: Site, open_page: OpenPage) -> None:
    site.status = msgspec.structs.replace(site.status, uptime_s=10.0)
    page = open_page()
    since = text(page, "#since")
    page.evaluate(
        "window.told = 0; new MutationObserver(all => told += all.length)"
        ".observe(document.querySelector('[role=status]'), { subtree: true, childList: true, characterData: true })"
    )
    eventually(lambda: text(page, "#since") != since)
    assert page.evaluate("told") == 0
    site.trouble = "it hangs"
    shows(page, "[role=status]", "Not answering")
    assert page.evaluate("told") > 0


def test_the_colours_follow_the_system_until_somebody_chooses(site: Site, open_page: OpenPage) -> None:
    page = open_page(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    assert dark != light
    page.check("input[value=dark]")
    assert page.evaluate(background) == dark
    page.reload()
    page.wait_for_selector("h1:has-text('Working')")
    assert page.evaluate(background) == dark
    assert page.is_checked("input[value=dark]")
    page.check("input[value=auto]")
    assert page.evaluate(background) == light


def test_the_keyboard_reaches_everything_that_can_be_used(site: Site, open_page: OpenPage) -> None:
    site.history = example_history(site.status.wall_s)
    page = open_page()
    reached = []
    describe = "(({ id, name, tagName, className }) => name || id || className || tagName)(document.activeElement)"
    page.keyboard.press("Tab")
    for _ in range(60):
        reached.append(page.evaluate(describe))
        page.keyboard.press("Tab")
    assert reached[0] == "skip"
    assert "theme" in reached and "range" in reached and "SUMMARY" in reached and "scroll" in reached
    page.focus("input[name=range]:checked")
    page.keyboard.press("ArrowRight")
    assert page.is_checked("input[value='3600']")


def test_nothing_moves_for_who_wants_no_motion(site: Site, open_page: OpenPage) -> None:
    page = open_page(reduced_motion="reduce")
    moving = page.evaluate(
        "[...document.querySelectorAll('*')].filter(e => getComputedStyle(e).transitionDuration !== '0s'"
        " || getComputedStyle(e).animationName !== 'none').length"
    )
    assert moving == 0


def test_what_stays_the_same_is_not_drawn_anew(site: Site, open_page: OpenPage) -> None:
    """Otherwise a selection, the focus or a screen reader's place would be lost each second."""
    site.history = example_history(site.status.wall_s)
    page = open_page()
    page.evaluate(
        "window.drawn = []; new MutationObserver(all => drawn.push(...all.flatMap(change => [...change.addedNodes])"
        ".filter(node => node.nodeType === 1).map(node => node.outerHTML)))"
        ".observe(document.querySelector('main'), { subtree: true, childList: true })"
    )
    asked = site.asked.count("/v1/status")
    eventually(lambda: site.asked.count("/v1/status") > asked + 2)
    assert page.evaluate("drawn") == []


# -- with a real server


@pytest.fixture
def port() -> int:
    """A free port, for servers that use it one after the other."""
    if importlib.util.find_spec("kvdepot.web.app") is None:
        _needed(False, "kvdepot.web")
    return free_port()


def ask(port: int, path: str) -> Any:
    """A real server's answer; None if there is no server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return json.load(answer)
    except OSError:
        return None


def test_what_the_page_shows_is_what_a_real_server_says(
    start_depot: StartDepot, port: int, open_page: OpenPage
) -> None:
    from kvdepot.adapters import LoadStoreOp
    from tests.client.engine import Engine as RealEngine

    depot = start_depot("--http", f"127.0.0.1:{port}")
    engine, tokens = RealEngine(depot), list(range(512))
    assert engine.lookup(tokens) == 0
    engine.store(tokens, list(range(8)))
    engine.scheduler.maybe_submit_lookup_request("r", token_ids=tokens)
    assert engine.scheduler.wait_lookup_result("r", 10.0) == 512
    engine.worker.submit_retrieve_request("r", LoadStoreOp(list(range(8, 16)), token_ids=tokens), None)
    eventually(lambda: engine.worker.get_finished(set())[1])
    status = eventually(lambda: (now := ask(port, "/v1/status")) and now["saved"]["tokens"] == 512 and now)
    page = open_page(f"http://127.0.0.1:{port}/")
    shows(page, "#saved-tokens", "512")
    assert rows(page, "namespaces") == [[engine.model, "8 KiB", "<0.1%", "2", "50.0%", "1"]]
    assert sorted(row[1] for row in rows(page, "engines")) == sorted(each["id"] for each in status["engines"])
    times = {row[0]: row[1] for row in rows(page, "latencies")}
    assert (times["Lookup"], times["Store"], times["Retrieve"]) == ("2", "1", "1")
    assert "Chunks 2" in text(page, "#facts")
    assert text(page, "#hit-rate") == "50.0%"
    assert text(page, "#stores .big") == f"{status['used_bytes'] / 1024:g} KiB"
    assert f"of {status['capacity_bytes'] / 2**20:.1f} MiB" in text(page, "#stores .of")
    assert [event["text"] for event in reversed(status["events"])] == page.locator(
        "#events li span:last-child"
    ).all_inner_texts()
    engine.close()


def test_the_page_comes_back_by_itself_after_a_real_server_was_killed(
    start_depot: StartDepot, port: int, open_page: OpenPage
) -> None:
    first = start_depot("--http", f"127.0.0.1:{port}")
    boot = eventually(lambda: ask(port, "/v1/status"))["boot"]
    page = open_page(f"http://127.0.0.1:{port}/")
    first.process.kill()
    shows(page, "#state", "Not")
    start_depot("--http", f"127.0.0.1:{port}", name=first.name)
    eventually(lambda: (now := ask(port, "/v1/status")) and now["boot"] != boot)
    page.wait_for_selector(".verdict[data-level=good]")


def test_the_page_goes_on_a_line_as_the_server_would(port: int, open_page: OpenPage, site: Site) -> None:
    """Both compute points from two statuses; the page does it in JavaScript, to request /v1/history only once."""
    from kvdepot.web.history import measure

    before = example_status(1000.0)
    lookup = next(each for each in before.latencies if each.request == "Lookup")
    buckets = [count + 3 * i for i, count in enumerate(lookup.buckets)]
    after = msgspec.structs.replace(
        before,
        wall_s=1001.0,  # whole seconds, of a tick; what went by is told by uptime_s
        uptime_s=before.uptime_s + 2.0,
        stored_bytes=before.stored_bytes + 12345,
        evicted_chunks=before.evicted_chunks + 7,
        counters={**before.counters, "dropped_chunks": before.counters["dropped_chunks"] + 3, "failed_chunks": 5},
        latencies=[msgspec.structs.replace(lookup, buckets=buckets)],
    )
    wanted = {name: value for name, value in measure(before, after, 2.0).items() if value == value}
    page = open_page()
    drawn = page.evaluate(
        "([before, after]) => import('/series.js').then(module => module.point(before, after))",
        [msgspec.to_builtins(before), msgspec.to_builtins(after)],
    )
    assert {name: value for name, value in drawn.items() if value is not None} == pytest.approx(wanted)
