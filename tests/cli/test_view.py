"""What `kvdepot status` and `kvdepot top` draw on a terminal."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import kvdepot
from kvdepot import cli
from kvdepot.cli import output, view
from kvdepot.cli.screen import TABS, Screen
from kvdepot.metrics import BOUNDS_S, Event, Latency
from kvdepot.protocol.prefixes import Prefix
from kvdepot.protocol.status import GroupStatus
from kvdepot.status import OTHERS, Histogram, NamespaceStatus, Status, TierStatus, TokenCounts, Usage
from kvdepot.status import Engine as EngineStatus
from tests.cli.command import CONTROL, run, terminal
from tests.client.engine import CHUNK, Engine
from tests.conftest import HANG_S, Depot, StartDepot, eventually

# -- status


def test_status_shows_on_a_terminal_what_it_prints_as_json(depot: Depot, used: Engine) -> None:
    said = json.loads(run("status", "--url", depot.url, "--json").stdout)
    with terminal("status", "--url", depot.url, columns=100) as shown:
        assert shown.end() == 0
        lines = shown.text.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("state") and "Healthy" in line for line in lines)
    assert said["cached_tokens"] == said["chunks"] * CHUNK > 0
    assert any(f" tokens in {said['chunks']} chunks" in line for line in lines)
    namespace = next(namespace for namespace in said["namespaces"] if namespace["model"] == used.model)
    tokens = f"{namespace['chunks'] * CHUNK:,}"
    row = next(line for line in lines if line.startswith(used.model) and f" {tokens} " in line).split()
    assert row[1:3] == [str(namespace["world_size"]), tokens]
    assert any(re.match(r"Lookup +\d", line) for line in lines)
    assert any(line.startswith(used.model) and "scheduler" in line for line in lines)


@pytest.mark.faults
def test_colours_are_for_terminals_that_want_them(depot: Depot) -> None:
    assert "\x1b" not in run("status", "--url", depot.url).stdout
    colour = re.compile(r"\x1b\[(?:\d+;)*3\d")
    with terminal("status", "--url", depot.url) as shown:
        assert shown.end() == 0
        assert colour.search(shown.raw)
    with terminal("status", "--url", depot.url, NO_COLOR="1") as shown:
        assert shown.end() == 0
        assert not colour.search(shown.raw)


def a_status(**parts: Any) -> Status:
    whole: dict[str, Any] = {
        "chunk_size_tokens": 256, "capacity_bytes": 4 << 30, "used_bytes": 1 << 30, "chunks": 12_345,
        "reserved_shards": 0, "holds": 0, "evicted_chunks": 7, "record_slots": 10, "record_slots_used": 3,
        "unrecorded_shards": 0, "operations": 0, "clients": 2, "sessions": 0, "instances": 1, "uptime_s": 90.0,
        **parts,
    }  # fmt: skip
    return Status(**whole)


def shown(status: Status, width: int = 100) -> str:
    from rich.console import Console

    console = Console(width=width, highlight=False, markup=False, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(view.summary(status, "ipc:///x"))
        for listing in view.listings(status):
            console.print(listing.table(width))
    return captured.get()


def test_what_clients_named_can_neither_move_the_cursor_nor_be_taken_for_markup() -> None:
    name = "[red]x[/red]\x1b[2Jy\x9b1mz\r\n"
    text = shown(
        a_status(
            namespaces=[NamespaceStatus("", name, 1, 4, 1, 1, 1)],
            events=[Event(0.0, "x", f"client registers {name}")],
            tiers=[TierStatus(name, "through", name, None, None, None, 0, 0, {})],
        )
    )
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert text.count("[red]x[/red]") >= 4


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_on_a_narrow_terminal_columns_are_left_out_and_no_number_is_cut(width: int) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    latencies = [Latency("Lookup", 1_234_567, 0, 1.0), Latency("Retrieve", 999_999, 0, 1.0)]
    text = shown(
        a_status(
            latencies=latencies, namespaces=[NamespaceStatus("", name, 1, 4, 654_321, 1 << 30, 1, chunk_tokens=1)]
        ),
        width,
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(line.startswith(start) for line in lines) for start in ("Lookup", "Retrieve", name[:10]))
    numbers = ("1.2 M", "999,999") if width < 40 else ("1.2 M", "999,999", "654,321")
    for number in numbers:
        assert re.search(rf"(?<!\S){re.escape(number)}(?!\S)", text), text


def test_engines_stay_in_their_lines_whoever_was_heard_of_last() -> None:
    rest: dict[str, Any] = {"device": "", "tenant": "", "sessions": 0, "pinned_chunks": 0, "queued": 0}
    engines = [
        EngineStatus(id=f"{number}", since_s=9.0, idle_s=0.0, models=[model], ranks=ranks, **rest)
        for number, (model, ranks) in enumerate([("b", []), ("a", [0]), ("b", [1]), ("b", [0]), ("a", [])])
    ]
    lines = [
        [line.split()[:3] for line in shown(a_status(engines=order)).splitlines() if line[:2] in ("a ", "b ")]
        for order in (engines, engines[::-1])
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 5
    assert [line[0] for line in lines[0]] == ["a", "a", "b", "b", "b"]
    assert "2 schedulers, 3 workers" in shown(a_status(engines=engines))


def test_the_share_reused_is_shown_with_what_was_found_and_could_have_been() -> None:
    assert "no lookup by an engine yet" in shown(a_status())
    bounded = shown(a_status(tokens=TokenCounts(256_000, 128_000, 64_000, 192_000)))
    assert "25.0 % of 256,000 prompt tokens since the start; found 50.0 %, upper bound 75.0 %" in bounded
    assert "upper bound" not in shown(a_status(tokens=TokenCounts(256_000, 128_000, 64_000)))


def test_how_long_memory_lasts_is_said_once_something_was_evicted() -> None:
    for seconds, told in ((12.0, "12 s"), (2580.0, "43 min"), (8000.0, "2 h"), (200_000.0, "2 d")):
        assert f"holds about {told} of traffic" in shown(a_status(holds_s=seconds))
    assert "of traffic" not in shown(a_status())


def test_tokens_are_told_by_model_and_where_there_are_tenants_by_tenant() -> None:
    model = NamespaceStatus(
        "", "m", 2, 4, 10, 1 << 20, 1, chunk_tokens=256, asked_tokens=1000, found_tokens=500, reused_tokens=250
    )
    others = NamespaceStatus(OTHERS, OTHERS, 0, 0, 7, 1 << 20, 0, asked_tokens=10)
    usage = [Usage("", 10), Usage("blue", 1000, 500, 250)]
    lines = shown(a_status(namespaces=[model], other_namespaces=others, usage=usage)).splitlines()
    rows = [re.split(r"  +", line.strip()) for line in lines]
    assert ["models", "ranks", "tokens", "bytes", "asked", "found", "reused", "engines"] in rows
    assert ["m", "2", "2,560", "1 MiB", "1,000", "50.0 %", "25.0 %", "1"] in rows
    assert ["others", "-", "-", "1 MiB", "10", "0.0 %", "0.0 %", "0"] in rows
    assert ["blue", "1,000", "50.0 %", "25.0 %", "250"] in rows
    assert "tokens by tenant" not in shown(a_status(usage=[Usage("", 10)]))


def test_how_long_a_tier_takes_is_told_once_it_has_loaded() -> None:
    calls = Histogram("load_seconds", "s", list(BOUNDS_S), [0] * 6 + [100] + [0] * 10, 1.0)
    tier = TierStatus("disk:///kv", "through", "up", 1, 1, None, 0, 0, {})
    assert "9.95 ms" in shown(a_status(tiers=[replace(tier, histograms=[calls])]))
    assert "ms" not in shown(a_status(tiers=[tier]))


def test_what_somebody_should_look_at_is_said() -> None:
    tier = TierStatus("redis://h", "through", "circuit breaker open", None, None, None, 0, 0, {})
    text = shown(a_status(tiers=[tier], unrecorded_shards=3, counters={"corrupt_chunks": 2}))
    for words in (
        "Needs attention: 3 warnings, up",
        "redis://h: circuit breaker open",
        "3 shards would not survive",
        "2 chunks failed checksum verification",
    ):
        assert words in text
    assert "Healthy, no engine is connected, up" in shown(a_status())
    assert "Healthy, up" in shown(a_status(engine_count=1))


def test_what_left_failed_or_was_refused_is_listed_by_cause() -> None:
    disk = TierStatus("disk:///kv", "through", "up", 1, 1, None, 0, 0, {"late": 3, "saved_chunks": 17, "failures": 0})
    counters = {"lookups": 50, "evicted_chunks": 7, "errors": 1_234, "dropped_chunks": 12, "lookups_refused": 8}
    lines = [re.split(r"  +", line.strip()) for line in shown(a_status(counters=counters, tiers=[disk])).splitlines()]
    first = lines.index(["evictions, failures, refusals", "count", "where", "counter"])
    assert lines[first + 1 : first + 6] == [
        ["evicted to make room", "7", "Memory", "evicted_chunks"],
        ["dropped: memory was full", "12", "Memory", "dropped_chunks"],
        ["failed requests", "1,234", "Requests", "errors"],
        ["lookups refused", "8", "Requests", "lookups_refused"],
        ["answered too late", "3", "disk:///kv", "late"],
    ]
    assert len(lines) == first + 6
    assert "refused" not in shown(a_status(counters={"lookups": 50}))


def test_how_long_most_requests_took_is_told_as_far_as_it_is_known() -> None:
    latency = Latency("Lookup", 100, 0, 1.0)
    latency.buckets[2], latency.buckets[-1] = 60, 40
    row = next(line for line in shown(a_status(latencies=[latency])).splitlines() if line.startswith("Lookup"))
    p50, p99 = re.split(r"  +", row.strip())[-2:]
    assert p50 == "458 µs" and p99 == "≥ 10 s"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.00025, "250 µs"),
        (0.012, "12 ms"),
        (1.5, "1.5 s"),
        (61, "1 min 1 s"),
        (3661, "1 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_times_are_shown_in_two_units_at_most(value: float, text: str) -> None:
    assert output.duration(value) == text


# -- top


@pytest.mark.faults
def test_top_draws_what_the_server_holds_within_80_by_24_and_ends_with_q(depot: Depot, used: Engine) -> None:
    with terminal("top", "--url", depot.url, "--interval", "0.1") as top:
        eventually(lambda: top.text.count("q quits") >= 3)
        assert f"kvdepot {kvdepot.__version__} at {depot.url}"[:80] in top.text
        assert re.search(r"memory +[#-]{20} ", top.text)
        assert "lookups/s" in top.text
        assert re.search("Lookup|Store|Retrieve", top.text), "there may be room for the most frequent one only"
        assert top.process.poll() is None
        top.press("q")
        after = termios.tcgetattr(top.inner) if top.process.wait(HANG_S) == 0 else None
        assert after == top.before, "the terminal is left as it was"
        assert top.end() == 0
    assert "\x1b[?1049h" in top.raw and "\x1b[?1049l" in top.raw


@pytest.mark.parametrize("height", [16, 24, 40, 60])
def test_a_screen_that_is_too_small_for_all_says_of_each_table_how_much_is_left_out(height: int) -> None:
    from rich.console import Console

    namespaces = [NamespaceStatus("", f"model-{number:02}", 1, 4, 1, 1, 1) for number in range(30)]
    tiers = [TierStatus(f"tier-{number:02}", "through", "up", 1, 1, None, 0, 0, {}) for number in range(3)]
    screen = Screen("ipc:///x")
    screen.show(a_status(namespaces=namespaces, tiers=tiers, evicted_chunks=0), 1.0)
    console = Console(width=80, height=height, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(screen.draw(console), end="")
    lines = captured.get().splitlines()
    assert len(lines) == height and "q quits" in lines[-1]
    assert max(map(len, lines)) <= 80
    for name, total in (("model", 30), ("tier", 3)):
        here = sum(line.startswith(f"{name}-") for line in lines)
        more = re.search(rf"^{name}s .*?(?:\n{name}-.*)*\n\.\.\. (\d+) more", "\n".join(lines), re.MULTILINE)
        assert here + (int(more[1]) if more else 0) == total, "\n".join(lines)
    empty = sum(not line.strip() for line in lines)
    whole = 1 + 6 + 1 + 31 + 4 + 1  # the tabs, the summary, its charts, both tables, the keys
    assert empty == max(0, height - whole), "room is left empty only where there is nothing more to show"


@pytest.mark.faults
def test_top_waits_for_a_server_that_goes_away_and_is_interrupted_with_130(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=8)
    with terminal("top", "--url", depot.url, "--interval", "0.1", columns=120) as top:
        eventually(lambda: "q quits" in top.text)
        depot.stop()
        eventually(lambda: "no kvdepot server answers" in top.text or "gone" in top.text)
        again = start_depot(url=depot.url, arena_mib=8)
        seen = len(top.raw)
        eventually(lambda: f"pid {again.process.pid}" in CONTROL.sub("", top.raw[seen:]))
        top.process.send_signal(signal.SIGINT)
        assert top.end() == 130
        assert "Traceback" not in top.text and "\x1b[?1049l" in top.raw


@pytest.mark.faults
def test_top_says_for_how_long_a_server_that_hangs_has_not_answered(depot: Depot) -> None:
    with terminal("top", "--url", depot.url, "--interval", "0.1", columns=120) as top:
        eventually(lambda: "q quits" in top.text)
        depot.process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: re.search(r"q quits  data from \d\d:\d\d:\d\d  no answer for [\d min]+ s", top.text))
        finally:
            depot.process.send_signal(signal.SIGCONT)
        seen = len(top.raw)
        eventually(lambda: "s sort" in CONTROL.sub("", top.raw[seen:]) or "/ filter" in top.raw[seen:])
        top.press("q")
        assert top.end() == 0


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
def test_top_without_a_terminal_says_what_there_is_instead(depot: Depot) -> None:
    done = run("top", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a terminal" in done.stderr and "kvdepot status" in done.stderr
    with terminal("top", "--url", depot.url, TERM="dumb") as dumb:
        assert dumb.end() == 2
        assert "needs a terminal" in dumb.text


@pytest.mark.faults
def test_the_pictures_of_the_documentation_can_be_drawn_and_ask_nobody_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# -- the keys of top


def keyed(screen: Screen, *keys: str, width: int = 100, height: int = 20, **options: Any) -> list[str]:
    """The lines of the screen after these keys."""
    from rich.console import Console

    for key in keys:
        assert not screen.press(key)
    console = Console(width=width, height=height, color_system=None, force_terminal=True, **options)
    with console.capture() as captured:
        console.print(screen.draw(console), end="")
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert len(lines) == height and max(map(len, lines)) <= width
    return lines


def chosen(screen: Screen) -> str:
    """The first word of the row that is highlighted."""
    from rich.console import Console

    console = Console(width=100, height=20, color_system="standard", force_terminal=True)
    with console.capture() as captured:
        console.print(screen.draw(console), end="")
    (row,) = [line for line in captured.get().splitlines()[3:-1] if line.startswith("\x1b[7m")]
    return CONTROL.sub("", row).split()[0]


@pytest.fixture
def screen() -> Screen:
    made = Screen("ipc:///x")
    namespaces = [
        NamespaceStatus("", f"model-{number:02}", 1, 4, 100 - number, number << 20, 1) for number in range(30)
    ]
    tiers = [TierStatus("disk:///kv", "through", "up", 1, 1, None, 0, 0, {})]
    made.show(a_status(namespaces=namespaces, tiers=tiers, events=[Event(1, "start", "begun")]), 1.0)
    return made


def test_each_tab_is_chosen_by_its_number_and_in_order(screen: Screen) -> None:
    for number, tab in enumerate(TABS[1:], 2):
        lines = keyed(screen, str(number))
        assert screen.tab == tab and f" {number} {tab}" in lines[0]
        assert lines[3].startswith(tab[:4]) or lines[3].startswith((f"no {tab}", "waiting for the server's list"))
    keyed(screen, "right")
    assert screen.tab == TABS[0]
    keyed(screen, "left", "back tab")
    assert screen.tab == TABS[-2]
    keyed(screen, "tab", "9", "0", "x")
    assert screen.tab == TABS[-1]


def test_rows_are_sorted_scrolled_and_filtered(screen: Screen) -> None:
    lines = keyed(screen, "2")
    assert lines[4].startswith("model-29") and lines[-2].startswith("... ") and "s sort: bytes" in lines[-1]
    assert keyed(screen, "s")[4].startswith("model-00")
    assert keyed(screen, "s", "s")[4].startswith("model-00")
    assert "sort: name" in keyed(screen)[-1]
    assert keyed(screen, "r")[4].startswith("model-29") and "sort: name, reversed" in keyed(screen)[-1]
    keyed(screen, "r")
    assert keyed(screen, "down", "down")[4].startswith("model-00") and chosen(screen) == "model-02"
    lines = keyed(screen, *["down"] * 20)
    assert lines[4].startswith("model-09") and chosen(screen) == "model-22", "the rows follow the chosen one"
    assert lines[-2] == "... 7 more", "and the last line never hides it"
    assert keyed(screen, "up")[4].startswith("model-09") and chosen(screen) == "model-21"
    lines = keyed(screen, *["page down"] * 9)
    assert lines[-2].startswith("model-29") and chosen(screen) == "model-29", "no further than the end"
    assert keyed(screen, *["page up"] * 9)[4].startswith("model-00") and chosen(screen) == "model-00"
    lines = keyed(screen, "/", *"L-1")
    assert lines[-1].startswith("filter: L-1_") and lines[4].startswith("model-10") and lines[13].startswith("model-19")
    assert lines[14] == ""
    assert "/ filter: L-" in keyed(screen, "backspace", "enter")[-1]
    assert "no models match 'q'" in keyed(screen, "/", "q")[3], "q is a letter here"
    assert keyed(screen, "escape")[4].startswith("model-00")


def test_enter_shows_all_that_is_known_about_a_row_until_esc() -> None:
    screen = Screen("ipc:///x")
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
    screen.show(
        a_status(namespaces=[model], engines=[engine], tiers=[tier], events=[event]), 1.0
    )  # fmt: skip
    screen.show_prefixes([Prefix("", "m" * 50, "ab" * 32, 256, 512, 2, 1 << 20, 3, 700, 60.0, 5.0, "1d" * 32)])

    def opened(tab: str) -> dict[str, str]:
        keyed(screen, tab)
        lines = keyed(screen, "enter", width=160, height=30)
        assert "esc back" in lines[-1]
        return dict(re.split("  +", line, maxsplit=1) for line in lines[3:-1] if line)

    shown = opened("2")
    assert shown["model"] == "acme: m" and shown["tokens per chunk"] == "256" and shown["ranks"] == "2"
    assert shown["KV cache group 1"] == "8 chunks, 1 MiB; needed to resume a prompt: last 2 chunks"
    assert "models " in keyed(screen, "escape")[3], "the table again"
    assert opened("3")["prefix"] == "1d" * 32 and opened("3")["model"] == "m" * 50
    assert opened("3")["its chunks"] == f"kvdepot inspect {'1d' * 32} -m {'m' * 50}"
    shown = opened("4")
    assert (shown["name"], shown["connection"], shown["connected for"]) == ("node-7:4711", "e" * 8, "1 min 15 s")
    assert (shown["pid"], shown["host"], shown["device"]) == ("4712", "node-7", "GPU-7")
    shown = opened("5")
    assert (shown["in progress"], shown["failures"]) == ("1 loads, 2 saves", "3") and "late" not in shown
    assert shown["free on its disk"] == "5 GiB" and shown["load"].startswith("9 calls, p50 ")
    shown = opened("6")
    assert shown["event"].endswith("disk:///kv failed") and shown["kind"] == "tier"


def test_details_stay_with_their_row_and_say_when_it_is_gone(screen: Screen) -> None:
    keyed(screen, "2", "s", "down")
    assert keyed(screen, "enter", "down")[3].split() == ["model", "model-01"]
    names = NamespaceStatus("", "model-00", 1, 4, 1, 1, 1), NamespaceStatus("", "model-01", 1, 4, 999, 5 << 20, 1)
    screen.show(a_status(namespaces=[*names]), 2.0)
    lines = keyed(screen)
    assert lines[3].split() == ["model", "model-01"] and "5 MiB" in "\n".join(lines), (
        "now another row, with new figures"
    )
    screen.show(a_status(namespaces=[names[0]]), 3.0)
    lines = keyed(screen)
    assert lines[3].split() == ["model", "model-01"] and "the server does not list it any more" in "\n".join(lines)
    assert keyed(screen, "escape")[4].startswith("model-00")
    assert keyed(screen, "/", *"zzz", "enter", "enter")[3].startswith("no models match"), "there is nothing to open"


def test_the_keys_are_listed_until_they_are_not_wanted(screen: Screen) -> None:
    assert "? keys" in keyed(screen, "7")[-1]
    lines = keyed(screen, "?")
    assert [line.split()[0] for line in lines[:-1] if "sort by" in line or "quit" in line] == ["s,", "q"]
    assert "latest first" in " ".join(keyed(screen, "?"))
    assert "sort by" in " ".join(keyed(screen, "h")) and "sort by" not in " ".join(keyed(screen, "1"))
    assert "sort by" in " ".join(keyed(screen, "?")) and "sort by" not in " ".join(keyed(screen, "escape"))


def test_a_filter_is_of_one_tab(screen: Screen) -> None:
    assert "no models match" in " ".join(keyed(screen, "2", "/", *"zzz", "enter"))
    assert "disk:///kv" in " ".join(keyed(screen, "5")) and "zzz" not in keyed(screen)[-1]


def test_a_paused_screen_asks_for_nothing_and_says_so(screen: Screen) -> None:
    keyed(screen, "3")
    assert screen.wanted_prefixes() == "hits"
    assert "sort: bytes" in keyed(screen, "s")[-1] and screen.wanted_prefixes() == "bytes"
    assert "paused" in keyed(screen, "p")[-1]
    assert screen.is_paused and screen.wanted_prefixes() is None
    assert "paused" not in keyed(screen, " ")[-1] and screen.wanted_prefixes() == "bytes"
    assert Screen("ipc:///x").wanted_prefixes() is None


def test_prefixes_of_the_server_are_shown(screen: Screen) -> None:
    screen.show_prefixes([Prefix("", "m", "ab" * 32, 256, 512, 2, 1 << 20, 3, 700, 60.0, 5.0, "1d" * 32)])
    cells = re.split(r"  +", keyed(screen, "3", width=140)[4])
    assert cells == ["1d" * 6, "m", "3", "1 MiB", "512", "256", "2", "700", "5 s", "1 min 0 s"]


def test_what_the_server_does_not_list_one_by_one_is_shown_among_the_models() -> None:
    screen = Screen("ipc:///x")
    others = NamespaceStatus(OTHERS, OTHERS, 0, 0, 7, 3 << 20, 0)
    screen.show(a_status(namespaces=[NamespaceStatus("", "m", 1, 4, 1, 1, 1)], other_namespaces=others), 1.0)
    lines = keyed(screen, "2")
    assert lines[4].startswith("m ") and lines[5].split()[:5] == [OTHERS, "-", "-", "3", "MiB"]


def test_models_are_sorted_by_the_share_of_tokens_found_that_is_shown() -> None:
    screen = Screen("ipc:///x")
    model = NamespaceStatus("", "low", 1, 4, 1, 1, 1, 10, 9, asked_tokens=100, found_tokens=10)
    high = replace(model, model="high", hit_chunks=1, found_tokens=90)
    screen.show(a_status(namespaces=[model, high, replace(model, model="none", asked_tokens=0)]), 1.0)
    lines = keyed(screen, "2", "s", "s")
    assert "sort: found" in lines[-1]
    assert [line.split()[0] for line in lines[4:7]] == ["high", "low", "none"]


def test_the_last_line_says_how_old_the_data_is_when_no_answer_comes(screen: Screen) -> None:
    drawn = screen.version
    screen.wait(0.0)
    assert screen.version == drawn, "nothing to draw"
    screen.wait(65.4)
    assert re.fullmatch(r"q quits  data from \d\d:\d\d:\d\d  no answer for 1 min 5 s", keyed(screen)[-1])
    screen.show(a_status(), 2.0)
    assert "no answer" not in keyed(screen)[-1] and "Healthy" in "\n".join(keyed(screen))
    screen.miss("no kvdepot server answers at ipc:///x; start one with `kvdepot serve`")
    lines = keyed(screen)
    assert lines[-1].startswith("q quits  data from ") and "Healthy" not in "\n".join(lines), "what is old is no state"
    assert re.search(r"^state +No answer; figures of \d\d:\d\d:\d\d$", "\n".join(lines), re.M)
    assert keyed(screen, "2")[1].startswith("No answer; figures of ")
    screen.show(a_status(), 3.0)
    screen.miss_prefixes("too many ask for prefixes")
    assert "too many ask for prefixes" in keyed(screen)[-1], "the status is as new as before"
    assert keyed(screen)[1].startswith("Healthy, no engine is connected  memory ")


def test_charts_show_how_reuse_and_throughput_were(screen: Screen) -> None:
    for number in range(1, 5):
        tokens = TokenCounts(100 * number, 50 * number, 50 * number)
        screen.show(a_status(tokens=tokens, stored_bytes=number**2 << 20), 1.0 + number)
    (line,) = [line for line in keyed(screen) if line.startswith("reused ") and "stores" in line]
    assert re.fullmatch(r"reused [▁-█]{4} +stores [▁-█]{3}█ +retrieves ▁{4}", line)
    screen.show(a_status(boot="another", tokens=TokenCounts(1)), 9.0)
    assert [line.split() for line in keyed(screen) if line.startswith("reused ") and "stores" in line] == [
        ["reused", "stores", "retrieves"]
    ], "another server's figures are another chart"


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 12), (80, 24), (200, 60)])
def test_every_tab_fits_into_any_terminal(screen: Screen, width: int, height: int) -> None:
    for number in range(1, len(TABS) + 1):
        keyed(screen, str(number), width=width, height=height)


@pytest.mark.faults
def test_keys_and_a_new_size_are_noticed_on_a_terminal(depot: Depot, used: Engine) -> None:
    with terminal("top", "--url", depot.url, "--interval", "0.1", lines=30) as top:
        eventually(lambda: "q quits" in top.text)
        top.press("3")
        eventually(lambda: "shared tokens" in top.text)
        top.press("\x1b[C")
        eventually(lambda: "sort: name" in top.text)
        top.press("/zzz\r")
        eventually(lambda: "no engines match 'zzz'" in top.text)
        top.press("\x1b")
        seen = len(top.raw)
        fcntl.ioctl(top.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 40, 0, 0))
        eventually(lambda: re.search(r"1 ove +2 mod", CONTROL.sub("", top.raw[seen:])))
        top.press("p")
        eventually(lambda: "paused" in top.text)
        top.press("q")
        assert top.end() == 0 and "Traceback" not in top.text


# -- status --watch


@pytest.mark.faults
def test_a_watched_status_is_printed_until_it_is_interrupted(depot: Depot) -> None:
    with terminal("status", "--url", depot.url, "--watch", "0.1", "--json") as shown:
        eventually(lambda: shown.text.count('{"version"') >= 3)
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == 130
    with terminal("status", "-u", depot.url, "-w") as shown:
        eventually(lambda: shown.raw.count("\x1b[2J") >= 1 and "memory" in shown.text)
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == 130 and "Traceback" not in shown.text


@pytest.mark.parametrize("interval", ["0", "often", "nan", "1e9"])
def test_an_interval_that_is_none_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--watch", interval]) == 2
    assert "not a number of seconds between 0.1 and 3600" in capsys.readouterr().err
