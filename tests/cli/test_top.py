"""`kvdepot top`: its screen within this process, and the command on a terminal of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

import kvdepot
from kvdepot.client.socket import Client
from kvdepot.status import NamespaceStatus
from tests.cli.command import CONTROL, run, terminal
from tests.cli.test_view import a_status
from tests.client.engine import Engine
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.programs import module

if TYPE_CHECKING:
    pass


def test_names_of_clients_can_neither_move_the_cursor_nor_be_taken_for_markup() -> None:
    module("textual")
    from kvdepot.cli.tui import Top

    name = "[red]x[/red]\x1b[2Jy\x9b1mz\r\n"

    async def watch(client: Client) -> None:
        top = Top(client, None)
        async with top.run_test(size=(100, 20)) as pilot:
            top.show_status(a_status(namespaces=[NamespaceStatus("", name, 1, 4, 1, 1, 1)]))
            await pilot.pause()
            strips = top.screen._compositor.render_strips()
            text = "\n".join("".join(segment.text for segment in strip) for strip in strips)
            assert "[red]x[/red]" in text and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)

    with zmq.Context() as context:
        client = Client("ipc:///x", context)  # there is no such server
        try:
            asyncio.run(watch(client))
        finally:
            client.close()


@pytest.mark.faults
def test_top_draws_within_80_by_24_follows_a_new_size_and_ends_with_q(depot: Depot, used: Engine) -> None:
    module("textual")
    with terminal("top", "--url", depot.url, "--interval", "0.1") as top:
        eventually(lambda: "lookups/s" in top.text)
        assert f"kvdepot {kvdepot.__version__} at {depot.url}"[:80] in top.text
        assert re.search(r"memory +[#-]{20} ", top.text)
        top.press("p")
        eventually(lambda: "paused at" in top.text)
        top.press("p")
        seen = len(top.raw)
        fcntl.ioctl(top.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 40, 0, 0))
        os.kill(top.process.pid, signal.SIGWINCH)  # its session has no terminal that would send it
        eventually(lambda: "memory" in CONTROL.sub("", top.raw[seen:]))
        assert re.search(r"\x1b\[(?:\d+;)*3\d", top.raw)
        top.press("q")
        after = termios.tcgetattr(top.inner) if top.process.wait(HANG_S) == 0 else None
        assert after == top.before, "the terminal is left as it was"
        assert top.end() == 0 and "Traceback" not in top.text
    assert "\x1b[?1049h" in top.raw and "\x1b[?1049l" in top.raw


@pytest.mark.faults
def test_top_waits_for_a_server_that_goes_away_and_is_interrupted_with_130(start_depot: StartDepot) -> None:
    module("textual")
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
def test_top_exits_with_1_after_an_error_of_its_screen(depot: Depot, tmp_path: Path) -> None:
    module("textual")
    fault = "from kvdepot.cli.tui import Top\nTop.show_status = None\n"
    (tmp_path / "sitecustomize.py").write_text(fault)
    with terminal("top", "--url", depot.url, PYTHONPATH=str(tmp_path)) as top:
        assert top.end() == 1
    assert "TypeError" in top.text and "\x1b[?1049l" in top.raw, "the error is printed on the usual screen"


@pytest.mark.faults
def test_top_without_a_terminal_or_textual_says_what_there_is_instead(depot: Depot) -> None:
    done = run("top", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a terminal" in done.stderr and "kvdepot status" in done.stderr
    with terminal("top", "--url", depot.url, TERM="dumb") as dumb:
        assert dumb.end() == 2
        assert "needs a terminal" in dumb.text
