"""One message crosses few files of the server: the walk of a store, and of a lookup that memory answers."""

from __future__ import annotations

import pytest

from kvdepot.core.actions import Reply
from kvdepot.memory.copier import Copy
from kvdepot.protocol import wire
from kvdepot.protocol.wire import Request
from tests.core.desk import Desk, lookup, prompt, store
from tests.core.walk import Walk

CHUNKS = 4


def walk(desk: Desk, request: Request) -> tuple[Walk, Walk]:
    """The walks of a request, and of the end of its copies."""
    asked, ended = Walk(), Walk()
    frames = [b"one", wire.encode_request(1 << 20, request)]
    with asked.watching():
        actions = desk.connections.receive(frames, "", desk.now)
    for task in [action for action in actions if isinstance(action, Copy)]:
        with ended.watching():
            actions = desk.depot.finished(task.token, [1] * len(task.pieces), desk.now)
    (reply,) = (action for action in actions if isinstance(action, Reply))
    with ended.watching():
        desk.connections.encode(reply, desk.now)
    return asked, ended


@pytest.mark.parametrize("evicts", [False, True])
def test_a_store_crosses_few_files(evicts: bool) -> None:
    desk = Desk(pages=CHUNKS * 2)
    desk.hello()
    desk.register(b"one")
    desk.ask(b"one", store(prompt("first", CHUNKS)))
    if evicts:
        desk.ask(b"one", store(prompt("second", CHUNKS)))
    for each in walk(desk, store(prompt("third", CHUNKS))):
        print(each)


def test_a_lookup_that_memory_answers_crosses_few_files() -> None:
    desk = Desk()
    desk.hello()
    desk.register(b"one")
    chain = prompt("first", CHUNKS)
    desk.ask(b"one", store(chain))
    desk.ask(b"one", lookup(chain, "before"))
    for each in walk(desk, lookup(chain)):
        print(each)
