"""One message crosses few files of the server: the walk of a store, and of a lookup that memory answers.

Counted are the files that decide; not those of protocol/, which only encode and measure, nor the listeners, which read
the events afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvdepot
from kvdepot.core.actions import Prepare, Prepared, Reply
from kvdepot.core.index import index
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.wire import Request
from tests.core.desk import PER_CHUNK, Desk, layout, lookup, prompt, store

CHUNKS = 4
MOST_STORE, MOST_LOOKUP = 9, 9
MOST_STAYS = 21
"""Stays of a store's request in all files, those of protocol/ included."""
LISTENERS = {"lifetimes", "trails", "tiering", "lookups"}
COUNTING = {"trails", "usage", "histograms"}
"""Files that count what a lookup has found, and decide nothing."""


SOURCE = str(Path(kvdepot.__file__).parent) + "/"


class Walk:
    """The files of the package that were entered, in order: a stay begins with a call from another file."""

    def __init__(self) -> None:
        self.stays: list[str] = []

    def __str__(self) -> str:
        return f"{len(self.stays)} stays: {' '.join(self.stays)}"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the files that are entered."""
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        before = frame.f_back
        while before is not None and not before.f_code.co_filename.startswith(SOURCE):
            before = before.f_back  # a caller outside, such as a built-in function's, or the test itself
        if before is None or before.f_code.co_filename != frame.f_code.co_filename:
            self.stays.append(frame.f_code.co_filename.removeprefix(SOURCE).removesuffix(".py"))


def walk(desk: Desk, request: Request) -> tuple[Walk, Walk]:
    """The walks of a request, and of what follows until its last answer."""
    asked, ended = Walk(), Walk()
    frames = [b"one", wire.encode_request(1 << 20, request)]
    with asked.watching():
        (action,) = desk.connections.receive(frames, "", desk.now)
    if isinstance(action, Prepare):
        with ended.watching():
            (action,) = desk.depot.finished(action.token, Prepared(True), desk.now)
        assert isinstance(action, Reply) and isinstance(action.value, wire.Placement)
        placed = action.value
        frames = [
            b"one",
            wire.encode_request(2 << 20, wire.Complete(placed.operation, placed.boot, True, [0] * CHUNKS)),
        ]
        with ended.watching():
            (action,) = desk.connections.receive(frames, "", desk.now)
    assert isinstance(action, Reply) and not isinstance(action.value, KVDepotError)
    with ended.watching():
        desk.connections.encode(action, desk.now)
    return asked, ended


@pytest.fixture
def desk() -> Desk:
    desk = Desk(pages=CHUNKS * 2)
    desk.hello()
    assert desk.ask(b"one", wire.Register(1, layout(), "m", 1, 0, PER_CHUNK)) is None
    desk.ask(b"one", store(prompt("first", CHUNKS)))
    desk.depot._listeners.remove(desk.heard)  # which no server has
    return desk


def deciding(each: Walk, listeners: set[str]) -> list[str]:
    """The files of a walk that decide, in order."""
    return [
        file
        for file in dict.fromkeys(each.stays)
        if not file.startswith("protocol/") and file.split("/")[-1] not in listeners
    ]


def test_a_store_crosses_nine_files(desk: Desk) -> None:
    asked, ended = walk(desk, store(prompt("third", CHUNKS)))
    files = dict.fromkeys([*deciding(asked, LISTENERS), *deciding(ended, LISTENERS)])
    assert len(files) <= MOST_STORE and len(asked.stays) <= MOST_STAYS, f"{asked}\n{ended}"
    assert asked.stays.count("core/index/index") == 1, "a request enters the index once"
    assert asked.stays.count("core/index/index") + ended.stays.count("core/index/index") <= 3


def test_a_lookup_that_memory_answers_crosses_nine_files(desk: Desk) -> None:
    desk.ask(b"one", lookup(prompt("first", CHUNKS), "before"))
    asked, ended = walk(desk, lookup(prompt("first", CHUNKS)))
    beside = LISTENERS - {"lookups"} | COUNTING
    files = dict.fromkeys([*deciding(asked, beside), *deciding(ended, beside)])
    assert len(files) <= MOST_LOOKUP, f"{asked}\n{ended}"


def test_a_lookup_that_memory_answers_is_decided_in_ten_stays_and_three_returns(desk: Desk) -> None:
    client, request, found = desk.depot.client(b"one"), lookup(prompt("first", CHUNKS)), Walk()
    assert client is not None
    with found.watching():
        (action,) = desk.depot.lookups.look_up(client, bytes(8), request, desk.now)
    assert isinstance(action, Reply) and action.value == wire.Hit(CHUNKS)
    assert len(found.stays) <= 10 and len(found.stays) - len(set(found.stays)) <= 3, str(found)
    desk.depot._publish([])


def test_the_index_stays_small() -> None:
    source = Path(index.__file__).read_text()
    assert len(source.splitlines()) <= 450 and source.count("\n    def ") <= 25
