"""A client of a program that copies chunks on its own threads: the library's, and SGLang's.

Each operation asks the server where its chunks belong or are, copies them to or from the arena in the calling thread,
and tells the server. Invariants: what was placed is completed, whatever happens to the call, because the server keeps
its memory until then; no copy goes on after its call; and the client is closed once no call uses it, because a client
that has left must not copy any more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from kvdepot.client.calls import ANSWER_S, convert
from kvdepot.client.copies import BUSY_S, COMPLETE_TRIES, Arenas, carry, give_back
from kvdepot.client.socket import Client
from kvdepot.errors import BadRequest, Busy
from kvdepot.memory.arena_view import ArenaView
from kvdepot.protocol import wire

log = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")

_SHARED_BYTES = 16 << 20
"""Several threads share a copy of at least this many bytes: starting them takes a tenth of the time that they save."""
_COPY_THREADS = min(4, len(os.sched_getaffinity(0)))


class _Awaited:
    """The answer to a store or retrieve. A placement that comes after its call has given up is given back."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._placed: wire.Placement | None = None
        self._is_given_up = False

    def read(self, value: object) -> object:
        """Hear the answer: a Placement, or the final one if there is nothing to copy."""
        if isinstance(value, wire.Placement):
            with self._lock:
                self._placed, is_given_up = value, self._is_given_up
            if is_given_up:
                self._give_back(value)
        return value

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            self._is_given_up = True
            placed = self._placed
        if placed is not None:
            self._give_back(placed)

    def _give_back(self, placed: wire.Placement) -> None:
        self._client.ask(give_back(placed), deadline_s=None)


class Link:
    """A client that many threads use, and that is closed when none does."""

    def __init__(self, client: Client) -> None:
        """client: closed with this."""
        self.is_closed = False
        self._client = client
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._calls = 0  # in progress
        self._arenas = Arenas(self._client.arena_dir)

    @contextmanager
    def call(self) -> Iterator[Client]:
        """Use the client. Raises BadRequest after `close`, and in a forked child."""
        if os.getpid() != self._pid:
            raise BadRequest("this depot was connected before a fork: call kvdepot.connect() in the child process")
        with self._idle:
            if self.is_closed:
                raise BadRequest("this depot is closed: call kvdepot.connect() again")
            self._calls += 1
        try:
            yield self._client
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def move(
        self, request: wire.Store | wire.Retrieve, size: int, copy: Callable[[ArenaView, wire.Placement], None],
        kind: type[T], timeout_s: float = ANSWER_S,
    ) -> T:  # fmt: skip
        """Store or retrieve chunks, within `call`: the final answer, which must be of this type.

        size: bytes of a chunk. copy: moves the bytes of the placed chunks; it is not called if there are none. Blocks
        for the copy, and `timeout_s` at most for each of two answers. Raises what `copy` raises, or KVDepotError:
        UnknownRequest if it is not known whether the server has stored the chunks, for example because it was replaced.
        """
        client, awaited = self._client, _Awaited(self._client)
        future = client.ask(request, awaited.read)
        try:
            placed = future.result(timeout_s)
        except BaseException:
            awaited.give_up()
            raise
        if not isinstance(placed, wire.Placement):
            return convert(request, kind, placed)
        done = give_back(placed)
        try:
            view = self._arenas.of(placed.arena, placed.boot)
            done = carry(view, placed, size, lambda view: copy(view, placed))
        finally:
            ended = client.ask(done, deadline_s=None)
            client.pump()
        for _ in range(COMPLETE_TRIES):
            try:
                return convert(request, kind, ended.result(timeout_s))
            except Busy:  # too many requests in this second; the server keeps what it has placed until it hears this
                time.sleep(BUSY_S)
                ended = client.ask(done, deadline_s=None)
        return convert(request, kind, ended.result(timeout_s))

    def close(self) -> bool:
        """Close the client once no call uses it. Blocks until then.

        Returns whether this was the first call in the process that connected.
        """
        if os.getpid() != self._pid:
            return False
        with self._idle:
            was_closed, self.is_closed = self.is_closed, True
            self._idle.wait_for(lambda: not self._calls)
        if not was_closed:
            self._client.close()
            self._arenas = Arenas(self._client.arena_dir)
        return not was_closed


def copy_all(copy: Callable[[Item], None], items: Sequence[Item], size: int) -> None:
    """Copy items, `size` bytes in all, in this thread, and from _SHARED_BYTES on in others, too. Returns, or raises the
    first error, once no thread copies any more: afterwards the server gives the memory to others."""
    rest, errors, helpers = deque(items), list[BaseException](), list[threading.Thread]()

    def work() -> None:
        try:
            while True:
                try:
                    item = rest.popleft()
                except IndexError:
                    return
                copy(item)
        except BaseException as exc:  # noqa: BLE001 - raised in the caller's thread
            errors.append(exc)
            rest.clear()

    threads = _COPY_THREADS if size >= _SHARED_BYTES else 1
    try:
        for _ in range(min(threads, len(items)) - 1):
            helper = threading.Thread(target=work, daemon=True)
            helper.start()
            helpers.append(helper)
    except RuntimeError as exc:  # no more threads, or Python is ending
        log.debug("this thread copies alone: %s", exc)
    except BaseException as exc:  # noqa: BLE001 - as below
        errors.append(exc)
        rest.clear()
    work()
    while helpers:
        try:
            helpers[-1].join()
            helpers.pop()
        except BaseException as exc:  # noqa: BLE001 - such as an interrupt
            errors.append(exc)
            rest.clear()
    if errors:
        raise errors[0]
