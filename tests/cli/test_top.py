"""`kvdepot top` on a terminal of its own; what it shows of names is tested in test_view.py."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import termios
from pathlib import Path

import pytest

import kvdepot
from tests.cli.command import CONTROL, run, terminal
from tests.client.engine import Engine
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.programs import module


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
def test_top_without_a_terminal_names_the_alternative(depot: Depot) -> None:
    done = run("top", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a terminal" in done.stderr and "kvdepot status" in done.stderr
    with terminal("top", "--url", depot.url, TERM="dumb") as dumb:
        assert dumb.end() == 2
        assert "needs a terminal" in dumb.text
