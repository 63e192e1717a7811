"""Requests that wait for events: each is sent or fails, once, and none waits behind another's event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.client import device_events as events
from kvdepot.client.device_events import EventQueue
from kvdepot.errors import DeadlineExceeded, DeviceError, KVDepotError, Unavailable
from tests.client.engine import Later
from tests.conftest import HANG_S, eventually


class Blocking:
    """An event whose query blocks until the test lets it go."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.calls = 0

    def query(self) -> bool:
        self.calls += 1
        self.asked.set()
        return self.answer.wait(HANG_S)


class Outcomes:
    """The outcomes of requests, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def of(self, name: str) -> tuple[Callable[[], None], Callable[[KVDepotError], None]]:
        return lambda: self.told.append((name, None)), lambda error: self.told.append((name, error))


@pytest.fixture
def waits() -> Iterator[EventQueue]:
    queue = EventQueue("test-events")
    yield queue
    queue.stop()


def test_a_request_goes_once_its_event_has_happened_without_anyone_looking(waits: EventQueue) -> None:
    outcomes, event = Outcomes(), Later()
    waits.put(event, *outcomes.of("r"))
    eventually(lambda: event.queries > 2)
    assert outcomes.told == []
    event.there = True
    eventually(lambda: outcomes.told)
    waits.poll()
    assert outcomes.told == [("r", None)]


def test_who_looks_lets_go_on_its_own_thread_while_ours_has_nothing_left_to_do() -> None:
    """A switch of threads costs milliseconds under the GIL; an engine that polls need not wait for one."""
    threads: list[threading.Thread] = []
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        go_on.wait(HANG_S)

    queue = EventQueue("test-events", hold)
    try:
        event = Later()
        queue.put(event, lambda: threads.append(threading.current_thread()), lambda error: None)
        assert began.wait(HANG_S)
        queue.poll()
        assert threads == []
        event.there = True
        queue.poll()
        assert threads == [threading.current_thread()]
    finally:
        go_on.set()
        queue.stop()


def test_requests_of_one_event_ask_it_once_a_round_and_go_in_order(waits: EventQueue) -> None:
    outcomes, event = Outcomes(), Blocking()
    waits.put(event, *outcomes.of("first"))
    assert event.asked.wait(HANG_S)
    for name in ("a", "b", "c"):
        waits.put(event, *outcomes.of(name))
    event.answer.set()
    eventually(lambda: len(outcomes.told) == 4)
    assert [name for name, _ in outcomes.told] == ["first", "a", "b", "c"]
    assert event.calls == 2, "those that came while it was being asked need an answer of their own, and one"


def test_an_event_that_breaks_fails_its_requests_and_no_others(waits: EventQueue) -> None:
    outcomes, event = Outcomes(), Later()
    waits.put(Later(RuntimeError("CUDA error: an illegal memory access was encountered")), *outcomes.of("broken"))
    waits.put(Later(DeviceError("the GPU has fallen off the bus")), *outcomes.of("refused"))
    waits.put(event, *outcomes.of("fine"))
    event.there = True
    eventually(lambda: len(outcomes.told) == 3)
    told = dict(outcomes.told)
    assert isinstance(told["broken"], KVDepotError) and "illegal memory access" in str(told["broken"])
    assert isinstance(told["refused"], DeviceError)
    assert told["fine"] is None


def test_what_cannot_go_on_after_its_event_fails_and_the_thread_goes_on(
    waits: EventQueue, caplog: pytest.LogCaptureFixture
) -> None:
    def burst() -> None:
        raise ValueError("not today")

    outcomes, event = Outcomes(), Later()
    waits.put(event, burst, outcomes.of("bursts")[1])
    event.there = True
    eventually(lambda: outcomes.told)
    assert "not today" in str(outcomes.told[0][1])
    assert "a request that waited for a device event failed" in caplog.text
    waits.put(event, *outcomes.of("next"))
    eventually(lambda: len(outcomes.told) == 2)
    assert outcomes.told[1] == ("next", None)


def test_an_event_that_does_not_happen_in_time_fails_its_request(
    waits: EventQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "EVENT_S", 0.05)
    outcomes = Outcomes()
    waits.put(Later(), *outcomes.of("r"))
    eventually(lambda: outcomes.told)
    assert isinstance(outcomes.told[0][1], DeadlineExceeded)


def test_more_requests_than_the_queue_holds_fail_at_once(waits: EventQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_WAITING", 2)
    outcomes, event = Outcomes(), Later()
    for name in ("a", "b", "c"):
        waits.put(event, *outcomes.of(name))
    assert [name for name, _ in outcomes.told] == ["c"]
    event.there = True
    eventually(lambda: len(outcomes.told) == 3)


def test_stopping_fails_what_waits_and_what_comes_later() -> None:
    queue, outcomes, event = EventQueue("test-events"), Outcomes(), Later()
    queue.put(event, *outcomes.of("a"))
    queue.stop()
    queue.put(event, *outcomes.of("b"))
    queue.stop()
    assert [name for name, _ in outcomes.told] == ["a", "b"]
    assert all(isinstance(error, Unavailable) for _, error in outcomes.told)
    assert not [thread for thread in threading.enumerate() if thread.name == "test-events"]


def test_stopping_is_bounded_with_an_event_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_STOP_S", 0.1)
    queue, outcomes, event = EventQueue("test-events"), Outcomes(), Blocking()
    queue.put(event, *outcomes.of("r"))
    assert event.asked.wait(HANG_S)
    queue.stop()  # the event answers after it
    event.answer.set()
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "test-events"])
    assert [type(error) for _, error in outcomes.told] == [Unavailable]


def test_nothing_is_asked_while_nothing_waits(waits: EventQueue) -> None:
    """The thread sleeps; it does not wake an idle engine a thousand times a second."""
    outcomes, event = Outcomes(), Later()
    event.there = True
    waits.put(event, *outcomes.of("r"))
    eventually(lambda: outcomes.told)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "test-events"]

    def switches() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)

    before = -1

    def settled() -> bool:
        nonlocal before
        last, before = before, switches()
        threading.Event().wait(0.05)
        return switches() == before == last

    eventually(settled)
