"""One request crosses few files of the server: the walk of a store, and of a lookup that memory answers.

Counted are the files that decide: not those of protocol/, which only encode and measure, nor those that only count what
was decided, nor the readers, which get the events afterwards.
"""

from __future__ import annotations

import re
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
BESIDE = ("protocol/", "core/trails", "core/usage", "core/histograms")
READERS = ("core/departures", "core/index/lifetimes", "kv_events/feed")


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


def walk(desk: Desk, request: Request) -> list[str]:
    """The stays of a request in the files that decide, until its last answer; a store's bytes are completed at once."""
    seen, depot = Walk(), desk.depot
    with seen.watching():
        (action,) = depot.handle(b"one", bytes([1] * 8), request, desk.now)
    if isinstance(action, Prepare):
        with seen.watching():
            (action,) = depot.finished(action.token, Prepared(True), desk.now)
        assert isinstance(action, Reply) and isinstance(action.value, wire.Placement)
        placed = action.value
        with seen.watching():
            end = wire.Complete(placed.operation, placed.boot, True, [0] * CHUNKS)
            (action,) = depot.handle(b"one", bytes([2] * 8), end, desk.now)
    assert isinstance(action, Reply) and not isinstance(action.value, KVDepotError)
    first = next((at for at, file in enumerate(seen.stays) if file in READERS), len(seen.stays))
    assert not set(seen.stays[first:]) - set(READERS), f"readers come last: {seen}"
    return [file for file in seen.stays if not file.startswith((*BESIDE, *READERS))]


@pytest.fixture
def desk() -> Desk:
    desk = Desk(pages=CHUNKS * 2)
    desk.hello()
    assert desk.ask(b"one", wire.Register(1, layout(), "m", 1, 0, PER_CHUNK)) is None
    desk.ask(b"one", store(prompt("first", CHUNKS)))
    desk.depot._readers.remove(desk.heard)  # which no server has
    return desk


def test_a_store_is_decided_in_twenty_stays_and_twelve_returns(desk: Desk) -> None:
    stays = walk(desk, store(prompt("third", CHUNKS)))
    assert len(stays) <= 20 and len(stays) - len(set(stays)) <= 12, stays
    assert stays.count("core/index/index") == 2, "it enters the index once for its chunks, and once with their bytes"


def test_a_lookup_that_memory_answers_crosses_nine_files(desk: Desk) -> None:
    desk.ask(b"one", lookup(prompt("first", CHUNKS), "before"))
    stays = walk(desk, lookup(prompt("first", CHUNKS)))
    assert len(set(stays)) <= 9, stays


def test_a_lookup_that_memory_answers_is_decided_in_ten_stays_and_three_returns(desk: Desk) -> None:
    client, request, found = desk.depot.client(b"one"), lookup(prompt("first", CHUNKS)), Walk()
    assert client is not None
    with found.watching():
        (action,) = desk.depot.lookups.look_up(client, bytes(8), request, desk.now)
    assert isinstance(action, Reply) and action.value == wire.Hit(CHUNKS)
    assert len(found.stays) <= 10 and len(found.stays) - len(set(found.stays)) <= 3, str(found)
    desk.depot._conclude([])


def test_the_index_stays_small() -> None:
    source = Path(index.__file__).read_text()
    assert len(source.splitlines()) <= 450 and source.count("\n    def ") <= 25


@pytest.mark.parametrize("file", READERS)
def test_a_reader_imports_only_the_values_of_events_from_the_index(file: str) -> None:
    imported = re.findall(r"(?m)^from kvdepot\.core\.index(?:\.(\w+))? import", Path(SOURCE, f"{file}.py").read_text())
    assert set(imported) <= {"chunk", "events"}
