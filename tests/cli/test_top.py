"""`kvdepot top`: its screen, driven by keys within this process, and the command on a terminal of its own."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from msgspec.structs import replace

import kvdepot
from kvdepot.client.socket import Client
from kvdepot.metrics import BOUNDS_S, Event
from kvdepot.protocol.leases import LeaseStatus
from kvdepot.protocol.prefixes import Prefix
from kvdepot.protocol.status import GroupStatus, TokenCounts
from kvdepot.status import OTHERS, Histogram, NamespaceStatus, Status, TierStatus
from kvdepot.status import Engine as EngineStatus
from tests.cli.command import CONTROL, run, terminal
from tests.cli.test_view import a_status
from tests.client.engine import Engine
from tests.conftest import HANG_S, Depot, StartDepot, eventually

if TYPE_CHECKING:
    from kvdepot.cli.tui import Top


def _need_textual() -> None:
    if importlib.util.find_spec("textual") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("textual is missing")


class Keyboard:
    """A screen that shows a status, and keys for it. The server of its client does not exist."""

    def __init__(self, top: Top, pilot: Any) -> None:
        self.top = top
        self._pilot = pilot

    async def press(self, *keys: str) -> list[str]:
        """The lines of the screen after these keys."""
        await self._pilot.press(*keys)
        await self._pilot.pause()
        strips = self.top.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    async def show(self, status: Status) -> list[str]:
        """The lines of the screen after a new status."""
        self.top.show_status(status)
        return await self.press()

    async def opened(self, *keys: str) -> dict[str, str]:
        """The details of a row that these keys open."""
        lines = await self.press(*keys)
        assert "esc back" in lines[-1]
        return dict(re.split("  +", line, maxsplit=1) for line in lines[1:-1] if "  " in line)


def drive(steps: Callable[[Keyboard], Awaitable[None]], status: Status, width: int = 100, height: int = 20) -> None:
    """Run the screen without a terminal."""
    _need_textual()
    from kvdepot.cli.tui import Top

    async def start(client: Client) -> None:
        top = Top(client, None)
        async with top.run_test(size=(width, height)) as pilot:
            top.show_status(status)
            await steps(Keyboard(top, pilot))

    with zmq.Context() as context:
        client = Client("ipc:///x", context)
        try:
            asyncio.run(start(client))
        finally:
            client.close()


MODELS = [NamespaceStatus("", f"model-{number:02}", 1, 4, 100 - number, number << 20, 1) for number in range(30)]
MANY = a_status(
    namespaces=MODELS,
    tiers=[TierStatus("disk:///kv", "through", "up", 1, 1, None, 0, 0, {})],
    events=[Event(1, "start", "begun")],
)
PREFIX = Prefix("", "m" * 50, "ab" * 32, 256, 512, 2, 1 << 20, 3, 700, 60.0, 5.0, "1d" * 32)


def first_words(lines: list[str]) -> list[str]:
    """What the rows of a table begin with."""
    return [line.split()[0] for line in lines[2:-1] if line]


def test_tabs_are_chosen_by_number_and_in_order() -> None:
    async def steps(keys: Keyboard) -> None:
        for number, tab in enumerate(("models", "prefixes", "engines", "tiers", "leases", "events"), 2):
            lines = await keys.press(str(number))
            assert f" {number} {tab}" in lines[0]
            assert lines[1].lstrip().startswith((tab, f"no {tab}", "waiting for the server's list"))
        assert "kvdepot" in (await keys.press("right"))[1]
        assert "events" in (await keys.press("left"))[1]
        assert "waiting" in (await keys.press("shift+tab"))[1]
        assert "events" in (await keys.press("tab", "9", "0", "x"))[1]

    drive(steps, MANY)


def test_rows_are_sorted_and_reversed() -> None:
    async def steps(keys: Keyboard) -> None:
        lines = await keys.press("2")
        assert first_words(lines)[0] == "model-29" and "s sort: bytes" in lines[-1]
        lines = await keys.press("s", "s", "s")
        assert first_words(lines)[0] == "model-00" and "s sort: model" in lines[-1]
        lines = await keys.press("r")
        assert first_words(lines)[0] == "model-29" and "sort: model, reversed" in lines[-1]

    drive(steps, MANY)


def test_the_sum_of_models_that_are_not_listed_stays_the_last() -> None:
    async def steps(keys: Keyboard) -> None:
        for key in ("2", "s", "r"):
            assert first_words(await keys.press(key))[-1] == OTHERS

    others = NamespaceStatus(OTHERS, OTHERS, 0, 0, 7, 3 << 30, 0)
    drive(steps, a_status(namespaces=MODELS[:2], other_namespaces=others))


def test_the_cursor_moves_by_row_and_page_and_stays_when_a_status_comes() -> None:
    from textual.widgets import DataTable

    async def steps(keys: Keyboard) -> None:
        table = keys.top.query_one(DataTable)
        await keys.press("2", "down", "j", "k")
        assert table.cursor_row == 1
        lines = await keys.press(*["down"] * 20)
        assert table.cursor_row == 21 and "model-08" in first_words(lines)
        await keys.show(MANY)
        assert table.cursor_row == 21
        assert first_words(await keys.press(*["pagedown"] * 9))[-1] == "model-00"

    _need_textual()
    drive(steps, MANY)


def test_a_filter_is_typed_kept_and_cleared() -> None:
    async def steps(keys: Keyboard) -> None:
        assert first_words((await keys.press("2", "/", *"L-1"))[:-1]) == [f"model-{n}" for n in range(19, 9, -1)]
        assert "/ filter: L-" in (await keys.press("backspace", "enter"))[-1]
        assert "no models match 'q'" in (await keys.press("/", "q"))[1], "q is a letter here"
        assert first_words(await keys.press("escape"))[0] == "model-29"
        assert "no models match" in (await keys.press("/", *"zzz", "enter", "enter"))[1], "there is nothing to open"
        assert "disk:///kv" in " ".join(await keys.press("5")), "a filter is of one tab"

    drive(steps, MANY)


def test_enter_shows_all_that_is_known_about_a_row_until_esc() -> None:
    groups = [GroupStatus(0, 40, 3 << 20), GroupStatus(2, 8, 1 << 20)]
    model = NamespaceStatus("acme", "m", 2, 4, 40, 4 << 20, 1, chunk_tokens=256, groups=groups)
    engine = EngineStatus("e" * 8, 75.0, 5.0, ["m"], [1], "GPU-7", "acme", 3, 2, 1, "node-7:4711", "node-7", 4712)
    times = [0] * (len(BOUNDS_S) + 1)
    times[5] = 9
    tier = TierStatus(
        "disk:///kv", "through", "up", 7, 1 << 20, None, 0, 2, {"failures": 3, "late": 0}, loads=1, free_bytes=5 << 30,
        histograms=[Histogram("load_seconds", "s", [*BOUNDS_S], times, 0.1)],
    )  # fmt: skip
    event = Event(1.0, "tier", "disk:///kv failed")

    async def steps(keys: Keyboard) -> None:
        shown = await keys.opened("2", "enter")
        assert (shown["tenant"], shown["model"], shown["world size"], shown["chunk tokens"]) == (
            "acme",
            "m",
            "2",
            "256",
        )
        assert shown["KV cache group 1"] == "8 chunks, 1 MiB; needed to resume: last 2 chunks"
        assert (await keys.press("escape"))[1].lstrip().startswith("models"), "the table again"
        await keys.press("3")
        keys.top.show_list("prefixes", [PREFIX])
        shown = await keys.opened("enter")
        assert (shown["id"], shown["model"], shown["hits"]) == ("1d" * 32, "m" * 50, "3")
        shown = await keys.opened("4", "enter")
        assert (shown["engine"], shown["id"], shown["since"]) == ("node-7:4711", "e" * 8, "1 min 15 s")
        assert (shown["pid"], shown["host"], shown["device"]) == ("4712", "node-7", "GPU-7")
        shown = await keys.opened("5", "enter")
        assert (shown["loads"], shown["saves"], shown["failures"]) == ("1", "2", "3") and "late" not in shown
        assert shown["free bytes"] == "5 GiB" and shown["load"].startswith("9 calls, p50 ")
        await keys.press("6")
        keys.top.show_list("leases", [LeaseStatus("nightly", "acme", "retain", "m", 50, 4, 1 << 20, 61.0)])
        shown = await keys.opened("enter")
        assert (shown["name"], shown["ends"], shown["priority"]) == ("nightly", "1 min 1 s", "50")
        shown = await keys.opened("7", "enter")
        assert (shown["text"], shown["kind"]) == ("disk:///kv failed", "tier")

    drive(steps, a_status(namespaces=[model], engines=[engine], tiers=[tier], events=[event]), width=160, height=30)


def test_details_stay_with_their_row_and_say_when_it_is_gone() -> None:
    async def steps(keys: Keyboard) -> None:
        await keys.press("2", "s", "down")
        assert (await keys.opened("enter", "down"))["model"] == "model-01"
        lines = await keys.show(a_status(namespaces=[replace(MODELS[1], bytes=5 << 20), MODELS[0]]))
        assert "model-01" in lines[1] and "5 MiB" in " ".join(lines), "another row now, with new figures"
        lines = await keys.show(a_status(namespaces=MODELS[:1]))
        assert "model-01" in lines[1] and "the server does not list it any more" in " ".join(lines)
        assert first_words(await keys.press("escape")) == ["model-00"]

    drive(steps, MANY)


def test_the_keys_are_listed_until_they_are_not_wanted() -> None:
    async def steps(keys: Keyboard) -> None:
        assert "? keys" in (await keys.press("7"))[-1]
        for on, off in (("?", "?"), ("h", "1"), ("?", "escape")):
            assert "sort by the next column" in " ".join(await keys.press(on))
            assert "sort by the next column" not in " ".join(await keys.press(off))

    drive(steps, MANY)


def test_a_pause_is_shown() -> None:
    async def steps(keys: Keyboard) -> None:
        assert "paused at " in (await keys.press("p"))[-1]
        assert "paused" not in (await keys.press("space"))[-1]

    drive(steps, MANY)


def test_the_overview_has_rates_and_charts_of_the_time_watched() -> None:
    def at(number: int) -> Status:
        tokens = TokenCounts(1000 + 100 * number, 600 + 80 * number, 500 + 50 * number)
        return a_status(tokens=tokens, stored_bytes=number**2 << 20, uptime_s=90.0 + number)

    async def steps(keys: Keyboard) -> None:
        for number in range(1, 5):
            lines = await keys.show(at(number))
        text = "\n".join(lines)
        assert "50.0 % of 1,400 tokens in all; found 65.7 %" in text
        assert "50.0 % of 400 tokens in 4 s; found 80.0 %" in text and "stores 4 MiB/s" in text
        assert re.search(r"reused ▅{4} +stores ▂▄▆█ +retrieves ▁{4}", text), text
        text = "\n".join(await keys.show(replace(at(5), boot="another")))
        assert "tokens in all" in text and "retrieves ▁" not in text

    drive(steps, at(0))


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 12), (200, 60)])
def test_every_tab_fits_into_any_terminal(width: int, height: int) -> None:
    async def steps(keys: Keyboard) -> None:
        for number in range(1, 8):
            lines = await keys.press(str(number))
            assert len(lines) == height and max(map(len, lines)) <= width
            if width >= 40:
                assert "q quits" in lines[-1]

    drive(steps, MANY, width, height)


def test_names_of_clients_can_neither_move_the_cursor_nor_be_taken_for_markup() -> None:
    name = "[red]x[/red]\x1b[2Jy\x9b1mz\r\n"

    async def steps(keys: Keyboard) -> None:
        for pressed in ("1", "2", "enter"):
            text = "\n".join(await keys.press(pressed))
            assert "[red]x[/red]" in text and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)

    drive(steps, a_status(namespaces=[NamespaceStatus("", name, 1, 4, 1, 1, 1)]))


# -- on a terminal


@pytest.mark.faults
def test_top_draws_within_80_by_24_follows_a_new_size_and_ends_with_q(depot: Depot, used: Engine) -> None:
    _need_textual()
    with terminal("top", "--url", depot.url, "--interval", "0.1") as top:
        eventually(lambda: "lookups/s" in top.text)
        assert f"kvdepot {kvdepot.__version__} at {depot.url}"[:80] in top.text
        assert re.search(r"memory +[#-]{20} ", top.text)
        top.press("3")
        eventually(lambda: "shared tokens" in top.text)
        seen = len(top.raw)
        fcntl.ioctl(top.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 40, 0, 0))
        os.kill(top.process.pid, signal.SIGWINCH)  # its session has no terminal that would send it
        eventually(lambda: re.search(r"1 ove +2 mod", CONTROL.sub("", top.raw[seen:])))
        assert re.search(r"\x1b\[(?:\d+;)*3\d", top.raw)
        top.press("q")
        after = termios.tcgetattr(top.inner) if top.process.wait(HANG_S) == 0 else None
        assert after == top.before, "the terminal is left as it was"
        assert top.end() == 0 and "Traceback" not in top.text
    assert "\x1b[?1049h" in top.raw and "\x1b[?1049l" in top.raw


@pytest.mark.faults
def test_top_uses_no_colours_where_they_are_not_wanted(depot: Depot) -> None:
    _need_textual()
    with terminal("top", "--url", depot.url, NO_COLOR="1") as top:
        eventually(lambda: "lookups/s" in top.text)
        top.press("q")
        assert top.end() == 0
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8])(?:;\d+)*m", top.raw)


@pytest.mark.faults
def test_top_waits_for_a_server_that_goes_away_and_is_interrupted_with_130(start_depot: StartDepot) -> None:
    _need_textual()
    depot = start_depot(arena_mib=8)
    with terminal("top", "--url", depot.url, "--interval", "0.1", columns=120) as top:
        eventually(lambda: f"pid {depot.process.pid}" in top.text)
        depot.stop()
        eventually(lambda: "no kvdepot server answers" in top.text or "gone" in top.text)
        again = start_depot(url=depot.url, arena_mib=8)
        eventually(lambda: str(again.process.pid) in top.text)
        top.process.send_signal(signal.SIGINT)
        assert top.end() == 130
        assert "Traceback" not in top.text and "\x1b[?1049l" in top.raw


@pytest.mark.faults
def test_top_says_for_how_long_a_server_that_hangs_has_not_answered(depot: Depot) -> None:
    _need_textual()
    with terminal("top", "--url", depot.url, "--interval", "0.1", columns=120) as top:
        eventually(lambda: "lookups/s" in top.text)
        depot.process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: re.search(r"q quits  data from \d\d:\d\d:\d\d  no answer for [\d min]+ s", top.text))
            eventually(lambda: "No answer for" in top.text)
        finally:
            depot.process.send_signal(signal.SIGCONT)
        seen = len(top.raw)
        eventually(lambda: "Healthy" in top.raw[seen:])
        top.press("\x03")
        assert top.end() == 130


@pytest.mark.faults
def test_top_exits_with_1_after_an_error_of_its_screen(depot: Depot, tmp_path: Path) -> None:
    _need_textual()
    fault = "from kvdepot.cli.tui import Top\nTop.show_status = None\n"
    (tmp_path / "sitecustomize.py").write_text(fault)
    with terminal("top", "--url", depot.url, PYTHONPATH=str(tmp_path)) as top:
        assert top.end() == 1
    assert "TypeError" in top.text and "\x1b[?1049l" in top.raw, "the error is printed on the usual screen"


@pytest.mark.faults
def test_top_for_programs_goes_on_when_a_server_has_not_answered(depot: Depot) -> None:
    command = [sys.executable, "-m", "kvdepot.cli", "top", "--json", "-i", "0.1", "--url", depot.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None and top.stderr is not None
        try:
            assert "version" in json.loads(top.stdout.readline())
            depot.process.send_signal(signal.SIGSTOP)
            try:
                assert top.stderr.readline().startswith("kvdepot: no answer")
                missed = time.time()
            finally:
                depot.process.send_signal(signal.SIGCONT)
            while json.loads(top.stdout.readline())["wall_s"] < missed:  # lines of before the stop
                pass
            assert top.poll() is None
        finally:
            top.kill()


@pytest.mark.faults
def test_top_without_a_terminal_or_textual_says_what_there_is_instead(depot: Depot) -> None:
    done = run("top", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a terminal" in done.stderr and "kvdepot status" in done.stderr
    with terminal("top", "--url", depot.url, TERM="dumb") as dumb:
        assert dumb.end() == 2
        assert "needs a terminal" in dumb.text


def test_top_without_textual_says_how_to_install_it(tmp_path: Path) -> None:
    hide = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'textual' else f(n, *a)"
    )
    (tmp_path / "sitecustomize.py").write_text(f"{hide}\n")
    with terminal("top", "--url", "ipc:///x", columns=200, PYTHONPATH=str(tmp_path)) as top:
        assert top.end() == 2
    assert "top needs the package textual" in top.text and "pip install" in top.text


@pytest.mark.faults
def test_the_pictures_of_the_documentation_can_be_drawn_and_need_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _need_textual()
    path = Path(__file__).parents[2] / "scripts" / "terminal_pictures.py"
    spec = importlib.util.spec_from_file_location("terminal_pictures", path)
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(pictures)
    assert pictures.main(tmp_path) == 0
    for name, words in (("status", ("tiers", "events")), ("top", ("lookups/s", "q&#160;quits"))):
        drawn = (tmp_path / f"{name}.svg").read_text()
        shown = (path.parents[1] / "docs" / "screenshots" / f"{name}.svg").read_text()
        assert not re.search(r"url\(https?:|href", drawn)
        for word in (f"kvdepot&#160;{kvdepot.__version__}", "meta-llama/Llama-3.1", "Healthy", *words):
            assert word in drawn and word in shown, f"{name}: {word}; draw it again"
