"""`kvdepot stop` ends a server in an orderly way; `kvdepot logs` shows the log of one that an engine started."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvdepot.protocol.endpoints import Claim
from tests.cli.command import run, terminal
from tests.conftest import HANG_S, StartDepot, eventually, suspend

pytestmark = pytest.mark.faults


def test_stop_ends_a_server_or_says_why_it_has_not_ended(start_depot: StartDepot) -> None:
    depot = start_depot()
    pid = depot.process.pid
    suspend(pid)
    late = run("stop", "--url", depot.url, "--timeout", "0.3")
    assert late.returncode == 1
    assert f"(pid {pid}) has not ended within 0.3 s; end it with `kill -9 {pid}`" in late.stderr
    os.kill(pid, signal.SIGCONT)
    done = run("stop", "--url", depot.url)  # the signal that it has got counts, too
    assert (done.returncode, depot.process.wait(HANG_S)) == (0, 0), done.stderr
    assert done.stdout in (
        f"the server at {depot.url} (pid {pid}) has stopped\n", f"no server is running at {depot.url}\n",
    )  # fmt: skip
    again = run("stop", "--url", depot.url)
    assert (again.returncode, again.stdout) == (0, f"no server is running at {depot.url}\n")
    assert run("stop", "--url", "tcp://127.0.0.1:1").returncode == 2


def test_a_process_that_does_not_hold_the_endpoint_is_not_signalled(tmp_path: Path) -> None:
    """A container of the same pod has the server's host name, and may have another process of its number."""
    url, lock = f"ipc://{tmp_path}/depot.sock", tmp_path / "depot.sock.lock"
    claim = Claim(url, "url")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        lock.write_text(lock.read_text().replace(str(os.getpid()), str(other.pid)))
        refused = run("stop", "--url", url)
        assert refused.returncode == 1
        assert f"pid {other.pid}, which cannot be signalled from here" in refused.stderr
        assert other.stdin is not None
        other.stdin.close()
    assert other.returncode == 0, "it was signalled"
    claim.close()


def test_logs_shows_the_end_of_the_log_and_goes_on_with_that_of_the_next_server(tmp_path: Path) -> None:
    url, log = f"ipc://{tmp_path}/depot.sock", tmp_path / "depot.log"
    none = run("logs", "--url", url)
    assert none.returncode == 1 and f"{log}: No such file or directory; no engine has started" in none.stderr
    log.write_text("one\ntwo\nthree\n")
    shown = run("logs", "--url", url, "-n", "2")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "two\nthree\n", f"kvdepot: {log}\n")
    with terminal("logs", "--url", url, "-n", "1", "-f") as following:
        eventually(lambda: "three" in following.text)
        with log.open("a") as more:
            more.write("four\n")
        eventually(lambda: "four" in following.text)
        log.rename(tmp_path / "depot.log.1")
        log.write_text("five\n")
        eventually(lambda: "five" in following.text)
        os.kill(following.process.pid, signal.SIGINT)
        assert following.end() == 130
    assert "one" not in following.text
