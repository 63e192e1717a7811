"""`kvdepot status`: who gets the page's URL and the token, and where the log is; `kvdepot stop`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from kvdepot.client.launch import Shared
from kvdepot.protocol.endpoints import Claim
from tests.cli.command import doctor, run
from tests.conftest import HANG_S, StartDepot, eventually, suspend
from tests.ports import free_port
from tests.tiers.servers import need
from tests.web.conftest import Web

pytestmark = pytest.mark.faults


def page(url: str, **environ: str) -> tuple[str, str]:
    """The URL and the token that `status --http` prints; both empty until there is a page."""
    done = run("status", "--http", "--json", "--url", url, **environ)
    said = json.loads(done.stdout or "{}")
    return said.get("url", ""), said.get("token", "")


def test_the_url_of_the_page_and_its_token_are_printed(start_depot: StartDepot) -> None:
    need(modules=["uvicorn", "prometheus_client"])
    at = f"127.0.0.1:{free_port()}"
    depot = start_depot("--http", at, arena_mib=8)
    eventually(lambda: page(depot.url)[0])
    address, token = page(depot.url)
    assert run("status", "--http", "--url", depot.url).stdout == f"{address}\n"
    place, _, shown = address.partition("/#token=")
    assert (place, unquote(shown)) == (f"http://{at}", token)
    assert Web(depot).ask("POST", "/v1/warm", b"{", token).status == 400, "the token is right, what is asked is not"
    _, found = doctor("--url", depot.url, KVDEPOT_HTTP=at)
    assert found["web page"][0]["state"] == "ok"


def test_the_token_goes_to_no_other_server_at_the_same_address(start_depot: StartDepot) -> None:
    need(modules=["uvicorn", "prometheus_client"])
    at = f"127.0.0.1:{free_port()}"
    first = start_depot("--http", at, arena_mib=8)
    eventually(lambda: page(first.url, KVDEPOT_HTTP=at)[0])
    second = start_depot("--http", at, arena_mib=8)
    eventually(lambda: "cannot bind HTTP to" in second.logged())
    done = run("status", "--http", "--url", second.url, KVDEPOT_HTTP=at)
    assert (done.returncode, done.stdout) == (1, "") and "address is in use" in done.stderr
    assert (first.status()["http"], second.status()["http"]) == (at, "")
    _, found = doctor("--url", second.url, KVDEPOT_HTTP=at)
    assert found["web page"][0]["state"] == "warn" and "the server does not listen at" in found["web page"][0]["text"]
    assert first.stop() == 0
    address, token = eventually(lambda: (found := page(second.url)) != ("", "") and found)
    assert address == f"http://{at}/#token={token}"


def test_without_a_page_or_a_server_status_says_what_to_do(start_depot: StartDepot, tmp_path: Path) -> None:
    depot = start_depot("--http", "off", arena_mib=8)
    done = run("status", "--http", "--url", depot.url)
    assert (done.returncode, done.stdout) == (1, "") and "HTTP is off" in done.stderr
    done = run("status", "--http", "--url", f"ipc://{tmp_path}/x")
    assert (done.returncode, done.stdout) == (1, "") and "kvdepot serve" in done.stderr


def test_status_names_the_log_of_a_server_that_an_engine_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDEPOT_ARENA_GIB", "0.01")
    url, log = f"ipc://{tmp_path}/depot.sock", tmp_path / "depot.log"
    Shared(url).start()
    shown = eventually(lambda: (done := run("status", "--url", url)).returncode == 0 and done.stdout)
    assert str(log) in shown.replace("\n", "")
    assert run("stop", "--url", url).returncode == 0
    done = run("status", "--url", url)
    assert done.returncode == 1 and f"started here: {log}\n" in done.stderr


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
