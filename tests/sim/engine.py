"""A simulated engine: paged blocks of several KV cache groups, an allocator and requests, through the native clients.

One process with a scheduler and its ranks, each with a client of its own, does what an engine with a connector does. It
knows what every block must contain, and says so in `Memory.tags` and `Memory.lent`; the moment it gives a block up,
somebody else's bytes are in it.

Of an unbounded group it keeps and stores every chunk. Of a window it keeps the last chunks, of a state the last one; it
stores those at some boundaries only: where a prompt ends, and at every n-th chunk. A state exists only where a step has
ended. What resuming needs is loaded whole, or the request is recomputed.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvdepot.client.scheduler import Cached, Pending, SchedulerClient
from kvdepot.client.socket import CONNECT_S
from kvdepot.client.transfer import GroupSpec, PromptChunks, ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import CompareTerms, WorkerClient
from kvdepot.errors import KVDepotError
from kvdepot.keys import salt_tag
from kvdepot.protocol import wire
from tests.sim.content import MAX_TOKENS, Memory, Model, Stream, chain_of, end_seed, keys_of, seeds_of, tail_of
from tests.sim.copies import Blocks, SimLane
from tests.sim.groups import Hybrid, needed
from tests.sim.host import Client, Pinned, Processes
from tests.sim.tiers import TENANTS
from tests.sim.world import Process

if TYPE_CHECKING:
    from tests.sim.run import Run

PREEMPTION_S = 0.05
MODES = ("shards", "shards", "hashes")
"""Chained keys, whose pins the scheduler ends; or loose ones, whose pins end with the retrieve."""
Part = tuple[Model, int, int, int]
"""Of a transfer: group, first and end chunk, and blocks to skip."""


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
    tails: list[int] = field(default_factory=list)  # ends of the tails that were looked up
    tail: int = 0  # tokens up to the end of the tail that was found behind them; 0: none
    saved: int = 0  # chunks from the start, in the depot or on their way
    tables: list[dict[int, int]] = field(default_factory=list)  # by group: number of a block in the prompt -> block
    sent: list[set[int]] = field(default_factory=list)  # by group: chunks whose parts are stored or on their way
    bringing: list[range] = field(default_factory=list)  # by group: blocks that the load brings
    loading: set[int] = field(default_factory=set)  # ranks whose retrieve is under way
    failed: int = MAX_TOKENS  # number of the first block that failed on any rank
    storing: set[int] = field(default_factory=set)  # ranks that have yet to report its stores
    aborted: bool = False
    pinned: Pinned | None = None
    asked: float = 0.0  # when its lookup was
    waits: int = 0


class Engine(Processes):
    """One life of an engine, from its start to its end. Engines behind the adapters of the contract: contract.py."""

    counted = "groups_"
    """The beginning of its counters of loads."""
    skips = True
    """Whether a load may begin within a chunk."""

    def __init__(self, host: Run, name: str, model: Hybrid, mode: str, num_blocks: int) -> None:
        self.host = host
        self.world = host.world
        self.name = name
        self.model = model
        self.groups = model.groups
        self.lead = model.lead
        self.mode = mode
        self.tenant = host.tenants.setdefault(name, TENANTS[host.has_tenants and len(host.tenants) % 2])
        self.has_tails = model.has_tails and mode == "shards"
        self.alive = True
        self.leaving = False  # no new requests
        self.may_go = False
        self.serving = False  # all its ranks are registered
        self.pause_s = 0.0
        self.requests: dict[str, Request] = {}
        self.clients: list[Client] = []
        self.memories: list[Memory] = []
        self.blocks: list[Blocks] = []
        self.scheduler: Any = None
        self.workers: list[Any] = []
        self._tokens = 6 * num_blocks  # for which unbounded groups have blocks; the others have more
        self._pools = [
            list(range(max(6, self._tokens * (3 if group.reach else 2) // 2 // group.block_tokens)))
            for group in model.groups
        ]
        self._spacing = host.world.random.choice([2, 2, 3])  # chunks between boundaries of a long prompt
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
            if self.world.seed % 8 == 3:
                self._wait_for_server()
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
        for rank in range(self.model.world_size):
            if not rank:
                self.scheduler = SchedulerClient(self._connect("s"), self._spec(0), reports=self.world.chance(0.7))
                chunks_per_s = self.world.random.choice([0, 0, 1, 100, 10_000])
                self.scheduler.speed = float(chunks_per_s * self.lead.chunk_tokens)
            worker = WorkerClient(self._connect(f"r{rank}"), self._spec(rank), unpins=self.mode == "hashes")
            memories = [
                Memory(group, rank, len(pool), f"{self.name}-kv{rank}.{group.group}")
                for group, pool in zip(self.groups, self._pools, strict=True)
            ]
            self._add_rank(worker, memories)
            worker.register([memory.layout for memory in memories], self._blocks(worker, memories))

    def _connect(self, part: str) -> Any:
        client = self._client(part)
        client.learn_chunk_size(CONNECT_S)
        return client

    def _spec(self, rank: int) -> ShardSpec:
        model = self.model
        groups = tuple(GroupSpec(group.reach, group.blocks_in_chunk) for group in model.groups)
        return ShardSpec(model.name, model.world_size, rank, model.chunk_tokens, self.lead.blocks_in_chunk, groups)

    def _wait_for_server(self) -> None:
        """As vLLM's connector: its client is there first, however late the server comes."""
        client = self._client("link")
        self.world.counters["engine_connected_late"] += self.host.server is None
        answer = client.ask(wire.ChunkSize(), deadline_s=None)
        client.wait(answer.query, float("inf"))
        client.close()

    def _add_rank(self, worker: Any, memories: list[Memory]) -> None:
        worker.instance_id = self.world.random.getrandbits(62)
        self.memories += memories
        self.workers.append(worker)
        self._reported.append(set())

    def _blocks(self, worker: Any, memories: list[Memory]) -> list[Blocks]:
        """What a worker's lane copies, on a process of its own."""
        worker._lane = SimLane(worker.client)
        blocks = [Blocks(worker.client, memory) for memory in memories]
        self.blocks += blocks
        return blocks

    def _memories_of(self, rank: int) -> list[Memory]:
        count = len(self.groups)
        return self.memories[rank * count : (rank + 1) * count]

    def _shut_down(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def end(self) -> None:
        """It is gone, whatever the reason: the kernel takes its locks and connections."""
        self.alive = self.serving = False
        for request in self.requests.values():
            self._unpin(request)
        for memory in self.memories:
            memory.dead = True
        for client in self.clients:
            if not client._closed:
                # Processes of one engine do not die in the same instant.
                self.world.after(0.02 * self.world.random.random(), client.gone)

    def clear(self) -> None:
        """Clear what nothing holds, without waiting."""
        self.world.counters["cleared"] += 1
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
                        part = store.put(
                            self.tenant, memory, key, salt_tag(stream.salt), _seeds_of_chunk(memory.model, stream, i)
                        )
                        self.host.forgettings.saved(part, elsewhere=True)
                        world.counters["stored_elsewhere"] += 1
            if self.has_tails and world.chance(0.7):
                end = len(keys) * self.model.chunk_tokens + world.random.randint(1, self.model.chunk_tokens - 1)
                key = self._name_tail(stream, end)
                for memory in self.memories:
                    part = store.put(
                        self.tenant, memory, key, salt_tag(stream.salt), [end_seed(memory.model, stream, end)]
                    )
                    self.host.forgettings.saved(part, elsewhere=True)

    def forget(self) -> None:
        """Some of all that was ever stored, without waiting."""
        what = self.world.random.choice(["model", "model", "salt", "all", "all"])
        model, salt = self.model.name if what == "model" else "", salt_tag("tenant") if what == "salt" else b""
        self.world.note(f"{self.name} forgets {what}")
        self.scheduler.client.ask(wire.ForgetChunks(model, salt))

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
                server is not None and server.boot == boot and server.depot.leases._find(self.tenant, name) is None
            )  # while the answer was on its way
            if matched and self._pins[name] == number and not forgotten:
                world.counters["pinned_by_name"] += 1
                ends = asked + ttl_s if ttl_s else float("inf")
                self.host.named[name] = Pinned(boot, self.model, self._parts(keys[:matched]), self.tenant, asked, ends)

        salt = salt_tag(stream.salt)
        chunk = model.blocks_in_chunk, b"".join(keys), salt, model.chunk_tokens, ttl_s
        client.ask(wire.TakeLease(name, "retain", model.name, model.world_size, *chunk), hear)

    def _unpinned(self, name: str, number: int) -> None:
        server = self.host.server
        self.world.counters["unpinned"] += 1
        if server is not None and server.serving and self._pins[name] == number:
            assert server.depot.leases._find(self.tenant, name) is None, f"{name} was ended, and is still leased"

    # -- steps

    def _breathe(self) -> None:
        """A point at which it can be killed or stopped, and the world goes on."""
        if self.world.chance(0.1):
            self.process.sleep(0.0005)

    def _step(self) -> None:
        self.host.steps_taken += 1
        if not self.leaving and len(self.requests) < 6 and self.world.chance(0.5):
            for _ in range(20 if self.host.has_storms and not self.requests else 1):
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
        if self.has_tails and self.world.chance(0.8):  # a chat goes on
            stream = max((self._draw_stream() for _ in range(4)), key=lambda each: len(self._ends(each, 60)))
            prompt = random.choice(self._ends(stream, 60) or [prompt]) + random.randint(0, 5)
        # Bare callers need ids of their own; the connector's need not be.
        name = f"r{self._arrived}" if self.mode == "shards" else f"{self.name}-{self._arrived}"
        request = Request(name, stream, prompt, min(MAX_TOKENS - 1, prompt + random.randint(1, 30)))
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

    def _loaded_keys(self, request: Request) -> list[bytes]:
        """The keys of what a request loads: its last one may be a tail's."""
        keys = self._keys(request.stream)[: request.matched]
        return [*keys, tail_of(request.stream, request.tail, self.model.chunk_tokens).key] if request.tail else keys

    def _seed(self, group: Model, request: Request, number: int) -> bytes:
        """The seed of a block that a request loads."""
        is_end = request.tail and number == request.tail // group.block_tokens
        return end_seed(group, request.stream, request.tail) if is_end else seeds_of(group, request.stream)[number]

    def _parts(self, keys: list[bytes]) -> list[tuple[int, bytes]]:
        """What of a prompt with these keys resuming at its end needs: groups and keys."""
        return [(group.group, keys[i]) for group in self.groups for i in needed(group.reach, len(keys))]

    def _look_up(self, request: Request) -> None:
        self._submit_lookup(request)
        request.asked = self.world.now
        request.state = State.ASKED
        request.waits = 0

    def _submit_lookup(self, request: Request) -> None:
        keys = self._keys(request.stream)[: request.prompt // self.model.chunk_tokens]
        is_chained, salt = self.mode != "hashes", salt_tag(request.stream.salt)
        request.tails = self._draw_tails(request) if self.has_tails else []
        tails = tuple(tail_of(request.stream, end, self.model.chunk_tokens) for end in request.tails)
        prompt = PromptChunks(self.scheduler.spec, b"".join(keys), salt, is_chained, tails)
        self.scheduler.place = sum(request.id.encode()) % 3 - 1  # some of its requests go before others
        self.scheduler.submit(request.id, prompt)

    def _draw_tails(self, request: Request) -> list[int]:
        """Where earlier prompts may have ended, the longest first; some more than did."""
        ends = {*self._ends(request.stream, request.prompt), self.world.random.randint(1, request.prompt)}
        return sorted((end for end in ends if end % self.model.chunk_tokens), reverse=True)[:8]

    def _ends(self, stream: Stream, most: int) -> list[int]:
        """Tokens, `most` of them, at which requests of such streams have ended."""
        chain = chain_of(stream, self.model.chunk_tokens)
        parents = [chain.parent(chunk) for chunk in range(most // self.model.chunk_tokens + 1)]
        return sorted(end for parent in parents for end in self.host.ends.get(parent, ()) if end <= most)

    def _answer(self, request: Request, wait_s: float = 0.0) -> int | None:
        scheduler = self.scheduler
        outcome = scheduler.wait_lookup(request.id, wait_s) if wait_s else scheduler.check_lookup(request.id)
        request.tail = 0
        if isinstance(outcome, Cached):
            request.tail = 0 if outcome.tail is None else request.tails[outcome.tail]
            self.world.counters["tail_hit"] += request.tail > 0
            return outcome.tokens
        return None if isinstance(outcome, Pending) else 0

    def _forget_lookup(self, request: Request) -> None:
        self.scheduler.forget_lookup(request.id)

    def _await_answer(self, request: Request) -> None:
        if self.world.chance(0.5):
            asked = self.scheduler._lookups.get(request.id)
            tokens = self._answer(request, 0.0005)
            self.world.counters["lookup_asked_again"] += self.scheduler._lookups.get(request.id) is not asked
        else:
            tokens = self._answer(request)
        request.waits += 1
        if tokens is None and self.world.chance(0.1):
            self.world.counters["lookup_hurried"] += 1
            self.scheduler.hurry_lookup(request.id)
        if tokens is None:
            if request.waits < 3 or self.world.chance(0.7):
                return
            self.world.counters["lookup_not_awaited"] += 1
            tokens = request.tail = 0
        request.matched = tokens // self.lead.chunk_tokens
        request.saved = request.matched
        request.state = State.MATCHED
        full = request.prompt // self.lead.chunk_tokens
        self.world.counters["hit" if 0 < request.matched == full else "partial_hit" if request.matched else "miss"] += 1
        if request.matched or request.tail:
            parts = self._parts(self._loaded_keys(request))
            boot = self.scheduler.client.lookup_boots[request.id]
            request.pinned = Pinned(boot, self.model, parts, self.tenant, request.asked)
            self.host.pins.append(request.pinned)
            if self.host.server is not None and self.host.server.serving:
                self.host.check_pins(self.host.server)
        if (request.matched or request.tail) and self.host.pause_with_pins(self):
            self.world.counters["pause_between_lookup_and_retrieve"] += 1

    def _unpin(self, request: Request) -> None:
        if request.pinned is not None:
            self.host.pins.remove(request.pinned)
            request.pinned = None

    # -- blocks

    def _take(self, request: Request, wanted: list[set[int]], preempts: float) -> bool:
        """Blocks of the prompt, by group, for a request; others are preempted for it, so often, if need be."""
        tables = request.tables = request.tables or [{} for _ in self.groups]
        lacking = [sorted(numbers - table.keys()) for numbers, table in zip(wanted, tables, strict=True)]
        while any(len(pool) < len(numbers) for pool, numbers in zip(self._pools, lacking, strict=True)):
            others = [r for r in self.requests.values() if r.state is State.RUNNING and r is not request]
            if not others or not self.world.chance(preempts):
                return False
            self._preempt(self.world.random.choice(others))
        for pool, numbers, table in zip(self._pools, lacking, tables, strict=True):
            for number in numbers:
                # The last freed first: whoever still touches it is found out.
                table[number] = pool.pop()
        return True

    def _blocks_of(self, group: Model, chunks: Iterable[int]) -> set[int]:
        size = group.blocks_in_chunk
        return {number for chunk in chunks for number in range(chunk * size, (chunk + 1) * size)}

    def _free_blocks(self, request: Request, group: int, numbers: list[int]) -> None:
        """Free some of its blocks; whoever gets them writes at once."""
        for number in numbers:
            block = request.tables[group].pop(number)
            for memory in self.memories[group :: len(self.groups)]:
                self._check_block(request, memory, number, block)
                assert block not in memory.lent, f"{memory.name}: block {block} is given back while it is lent"
                memory.fill(block, self.world.random.randrange(256))
            self._pools[group].append(block)

    def _give_back(self, request: Request) -> None:
        for group, table in enumerate(request.tables):
            numbers = list(table)
            self.world.random.shuffle(numbers)
            self._free_blocks(request, group, numbers)
        request.sent = []

    def _check_block(self, request: Request, memory: Memory, number: int, block: int) -> None:
        group = memory.model
        is_full = not group.reach and number < request.done // group.block_tokens
        tag = memory.tags[block]  # of a block that is not full, its tokens so far, if those can be a tail
        seed = seeds_of(group, request.stream)[number] if is_full or tag is None else tag
        assert (tag is None and not is_full) or memory.is_whole(block, seed), (
            f"{memory.name}: block {number} of {request.id} was changed behind its engine's back"
        )

    def _pass_by(self, request: Request) -> None:
        """Free what windows and states have passed, unless a store reads it."""
        chunks = request.done // self.model.chunk_tokens
        passed = []
        for group, table in zip(self.groups, request.tables, strict=True):
            first = needed(group.reach, chunks).start * group.blocks_in_chunk
            passed.append([number for number in table if number < first])
        if not any(passed):
            return
        if any(request.id in table for worker in self.workers for table in (worker.store_futures, worker.comparisons)):
            self.world.counters["groups_passed_while_storing"] += 1
            if self.world.chance(0.95):
                return
            self._give_up_stores(request)
        for group, numbers in enumerate(passed):
            self._free_blocks(request, group, numbers)

    # -- loading

    def _allocate(self, request: Request) -> None:
        world, size = self.world, self.model.chunk_tokens
        if request.prompt > self._tokens - 2 * self.lead.block_tokens:
            self._finish(request, aborted=True)
            return
        # Sometimes the engine has the head in its own cache; of an unbounded group, some blocks of the next chunk too.
        is_local = world.chance(0.2)
        local = world.random.randint(0, request.prompt // size) if is_local else 0
        end = max(local, len(self._loaded_keys(request)))
        wanted = [self._blocks_of(group, needed(group.reach, end)) for group in self.groups]
        prompt = [set() if group.reach else self._wanted(group, request.prompt, []) for group in self.groups]
        if not self._take(request, [one | other for one, other in zip(wanted, prompt, strict=True)], 0.1):
            return
        request.bringing = []
        for group, numbers in zip(self.groups, wanted, strict=True):
            first = local * group.blocks_in_chunk
            if is_local and self.skips and local < end and not group.reach:
                first += world.random.randint(0, group.blocks_in_chunk - 1)
            request.bringing.append(range(max(first, min(numbers, default=first)), end * group.blocks_in_chunk))
            self._write(request, group, [number for number in numbers if number < first])
        request.done = local * size
        request.saved = request.matched
        request.sent = [set() if request.tail else set(needed(each.reach, request.matched)) for each in self.groups]
        if end <= local:
            request.tail = 0
            request.state = State.RUNNING
        else:
            self._load_parts(request, local)

    def _load_parts(self, request: Request, local: int) -> None:
        request.state, request.failed = State.LOADING, MAX_TOKENS
        world = self.world
        end = len(self._loaded_keys(request))
        world.note(f"{self.name} loads {request.id} [{local}, {end}) {request.bringing} tail {request.tail}")
        for rank, worker in enumerate(self.workers):
            parts: list[Part] = []
            for memory, numbers in zip(self._memories_of(rank), request.bringing, strict=True):
                group = memory.model
                for number in numbers:
                    memory.lent[request.tables[group.group][number]] = self._seed(group, request, number)
                first, skip = divmod(numbers.start, group.blocks_in_chunk)
                parts.append((group, first, end, skip))
            request.loading.add(rank)
            self._retrieve(worker, request, parts)
            self._breathe()
        if self.mode != "shards":
            self._unpin(request)  # pins end with the retrieve, by count

    def _retrieve(self, worker: Any, request: Request, parts: list[Part]) -> None:
        keys = self._loaded_keys(request)
        worker.submit_retrieve([request.id], [self._transfer(request, keys, *part) for part in parts], None)

    def _store(self, worker: Any, request: Request, parts: list[Part]) -> None:
        keys = self._keys(request.stream)
        transfers = [self._transfer(request, keys, *part) for part in parts]
        if self.world.chance(0.1):
            worker.submit_compare(transfers, None, CompareTerms(0.5))
        worker.submit_store([request.id], transfers, None)

    def _transfer(
        self, request: Request, keys: list[bytes], group: Model, first: int, end: int, skip: int, continues: bytes = b""
    ) -> Transfer:
        """keys: of the prompt's chunks; the last may be a tail's."""
        table, size = request.tables[group.group], group.blocks_in_chunk
        blocks = pack_block_ids([table[number] for number in range(first * size, end * size)])
        hashes, salt = b"".join(keys[first:end]), salt_tag(request.stream.salt)
        parent, depth = b"", 0
        if self.mode != "hashes":
            parent, depth = chain_of(request.stream, self.model.chunk_tokens).parent(first), first
        return Transfer(request.id, parent, depth, hashes, blocks, skip, salt, group.group, continues)

    def _poll(self, worker: Any, finished: set[str]) -> tuple[set[str], set[str], set[Any]]:
        """Requests whose stores and loads have ended, and what could not be loaded: requests, or blocks."""
        stored, loaded = worker.poll(finished)
        return stored, loaded, worker.take_failed_requests()

    def _loaded(self, request: Request, rank: int, failed: set[Any]) -> None:
        assert rank in request.loading, f"{request.id} was reported as loaded twice by rank {rank}"
        request.loading.discard(rank)
        for memory, numbers in zip(self._memories_of(rank), request.bringing, strict=True):
            for number in numbers:
                block, seed = request.tables[memory.model.group][number], self._seed(memory.model, request, number)
                del memory.lent[block]
                if request.id in failed or block in failed:
                    request.failed = min(request.failed, number)
                    continue
                assert memory.is_whole(block, seed), (
                    f"{memory.name}: block {number} of {request.id} was retrieved with wrong bytes"
                )
                memory.tags[block] = seed
        if request.loading:
            return
        is_whole = request.failed == MAX_TOKENS
        self.world.counters[f"{self.counted}load_{'done' if is_whole else 'failed'}"] += 1
        if self.mode == "shards" or self.world.chance(0.5):
            self._end_session(request)
        request.state = State.RUNNING
        if is_whole:
            request.done = request.tail or request.matched * self.model.chunk_tokens
        else:
            self._load_failed(request)
        if request.aborted:
            self._finish(request, aborted=True)

    def _load_failed(self, request: Request) -> None:
        """Whole, or nothing: it begins again, without the depot."""
        self._give_back(request)
        request.state = State.MATCHED
        request.done = request.saved = request.matched = request.tail = 0

    # -- computing and storing

    def _run(self, request: Request) -> None:
        if self.world.chance(0.01):
            self._preempt(request)
            return
        target = self._draw_target(request)
        stops = self._stops(request, target)
        if not self._take(request, [self._wanted(group, target, stops) for group in self.groups], 0.7):
            if self.world.chance(0.2):
                self._preempt(request)
            return
        for group in self.groups:
            first, end = request.done // group.block_tokens, target // group.block_tokens
            numbers = [number for number in request.tables[group.group] if first <= number < end]
            if group.reach == 1:  # a state is where the step ends, and nowhere before
                numbers = [number for number in numbers if (number + 1) * group.block_tokens == target]
            self._write(request, group, numbers)
            if target % group.block_tokens:
                for memory in self.memories[group.group :: len(self.groups)]:
                    block = request.tables[group.group][end]
                    if self.has_tails:
                        memory.write(block, end_seed(group, request.stream, target))
                    else:
                        memory.fill(block, 0xEE)  # a block that is not full yet
        request.done = target
        self._store_parts(request, stops)
        self._pass_by(request)
        if request.done >= request.length:
            self._finish(request, aborted=False)

    def _draw_target(self, request: Request) -> int:
        """Where the step ends: often between two chunks."""
        random, size = self.world.random, self.model.chunk_tokens
        if request.done < request.prompt:
            target = request.prompt if self.world.chance(0.6) else random.randint(request.done + 1, request.prompt)
        else:
            target = min(request.length, request.done + random.randint(1, 4))
        whole = target - target % size
        return whole if whole > request.done and self.world.chance(0.7) else target

    def _stops(self, request: Request, target: int) -> list[int]:
        """The boundaries that a step passes and at which it stores what resuming there needs."""
        size = self.model.chunk_tokens
        stops = []
        for boundary in range(request.done // size + 1, target // size + 1):
            if boundary != request.prompt // size and boundary % self._spacing:
                continue
            has_state = boundary * size == target or not self.model.has_state
            if has_state or self.world.chance(0.2):
                stops.append(boundary)
                self.world.counters["groups_stored_without_state"] += not has_state
        return stops

    def _wanted(self, group: Model, target: int, stops: list[int]) -> set[int]:
        """The blocks of a group that a step to `target` needs, or leaves behind for a store."""
        size = self.model.chunk_tokens
        if not group.reach:
            return set(range(-(-target // group.block_tokens)))
        if group.reach == 1:
            return {(target - 1) // group.block_tokens}
        chunks = {chunk for boundary in (*stops, target // size) for chunk in needed(group.reach, boundary)}
        rest = range(target // size * group.blocks_in_chunk, -(-target // group.block_tokens))
        return self._blocks_of(group, chunks).union(rest)

    def _write(self, request: Request, group: Model, numbers: Iterable[int]) -> None:
        """Compute blocks of a group on all ranks."""
        seeds = seeds_of(group, request.stream)
        for memory in self.memories[group.group :: len(self.groups)]:
            for number in numbers:
                memory.write(request.tables[group.group][number], seeds[number])

    def _store_parts(self, request: Request, stops: list[int]) -> None:
        full = request.done // self.model.chunk_tokens
        parts: list[Part] = []
        for group in self.groups:
            chunks: Iterable[int] = range(request.saved, full)
            if group.reach:
                wanted = {chunk for boundary in stops for chunk in needed(group.reach, boundary)}
                fresh = sorted(wanted - request.sent[group.group])
                chunks = [chunk for chunk in fresh if self._is_there(request, group, chunk)]
                request.sent[group.group].update(chunks)
            parts += [(group, first, end, 0) for first, end in _runs(chunks)]
        request.saved = max(full, request.saved)
        if not parts:
            return
        # One message for a group; now and then the bounded ones come first, whatever their numbers are.
        batches = [parts]
        if self.world.chance(0.3):
            batches = [[part for part in parts if part[0].reach], [part for part in parts if not part[0].reach]]
        what = " ".join(f"{group.group}:[{first}, {end})" for group, first, end, _ in parts)
        self.world.note(f"{self.name} stores {request.id} {what}")
        for rank, worker in enumerate(self.workers):
            request.storing.add(rank)
            for batch in filter(None, batches):
                self._store(worker, request, batch)
            self._breathe()

    def _name_tail(self, stream: Stream, end: int) -> bytes:
        """Tell the oracle what a tail's key stands for, and engines that prompts end there."""
        size = self.model.chunk_tokens
        key = tail_of(stream, end, size).key
        for memory in self.memories:
            truth = memory.model, (end_seed(memory.model, stream, end),)
            assert self.host.truth.setdefault((memory.layout.fingerprint, key), truth) == truth
        self.host.ends.setdefault(chain_of(stream, size).parent(end // size), set()).add(end)
        return key

    def _store_tail(self, request: Request) -> None:
        """Store the end of a request, behind chunks that are stored or on their way."""
        done, size, world = request.done, self.model.chunk_tokens, self.world
        number = done // size
        is_over = request.state is State.RUNNING and request.prompt <= done and done % size and request.saved >= number
        if not (self.has_tails and is_over and world.chance(0.9)):
            return
        key, before = self._name_tail(request.stream, done), self._loaded_keys(request)[-1] if request.tail else b""
        world.counters["tail_stored"] += 1
        world.counters["tail_continued"] += bool(before)
        world.note(f"{self.name} stores the tail of {request.id} at {done}")
        keys = [*self._keys(request.stream)[:number], key]
        for rank, worker in enumerate(self.workers):
            request.storing.add(rank)
            parts = [self._transfer(request, keys, each, number, number + 1, 0, before) for each in self.groups]
            worker.submit_store([request.id], parts, None)
            self._breathe()

    def _is_there(self, request: Request, group: Model, chunk: int) -> bool:
        """Whether the engine has what a chunk's part must contain."""
        table, seeds = request.tables[group.group], seeds_of(group, request.stream)
        tags = self.memories[group.group].tags
        return all(
            number in table and tags[table[number]] == seeds[number]
            for number in sorted(self._blocks_of(group, [chunk]))
        )

    def _preempt(self, request: Request) -> None:
        """Take its blocks for others, at once."""
        self.world.counters["preempted"] += 1
        self.world.note(f"{self.name} preempts {request.id}")
        self._give_up_stores(request)
        self._give_back(request)
        request.storing.clear()
        request.done = request.saved = request.matched = request.tail = 0
        self._unpin(request)
        self._forget_lookup(request)
        self._look_up(request)

    def _give_up_stores(self, request: Request) -> None:
        before = sum(worker.counters["stores_given_up"] for worker in self.workers)
        for worker in self.workers:
            worker.give_up_stores({request.id}, PREEMPTION_S)
        given_up = sum(worker.counters["stores_given_up"] for worker in self.workers) - before
        self.world.counters["stores_given_up"] += given_up

    def _finish(self, request: Request, aborted: bool) -> None:
        self.world.note(f"{self.name} {'aborts' if aborted else 'finishes'} {request.id} while {request.state.value}")
        request.aborted = aborted
        self._forget_lookup(request)
        if request.state is State.LOADING:
            return  # its blocks are being written: it ends when the load has ended
        self._end_session(request)
        self._store_tail(request)
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


def _runs(chunks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs [first, end) of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(chunks), lambda pair: pair[1] - pair[0]):
        numbers = [chunk for _, chunk in run]
        yield numbers[0], numbers[-1] + 1


def _seeds_of_chunk(model: Model, stream: Stream, chunk: int) -> tuple[bytes, ...]:
    size = model.blocks_in_chunk
    return tuple(seeds_of(model, stream)[chunk * size : (chunk + 1) * size])
