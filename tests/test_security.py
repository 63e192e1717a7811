"""Who gets in, what a client can reach, and that nothing tells a secret: real servers, sockets and files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

import kvdepot as kvdepot_package
from kvdepot.adapters import MessageQueueClient, RequestType
from kvdepot.config import load
from kvdepot.errors import BadRequest, ConfigError, Unavailable
from kvdepot.protocol import curve, wire
from kvdepot.protocol.handshake import Offer
from kvdepot.protocol.keys import salt_tag
from tests.cli.command import keygen, run
from tests.client.engine import CHUNK, Engine
from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually
from tests.ports import free_port
from tests.protocol.raw import Raw
from tests.server.process import kill

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")

pytestmark = pytest.mark.faults


# -- liveness files


def test_a_liveness_without_a_secret_is_refused(depot: Depot) -> None:
    with contextlib.closing(Raw(depot)) as raw:
        (SHM / raw.liveness.name).write_bytes(bytes(4096))
        for guess in (b"", bytes(16)):
            assert type(raw.introduce(raw.liveness.name, guess)) is BadRequest


# -- modes and owners


@contextlib.contextmanager
def no_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def test_every_file_is_the_users_own_under_a_umask_that_forbids_nothing(tmp_path: Path) -> None:
    url, name = f"ipc://{tmp_path}/depot.sock", f"kvdepot-test-{secrets.token_hex(6)}"
    with no_umask():
        server = Depot(url=url, name=name, arena_mib=4)
        client = MessageQueueClient(url, server.context)
    with contextlib.closing(server), contextlib.closing(client):
        client.learn_chunk_size(HANG_S)
        files = [tmp_path / "depot.sock", tmp_path / "depot.sock.lock", SHM / name, SHM / client.liveness.name]
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 4


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
def test_a_client_sends_nothing_to_a_socket_that_another_user_made_later(tmp_path: Path) -> None:
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


def test_a_liveness_whose_place_holds_something_else_does_not_stop_the_server(depot: Depot) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _IMPOSTOR, depot.url], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        liveness = SHM / child.stdout.readline().strip()
        child.kill()
    try:
        eventually(lambda: depot.status()["clients"] == 1)
        assert liveness.is_dir()
    finally:
        liveness.rmdir()


_IMPOSTOR = """
import os, sys, zmq
from kvdepot.client import MessageQueueClient
client = MessageQueueClient(sys.argv[1], zmq.Context())
client.learn_chunk_size(10.0)
os.unlink("/dev/shm/" + client.liveness.name)
os.mkdir("/dev/shm/" + client.liveness.name)
print(client.liveness.name, flush=True)
sys.stdin.read()
"""


# -- keys


def secrets_in(folder: Path) -> list[str]:
    """The secret halves of all keys in a folder."""
    found = [tomllib.loads(path.read_text())["secret"] for path in folder.glob("*.key")]
    assert found
    assert all(len(secret) == 40 for secret in found)
    return found


@pytest.fixture(scope="module")
def made_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = keygen(tmp_path_factory.mktemp("made") / "keys", "alice", "bob")
    keygen(folder, "carol", "charlie", tenant="blue")
    return keygen(folder, "dora", tenant="red")


@pytest.fixture
def keys(made_keys: Path, tmp_path: Path) -> Path:
    """The test's own copy, modes included."""
    return shutil.copytree(made_keys, tmp_path / "keys")


@pytest.fixture
def keyed(keys: Path, start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch) -> Depot:
    """A server that other hosts can reach; this process's clients have alice's key unless they name another."""
    monkeypatch.setenv("KVDEPOT_KEY", str(keys / "alice.key"))
    port = free_port()
    server = start_depot("--keys", str(keys), url=f"tcp://0.0.0.0:{port}")
    server.url = f"tcp://127.0.0.1:{port}"
    return server


def asks(server: Depot, key: Path | str, timeout_s: float = 5.0) -> MessageQueueClient | None:
    """A client that was served; None where nobody answers it."""
    client = MessageQueueClient(server.url, server.context, key=str(key))
    try:
        client.learn_chunk_size(timeout_s)
    except Unavailable:
        client.close()
        return None
    return client


def test_keygen_makes_keys_that_only_their_user_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    with no_umask():
        keygen(folder, "engine-1", "engine_2", tenant="blue")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(["server.key", "engine-1.key", "engine_2.key", "clients.toml"], 0o600)
    listed = tomllib.loads((folder / "clients.toml").read_text())
    for name in ("engine-1", "engine_2"):
        key = tomllib.loads((folder / f"{name}.key").read_text())
        assert listed[name] == {"public": key["public"], "tenant": "blue"}
        assert key["server"] == tomllib.loads((folder / "server.key").read_text())["public"]
    assert len(set(secrets_in(folder))) == 3
    assert not any(secret in (folder / "clients.toml").read_text() for secret in secrets_in(folder))


def test_keygen_refuses_bad_names_and_open_folders_and_never_overwrites(keys: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in keys.iterdir()}
    for client in ("../eve", "", "x" * 65, "server", "eve\n"):
        assert run("keygen", keys, client).returncode == 2
    assert run("keygen", keys, "eve", "--tenant", "a/b").returncode == 2
    tmp_path.chmod(0o750)
    refusal = run("keygen", tmp_path, "eve")
    assert refusal.returncode == 2 and "chmod it to 700" in refusal.stderr
    tmp_path.chmod(0o700)
    assert not list(tmp_path.glob("*.key"))
    for clients in (["alice"], ["eve", "alice"], []):
        again = run("keygen", keys, *clients)
        assert again.returncode == 2
        assert "already" in again.stderr
    (keys / "bob.key").unlink()
    assert run("keygen", keys, "bob").returncode == 2  # clients.toml still lets the old key in
    del before[keys / "bob.key"]
    assert {path: path.read_bytes() for path in keys.iterdir()} == before


def test_an_address_beyond_the_loopback_needs_keys(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.3.2.1", "localhost", "[::1]"):
        assert curve.is_loopback(f"tcp://{host}:5555")
    for host in ("*", "[::]", "eth0", "128.0.0.1", "example.com"):
        assert not curve.is_loopback(f"tcp://{host}:5555")
    name = f"kvdepot-test-{secrets.token_hex(6)}"
    ended = run("serve", "--url", "tcp://*:5555", "--arena-name", name, "--arena-gib", "0.01")
    assert ended.returncode == 2
    assert "kvdepot keygen" in ended.stderr and "Traceback" not in ended.stderr
    assert not (SHM / name).exists()


def test_a_client_without_a_known_key_gets_no_service_and_is_counted(
    keyed: Depot, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_key = tomllib.loads((keys / "server.key").read_text())["public"]
    stranger = keygen(tmp_path / "others", "alice") / "alice.key"
    own = tomllib.loads(stranger.read_text())["server"]
    assert asks(keyed, stranger, 0.5) is None  # it takes the server for another one
    stranger.write_text(stranger.read_text().replace(own, server_key))
    before = keyed.status()["counters"]
    assert asks(keyed, stranger, 1.0) is None
    after = eventually(lambda: (c := keyed.status()["counters"]).get("keys_refused", 0) > 0 and c)
    assert after["keys_refused"] > before.get("keys_refused", 0)
    monkeypatch.delenv("KVDEPOT_KEY")
    assert asks(keyed, "", 0.5) is None
    monkeypatch.setenv("KVDEPOT_KEY", str(keys / "alice.key"))
    before = after
    eventually(lambda: keyed.status()["counters"].get("handshakes_refused", 0) > before.get("handshakes_refused", 0))
    monkeypatch.delenv("KVDEPOT_KEY")
    client = MessageQueueClient(keyed.url, keyed.context)
    with pytest.raises(Unavailable, match="KVDEPOT_KEY"):
        client.learn_chunk_size(0.5)
    client.close()


def test_a_client_cannot_speak_for_another_that_has_its_identity(keyed: Depot, keys: Path) -> None:
    alice = MessageQueueClient(keyed.url, keyed.context)
    alice.learn_chunk_size(HANG_S)
    identity = alice._socket.getsockopt(zmq.ROUTING_ID)
    thief = keyed.context.socket(zmq.DEALER)
    curve.read_client_key(keys / "bob.key").use(thief)
    thief.setsockopt(zmq.ROUTING_ID, identity)
    thief.setsockopt(zmq.LINGER, 0)
    thief.connect(keyed.url)
    liveness = alice.liveness
    for number, request in enumerate(
        [wire.Noop(), wire.Lookup("m", 1, 0, "r", 1, bytes(32)), Offer(liveness.name, liveness.secret, False).hello]
    ):
        thief.send(wire.encode_request(number, request))
        assert thief.poll(1000 * HANG_S)
        answered, _, value = wire.decode_reply(thief.recv())
        assert answered == number
        assert type(value) is BadRequest
    thief.close()
    assert keyed.status()["counters"]["users_refused"] == 3
    alice.close()


BAD_KEYS: dict[str, tuple[str, int, str]] = {
    "others can read it": ("{key}", 0o640, "chmod it to 600"),
    "not TOML": ("secret = {secret}", 0o600, "not TOML"),
    "no server": ('public = "{public}"\nsecret = "{secret}"\n', 0o600, "is a server's key: give one of its clients"),
    "a secret cut off": ('public = "{public}"\nserver = "{public}"\nsecret = "{secret:.30}"\n', 0o600, "secret is"),
}


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_a_key_file_that_cannot_be_used_is_refused_without_telling_what_is_in_it(keys: Path, kind: str) -> None:
    path = keys / "alice.key"
    text, mode, said = BAD_KEYS[kind]
    table = tomllib.loads(path.read_text())
    path.write_text(text.format(key=path.read_text(), **table))
    path.chmod(mode)
    with zmq.Context() as context, pytest.raises(ConfigError, match=said) as caught:
        MessageQueueClient("tcp://127.0.0.1:1", context, key=str(path))
    assert str(path) in str(caught.value) and table["secret"][:12] not in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe"])
def test_a_missing_or_special_key_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "alice.key"
    if kind == "directory":
        path.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    ended = run("status", "--url", "tcp://127.0.0.1:1", "--key", path)
    assert ended.returncode == 2
    assert str(path) in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "text", "mode"),
    [
        ("server.key", "", 0o600),
        ("server.key", None, 0o644),
        ("clients.toml", None, 0o666),
        ("clients.toml", "[a]\npublic = 3\n", 0o600),
        ("clients.toml", "a = 3\n", 0o600),
        ("clients.toml", '[a]\npublic = "*"\n', 0o600),
        ("clients.toml", '[a]\npublic = "{0}"\n[b]\npublic = "{0}"\n', 0o600),
        ("clients.toml", '[a]\npublic = "{0}"\ntenant = "b/c"\n', 0o600),
        ("clients.toml", '[a]\npublic = "{0}"\ntenent = "b"\n', 0o600),
    ],
)
def test_invalid_key_files_of_a_server_are_refused_by_file(keys: Path, name: str, text: str | None, mode: int) -> None:
    path = keys / name
    if text is not None:
        path.write_text(text.format("x" * 40))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=str(path)):
        curve.read_server_keys(keys)


# -- tenants


@pytest.fixture
def connect(keys: Path) -> Iterator[Callable[..., Engine]]:
    """Engines of one model with a client's key: `connect(server, "alice")`."""
    with contextlib.ExitStack() as ending:

        def start(server: Depot, name: str) -> Engine:
            made = Engine(server, model="shared-model", key=str(keys / f"{name}.key"))
            ending.callback(made.close)
            return made

        yield start


TOKENS, SOURCE, TARGET = list(range(CHUNK)), [0, 1, 2, 3], [8, 9, 10, 11]


def gets(engine: Engine, request_id: str = "") -> bool:
    """Whether blocks 8 to 11 now hold what was stored; failed ones are as they were."""
    before = engine.cache[8:12].clone()
    failed = engine.retrieve(TOKENS, TARGET, request_id=request_id)
    assert not failed or (failed == set(TARGET) and torch.equal(engine.cache[8:12], before))
    return not failed


def test_tenants_find_get_list_and_clear_only_their_own_chunks(
    keyed: Depot, keys: Path, connect: Callable[..., Engine]
) -> None:
    alice, carol, charlie, dora = (connect(keyed, name) for name in ("alice", "carol", "charlie", "dora"))
    carol.store(TOKENS, SOURCE)
    assert charlie.lookup(TOKENS, "a") == CHUNK and gets(charlie, "a"), "they have one tenant"
    assert torch.equal(charlie.cache[8:12], carol.cache[:4])
    for other in (alice, dora):
        assert other.lookup(TOKENS) == 0 and not gets(other)
        other.store(TOKENS, SOURCE)
    for each in (alice, carol, dora):
        assert each.lookup(TOKENS, "b") == CHUNK and gets(each, "b")
        assert torch.equal(each.cache[8:12], each.cache[:4])
    seen = {}
    for name in ("alice", "carol", "dora"):
        printed = json.loads(run("status", "--json", "--url", keyed.url, "--key", keys / f"{name}.key").stdout)
        seen[name] = {namespace["tenant"] for namespace in printed["namespaces"]}
    assert seen == {"alice": {"", "blue", "red"}, "carol": {"blue"}, "dora": {"red"}}
    eventually(lambda: keyed.status()["sessions"] == 0)
    for each in (carol, dora):
        assert each.lookup(TOKENS, "0") == CHUNK
    assert gets(dora, "0")
    eventually(lambda: keyed.status()["sessions"] == 1)
    assert gets(carol, "0"), "requests of two tenants with one id end their own pins only"
    dora.worker.mq_client.submit_request(RequestType.CLEAR, []).result(HANG_S)
    assert [each.lookup(TOKENS) for each in (alice, carol, dora)] == [CHUNK, CHUNK, 0]


def test_tenants_are_kept_apart_by_the_server_that_takes_an_arena_over(
    keys: Path, start_depot: StartDepot, connect: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDEPOT_KEY", str(keys / "alice.key"))
    first = start_depot("--keys", str(keys))
    engine = connect(first, "carol")
    engine.store(TOKENS, SOURCE)
    kill(first)
    engine.close()
    second = start_depot("--keys", str(keys), url=first.url, name=first.name)
    assert second.status()["chunks"] == 1
    for name, is_hit in (("carol", True), ("alice", False), ("dora", False)):
        engine = connect(second, name)
        assert engine.lookup(TOKENS) == (CHUNK if is_hit else 0) and gets(engine) is is_hit


# -- nothing tells a secret


def test_nothing_prints_a_secret(
    keys: Path, start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("KVDEPOT_KEY", str(keys / "alice.key"))
    server = start_depot("--keys", str(keys), "--log-level", "debug")
    engine = Engine(server, key=str(keys / "carol.key"))
    engine.store(TOKENS, SOURCE)
    clients = engine.worker.mq_client, engine.scheduler.mq_client
    raw = Raw(server)
    raw.close()
    key = curve.read_client_key(keys / "carol.key")
    told = [
        json.dumps(server.status()), repr(clients), repr(engine.worker), repr([client.liveness for client in clients]),
        repr(clients[0]._connection), repr(Offer(clients[0].liveness.name, clients[0].liveness.secret, True).hello),
        repr(key), str(key), repr(curve.read_server_keys(keys)), repr(load()),
        Path(f"/proc/{server.process.pid}/cmdline").read_text(), run("status", "--url", server.url).stdout,
        run("status", "--json", "--url", server.url).stdout,
        run("status", "--help").stdout, run("keygen", keys, "alice").stderr,
        run("keygen", keys, "eve").stdout,
    ]  # fmt: skip
    hidden = [*secrets_in(keys), *(client.liveness.secret.hex() for client in clients)]
    hidden += [repr(client.liveness.secret)[2:-1] for client in clients]
    engine.close()
    assert server.stop() == 0
    told += [server.logged(), caplog.text]
    assert "serving at" in server.logged()
    for secret in hidden:
        assert not any(secret in text for text in told)


# -- no code from outside


def test_modules_are_imported_by_names_of_our_own() -> None:
    """Ruff refuses pickle, marshal, eval, exec and shells (pyproject.toml)."""
    sources = [path.read_text() for path in Path(kvdepot_package.__file__).parent.rglob("*.py")]
    names = [name for source in sources for name in re.findall(r"import_module\((.*)", source)]
    assert names and all(name.startswith(('"', 'f"kvdepot.')) for name in names), names


def test_tenants_of_the_settings_file_get_their_memory_and_an_operator_changes_it(
    keys: Path, start_depot: StartDepot, tmp_path: Path, connect: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDEPOT_KEY", str(keys / "alice.key"))
    settings = tmp_path / "depot.toml"
    settings.write_text('[tenants.blue]\nfloor_bytes = "8MiB"\ncap_bytes = "16MiB"\n')
    server = start_depot("--keys", str(keys), "--config", str(settings), arena_mib=64)
    connect(server, "carol").store(TOKENS, SOURCE)
    shown = {each["tenant"]: each for each in server.status()["tenants"]}
    assert (shown["blue"]["chunks"], shown[""]["chunks"]) == (1, 0)
    quota = shown["blue"]["quota"]
    assert (quota["floor_bytes"], quota["cap_bytes"]) == (8 << 20, 16 << 20)
    where, as_carol = ("--url", server.url, "--json"), {"KVDEPOT_KEY": str(keys / "carol.key")}
    assert [each["tenant"] for each in json.loads(run("quota", *where, **as_carol).stdout)] == ["blue"]
    refused = run("quota", "blue", "--cap", "0", *where, **as_carol)
    assert refused.returncode == 1 and "only a client without a tenant" in refused.stderr
    refused = run("quota", "green", "--floor", "1MiB", *where)
    assert refused.returncode == 1 and "'green'" in refused.stderr
    assert run("quota", "blue", "--cap", "much", *where).returncode == 2
    assert run("quota", "--floor", "1MiB", *where).returncode == 2
    (changed,) = json.loads(run("quota", "blue", "--cap", "32MiB", "--weight", "2.5", *where).stdout)
    assert changed["quota"] == quota | {"cap_bytes": 32 << 20, "weight": 2.5}
    assert json.loads(run("quota", "blue", "--remove", *where).stdout) == server.status()["tenants"] == []


@pytest.mark.parametrize(
    ("text", "has_keys", "said"),
    [
        ("[tenants.green]", True, "tenants.green: no client has this tenant"),
        ("[tenants.blue]", False, "tenants.blue: no client has this tenant, because clients need no keys"),
        ("[tenants.blue]\nfloor_bytes = '1GiB'", True, "tenants.blue: all floors together"),
        ("[salts.alice]\ntenant = 'green'", True, f"quota of salt {salt_tag('alice').hex()[:16]} of green: no client"),
        ("[salts.alice]\nfloor_bytes = '1GiB'", False, "of clients without a tenant: all floors together"),
    ],
)
def test_a_server_does_not_start_with_quotas_that_cannot_hold(
    keys: Path, tmp_path: Path, text: str, has_keys: bool, said: str
) -> None:
    settings = tmp_path / "depot.toml"
    settings.write_text(text)
    ended = run("serve", "--config", settings, *(["--keys", keys] if has_keys else []), "--url", f"ipc://{keys}/d.sock",
                "--arena-gib", "0.01", "--arena-name", f"kvdepot-test-{secrets.token_hex(6)}")  # fmt: skip
    assert ended.returncode == 2
    assert said in ended.stderr and "alice" not in ended.stderr


def test_clients_whose_key_the_server_knows_are_served(keyed: Depot, keys: Path) -> None:
    client = asks(keyed, keys / "bob.key")
    assert client is not None
    assert client.ask(wire.Noop()).result(HANG_S) == "ok"
    client.close()
    printed = run("status", "--url", keyed.url, "--json", KVDEPOT_KEY=str(keys / "bob.key"))
    assert json.loads(printed.stdout)["chunk_size_tokens"] == 256
    printed = run("status", "--url", keyed.url, "--json", "--key", keys / "alice.key", KVDEPOT_KEY="")
    assert json.loads(printed.stdout)["chunk_size_tokens"] == 256
