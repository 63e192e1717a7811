"""The web page in a real Chromium: its text, tables and charts show the server's status."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvdepot.metrics import Event
from kvdepot.protocol.counters import SERVER
from kvdepot.status import Engine, NamespaceStatus
from tests.conftest import HANG_S, StartDepot, eventually
from tests.ports import free_port
from tests.web.browser import chromium, executable
from tests.web.site import (
    GIB,
    Site,
    a_lease,
    empty_status,
    example_history,
    example_leases,
    example_prefixes,
)  # fmt: skip

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.faults

WAIT_MS = 1000 * HANG_S
NONE = "\N{EN DASH}"


def _needed(is_there: bool, what: str) -> None:
    """Skip the test where something is missing; where all must be there, fail."""
    if not is_there:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{what} is missing")


JUDGED = "h1:has-text('Healthy'), h1:has-text('Needs attention')"
"""The headline of a page that has a status."""


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

    def open_(address: str = "", width: int = 1280, wait_for: str = JUDGED, **options: Any) -> Page:
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


def each_second(page: Page) -> None:
    """Let charts show a time so short that each point is a second."""
    page.eval_on_selector(
        "#range input:checked", "e => { e.value = 120; e.dispatchEvent(new Event('change', { bubbles: true })); }"
    )


def constant(until_s: float, seconds: int = 100, **values: float) -> dict[str, Any]:
    """A history in which these series had one value for so long: enough rows that a table always has some of them."""
    times = [until_s - seconds + 1 + i for i in range(seconds)]
    return {"times_s": times, "series": {name: [value] * seconds for name, value in values.items()}}


def open_part(page: Page, name: str) -> None:
    """Open a part of the page that is closed."""
    if page.get_attribute(f"#{name}", "open") is None:
        page.click(f"#{name} > summary")


def rows(page: Page, table: str) -> list[list[str]]:
    """The texts of a table's body."""
    found: list[list[str]] = page.eval_on_selector_all(
        f"#{table} tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


# -- what it says


def test_the_page_shows_state_uptime_version_and_number_of_engines(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    assert text(page, "#state") == "Healthy"
    assert text(page, "#host") == "gpu-node-7:7077"
    assert page.title() == "gpu-node-7:7077 · kvdepot"
    assert re.fullmatch(r"version 0\.1\.0, since \d+ \w+, [\d:]+ \(3 d 4 h\)", text(page, "#since"))
    facts = text(page, "#facts")
    assert facts == "Engine processes 5 Requests in progress 9 Tokens in memory 8.1M"


def test_what_is_gained_is_what_engines_reused_lately_and_what_was_saved(site: Site, open_page: OpenPage) -> None:
    site.ticks = False
    site.history = example_history(site.status.wall_s)
    page = open_page()
    assert text(page, "#hit-window") == "last 15 min"
    assert text(page, "#hit-rate") == "61.3%"
    assert text(page, "#hit-ceiling").endswith("M prompt tokens; 76.0% found here; upper bound (infinite cache) 84.0%")
    assert page.get_attribute("#hit-bar", "aria-valuenow") == "61.3"
    assert text(page, "#gain-facts") == (
        "Total saved 198.7M tokens Total prefill saved 11 h 27 min TTFT saved per request 642 ms"
    )
    open_part(page, "detail")
    assert [[row[0], *row[2:]] for row in rows(page, "windows")] == [
        ["minute", "61.3%", "76.0%", "84.0%"], ["10 min", "61.3%", "76.0%", "84.0%"],
        ["15 min", "61.3%", "76.0%", "84.0%"], ["since the start", "55.0%", "69.8%", "83.4%"],
    ]  # fmt: skip


def test_memory_and_each_tier_say_how_full_they_are_in_numbers_and_bars(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    cards = page.locator("#stores .card")
    assert cards.count() == 3
    memory, disk, s3 = (" ".join(cards.nth(i).inner_text().split()) for i in range(3))
    assert memory.startswith("Memory 241 GiB 94.3% of 256 GiB")
    assert disk.startswith("disk up 1.43 TiB 71.5% of 2 TiB") and "Queued 3 MiB" in disk
    assert "capacity unknown" in s3 and "Last error, 1 min 24 s ago: 503 SlowDown" in s3
    assert "Holds about 42 min of traffic" in memory and "Evicted within 5 min of use 1.7%" in memory
    assert "Load p50, p99 5.54 ms, 17.9 ms" in disk and "In flight 3 in, 2 out" in disk
    assert f"Load p50, p99 {NONE}" in s3
    bars = page.locator("#stores [role=meter]:visible")
    assert [bars.nth(i).get_attribute("aria-valuenow") for i in range(bars.count())] == ["94.3", "71.5"]


def test_what_has_one_name_is_listed_once_each_however_long_the_page_is_open(site: Site, open_page: OpenPage) -> None:
    """Namespaces of one model that differ, for example, in the type of the KV cache."""
    twins = [NamespaceStatus("", "twin", 1, 1, chunks, 2**20, 1) for chunks in (1, 2)]
    tiers = [msgspec.structs.replace(tier, name="twin") for tier in site.status.tiers]
    site.status = msgspec.structs.replace(site.status, namespaces=twins, tiers=tiers)
    page = open_page()
    seen = site.events
    eventually(lambda: site.events > seen + 2)
    titles = page.eval_on_selector_all("#namespaces td:nth-child(4)", "cells => cells.map(cell => cell.title)")
    assert titles == ["1 chunks", "2 chunks"]
    assert page.locator("#stores .card").count() == 3


def test_engines_stay_in_their_places_whoever_was_heard_last(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    before = rows(page, "engines")
    site.status = msgspec.structs.replace(site.status, engines=site.status.engines[::-1])
    seen = site.events
    eventually(lambda: site.events > seen + 1)
    assert rows(page, "engines") == before


def test_engines_and_models_are_listed_with_their_state_bytes_and_tokens(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    assert [row[:5] for row in rows(page, "engines")] == [
        ["scheduler", "9f31c2aa", "gpu-node-7:5101", NONE, "serving"],
        ["worker 0", "9f31c2aa", "gpu-node-7:5102", "cuda:0", "copying"],
        ["worker 1", "9f31c2aa", "gpu-node-7:5103", "cuda:1", "copying"],
        ["scheduler", "17e5f6b9", "gpu-node-7:5104", NONE, "serving"],
        ["worker 0", "17e5f6b9", "gpu-node-7:5105", "cuda:2", "idle 10 min"],
    ]
    assert rows(page, "namespaces") == [
        ["meta-llama/Llama-3.3-70B", "208M", "63.0%", "150 GiB", "58.7%", "2", "Forget…"],
        ["Qwen/Qwen3-32B", "129M", "49.6%", "75.1 GiB", "29.3%", "1", "Forget…"],
        ["research: mistralai/Mistral-Small-24B", "24M", "15.5%", "15.8 GiB", "6.2%", "0", "Forget…"],
    ]


def test_an_id_is_short_and_its_whole_is_told_on_focus_and_under_the_pointer(site: Site, open_page: OpenPage) -> None:
    site.prefixes = example_prefixes()
    page = open_page()
    first = page.locator("#prefixes tbody tr").first.locator(".mono")
    first.wait_for()
    assert first.inner_text() == "9a9a9a9a"
    assert page.is_hidden("#tip")
    first.focus()
    assert text(page, "#tip") == 32 * "9a"
    assert first.get_attribute("aria-describedby") == "tip"
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    first.hover()
    assert text(page, "#tip") == 32 * "9a"


def test_prefixes_and_leases_are_listed_while_they_can_be_seen(site: Site, open_page: OpenPage) -> None:
    site.prefixes, site.leases = example_prefixes(), example_leases()
    page = open_page()
    page.locator("#prefixes tbody tr").nth(2).wait_for()
    assert rows(page, "prefixes")[0][1:8] == [
        "meta-llama/Llama-3.3-70B", "22.1K", "90.5M", "4,096", "6.4 GiB", "3 d", "5 min",
    ]  # fmt: skip
    page.locator("#leases tbody tr").nth(1).wait_for()
    assert rows(page, "leases") == [
        ["system-prompt", "retain", "1.2 GiB", "never", "50", "End…"],
        ["handbook", "retain", "4.7 GiB", "1 h 30 min", "50", "End…"],
    ]
    asked = len(site.asked)
    narrow = open_page(width=400)
    seen = site.events
    eventually(lambda: site.events > seen + 3)
    assert not narrow.get_attribute("#users", "open")
    assert not {"/v1/prefixes", "/v1/leases"} & {*site.asked[asked:]}, "a part that is closed needs nothing"
    nothing: Any = None
    site.prefixes = nothing
    open_page().locator("#leases tbody tr").nth(1).wait_for()  # one list does not need the other


def test_tenants_are_listed_with_tokens_and_quotas_and_without_any_not_at_all(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    assert rows(page, "tenants") == [
        ["others", "349M", "55.9%", "226 GiB", NONE, NONE, "10K", "0"],
        ["research", "12M", "31.1%", "15.8 GiB", "8 GiB", "16 GiB", "3,411", "12"],
    ]
    site.status = msgspec.structs.replace(site.status, tenants=[], usage=site.status.usage[:1])
    eventually(lambda: not page.locator("#tenants-part").is_visible())


def test_events_are_listed_the_latest_first(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    texts = page.locator("#events li span:last-child").all_inner_texts()
    assert texts == [event.text for event in reversed(site.status.events)]


def test_a_server_that_has_just_started_shows_no_figures_that_it_does_not_have(site: Site, open_page: OpenPage) -> None:
    site.status = empty_status()
    page = open_page()
    assert text(page, "#hit-rate") == NONE
    assert "No engine has looked anything up yet" in text(page, "#hit-ceiling")
    assert "No engine is connected" in text(page, "#engines-none")
    assert "--kv-transfer-config" in text(page, "#verdict"), "what to do next comes first"
    assert page.is_hidden("#engines")
    assert re.search(f"Total prefill saved {NONE}", text(page, "#gain-facts"))
    saved = page.locator("figure", has_text="TTFT saved per request").locator(".plot")
    assert saved.inner_text().strip() == "No values yet"
    assert not re.search(r"NaN|undefined|Infinity|null", page.inner_text("body"))


def drawn(page: Page, title: str, where: str) -> list[list[int]]:
    """The rows of pixels (0: transparent) of a part of a chart: `where` is [x, y, width, height] of the canvas c."""
    found: list[list[int]] = (
        page.locator("figure", has_text=title)
        .locator("canvas")
        .evaluate(
            f"""c => {{
          const [x, y, w, h] = {where};
          const alphas = [...c.getContext('2d').getImageData(x, y, w, h).data].filter((_, i) => i % 4 === 3);
          return Array.from({{ length: h }}, (_, row) => alphas.slice(row * w, (row + 1) * w));
        }}"""
        )
    )
    return found


def test_no_label_of_time_is_cut_and_an_empty_chart_has_few_lines(site: Site, open_page: OpenPage) -> None:
    site.ticks = False
    site.status = empty_status()
    until_s = site.status.wall_s // 60 * 60 + 30  # where the last label is, with seconds
    site.status = msgspec.structs.replace(site.status, wall_s=until_s)
    site.history = constant(until_s, 31, used_bytes=0.0)
    page = open_page(width=1400)
    assert any(map(any, drawn(page, "Bytes in memory", "[c.width - 31, c.height - 26, 27, 26]"))), "the last label"
    assert not any(map(any, drawn(page, "Bytes in memory", "[c.width - 3, c.height - 26, 3, 26]")))
    (column,) = zip(*drawn(page, "Request latency", "[70, 0, 1, c.height - 30]"), strict=True)
    assert sum(map(bool, column)) <= 12


@pytest.mark.parametrize("width", [400, 1280, 1400])
def test_buttons_in_tables_are_seen_whole_without_scrolling(site: Site, open_page: OpenPage, width: int) -> None:
    site.prefixes = example_prefixes()
    page = open_page(width=width)
    open_part(page, "users")
    page.locator("#prefixes tbody tr").nth(2).wait_for()
    cut = page.eval_on_selector_all(
        ".small-button",
        "all => all.filter(e => e.getBoundingClientRect().right > e.closest('.scroll').getBoundingClientRect().right)",
    )
    assert cut == []


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
    assert text(page, "#state") == "Needs attention: 1 warning"
    assert "s3: circuit breaker open" in text(page, "#reasons")
    assert "Check that it is running" in text(page, "#reasons")  # what to do
    assert page.get_attribute("#verdict", "data-level") == "look"


def test_the_page_survives_a_restart_of_the_server_and_says_so(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    site.close()
    shows(page, "#state", "Not reachable")
    assert text(page, "#hit-rate") == "55.0%"  # the old figures stay, and are said to be old
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


def test_a_depot_that_does_not_answer_is_told_from_a_page_that_is_not_served(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    site.trouble = "the server has not answered for 4.2 s"
    shows(page, "#state", "Not answering")
    assert text(page, "#reasons").startswith("The server has not answered for 4.2 s. Engines recompute everything")
    assert "The figures below are from" in text(page, "#since")
    site.trouble = ""
    page.wait_for_selector(".verdict[data-level=good]")


def test_what_the_page_cannot_show_does_not_leave_it_saying_that_all_is_well(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    good, site.status = site.status, msgspec.structs.replace(site.status, engines=None)  # type: ignore[arg-type]
    shows(page, "#state", "Page error")
    assert page.get_attribute("#verdict", "data-level") == "bad"
    site.status = good
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


def test_a_hidden_page_asks_for_nothing_until_it_is_shown_again(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    hide = "value => { Object.defineProperty(document, 'hidden', { value, configurable: true });"
    for _ in range(20):  # the last one counts
        page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange')); }", False)
    page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange')); }", True)

    def receives_nothing() -> bool:
        before = len(site.asked), site.events
        page.wait_for_timeout(1000)
        return (len(site.asked), site.events) == before

    eventually(receives_nothing)  # once what was under way has come
    asked = len(site.asked)
    page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange')); }", False)
    eventually(lambda: "/v1/stream" in site.asked[asked:])


@pytest.mark.parametrize("what", ["token", "gibberish"])
def test_a_page_without_a_stream_waits_before_it_asks_again(site: Site, open_page: OpenPage, what: str) -> None:
    page = open_page()
    setattr(site, what, "secret" if what == "token" else True)
    page.wait_for_selector("h1:has-text('Token required'), h1:has-text('Not reachable')")
    before, began = len(site.asked), time.monotonic()
    eventually(lambda: len(site.asked) >= before + 3)
    assert len(site.asked) - before <= time.monotonic() - began + 2, "more than once a second"


# -- over time


def chart_of(page: Page, title: str) -> Locator:
    return page.locator("figure", has_text=title)


def test_charts_are_drawn_from_the_history_and_have_tables_behind_them(site: Site, open_page: OpenPage) -> None:
    site.ticks = False
    site.history = example_history(site.status.wall_s)
    page = open_page()
    assert page.locator(".plot canvas").count() == page.locator("figure").count() == 9
    drawn = page.eval_on_selector_all(
        ".plot canvas",
        "all => all.map(canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
        ".data.some(value => value))",
    )
    assert all(drawn)
    assert page.locator(".plot > p:visible").count() == 0
    figure = chart_of(page, "Share of tokens reused")
    assert "61.3%" in " ".join(figure.locator(".legend").inner_text().split())
    assert "Reused 61.3%" in (figure.locator(".plot").get_attribute("aria-label") or "")
    figure.locator("summary").click()
    figure.locator("tbody tr").first.wait_for()
    assert figure.locator("tbody tr").first.locator("th, td").all_inner_texts()[1] == "61.3%"


def test_lines_continue_with_each_status_and_what_memory_lost_is_named_by_the_server(
    site: Site, open_page: OpenPage
) -> None:
    before, site.ticks = site.status, False
    site.history = example_history(before.wall_s)
    page = open_page()
    each_second(page)
    for later_s, moved, shown in ((1, 3, "3 GB/s"), (3, 11, "4 GB/s")):
        counters = {**before.counters, "corrupt_chunks": 2 * later_s}
        site.status = msgspec.structs.replace(
            before,
            wall_s=before.wall_s + later_s,
            uptime_s=before.uptime_s + later_s,
            stored_bytes=before.stored_bytes + moved * 10**9,
            counters=counters,
        )
        chart_of(page, "Loaded and stored").locator(".legend").filter(has_text=shown).wait_for()
    lost = chart_of(page, "Chunks evicted or not stored").locator(".legend")
    lost.filter(has_text="failed their checksum").wait_for()
    assert "2/s" in lost.inner_text()
    assert site.asked.count("/v1/history") == 1


@pytest.mark.parametrize("why", ["a clock was set back", "the answer got lost", "the server was restarted"])
def test_points_that_are_missing_are_requested(site: Site, open_page: OpenPage, why: str) -> None:
    now, site.ticks = site.status.wall_s, False
    if why == "the answer got lost":
        site.cut_off = "/v1/history"
    site.history = constant(now, 4, used_bytes=3 * 2.0**30)
    page = open_page()
    each_second(page)
    chart = chart_of(page, "Bytes in memory")
    chart.locator("summary").click()
    if why == "the server was restarted":
        shows(page, "figure:has-text('Bytes in memory') tbody", "3 GiB")
        site.history = {"times_s": [now + 60], "series": {"used_bytes": [2**30]}}
        site.close()
        shows(page, "#state", "Not reachable")
        again = Site(site.port)
        again.ticks, again.history = False, site.history
        again.status = msgspec.structs.replace(site.status, boot="b2", wall_s=now + 60)
        shows(page, "figure:has-text('Bytes in memory') tbody", "1 GiB")
        texts = chart.locator("tbody tr td:nth-child(2)").all_inner_texts()
        assert texts[:3] == ["1 GiB", NONE, "3 GiB"], "what was before stays, and nothing is drawn between the two"
        again.close()
        return
    site.history = constant(now - 7200, used_bytes=2.0**31)
    site.status = msgspec.structs.replace(site.status, wall_s=now - 7200)
    shows(page, "figure:has-text('Bytes in memory') tbody", "2 GiB")
    assert not site.cut_off


def test_a_page_that_is_open_for_long_keeps_as_much_as_its_charts_show(open_page: OpenPage) -> None:
    page = open_page()
    kept, first, last = page.evaluate(
        "import('/series.js').then(({ History }) => { const all = new History();"
        " for (let i = 0; i <= 30000; i++) all.add({ time_s: i, one: i });"
        " return [all.times.length, all.times[0], all.window(['one'], 100)[0][0]]; })"
    )
    assert (kept, first, last) == (21601, 8400, 29_900)


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


def legends(page: Page) -> str:
    return " ".join(" ".join(page.locator(".legend").all_inner_texts()).split())


def test_counters_are_drawn_as_what_they_rose_in_a_second_or_for_each_request(site: Site, open_page: OpenPage) -> None:
    now, site.ticks = site.status.wall_s, False
    site.history = {
        "times_s": [now - 20, now - 10, now],
        "series": {
            "boot": [1, 1, 1],
            "asked_tokens": [9000, 9000, 14000],
            "reused_tokens": [5000, 7000, 8500],
            "saved_prefill_s": [100, 101, 104],
            "saved_requests": [7, 7, 12],
        },
    }
    page = open_page()
    assert "Reused 150/s Asked 500/s" in legends(page)
    assert "Reused 70.0%" in legends(page)
    assert "Saved 600 ms" in legends(page)


def test_no_line_is_drawn_from_a_counter_of_one_boot_to_that_of_the_next(site: Site, open_page: OpenPage) -> None:
    """The second server may have counted more by the first look at it than the one before."""
    now, site.ticks = site.status.wall_s, False
    site.history = {
        "times_s": [now - 10, now],
        "series": {"boot": [1, 2], "reused_tokens": [1000, 2000], "asked_tokens": [3000, 4000]},
    }
    assert f"Reused {NONE} Asked {NONE}" in legends(open_page())


def test_a_point_of_many_seconds_has_the_latest_value_or_the_mean_of_percentiles(open_page: OpenPage) -> None:
    page = open_page()
    times, latency, asked = page.evaluate(
        "import('/series.js').then(({ History }) => { const all = new History();"
        " for (let i = 0; i < 601; i++) all.add({ time_s: 6000 + i, lookup_p50_s: i % 2, asked_tokens: i });"
        " return all.window(['lookup_p50_s', 'asked_tokens'], 600); })"
    )
    assert len(times) == 151 and times[1] == 6007 and times[-1] == 6600
    assert latency[1] == 0.5
    assert asked[1] == 7 and asked[-1] == 600


def test_without_uplot_the_page_says_what_is_missing_and_shows_tables(site: Site, open_page: OpenPage) -> None:
    site.missing = "/vendor/"
    site.history = example_history(site.status.wall_s)
    page = open_page()
    assert "uPlot could not be loaded" in text(page, "#charts-missing")
    assert page.locator(".plot canvas").count() == 0
    first = page.locator("#gain figure", has_text="Share of tokens").locator("tbody tr").first.inner_text()
    assert "%" in first


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
    site.history, site.prefixes = example_history(site.status.wall_s), example_prefixes()
    page = browser.new_page()
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(site.url)
    page.wait_for_selector(JUDGED)
    page.check("input[value=dark]")
    page.check("input[value='3600']")
    page.locator("figure summary").first.click()
    page.click("[data-action=forget]")
    page.close()
    assert problems == []
    assert asked and all(url.startswith((site.url, "data:")) for url in asked)


def test_figures_are_rounded_to_what_is_true(open_page: OpenPage) -> None:
    page = open_page()
    said = page.evaluate(
        "import('/format.js').then(({ bytes, byteRate, share, duration, latency }) => ["
        " bytes(2 ** 30 - 1), byteRate(999.96e6), share(0), share(0.00001), share(0.99999), share(1),"
        " duration(0.99991), ...[0.00004, 0.004, 10, null].map(value => latency(value, [0.0001, 10]))])"
    )
    assert said == [
        "1 GiB", "1 GB/s", "0%", "<0.1%", ">99.9%", "100.0%", "1 s", "<0.1 ms", "4 ms",
        "\N{GREATER-THAN OR EQUAL TO}10 s", NONE,
    ]  # fmt: skip


@pytest.mark.parametrize("look", ["light", "dark", "narrow", "empty", "down", "no charts", "dialogue"])
def test_axe_finds_no_fault(site: Site, open_page: OpenPage, look: str) -> None:
    pytest.importorskip("axe_playwright_python") if not os.environ.get("CI") else None
    from axe_playwright_python.sync_playwright import Axe

    site.history, site.prefixes = example_history(site.status.wall_s), example_prefixes()
    if look == "empty":
        site.status, site.history = empty_status(), {"times_s": [], "series": {}}
    if look == "no charts":
        site.missing = "/vendor/"
    page = open_page(width=400 if look == "narrow" else 1280, color_scheme="dark" if look == "dark" else "light")
    if look == "down":
        site.trouble = "it hangs"
        shows(page, "#state", "Not answering")
    if look == "dialogue":
        page.locator("[data-action=forget]").first.click()
    else:
        page.locator("figure summary").first.click()
        for fold in ("over-time", "users", "engines-part", "events-part", "detail"):
            open_part(page, fold)
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
        events=[Event(site.status.wall_s, name, name)],
    )
    site.leases = [a_lease(name, 1, None)]
    page = open_page(width=width)
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= seen


def test_state_savings_and_stores_are_visible_without_scrolling(site: Site, open_page: OpenPage) -> None:
    site.history = example_history(site.status.wall_s)
    page = open_page(width=1440)
    page.locator("#gain canvas").nth(2).wait_for()
    for table in ("#state", "#gain-facts", "#gain figure:nth-of-type(3) canvas", "#stores .of", "#stores dl"):
        box = page.locator(table).first.bounding_box()
        assert box is not None and box["y"] + box["height"] <= 900, table


def test_on_a_phone_the_page_is_two_screens_long(site: Site, open_page: OpenPage) -> None:
    site.history, site.prefixes = example_history(site.status.wall_s), example_prefixes()
    page = open_page(width=400)
    page.locator("#gain canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollHeight") <= 2 * 900


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
    page.wait_for_selector(JUDGED)
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
    seen = site.events
    eventually(lambda: site.events > seen + 2)
    assert page.evaluate("drawn") == []


# -- what an operator can do


@pytest.fixture
def operated(site: Site) -> Site:
    """A site that knows what a forget would do, and needs a token for changes."""
    site.needed = "s3cret"
    site.answers = {
        "/v1/forget/preview": {
            "memory": {"chunks": 31_482, "bytes": 241 * GIB},
            "tiers": {"s3": {"objects_at_most": 640_113, "bytes_at_most": None}},
        },
        "/v1/forget": {"memory": 31_482, "s3": 640_113},
        "/v1/lease": {"chunks": 2, "of_chunks": 3},
        "/v1/warm": {"chunks": 3, "of_chunks": 3},
        "/v1/release": {"name": "handbook", "removed_chunks": None},
    }
    return site


def test_forget_shows_what_it_removes_and_asks_for_the_token_once(operated: Site, open_page: OpenPage) -> None:
    page = open_page()
    page.locator("#namespaces tbody tr").nth(1).get_by_role("button").click()
    assert "Depots that share a tier lose them, too" in text(page, "#action-what")
    assert page.input_value("#action-fields select") == "Qwen/Qwen3-32B"
    page.get_by_label("Token", exact=False).last.fill("wrong")
    page.keyboard.press("Enter")
    shows(page, "#action-error", "Wrong token.")
    page.locator("#action-token input").fill("s3cret")
    page.keyboard.press("Enter")
    shows(page, "#action-effect", "31.5K chunks, 241 GiB")
    assert "at most 640.1K objects" in text(page, "#action-effect")
    assert operated.changes == [("/v1/forget/preview", {"model": "Qwen/Qwen3-32B", "salt": ""})]
    page.get_by_role("button", name="Forget 31.5K chunks").click()
    shows(page, "#action-effect", "Removed: memory: 31.5K chunks; s3: 640.1K chunks.")
    assert operated.changes[1:] == [("/v1/forget", {"model": "Qwen/Qwen3-32B", "salt": ""})]
    page.keyboard.press("Enter")  # the focus is on the button that closes
    page.locator("#action").wait_for(state="hidden")
    page.reload()
    page.wait_for_selector(JUDGED)
    page.click(".tools [data-action=forget]")
    shows(page, "#action-effect", "31.5K chunks")  # the token is known as long as the tab is open
    assert page.is_hidden("#action-token")
    assert operated.changes[2:] == [("/v1/forget/preview", {"all": True})]


def test_what_is_entered_anew_is_previewed_anew_before_it_can_be_forgotten(operated: Site, open_page: OpenPage) -> None:
    operated.needed = "s3cret"
    page = open_page(f"{operated.url}#token=s3cret")
    page.click(".tools [data-action=forget]")
    shows(page, "#action-effect", "31.5K chunks")
    operated.answers["/v1/forget/preview"] = {"memory": {"chunks": 1, "bytes": 1}, "tiers": {}}
    page.get_by_label("Cache salt").fill("team-a")
    assert page.is_disabled("#action-do")
    page.get_by_role("button", name="Forget 1 chunk", exact=True).wait_for()
    assert operated.changes[-1] == ("/v1/forget/preview", {"model": "", "salt": "team-a"})
    page.keyboard.press("Escape")
    page.locator("#action").wait_for(state="hidden")
    assert all(path == "/v1/forget/preview" for path, _ in operated.changes)


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [("1, 2 3", {"tokens": [1, 2, 3]}), (f'["{64 * "A"}"]', {"hashes": [64 * "a"]})],
)  # fmt: skip
def test_a_prompt_is_pinned_by_its_tokens_or_its_hashes(
    operated: Site, open_page: OpenPage, prompt: str, sent: dict[str, Any]
) -> None:
    page = open_page(f"{operated.url}#token=s3cret")
    page.click("[data-action=pin]")
    page.get_by_label("Name", exact=True).fill("system")
    page.get_by_label("Prompt: token ids").fill("hello world")
    page.get_by_role("button", name="Pin", exact=True).click()
    shows(page, "#action-error", "neither a list of token ids nor one of chunk hashes")
    page.get_by_label("Prompt: token ids").fill(prompt)
    page.get_by_label("Until").select_option("an hour from now")
    page.get_by_role("button", name="Pin", exact=True).click()
    shows(page, "#action-effect", "2 of 3 chunks are pinned.")
    model = "meta-llama/Llama-3.3-70B"
    assert operated.changes == [("/v1/lease", {"name": "system", "ttl_s": 3600, "model": model, "salt": "", **sent})]


def test_a_prefix_is_pinned_from_its_row(operated: Site, open_page: OpenPage) -> None:
    operated.prefixes = example_prefixes()
    operated.prefixes[2]["tenant"] = "blue"
    page = open_page(f"{operated.url}#token=s3cret")
    page.locator("#prefixes tbody tr").nth(2).wait_for()
    assert page.locator("#prefixes button").count() == 2, "only its own clients can pin what a tenant has"
    page.get_by_role("button", name="Pin 3c3c3c3c").click()
    assert text(page, "#action-title") == "Pin the prefix 3c3c3c3c"
    assert "12.3K tokens that its prompts share, of Qwen/Qwen3-32B, are not evicted" in text(page, "#action-what")
    page.get_by_label("Name", exact=True).fill("system")
    page.get_by_role("button", name="Pin", exact=True).click()
    shows(page, "#action-effect", "2 of 3 chunks are pinned.")
    sent = {"name": "system", "ttl_s": 0, "model": "Qwen/Qwen3-32B", "prefix": "3d" * 32}
    assert operated.changes == [("/v1/lease", sent)]


def test_a_lease_is_ended_from_its_row_and_its_chunks_stay(operated: Site, open_page: OpenPage) -> None:
    operated.leases = example_leases()
    page = open_page(f"{operated.url}#token=s3cret")
    page.get_by_role("button", name="End handbook").click()
    assert "Its chunks stay in memory until" in text(page, "#action-what")
    page.get_by_role("button", name="End the lease").click()
    shows(page, "#action-effect", "The lease has ended.")
    assert operated.changes == [("/v1/release", {"name": "handbook", "drops": False})]


def test_what_the_server_refuses_is_told_in_the_dialogue(operated: Site, open_page: OpenPage) -> None:
    del operated.answers["/v1/warm"]
    page = open_page(f"{operated.url}#token=s3cret")
    page.click("[data-action=warm]")
    page.get_by_label("Prompt: token ids").fill("1")
    page.get_by_role("button", name="Load").click()
    shows(page, "#action-error", "There is no such thing.")
    assert page.is_enabled("#action-do")


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
    shows(page, "#gain-facts", "512 tokens")
    assert rows(page, "namespaces") == [[engine.model, "1,024", "50.0%", "8 KiB", "<0.1%", "1", "Forget…"]]
    assert sorted(row[1] for row in rows(page, "engines")) == sorted(each["engine"] for each in status["engines"])
    page.locator("#prefixes tbody tr").first.wait_for()
    assert rows(page, "prefixes")[0][2:5] == ["1", "512", "512"]
    page.locator("#prefixes button").first.click()
    page.get_by_label("Name", exact=True).fill("listed")
    page.locator("#action-token input").fill(Path(f"{depot.url.removeprefix('ipc://')}.token").read_text().strip())
    page.get_by_role("button", name="Pin", exact=True).click()
    shows(page, "#action-effect", "2 of 2 chunks are pinned.")
    page.get_by_role("button", name="Close").click()

    def times() -> dict[str, str]:
        return {row[0]: row[1] for row in rows(page, "latencies")}

    def asked() -> int:
        """Two lookups, or more where a busy machine answered one too late and it was repeated."""
        latencies = ask(port, "/v1/status")["latencies"]
        return next(int(each["count"]) for each in latencies if each["request"] == "Lookup")

    assert asked() >= 2
    eventually(lambda: times()["Lookup"] == str(asked()))
    assert (times()["Store"], times()["Retrieve"]) == ("1", "1")
    assert "Noop" not in times(), "no engine waits for it"
    assert "Tokens in memory 512" in text(page, "#facts")
    assert "Chunks 2 " in text(page, "#stores")
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
