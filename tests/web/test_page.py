"""The web page in a real Chromium: its text, tables and charts show the server's status."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvdepot.metrics import Event
from kvdepot.protocol.figures import figures
from kvdepot.status import Engine, NamespaceStatus, Status
from tests.conftest import HANG_S, eventually
from tests.programs import missing, module
from tests.web.browser import chromium, executable
from tests.web.conftest import StartWeb
from tests.web.site import GIB, Site, empty_status, example_history, example_leases

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.faults

WAIT_MS = 1000 * HANG_S
NONE = "\N{EN DASH}"


JUDGED = "h1:has-text('Healthy'), h1:has-text('Needs attention')"
"""The headline of a page that has a status."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    module("playwright.sync_api")
    if executable() is None:
        missing("Chromium")
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


def test_leases_are_listed_while_they_can_be_seen(site: Site, open_page: OpenPage) -> None:
    site.leases = example_leases()
    page = open_page()
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
    assert "/v1/leases" not in site.asked[asked:], "a part that is closed needs nothing"


def test_names_that_look_like_markup_are_text(site: Site, open_page: OpenPage) -> None:
    evil = "<img src=x onerror=alert(1)>"
    site.status = msgspec.structs.replace(
        site.status,
        namespaces=[NamespaceStatus(evil, evil, 1, 1, 1, 1, 1)],
        engines=[Engine(evil, 1.0, 1.0, [evil], [], evil, 0, 0, 0, fault=evil)],
        events=[Event(site.status.wall_s, evil, evil)],
    )
    page = open_page()
    assert rows(page, "namespaces")[0][0] == f"{evil}: {evil}"
    assert page.locator("#engines img, #namespaces img, #events img").count() == 0


def test_each_gauge_of_the_status_is_shown_with_its_meaning(open_page: OpenPage) -> None:
    page = open_page()
    open_part(page, "detail")
    shown = rows(page, "figures")
    assert ["Bytes of the arena that hold chunks.", "241 GiB"] in shown
    assert {each.meaning for each in figures(Status) if each.kind != "counter"} == {meaning for meaning, _ in shown}
    assert "Prefill time that a request saved, if any." in [row[0] for row in rows(page, "histograms")]


# -- when things go wrong


def test_an_engine_whose_copies_cannot_be_trusted_is_shown_with_the_reason(site: Site, open_page: OpenPage) -> None:
    fault = "self-test: block 3 of group 0 came back different"
    engines = [msgspec.structs.replace(each, fault=fault if each.ranks == [1] else "") for each in site.status.engines]
    site.status = msgspec.structs.replace(site.status, engines=engines, faulty_engines=1)
    page = open_page()
    shows(page, ".verdict", fault)
    open_part(page, "engines-part")
    assert [row[0] for row in rows(page, "engines") if "uncached" in row] == ["worker 1"]
    assert page.locator("#engines td", has_text="uncached").get_attribute("title") == fault


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


def test_a_depot_that_does_not_answer_is_told_from_a_page_that_is_not_served(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    site.trouble = "the server has not answered for 4.2 s"
    shows(page, "#state", "Not answering")
    assert text(page, "#reasons").startswith("The server has not answered for 4.2 s. Engines recompute everything")
    assert "The figures below are from" in text(page, "#since")
    site.trouble = ""
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
    page.wait_for_selector(JUDGED)
    page.check("input[value=dark]")
    page.check("input[value='3600']")
    page.locator("figure summary").first.click()
    page.click("[data-action=forget]")
    page.close()
    assert problems == []
    assert asked and all(url.startswith((site.url, "data:")) for url in asked)


@pytest.mark.parametrize("look", ["light", "dark", "narrow", "down", "dialogue"])
def test_axe_finds_no_fault(site: Site, open_page: OpenPage, look: str) -> None:
    site.history = example_history(site.status.wall_s)
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
    found = module("axe_playwright_python.sync_playwright").Axe().run(page).response["violations"]
    faults = [(fault["id"], fault["impact"], [node["html"] for node in fault["nodes"]][:3]) for fault in found]
    assert faults == [], json.dumps(faults, indent=1)


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


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [("1, 2 3", {"tokens": [1, 2, 3]}), (f'["{64 * "A"}"]', {"hashes": [64 * "a"]})],
)  # fmt: skip
def test_a_prompt_is_leased_by_its_tokens_or_its_hashes(
    operated: Site, open_page: OpenPage, prompt: str, sent: dict[str, Any]
) -> None:
    page = open_page(f"{operated.url}#token=s3cret")
    page.click("[data-action=lease]")
    page.get_by_label("Name", exact=True).fill("system")
    page.get_by_label("Prompt: token ids").fill("hello world")
    page.get_by_role("button", name="Lease", exact=True).click()
    shows(page, "#action-error", "neither a list of token ids nor one of chunk hashes")
    page.get_by_label("Prompt: token ids").fill(prompt)
    page.get_by_label("Until").select_option("an hour from now")
    page.get_by_role("button", name="Lease", exact=True).click()
    shows(page, "#action-effect", "2 of 3 chunks are leased.")
    model = "meta-llama/Llama-3.3-70B"
    assert operated.changes == [("/v1/lease", {"name": "system", "ttl_s": 3600, "model": model, "salt": "", **sent})]


def test_a_lease_is_ended_from_its_row_and_its_chunks_stay(operated: Site, open_page: OpenPage) -> None:
    operated.leases = example_leases()
    page = open_page(f"{operated.url}#token=s3cret")
    page.get_by_role("button", name="End handbook").click()
    assert "Its chunks stay in memory until" in text(page, "#action-what")
    page.get_by_role("button", name="End the lease").click()
    shows(page, "#action-effect", "The lease has ended.")
    assert operated.changes == [("/v1/release", {"name": "handbook", "drops": False})]


# -- with a real server


def test_the_page_shows_the_status_of_a_real_server(start_web: StartWeb, open_page: OpenPage) -> None:
    from kvdepot.adapters import LoadStoreOp
    from tests.client.engine import Engine as RealEngine

    web = start_web()
    engine, tokens = RealEngine(web.depot), list(range(512))
    assert engine.lookup(tokens) == 0
    engine.store(tokens, list(range(8)))
    engine.scheduler.maybe_submit_lookup_request("r", token_ids=tokens)
    assert engine.scheduler.wait_lookup_result("r", 10.0) == 512
    engine.worker.submit_retrieve_request("r", LoadStoreOp(list(range(8, 16)), token_ids=tokens), None)
    eventually(lambda: engine.worker.get_finished(set())[1])
    status = eventually(lambda: (now := web.latest())["saved"]["tokens"] == 512 and now)
    page = open_page(f"http://127.0.0.1:{web.port}/")
    shows(page, "#gain-facts", "512 tokens")
    assert rows(page, "namespaces") == [[engine.model, "1,024", "50.0%", "8 KiB", "<0.1%", "1", "Forget…"]]
    assert sorted(row[1] for row in rows(page, "engines")) == sorted(each["engine"] for each in status["engines"])
    page.click("[data-action=lease]")
    page.get_by_label("Name", exact=True).fill("listed")
    page.get_by_label("Prompt: token ids").fill(" ".join(map(str, tokens)))
    page.locator("#action-token input").fill(web.token)
    page.get_by_role("button", name="Lease", exact=True).click()
    shows(page, "#action-effect", "2 of 2 chunks are leased.")
    page.get_by_role("button", name="Close").click()

    def times() -> dict[str, str]:
        return {row[0]: row[1] for row in rows(page, "latencies")}

    def asked() -> int:
        """Two lookups, or more where a busy machine answered one too late and it was repeated."""
        return next(int(each["count"]) for each in web.latest()["latencies"] if each["request"] == "Lookup")

    assert asked() >= 2
    eventually(lambda: times()["Lookup"] == str(asked()))
    assert (times()["Store"], times()["Retrieve"]) == ("1", "1")
    assert "Noop" not in times(), "no engine waits for it"
    assert "Tokens in memory 512" in text(page, "#facts")
    assert "Chunks 2 " in text(page, "#stores")
    assert text(page, "#hit-rate") == "50.0%"
    assert text(page, "#stores .big") == f"{status['used_bytes'] / 1024:g} KiB"
    assert f"of {status['capacity_bytes'] / 2**20:.1f} MiB" in text(page, "#stores .of")
    events = page.locator("#events li span:last-child").all_inner_texts()
    assert [event["text"] for event in reversed(status["events"])] == events
    engine.close()
