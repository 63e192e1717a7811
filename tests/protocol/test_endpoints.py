"""Binding to endpoints: files of others are not removed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import zmq

from kvdepot.cli.status import ask_health
from kvdepot.errors import Unavailable
from kvdepot.kv_events.publisher import replay_endpoint
from kvdepot.protocol import curve
from kvdepot.protocol.addresses import fault_of_endpoint
from kvdepot.protocol.endpoints import Claim, is_taken, listen
from tests.cli.command import run
from tests.conftest import HANG_S, StartDepot, eventually
from tests.ports import free_port, need_ipv6


def test_a_place_is_one_claims_until_it_is_closed(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/s"
    first = Claim(url, "--url")
    with pytest.raises(Unavailable, match=r"another kvdepot server listens on .*choose another --kv-events"):
        Claim(url, "--kv-events")
    first.close()
    first.close()
    assert not list(tmp_path.iterdir())
    Claim(url, "--url").close()


def test_who_claims_a_place_while_its_lock_goes_has_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, flock = f"ipc://{tmp_path}/s", __import__("fcntl").flock
    lock = tmp_path / "s.lock"

    def slow(fd: int, how: int) -> None:
        """Between opening the lock file and locking it, its owner has ended, and another server has started."""
        monkeypatch.setattr("fcntl.flock", flock)
        lock.unlink()
        others.append(Claim(url, "--url"))
        flock(fd, how)

    others: list[Claim] = []
    monkeypatch.setattr("fcntl.flock", slow)
    with pytest.raises(Unavailable, match="another kvdepot server"):
        Claim(url, "--url")
    assert lock.exists()
    others[0].close()


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_file_that_lies_where_a_socket_is_to_be_is_not_taken_away(tmp_path: Path, kind: str) -> None:
    path, notes = tmp_path / "s", tmp_path / "notes"
    notes.write_text("mine")
    match kind:
        case "file":
            path.write_text("mine")
        case "link":
            path.symlink_to(notes)
        case "folder":
            path.mkdir()
    with pytest.raises(Unavailable, match="a file is there"):
        Claim(f"ipc://{path}", "--url")
    assert path.exists() and notes.read_text() == "mine"
    assert {each.name for each in tmp_path.iterdir()} == {"s", "notes"}


def test_a_dead_process_leaves_its_place_and_a_listening_one_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        for _ in range(3):  # the second and third find the other's queue full
            with pytest.raises(Unavailable, match="another program listens"):
                Claim(f"ipc://{path}", "--url")
    claim = Claim(f"ipc://{path}", "--url")
    claim.close()
    assert not path.exists()


def test_a_place_that_cannot_be_had_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="107 bytes"):
        Claim("ipc:///tmp/" + "x" * 103, "--url")
    with pytest.raises(Unavailable, match=r"nowhere/s: No such file"):
        Claim(f"ipc://{tmp_path}/nowhere/s", "--url")
    Claim("tcp://127.0.0.1:1", "--url").close()


def test_what_is_listened_on_is_for_this_user_alone(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        listen(listener, f"ipc://{tmp_path}/s")
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        assert os.umask(0o022) == 0o022
    with socket.create_server(("127.0.0.1", 0)) as taken, zmq.Context() as context:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with context.socket(zmq.ROUTER) as listener, pytest.raises(Unavailable, match=url):
            listen(listener, url)


@pytest.mark.parametrize("host", ["::1", "[::1]x", "[::1", "a:b", "me@host", "host/path", "[localhost]", "", "[::1]:1"])
def test_an_endpoint_whose_host_is_malformed_is_refused_with_its_form(host: str) -> None:
    assert "is not of the form tcp://HOST:PORT" in fault_of_endpoint(f"tcp://{host}:5555")


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "[fe80::1%eth0]", "*", "depot-1.example.com", "eth0"]
)
def test_an_endpoint_is_a_name_or_an_address_of_either_kind(host: str) -> None:
    assert fault_of_endpoint(f"tcp://{host}:5555") == ""


@pytest.mark.faults
@pytest.mark.parametrize("host", ["::1", "::"])
def test_every_endpoint_of_a_server_may_be_an_ipv6_address(
    host: str, start_depot: StartDepot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_ipv6()
    port, events = free_port(), free_port()
    feed = f"tcp://[::1]:{events}"
    flags = ["--http", f"[{host}]:0", "--kv-events", feed]
    if host == "::":  # which needs keys, and takes clients of both kinds
        curve.generate(tmp_path / "keys", ["alice"])
        monkeypatch.setenv("KVDEPOT_KEY", str(tmp_path / "keys" / "alice.key"))
        flags = ["--http", f"[{host}]:0", "--keys", str(tmp_path / "keys")]
    depot = start_depot(*flags, url=f"tcp://[{host}]:{port}")
    for each in ("[::1]", "127.0.0.1")[: 2 if host == "::" else 1]:
        depot.url = f"tcp://{each}:{port}"
        assert is_taken(depot.url)
        assert run("status", "--url", depot.url).returncode == 0
    address = eventually(lambda: depot.status()["http"])
    assert address.startswith(f"[{host}]:")
    eventually(lambda: ask_health(address) == 200)
    if host == "::1":
        assert is_taken(feed) and is_taken(replay_endpoint(feed))
        with depot.context.socket(zmq.SUB) as reader:
            reader.setsockopt(zmq.IPV6, 1)
            reader.subscribe(b"")
            reader.connect(feed)
            assert reader.poll(1000 * int(HANG_S)), "no heartbeat came"
