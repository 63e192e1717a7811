"""The handshake where others could impersonate either end: each end accepts only one of this user."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvdepot.client import MessageQueueClient
from kvdepot.client.socket import _others_between
from kvdepot.errors import BadRequest, KVDepotError, Unavailable, UnknownClient, VersionMismatch
from kvdepot.memory.shm import LivenessFile
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Offer, is_sealed
from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually
from tests.ports import free_port
from tests.protocol.raw import Raw


class OldHello(msgspec.Struct, tag="Hello", array_like=True, frozen=True):
    """As it was up to version 3."""

    version: int
    liveness: str
    secret: bytes


pytestmark = pytest.mark.faults

LOOKUP = wire.Lookup("m", 1, 0, "r", 1, bytes(32 * 64))


def open_urls() -> dict[str, str]:
    return {"abstract": f"ipc://@kvdepot-test-{uuid.uuid4().hex[:12]}", "tcp": f"tcp://127.0.0.1:{free_port()}"}


class Impostor:
    """An impostor at a server's endpoint, which forwards, alters or forges messages."""

    def __init__(self, url: str, answer: Callable[[bytes, bytes], bytes | None]) -> None:
        """answer: from identity and frame; None says nothing."""
        self.heard: list[bytes] = []
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        eventually(lambda: self._binds(url))
        self._answer = answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _binds(self, url: str) -> bool:
        try:
            self._socket.bind(url)
        except zmq.ZMQError:
            return False
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                identity, frame = self._socket.recv_multipart()
                self.heard.append(frame)
                reply = self._answer(identity, frame)
                if reply is not None:
                    self._socket.send_multipart((identity, reply))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


StartImpostor = Callable[[str, Callable[[bytes, bytes], bytes | None]], Impostor]


@pytest.fixture
def start_impostor() -> Iterator[StartImpostor]:
    with contextlib.ExitStack() as ending:
        yield lambda url, answer: ending.enter_context(contextlib.closing(Impostor(url, answer)))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def lie(claimed: Callable[[wire.Hello], tuple[Any, bytes]]) -> Callable[[bytes, bytes], bytes | None]:
    """Says what `claimed` makes of a hello, boot id with it, and from then on that all is there."""

    def answer(_: bytes, frame: bytes) -> bytes | None:
        number, request = wire.decode_request(frame)
        value: Any = {wire.Lookup: 64, wire.Noop: "ok", wire.ChunkSize: 256}.get(type(request), [True])
        boot = b"bootboot"
        if isinstance(request, wire.Prove):
            value = wire.Welcome(wire.VERSION, 256)
        if isinstance(request, wire.Hello):
            value, boot = claimed(request)
        return wire.encode_answer(number, boot, value)

    return answer


def refused(url: str, context: zmq.Context[Any], impostor: Impostor) -> str:
    """The client's error about that server; it must not have sent anything but its hello."""
    client = MessageQueueClient(url, context)
    try:
        with pytest.raises(Unavailable) as error:
            client.ask(LOOKUP).result(HANG_S)
        assert impostor.heard and not any(client.liveness.secret in frame for frame in impostor.heard)
        assert {type(wire.decode_request(frame)[1]) for frame in impostor.heard} == {wire.Hello}
        return str(error.value)
    finally:
        client.close()


def test_who_names_the_clients_own_liveness_as_its_arena_is_not_believed(
    context: zmq.Context[Any], start_impostor: StartImpostor
) -> None:
    url = open_urls()["abstract"]
    for claimed in (
        lambda hello: (wire.Proof(wire.VERSION, hello.liveness, bytes(16), bytes(32)), b"bootboot"),
        lambda hello: ([hello.version, hello.liveness, 256, 0.0], b"bootboot"),  # as servers said it before
        lambda hello: ("ok", b"bootboot"),
    ):
        impostor = start_impostor(url, lie(claimed))
        assert "is not a kvdepot server of this user" in refused(url, context, impostor)
        impostor.close()


def test_who_names_the_arena_of_a_real_server_but_cannot_read_it_is_not_believed(
    context: zmq.Context[Any], start_depot: StartDepot, start_impostor: StartImpostor
) -> None:
    real, url = start_depot(arena_mib=8), open_urls()["tcp"]
    boot = bytes.fromhex(real.status()["boot"])
    for mac in (bytes(32), os.urandom(32), b""):
        proof = wire.Proof(wire.VERSION, real.name, os.urandom(16), mac)
        impostor = start_impostor(url, lie(lambda _, proof=proof: (proof, boot)))
        assert "is not a kvdepot server of this user" in refused(url, context, impostor)
        impostor.close()


def test_a_proof_for_one_client_is_none_for_another(
    context: zmq.Context[Any], start_depot: StartDepot, start_impostor: StartImpostor
) -> None:
    """Any client can make a server prove itself, but only for that client's nonce and liveness file."""
    real = start_depot(url=f"tcp://127.0.0.1:{free_port()}", arena_mib=8)
    asking = Raw(real)
    value = asking.ask(Offer(asking.liveness.name, asking.liveness.secret, True).hello)
    proof, boot = msgspec.convert(value, wire.Proof), asking._boot
    url = open_urls()["abstract"]
    impostor = start_impostor(url, lie(lambda _: (proof, boot)))
    assert "is not a kvdepot server of this user" in refused(url, context, impostor)
    asking.close()


def test_an_arena_without_a_server_or_that_others_may_read_proves_nothing(
    context: zmq.Context[Any], start_depot: StartDepot, start_impostor: StartImpostor
) -> None:
    left = start_depot("--on-stop", "keep", arena_mib=8)
    boot = bytes.fromhex(left.status()["boot"])
    proof = wire.Proof(wire.VERSION, left.name, bytes(16), bytes(32))
    url = open_urls()["abstract"]
    impostor = start_impostor(url, lie(lambda _: (proof, boot)))
    (SHM / left.name).chmod(0o640)
    assert "other users may open" in refused(url, context, impostor)
    (SHM / left.name).chmod(0o600)
    assert "cannot read that arena" in refused(url, context, impostor)
    left.stop()
    assert "belongs to another server" in refused(url, context, impostor)


class Relay:
    """A man in the middle between a client and a real server, which can alter frames in both directions."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self._sockets: dict[bytes, zmq.Socket[bytes]] = {}
        self.requests: list[bytes] = []
        self.alter_reply: Callable[[bytes, bytes], bytes] = lambda _, reply: reply

    def __call__(self, identity: bytes, frame: bytes) -> bytes | None:
        if identity not in self._sockets:
            self._sockets[identity] = self._depot.context.socket(zmq.DEALER)
            self._sockets[identity].connect(self._depot.url)
        self.requests.append(frame)
        self._sockets[identity].send(frame)
        return self.alter_reply(frame, self.hear(identity))

    def hear(self, identity: bytes) -> bytes:
        assert self._sockets[identity].poll(1000 * HANG_S)
        return self._sockets[identity].recv()

    def again(self, frame: bytes) -> Any:
        """What the server says to a frame of the client's that comes once more."""
        (identity,) = self._sockets
        self._sockets[identity].send(frame)
        return wire.decode_reply(self.hear(identity))[2]


@pytest.fixture
def relay(start_depot: StartDepot) -> Relay:
    return Relay(start_depot(url=f"tcp://127.0.0.1:{free_port()}", arena_mib=8))


def test_who_passes_the_hello_on_to_a_real_server_cannot_alter_what_it_answers(
    relay: Relay, context: zmq.Context[Any], start_impostor: StartImpostor
) -> None:
    url = open_urls()["tcp"]
    start_impostor(url, relay)
    client = MessageQueueClient(url, context)
    assert client.ask(LOOKUP).result(HANG_S)[0] == 0, "passed on as it is, it is answered"
    for lies in (
        lambda frame, reply: wire.encode_answer(frame[:8], reply[8:16], 64) if is_sealed(frame) else reply,
        lambda frame, reply: reply[:-1] + b"\x40" if is_sealed(frame) else reply,
        lambda frame, reply: (
            wire.encode_failure(frame[:8], reply[8:16], UnknownClient("hello?")) if is_sealed(frame) else reply
        ),
    ):
        relay.alter_reply = lies
        with pytest.raises(KVDepotError):
            client.ask(LOOKUP, deadline_s=0.5).result(HANG_S)
    relay.alter_reply = lambda _, reply: reply
    assert client.ask(LOOKUP).result(HANG_S)[0] == 0
    client.close()


def test_who_stands_in_between_can_neither_repeat_nor_alter_nor_make_up_requests(
    relay: Relay, context: zmq.Context[Any], start_impostor: StartImpostor
) -> None:
    url = open_urls()["abstract"]
    start_impostor(url, relay)
    client = MessageQueueClient(url, context)
    client.ask(LOOKUP).result(HANG_S)
    *_, sent = relay.requests
    assert is_sealed(sent)
    counter = (int.from_bytes(sent[9:17], "little") + 1).to_bytes(8, "little")
    for frame in (sent, sent[:9] + counter + sent[17:], sent[:-1] + b"\1", wire.encode_request(9, wire.Clear())):
        assert type(relay.again(frame)) is UnknownClient
    assert client.ask(LOOKUP).result(HANG_S)[0] == 0
    client.close()


def test_a_server_that_every_user_can_reach_takes_only_sealed_clients(relay: Relay) -> None:
    raw = Raw(relay._depot)
    raw._sealed = False
    refused = raw.introduce(raw.liveness.name, raw.liveness.secret)
    assert type(refused) is BadRequest and "sealed" in str(refused)
    raw.close()


@pytest.mark.parametrize("url", open_urls().values(), ids=open_urls())
def test_who_takes_a_dead_servers_address_over_is_not_believed(
    url: str, start_depot: StartDepot, start_impostor: StartImpostor
) -> None:
    depot = start_depot(url=url, arena_mib=8)
    client = MessageQueueClient(url, depot.context)
    assert client.ask(LOOKUP).result(HANG_S)[0] == 0
    boot = bytes.fromhex(depot.status()["boot"])
    depot.process.kill()
    depot.process.wait()
    proof = wire.Proof(wire.VERSION, depot.name, bytes(16), bytes(32))

    def answer(_: bytes, frame: bytes) -> bytes:
        if is_sealed(frame):
            return wire.encode_answer(frame[:8], boot, 64)
        number, request = wire.decode_request(frame)
        return wire.encode_answer(number, boot, proof if isinstance(request, wire.Hello) else 64)

    impostor = start_impostor(url, answer)
    eventually(lambda: _is_refused(client) and impostor.heard)
    impostor.close()
    start_depot(url=url, name=depot.name, arena_mib=8)
    eventually(lambda: _answer(client) == 0)
    client.close()


def _is_refused(client: MessageQueueClient) -> bool:
    with pytest.raises(KVDepotError):
        client.ask(LOOKUP, deadline_s=0.5).result(HANG_S)
    return True


def _answer(client: MessageQueueClient) -> int | None:
    try:
        return int(client.ask(LOOKUP, deadline_s=1.0).result(HANG_S)[0])
    except KVDepotError:
        return None


def test_messages_go_unsealed_only_where_no_other_user_could_ever_listen(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    assert not _others_between(f"ipc://{own}/depot.sock")
    for url in ("ipc://@name", "tcp://127.0.0.1:5555", "ipc:///tmp/depot.sock", f"ipc://{own}/missing/depot.sock"):
        assert _others_between(url), url
    own.chmod(0o770)
    assert _others_between(f"ipc://{own}/depot.sock")
    inner = own / "inner"
    inner.mkdir(mode=0o700)
    assert _others_between(f"ipc://{inner}/depot.sock"), "whoever can rename the folder can put another in its place"
    own.chmod(0o1777)
    assert not _others_between(f"ipc://{inner}/depot.sock"), "as in /tmp"
    link = tmp_path / "link"
    link.symlink_to("/tmp")
    assert _others_between(f"ipc://{link}/depot.sock")


def test_nonces_and_proofs_are_not_in_the_text_of_messages() -> None:
    secret = b"sixteen secret b"
    for message in (wire.Hello(8, "live", secret), wire.Prove(secret), wire.Proof(8, "arena", secret, secret)):
        assert "secret" not in repr(message)


def test_who_answers_what_nobody_has_asked_it_yet_is_not_believed(
    context: zmq.Context[Any], start_impostor: StartImpostor
) -> None:
    """Requests wait until the server is authenticated, and their ids are easy to guess."""
    url = open_urls()["tcp"]

    def answer(_: bytes, frame: bytes) -> bytes:
        assert int.from_bytes(frame[:8], "little") > 1, "a hello comes after what waits for it"
        return wire.encode_answer((1).to_bytes(8, "little"), b"bootboot", 64)

    impostor = start_impostor(url, answer)
    client = MessageQueueClient(url, context)
    with pytest.raises(KVDepotError):
        client.ask(LOOKUP, deadline_s=1.0).result(HANG_S)
    assert impostor.heard
    client.close()


def test_a_client_of_the_last_version_is_told_so_by_this_server(start_depot: StartDepot) -> None:
    raw, liveness = Raw(start_depot(arena_mib=8)), LivenessFile(SHM)
    refused = raw.ask_bytes(msgspec.msgpack.encode(OldHello(3, liveness.name, liveness.secret)))
    assert type(refused) is VersionMismatch and "protocol 3" in str(refused)
    raw.close()
    liveness.close()
