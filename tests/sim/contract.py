"""A simulated engine behind the adapters of the contract, as vLLM's own connector has it, or as bare callers do."""

from __future__ import annotations

from typing import Any

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.client.contract import pack_block_ids
from kvdepot.client.transfer import Transfer
from kvdepot.keys import salt_tag
from tests.sim.content import CHUNK_TOKENS, Memory, chain_of, seeds_of, tokens_of
from tests.sim.engine import Engine, Part, Request

CONTRACT_MODES = ("tokens", "hashes", "shards")


class ContractEngine(Engine):
    """One life of an engine of a model with one unbounded group. Of a load that failed in part, it keeps the rest."""

    counted = ""

    def _start(self) -> None:
        self.skips = self.mode == "shards"
        model = self.lead
        place: Any = ("sim://", None, model.name, model.world_size)
        self.scheduler = LMCacheMPSchedulerAdapter(*place, 0, model.block_tokens, client=self._client("s"))
        for rank in range(model.world_size):
            worker = LMCacheMPWorkerAdapter(*place, rank, model.block_tokens, client=self._client(f"r{rank}"))
            memory = Memory(model, rank, len(self._pools[0]), f"{self.name}-kv{rank}")
            self._add_rank(worker, [memory])
            worker.register([memory.layout], self._blocks(worker, [memory]))

    def _shut_down(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    def _submit_lookup(self, request: Request) -> None:
        scheduler, stream = self.scheduler, request.stream
        if self.mode == "tokens":
            tokens = tokens_of(stream)[: request.prompt]
            scheduler.maybe_submit_lookup_request(request.id, token_ids=tokens)
            if self.world.chance(0.2):
                scheduler.maybe_submit_lookup_request(request.id, token_ids=tokens)
        elif self.mode == "hashes":
            block_hashes = seeds_of(self.lead, stream)[: request.prompt // self.lead.block_tokens]
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

    def _retrieve(self, worker: Any, request: Request, parts: list[Part]) -> None:
        for part in parts:
            self._submit(worker, request, part, is_store=False)

    def _store(self, worker: Any, request: Request, parts: list[Part]) -> None:
        for part in parts:
            self._submit(worker, request, part, is_store=True)

    def _submit(self, worker: LMCacheMPWorkerAdapter, request: Request, part: Part, is_store: bool) -> None:
        group, first, end, skip = part
        size = group.blocks_in_chunk
        blocks = [request.tables[0][number] for number in range(first * size, end * size)]
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
            op = LoadStoreOp(blocks, block_hashes=seeds_of(group, request.stream)[first * size : end * size])
        (worker.submit_store_request if is_store else worker.submit_retrieve_request)(request.id, op, None)

    def _poll(self, worker: Any, finished: set[str]) -> tuple[set[str], set[str], set[Any]]:
        stored, loaded = worker.get_finished(finished)
        return stored or set(), loaded or set(), worker.get_block_ids_with_load_errors()

    def _load_failed(self, request: Request) -> None:
        request.saved = 0
        request.done = max(request.done, request.failed * self.lead.block_tokens)
