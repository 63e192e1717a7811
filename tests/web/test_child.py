"""The web process: it starts, restarts and ends with its server; nothing that happens to it affects the depot."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from kvdepot.client import MessageQueueClient, admin
from kvdepot.config import load
from kvdepot.errors import ConfigError
from kvdepot.protocol import curve, wire
from kvdepot.web.token import obtain_token, read_token, token_path
from tests.client.engine import CHUNK, PER_CHUNK, Engine, works
from tests.conftest import HANG_S, StartDepot, eventually, suspend
from tests.ports import need_ipv6
from tests.web.conftest import StartWeb, Web, children, lives

pytestmark = pytest.mark.faults  # a server and a web process each


def test_a_web_process_that_is_killed_is_back_within_seconds_at_the_same_address(start_web: StartWeb) -> None:
    web = start_web()
    first = web.child()
    assert first
    os.kill(first, signal.SIGKILL)
    second = eventually(lambda: web.child() not in (0, first) and web.child())
    eventually(web.is_well)
    assert second != first
    assert works(web.depot)
    eventually(lambda: "the web process ended with status -9" in web.depot.logged())


def test_a_web_process_that_hangs_ends_by_itself_says_where_it_hung_and_is_back(
    start_web: StartWeb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, time\ndef hang(*_): time.sleep(600)\nsignal.signal(signal.SIGUSR1, hang)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    web = start_web()
    first = web.child()
    os.kill(first, signal.SIGUSR1)
    second = eventually(lambda: web.child() not in (0, first) and web.child())
    eventually(web.is_well)
    assert second != first
    eventually(lambda: "in hang" in web.depot.logged())
    eventually(lambda: "the web process ended with status 1" in web.depot.logged())
    assert works(web.depot)


def test_the_web_process_ends_with_a_server_that_is_killed(start_web: StartWeb) -> None:
    web = start_web()
    child = web.child()
    web.depot.process.kill()
    web.depot.process.wait(HANG_S)
    eventually(lambda: not lives(child))
    with pytest.raises(OSError):
        web.get("/healthz")


def test_a_stopped_loop_is_told_of_by_healthz_until_it_goes_on(start_web: StartWeb) -> None:
    web = start_web()
    suspend(web.depot.process.pid)
    try:
        ill = eventually(lambda: (answer := web.get("/healthz")).status == 503 and answer)
        assert ill.value["code"] == "unavailable"
        assert "has not answered" in ill.value["message"]
        eventually(lambda: web.get("/readyz").status == 503)
        assert web.get("/v1/status").status == 503
        assert "kvdepot_up 0.0" in web.get("/metrics").body.decode()
    finally:
        os.kill(web.depot.process.pid, signal.SIGCONT)
    eventually(web.is_well)
    assert web.get("/v1/status").status == 200
    assert "kvdepot_up 1.0" in web.get("/metrics").body.decode()


def test_a_port_that_is_taken_is_one_line_in_the_log_and_tried_again(start_depot: StartDepot) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        depot = start_depot("--http", address)
        eventually(lambda: "cannot bind HTTP to" in depot.logged())
        assert works(depot)
        said = eventually(lambda: depot.status()["http_failure"])
        assert said == f"cannot bind {address} (Address already in use); retrying, or choose another --http"
    web = Web(depot)
    eventually(lambda: not depot.status()["http_failure"])
    assert web.port == int(address.rpartition(":")[2])
    assert depot.logged().count("cannot bind HTTP to") == 1


def test_with_http_off_there_is_no_process_and_no_token(start_depot: StartDepot) -> None:
    depot = start_depot("--http", "off")
    assert works(depot)
    assert not Path(depot.url.removeprefix("ipc://") + ".token").exists()
    assert children(depot.process.pid) == []


def test_where_clients_need_keys_the_web_process_has_one_that_nobody_can_read(
    start_web: StartWeb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve.generate(tmp_path / "keys", ["web"], "tenant-of-web")
    monkeypatch.setenv("KVDEPOT_KEY", str(tmp_path / "keys" / "web.key"))
    web = start_web("--keys", str(tmp_path / "keys"))
    assert web.get("/v1/status", token=web.token).value["clients"] >= 1
    place = Path(f"/proc/{web.child()}")
    told = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
    assert web.token.encode() not in told
    assert b"KVDEPOT_KEY" not in told
    # A client in a file may be called web, and is not taken for the process, nor the process for it.
    assert web.change("/v1/forget", {"all": True}).value == {"memory": 0}
    assert web.get("/v1/status", token=web.token).value["counters"].get("keys_refused", 0) == 0
    client = MessageQueueClient(web.depot.url, web.depot.context)
    try:
        assert client.ask(wire.Noop()).result(HANG_S) == "ok"
    finally:
        client.close()


def test_http_at_a_loopback_address_of_ipv6(start_web: StartWeb) -> None:
    need_ipv6()
    web = start_web(http="[::1]:0", host="::1")
    assert web.get("/v1/status").status == 200
    assert web.get("/v1/status", headers={"Host": "evil.example"}).status == 403


def test_with_keys_the_web_process_shows_all_tenants_and_changes_nothing_of_theirs(
    start_web: StartWeb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve.generate(tmp_path / "keys", ["engine"], "blue")
    monkeypatch.setenv("KVDEPOT_KEY", str(tmp_path / "keys" / "engine.key"))
    web = start_web("--keys", str(tmp_path / "keys"))
    engine = Engine(web.depot)
    tokens = list(range(2 * CHUNK))
    engine.store(tokens, list(range(2 * PER_CHUNK)))
    with admin.connect(web.depot.url) as client:
        admin.lease(client, "system", admin.make_prompt(client, tokens, b"", engine.model, ""))
    seen = eventually(lambda: (said := web.get("/v1/status", token=web.token).value)["lease_count"] and said)
    assert [namespace["tenant"] for namespace in seen["namespaces"]] == ["blue"]
    assert [each["tenant"] for each in seen["engines"]] == ["blue"]
    assert seen["lease_count"] == 1
    for path in ("/v1/warm", "/v1/lease"):
        body = {"tokens": tokens, "model": engine.model, **({"name": "system"} if path != "/v1/warm" else {})}
        assert web.change(path, body).value == {"chunks": 0, "of_chunks": 2}
    assert web.change("/v1/release", {"name": "system", "drops": False}).status == 200  # its own, of no chunks
    assert web.change("/v1/release", {"name": "system"}).status == 400
    assert web.change("/v1/release", {"tokens": tokens, "model": engine.model}).value["removed_chunks"] == 0
    for what in ({"all": True}, {"model": engine.model}):
        assert web.change("/v1/forget", what).value == {"memory": 0}
    assert engine.lookup(tokens) == 2 * CHUNK
    with admin.connect(web.depot.url) as client:
        admin.end_lease(client, "system")
    engine.close()


def test_the_token_is_readable_by_its_user_alone_and_outlives_the_server(start_web: StartWeb) -> None:
    web = start_web()
    path = Path(web.depot.url.removeprefix("ipc://") + ".token")
    token = web.token
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(token) >= 32
    assert token not in web.depot.logged()
    assert web.depot.stop() == 0
    again = start_web(url=web.depot.url)
    assert again.token == token
    assert again.change("/v1/forget", {"all": True}).status == 200


def test_a_token_file_of_ones_own_is_used_and_none_is_made(start_web: StartWeb, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-my-own-making\n")
    file.chmod(0o600)
    web = start_web("--http-token-file", str(file))
    assert not Path(web.depot.url.removeprefix("ipc://") + ".token").exists()
    assert web.ask("POST", "/v1/forget", {"all": True}, "a-token-of-my-own-making").status == 200
    assert web.ask("POST", "/v1/forget", {"all": True}, "another-token-altogether").status == 401


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (None, 0, "No such file"),
        ("short", 0o600, "does not contain a token"),
        ("long-enough-to-be-a-token", 0o644, "chmod it to 600"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_a_wrong_setting(
    tmp_path: Path, text: str | None, mode: int, said: str
) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    url = f"ipc://{tmp_path}/depot.sock"
    with pytest.raises(ConfigError, match=said):
        obtain_token(load(flags={"url": url, "http_token_file": str(file)}, environ={}))


@pytest.mark.parametrize("left", ["", "x", "link"])
def test_an_invalid_token_file_is_refused_and_a_link_or_empty_one_replaced(tmp_path: Path, left: str) -> None:
    config = load(flags={"url": f"ipc://{tmp_path}/depot.sock"}, environ={})
    path = token_path(config)
    if left == "link":
        (tmp_path / "secret").write_text("another-file-of-this-user")
        path.symlink_to(tmp_path / "secret")
    else:
        path.write_text(left)
        path.chmod(0o600)
    if left == "x":
        with pytest.raises(ConfigError):
            obtain_token(config)
        return
    token = obtain_token(config)
    assert not path.is_symlink()
    assert token == read_token(config) != "another-file-of-this-user"


def test_settings_are_shown_without_secrets(start_web: StartWeb, tmp_path: Path) -> None:
    web = start_web("--tiers", f"disk://{tmp_path}/kv?capacity_gib=1", "redis://me:hunter2@127.0.0.1:1/0?write=off")
    shown = web.get("/v1/status")
    assert b"hunter2" not in shown.body and web.token.encode() not in shown.body
    settings = shown.value["settings"]
    assert settings["tiers"] == f"disk://{tmp_path}/kv?capacity_gib=1 redis://***@127.0.0.1:1/0?write=off"
    assert (settings["chunk_size"], settings["http"]) == ("256", "127.0.0.1:0")
