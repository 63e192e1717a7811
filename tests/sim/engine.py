"""A simulated engine: paged blocks, an allocator and requests.

It drives the real adapters, as vLLM's connector does or as bare callers do. One process with a scheduler and its ranks,
each with a client of its own. It knows what every block must contain, and says so in `Memory.tags` and `Memory.lent`;
the moment it gives a block up, somebody else's bytes are in it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.client.contract import pack_block_ids
from kvdepot.client.transfer import Transfer
from kvdepot.errors import KVDepotError
from kvdepot.keys import salt_tag
from kvdepot.protocol import wire
from tests.sim.content import CHUNK_TOKENS, MAX_TOKENS, Memory, Model, Stream, chain_of, keys_of, seeds_of, tokens_of
from tests.sim.groups import Hybrid, needed
from tests.sim.host import Client, Pinned
from tests.sim.world import Process

if TYPE_CHECKING:
    from tests.sim.run import Run

PREEMPTION_S = 0.05
MODES = ("tokens", "hashes", "shards")


class State(enum.Enum):
    ASKED = "asked"  # its lookup is under way
    MATCHED = "matched"  # answered; waits for blocks
    LOADING = "loading"
    RUNNING = "running"
    ENDING = "ending"  # finished; its stores are not


@dataclass(eq=False)
class Request:
    id: str
    stream: Stream
    prompt: int  # tokens
    length: int  # tokens when it ends
    state: State = State.ASKED
    done: int = 0  # tokens computed or loaded
    matched: int = 0  # chunks
    saved: int = 0  # chunks from the start, in the depot or on their way
    blocks: list[int] = field(default_factory=list)
    loading: set[int] = field(default_factory=set)  # ranks whose retrieve is under way
    load_first: int = 0  # first block that the load brings
    load_end: int = 0
    failed: int = 0  # first block that failed on any rank
    storing: set[int] = field(default_factory=set)  # ranks that have yet to report its stores
    aborted: bool = False
    pinned: Pinned | None = None
    asked: float = 0.0  # when its lookup was
    waits: int = 0


class Engine:
    """One life of an engine, from its start to its end. Engines of hybrid models are in hybrid.py."""

    new_request: type[Request] = Request

    def __init__(self, host: Run, name: str, model: Model | Hybrid, mode: str, num_blocks: int) -> None:
        self.host = host
        self.world = host.world
        self.name = name
        self.model = model
        self.groups = model.groups if isinstance(model, Hybrid) else (model,)
        self.lead: Model = self.groups[0]
        self.mode = mode
        self.alive = True
        self.leaving = False  # no new requests
        self.may_go = False
        self.serving = False  # all its ranks are registered
        self.pause_s = 0.0
        self.requests: dict[str, Request] = {}
        self.clients: list[Client] = []
        self.memories: list[Memory] = []
        self.scheduler: Any = None
        self.workers: list[Any] = []
        self._free = list(range(num_blocks))
        self._num_blocks = num_blocks
        self._arrived = 0
        self._pins: dict[str, int] = {}  # by name: how often it was pinned or unpinned
        self._named: set[Stream] = set()  # whose keys the oracle knows
        self._finished: set[str] = set()  # to be told to the workers' next get_finished
        self._reported: list[set[str]] = []  # per rank: ids it has reported as finished
        self.process = Process(host.world, name, self._main)

    def __repr__(self) -> str:
        return f"<Engine {self.name} {self.model.name} {self.mode}, {len(self.requests)} requests>"

    # -- its life

    def _client(self, part: str) -> Client:
        client = Client(self.host, self.process, f"{self.name}.{part}")
        self.clients.append(client)
        return client

    def _main(self) -> None:
        try:
            self._start()
        except KVDepotError as exc:
            self.world.note(f"{self.name} cannot start: {exc}")
            self.world.counters["engine_could_not_start"] += 1
            self.end()
            return
        self.serving = True
        if self.host.stores and self.world.chance(0.5):
            self.store_elsewhere(4)
        waits = 0
        while not (self.may_go and not self.requests):
            self._step()
            # Steps in which all wait for the depot get longer, or a server that is stopped would cost thousands.
            busy = any(request.state in (State.MATCHED, State.RUNNING) for request in self.requests.values())
            waits = 0 if busy else waits + 1
            self.process.sleep(self.pause_s or min(0.5, self.world.spread(0.002, 0.03) * (1 + waits)))
            self.pause_s = 0.0
        self._shut_down()
        self.world.note(f"{self.name} has shut down")
        self.world.counters["engine_shut_down"] += 1
        self.end()

    def _start(self) -> None:
        """Connect and register. Raises KVDepotError."""
        if self.world.seed % 8 == 3:
            self._wait_for_server()
        model = self.lead
        place: Any = ("sim://", None, model.name, model.world_size)
        self.scheduler = LMCacheMPSchedulerAdapter(*place, 0, model.block_tokens, client=self._client("s"))
        for rank in range(model.world_size):
            worker = LMCacheMPWorkerAdapter(*place, rank, model.block_tokens, client=self._client(f"r{rank}"))
            memory = Memory(model, rank, self._num_blocks, f"{self.name}-kv{rank}")
            self._add_rank(worker, [memory])
            worker.register_layout(memory.layout)

    def _wait_for_server(self) -> None:
        """As vLLM's connector: its client is there first, however late the server comes."""
        client = self._client("link")
        self.world.counters["engine_connected_late"] += self.host.server is None
        answer = client.ask(wire.ChunkSize(), deadline_s=None)
        client.wait(answer.query, float("inf"))
        client.close()

    def _add_rank(self, worker: Any, memories: list[Memory]) -> None:
        worker.instance_id = self.world.random.getrandbits(62)
        for memory in memories:
            self.host.memories[memory.name] = memory
        self.memories += memories
        self.workers.append(worker)
        self._reported.append(set())

    def _shut_down(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    def end(self) -> None:
        """It is gone, whatever the reason: the kernel takes its locks and connections, torch its files."""
        self.alive = self.serving = False
        for request in self.requests.values():
            self._unpin(request)
        for memory in self.memories:
            memory.dead = True
            self.host.memories.pop(memory.name, None)
        for client in self.clients:
            if not client._closed:
                # Processes of one engine do not die in the same instant.
                self.world.after(0.02 * self.world.random.random(), client.gone)

    def clear(self) -> None:
        """Clear what nothing holds, without waiting."""
        self.scheduler.client.ask(wire.Clear(self.model.name))

    def store_elsewhere(self, streams: int) -> None:
        """Another host, with an engine like this one, stores the heads of some prompts in the tiers they share."""
        world = self.world
        for _ in range(streams):
            stream, store = self._draw_stream(), world.random.choice(self.host.stores)
            self._name_chunks(stream)
            keys = self._keys(stream)[: world.random.randint(1, 6)]
            for i, key in enumerate(keys):
                for memory in self.memories:
                    if i in needed(memory.model.reach, len(keys)):
                        part = store.put(memory, key, salt_tag(stream.salt), _seeds_of_chunk(memory.model, stream, i))
                        self.host.forgettings.saved(part, elsewhere=True)
                        world.counters["stored_elsewhere"] += 1

    def forget(self) -> None:
        """Some of all that was ever stored, without waiting."""
        what = self.world.random.choice(["model", "model", "salt", "all", "all"])
        model, salt = self.model.name if what == "model" else "", salt_tag("tenant") if what == "salt" else b""
        self.world.note(f"{self.name} forgets {what}")
        self.scheduler.client.ask(wire.Forget(model, salt))

    def pin(self) -> None:
        """Pin a prompt's head by name, whatever was pinned under it before; or unpin that. Without waiting."""
        world, model, client = self.world, self.lead, self.scheduler.client
        if self.mode == "hashes":
            return  # what is pinned by name is chained
        name = f"{self.name}-p{world.random.randrange(2)}"
        self.host.named.pop(name, None)
        self._pins[name] = number = self._pins.get(name, 0) + 1
        if world.chance(0.2):
            client.ask(wire.EndLease(name), lambda _: self._unpinned(name, number))
            return
        streams = [request.stream for request in self.requests.values()]
        stream = world.random.choice(streams) if streams and world.chance(0.7) else self._draw_stream()
        asked = world.now
        self._name_chunks(stream)
        keys = self._keys(stream)[: world.random.randint(1, 6)]
        ttl_s = world.random.choice([0, 0, 1, 30])

        def hear(answer: tuple[bytes, int]) -> None:
            boot, matched = answer
            server = self.host.server
            forgotten = (
                server is not None and server.boot == boot and server.depot.leases._find("", name) is None
            )  # while the answer was on its way
            if matched and self._pins[name] == number and not forgotten:
                world.counters["pinned_by_name"] += 1
                ends = asked + ttl_s if ttl_s else float("inf")
                self.host.named[name] = Pinned(boot, self.model, self._parts(keys[:matched]), asked, ends)

        salt = salt_tag(stream.salt)
        chunk = model.blocks_in_chunk, b"".join(keys), salt, model.chunk_tokens, ttl_s
        client.ask(wire.Lease(name, "retain", model.name, model.world_size, *chunk), hear)

    def _unpinned(self, name: str, number: int) -> None:
        server = self.host.server
        self.world.counters["unpinned"] += 1
        if server is not None and server.serving and self._pins[name] == number:
            assert server.depot.leases._find("", name) is None, f"{name} was ended, and is still leased"

    def kill(self) -> None:
        self.process.kill()
        self.end()

    # -- steps

    def _breathe(self) -> None:
        """A point at which it can be killed or stopped, and the world goes on."""
        if self.world.chance(0.1):
            self.process.sleep(0.0005)

    def _step(self) -> None:
        self.host.steps_taken += 1
        if not self.leaving and len(self.requests) < 6 and self.world.chance(0.5):
            self._arrive()
        for request in list(self.requests.values()):
            if request.id not in self.requests:
                continue
            if request.state is not State.ENDING and not request.aborted and self.world.chance(self._abort_chance()):
                self.world.counters[f"aborted_{request.state.value}"] += 1
                self._finish(request, aborted=True)
                continue
            match request.state:
                case State.ASKED:
                    self._await_answer(request)
                case State.MATCHED:
                    self._allocate(request)
                case State.RUNNING:
                    self._run(request)
                case _:
                    pass
            self._breathe()
        self._hear()

    def _abort_chance(self) -> float:
        return 0.3 if self.leaving else 0.01

    def _arrive(self) -> None:
        random = self.world.random
        self._arrived += 1
        stream = self._draw_stream()
        prompt = random.randint(1, 80)
        # Bare callers need ids of their own; the connector's need not be.
        name = f"r{self._arrived}" if self.mode == "shards" else f"{self.name}-{self._arrived}"
        request = self.new_request(name, stream, prompt, min(MAX_TOKENS - 1, prompt + random.randint(1, 30)))
        self._name_chunks(stream)
        self.requests[name] = request
        self._look_up(request)

    def _draw_stream(self) -> Stream:
        random = self.world.random
        salt = random.choice(["tenant", "other"]) if self.mode == "shards" and self.world.chance(0.3) else ""
        return Stream(random.randrange(3), random.randrange(3), salt)

    def _name_chunks(self, stream: Stream) -> None:
        """Tell the oracle what this stream's keys stand for."""
        if stream in self._named:
            return
        self._named.add(stream)
        for i, key in enumerate(self._keys(stream)):
            for memory in self.memories:
                truth = memory.model, _seeds_of_chunk(memory.model, stream, i)
                old = self.host.truth.setdefault((memory.layout.fingerprint, key), truth)
                assert old == truth, f"one key for two contents: {key.hex()}"

    def _keys(self, stream: Stream) -> list[bytes]:
        """Of the stream's chunks."""
        return keys_of(self.lead, stream, self.mode == "hashes")

    def _parts(self, keys: list[bytes]) -> list[tuple[int, bytes]]:
        """What of a prompt with these keys resuming at its end needs: groups and keys."""
        return [(group.group, keys[i]) for group in self.groups for i in needed(group.reach, len(keys))]

    def _look_up(self, request: Request) -> None:
        self._submit_lookup(request)
        request.asked = self.world.now
        request.state = State.ASKED
        request.waits = 0

    def _submit_lookup(self, request: Request) -> None:
        scheduler, stream = self.scheduler, request.stream
        if self.mode == "tokens":
            tokens = tokens_of(stream)[: request.prompt]
            scheduler.maybe_submit_lookup_request(request.id, token_ids=tokens)
            if self.world.chance(0.2):
                scheduler.maybe_submit_lookup_request(request.id, token_ids=tokens)
        elif self.mode == "hashes":
            block_hashes = seeds_of(self.model, stream)[: request.prompt // self.model.block_tokens]
            scheduler.maybe_submit_lookup_request(request.id, block_hashes=block_hashes)
        else:
            chunks = request.prompt // CHUNK_TOKENS
            hashes = chain_of(stream).slice(0, chunks)
            scheduler.submit_lookup(request.id, hashes, self.model.world_size, salt=salt_tag(stream.salt))

    def _answer(self, request: Request, wait_s: float = 0.0) -> int | None:
        """The tokens that the depot has; None: it has not answered."""
        if wait_s:
            return self.scheduler.wait_lookup_result(request.id, wait_s)
        return self.scheduler.check_lookup_result(request.id)

    def _forget_lookup(self, request: Request) -> None:
        self.scheduler.cleanup_lookup_result(request.id)

    def _await_answer(self, request: Request) -> None:
        if self.world.chance(0.5):
            asked = self.scheduler._lookups.get(request.id)
            tokens = self._answer(request, 0.0005)
            self.world.counters["lookup_asked_again"] += self.scheduler._lookups.get(request.id) is not asked
        else:
            tokens = self._answer(request)
        request.waits += 1
        if tokens is None:
            if request.waits < 3 or self.world.chance(0.7):
                return
            self.world.counters["lookup_not_awaited"] += 1
            tokens = 0
        request.matched = tokens // self.lead.chunk_tokens
        request.saved = request.matched
        request.state = State.MATCHED
        full = request.prompt // self.lead.chunk_tokens
        self.world.counters["hit" if 0 < request.matched == full else "partial_hit" if request.matched else "miss"] += 1
        if request.matched:
            parts = self._parts(self._keys(request.stream)[: request.matched])
            boot = self.scheduler.client.lookup_boots[request.id]
            request.pinned = Pinned(boot, self.model, parts, request.asked)
            self.host.pins.append(request.pinned)
            if self.host.server is not None and self.host.server.serving:
                self.host.check_pins(self.host.server)
        if request.matched and self.host.pause_with_pins(self):
            self.world.counters["pause_between_lookup_and_retrieve"] += 1

    def _unpin(self, request: Request) -> None:
        if request.pinned is not None:
            self.host.pins.remove(request.pinned)
            request.pinned = None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.model.block_tokens)

    def _take_blocks(self, request: Request, count: int, preempts: float) -> bool:
        """Blocks for a request; others are preempted for it, so often, if need be."""
        while len(self._free) < count:
            others = [r for r in self.requests.values() if r.state is State.RUNNING and r is not request]
            if not others or not self.world.chance(preempts):
                return False
            self._preempt(self.world.random.choice(others))
        for _ in range(count):
            # The last freed first: whoever still touches it is found out.
            request.blocks.append(self._free.pop())
        return True

    def _allocate(self, request: Request) -> None:
        needed = self._blocks_for(request.prompt)
        if needed > self._num_blocks - 2:
            self._finish(request, aborted=True)
            return
        if not self._take_blocks(request, needed, 0.1):
            return
        model, seeds = self.model, seeds_of(self.model, request.stream)
        per_chunk = model.blocks_in_chunk
        # Sometimes the engine has the head in its own cache. A bare caller cannot say where in a chunk to begin.
        local = self.world.random.randint(0, needed - 1) if self.world.chance(0.2) else 0
        if self.mode != "shards":
            local -= local % per_chunk
        for memory in self.memories:
            for i in range(local):
                memory.write(request.blocks[i], seeds[i])
        request.done = local * model.block_tokens
        if request.matched * per_chunk <= local:
            request.state = State.RUNNING
            return
        first, skip = divmod(local, per_chunk)
        self._load(request, first, request.matched, skip)

    def _load(self, request: Request, first: int, end: int, skip: int) -> None:
        per_chunk = self.model.blocks_in_chunk
        seeds = seeds_of(self.model, request.stream)
        request.state = State.LOADING
        request.load_first, request.load_end = first * per_chunk + skip, end * per_chunk
        request.failed = request.load_end
        self.world.note(f"{self.name} loads {request.id} [{first}, {end}) skip {skip}")
        for rank, worker in enumerate(self.workers):
            for i in range(request.load_first, request.load_end):
                self.memories[rank].lent[request.blocks[i]] = seeds[i]
            request.loading.add(rank)
            self._submit(worker, request, first, end, skip, is_store=False)
            self._breathe()
        if self.mode != "shards":
            self._unpin(request)  # pins end with the retrieve, by count

    def _submit(
        self, worker: LMCacheMPWorkerAdapter, request: Request, first: int, end: int, skip: int, is_store: bool
    ) -> None:
        per_chunk = self.model.blocks_in_chunk
        blocks = request.blocks[first * per_chunk : end * per_chunk]
        if self.mode == "shards":
            chain = chain_of(request.stream)
            hashes, ids = chain.slice(first, end), pack_block_ids(blocks)
            transfer = Transfer("", chain.parent(first), first, hashes, ids, skip, salt_tag(request.stream.salt))
            (worker.submit_store if is_store else worker.submit_retrieve)([request.id], [transfer], None)
            return
        if self.mode == "tokens":
            tokens = tokens_of(request.stream)[: end * CHUNK_TOKENS]
            op = LoadStoreOp(blocks, token_ids=tokens, start=first * CHUNK_TOKENS, end=end * CHUNK_TOKENS)
        else:
            seeds = seeds_of(self.model, request.stream)
            op = LoadStoreOp(blocks, block_hashes=seeds[first * per_chunk : end * per_chunk])
        (worker.submit_store_request if is_store else worker.submit_retrieve_request)(request.id, op, None)

    def _run(self, request: Request) -> None:
        """Compute some tokens, store the chunks that are full."""
        random = self.world.random
        if self.world.chance(0.01):
            self._preempt(request)
            return
        if request.done < request.prompt:
            target = request.prompt if self.world.chance(0.6) else random.randint(request.done + 1, request.prompt)
        else:
            target = min(request.length, request.done + random.randint(1, 4))
        more = self._blocks_for(target) - len(request.blocks)
        if more > 0 and not self._take_blocks(request, more, 0.7):
            if self.world.chance(0.2):
                self._preempt(request)
            return
        self._compute(request, target)
        full = request.done // CHUNK_TOKENS
        if full > request.saved:
            self._store(request, full)
        if request.done >= request.length:
            self._finish(request, aborted=False)

    def _compute(self, request: Request, target: int) -> None:
        seeds, size = seeds_of(self.model, request.stream), self.model.block_tokens
        first, end = request.done // size, target // size
        for memory in self.memories:
            for i in range(first, end):
                memory.write(request.blocks[i], seeds[i])
            if target % size:
                memory.fill(request.blocks[end], 0xEE)  # a block that is not full yet
        request.done = target

    def _store(self, request: Request, end: int) -> None:
        self.world.note(f"{self.name} stores {request.id} [{request.saved}, {end})")
        for rank, worker in enumerate(self.workers):
            request.storing.add(rank)
            self._submit(worker, request, request.saved, end, 0, is_store=True)
            self._breathe()
        request.saved = end

    def _preempt(self, request: Request) -> None:
        """Take its blocks for others, at once."""
        self.world.counters["preempted"] += 1
        self.world.note(f"{self.name} preempts {request.id}")
        self._give_up_stores(request)
        self._give_back(request)
        request.storing.clear()
        request.done = request.saved = request.matched = 0
        self._unpin(request)
        self._forget_lookup(request)
        self._look_up(request)

    def _give_up_stores(self, request: Request) -> None:
        before = sum(worker.counters["stores_given_up"] for worker in self.workers)
        for worker in self.workers:
            worker.give_up_stores({request.id}, PREEMPTION_S)
        given_up = sum(worker.counters["stores_given_up"] for worker in self.workers) - before
        self.world.counters["stores_given_up"] += given_up

    def _give_back(self, request: Request) -> None:
        """Free its blocks; whoever gets them writes at once."""
        self.check_blocks(request)
        self.world.random.shuffle(request.blocks)
        for block in request.blocks:
            for memory in self.memories:
                assert block not in memory.lent, f"block {block} is given back while it is lent"
                memory.fill(block, self.world.random.randrange(256))
            self._free.append(block)
        request.blocks = []

    def check_blocks(self, request: Request) -> None:
        """Its full blocks contain what it computed or loaded: nobody wrote to them behind its back."""
        seeds = seeds_of(self.model, request.stream)
        for i in range(min(request.done // self.model.block_tokens, len(request.blocks))):
            for memory in self.memories:
                assert memory.is_whole(request.blocks[i], seeds[i]), (
                    f"{memory.name}: block {i} of {request.id} was changed behind its engine's back"
                )

    def _finish(self, request: Request, aborted: bool) -> None:
        self.world.note(f"{self.name} {'aborts' if aborted else 'finishes'} {request.id} while {request.state.value}")
        request.aborted = aborted
        self._forget_lookup(request)
        if request.state is State.LOADING:
            return  # its blocks are being written: it ends when the load has ended
        self._end_session(request)
        self._finished.add(request.id)
        if request.storing:
            request.state = State.ENDING
        else:
            self._give_back(request)
            del self.requests[request.id]

    def _end_session(self, request: Request) -> None:
        self._unpin(request)
        self.scheduler.end_session(request.id)

    # -- what became of it

    def _hear(self) -> None:
        finished, self._finished = self._finished, set()
        if self.leaving:
            self.scheduler.client.pump()  # otherwise it hears only when it asks
        for rank, worker in enumerate(self.workers):
            if self.world.chance(0.3):
                worker.wait_any(0.002)
            stored, loaded, failed = self._poll(worker, set(finished))
            for name in sorted(loaded):
                request = self.requests.get(name)
                assert request is not None, f"{name} was reported as loaded, and is gone"
                self._loaded(request, rank, failed)
            for name in sorted(stored):
                self._stored(name, rank)
            self._breathe()
        if self.world.chance(0.3):
            self._finished |= finished  # asynchronous scheduling tells ids twice
            self.world.counters["finished_ids_twice"] += bool(finished)

    def _poll(self, worker: Any, finished: set[str]) -> tuple[set[str], set[str], set[Any]]:
        """Requests whose stores and loads have ended, and what could not be loaded."""
        stored, loaded = worker.get_finished(finished)
        return stored or set(), loaded or set(), worker.get_block_ids_with_load_errors()

    def _loaded(self, request: Request, rank: int, failed: set[Any]) -> None:
        memory, seeds = self.memories[rank], seeds_of(self.model, request.stream)
        assert rank in request.loading, f"{request.id} was reported as loaded twice by rank {rank}"
        request.loading.discard(rank)
        for i in range(request.load_first, request.load_end):
            block = request.blocks[i]
            del memory.lent[block]
            if block in failed:
                request.failed = min(request.failed, i)
            else:
                assert memory.is_whole(block, seeds[i]), (
                    f"{memory.name}: block {i} of {request.id} was retrieved with wrong bytes"
                )
                memory.tags[block] = seeds[i]
        if request.loading:
            return
        self.world.counters["load_failed" if request.failed < request.load_end else "load_done"] += 1
        if request.failed < request.load_end:
            request.saved = 0
        request.done = max(request.done, request.failed * self.model.block_tokens)
        if self.mode == "shards" or self.world.chance(0.5):
            self._end_session(request)
        request.state = State.RUNNING
        if request.aborted:
            self._finish(request, aborted=True)

    def _stored(self, name: str, rank: int) -> None:
        assert name not in self._reported[rank], f"{name} was reported as finished twice by rank {rank}"
        self._reported[rank].add(name)
        request = self.requests.get(name)
        if request is None or request.state is not State.ENDING:
            return
        request.storing.discard(rank)
        if not request.storing:
            self.world.counters["blocks_kept_for_stores"] += 1
            self._give_back(request)
            del self.requests[name]


def _seeds_of_chunk(model: Model, stream: Stream, chunk: int) -> tuple[bytes, ...]:
    size = model.blocks_in_chunk
    return tuple(seeds_of(model, stream)[chunk * size : (chunk + 1) * size])
