"""Threads that share one client: every chunk gets its own hash, every future its own answer."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import zmq

from kvdepot.adapters import MessageQueueClient
from kvdepot.client.contract import PromptChains
from kvdepot.keys import ROOT, ChunkChain
from kvdepot.protocol import wire
from tests.conftest import HANG_S, Depot

CHUNK = 256
THREADS = 8


@pytest.fixture(autouse=True)
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def on_threads(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Run `work(number)` on several threads at once; raise what one of them raised."""
    together = threading.Barrier(threads)

    def run(number: int) -> None:
        together.wait()
        work(number)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


def prompts(seed: int, count: int, most_chunks: int) -> list[tuple[int, ...]]:
    """Prompts of whole chunks, some with a common prefix."""
    numbers = random.Random(seed)
    head = tuple(numbers.choices(range(50_000), k=CHUNK))
    made = []
    for i in range(count):
        tokens = tuple(numbers.choices(range(50_000), k=CHUNK * numbers.randrange(1, most_chunks)))
        made.append((head if i % 2 else ()) + tokens)
    return made


def alone(tokens: tuple[int, ...]) -> bytes:
    chain = ChunkChain(CHUNK)
    chain.extend(tokens)
    return bytes(chain.hashes)


@pytest.mark.parametrize("request_id", [None, "reused"])
def test_keys_that_threads_name_at_once_get_the_hashes_of_their_own_tokens(request_id: str | None) -> None:
    chains, said, wrong = PromptChains(), prompts(1, 40, 24), list[int]()
    right = [alone(tokens) for tokens in said]

    def work(number: int) -> None:
        for i in random.Random(number).choices(range(len(said)), k=40):
            first = len(said[i]) // CHUNK // 2 * (number % 2)
            parent = right[i][32 * (first - 1) : 32 * first] if first else ROOT
            named = chains.name(request_id, said[i], CHUNK, first * CHUNK)
            if named != (parent, first, right[i][32 * first :]):
                wrong.append(i)

    on_threads(work)
    assert not wrong, f"{len(wrong)} of {THREADS * 40} had the hashes of other tokens"


def test_clients_of_one_context_are_made_and_closed_by_many_threads_at_once() -> None:
    """A descriptor is reused by the next client before ZeroMQ has closed the last one's monitor."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 10_000)  # ZeroMQ's own thread closes sockets, as slowly as a busy machine lets it

    def make_and_close(_: int) -> None:
        for _ in range(200):
            MessageQueueClient("ipc:///tmp/kvdepot-nobody.sock", context).close()

    on_threads(make_and_close)
    context.term()


def test_a_client_that_closes_while_it_connects_stops_no_other(depot: Depot) -> None:
    """ZeroMQ's thread, which all sockets of a context share, would block for ever on the closed monitor."""
    moments = random.Random(7)
    with closing(MessageQueueClient(depot.url, depot.context)) as other:
        for _ in range(300):
            client = MessageQueueClient(depot.url, depot.context)
            leaving = time.perf_counter() + moments.random() * 0.003
            while time.perf_counter() < leaving:  # a sleep is too coarse to fall into the handshake
                pass
            client.close()
            assert other.ask(wire.ChunkSize()).result(HANG_S) == CHUNK
