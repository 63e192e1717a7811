"""KV events from a router's view: a subscriber that loses messages, asks for replays, and must know the true state."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvdepot.errors import Unavailable
from kvdepot.kv_events import depot_view
from kvdepot.kv_events import publisher as kv_events
from kvdepot.kv_events.depot_view import TOPIC, DepotView
from kvdepot.kv_events.feed import Feed
from kvdepot.kv_events.publisher import END, Publisher, replay_endpoint
from kvdepot.protocol import wire
from kvdepot.protocol.curve import read_client_key
from tests.cli.command import keygen
from tests.client.engine import CHUNK, Engine
from tests.conftest import HANG_S, Depot, StartDepot, clear, eventually
from tests.core.shelf import keys
from tests.kv_events.desk import Believed, Desk
from tests.server.process import kill, run_serve


class Subscriber:
    """A router's subscriber on a thread of its own; reads like vLLM's example of a subscriber."""

    def __init__(self, endpoint: str, key: Path | None = None, loses: Callable[[int], bool] = lambda number: False):
        self.endpoint = endpoint
        self.loses = loses
        self.context: zmq.Context[Any] = zmq.Context()
        self.sub = self._connect(zmq.SUB, endpoint, key)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.asking = self._connect(zmq.DEALER, replay_endpoint(endpoint), key)
        self.last = -1
        self.replays = 0
        self.lost = 0
        self.batches: list[tuple[int, list[dict[str, Any]]]] = []  # as they were taken in
        self.believed: Believed = set()
        self.stopping = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _connect(self, kind: int, url: str, key: Path | None) -> zmq.Socket[Any]:
        made = self.context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, 10)
        if key is not None:
            read_client_key(key).use(made)
        made.connect(url)
        return made

    def _run(self) -> None:
        try:
            while not self.stopping:
                if not self.sub.poll(20):
                    continue
                topic, number, payload = self.sub.recv_multipart()
                assert topic == TOPIC
                seq = int.from_bytes(number, "big")
                if self.loses(seq):
                    self.lost += 1
                    continue
                if seq > self.last + 1:
                    self._replay(self.last + 1 if self.last >= 0 else 0)
                if seq == self.last + 1:  # else the replay has it, or did not come to an end: the next tells of the gap
                    self._take(seq, payload)
        except BaseException as exc:  # noqa: BLE001 - the test's thread raises it
            self.failure = exc

    def _replay(self, start: int) -> None:
        self.replays += 1
        self.asking.send_multipart((b"", start.to_bytes(8, "big")))
        while not self.stopping and self.asking.poll(5000):
            empty, topic, number, payload = self.asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return
            seq = int.from_bytes(number, "big")
            if seq > self.last:
                self._take(seq, payload)

    def _take(self, seq: int, payload: bytes) -> None:
        at, events, rank = msgspec.msgpack.decode(payload)
        assert abs(at - time.time()) < 3600 and rank is None
        self.batches.append((seq, events))
        believed = set(self.believed)
        for event in events:
            match event["type"]:
                case "BlockStored":
                    believed |= {(event["ownership"], key) for key in event["block_hashes"]}
                case "BlockRemoved":
                    believed -= {(event["ownership"], key) for key in event["block_hashes"]}
                case "AllBlocksCleared":
                    believed = set()
                case other:
                    pytest.fail(f"an event of kind {other}")
        self.believed, self.last = believed, seq

    def events(self) -> list[dict[str, Any]]:
        return [event for _, events in self.batches for event in events]

    def wait(self, condition: Callable[[], Any]) -> None:
        def met() -> Any:
            assert self.failure is None, self.failure
            return condition()

        eventually(met)

    def close(self) -> None:
        self.stopping = True
        self.thread.join(HANG_S)
        self.context.destroy(linger=0)
        assert self.failure is None, self.failure


StartSubscriber = Callable[..., Subscriber]


@pytest.fixture
def subscribe() -> Iterator[StartSubscriber]:
    """Subscribers that end with the test: `subscribe(endpoint)`."""
    started: list[Subscriber] = []

    def start(*arguments: Any, **options: Any) -> Subscriber:
        started.append(Subscriber(*arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events.sock"


StartDesk = Callable[..., Desk]


@pytest.fixture
def start_desk(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartDesk]:
    started: list[Desk] = []
    monkeypatch.setattr(kv_events, "_BEAT_S", 0.1)

    def start(**options: Any) -> Desk:
        started.append(Desk(options.pop("endpoint", endpoint), **options))
        return started[-1]

    yield start
    for desk in started:
        desk.close()


def ready(desk: Desk, subscriber: Subscriber) -> None:
    subscriber.wait(lambda: subscriber.batches and subscriber.believed == desk.there())


# -- what is said


def test_a_stored_prompt_is_told_as_one_event_with_keys_parent_and_whose_it_is(
    start_desk: StartDesk, subscribe: StartSubscriber
) -> None:
    desk, chain = start_desk().start(), keys("c", 5)
    router = subscribe(desk.endpoint)
    ready(desk, router)
    desk.shelf.store(chain[:3])
    ready(desk, router)
    desk.shelf.index.release(desk.shelf.pin(chain[:3]))
    seen = len(router.events())
    for number in (4, 5):
        chunk = desk.shelf.reserve(chain, number)
        assert chunk is not None
        desk.index.seal(chunk, 0)
    ready(desk, router)
    assert [key for event in router.events() for key in event.get("block_hashes", ())] == chain
    first = next(event for event in router.events() if event["type"] == "BlockStored")
    assert first | {"block_hashes": chain[:3]} == {
        "type": "BlockStored", "block_hashes": chain[:3], "parent_block_hash": None, "token_ids": [],
        "block_size": 256, "lora_id": None, "medium": "CPU", "lora_name": None, "locality": "LOCAL", "ownership": "m",
    }  # fmt: skip
    assert router.events()[seen]["parent_block_hash"] == chain[2]


def test_what_is_evicted_is_told_as_removed(start_desk: StartDesk, subscribe: StartSubscriber) -> None:
    desk = start_desk(pages=4).start()
    router = subscribe(desk.endpoint)
    old, new = keys("old", 4), keys("new", 2)
    desk.shelf.store(old)
    ready(desk, router)
    desk.shelf.store(new)
    ready(desk, router)
    removed = [event for event in router.events() if event["type"] == "BlockRemoved"]
    assert {key for event in removed for key in event["block_hashes"]} == set(old[2:])
    assert all(
        event | {"block_hashes": []}
        == {"type": "BlockRemoved", "block_hashes": [], "medium": "CPU", "locality": "LOCAL", "ownership": "m"}
        for event in removed
    )


def test_when_nothing_is_left_that_is_told_in_one_word(start_desk: StartDesk, subscribe: StartSubscriber) -> None:
    desk = start_desk().start()
    router = subscribe(desk.endpoint)
    desk.shelf.store(keys("c", 9))
    ready(desk, router)
    router.wait(lambda: len(router.believed) == 9)
    clear(desk.index)
    ready(desk, router)
    assert router.believed == set()
    assert router.events()[-1] == {"type": "AllBlocksCleared"}


def test_chunks_of_one_key_and_two_models_are_two(start_desk: StartDesk, subscribe: StartSubscriber) -> None:
    desk, chain = start_desk().start(), keys("c", 2)
    router = subscribe(desk.endpoint)
    desk.shelf.store(chain)
    first, desk.shelf.namespace = desk.shelf.namespace, desk.index.namespaces.find("other", 1, 0, bytes(32), 4)
    desk.shelf.namespace.live = 1
    desk.shelf.store(chain)
    ready(desk, router)
    assert router.believed == {(model, key) for model in ("m", "other") for key in chain}
    clear(desk.index, first.model)
    ready(desk, router)
    assert router.believed == {("other", key) for key in chain}


# -- who missed something


def test_who_comes_late_learns_from_a_replay_what_is_there(start_desk: StartDesk, subscribe: StartSubscriber) -> None:
    desk = start_desk(pages=4096).start()
    for number in range(30):
        desk.shelf.store(keys(f"c{number}", 40))
    router = subscribe(desk.endpoint)
    ready(desk, router)
    assert len(router.believed) == 1200 and router.replays == 1


@pytest.mark.parametrize("kept", [2, 40, 10_000])
def test_a_subscriber_that_loses_messages_believes_in_the_end_what_is_so(
    start_desk: StartDesk, subscribe: StartSubscriber, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depot_view, "BATCH", 3)  # so that a listing takes many messages
    monkeypatch.setattr(kv_events, "_MARGIN", 2)
    dice = random.Random(kept)
    desk = start_desk(pages=40, kept_messages=kept).start()
    router = subscribe(desk.endpoint, loses=lambda seq: random.Random(seq).random() < 0.3)
    for step in range(400):
        match dice.randrange(8):
            case 0:
                clear(desk.index)
            case 1:
                namespace = desk.shelf.namespace
                for chunk in list(namespace.chunks.values())[:2]:
                    desk.index.hide(chunk)
            case _:
                desk.shelf.store(keys(f"c{dice.randrange(10**6)}", dice.randrange(1, 6)))
        if step % 40 == 0:
            ready(desk, router)
    ready(desk, router)
    assert router.lost > 20 and router.replays > 10


def test_a_router_learns_of_a_gap_at_the_end_within_seconds(start_desk: StartDesk, subscribe: StartSubscriber) -> None:
    desk = start_desk().start()
    deaf = True
    router = subscribe(desk.endpoint, loses=lambda seq: deaf and router.last >= 0)
    ready(desk, router)
    desk.shelf.store(keys("c", 2))
    router.wait(lambda: router.lost)
    deaf = False
    ready(desk, router)
    assert len(router.believed) == 2


def test_after_a_restart_nothing_of_the_old_server_is_believed(
    start_desk: StartDesk, subscribe: StartSubscriber
) -> None:
    first = start_desk().start()
    router = subscribe(first.endpoint)
    first.shelf.store(keys("old", 3))
    ready(first, router)
    router.loses = lambda seq: seq > before  # it hears nothing of the first one's end
    before = router.last
    first.close()
    router.loses = lambda seq: False
    second = start_desk().start()
    second.shelf.store(keys("new", 3))
    ready(second, router)
    assert router.last > before


def test_what_is_there_before_the_feed_is_told_at_its_start(start_desk: StartDesk, subscribe: StartSubscriber) -> None:
    desk = start_desk(before=7).start()
    router = subscribe(desk.endpoint)
    ready(desk, router)
    assert len(router.believed) == 7


# -- when it is too much


def test_where_the_queue_is_full_nothing_is_believed_until_all_is_told_anew(
    start_desk: StartDesk, subscribe: StartSubscriber
) -> None:
    desk = start_desk(most=8)
    desk.shelf.store(keys("c", 30))
    gone = keys("gone", 3)
    desk.shelf.store(gone)
    assert desk.feed.overflows == 1
    desk.publisher.start()
    router = subscribe(desk.endpoint)
    router.wait(lambda: router.batches)
    assert router.believed == set()

    def told() -> bool:
        desk.feed.tick(desk.index)
        return router.believed == desk.there()

    router.wait(told)
    assert len(router.believed) == 33
    assert desk.feed.overflows == 1


def test_what_goes_while_all_is_told_anew_is_not_believed(start_desk: StartDesk, subscribe: StartSubscriber) -> None:
    desk = start_desk(most=8)
    desk.shelf.store(keys("c", 30))
    desk.publisher.start()
    router = subscribe(desk.endpoint)
    router.wait(lambda: router.batches)
    eventually(lambda: repr(desk.feed).startswith("<Feed of 0"))
    desk.feed.tick(desk.index)
    assert desk.feed._listing is not None
    clear(desk.index)
    desk.shelf.store(keys("new", 2))

    def told() -> bool:
        desk.feed.tick(desk.index)
        return router.believed == desk.there()

    router.wait(told)
    assert len(router.believed) == 2


@pytest.mark.faults
def test_a_replay_that_nobody_reads_stops_neither_events_nor_the_next_replay(
    start_desk: StartDesk, subscribe: StartSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depot_view, "BATCH", 4)
    monkeypatch.setattr(kv_events, "_REPLAY_S", 0.5)
    desk = start_desk(pages=8192).start()
    for number in range(80):
        desk.shelf.store(keys(f"c{number}", 100))
    with zmq.Context() as context, context.socket(zmq.DEALER) as lazy:
        lazy.setsockopt(zmq.LINGER, 0)
        lazy.setsockopt(zmq.RCVHWM, 1)
        lazy.setsockopt(zmq.RCVBUF, 4096)
        lazy.connect(replay_endpoint(desk.endpoint))
        lazy.send_multipart((b"", bytes(8)))
        eventually(lambda: desk.publisher._unsent is not None)
        router = subscribe(desk.endpoint)
        desk.shelf.store(keys("more", 3))
        ready(desk, router)
        assert len(router.believed) == 8003


class Clock:
    """Replaces the publisher's `time`: it stands still until the test advances it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def test_replays_rest_four_times_as_long_as_they_work(start_desk: StartDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that requests replays all the time gets only a share of the CPU."""
    clock, worked_s, work_s = Clock(), 0.0, 0.5
    publisher = start_desk().publisher  # without its thread: we are it
    publisher._waiting = {b"greedy": 0}
    monkeypatch.setattr(kv_events, "time", clock)

    def send_some() -> None:
        nonlocal worked_s
        worked_s += work_s
        clock.now += work_s
        publisher._replay = None if worked_s % 3 == 0 else iter([])  # each sixth time a replay ends

    monkeypatch.setattr(publisher, "_send_some", send_some)
    began = clock.now
    for _ in range(50_000):
        publisher._answer()
        clock.now += 0.01
    assert 0.15 < worked_s / (clock.now - began) <= 0.21


@pytest.mark.parametrize(
    "frames", [[b""], [b"x" * 8], [b"", b"1"], [b"", b"x" * 9], [b"", b"x" * 8, b""], [b"a", b"x" * 8]]
)
def test_what_is_no_question_for_a_replay_is_passed_over(
    start_desk: StartDesk, subscribe: StartSubscriber, frames: list[bytes]
) -> None:
    desk = start_desk().start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(replay_endpoint(desk.endpoint))
        for _ in range(100):
            stranger.send_multipart(frames)
        stranger.send_multipart((b"", bytes(8)))
        assert stranger.poll(60_000)
        assert stranger.recv_multipart()[1] == TOPIC
    router = subscribe(desk.endpoint)
    desk.shelf.store(keys("c", 3))
    ready(desk, router)


@pytest.mark.faults
def test_connections_beyond_the_limit_are_shut(start_desk: StartDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MOST_CONNECTIONS", 5)
    desk = start_desk().start()
    path = desk.endpoint.removeprefix("ipc://")
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(12)]
    try:
        for each in crowd:
            each.settimeout(60.0)
            each.connect(path)

        def shut(one: socket.socket) -> bool:
            try:
                while one.recv(4096):
                    pass
            except TimeoutError:
                return False
            except OSError:
                pass
            return True

        for each in crowd:
            each.settimeout(0.1)
        eventually(lambda: sum(map(shut, crowd)) >= 7)
        assert sum(map(shut, crowd)) == 7
    finally:
        for each in crowd:
            each.close()


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    feed = Feed()
    with socket.create_server(("127.0.0.1", 0)) as taken, zmq.Context() as context:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=url):
            Publisher(feed, DepotView(), url, context).close()
    feed.close()


# -- a real server


@pytest.mark.faults
def test_a_server_tells_what_is_stored_evicted_forgotten_and_that_it_ends(
    start_depot: StartDepot, endpoint: str, subscribe: StartSubscriber
) -> None:
    server = start_depot("--kv-events", endpoint, arena_mib=1)
    router = subscribe(endpoint)
    engine = Engine(server, block_bytes=16384)  # 64 KiB a chunk
    engine.store(list(range(2 * CHUNK)), list(range(8)))
    router.wait(lambda: len(router.believed) == 2)
    assert {owner for owner, _ in router.believed} == {engine.model}
    for number in range(1, 30):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
    router.wait(lambda: len(router.believed) == server.status()["chunks"])
    assert any(event["type"] == "BlockRemoved" for event in router.events())
    assert server.status()["evicted_chunks"] > 0
    hits = {number for number in range(1, 30) if engine.lookup([number] * CHUNK)}
    assert len(hits) == len(router.believed) - (2 if engine.lookup(list(range(2 * CHUNK))) else 0)
    for adapter in (engine.scheduler, engine.worker):
        adapter.shutdown()
    eventually(lambda: server.status()["clients"] <= 1)
    from kvdepot.client import MessageQueueClient

    client = MessageQueueClient(server.url, server.context)
    client.ask(wire.Forget("", b"")).result(HANG_S)
    router.wait(lambda: not router.believed)
    other = Engine(server, block_bytes=16384)
    other.store([7] * CHUNK, [0, 1, 2, 3])
    router.wait(lambda: len(router.believed) == 1)
    other.close()
    client.close()
    assert server.stop() == 0
    router.wait(lambda: not router.believed)
    assert router.events()[-1] == {"type": "AllBlocksCleared"}


@pytest.mark.faults
def test_after_a_crash_the_next_server_tells_what_it_took_over(
    start_depot: StartDepot, endpoint: str, subscribe: StartSubscriber
) -> None:
    first = start_depot("--kv-events", endpoint)
    router = subscribe(endpoint)
    engine = Engine(first)
    for number in range(5):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
    router.wait(lambda: len(router.believed) == 5)
    believed, last = router.believed, router.last
    engine.close()
    kill(first)
    start_depot("--kv-events", endpoint, url=first.url, name=first.name)

    def cleared() -> bool:  # by the second one: the first could say nothing any more
        return {"type": "AllBlocksCleared"} in [e for seq, events in router.batches if seq > last for e in events]

    router.wait(lambda: cleared() and router.believed == believed)


@pytest.mark.faults
def test_a_second_server_takes_neither_events_nor_replays_of_the_first_away(
    start_depot: StartDepot, endpoint: str, subscribe: StartSubscriber
) -> None:
    start_depot("--kv-events", endpoint)
    router = subscribe(endpoint)
    router.wait(lambda: router.batches)
    for taken in (endpoint, replay_endpoint(endpoint)):
        ended = run_serve("--kv-events", taken, "--arena-gib", "0.01")
        assert ended.returncode == 1, ended
        assert f"another kvdepot server listens on {taken}" in ended.stderr
        assert "choose another --kv-events" in ended.stderr and "Traceback" not in ended.stderr
    before, late = router.last, subscribe(endpoint)
    late.wait(lambda: late.batches)
    router.wait(lambda: router.last > before)


def test_without_the_setting_nothing_is_watched(depot: Depot) -> None:
    assert depot.status()["counters"]["kv_event_overflows"] == 0
    assert not [line for line in depot.logged().splitlines() if "KV events" in line]


def test_beyond_this_host_events_need_keys() -> None:
    ended = run_serve("--kv-events", "tcp://0.0.0.0:5557", "--arena-gib", "0.01")
    assert ended.returncode == 2
    assert "keygen" in ended.stderr and "tcp://0.0.0.0:5557" in ended.stderr


@pytest.mark.parametrize(
    "wrong", ["nowhere", "tcp://127.0.0.1", "tcp://127.0.0.1:65535", "tcp://127.0.0.1:0", "ipc://"]
)
def test_an_endpoint_that_is_none_is_refused(wrong: str) -> None:
    ended = run_serve("--kv-events", wrong)
    assert ended.returncode == 2 and "--kv-events" in ended.stderr


@pytest.mark.faults
def test_with_keys_events_are_for_clients_with_a_key_and_no_tenant(
    start_depot: StartDepot, endpoint: str, subscribe: StartSubscriber, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    keygen(folder, "alice")
    keygen(folder, "carol", tenant="blue")
    process = Depot("--kv-events", endpoint, "--keys", str(folder))
    try:
        alice = subscribe(endpoint, key=folder / "alice.key")
        carol, nobody = subscribe(endpoint, key=folder / "carol.key"), subscribe(endpoint)
        alice.wait(lambda: len(alice.batches) >= 3)
        assert not carol.batches and not nobody.batches
        assert alice.events() == [{"type": "AllBlocksCleared"}]
    finally:
        process.close()
