"""Load on a running server: stores, lookups and retrieves per second of all clients together.

    python bench/load.py [--url URL] [--key FILE] [-c CLIENTS] [-n REQUESTS] [--prompts N] [--chunks N] [--json] ...

It uses a model name of its own, whose chunks it removes at the end, also when a signal ends it. It takes memory and
time from engines, and stores no more than what is free in the arena unless --yes is given. The exit code is 1 if a
request failed.

`measure` starts this script once per client (`--client`), which reads a plan and then one command per line from
standard input, and answers each with a line of JSON. A process ends when its input does, so none outlives the script.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from kvdepot.cli.connect import connect
from kvdepot.cli.options import Address
from kvdepot.cli.output import clean, count, duration, print_json, progress
from kvdepot.client import admin
from kvdepot.client.calls import answer
from kvdepot.client.socket import MessagingFuture
from kvdepot.client.transfer import PromptChunks, ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import WorkerClient
from kvdepot.config import default_key
from kvdepot.devices.host import HostBlocks
from kvdepot.errors import ConfigError, KVDepotError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ROOT
from kvdepot.protocol.layout import Layout, Mapping, Segment
from kvdepot.values import parse_size, size

KINDS = ("store", "lookup", "retrieve")
"""In this order, because the others find what is stored."""
MODEL = "kvdepot-bench-"
"""Models of this script begin with this."""
BLOCKS = 16
"""Blocks of a chunk, each in one piece."""
_GO = "go"
"""Tells a client to send the requests that it has prepared, at the same time as the others."""
_ANSWER_S = 60.0
_CHECK = 64
"""Requests between two checks whether the script has ended."""


class Plan(msgspec.Struct, frozen=True):
    """What to do. prompts, requests: of each client. chunks: of a prompt, which one request stores or retrieves.

    first: number of the client's first prompt.
    """

    url: str
    key: str
    model: str
    prompts: int
    requests: int
    chunks: int
    chunk_bytes: int
    first: int = 0


class Result(msgspec.Struct, frozen=True):
    """One kind of requests: how many, how many of them failed, all per second, KV bytes per second, and latencies.

    per_s: of all clients, from the first request's start to the last one's end.
    """

    kind: str
    requests: int
    failed: int
    per_s: float
    bytes_per_s: float
    p50_s: float
    p99_s: float


class _Done(msgspec.Struct, frozen=True):
    """A client's answer to a command: each request's time, how many failed, and when it began and ended.

    began_s, ended_s: CLOCK_MONOTONIC, which all processes of a machine share.
    """

    times_s: list[float]
    failed: int
    began_s: float
    ended_s: float


def measure(plan: Plan, clients: int, told: Callable[[str, int, int], None]) -> Iterator[Result]:
    """Run each kind of requests on all clients at once. told: called with what happens, and how much is done.

    The caller forgets the model at the end. Raises KVDepotError if a client fails.
    """
    with contextlib.ExitStack() as stack:
        plans = [msgspec.structs.replace(plan, first=number * plan.prompts) for number in range(clients)]
        running = [stack.enter_context(_started(each)) for each in plans]
        for each in running:
            _answer(each)  # connected and registered
        for number, kind in enumerate(KINDS):
            told(kind, number, len(KINDS))
            for each in running:
                _say(each, kind)
            for each in running:
                _answer(each)  # its requests are made
            for each in running:
                _say(each, _GO)
            done = [msgspec.convert(_answer(each), _Done) for each in running]
            times = sorted(seconds for each in done for seconds in each.times_s)
            per_s = _rate(done)
            moved = 0 if kind == "lookup" else plan.chunks * plan.chunk_bytes
            yield Result(
                kind, len(times), sum(each.failed for each in done), per_s, per_s * moved,
                _part(times, 0.5), _part(times, 0.99),
            )  # fmt: skip


def _rate(done: Sequence[_Done]) -> float:
    """Requests per second of all clients together."""
    passed = max(each.ended_s for each in done) - min(each.began_s for each in done)
    return sum(len(each.times_s) for each in done) / passed


def _part(times: Sequence[float], part: float) -> float:
    return times[min(len(times) - 1, math.ceil(part * len(times)) - 1)]


@contextmanager
def _started(plan: Plan) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,  # an interrupt reaches this process alone, which ends it
    )  # fmt: skip
    try:
        _say(process, msgspec.json.encode(plan).decode())
        yield process
    finally:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its answer says why
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Unavailable(f"a client of the benchmark ended with exit code {process.wait()}")
    answer = json.loads(line)
    if "error" in answer:
        raise Unavailable(f"a client of the benchmark failed: {answer['error']}")
    return answer


# -- one client


class LoadClient:
    """One client of the load: a worker with one prompt's blocks, and the prompts that it stores."""

    def __init__(self, plan: Plan, worker: WorkerClient) -> None:
        self._plan = plan
        self._worker = worker
        self._salt = plan.model.encode()
        self._kind = ""
        self._transfers: list[Transfer] = []

    def prepare(self, kind: str) -> None:
        """Make what the requests say, so that no time is measured in which the server waits for this process."""
        self._kind = kind
        self._transfers = self._transfers or [self.transfer(number) for number in range(self._plan.prompts)]

    def run(self) -> _Done:
        """Send the requests that `prepare` made, one at a time."""
        plan, kind = self._plan, self._kind
        count = plan.prompts if kind == "store" else plan.requests
        send: Callable[[Transfer], bool] = getattr(self, kind)
        times, failed = [], 0
        ended: MessagingFuture[object] = MessagingFuture.resolved(None)
        began = time.monotonic()
        for number in range(count):
            if not number % _CHECK and select.select([sys.stdin], [], [], 0)[0]:
                raise EOFError  # commands come one by one, so its input has ended
            transfer = self._transfers[number % plan.prompts]
            start = time.monotonic()
            good = send(transfer)
            times.append(time.monotonic() - start)
            failed += not good
            if kind == "lookup":
                ended = self._end(transfer)  # as engines do, without waiting
        ended.result(_ANSWER_S)
        return _Done(times, failed, began, time.monotonic())

    def transfer(self, number: int) -> Transfer:
        name = self._salt + (self._plan.first + number).to_bytes(8, "little")
        hashes = b"".join(
            hashlib.blake2b(name + at.to_bytes(4, "little"), digest_size=32).digest() for at in range(self._plan.chunks)
        )
        return Transfer(f"bench-{number}", ROOT, 0, hashes, pack_block_ids(range(self._plan.chunks * BLOCKS)))

    def store(self, transfer: Transfer) -> bool:
        """Whether all of a prompt was stored. Blocks, as the other two."""
        submitted = self._worker.submit_store([transfer.request_id], [transfer], None)
        self._worker.lane.wait(submitted.done, _ANSWER_S)
        answer = submitted.outcome() if submitted.done() else [False]
        self._worker.poll({transfer.request_id})
        return answer == [True]

    def lookup(self, transfer: Transfer) -> bool:
        """Whether all of a prompt was found."""
        # readers 0: not counted among the lookups of engines
        lookup = PromptChunks(self._worker.spec, transfer.hashes).lookup(transfer.request_id)
        return answer(self._worker.client, lookup, wire.Hit, _ANSWER_S).chunks == self._plan.chunks

    def _end(self, transfer: Transfer) -> MessagingFuture[object]:
        return self._worker.client.ask(wire.EndSession(transfer.request_id))

    def retrieve(self, transfer: Transfer) -> bool:
        """Whether all of a prompt was retrieved."""
        worker = self._worker
        worker.submit_retrieve([transfer.request_id], [transfer], None)
        worker.wait_any(_ANSWER_S)
        return bool(worker.poll(set()).retrieved) and not worker.take_failed_blocks()


@contextmanager
def registered(plan: Plan) -> Iterator[WorkerClient]:
    """A worker whose tensors are one prompt's blocks, of random bytes."""
    block = plan.chunk_bytes // BLOCKS
    size = plan.chunks * plan.chunk_bytes
    layout = Layout(
        [Mapping("prompt", size)],
        [Segment(0, 0, block, block)],
        plan.chunks * BLOCKS,
        hashlib.blake2b(b"kvdepot bench %d" % plan.chunk_bytes, digest_size=32).digest(),
    )
    memory = np.resize(np.frombuffer(os.urandom(min(size, 1 << 20)), np.uint8), size)
    with admin.connect(plan.url, plan.key) as client:
        worker = WorkerClient(client, ShardSpec(plan.model, 1, 0, client.chunk_size, BLOCKS))
        try:
            worker.register([layout], [HostBlocks(layout, {"prompt": memory})])
            yield worker
        finally:
            worker.close()


def _run_client() -> int:
    """Read a plan and commands from standard input, and answer each."""
    try:
        plan = msgspec.json.decode(sys.stdin.readline(), type=Plan)
        with registered(plan) as worker:
            print("{}", flush=True)
            client = LoadClient(plan, worker)
            for line in sys.stdin:
                if line.strip() == _GO:
                    print(msgspec.json.encode(client.run()).decode(), flush=True)
                else:
                    client.prepare(line.strip())
                    print("{}", flush=True)
    except EOFError:
        return 1
    except (KVDepotError, OSError) as exc:
        print(json.dumps({"error": str(exc)}), flush=True)
        return 1
    return 0


# -- the script


def main(argv: list[str] | None = None) -> int:
    """Run the load; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words == ["--client"]:
        return _run_client()
    parser = argparse.ArgumentParser(prog="load.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-u", "--url", help="the server's endpoint (default: KVDEPOT_URL, or this user's)")
    parser.add_argument("-k", "--key", metavar="FILE", help="this client's key file (default: KVDEPOT_KEY)")
    parser.add_argument("-c", "--clients", metavar="N", type=int, default=4, help="clients, each a process with one "
                        "request at a time (default: 4)")  # fmt: skip
    parser.add_argument("-n", "--requests", metavar="N", type=int, default=2000, help="lookups, and retrieves, of all "
                        "clients (default: 2000)")  # fmt: skip
    parser.add_argument("--prompts", metavar="N", type=int, default=64, help="prompts to store, each with one request "
                        "(default: 64)")  # fmt: skip
    parser.add_argument("--chunks", metavar="N", type=int, default=8, help="chunks of a prompt (default: 8)")
    parser.add_argument("--chunk-bytes", metavar="SIZE", type=parse_size, default="256KiB", help="KV bytes of a chunk, "
                        "at least 4KiB (default: 256KiB)")  # fmt: skip
    parser.add_argument("-y", "--yes", action="store_true", help="proceed even if the server must evict chunks for it")
    parser.add_argument("-j", "--json", action="store_true", help="print JSON")
    args = parser.parse_args(words)
    if min(args.clients, args.requests, args.prompts, args.chunks) < 1 or args.clients > 256:
        parser.error("--clients is 1 to 256; --requests, --prompts and --chunks are at least 1")
    try:
        return _measure_server(args)
    except KVDepotError as exc:
        print(f"load.py: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _measure_server(args: argparse.Namespace) -> int:
    chunk_bytes = int(args.chunk_bytes) // BLOCKS * BLOCKS
    if not 4096 <= chunk_bytes <= 1 << 30:
        raise ConfigError("--chunk-bytes: give between 4KiB and 1GiB")
    clients, key = min(args.clients, args.prompts), args.key or default_key()
    each, per_client = -(-args.prompts // clients), -(-args.requests // clients)
    total = clients * each * args.chunks * (-(-chunk_bytes // 4096) * 4096)
    with connect(Address(args.url, key)) as client:
        now = admin.status(client)
        free = now.capacity_bytes - now.used_bytes
        if total > free and not args.yes:
            raise ConfigError(
                f"{size(total)} would be stored, and {size(free)} of the arena are free, so chunks of engines would be "
                "evicted: lower --prompts, --chunks or --chunk-bytes, or give --yes"
            )
        model = MODEL + secrets.token_hex(8)
        plan = Plan(client.server_url, key, model, each, per_client, args.chunks, chunk_bytes)
        found: list[Result] = []
        try:
            with progress() as update:
                for result in measure(plan, clients, update):
                    if not args.json:
                        print(*([] if found else [_HEAD]), _line(result), sep="\n", flush=True)
                    found.append(result)
        finally:
            left = admin.forget(client, model, "").left
    for place, why in left.items():
        print(f"load.py: chunks of {model} may remain: {place}: {clean(why)}", file=sys.stderr)
    if args.json:
        print_json({"clients": clients, "chunks": args.chunks, "chunk_bytes": chunk_bytes, "results": found})
    if failed := sum(result.failed for result in found):
        print(f"load.py: {failed} requests failed or missed stored chunks", file=sys.stderr)
    return 1 if failed or left else 0


def _row(kind: str, *cells: str) -> str:
    widths = (9, 11, 10, 8, 8)
    return "  ".join([f"{kind:<8}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))])


_HEAD = _row("", "requests", "requests/s", "GB/s", "p50", "p99")


def _line(result: Result) -> str:
    moved = f"{result.bytes_per_s / 1e9:.2f}" if result.bytes_per_s else "-"
    times = duration(result.p50_s), duration(result.p99_s)
    return _row(result.kind, count(result.requests), count(result.per_s), moved, *times)


if __name__ == "__main__":
    sys.exit(main())
