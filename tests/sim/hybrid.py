"""A simulated engine of a hybrid model: blocks of several KV cache groups, through the native clients.

It does what an engine with a connector does. Of an unbounded group it keeps and stores every chunk. Of a window it
keeps the last chunks, of a state the last one; it stores those at some boundaries only: where a prompt ends, and at
every n-th chunk. A state exists only where a step has ended. What resuming needs is loaded whole, or the request is
recomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvdepot.client.scheduler import Cached, Pending, SchedulerClient
from kvdepot.client.socket import CONNECT_S
from kvdepot.client.transfer import GroupSpec, ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import WorkerClient
from kvdepot.keys import salt_tag
from tests.sim.content import Memory, Model, chain_of, seeds_of
from tests.sim.engine import Engine, Request, State
from tests.sim.groups import Hybrid, needed

if TYPE_CHECKING:
    from tests.sim.run import Run

HYBRID_MODES = ("shards", "shards", "hashes")
"""Chained keys, whose pins the scheduler ends; or loose ones, whose pins end with the retrieve."""


@dataclass(eq=False)
class HybridRequest(Request):
    tables: list[dict[int, int]] = field(default_factory=list)  # by group: number of a block in the prompt -> block
    sent: list[set[int]] = field(default_factory=list)  # by group: chunks whose parts are stored or on their way
    bringing: list[range] = field(default_factory=list)  # by group: blocks that the load brings
    is_failed: bool = False  # a part of the load failed on some rank


class HybridEngine(Engine):
    """One life of an engine of a hybrid model."""

    new_request = HybridRequest
    model: Hybrid
    requests: dict[str, HybridRequest]  # type: ignore[assignment]

    def __init__(self, host: Run, name: str, model: Hybrid, mode: str, num_blocks: int) -> None:
        self._tokens = 6 * num_blocks  # for which unbounded groups have blocks; the others have more
        self._pools = [
            list(range(max(6, self._tokens * (3 if group.reach else 2) // 2 // group.block_tokens)))
            for group in model.groups
        ]
        self._spacing = host.world.random.choice([2, 2, 3])  # chunks between boundaries of a long prompt
        super().__init__(host, name, model, mode, num_blocks)

    # -- its life

    def _start(self) -> None:
        for rank in range(self.model.world_size):
            if not rank:
                self.scheduler = SchedulerClient(self._connect("s"), self._spec(0))
            worker = WorkerClient(self._connect(f"r{rank}"), self._spec(rank), unpins=self.mode == "hashes")
            memories = [
                Memory(group, rank, len(pool), f"{self.name}-kv{rank}.{group.group}")
                for group, pool in zip(self.groups, self._pools, strict=True)
            ]
            self._add_rank(worker, memories)
            worker.register_groups([memory.layout for memory in memories])

    def _connect(self, part: str) -> Any:
        client = self._client(part)
        client.learn_chunk_size(CONNECT_S)
        return client

    def _spec(self, rank: int) -> ShardSpec:
        model = self.model
        groups = tuple(GroupSpec(group.reach, group.blocks_in_chunk) for group in model.groups)
        return ShardSpec(model.name, model.world_size, rank, model.chunk_tokens, self.lead.blocks_in_chunk, groups)

    def _shut_down(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def _memories_of(self, rank: int) -> list[Memory]:
        count = len(self.groups)
        return self.memories[rank * count : (rank + 1) * count]

    # -- lookups

    def _submit_lookup(self, request: Request) -> None:
        keys = self._keys(request.stream)[: request.prompt // self.model.chunk_tokens]
        is_chained, salt = self.mode != "hashes", salt_tag(request.stream.salt)
        self.scheduler.submit_lookup(request.id, b"".join(keys), chained=is_chained, salt=salt)

    def _answer(self, request: Request, wait_s: float = 0.0) -> int | None:
        scheduler = self.scheduler
        outcome = scheduler.wait_lookup(request.id, wait_s) if wait_s else scheduler.check_lookup(request.id)
        if isinstance(outcome, Cached):
            return outcome.tokens
        return None if isinstance(outcome, Pending) else 0

    def _forget_lookup(self, request: Request) -> None:
        self.scheduler.forget_lookup(request.id)

    # -- blocks

    def _take(self, request: HybridRequest, wanted: list[set[int]], preempts: float) -> bool:
        """The wanted blocks of the prompt, by group, for a request; see `_take_blocks`."""
        tables = request.tables = request.tables or [{} for _ in self.groups]
        lacking = [sorted(numbers - table.keys()) for numbers, table in zip(wanted, tables, strict=True)]
        while any(len(pool) < len(numbers) for pool, numbers in zip(self._pools, lacking, strict=True)):
            others = [r for r in self.requests.values() if r.state is State.RUNNING and r is not request]
            if not others or not self.world.chance(preempts):
                return False
            self._preempt(self.world.random.choice(others))
        for pool, numbers, table in zip(self._pools, lacking, tables, strict=True):
            for number in numbers:
                table[number] = pool.pop()
        return True

    def _blocks_of(self, group: Model, chunks: Iterable[int]) -> set[int]:
        size = group.blocks_in_chunk
        return {number for chunk in chunks for number in range(chunk * size, (chunk + 1) * size)}

    def _free_blocks(self, request: HybridRequest, group: int, numbers: list[int]) -> None:
        """Free some of its blocks; whoever gets them writes at once."""
        for number in numbers:
            block = request.tables[group].pop(number)
            for memory in self.memories[group :: len(self.groups)]:
                self._check_block(request, memory, number, block)
                assert block not in memory.lent, f"{memory.name}: block {block} is given back while it is lent"
                memory.fill(block, self.world.random.randrange(256))
            self._pools[group].append(block)

    def _give_back(self, request: Request) -> None:
        assert isinstance(request, HybridRequest)
        for group, table in enumerate(request.tables):
            numbers = list(table)
            self.world.random.shuffle(numbers)
            self._free_blocks(request, group, numbers)
        request.sent = []

    def check_blocks(self, request: Request) -> None:
        assert isinstance(request, HybridRequest)
        for group, table in enumerate(request.tables):
            for memory in self.memories[group :: len(self.groups)]:
                for number, block in table.items():
                    self._check_block(request, memory, number, block)

    def _check_block(self, request: Request, memory: Memory, number: int, block: int) -> None:
        seed = memory.tags[block]
        assert seed is None or memory.is_whole(block, seed), (
            f"{memory.name}: block {number} of {request.id} was changed behind its engine's back"
        )

    def _pass_by(self, request: HybridRequest) -> None:
        """Free what windows and states have passed, unless a store reads it."""
        chunks = request.done // self.model.chunk_tokens
        passed = []
        for group, table in zip(self.groups, request.tables, strict=True):
            first = needed(group.reach, chunks).start * group.blocks_in_chunk
            passed.append([number for number in table if number < first])
        if not any(passed):
            return
        if any(request.id in worker.stores for worker in self.workers):
            self.world.counters["groups_passed_while_storing"] += 1
            if self.world.chance(0.95):
                return
            self._give_up_stores(request)
        for group, numbers in enumerate(passed):
            self._free_blocks(request, group, numbers)

    # -- loading

    def _allocate(self, request: Request) -> None:
        assert isinstance(request, HybridRequest)
        world, size = self.world, self.model.chunk_tokens
        if request.prompt > self._tokens - 2 * self.lead.block_tokens:
            self._finish(request, aborted=True)
            return
        # Sometimes the engine has the head in its own cache; of an unbounded group, some blocks of the next chunk too.
        local = world.random.randint(0, request.prompt // size) if world.chance(0.2) else 0
        end = max(local, request.matched)
        wanted = [self._blocks_of(group, needed(group.reach, end)) for group in self.groups]
        prompt = [set() if group.reach else self._wanted(group, request.prompt, []) for group in self.groups]
        if not self._take(request, [one | other for one, other in zip(wanted, prompt, strict=True)], 0.1):
            return
        request.bringing = []
        for group, numbers in zip(self.groups, wanted, strict=True):
            first = local * group.blocks_in_chunk
            if local < end and not group.reach and local:
                first += world.random.randint(0, group.blocks_in_chunk - 1)
            request.bringing.append(range(max(first, min(numbers, default=first)), end * group.blocks_in_chunk))
            self._write(request, group, [number for number in numbers if number < first])
        request.done = local * size
        request.saved = request.matched
        request.sent = [set(needed(group.reach, request.matched)) for group in self.groups]
        if request.matched <= local:
            request.state = State.RUNNING
        else:
            self._load_parts(request, local)

    def _load_parts(self, request: HybridRequest, local: int) -> None:
        request.state, request.is_failed = State.LOADING, False
        world = self.world
        world.note(f"{self.name} loads {request.id} [{local}, {request.matched}) {request.bringing}")
        for rank, worker in enumerate(self.workers):
            transfers = []
            for memory, numbers in zip(self._memories_of(rank), request.bringing, strict=True):
                group, seeds = memory.model, seeds_of(memory.model, request.stream)
                for number in numbers:
                    memory.lent[request.tables[group.group][number]] = seeds[number]
                first, skip = divmod(numbers.start, group.blocks_in_chunk)
                transfers.append(self._transfer(request, group, first, request.matched, skip))
            request.loading.add(rank)
            worker.submit_retrieve([request.id], transfers, None)
            self._breathe()
        if self.mode == "hashes":
            self._unpin(request)  # pins end with the retrieve, by count

    def _transfer(self, request: HybridRequest, group: Model, first: int, end: int, skip: int = 0) -> Transfer:
        table, size = request.tables[group.group], group.blocks_in_chunk
        blocks = pack_block_ids([table[number] for number in range(first * size, end * size)])
        hashes, salt = b"".join(self._keys(request.stream)[first:end]), salt_tag(request.stream.salt)
        parent, depth = b"", 0
        if self.mode != "hashes":
            parent, depth = chain_of(request.stream, self.model.chunk_tokens).parent(first), first
        return Transfer(request.id, parent, depth, hashes, blocks, skip, salt, group=group.group)

    def _poll(self, worker: Any, finished: set[str]) -> tuple[set[str], set[str], set[Any]]:
        stored, loaded = worker.poll(finished)
        return stored, loaded, worker.take_failed_requests()

    def _loaded(self, request: Request, rank: int, failed: set[Any]) -> None:
        assert isinstance(request, HybridRequest)
        assert rank in request.loading, f"{request.id} was reported as loaded twice by rank {rank}"
        request.loading.discard(rank)
        request.is_failed |= request.id in failed
        for memory, numbers in zip(self._memories_of(rank), request.bringing, strict=True):
            seeds = seeds_of(memory.model, request.stream)
            for number in numbers:
                block = request.tables[memory.model.group][number]
                del memory.lent[block]
                if request.id not in failed:
                    assert memory.is_whole(block, seeds[number]), (
                        f"{memory.name}: block {number} of {request.id} was retrieved with wrong bytes"
                    )
                    memory.tags[block] = seeds[number]
        if request.loading:
            return
        self.world.counters["groups_load_failed" if request.is_failed else "groups_load_done"] += 1
        if self.mode == "shards" or self.world.chance(0.5):
            self._end_session(request)
        request.state = State.RUNNING
        if request.is_failed:  # whole, or nothing: it begins again, without the depot
            self._give_back(request)
            request.state = State.MATCHED
            request.done = request.saved = request.matched = 0
        else:
            request.done = request.matched * self.model.chunk_tokens
        if request.aborted:
            self._finish(request, aborted=True)

    # -- computing and storing

    def _run(self, request: Request) -> None:
        assert isinstance(request, HybridRequest)
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
                    memory.fill(request.tables[group.group][end], 0xEE)  # a block that is not full yet
        request.done = target
        self._store_parts(request, stops)
        self._pass_by(request)
        if request.done >= request.length:
            self._finish(request, aborted=False)

    def _draw_target(self, request: HybridRequest) -> int:
        """Where the step ends: often between two chunks."""
        random, size = self.world.random, self.model.chunk_tokens
        if request.done < request.prompt:
            target = request.prompt if self.world.chance(0.6) else random.randint(request.done + 1, request.prompt)
        else:
            target = min(request.length, request.done + random.randint(1, 4))
        whole = target - target % size
        return whole if whole > request.done and self.world.chance(0.7) else target

    def _stops(self, request: HybridRequest, target: int) -> list[int]:
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

    def _write(self, request: HybridRequest, group: Model, numbers: Iterable[int]) -> None:
        """Compute blocks of a group on all ranks."""
        seeds = seeds_of(group, request.stream)
        for memory in self.memories[group.group :: len(self.groups)]:
            for number in numbers:
                memory.write(request.tables[group.group][number], seeds[number])

    def _store_parts(self, request: HybridRequest, stops: list[int]) -> None:
        full = request.done // self.model.chunk_tokens
        parts: list[tuple[Model, int, int]] = []
        for group in self.groups:
            chunks: Iterable[int] = range(request.saved, full)
            if group.reach:
                wanted = {chunk for boundary in stops for chunk in needed(group.reach, boundary)}
                fresh = sorted(wanted - request.sent[group.group])
                chunks = [chunk for chunk in fresh if self._is_there(request, group, chunk)]
                request.sent[group.group].update(chunks)
            parts += [(group, first, end) for first, end in _runs(chunks)]
        request.saved = max(full, request.saved)
        if not parts:
            return
        # One message for a group; now and then the bounded ones come first, whatever their numbers are.
        batches = [parts]
        if self.world.chance(0.3):
            batches = [[part for part in parts if part[0].reach], [part for part in parts if not part[0].reach]]
        what = " ".join(f"{group.group}:[{first}, {end})" for group, first, end in parts)
        self.world.note(f"{self.name} stores {request.id} {what}")
        for rank, worker in enumerate(self.workers):
            request.storing.add(rank)
            for batch in filter(None, batches):
                worker.submit_store([request.id], [self._transfer(request, *part) for part in batch], None)
            self._breathe()

    def _is_there(self, request: HybridRequest, group: Model, chunk: int) -> bool:
        """Whether the engine has what a chunk's part must contain."""
        table, seeds = request.tables[group.group], seeds_of(group, request.stream)
        tags = self.memories[group.group].tags
        return all(
            number in table and tags[table[number]] == seeds[number]
            for number in sorted(self._blocks_of(group, [chunk]))
        )


def _runs(chunks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs [first, end) of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(chunks), lambda pair: pair[1] - pair[0]):
        numbers = [chunk for _, chunk in run]
        yield numbers[0], numbers[-1] + 1
