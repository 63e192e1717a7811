"""Who gets in, what a client can reach, and that nothing tells a secret: real servers, sockets and files."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvdepot import wire
from kvdepot.client import MessageQueueClient
from kvdepot.errors import BadRequest, LayoutError, Unavailable, UnknownClient
from kvdepot.layout import Layout, Mapping, Segment
from kvdepot.shm import Card

from .conftest import Depot, StartDepot, eventually
from .test_wire import Raw

SHM = Path("/dev/shm")
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def loopback() -> Iterator[Depot]:
    """A server that every user of this host can reach."""
    server = Depot(url=f"tcp://127.0.0.1:{free_port()}", arena_mib=8).wait_ready()
    yield server
    server.close()


@pytest.fixture
def raw(loopback: Depot) -> Iterator[Raw]:
    client = Raw(loopback)
    yield client
    client.close()


# -- cards


def test_a_hello_with_a_living_clients_card_but_not_its_secret_is_refused(raw: Raw, loopback: Depot) -> None:
    victim = MessageQueueClient(loopback.url, loopback.context)
    victim.learn_chunk_size(10.0)
    try:
        for guess in (b"", bytes(16), secrets.token_bytes(16), victim.card.secret[:15], victim.card.secret + b"x"):
            refused = raw.ask(wire.Hello(wire.VERSION, victim.card.name, guess))
            assert type(refused) is BadRequest
            assert type(raw.ask(wire.Noop())) is UnknownClient
    finally:
        victim.close()


def test_a_card_that_no_server_has_seen_yet_needs_its_secret_too(raw: Raw) -> None:
    refused = raw.ask(wire.Hello(wire.VERSION, raw.card.name, secrets.token_bytes(16)))
    assert type(refused) is BadRequest
    assert "secret" in str(refused)
    assert raw.card.secret.hex() not in str(refused)
    assert str(raw.card.secret) not in str(refused)
    raw.hello()
    assert raw.ask(wire.Noop()) == "ok"


def test_a_card_without_a_secret_is_refused(raw: Raw) -> None:
    with Path(SHM / raw.card.name).open("r+b") as page:
        page.write(bytes(4096))
    for guess in (b"", bytes(16)):
        assert type(raw.ask(wire.Hello(wire.VERSION, raw.card.name, guess))) is BadRequest


def test_one_card_serves_one_client(raw: Raw, loopback: Depot) -> None:
    raw.hello()
    other = Raw(loopback)
    try:
        refused = other.ask(wire.Hello(wire.VERSION, raw.card.name, raw.card.secret))
        assert type(refused) is BadRequest
        assert type(other.ask(wire.Noop())) is UnknownClient
        other.hello()
    finally:
        other.close()
    assert raw.ask(wire.Noop()) == "ok"


def test_a_client_does_not_change_its_card(raw: Raw) -> None:
    raw.hello()
    other = Card()
    try:
        assert type(raw.ask(wire.Hello(wire.VERSION, other.name, other.secret))) is BadRequest
        assert type(raw.ask(wire.Hello(wire.VERSION, raw.card.name, other.secret))) is BadRequest
    finally:
        other.close()
    assert raw.ask(wire.Hello(wire.VERSION, raw.card.name, raw.card.secret))[0] == wire.VERSION


def test_no_repr_shows_a_cards_secret(raw: Raw) -> None:
    hello = wire.Hello(wire.VERSION, raw.card.name, raw.card.secret)
    for text in (repr(hello), str(hello), repr(raw.card)):
        assert raw.card.name in text
        assert repr(raw.card.secret)[2:-1] not in text
        assert raw.card.secret.hex() not in text


# -- modes and owners


def test_every_file_is_the_users_own_under_a_umask_that_forbids_nothing(tmp_path: Path) -> None:
    url, name = f"ipc://{tmp_path}/depot.sock", f"kvdepot-test-{secrets.token_hex(6)}"
    old = os.umask(0)
    try:
        server = Depot(url=url, name=name, arena_mib=4)
        client = MessageQueueClient(url, server.context)
    finally:
        os.umask(old)
    try:
        client.learn_chunk_size(20.0)
        files = [tmp_path / "depot.sock", tmp_path / "depot.sock.lock", SHM / name, SHM / client.card.name]
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 4
    finally:
        client.close()
        server.close()


@as_root
@pytest.mark.parametrize("kind", ["socket", "link of another user", "link to another user's socket"])
def test_a_client_does_not_connect_to_another_users_socket(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "depot.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        place = tmp_path / "real.sock" if "link" in kind else path
        listening.bind(str(place))
        if kind == "link of another user":
            path.symlink_to(place)
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        else:
            os.chown(place, NOBODY, NOBODY)
            if "link" in kind:
                path.symlink_to(place)
        with zmq.Context() as context, pytest.raises(Unavailable) as caught:
            MessageQueueClient(f"ipc://{path}", context)
    assert str(path) in str(caught.value)
    assert f"user {NOBODY}" in str(caught.value)


@as_root
def test_a_client_says_nothing_to_a_socket_that_another_user_made_later(tmp_path: Path) -> None:
    path = tmp_path / "depot.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = MessageQueueClient(f"ipc://{path}", context)
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(Unavailable):
        client.learn_chunk_size(0.5)
    assert not router.poll(0), "the client introduced itself to another user"
    os.chown(path, 0, 0)
    future = client.ask(wire.ChunkSize())
    eventually(lambda: future.query() or router.poll(0))
    assert len(router.recv_multipart()) == 2
    client.close()
    router.close(linger=0)
    context.term()


def registration(name: str, size: int = 4096) -> wire.Register:
    return wire.Register(1, Layout([Mapping(name, size)], [Segment(0, 0, 512, 512)], 8, bytes(32)))


def file_of_another_user(path: Path) -> None:
    path.write_bytes(bytes(4096))
    os.chown(path, NOBODY, NOBODY)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to a file of this user": lambda path: path.symlink_to(__file__),
    "a link to another user's file": lambda path: path.symlink_to("/etc/passwd"),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "an empty file": lambda path: path.touch(),
    "a file that is too short": lambda path: path.write_bytes(bytes(4095)),
}


def refused(raw: Raw, name: str) -> LayoutError:
    error = raw.ask(registration(name))
    assert type(error) is LayoutError, error
    assert raw.ask(wire.Noop()) == "ok"
    return error


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_no_plain_file_of_this_user_is_not_registered(raw: Raw, kind: str) -> None:
    raw.hello()
    path = SHM / f"kvtest-{secrets.token_hex(6)}"
    FOREIGN[kind](path)
    try:
        assert path.name in str(refused(raw, path.name))
    finally:
        if kind == "a directory":
            path.rmdir()
        else:
            path.unlink()


@as_root
def test_another_users_file_is_not_registered_not_even_by_root(raw: Raw) -> None:
    raw.hello()
    path = SHM / f"kvtest-{secrets.token_hex(6)}"
    file_of_another_user(path)
    try:
        assert "not a file of user" in str(refused(raw, path.name))
    finally:
        path.unlink()


@as_root
def test_a_device_is_not_registered(raw: Raw) -> None:
    raw.hello()
    path = SHM / f"kvtest-{secrets.token_hex(6)}"
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: it could be mapped
    except PermissionError:
        pytest.skip("this container may not make devices")
    try:
        refused(raw, path.name)
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["../etc/passwd", "a/b", "..", ".", "", "/", "a\0b", "x" * 201, "a b", "\u00e9"])
def test_a_name_that_leads_elsewhere_is_not_registered(raw: Raw, name: str) -> None:
    raw.hello()
    refused(raw, name)


def test_kvdepots_own_files_are_not_registered_as_tensors(raw: Raw, loopback: Depot, start_depot: StartDepot) -> None:
    raw.hello()
    neighbour = start_depot(arena_mib=4)
    for arena in (loopback.name, neighbour.name):
        assert "arena" in str(refused(raw, arena))
    other = Card()
    try:
        for card in (raw.card, other):
            assert "card" in str(refused(raw, card.name))
    finally:
        other.close()
    assert raw.ask(wire.Status())["instances"] == 0


def test_a_card_whose_place_holds_something_else_does_not_stop_the_server(loopback: Depot) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _IMPOSTOR, loopback.url], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        card = SHM / child.stdout.readline().strip()
        child.kill()
    try:
        eventually(lambda: loopback.status()["clients"] == 1)
        assert card.is_dir()
    finally:
        card.rmdir()


_IMPOSTOR = """
import os, sys, zmq
from kvdepot.client import MessageQueueClient
client = MessageQueueClient(sys.argv[1], zmq.Context())
client.learn_chunk_size(10.0)
os.unlink("/dev/shm/" + client.card.name)
os.mkdir("/dev/shm/" + client.card.name)
print(client.card.name, flush=True)
sys.stdin.read()
"""
