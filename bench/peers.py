"""Helper processes of the benchmark: the bare echo server for lower bounds, and clients that count.

    peers.py echo URL REPLY_BYTES                    a ROUTER that answers every message
    peers.py bare URL REQUEST_BYTES                  a bare DEALER that counts round trips
    peers.py readers PORT PAGES                      open web pages and a scraper; counts answers
    peers.py flood URL KIND                          a client that sends as fast as it can
    peers.py depot URL MODEL BLOCK_SIZE CHUNKS HASHES_HEX    the scheduler adapter; counts lookups, which all hit

They print `"ready"`. Those that count then read durations in seconds, one per line, and answer `[count, seconds]`.
They end when stdin closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

_REQUESTS = 1024
"""Number of request ids that a counting client cycles through."""
_ANSWER_S = 30.0
FLOODS = ("lookups", "status", "garbage", "requests whose answers it never reads")
"""The kinds of floods."""


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def echo(url: str, reply_bytes: int) -> None:
    """Answer every message with `reply_bytes` bytes until stdin ends."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(url)
    reply = bytes(reply_bytes)

    def serve() -> None:
        while True:
            identity, _ = socket.recv_multipart()
            socket.send_multipart((identity, reply))

    threading.Thread(target=serve, daemon=True).start()
    answer("ready")
    sys.stdin.read()


def count(once: Callable[[int], None]) -> None:
    """Repeat `once` for the duration that each line gives, and count."""
    for number in range(64):
        once(number)
    answer("ready")
    for line in sys.stdin:
        done = 0
        begun = time.perf_counter()
        end = begun + float(line)
        while (now := time.perf_counter()) < end:
            once(done)
            done += 1
        answer([done, now - begun])


def bare(url: str, request_bytes: int) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(url)
    message = bytes(request_bytes)

    def once(_: int) -> None:
        socket.send(message)
        socket.recv()

    count(once)


def depot(url: str, model: str, block_size: int, chunks: int, hashes: bytes) -> None:
    from kvdepot.adapters import LMCacheMPSchedulerAdapter

    scheduler = LMCacheMPSchedulerAdapter(url, zmq.Context(), model, 1, 0, block_size)
    tokens = chunks * scheduler.chunk_size

    def once(number: int) -> None:
        request = f"{os.getpid()}-{number % _REQUESTS}"
        scheduler.submit_lookup(request, hashes)
        found = scheduler.wait_lookup_result(request, 1.0)
        if found != tokens:
            raise RuntimeError(f"{found} of {tokens} tokens found")
        scheduler.cleanup_lookup_result(request)

    count(once)
    scheduler.shutdown()


def readers(port: int, pages: int) -> None:
    """The requests of `pages` open pages and of a scraper, once a second.

    Browsers and scrapers usually run on other machines, so this process has a low priority and uses little time.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    answer("ready")
    for line in sys.stdin:
        answer(read(port, pages, float(line)))


def read(port: int, pages: int, seconds: float) -> tuple[int, float]:
    """The number of answers, and the seconds they took. Raises TimeoutError if a page gets none."""
    begun = time.perf_counter()
    end = begun + seconds
    scraped = begun
    done = 0
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(pages + 1)]
        heard = dict.fromkeys(connections, begun)
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while (now := time.perf_counter()) < end:
            if now >= scraped:
                for connection in connections:
                    ask(connection, "/metrics" if connection is connections[0] else "/v1/status")
                scraped = now + 1.0
            for key, _ in selector.select(max(0.0, min(end, scraped, now + 0.1) - now)):
                connection = key.fileobj
                if not (data := connection.recv(1 << 20)):
                    raise RuntimeError("a connection was shut while its reader waited")
                if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200 "):
                    raise RuntimeError(f"answered with {data[:64]!r}")
                done += data.count(b"HTTP/1.1 200 ")
                heard[connection] = now
            # After all that has come is read: it may be this process that did not run.
            if silent := sum(now - since > _ANSWER_S for since in heard.values()):
                raise TimeoutError(f"of {pages} pages and a scraper {silent} wait for an answer")
    return done, time.perf_counter() - begun


def ask(connection: socket.socket, path: str) -> None:
    """Send a request."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def flood(url: str, kind: str) -> None:
    """Send one kind of message as fast as the server takes it, until stdin closes; ready when the first is sent."""
    from kvdepot.config import arena_folder
    from kvdepot.memory.shm import LivenessFile
    from kvdepot.protocol import wire

    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    liveness = LivenessFile(arena_folder())
    socket.connect(url)
    socket.send(wire.encode_request(0, wire.Hello(wire.VERSION, liveness.name, liveness.secret)))
    socket.recv()
    lookup = wire.encode_request(1, wire.Lookup("flood", 1, 0, "r", 1, bytes(32)))
    status = wire.encode_request(1, wire.GetStatus())
    frame = dict(zip(FLOODS, (lookup, status, bytes(8) + b"garbage", status), strict=True))[kind]
    reads = kind != FLOODS[-1]

    def send() -> None:
        while True:
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                socket.poll(1000, zmq.POLLIN | zmq.POLLOUT if reads else zmq.POLLOUT)
            while reads and socket.poll(0, zmq.POLLIN):
                socket.recv()

    threading.Thread(target=send, daemon=True).start()
    answer("ready")
    sys.stdin.read()
    liveness.close()
    os._exit(0)  # the thread has the socket


def main(kind: str, *arguments: str) -> None:
    if kind == "echo":
        echo(arguments[0], int(arguments[1]))
    elif kind == "bare":
        bare(arguments[0], int(arguments[1]))
    elif kind == "readers":
        readers(int(arguments[0]), int(arguments[1]))
    elif kind == "flood":
        flood(*arguments)
    else:
        url, model, block_size, chunks, hashes = arguments
        depot(url, model, int(block_size), int(chunks), bytes.fromhex(hashes))


if __name__ == "__main__":
    main(*sys.argv[1:])
