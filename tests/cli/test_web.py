"""`kvdepot open` and `kvdepot token`: who gets the page's URL and the token."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.cli.command import doctor, run
from tests.conftest import HANG_S, StartDepot, eventually
from tests.ports import free_port
from tests.tiers.servers import need


@pytest.mark.faults
def test_open_prints_an_address_that_answers_and_the_token_that_changes_need(start_depot: StartDepot) -> None:
    need(modules=["uvicorn", "prometheus_client"])
    at = f"127.0.0.1:{free_port()}"
    depot = start_depot("--http", at, arena_mib=8)
    which = ("--url", depot.url)
    address = eventually(lambda: run("open", *which).stdout.strip())
    place, _, told = address.partition("/#token=")
    assert place == f"http://{at}"
    token = run("token", *which).stdout.strip()
    assert unquote(told) == token
    codes = []
    for header in ({}, {"authorization": f"Bearer {token}"}):
        connection = http.client.HTTPConnection(at, timeout=HANG_S)
        body = json.dumps({"name": "nothing"})
        connection.request("POST", "/v1/unpin", body, {"content-type": "application/json", **header})
        codes.append(connection.getresponse().status)
        connection.close()
    assert codes[0] == 401 and codes[1] != 401
    _, found = doctor("--url", depot.url, KVDEPOT_HTTP=at)
    assert found["web page"][0]["state"] == "ok"


@pytest.mark.faults
def test_open_gives_the_token_to_nobody_who_has_the_address_that_the_server_wanted(start_depot: StartDepot) -> None:
    need(modules=["uvicorn", "prometheus_client"])
    at = f"127.0.0.1:{free_port()}"
    first = start_depot("--http", at, arena_mib=8)
    eventually(lambda: run("open", "--url", first.url, KVDEPOT_HTTP=at).returncode == 0)
    second = start_depot("--http", at, arena_mib=8)
    eventually(lambda: "cannot bind HTTP to" in second.logged())
    done = run("open", "--url", second.url, KVDEPOT_HTTP=at)
    assert (done.returncode, done.stdout) == (1, "") and "address is in use" in done.stderr
    assert (first.status()["http"], second.status()["http"]) == (at, "")
    _, found = doctor("--url", second.url, KVDEPOT_HTTP=at)
    assert found["web page"][0]["state"] == "warn" and "another program listens at" in found["web page"][0]["text"]
    assert first.stop() == 0
    address = eventually(lambda: run("open", "--url", second.url).stdout.strip())
    assert address == f"http://{at}/#token={run('token', '--url', second.url).stdout.strip()}"


@pytest.mark.faults
def test_open_says_so_where_the_server_has_no_page(start_depot: StartDepot) -> None:
    depot = start_depot("--http", "off", arena_mib=8)
    done = run("open", "--url", depot.url)
    assert (done.returncode, done.stdout) == (1, "") and "HTTP is off" in done.stderr


@pytest.mark.faults
def test_open_says_what_to_do_where_there_is_no_server(tmp_path: Path) -> None:
    done = run("open", "--url", f"ipc://{tmp_path}/x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "kvdepot serve" in done.stderr
    done = run("token", "--url", f"ipc://{tmp_path}/x")
    assert done.returncode == 2 and "Traceback" not in done.stderr and str(tmp_path) in done.stderr
