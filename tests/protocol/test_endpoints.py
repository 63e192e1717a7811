"""Binding to endpoints: files of others are not removed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import zmq

from kvdepot.errors import Unavailable
from kvdepot.protocol.endpoints import Claim, listen


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
