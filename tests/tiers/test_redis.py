"""The redis tier against real servers: plain, with users, over TLS, as a cluster; killed, stopped, full and loading."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import TierError
from kvdepot.testing.tiers import TierConformance, content, name_of
from kvdepot.tiers import Blob, Tier, parse
from tests.conftest import ends, eventually
from tests.ports import free_port
from tests.tiers.servers import RedisServer, Server, StoreFaults, answered, get, need, put, redis_cluster

need(commands=["redis-server", "redis-cli"], modules=["redis", "cryptography"])

from redis.exceptions import RedisError, ResponseError  # noqa: E402

from kvdepot.tiers.redis.exchange import PART_BYTES, checked, expect, sendable  # noqa: E402

COMMANDS = ("ping", "watch", "strlen", "getrange", "set", "exists", "unlink", "scan", "multi", "exec")
PASSWORD = "wirklich/geheim@:#1"
QUOTED = "wirklich%2Fgeheim%40%3A%231"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    one = RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", PASSWORD)
    yield one
    one.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Servers for one test."""
    with ExitStack() as stack:

        def run(*flags: str, **options: Any) -> RedisServer:
            server = RedisServer(tmp_path, *flags, **options)
            stack.callback(server.kill)
            return server

        yield run


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    servers = redis_cluster(tmp_path_factory.mktemp("cluster"))
    yield servers
    for one in servers:
        one.kill()


@pytest.fixture
def open_tier() -> Iterator[Callable[[str], Any]]:
    """Tiers that end with the test."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(closing(parse(url).open()))


OpenTier = Callable[[str], Any]
Start = Callable[..., RedisServer]


def prefix() -> str:
    return f"test-{uuid.uuid4().hex}/"


class TestRedisConformance(TierConformance):
    shared = True
    examples = 10

    @pytest.fixture
    def place(self, server: RedisServer) -> str:
        return f"redis://:{QUOTED}@127.0.0.1:{server.port}/1?prefix={prefix()}"

    def open_tier(self, place: Any) -> Tier:
        return parse(place).open()


class TestRedisClusterConformance(TestRedisConformance):
    examples = 5

    @pytest.fixture
    def place(self, cluster: list[RedisServer]) -> str:
        return f"redis+cluster://127.0.0.1:{cluster[0].port},127.0.0.1:{cluster[1].port}?prefix={prefix()}"


# -- who may come in


def test_a_password_may_come_from_a_file_and_is_never_shown(
    server: RedisServer, open_tier: OpenTier, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    tier = open_tier(f"redis://127.0.0.1:{server.port}?password_file={tmp_path}/password&prefix={prefix()}")
    assert put(tier, 1, b"one")
    tier = open_tier(f"redis://:{QUOTED}@127.0.0.1:{server.port}")
    assert tier.usage().objects is None
    shown = repr(tier) + str(tier) + repr(tier._servers)
    wrong = open_tier(f"redis://:{QUOTED}x@127.0.0.1:{server.port}")
    with pytest.raises(TierError) as failed:
        wrong.usage()
    error: BaseException | None = failed.value
    while error is not None:
        shown += repr(error)
        error = error.__cause__ or error.__context__
    assert str(server.port) in shown
    assert "geheim" not in shown


def test_a_user_needs_the_commands_that_are_documented_and_no_others(server: RedisServer, open_tier: OpenTier) -> None:
    commands = [f"+{c}" for c in COMMANDS]
    rights = ["~mine/*", "-@all", "+info", *commands]
    server.cli("-a", PASSWORD, "acl", "setuser", "kv", "on", ">pw", "resetkeys", *rights)
    tier = open_tier(f"redis://kv:pw@127.0.0.1:{server.port}?prefix=mine/")
    assert put(tier, 1, b"one") and get(tier, 1) == b"one"
    assert tier.find([name_of(1)]) == [True]
    tier.usage()
    tier.remove([name_of(1)])
    assert put(tier, 2, b"two") and tier.forget("", "") == 1
    stranger = open_tier(f"redis://kv:pw@127.0.0.1:{server.port}?prefix=others/")
    for call in (lambda: put(stranger, 1, b"one"), lambda: get(stranger, 1), lambda: stranger.find([name_of(1)])):
        with pytest.raises(TierError, match="permission"):
            call()


def test_tls_checks_the_server_and_shows_a_certificate(start: Start, open_tier: OpenTier, tmp_path: Path) -> None:
    certificate(tmp_path)
    server = start(
        "--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-ca-cert-file", "cert.pem", tls=True
    )
    place = f"127.0.0.1:{server.port}"
    ca, client = f"tls_ca={tmp_path}/cert.pem", f"tls_cert={tmp_path}/cert.pem&tls_key={tmp_path}/key.pem"
    tier = open_tier(f"rediss://{place}?{ca}&{client}&timeout_s=5")
    data = content(1, 3_000_001)
    assert put(tier, 1, data) and get(tier, 1, 4_000_000) == data
    for unwelcome in (f"rediss://{place}?{ca}&timeout_s=5", f"rediss://{place}?{client}", f"redis://{place}"):
        with pytest.raises(TierError):
            open_tier(unwelcome).usage()


def certificate(directory: Path) -> None:
    """cert.pem and key.pem: a certificate of this host, of the server as of its clients, which itself is its CA."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvdepot")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    host = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = builder.add_extension(x509.SubjectAlternativeName([host]), False).sign(key, hashes.SHA256())
    (directory / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    kind = serialization.PrivateFormat.PKCS8
    plain = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    (directory / "key.pem").write_bytes(plain)


# -- settings


def test_objects_expire_where_that_is_asked_for(server: RedisServer, open_tier: OpenTier) -> None:
    begins = prefix()
    url = f"redis://:{QUOTED}@127.0.0.1:{server.port}?prefix={begins}"
    assert put(open_tier(f"{url}&expire_s=1000"), 1, b"one")
    assert put(open_tier(url), 2, b"two")
    assert 990 <= int(server.cli("-a", PASSWORD, "ttl", begins + name_of(1))) <= 1000
    assert int(server.cli("-a", PASSWORD, "ttl", begins + name_of(2))) == -1
    server.cli("-a", PASSWORD, "pexpire", begins + name_of(1), "1")
    tier = open_tier(url)
    eventually(lambda: tier.find([name_of(1), name_of(2)]) == [False, True])
    assert get(tier, 1) is None


def test_keys_of_others_are_left_alone(server: RedisServer, open_tier: OpenTier) -> None:
    begins = prefix()[:-1] + "*[a]?/"
    url = f"redis://:{QUOTED}@127.0.0.1:{server.port}"
    tier, other = open_tier(f"{url}?prefix={begins}"), open_tier(f"{url}?prefix={begins[:-5]}x/")
    server.cli("-a", PASSWORD, "set", begins + "mine", "x")
    server.cli("-a", PASSWORD, "lpush", begins + name_of(3), "x")
    for one in (tier, other):
        assert put(one, 1, b"one") and put(one, 2, b"two")
    assert get(tier, 3) is None
    assert tier.forget("", "") == 3  # the list lies under a name of ours
    assert get(other, 1) == b"one" and server.cli("-a", PASSWORD, "get", begins + "mine") == "x"


# -- limits


def test_objects_that_redis_refuses_do_not_fail_the_rest_of_their_batch(
    server: RedisServer, open_tier: OpenTier
) -> None:
    tier = open_tier(f"redis://:{QUOTED}@127.0.0.1:{server.port}?prefix={prefix()}")
    mib = memoryview(bytes(1 << 20))
    large = Blob(name_of(1), [mib] * 512 + [mib[:1]])
    assert tier.write([Blob(name_of(0), [mib]), large, Blob(name_of(2), [mib])]) == [True, False, True]
    assert tier.find([name_of(n) for n in range(3)]) == [True, False, True]
    assert tier.usage().counters["refused"] == 1


def test_a_full_server_refuses_writes_and_is_read_from(start: Start, open_tier: OpenTier) -> None:
    server = start("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    tier = open_tier(f"redis://127.0.0.1:{server.port}")
    data = content(1, 1 << 20)
    answers = tier.write([Blob(name_of(n), [memoryview(data)]) for n in range(20)])
    kept = answers.count(True)
    assert 2 <= kept < 8 and tier.find([name_of(n) for n in range(20)]) == answers
    assert get(tier, answers.index(True), 1 << 20) == data
    usage = tier.usage()
    assert usage.capacity_bytes == 8 << 20 and usage.counters["refused"] == 20 - kept
    tier.remove([name_of(n) for n in range(20)])
    assert eventually(lambda: put(tier, 1, data))


@pytest.mark.parametrize("size", [1000, (1 << 20) + 1, 5 << 20])
def test_a_server_beyond_its_limit_is_read_from(start: Start, open_tier: OpenTier, size: int) -> None:
    server = start()  # noeviction is its default
    tier = open_tier(f"redis://127.0.0.1:{server.port}")
    data = content(1, size)
    assert put(tier, 1, data)
    server.cli("config", "set", "maxmemory", "1000")
    assert not put(tier, 2, b"two")
    assert get(tier, 1, size) == data and get(tier, 2) is None and tier.find([name_of(1)]) == [True]
    assert tier.usage().capacity_bytes == 1000
    tier.remove([name_of(1)])
    assert get(tier, 1, size) is None


def test_an_object_that_is_replaced_while_it_is_read_is_read_again(start: Start, open_tier: OpenTier) -> None:
    server = start()
    size = (2 << 20) + 5
    old, new = content(1, size), content(2, size)
    direct = open_tier(f"redis://127.0.0.1:{server.port}")
    between = Between(server.port, lambda: put(direct, 1, new))
    tier = open_tier(f"redis://127.0.0.1:{between.port}")
    assert put(direct, 1, old)
    assert get(tier, 1, size) == new
    assert between.acted


class Between:
    """A proxy of one connection to a server, which runs `act` once: within the first read of several parts, when the
    server has answered all but the last of them."""

    def __init__(self, port: int, act: Callable[[], object]) -> None:
        self._server = socket.create_connection(("127.0.0.1", port))
        self._act = act
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.acted = False
        self._passed_bytes = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        threading.Thread(target=self._pass_back, args=(client,), daemon=True).start()
        while asked := client.recv(1 << 16):
            first, last, rest = asked.rpartition(b"*4\r\n$8\r\nGETRANGE")
            if last and not self.acted:
                self._server.sendall(first)
                eventually(lambda: self._passed_bytes > 2 * PART_BYTES)
                self._act()
                self.acted = True
                asked = last + rest
            self._server.sendall(asked)
        for each in (client, self._server, self._listener):
            each.close()

    def _pass_back(self, client: socket.socket) -> None:
        with suppress(OSError):
            while said := self._server.recv(1 << 16):
                client.sendall(said)
                self._passed_bytes += len(said)


def test_a_server_that_cannot_save_refuses_writes_and_is_read_from(
    start: Start, open_tier: OpenTier, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    server = start("--save", "3600 1", "--dir", str(tmp_path / "gone"))
    tier = open_tier(f"redis://127.0.0.1:{server.port}")
    assert put(tier, 1, b"one")
    (tmp_path / "gone").rmdir()
    server.cli("bgsave")
    eventually(lambda: "rdb_last_bgsave_status:err" in server.cli("info", "persistence"))
    assert not put(tier, 2, b"two")
    assert get(tier, 1) == b"one" and tier.usage().counters["refused"] == 1


# -- servers that fail


class TestRedisFaults(StoreFaults):
    killed, hung = "127.0.0.1:[0-9]+", "imeout"

    @pytest.fixture
    def own(self, start: Start) -> RedisServer:
        return start()

    def open(self, own: Server) -> Tier:
        return parse(f"redis://127.0.0.1:{own.port}?timeout_s=1").open()


def test_a_server_that_loads_its_data_is_not_there_yet(start: Start, open_tier: OpenTier) -> None:
    server = start("--key-load-delay", "200", "--loading-process-events-interval-bytes", "1024")
    tier = open_tier(f"redis://127.0.0.1:{server.port}")
    for number in range(100):
        assert put(tier, number, bytes(1000))
    server.cli("save")
    assert (server.directory / "dump.rdb").exists()
    server.kill()
    server.command += ["--save", "3600 1", "--key-load-delay", "20000"]
    server.start()
    with pytest.raises(TierError, match=r"(?i)loading"):
        tier.usage()
    answered(tier.usage)
    assert get(tier, 99) == bytes(1000)


# -- clusters


def test_a_cluster_spreads_objects_over_all_its_nodes(cluster: list[RedisServer], open_tier: OpenTier) -> None:
    tier = open_tier(f"redis+cluster://127.0.0.1:{cluster[2].port}?prefix={prefix()}")
    before = [int(one.cli("dbsize")) for one in cluster]
    names = [name_of(n) for n in range(60)]
    assert tier.write([Blob(name, [memoryview(b"x")]) for name in names]) == [True] * 60
    grown = [int(one.cli("dbsize")) - count for one, count in zip(cluster, before, strict=True)]
    assert sum(grown) == 60 and all(count > 5 for count in grown)
    assert tier.find(names) == [True] * 60
    assert tier.forget("", "") == 60


def test_a_node_of_a_cluster_that_is_used_alone_is_an_error_that_says_so(
    cluster: list[RedisServer], open_tier: OpenTier
) -> None:
    tier = open_tier(f"redis://127.0.0.1:{cluster[1].port}?prefix={prefix()}")
    names = [name_of(n) for n in range(60)]
    blobs = [Blob(name, [memoryview(bytearray(1))]) for name in names]
    for call in (lambda: tier.find(names), lambda: tier.read(blobs), lambda: tier.write(blobs), tier.usage):
        with pytest.raises(TierError, match=r"node of a cluster .* write redis\+cluster://"):
            call()


def test_a_node_that_was_given_no_slots_is_an_error_that_says_so(start: Start, open_tier: OpenTier) -> None:
    port = str(free_port())
    flags = ["--cluster-enabled", "yes", "--cluster-port", port, "--cluster-config-file", f"{port}.conf"]
    node = start(*flags)
    with pytest.raises(TierError, match="node of a cluster"):
        open_tier(f"redis://127.0.0.1:{node.port}").usage()
    node.cli("cluster", "addslotsrange", "0", "16383")
    tier = open_tier(f"redis://127.0.0.1:{node.port}")
    assert answered(lambda: put(tier, 1, b"one"))  # it has all of them
    assert get(tier, 1) == b"one" and tier.usage().objects is None


def empty_slot(cluster: list[RedisServer]) -> tuple[str, str]:
    """How names begin whose slot nobody has put anything into, and that slot."""
    while True:
        begins = "{" + uuid.uuid4().hex + "}"
        slot = cluster[0].cli("cluster", "keyslot", begins)
        if all(one.cli("cluster", "countkeysinslot", slot) == "0" for one in cluster):
            return begins, slot


def test_objects_are_found_where_a_cluster_moved_them(cluster: list[RedisServer], open_tier: OpenTier) -> None:
    begins, slot = empty_slot(cluster)  # others' keys in it would be counted, and left behind when it moves
    tier = open_tier(f"redis+cluster://127.0.0.1:{cluster[0].port}?prefix={begins}")
    assert put(tier, 1, b"one")
    ids = [one.cli("cluster", "myid") for one in cluster]
    source = next(n for n, one in enumerate(cluster) if one.cli("cluster", "countkeysinslot", slot) == "1")
    target = (source + 1) % 3
    cluster[target].cli("cluster", "setslot", slot, "importing", ids[source])
    cluster[source].cli("cluster", "setslot", slot, "migrating", ids[target])
    cluster[source].cli("migrate", "127.0.0.1", str(cluster[target].port), begins + name_of(1), "0", "5000")
    assert tier.find([name_of(1)]) == [False]  # on its way: ASK
    assert get(tier, 1) is None
    with pytest.raises(TierError, match="moving"):
        tier.remove([name_of(1)])
    for number in (target, source, 3 - source - target):
        cluster[number].cli("cluster", "setslot", slot, "node", ids[target])
    assert tier.find([name_of(1)]) == [True]
    assert get(tier, 1) == b"one"
    assert put(tier, 2, b"two") and cluster[target].cli("cluster", "countkeysinslot", slot) == "2"
    tier.remove([name_of(1), name_of(2)])
    assert tier.find([name_of(1), name_of(2)]) == [False, False]


def test_a_cluster_with_a_node_that_hangs_is_an_error_in_time(cluster: list[RedisServer], open_tier: OpenTier) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster[0].port},127.0.0.1:{cluster[1].port}?prefix={prefix()}&timeout_s=1"
    tier = open_tier(url)
    names = [name_of(n) for n in range(30)]
    blobs = [Blob(name, [memoryview(b"x")]) for name in names]
    assert tier.write(blobs) == [True] * 30
    with cluster[1].stopped():
        for call in (lambda: tier.find(names), lambda: tier.write(blobs), tier.usage):
            with ends(), pytest.raises(TierError):
                call()
    eventually(lambda: all(one.cli("cluster", "info").startswith("cluster_state:ok") for one in cluster))
    assert answered(tier.usage)
    assert tier.find(names) == [True] * 30


# -- what is sent


def test_pieces_are_sent_in_packets_of_a_good_size() -> None:
    data = content(1, 10_000_000)
    for sizes in ([10_000_000], [1] * 5000 + [9_995_000], [20_000, 3, 5_000_000, 16_383, 16_384, 4_947_230]):
        pieces, start = [], 0
        for size in sizes:
            pieces.append(memoryview(data)[start : start + size])
            start += size
        sent = list(sendable(pieces))
        assert b"".join(sent) == data
        assert max(map(len, sent)) <= 4 << 20 and len(sent) <= 8


# -- what comes back


def test_a_reply_of_another_type_than_expected_is_an_error_of_the_store() -> None:
    refused = ResponseError("WRONGTYPE")
    assert expect(checked([b"x", 1, None, refused]), list) == [b"x", 1, None, refused]
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        expect(refused, int)
    for reply, kind in [(None, list), (b"1", int), (1, bytes)]:  # None: EXEC of a transaction that was aborted
        with pytest.raises(RedisError, match=f"instead of {kind.__name__}"):
            expect(reply, kind)
    with pytest.raises(RedisError, match="float"):
        checked([b"x", [1.5]])
