"""One toy engine of the soak: an engine's scheduler and workers on the public adapters, without a model.

    python soak_engine.py URL MODEL WORLD_SIZE MODE SEED

soak.py starts and kills it. It runs requests like an engine: look up, load what is cached, compute and store the rest,
free the blocks; sometimes it aborts, preempts, registers again or reconnects. The bytes of a block are a function of
model, rank and the tokens up to the block's end. Every byte is checked after a retrieve, and again before the blocks
are freed, because until then nobody may write them. MODE `token` or `hash` selects the kind of keys.

It writes a JSON line per second to stdout, and reads commands from stdin: `pause` (finish running requests, start no
new ones), `resume`, `quit`. If the soak is killed, stdin closes, which ends the engine too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zmq

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire

BLOCK_TOKENS = 16
BLOCKS = 192
WORDS = 512  # uint64 per block in each of the two layers
MAX_CHUNKS = 8
RUNNING = 6
STEP_S = 1.5
"""A step that takes longer is a failure, because an engine must never wait for a server."""
SLOW_S = 3.0
LATE_S = 20.0
"""A lookup, load or end that takes longer is a failure: faults and the deadlines after them are shorter."""

Words = npt.NDArray[np.uint64]


class Event:
    """An event of the device that completes a little later."""

    def __init__(self, after_s: float) -> None:
        self._at = time.monotonic() + after_s

    def query(self) -> bool:
        return time.monotonic() >= self._at


class Memory:
    """One rank's paged KV: a layer of whole blocks, and one with K and V apart."""

    def __init__(self) -> None:
        self.tensors = {
            "whole": torch.zeros((BLOCKS, WORDS), dtype=torch.int64),
            "apart": torch.zeros((2, BLOCKS, WORDS // 2), dtype=torch.int64),
        }
        self._steps = np.arange(WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def _expected(self, seed: int) -> Words:
        return self._steps + np.uint64(seed)

    def _views(self) -> tuple[Words, Words]:
        # Made anew each time: sharing has moved the storage.
        return self.tensors["whole"].numpy().view(np.uint64), self.tensors["apart"].numpy().view(np.uint64)

    def fill(self, block: int, seed: int) -> None:
        whole, apart = self._views()
        whole[block] = self._expected(seed)
        apart[:, block] = ~self._expected(seed).reshape(2, -1)

    def holds(self, block: int, seed: int) -> bool:
        whole, apart = self._views()
        expected = self._expected(seed)
        return bool((whole[block] == expected).all() and (apart[:, block] == ~expected.reshape(2, -1)).all())


@dataclass
class Request:
    name: str
    tokens: list[int]
    seeds: list[int]  # one a block, before the rank enters
    hashes: list[bytes]  # the engine's own, one a block
    state: str = "lookup"  # -> loading -> running -> ending, or from anywhere to ending
    blocks: list[int] = field(default_factory=list)
    loaded: int = 0  # blocks that the depot gives
    loading: set[int] = field(default_factory=set)  # ranks
    ending: set[int] = field(default_factory=set)  # ranks that have not given the blocks back
    answered: bool = False  # the lookup
    told: bool = False  # the workers have heard that it has finished
    computed: bool = False
    aborted: bool = False
    since: float = field(default_factory=time.monotonic)


class Engine:
    def __init__(self, url: str, model: str, world_size: int, mode: str, seed: int) -> None:
        self.url, self.model, self.world_size, self.mode = url, model, world_size, mode
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memories = [Memory() for _ in range(world_size)]
        self.free = list(range(BLOCKS))
        self.requests: dict[str, Request] = {}
        self.failed: list[set[int]] = [set() for _ in range(world_size)]
        self.returned: list[set[str]] = [set() for _ in range(world_size)]  # by rank: told as finished in the last call
        self.paused = False
        self.resting = False
        self.reconnecting = False
        self.awaited: set[int] = set()  # ranks whose adapter has waited for an event: from then on it has a thread
        self.serial = 0
        self.context: zmq.Context[Any] = zmq.Context()
        self.connect()

    # -- connecting

    def connect(self) -> None:
        while True:
            try:
                self._connect()
                return
            except KVDepotError as exc:
                self.counts["connects_failed"] += 1
                say(note=f"not connected: {exc}")
                time.sleep(0.1)

    def _connect(self) -> None:
        opened: list[Any] = []
        try:
            for rank in range(-1, self.world_size):
                side = LMCacheMPSchedulerAdapter if rank < 0 else LMCacheMPWorkerAdapter
                self.awaited.clear()
                opened.append(side(self.url, self.context, self.model, self.world_size, max(rank, 0), BLOCK_TOKENS))
                say(liveness_file=opened[-1].mq_client.liveness.name)
            self.scheduler: LMCacheMPSchedulerAdapter = opened[0]
            self.workers: list[LMCacheMPWorkerAdapter] = opened[1:]
            for worker, memory in zip(self.workers, self.memories, strict=True):
                worker.register_kv_caches(memory.tensors, block_axes=[0, 1])
                # As after days: what an adapter remembers of finished requests has reached its bound.
                worker.get_finished({f"old-{i}" for i in range(70_000)})
        except KVDepotError:
            for adapter in opened:
                adapter.shutdown()
            raise

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    # -- prompts

    def prompt(self) -> tuple[list[int], list[int], list[bytes]]:
        """Tokens, and a seed and an engine hash for each block. All engines draw from the same, changing families."""
        age = int(time.time() / 15)
        family = random.Random((age - int(self.random.expovariate(0.5))) * 16 + self.random.randrange(8))
        blocks = self.random.randint(1, MAX_CHUNKS * self.scheduler.blocks_in_chunk)
        shared = blocks if self.random.random() < 0.5 else self.random.randint(0, blocks)
        tokens = [family.getrandbits(31) for _ in range(shared * BLOCK_TOKENS)]
        tokens += [self.random.getrandbits(31) for _ in range((blocks - shared) * BLOCK_TOKENS)]
        seeds, hashes, digest = [], [], self.model.encode()
        for start in range(0, len(tokens), BLOCK_TOKENS):
            digest = blake2b(digest + str(tokens[start : start + BLOCK_TOKENS]).encode(), digest_size=16).digest()
            hashes.append(digest)
            seeds.append(int.from_bytes(digest[:7], "little"))
        return tokens, seeds, hashes

    def seed(self, request: Request, index: int, rank: int) -> int:
        return request.seeds[index] * 8 + rank

    # -- the step

    def step(self) -> bool:
        """One engine step; returns whether anything changed."""
        begun, before = time.monotonic(), sum(self.counts.values())
        self.counts["steps"] += 1
        self.resting = self.paused and len(self.awaited) == self.world_size
        if not (self.resting or self.reconnecting) and len(self.requests) < RUNNING:
            self.begin()
        for request in list(self.requests.values()):
            if request.state == "lookup":
                self.look_up(request)
            elif request.state == "running":
                self.run(request)
            if not request.aborted and self.random.random() < 0.005:
                self.abort(request)
        self.hear()
        if (took := time.monotonic() - begun) > STEP_S:
            self.wrong.append(f"a step took {took:.1f} s")
        if not self.requests and self.reconnecting:
            self.counts["reconnects"] += 1
            self.shutdown()
            self.workers = []  # what they remember goes before the new ones begin to
            self.returned = [set() for _ in range(self.world_size)]
            self.connect()
            self.reconnecting = False
        elif self.random.random() < 0.0003:
            self.reconnecting = True
        elif self.random.random() < 0.0005:
            self.register_again()
        return sum(self.counts.values()) > before + 1

    def begin(self) -> None:
        self.serial += 1
        request = Request(f"r{self.serial}", *self.prompt())  # engines number alike, as offline ones do
        if self.random.random() < 0.1:
            request.name = f"{os.getpid()}-{self.serial}"
        self.requests[request.name] = request
        self.submit_lookup(request)

    def submit_lookup(self, request: Request) -> None:
        if self.mode == "token":
            self.scheduler.maybe_submit_lookup_request(request.name, token_ids=request.tokens)
        else:
            self.scheduler.maybe_submit_lookup_request(request.name, block_hashes=request.hashes)
        self.counts["lookups"] += 1

    def look_up(self, request: Request) -> None:
        tokens = self.scheduler.check_lookup_result(request.name)
        if tokens is None:
            return
        if not request.answered:
            self.note_time(request, "the lookup")
            request.answered = True
        if len(request.seeds) > len(self.free):
            return
        self.random.shuffle(self.free)
        request.blocks = [self.free.pop() for _ in request.seeds]
        request.loaded = tokens // BLOCK_TOKENS
        self.counts["hit_blocks"] += request.loaded
        for rank, memory in enumerate(self.memories):
            for block in request.blocks:
                memory.fill(block, self.random.getrandbits(63))  # what another request left there
            if request.loaded:
                self.transfer(request, rank, 0, request.loaded, is_store=False)
                request.loading.add(rank)
        request.state = "loading"
        request.since = time.monotonic()
        if not request.loading:
            self.compute(request)

    def transfer(self, request: Request, rank: int, first: int, end: int, *, is_store: bool) -> None:
        """Submit blocks `[first, end)` of a request, whole chunks."""
        worker = self.workers[rank]
        event = None
        if rank not in self.awaited or self.random.random() < 0.3:
            event = Event(0.001 + self.random.random() * 0.01)
            self.awaited.add(rank)
        blocks = request.blocks[first:end]
        if self.mode == "token":
            op = LoadStoreOp(blocks, request.tokens, start=first * BLOCK_TOKENS, end=end * BLOCK_TOKENS)
        else:
            op = LoadStoreOp(blocks, block_hashes=request.hashes[first:end])
        submit = worker.submit_store_request if is_store else worker.submit_retrieve_request
        submit(request.name, op, event)
        self.counts["stores" if is_store else "retrieves"] += 1

    def note_time(self, request: Request, what: str) -> None:
        took = time.monotonic() - request.since
        request.since = time.monotonic()
        if took > SLOW_S:
            say(note=f"{what} took {took:.1f} s")
        if took > LATE_S:
            self.wrong.append(f"{what} of {request.name} took {took:.1f} s")

    def loaded(self, request: Request) -> None:
        """The load has ended on every rank: the blocks are filled, or known to have failed."""
        self.note_time(request, "the load")
        for rank, memory in enumerate(self.memories):
            for index in range(request.loaded):
                block = request.blocks[index]
                if block in self.failed[rank]:
                    self.failed[rank].discard(block)
                    self.counts["failed_blocks"] += 1
                    memory.fill(block, self.seed(request, index, rank))
                elif memory.holds(block, self.seed(request, index, rank)):
                    self.counts["checked_blocks"] += 1
                else:
                    self.wrong.append(f"{request.name}: block {index} of rank {rank} was loaded wrong")
        if request.aborted:
            request.state = "ending"
        else:
            self.compute(request)

    def compute(self, request: Request) -> None:
        for rank, memory in enumerate(self.memories):
            for index in range(request.loaded, len(request.blocks)):
                memory.fill(request.blocks[index], self.seed(request, index, rank))
        request.computed = True
        request.state = "running"
        per_chunk = self.scheduler.blocks_in_chunk
        whole = len(request.blocks) - len(request.blocks) % per_chunk
        for rank in range(self.world_size):
            # Now and then all of it, known chunks too, and in two halves.
            first = request.loaded if self.random.random() < 0.8 else 0
            middle = (first + whole) // 2 // per_chunk * per_chunk if self.random.random() < 0.3 else first
            for start, end in ((first, middle), (middle, whole)):
                if start < end:
                    self.transfer(request, rank, start, end, is_store=True)

    def run(self, request: Request) -> None:
        """A step of decoding: the request continues, ends, or is preempted."""
        chance = self.random.random()
        if chance < 0.02:
            for worker in self.workers:
                worker.give_up_stores({request.name}, self.random.choice((0.0, 0.001, 0.05)))
            self.counts["preempted"] += 1
            self.give_back(request)
            # It starts over under its name, while its old stores may still be under way.
            again = Request(request.name, request.tokens, request.seeds, request.hashes)
            self.requests[request.name] = again
            self.scheduler.cleanup_lookup_result(request.name)
            self.submit_lookup(again)
        elif chance < 0.3:
            request.state = "ending"

    def abort(self, request: Request) -> None:
        """Abort a request; loads in progress end first."""
        request.aborted = True
        self.counts["aborted"] += 1
        if request.state != "loading":
            request.state = "ending"

    def hear(self) -> None:
        """Process the result of get_finished: loads that ended, and requests whose blocks can be freed."""
        fresh = set()
        for name, request in self.requests.items():
            if request.state == "ending" and not request.told:
                fresh.add(name)
                request.told = True
                request.since = time.monotonic()
                request.ending = set(range(self.world_size))
        for rank, worker in enumerate(self.workers):
            # Asynchronous scheduling repeats a report in the calls that directly follow an id's return.
            again = {name for name in sorted(self.returned[rank]) if self.random.random() < 0.3}
            finished, loaded = worker.get_finished(fresh | again)
            self.returned[rank] = again | set(finished or ())
            self.failed[rank] |= worker.get_block_ids_with_load_errors()
            for name in loaded or ():
                request = self.requests.get(name)
                if request is None or rank not in request.loading:
                    self.wrong.append(f"a load of {name} ended that nobody waits for")
                else:
                    request.loading.discard(rank)
            for name in finished or ():
                request = self.requests.get(name)
                if request is None or rank not in request.ending:
                    self.wrong.append(f"{name} was given back twice")
                else:
                    request.ending.discard(rank)
        for request in list(self.requests.values()):
            if request.state == "loading" and not request.loading:
                self.loaded(request)
            elif request.told and not request.ending:
                self.note_time(request, "the end")
                self.end(request)

    def end(self, request: Request) -> None:
        if request.computed:
            for rank, memory in enumerate(self.memories):
                for index, block in enumerate(request.blocks):
                    if not memory.holds(block, self.seed(request, index, rank)):
                        self.wrong.append(f"{request.name}: block {index} of rank {rank} changed under the request")
        self.give_back(request)
        self.scheduler.cleanup_lookup_result(request.name)
        self.scheduler.end_session(request.name)
        self.counts["done"] += 1
        del self.requests[request.name]

    def give_back(self, request: Request) -> None:
        for block in request.blocks:
            for memory in self.memories:
                memory.fill(block, 1)
        self.free += request.blocks
        request.blocks = []

    def register_again(self) -> None:
        """Unregister and register while requests are in progress, which are answered first, or fail."""
        rank = self.random.randrange(self.world_size)
        worker = self.workers[rank]
        try:
            worker.mq_client.ask(wire.Unregister(worker.instance_id)).result()
            self.counts["registered_again"] += 1
        except KVDepotError as exc:
            say(note=f"not unregistered: {exc}")
        while True:
            try:
                worker.register_kv_caches(self.memories[rank].tensors, block_axes=[0, 1])
                return
            except KVDepotError:
                self.counts["registrations_failed"] += 1
                time.sleep(0.1)  # the server is being started again


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    url, model, world_size, mode, seed = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    orders: list[str] = []

    def listen() -> None:
        for line in sys.stdin:
            orders.append(line.strip())
        orders.append("quit")

    threading.Thread(target=listen, name="soak-orders", daemon=True).start()
    engine = Engine(url, model, int(world_size), mode, int(seed))
    next_report = 0.0
    while True:
        order = orders.pop(0) if orders else ""
        if order == "quit":
            break
        if order:
            engine.paused = order == "pause"
        if not engine.step():
            time.sleep(0.002)
        now = time.monotonic()
        if now >= next_report or engine.wrong:
            next_report = now + 1.0
            held = sum(len(request.blocks) for request in engine.requests.values())
            if len(engine.free) + held != BLOCKS or len(set(engine.free)) != len(engine.free):
                engine.wrong.append(f"{len(engine.free)} blocks free, {held} held of {BLOCKS}")
            say(counts=engine.counts, wrong=engine.wrong[:4], idle=engine.resting and not engine.requests)
            engine.wrong.clear()
    engine.shutdown()
    engine.context.term()
    say(ended=True)


if __name__ == "__main__":
    main()
