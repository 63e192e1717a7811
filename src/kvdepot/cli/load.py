"""`kvdepot bench --url`: load on a running server, from processes with a model name of their own.

`measure` starts this module once per client (`python -m kvdepot.cli.load`), which reads a plan and then one command per
line from standard input, and answers each with a line of JSON. A process ends when its input does, so none outlives
the command. The chunks are forgotten at the end, however it comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kvdepot.errors import KVDepotError, Unavailable
from kvdepot.processes import module_command

if TYPE_CHECKING:
    from kvdepot.client.socket import MessagingFuture
    from kvdepot.client.transfer import Transfer
    from kvdepot.client.worker import WorkerClient

__all__ = ["KINDS", "MODEL", "Plan", "Result", "measure"]

KINDS = ("store", "lookup", "retrieve")
"""In this order, because the others find what is stored."""
MODEL = "kvdepot-bench-"
"""Models of this command begin with this."""
BLOCKS = 16
"""Blocks of a chunk, each in one piece."""
_GO = "go"
"""Tells a client to send the requests that it has prepared, at the same time as the others."""
_ANSWER_S = 60.0
_LOOK = 64
"""Requests between two looks whether the command has ended."""


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
        module_command("kvdepot.cli.load"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
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


class _Client:
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
        self._transfers = self._transfers or [self._transfer(number) for number in range(self._plan.prompts)]

    def run(self) -> _Done:
        """Send the requests that `prepare` made, one at a time."""
        from kvdepot.client.socket import MessagingFuture

        plan, kind = self._plan, self._kind
        count = plan.prompts if kind == "store" else plan.requests
        send: Callable[[Transfer], bool] = getattr(self, f"_{kind}")
        times, failed = [], 0
        ended: MessagingFuture[object] = MessagingFuture.resolved(None)
        began = time.monotonic()
        for number in range(count):
            if not number % _LOOK and select.select([sys.stdin], [], [], 0)[0]:
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

    def _transfer(self, number: int) -> Transfer:
        from kvdepot.client.transfer import Transfer, pack_block_ids
        from kvdepot.protocol.keys import ROOT

        name = self._salt + (self._plan.first + number).to_bytes(8, "little")
        hashes = b"".join(
            hashlib.blake2b(name + at.to_bytes(4, "little"), digest_size=32).digest() for at in range(self._plan.chunks)
        )
        return Transfer(f"bench-{number}", ROOT, 0, hashes, pack_block_ids(range(self._plan.chunks * BLOCKS)))

    def _store(self, transfer: Transfer) -> bool:
        submitted = self._worker.submit_store([transfer.request_id], [transfer], None)
        self._worker.client.wait(submitted.done, _ANSWER_S)
        answer = submitted.outcome() if submitted.done() else [False]
        self._worker.poll({transfer.request_id})
        return answer == [True]

    def _lookup(self, transfer: Transfer) -> bool:
        # readers 0: not counted among the lookups of engines
        from kvdepot.client.transfer import PromptChunks

        lookup = PromptChunks(self._worker.spec, transfer.hashes).lookup(transfer.request_id)
        return bool(self._worker.client.ask(lookup).result(_ANSWER_S) == self._plan.chunks)

    def _end(self, transfer: Transfer) -> MessagingFuture[object]:
        from kvdepot.protocol import wire

        return self._worker.client.ask(wire.EndSession(transfer.request_id))

    def _retrieve(self, transfer: Transfer) -> bool:
        worker = self._worker
        worker.submit_retrieve([transfer.request_id], [transfer], None)
        worker.client.wait(lambda: bool(worker.poll(set()).retrieved), _ANSWER_S)
        return not worker.take_failed_blocks()


@contextmanager
def _worker(plan: Plan) -> Iterator[WorkerClient]:
    """A worker whose tensors are one prompt's blocks, of random bytes."""
    from kvdepot.client import admin
    from kvdepot.client.transfer import ShardSpec
    from kvdepot.client.worker import WorkerClient
    from kvdepot.memory.shm import shm_path
    from kvdepot.protocol.layout import Layout, Mapping, Segment

    block = plan.chunk_bytes // BLOCKS
    size = plan.chunks * plan.chunk_bytes
    name = f"kvdepot-bench-{os.getpid()}-{secrets.token_hex(4)}"
    path = shm_path(name)
    with admin.connect(plan.url, plan.key) as client:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            with mmap.mmap(descriptor, size) as memory:
                memory[:] = os.urandom(min(size, 1 << 20)).ljust(size, b"\1")
            spec = ShardSpec(plan.model, 1, 0, client.chunk_size, BLOCKS)
            worker = WorkerClient(client, spec)
            fingerprint = hashlib.blake2b(b"kvdepot bench %d" % plan.chunk_bytes, digest_size=32).digest()
            blocks = plan.chunks * BLOCKS
            worker.register_layout(Layout([Mapping(name, size)], [Segment(0, 0, block, block)], blocks, fingerprint))
        finally:
            os.close(descriptor)
            path.unlink()  # the server has mapped it; so nothing is left, however this process ends
        try:
            yield worker
        finally:
            worker.close()


def main() -> int:
    """Read a plan and commands from standard input, and answer each."""
    try:
        plan = msgspec.json.decode(sys.stdin.readline(), type=Plan)
        with _worker(plan) as worker:
            print("{}", flush=True)
            client = _Client(plan, worker)
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


if __name__ == "__main__":
    sys.exit(main())
