"""KV events from a router's view: a subscriber that loses messages, asks for replays, and must know the true state."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvdepot.kv_events import engine_view
from kvdepot.kv_events import publisher as kv_events
from kvdepot.kv_events.publisher import replay_endpoint
from tests.cli.command import keygen, run
from tests.conftest import Depot, StartDepot, clear, eventually
from tests.kv_events.desk import CHUNK, A, Desk, Follower, described, keys, prompt

StartDesk = Callable[..., Desk]
Follow = Callable[..., Follower]


@pytest.fixture
def start_desk(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartDesk]:
    monkeypatch.setattr(kv_events, "_BEAT_S", 0.1)
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(Desk(endpoint, **options)))


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Followers that end with the test: `follow(endpoint)`."""
    with contextlib.ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(contextlib.closing(Follower(*words, **options)))


def small_batches(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(engine_view, "BATCH", size)
    monkeypatch.setattr(kv_events, "BATCH", size)


def ready(desk: Desk, follower: Follower) -> None:
    follower.wait(lambda router: follower.payloads and desk.is_known_to(router))


def events(follower: Follower) -> list[list[Any]]:
    return [event for payload in follower.payloads for event in msgspec.msgpack.decode(payload)[1]]


def test_messages_have_the_form_of_those_of_engines(start_desk: StartDesk, follow: Follow) -> None:
    desk = start_desk(pages=4).start()
    follower = follow(desk.endpoint)
    old, new = prompt(1, 4), prompt(2, 2)
    chain = keys(old)
    for tokens in (old[: 3 * CHUNK], old, new):
        desk.store(tokens)
        ready(desk, follower)
    at, _, rank = msgspec.msgpack.decode(follower.payloads[-1])
    assert abs(at - time.time()) < 3600 and rank is None
    stored = [event for event in events(follower) if event[0] == "BlockStored"]
    assert [key for event in stored for key in event[1]] == chain + keys(new)
    assert stored[0][2] is None and stored[0][4:] == [CHUNK, None, "CPU"]
    assert [token for event in stored for token in event[3]] == old + new
    assert next(event[2] for event in stored if event[1][0] == chain[3]) == chain[2]
    removed = [event for event in events(follower) if event[0] == "BlockRemoved"]
    assert {key for event in removed for key in event[1]} == set(chain[2:])
    assert all(event[2:] == ["CPU"] for event in removed)


@pytest.mark.parametrize("kept", [2, 40, 10_000])
def test_a_follower_that_loses_messages_ends_with_the_true_state(
    start_desk: StartDesk, follow: Follow, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_batches(monkeypatch, 3)  # so that a listing takes many messages
    monkeypatch.setattr(kv_events, "_MARGIN", 2)
    dice = random.Random(kept)
    desk = start_desk(pages=40, kept=kept).start()
    follower = follow(desk.endpoint, loses=lambda seq: random.Random(seq).random() < 0.3)
    trunk = prompt(0, 2)
    for step in range(400):
        match dice.randrange(8):
            case 0:
                clear(desk.index)
            case 1:
                for chunk in list(desk.shelf.namespace.chunks.values())[:2]:
                    desk.index.hide(chunk)
            case _:
                desk.store((trunk + prompt(dice.randrange(1, 30), 4))[: CHUNK * dice.randint(1, 6)])
        desk.prompts[:-30] = []
        follower.read()
        if step % 20 == 0:
            ready(desk, follower)
    ready(desk, follower)
    assert follower.lost > 20 and follower.replays > 5


def test_after_a_restart_no_chunk_of_the_old_server_is_believed(start_desk: StartDesk, follow: Follow) -> None:
    first = start_desk().start()
    follower, old = follow(first.endpoint), prompt(1, 3)
    first.store(old)
    ready(first, follower)
    before = follower.last
    first.close()  # the follower reads nothing of its end
    follower.loses = lambda seq: seq < restarted_ns
    restarted_ns = time.time_ns()
    second = start_desk().start()
    second.store(prompt(2, 3))
    second.prompts.append(old)
    ready(second, follower)
    assert follower.last is not None and before is not None and follower.last > before


def test_after_an_overflow_chunks_are_taken_back_and_listed_again(start_desk: StartDesk, follow: Follow) -> None:
    desk = start_desk(most=8)
    kept, gone = prompt(1, 20), prompt(2, 2)
    desk.store(kept)
    desk.store(gone)
    assert desk.feed.overflows == 1
    desk.publisher.start()
    follower = follow(desk.endpoint)
    follower.wait(lambda router: follower.payloads)
    assert not follower.router.pods
    eventually(lambda: repr(desk.feed).startswith("<Feed of 0"))
    desk.tick()
    assert desk.feed._listing is not None
    for key in reversed(keys(gone)):  # while the others are listed
        desk.index.hide(desk.shelf.namespace.chunks[key])
    desk.feed.described(described(kept))

    def is_known() -> bool:
        desk.tick()
        return desk.is_known_to(follower.read())

    eventually(is_known)
    assert follower.router.score(kept, "m") and desk.feed.overflows == 1


@pytest.mark.faults
def test_a_replay_without_a_reader_stops_neither_events_nor_the_next_replay(
    start_desk: StartDesk, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_batches(monkeypatch, 4)
    monkeypatch.setattr(kv_events, "_REPLAY_S", 0.5)
    desk = start_desk(pages=8192).start()
    for number in range(20):
        desk.store(prompt(number, 100))
    with zmq.Context() as context, context.socket(zmq.DEALER) as lazy:
        lazy.setsockopt(zmq.LINGER, 0)
        lazy.setsockopt(zmq.RCVHWM, 1)
        lazy.setsockopt(zmq.RCVBUF, 4096)
        lazy.connect(replay_endpoint(desk.endpoint))
        lazy.send_multipart((b"", bytes(8)))
        eventually(lambda: desk.publisher._unsent is not None)
        follower = follow(desk.endpoint)
        desk.store(prompt(99, 3))
        ready(desk, follower)


def test_replays_rest_four_times_as_long_as_they_work(start_desk: StartDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that requests replays all the time gets only a share of the CPU."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, time=lambda: clock.now)
    publisher, worked_s = start_desk().publisher, 0.0  # without its thread: we are it
    publisher._waiting = {b"greedy": 0}
    monkeypatch.setattr(kv_events, "time", clock)

    def send_some() -> None:
        nonlocal worked_s
        worked_s += 0.5
        clock.now += 0.5
        publisher._replay = None if worked_s % 3 == 0 else iter([])  # each sixth time a replay ends

    monkeypatch.setattr(publisher, "_send_some", send_some)
    for _ in range(50_000):
        publisher._answer()
        clock.now += 0.01
    assert 0.15 < worked_s / clock.now <= 0.21


def test_malformed_requests_for_replays_are_ignored(start_desk: StartDesk) -> None:
    desk = start_desk().start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(replay_endpoint(desk.endpoint))
        for frames in ([b""], [b"x" * 8], [b"", b"1"], [b"", b"x" * 9], [b"", b"x" * 8, b""], [b"a", b"x" * 8]):
            for _ in range(100):
                stranger.send_multipart(frames)
        stranger.send_multipart((b"", bytes(8)))
        assert stranger.poll(60_000)
        assert stranger.recv_multipart()[1] == A.encode()


@pytest.mark.faults
def test_connections_beyond_the_limit_are_shut(start_desk: StartDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MOST_CONNECTIONS", 5)
    desk = start_desk().start()

    def shut(one: socket.socket) -> bool:
        try:
            while one.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(12)]
        for each in crowd:
            each.settimeout(60.0)
            each.connect(desk.endpoint.removeprefix("ipc://"))
            each.settimeout(0.1)
        eventually(lambda: sum(map(shut, crowd)) >= 7)
        assert sum(map(shut, crowd)) == 7


@pytest.mark.faults
def test_a_second_server_takes_neither_events_nor_replays_away(
    start_depot: StartDepot, endpoint: str, follow: Follow, tmp_path: Path
) -> None:
    start_depot("--kv-events", endpoint)
    follower = follow(endpoint)
    follower.wait(lambda router: follower.payloads)
    for taken in (endpoint, replay_endpoint(endpoint)):
        ended = run("serve", "--url", f"ipc://{tmp_path}/second.sock", "--kv-events", taken, "--arena-gib", "0.01")
        assert ended.returncode == 1, ended
        assert f"another kvdepot server listens on {taken}" in ended.stderr
        assert "choose another --kv-events" in ended.stderr and "Traceback" not in ended.stderr
    before = follower.last or 0
    follower.wait(lambda router: (follower.last or 0) > before)


@pytest.mark.faults
def test_with_keys_events_are_for_clients_with_a_key_and_no_tenant(
    endpoint: str, follow: Follow, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    keygen(folder, "alice")
    keygen(folder, "carol", tenant="blue")
    with contextlib.closing(Depot("--kv-events", endpoint, "--keys", str(folder))):
        alice = follow(endpoint, key=folder / "alice.key")
        carol, nobody = follow(endpoint, key=folder / "carol.key"), follow(endpoint)
        alice.wait(lambda router: len(alice.payloads) >= 3)
        for other in (carol, nobody):
            other.read()
            assert not other.payloads


def test_an_endpoint_that_is_open_to_other_hosts_needs_keys() -> None:
    ended = run("serve", "--kv-events", "tcp://0.0.0.0:5557", "--arena-gib", "0.01")
    assert ended.returncode == 2 and "keygen" in ended.stderr and "tcp://0.0.0.0:5557" in ended.stderr
