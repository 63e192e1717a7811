"""A toy engine: scheduler and worker adapters on torch tensors, whose KV bytes anyone can check.

The bytes of a block are a function of the model and of all tokens up to the block's end, as in a real engine; no code
is shared with what is tested. Free blocks hold a pattern of their own that is checked when they are taken again, so a
late write into a block that was given back is seen, and a late read stores bytes that some retrieve will find wrong.

Used by tests/faults.
"""

from __future__ import annotations

import array
import enum
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from blake3 import blake3

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.client import MessageQueueClient
from kvdepot.client.transfer import Origin
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire

BLOCK = 16
"""Tokens a block."""
PREEMPTION_S = 0.05
PACE_S = 0.0005
"""What a forward pass takes."""
DRAIN_S = 120.0
"""After so long what is under way is taken for hung."""


class Prompt:
    """`chunks` whole chunks of a family of prompts; prompts of one family are each other's prefixes."""

    def __init__(self, model: str, family: int, chunks: int, chunk_size: int) -> None:
        self.tokens = [(family * 7919 + i * 31) % 50_000 for i in range(chunks * chunk_size)]
        self.keys = []
        running = blake3(model.encode())
        for start in range(0, len(self.tokens), BLOCK):
            running.update(array.array("I", self.tokens[start : start + BLOCK]).tobytes())
            self.keys.append(running.copy().digest())


class State(enum.Enum):
    LOOKING_UP = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    STORING = enum.auto()  # finished; its blocks wait for its stores


@dataclass
class Request:
    id: str
    family: int
    prompt: Prompt
    state: State = State.LOOKING_UP
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # chunks
    steps_left: int = 0
    aborted: bool = False


def _met_a_cut(client: MessageQueueClient) -> bool:
    client.pump()
    return not client.is_welcomed


class ToyEngine:
    """One engine of one rank. Used by one thread; `traffic` draws what happens next from a seed."""

    def __init__(
        self,
        url: str,
        model: str = "toy",
        blocks: int = 256,
        width: int = 16,
        seed: int = 0,
        context: zmq.Context[Any] | None = None,
        writer: str = "",
    ) -> None:
        """width: a block has `64 * width` bytes, in two layers of which one has K and V apart. writer: as in
        wire.Register."""
        self.model = model
        self.context = context or zmq.Context()
        self.scheduler = LMCacheMPSchedulerAdapter(url, self.context, model, 1, 0, BLOCK)
        try:
            self.worker = LMCacheMPWorkerAdapter(url, self.context, model, 1, 0, BLOCK)
        except KVDepotError:
            self.scheduler.shutdown()
            raise
        self.worker.origin = Origin(writer=writer)
        self.chunk_size = self.worker.chunk_size
        self.per_chunk = self.worker.blocks_in_chunk
        self.caches = {
            "layer.0": torch.zeros((2, blocks, BLOCK, width), dtype=torch.uint8),
            "layer.1": torch.zeros((blocks, BLOCK, 2 * width), dtype=torch.uint8),
        }
        try:
            self.worker.register_kv_caches(self.caches)
        except KVDepotError:
            self.close()
            raise
        self.use(self.caches)
        self.random = random.Random(seed)
        self.name = secrets.token_hex(4)
        self.requests: dict[str, Request] = {}
        self.ended: list[str] = []
        self.ended_alone: set[str] = set()  # by `end_store` and `end_retrieve`
        self.number = 0
        self.counters: Counter[str] = Counter()
        self.wrong: list[str] = []

    def use(self, caches: dict[str, torch.Tensor]) -> None:
        """Work in these tensors, which are registered, from now on; nothing may be under way in others."""
        # Views of numpy point at memory, so they are made where the tensors lie now.
        first, second = (tensor.numpy() for tensor in caches.values())
        blocks = len(second)
        self.parts = [first[0].reshape(blocks, -1), first[1].reshape(blocks, -1), second.reshape(blocks, -1)]
        self.block_bytes = sum(part.shape[1] for part in self.parts)
        self.free = list(range(blocks))
        self.given_back: dict[int, bytes] = {}  # free block -> key of the pattern in it
        for block in self.free:
            self._give_pattern(block)

    # -- bytes

    def write(self, block: int, key: bytes) -> None:
        data = memoryview(blake3(key).digest(length=self.block_bytes))
        for part in self.parts:
            size = part.shape[1]
            part[block].data[:] = data[:size]
            data = data[size:]

    def holds(self, block: int, key: bytes) -> bool:
        return b"".join(part[block].tobytes() for part in self.parts) == blake3(key).digest(length=self.block_bytes)

    def _give_pattern(self, block: int) -> None:
        self.given_back[block] = secrets.token_bytes(16)
        self.write(block, self.given_back[block])

    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        self.random.shuffle(self.free)
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            if not self.holds(block, self.given_back.pop(block)):
                self.wrong.append(f"free block {block} was written to")
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._give_pattern(block)
        self.free += blocks

    def check(self, prompt: Prompt, blocks: list[int], skip: Iterable[int] = ()) -> int:
        """Blocks whose bytes are not those of the prompt, other than those in `skip`."""
        skipped = set(skip)
        bad = [i for i, block in enumerate(blocks) if block not in skipped and not self.holds(block, prompt.keys[i])]
        if bad:
            self.wrong.append(f"blocks {bad} of a prompt of {len(blocks)} hold other bytes")
        return len(bad)

    # -- one thing at a time

    def prompt(self, family: int, chunks: int) -> Prompt:
        return Prompt(self.model, family, chunks, self.chunk_size)

    def op(self, prompt: Prompt, blocks: list[int], first: int = 0, end: int = 0) -> LoadStoreOp:
        end = end or len(prompt.tokens) // self.chunk_size
        ids = blocks[first * self.per_chunk : end * self.per_chunk]
        return LoadStoreOp(ids, token_ids=prompt.tokens, start=first * self.chunk_size, end=end * self.chunk_size)

    def new_id(self, what: str) -> str:
        self.number += 1
        return f"{what}-{self.name}-{self.number}"

    def begin_store(self, family: int, chunks: int) -> str:
        """Fill blocks with a prompt and store it; the blocks stay taken until `end_store`."""
        request = Request(self.new_id("store"), family, self.prompt(family, chunks), State.STORING)
        blocks = self.take(chunks * self.per_chunk)
        assert blocks is not None, f"{len(self.free)} free blocks"
        request.blocks = blocks
        for block, key in zip(blocks, request.prompt.keys, strict=True):
            self.write(block, key)
        self.requests[request.id] = request
        self.worker.submit_store_request(request.id, self.op(request.prompt, blocks), None)
        return request.id

    def end_store(self, request_id: str, timeout_s: float = DRAIN_S) -> bool:
        """Whether the store arrived."""
        dropped = self.worker.counters["stores_dropped"]
        self._wait(lambda: self._has_ended(request_id, {request_id}), timeout_s)
        request = self.requests.pop(request_id)
        self.check(request.prompt, request.blocks)
        self.give_back(request.blocks)
        return self.worker.counters["stores_dropped"] == dropped

    def store(self, family: int, chunks: int, timeout_s: float = DRAIN_S) -> bool:
        return self.end_store(self.begin_store(family, chunks), timeout_s)

    def lookup(self, family: int, chunks: int, keep: str = "") -> int:
        """Chunks that hit; their pins go at once unless the request is given a name to `keep` them under."""
        request_id = keep or self.new_id("lookup")
        deadline = time.monotonic() + DRAIN_S
        self.scheduler.maybe_submit_lookup_request(request_id, token_ids=self.prompt(family, chunks).tokens)
        while (tokens := self.scheduler.wait_lookup_result(request_id, DRAIN_S)) is None:  # at once without a server
            assert time.monotonic() < deadline, "a lookup was never answered"
            time.sleep(0.0005)
        self.scheduler.cleanup_lookup_result(request_id)
        if not keep:
            self.scheduler.end_session(request_id)
        return tokens // self.chunk_size

    def end_session(self, request_id: str) -> None:
        self.scheduler.end_session(request_id)

    def begin_retrieve(self, family: int, chunks: int) -> str:
        request = Request(self.new_id("retrieve"), family, self.prompt(family, chunks), State.LOADING)
        blocks = self.take(chunks * self.per_chunk)
        assert blocks is not None, f"{len(self.free)} free blocks"
        request.blocks = blocks
        self.requests[request.id] = request
        self.worker.submit_retrieve_request(request.id, self.op(request.prompt, blocks), None)
        return request.id

    def end_retrieve(self, request_id: str, timeout_s: float = DRAIN_S) -> int:
        """Blocks that were reported failed; all others must hold the prompt's bytes."""
        self._wait(lambda: self._has_ended(request_id, set()), timeout_s)
        request = self.requests.pop(request_id)
        failed = self.worker.get_block_ids_with_load_errors()
        self.check(request.prompt, request.blocks, failed)
        self.give_back(request.blocks)
        return len(failed)

    def retrieve(self, family: int, chunks: int, timeout_s: float = DRAIN_S) -> int:
        return self.end_retrieve(self.begin_retrieve(family, chunks), timeout_s)

    def _has_ended(self, request_id: str, reported: set[str]) -> bool:
        stored, loaded = self.worker.get_finished(reported)
        self.ended_alone |= (stored or set()) | (loaded or set())
        return request_id in self.ended_alone

    def under_way(self) -> list[str]:
        """Ids of what has been begun and has not ended, by looking once."""
        self.worker.mq_client.pump()
        transfers = [*self.worker.store_futures.items(), *self.worker.retrieve_futures.items()]
        return sorted(request_id for request_id, futures in transfers if not all(f.done() for f in futures))

    def reaches_server(self) -> bool:
        """Whether scheduler and worker get answers now."""
        answers = [adapter.mq_client.ask(wire.Noop(), deadline_s=1.0) for adapter in (self.scheduler, self.worker)]
        try:
            return [answer.result(1.0) for answer in answers] == ["ok", "ok"]
        except KVDepotError:
            return False

    def is_cut_off(self) -> bool:
        """Whether scheduler and worker have met that they have no connection."""
        return all(_met_a_cut(adapter.mq_client) for adapter in (self.scheduler, self.worker))

    def server_status(self) -> dict[str, Any]:
        """What `kvdepot status` shows, for where only this process can see the server."""
        answer: dict[str, Any] = self.worker.mq_client.ask(wire.GetStatus()).result(10.0)
        return answer

    def hits(self, families: list[int], chunks: int) -> int:
        """Retrieve what is there of these prompts and check it; how many chunks were there."""
        total = 0
        for family in families:
            hit = self.lookup(family, chunks)
            if hit:
                total += hit - self.retrieve(family, hit) // self.per_chunk
        return total

    def _wait(self, done: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"not done within {timeout_s} s"
            time.sleep(0.0005)

    # -- traffic

    def step(
        self,
        families: int = 40,
        chunks: int = 6,
        running: int = 6,
        preempt: float = 0.02,
        abort: float = 0.02,
        admit: bool = True,
    ) -> None:
        """One engine step: admit, look up, load, compute, store, finish; now and then preempt or abort."""
        self.counters["steps"] += 1
        if admit and len(self.requests) < running:
            self._admit(self.random.randrange(families), self.random.randint(1, chunks))
        for request in list(self.requests.values()):
            if request.state is State.LOOKING_UP:
                self._start(request)
            elif request.state is State.RUNNING:
                request.steps_left -= 1
                if request.steps_left <= 0:
                    self._finish(request)
        stored, loaded = self.worker.get_finished(set(self._reported()))
        failed = self.worker.get_block_ids_with_load_errors()
        for request_id in loaded or ():
            self._loaded(self.requests[request_id], failed)
        for request_id in stored or ():
            request = self.requests.pop(request_id, None)
            assert request is not None and request.state is State.STORING, f"{request_id} was reported, not waited for"
            self.check(request.prompt, request.blocks)
            self.give_back(request.blocks)
            self.counters["requests"] += 1
        if self.requests and self.random.random() < abort:
            self._abort(self.random.choice(list(self.requests.values())))
        if self.random.random() < preempt:
            self._preempt()

    def _reported(self) -> list[str]:
        """What vLLM reports finished in this step; now and then again what it has reported before."""
        reported, self.ended = self.ended, []
        if self.random.random() < 0.2:
            reported += [r.id for r in self.requests.values() if r.state is State.STORING]
            reported += list(self.worker.previously_finished)[-2:]
        return reported

    def _admit(self, family: int, chunks: int) -> None:
        request = Request(self.new_id("r"), family, self.prompt(family, chunks))
        self.requests[request.id] = request
        self._look_up(request)

    def _look_up(self, request: Request) -> None:
        request.state = State.LOOKING_UP
        self.scheduler.maybe_submit_lookup_request(request.id, token_ids=request.prompt.tokens)

    def _start(self, request: Request) -> None:
        tokens = self.scheduler.check_lookup_result(request.id)
        if tokens is None or (blocks := self.take(len(request.prompt.keys))) is None:
            return
        request.blocks = blocks
        request.cached = tokens // self.chunk_size
        self.counters["looked_up_chunks"] += len(blocks) // self.per_chunk
        self.counters["hit_chunks"] += request.cached
        if request.cached:
            request.state = State.LOADING
            self.worker.submit_retrieve_request(
                request.id, self.op(request.prompt, request.blocks, 0, request.cached), None
            )
        else:
            self._compute(request, set())

    def _loaded(self, request: Request, failed: set[int]) -> None:
        mine = failed.intersection(request.blocks)
        self.counters["failed_blocks"] += len(mine)
        loaded = request.blocks[: request.cached * self.per_chunk]
        self.check(request.prompt, loaded, mine)
        self.counters["loaded_blocks"] += len(loaded) - len(mine)
        if request.aborted:
            self._drop(request)
            self.give_back(request.blocks)
        else:
            self._compute(request, mine)

    def _compute(self, request: Request, failed: set[int]) -> None:
        loaded = request.cached * self.per_chunk
        for i, block in enumerate(request.blocks):
            if i >= loaded or block in failed:
                self.write(block, request.prompt.keys[i])
        self.scheduler.cleanup_lookup_result(request.id)
        self.scheduler.end_session(request.id)
        first = 0 if failed else request.cached
        if first * self.per_chunk < len(request.blocks):
            self.worker.submit_store_request(request.id, self.op(request.prompt, request.blocks, first), None)
        request.state = State.RUNNING
        request.steps_left = self.random.randint(0, 4)

    def _finish(self, request: Request) -> None:
        request.state = State.STORING
        self.ended.append(request.id)

    def _drop(self, request: Request) -> None:
        del self.requests[request.id]
        self.scheduler.cleanup_lookup_result(request.id)
        self.scheduler.end_session(request.id)

    def _abort(self, request: Request) -> None:
        self.counters["aborts"] += 1
        match request.state:
            case State.LOOKING_UP:
                self._drop(request)
            case State.LOADING:
                request.aborted = True
            case State.RUNNING:
                self._finish(request)

    def _preempt(self) -> None:
        """All blocks of a running request are wanted by others now: the request starts over later."""
        running = [request for request in self.requests.values() if request.state is State.RUNNING]
        if not running:
            return
        request = self.random.choice(running)
        self.counters["preemptions"] += 1
        self.worker.give_up_stores({request.id}, self.random.choice((0, PREEMPTION_S)))
        self.give_back(request.blocks)
        request.blocks = []
        self._look_up(request)

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Step until every request has ended."""
        deadline = time.monotonic() + timeout_s
        while self.requests:
            assert time.monotonic() < deadline, f"never ended: {list(self.requests.values())!r:.2000}"
            self.step(admit=False, preempt=0, abort=0)
            time.sleep(0.001)

    def run(self, steps: int, **options: Any) -> dict[str, Any]:
        for _ in range(steps):
            self.step(**options)
            time.sleep(PACE_S)
        self.drain()
        return self.stats()

    def stats(self) -> dict[str, Any]:
        """What has happened since the last call."""
        counters, self.counters = dict(self.counters), Counter()
        return {"steps": 0, "wrong": self.wrong, "worker": dict(self.worker.counters), **counters}

    def files(self) -> list[str]:
        """Names of this engine's files in /dev/shm, which show that it lives."""
        return [adapter.mq_client.liveness.name for adapter in (self.scheduler, self.worker)]

    def close(self) -> None:
        """The worker's shutdown, then the scheduler's; safe twice."""
        self.worker.shutdown()
        self.scheduler.shutdown()
