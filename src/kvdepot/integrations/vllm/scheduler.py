"""The connector's half in vLLM's scheduler: it decides what is looked up, loaded and stored.

It hashes a request's tokens, looks its prefix up when it arrives, and orders loads and stores with each step.
connector.py says when vLLM calls each method. Until it is connected, nothing is cached, stored or waits; the workers
connect by themselves, so they may be connected already. Invariants: no byte is stored that may be garbage; vLLM is
promised only tokens that the depot has answered to have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from kvdepot.client import admin
from kvdepot.client.scheduler import Cached, Pending, SchedulerClient
from kvdepot.client.transfer import PromptChunks, Transfer
from kvdepot.integrations.vllm.answers import Answers
from kvdepot.integrations.vllm.events import Descriptions
from kvdepot.integrations.vllm.in_step import StepLoad, StepLoads
from kvdepot.integrations.vllm.leases import RequestLeases
from kvdepot.integrations.vllm.lora import Roots
from kvdepot.integrations.vllm.messages import Check, Orders, WorkerReport
from kvdepot.integrations.vllm.plan import GroupPlan, Piece, StateBlock
from kvdepot.integrations.vllm.requests import (
    ChunkRules,
    PromptEnd,
    Report,
    RequestChunks,
    RequestLoad,
    Tracked,
    UnprovenLoad,
    names_are_contents,
)
from kvdepot.integrations.vllm.response import ResponseParams, response_params
from kvdepot.integrations.vllm.settings import ConnectorSettings
from kvdepot.integrations.vllm.stats import KVDepotStats, PrefillSpeed
from kvdepot.integrations.vllm.stores import Holds, WaitingStore, WaitingStores
from kvdepot.integrations.vllm.tails import Tails
from kvdepot.integrations.vllm.trust import Trust, Verdict
from kvdepot.integrations.vllm.versions import lookahead_tokens
from kvdepot.integrations.vllm.weights import NamedWeights, find_version
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger(__name__)

_HELD_S = 0.5
"""A request that has a seat waits for its lookup this long, or for the deadline of the server's tiers if that is later;
then the lookup is hurried."""
_ANSWER_S, _FIRST_ANSWER_S = 0.0005, 0.002
"""A step waits this long for pending lookups, and for those that it asks for the first time, all requests together: the
server may take its time (docs/decisions.md, "Lookups wait for stores in progress"), and the requests that run must
not."""


class ConnectedParts(NamedTuple):
    """The parts that depend on the server. plan: of the model's KV cache groups. events: None: none are published."""

    client: SchedulerClient
    plan: GroupPlan
    events: Descriptions | None


class SchedulerHalf:
    """The scheduler's half: its requests, and the orders that follow from them."""

    _depot: SchedulerClient
    _plan: GroupPlan
    _events: Descriptions | None
    _chunk_tokens: int
    _rules: ChunkRules
    _leases: RequestLeases
    _tails: Tails

    def __init__(self, vllm_config: VllmConfig, model: str, settings: ConnectorSettings, writer: str) -> None:
        """model: the engine's namespace. writer: the name under which it stores."""
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self.stats = KVDepotStats()
        self._model = model
        self._vllm_config = vllm_config
        self._is_connected = False
        self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size  # that load each chunk
        self._may_store = transfer.is_kv_producer
        self._may_load = transfer.is_kv_consumer
        self._settings = settings
        mode = settings.save_decode if self._may_store else "off"
        self._answers = Answers(mode, self.stats.add, parallel.data_parallel_size)
        self._weights = NamedWeights(settings.weights_run, find_version() if settings.weights_run else str)
        self._roots = Roots(vllm_config, self._weights)
        self._tracked: dict[str, Tracked] = {}
        self._uncached: set[str] = set()  # requests that are not tracked; why was logged
        self._trust = Trust(vllm_config, writer if settings.trust == "earned" else "", self._weights)
        self._proofs: dict[str, UnprovenLoad] = {}  # loads that the last step built is to prove, by request
        self._is_faulty = False  # whether a worker can neither store nor load
        self._logged: set[str] = set()  # names of error types
        self._next = Orders()  # of the next step, so far
        self._step = self._ended_step = 0
        self._waited_s = 0.0  # for lookups, since the last step was built
        self._held, self._has_hurried = 0, False  # requests held back since then, and whether one was hurried
        self._seats = 1  # requests that vLLM may add to those of the last step
        self._in_step = StepLoads(self._ranks)
        self._ending_later: list[tuple[int, str, Report]] = []  # sessions to end once the output of a step is back
        self._holds = Holds(self._ranks)
        self._waiting = WaitingStores(self._holds)
        self._forget_again: tuple[int, wire.Forget] | None = None  # once this step's output is back
        self._incarnation = b""  # of the server that `saved_chunks` refers to
        self._prefill = PrefillSpeed()
        self._ending: set[str] = set()  # finished requests with a store that waits for its step's output
        self._closing: set[str] = set()  # finished requests that workers have yet to report

    def __repr__(self) -> str:
        return f"<SchedulerHalf of {self._model}, {len(self._tracked)} requests, step {self._step}>"

    def connect(self, made: ConnectedParts) -> None:
        """Cache from now on: also the requests that have come before, but were not scheduled."""
        config = self._vllm_config
        self._depot, self._plan, self._events = made
        self._in_step.folder = self._depot.client.arena_dir
        self._depot.watch = self.stats.count
        self._chunk_tokens = self._depot.spec.chunk_tokens
        self._rules = ChunkRules(self._chunk_tokens, names_are_contents(config), lookahead_tokens(config))
        self._leases = RequestLeases(self._depot, self.stats)
        self._tails = Tails(self._chunk_tokens)
        self._trust.connect(self._chunk_tokens, self._plan)
        self._is_connected = True

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._holds.bind(pool)

    def has_pending_block_frees(self) -> bool:
        return self._holds.will_end_soon()

    def holds_blocks(self) -> bool:
        return self._holds.is_any_held

    # -- what is cached

    def on_new_request(self, request: Request) -> None:
        """Hash the prompt and send the lookup, so that the answer is there when the request is scheduled."""
        request_id = request.request_id
        self._follow_weights()
        if request.prompt_embeds is not None or request_id in self._tracked or request_id in self._uncached:
            return  # token ids do not identify embeddings: neither looked up nor stored
        if not self._is_connected:
            with suppress(Exception):  # it is not cached anyway, and no error of one request may end the engine
                self._roots.root(request)  # note its adapter: vLLM's own prefix cache keeps what it computes
            return
        if self._is_faulty:
            self._uncached.add(request_id)
            return
        if any(request_id == ending for _, ending, _ in self._ending_later):
            self._uncached.add(request_id)  # workers still copy for an earlier request of this id
            return
        try:
            request_id.encode()  # an id that is not valid text cannot be sent
            parent = self._roots.root(request)
            if parent is None:
                self._uncached.add(request_id)
                return
            prompt = RequestChunks(request, parent, self._rules)
            tracked = self._tracked[request_id] = Tracked(request, prompt, self._leases.read(request))
            self._submit_lookup(tracked)
            self._answers.prompt_came(bytes(prompt.chain.hashes) + b"".join(tail.key for tail in tracked.tails))
            self._leases.request_arrived(tracked)
        except Exception as exc:  # noqa: BLE001 - see `_stop_caching`
            self._stop_caching(request_id, exc)

    def _stop_caching(self, request_id: str, exc: Exception) -> None:
        """An error in one request's id, salt, adapter, items or tokens costs its caching, never the engine.

        Not for errors that a promised load depends on, nor for those that concern all requests.
        """
        self._uncache(request_id)
        if request_id not in self._tracked:
            self._uncached.add(request_id)
        self.stats.add("uncached_requests")
        reason = type(exc).__name__
        if reason not in self._logged:
            self._logged.add(reason)
            text = "not caching request %r (%s: %s); further errors of this kind are not logged"
            log.warning(text, request_id[:64], reason, exc)

    def _uncache(self, request_id: str) -> None:
        """Neither look the request up nor store it any more. Stores that workers have begun go on."""
        self._waiting.drop(request_id)
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.is_cached = tracked.may_load = False
            self._depot.forget_lookup(request_id)

    def _submit_lookup(self, tracked: Tracked) -> None:
        request = tracked.request
        chain = tracked.prompt.hash()
        self._depot.forget_lookup(request.request_id)
        self._depot.speed, tracked.waits_since, tracked.was_asked = self._prefill.speed, 0.0, False
        self._depot.writers = bool(self._trust.name)
        self._depot.layout = self._in_step.arena.layout
        if self._may_load and not request.skip_reading_prefix_cache:
            most = self._most_chunks(tracked)
            hashes, salt = bytes(chain.hashes[: most * HASH_BYTES]), tracked.salt
            if self._plan.has_tails and tracked.prompt.is_named(request.num_tokens):
                tracked.tails = self._tails.candidates(request, tracked.prompt, self._most_tokens(tracked))
            tails = tuple(wire.Tail(tail.chunks, tail.key) for tail in tracked.tails)
            tracked.has_pins = True  # before the lookup: if it fails half-way, it may have been sent
            self._depot.submit(
                request.request_id, PromptChunks(self._depot.spec, hashes, salt, True, tails), self._ranks
            )

    def _most_tokens(self, tracked: Tracked) -> int:
        """The number of tokens of the request's prompt that may be loaded, with a tail."""
        most: int = tracked.request.num_tokens - 1
        return most if tracked.hints.most_loaded is None else min(most, tracked.hints.most_loaded)

    def _most_chunks(self, tracked: Tracked) -> int:
        """The number of chunks of the request's prompt that may be loaded."""
        most, tokens = self._plan.most_chunks(tracked.request.num_tokens), tracked.hints.most_loaded
        return most if tokens is None else min(most, tokens // self._chunk_tokens)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.on_new_request(request)  # in case vLLM has not announced it
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._may_load or request.skip_reading_prefix_cache:
            return 0, False
        tracked.proof = None  # the blocks of its last load are not its own any more
        if tracked.copied_in > self._ended_step:
            return None, False  # preempted, and its last load may not have been copied: its session goes on
        if request.num_preemptions > tracked.preemptions and tracked.is_cached:
            tracked.preemptions = request.num_preemptions
            tracked.may_load = True
            try:
                self._submit_lookup(tracked)
            except Exception as exc:  # noqa: BLE001 - see `_stop_caching`
                self._stop_caching(request.request_id, exc)
        most = min(len(tracked.prompt.chain), self._most_chunks(tracked))
        wanted = request.num_tokens if tracked.hints.most_loaded is None else most * self._chunk_tokens
        missing, own = max(0, wanted - num_computed_tokens), min(num_computed_tokens, most * self._chunk_tokens)
        tracked.offered = wire.Asked(missing, 0, own) if tracked.may_load else None
        reach = max(most * self._chunk_tokens, *(tail.tokens for tail in tracked.tails), 0)
        if not tracked.may_load or reach <= num_computed_tokens:
            return 0, False  # the depot cannot add anything: no need to wait for its answer
        begun = time.monotonic()
        limit_s, tracked.was_asked = _ANSWER_S if tracked.was_asked else _FIRST_ANSWER_S, True
        outcome = self._depot.wait_lookup(request.request_id, max(0.0, limit_s - self._waited_s))
        self._waited_s += time.monotonic() - begun
        if isinstance(outcome, Pending):
            self._limit_wait(tracked, missing, begun)
            return None, False
        found = cached = 0
        tracked.tail, tracked.is_unproven = None, False
        if isinstance(outcome, Cached):
            if outcome.tail is not None:
                tracked.tail = tracked.tails[outcome.tail]
            found = outcome.tokens if tracked.tail is None else tracked.tail.tokens
            client = self._depot.client
            has_waited = bool(tracked.waits_since and client.lookup_s)  # for tiers: it does not pay a prefill on top
            sampled = 0.0 if has_waited else client.verify_hits
            cached, tracked.check, tracked.is_unproven = self._trust.divide(
                tracked, outcome, num_computed_tokens, sampled
            )
            runs = outcome.writers
            last = min((run.end for run in runs if run.end * self._chunk_tokens >= cached), default=0)
            tracked.writers = tuple({run.writer for run in runs if run.end <= last})
            tracked.tail = tracked.tail if cached == found else None
        tracked.saved_chunks = cached // self._chunk_tokens
        if self._events is not None:
            self._events.found(request, tracked.prompt.chain, found // self._chunk_tokens)
        tracked.local_tokens = num_computed_tokens
        news = [max(0, min(tokens, request.num_tokens) - num_computed_tokens) for tokens in (found, cached)]
        new_tokens = news[1]
        tracked.offered = wire.Asked(missing, news[0], own, news[0] - new_tokens)
        log.debug(
            "request %s: %d tokens in the depot, of which %d are loaded, %d in vLLM's own cache, of %d",
            request.request_id, found, cached, num_computed_tokens, request.num_tokens,
        )  # fmt: skip
        tracked.held = None
        if not new_tokens:
            return 0, False
        first, end = num_computed_tokens // self._chunk_tokens, cached // self._chunk_tokens
        if not (isinstance(outcome, Cached) and self._depot.client.is_welcomed):
            return new_tokens, True
        if not self._in_step.promise(outcome, first, end):
            return new_tokens, True
        tracked.held = outcome.held
        return min(new_tokens, request.num_tokens - 1 - num_computed_tokens), False  # vLLM computes a token at least

    def _limit_wait(self, tracked: Tracked, missing: int, now: float) -> None:
        """Wait for tiers, stores and room no longer than computing the missing tokens takes, or than tiers may take.

        vLLM asks for all requests that wait, but the time of those counts for which it has a seat. In each step only
        the first of them is hurried: others would still have their short answers when their turn comes.
        """
        self._held += 1
        if self._held > self._seats:
            return
        limit_s = max(_HELD_S, self._depot.client.lookup_s)
        if self._prefill.speed:
            limit_s = min(limit_s, missing / self._prefill.speed)
        if not tracked.waits_since:
            tracked.waits_since = now
        elif now - tracked.waits_since > limit_s and not self._has_hurried:
            # Once: a server that hangs gets no more time by it.
            tracked.waits_since, self._has_hurried = math.inf, True
            self._depot.hurry_lookup(tracked.request.request_id)

    # -- what is loaded

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note which chunks go into which of the blocks that were just allocated."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.read_tokens = None
        tracked.count_asked()
        if num_external_tokens == 0:
            if tracked.proof is not None:
                self._hide(tracked, blocks)
            return
        tokens, tail = tracked.local_tokens + num_external_tokens, tracked.tail
        is_tail = tail is not None and tail.tokens == tokens
        end, key = tokens // self._chunk_tokens + is_tail, tail.key if tail is not None and is_tail else b""
        if tracked.held is not None:  # without the last token of the prompt
            end = -(-tokens // self._chunk_tokens)
        pieces = self._plan.to_load(blocks.get_block_ids(), tracked.local_tokens, end)
        targets = [block for piece in pieces for block in piece.blocks[piece.skip :]]
        tracked.may_load = False  # whatever its outcome, the request is not loaded twice
        self._waiting.overwritten(targets)
        if tracked.is_unproven:
            tracked.proof = UnprovenLoad(frozenset(targets), tokens, num_external_tokens)
        if tracked.held is not None:
            self._load_in_step(tracked, pieces, num_external_tokens)
            if tracked.proof is not None:
                self._hide(tracked, blocks)
            return
        transfers = [tracked.transfer(piece, key) for piece in pieces]
        tracked.load = RequestLoad(transfers, frozenset(targets), num_external_tokens, tokens)
        self._next.loads[request.request_id] = transfers
        self._next.writers[request.request_id] = tracked.writers

    def _hide(self, tracked: Tracked, blocks: KVCacheBlocks) -> None:
        """Let no other request read what a request has loaded, or computes on top of that, before it is proved: vLLM
        has just put all these blocks into its own prefix cache."""
        block_ids, read = self._plan.split(blocks.get_block_ids(), tracked.local_tokens)
        self._holds.hide(block_ids[read:])

    def _load_in_step(self, tracked: Tracked, pieces: Sequence[Piece], tokens: int) -> None:
        """Workers copy these chunks before the step that is being scheduled computes; that cannot fail."""
        held, tracked.held = tracked.held, None
        assert held is not None
        for piece in pieces:
            span = slice(piece.first - held.first, piece.end - held.first)
            ranks = [[place.extents for place in places[span]] for places in held.ranks]
            load = StepLoad(
                tracked.request.request_id, self._in_step.arena.run, piece.blocks, piece.skip, ranks, held.size
            )
            self._next.step_loads.append(load)
            shards = self._ranks * (piece.end - piece.first)
            tracked.copied = tracked.copied[0] + shards, tracked.copied[1] + shards * held.size
        tracked.copied_in = self._step + 1
        self._count_saved(tracked, tokens)

    def _count_saved(self, tracked: Tracked, tokens: int) -> None:
        """A request does not compute these tokens."""
        tracked.saved_tokens += tokens
        tracked.saved_s += tokens / self._prefill.speed if self._prefill.speed else 0.0

    def _load_ended(self, tracked: Tracked, load: RequestLoad) -> None:
        """A load has ended on all ranks: count the tokens that it saved, or offer its chunks again if it failed.

        Its pins stay until the rest of the prompt is stored (`_end_pins`): if these chunks were evicted before, chunks
        stored after them could never be found.
        """
        tracked.load = None
        if not load.has_failed:
            self._count_saved(tracked, load.tokens)
            return
        request_id = tracked.request.request_id
        if self._trust.name:  # it may have met another writer's chunk
            tracked.check = self._trust.terms(tracked.request, load.end)
        self._depot.end_session(request_id)  # a corrupt chunk can be stored again once it is not held
        tracked.saved_chunks = 0  # recomputed chunks are stored again; the server skips those that it has
        self._depot.forget_lookup(request_id)

    # -- a step

    def _follow_weights(self) -> None:
        if self._weights.follow():
            for request_id in self._tracked:
                self._uncache(request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        self._follow_weights()
        if scheduler_output.total_num_scheduled_tokens:
            self._weights.step()
        if not self._is_connected:
            return Orders(model=self._model)
        self._compare_incarnations()
        self._leases.check_answers()
        self._step += 1
        self._waited_s, self._held, self._has_hurried = 0.0, 0, False
        seats = self._vllm_config.scheduler_config.max_num_seqs
        self._seats = max(1, seats - len(scheduler_output.num_scheduled_tokens))
        preempted = set(scheduler_output.preempted_req_ids or ())
        for request_id in preempted:
            self._waiting.drop(request_id)
            if request_id in self._tracked:
                self._tracked[request_id].stores_open = False
                self._tracked[request_id].saved_chunks = 0  # its last stores may have been voided
        self._proofs = {}
        orders, self._next = self._next, Orders()
        orders.model = self._model
        self._in_step.built(self._step, orders.step_loads)
        ready = self._waiting.take(self._step)
        orders.checks = self._trust.order(ready)
        orders.stores = [store for each in ready if each.is_kept for store in each.stores]
        orders.holds = self._plan.holds and bool(ready)
        orders.preempted = preempted
        orders.idle = scheduler_output.total_num_scheduled_tokens == 0
        orders.step = self._step
        # What vLLM has just taken from windows and states, its step may still copy elsewhere; or it clears new blocks.
        orders.loads_early = not (self._plan.is_bounded or scheduler_output.new_block_ids_to_zero)
        self._prefill.built(self._step, scheduler_output.num_scheduled_tokens.values(), time.monotonic())
        state, going = scheduler_output.kv_connector_block_state, {each.request_id for each in ready}
        for request_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if tracked.proof is not None:
                assert state is not None
                self._prove(orders, state, tracked, new_tokens)
            if self._keeps(tracked) or tracked.check is not None:
                assert state is not None
                try:
                    self._prepare_store(state, tracked, new_tokens)
                except Exception as exc:  # noqa: BLE001 - see `_stop_caching`
                    self._stop_caching(request_id, exc)
            if tracked.has_pins and request_id not in going and tracked.copied_in <= self._ended_step:
                self._end_pins(tracked)
        return orders

    def _prove(self, orders: Orders, state: KVConnectorBlockState, tracked: Tracked, new_tokens: int) -> None:
        """Have this step prove what a request has loaded, by the chunks behind it that it completes, or else drop it:
        vLLM then takes what the step has computed back."""
        request, proof, terms, size = tracked.request, tracked.proof, tracked.check, self._chunk_tokens
        assert proof is not None and terms is not None
        self._proofs[request.request_id], tracked.proof = proof, None
        check = orders.proofs[self._trust.open(terms)] = Check([], terms.compare, proof.blocks)
        end = min(request.num_computed_tokens + new_tokens, request.num_tokens) // size
        chunks = range(proof.end // size, min(end, len(tracked.prompt.chain)))
        # A part of the load may have failed: vLLM keeps what is before.
        if chunks and tracked.is_cached and request.num_computed_tokens == proof.end:
            pieces = self._plan.to_store(state.resolve_block_ids(request.request_id), chunks, request.num_prompt_tokens)
            check.transfers.extend(tracked.transfer(piece) for piece in pieces)

    def _drop_unproven(self, failed: set[int]) -> set[int]:
        """Requests whose load the last step did not prove compute its tokens. Returns the other failed blocks."""
        for request_id, proof in self._proofs.items() if failed else ():
            tracked = self._tracked.get(request_id)
            if tracked is not None and not failed.isdisjoint(proof.blocks):
                failed = failed - proof.blocks
                self._waiting.drop(request_id)
                self._count_saved(tracked, -proof.tokens)
                tracked.read_tokens, tracked.saved_chunks = None, 0
        return failed

    def _keeps(self, tracked: Tracked) -> bool:
        """Whether what a request computes is stored."""
        return self._may_store and tracked.hints.stores

    def _end_pins(self, tracked: Tracked) -> None:
        """Release the pins of a request once its prompt is stored: a chunk with another behind it is not evicted, and
        pins held while it decodes would leave less space for others' stores."""
        request = tracked.request
        if request.num_computed_tokens >= request.num_prompt_tokens and not self._waiting.waits(request.request_id):
            self._leases.prompt_stored(tracked)
            self._depot.end_session(request.request_id, *tracked.take_report())
            tracked.has_pins = False

    def _compare_incarnations(self) -> None:
        """A restarted server may have lost chunks: offer all of them again. The server skips chunks that it has."""
        client = self._depot.client
        client.pump()
        if client.incarnation != self._incarnation:
            self._incarnation = client.incarnation
            if self._events is not None:
                self._events.restarted()
            for tracked in self._tracked.values():
                tracked.saved_chunks = 0

    def _prepare_store(self, state: KVConnectorBlockState, tracked: Tracked, new_tokens: int) -> None:
        """Prepare a store of the chunks that this step completes and that the depot does not have."""
        request, size = tracked.request, self._chunk_tokens
        if tracked.read_tokens is None:
            tracked.read_tokens = request.num_computed_tokens
        if self._waiting.has_suspects:
            tables = state.resolve_block_ids(request.request_id)
            if not self._waiting.check(*self._plan.split(tables, tracked.read_tokens)):
                self._uncache(request.request_id)
        # Decoded tokens count up to the last known one: after it there may be drafts or placeholders.
        known = request.num_tokens if self._answers.are_stored else request.num_prompt_tokens
        if tracked.check is None:  # what is compared has no bound
            known = tracked.hints.stored(known)
        end = self._plan.final_tokens(request.num_computed_tokens + new_tokens, known) // size
        if end <= tracked.saved_chunks or not tracked.is_cached:
            return
        if tracked.saved_chunks == 0 and tracked.check is None:
            tracked.saved_chunks = self._depot.known_tokens(request.request_id) // size
        chunks = tracked.unsaved_chunks(end)
        if not chunks:
            return
        tables = state.resolve_block_ids(request.request_id)
        states = [StateBlock(*offered) for offered in state.boundary_state_offloads.get(request.request_id, ())]
        junction, prompt_tokens = (
            request.shared_prefix_boundary,
            tracked.hints.stored(request.num_prompt_tokens - 1) + 1,
        )
        pieces = self._plan.to_store(tables, chunks, prompt_tokens, states, junction)
        stores = [tracked.transfer(piece) for piece in pieces]
        block_ids, read = self._plan.split(tables, tracked.read_tokens, chunks.stop)
        held = self._plan.held(pieces)
        if not self._holds.hold(held):
            stores, held = [store for store in stores if not self._plan.is_held(store.group)], []
        tracked.saved_chunks = chunks.stop
        if not stores:
            return
        blocks = block_ids[:read], block_ids[read:]
        kept = self._keeps(tracked) and tracked.hints.stored(chunks.stop * size) == chunks.stop * size
        compared = list[Transfer]()
        if tracked.check is not None and request.request_id not in self._proofs:  # what it reads proves nothing
            first = max(-(-tracked.read_tokens // size), tracked.check.first // size, chunks.start)
            own = self._plan.to_store(tables, range(first, chunks.stop), request.num_prompt_tokens, states, junction)
            compared = [tracked.transfer(piece) for piece in own] if first < chunks.stop else []
        self._waiting.add(
            WaitingStore(self._step, stores, *blocks, request.lora_request, held, kept, tracked.check, compared)
        )
        if self._events is not None and kept:
            self._events.ordered(request, tracked.prompt.chain, chunks)
        tracked.stores_open = True
        tracked.has_stored_output |= chunks.stop * size > request.num_prompt_tokens

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Handle the end of a step, and of the loads that ended with it.

        vLLM calls it for each step that computed something, and for others if a worker has something to report.
        """
        if not self._is_connected:
            return
        failed = connector_output.invalid_block_ids or set()
        meta = connector_output.kv_connector_worker_meta
        report = meta if isinstance(meta, WorkerReport) else WorkerReport()
        self._prefill.output(report.step, time.monotonic())
        sent = connector_output.finished_sending or ()
        self._closing.difference_update(sent)
        self._leases.stores_ended(sent)
        self._holds.ended(report.ended)
        if report.fault and not self._is_faulty:
            self._is_faulty = True
            self._void_stores(None)  # other ranks must not store their part of a chunk
        self._in_step.mapped(report.mapped)
        if self._trust.report(report.compared) is Verdict.DIFFERENT:
            self._part()
        failed = self._drop_unproven(failed)
        self._step_ended(report.step, failed)
        for _, load in self._loads(self._tracked if failed else ()):
            load.has_failed |= not failed.isdisjoint(load.blocks)
        for _, load in self._loads(connector_output.failed_recving):
            load.has_failed = True
        for tracked, load in self._loads(connector_output.finished_recving or ()):
            self._load_ended(tracked, load)

    def _step_ended(self, step: int, failed: set[int]) -> None:
        """A step's output is back: store what it completed, unless a failed load or a changed adapter may have made it
        wrong."""
        waiting, self._ended_step = self._waiting, max(step, self._ended_step)
        self._in_step.ended(step)
        ready, self._ending_later = self._ending_later, []
        for copied_in, request_id, report in ready:
            self._end_session(request_id, copied_in, report)
        # Only their own request has blocks of our loads, and it computes them again before anyone reads them.
        others = failed.difference(*(load.blocks for _, load in self._loads(self._tracked))) if failed else failed
        if others:
            for request_id in waiting.failed(others):
                self._uncache(request_id)
        for request_id, adapter in list(waiting.adapters(step)):
            if not self._roots.adapters.is_unchanged(adapter):
                waiting.drop(request_id)
                self._uncache(request_id)
        waiting.ended(step)
        done = {request_id for request_id in self._ending if not waiting.waits(request_id)}
        self._ending -= done
        self._next.ended |= done
        if self._forget_again is not None and self._forget_again[0] <= step:
            self._depot.client.ask(self._forget_again[1])  # no store from before can still arrive
            self._forget_again = None

    def _loads(self, request_ids: Iterable[str]) -> Iterator[tuple[Tracked, RequestLoad]]:
        """The loads of these requests that have not ended."""
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.load is not None:
                yield tracked, tracked.load

    # -- the end

    def request_finished(self, request: Request, tables: Sequence[Sequence[int]]) -> tuple[bool, ResponseParams | None]:
        """Whether its blocks must stay until a worker reports it, and the params of its response. tables: its blocks by
        KV cache group, without those that only tokens of later steps would need."""
        self._uncached.discard(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        return self._end(tracked, tables), response_params(request, tracked.reuse)

    def _end(self, tracked: Tracked, tables: Sequence[Sequence[int]]) -> bool:
        """End a request. Returns whether its blocks must stay until a worker reports it."""
        request_id = tracked.request.request_id
        if tracked.proof is not None:
            self._holds.hide(tracked.proof.blocks)
        self._depot.forget_lookup(request_id)
        self._leases.request_ending(tracked)
        self._depot.answers = self._answers.status
        self._end_session(request_id, tracked.copied_in, tracked.take_report())
        self._leases.request_ended(tracked)
        tail = self._end_in_tail(tracked, tables)
        if self._answers.learns:
            self._answers.request_ended(tracked.decoded_hashes() or (tail.key if tail is not None else b""))
        self._next.loads.pop(request_id, None)
        if not tracked.stores_open:
            return False
        self._closing.add(request_id)
        (self._ending if self._waiting.waits(request_id) else self._next.ended).add(request_id)
        return True

    def _end_session(self, request_id: str, copied_in: int, report: Report) -> None:
        """End a request's session, once no worker copies its chunks any more."""
        if copied_in > self._ended_step:
            self._ending_later.append((copied_in, request_id, report))
        else:
            self._depot.end_session(request_id, *report)

    def _end_in_tail(self, tracked: Tracked, tables: Sequence[Sequence[int]]) -> PromptEnd | None:
        """Store the end of a request that a later prompt may continue. Returns the tail, stored or not, if it has one.

        Steps under way compute no more tokens than vLLM counts as computed, and the store waits for them; but vLLM
        counts those of a load before they are there, and of a streaming session it counts one of the state too few.
        """
        request, tokens = tracked.request, tracked.request.num_computed_tokens
        is_over = request.num_prompt_tokens <= tokens <= request.num_tokens  # and no placeholder was computed
        is_over &= tracked.load is None and request.streaming_queue is None
        if not (self._plan.has_tails and self._keeps(tracked) and tracked.is_cached and is_over):
            return None
        with suppress(Exception):  # tokens and items come from a caller: they cost the tail, never the engine
            tracked.prompt.hash()
            tail = self._tails.end(tracked.prompt, tokens) if tracked.prompt.is_named(tokens) else None
            if tail is None:
                return None
            is_stored = tokens == request.num_prompt_tokens or self._answers.are_stored
            is_stored &= tracked.hints.stored(tokens) == tokens
            pieces = self._plan.tail(tables, tail.chunks) if is_stored and tracked.saved_chunks >= tail.chunks else []
            block_ids, read = self._plan.split(tables, tracked.read_tokens or 0, tail.chunks + 1)
            if self._waiting.has_suspects and not self._waiting.check(block_ids, read):
                pieces = []
            if pieces:
                before = tracked.tail.key if tracked.tail is not None else b""
                stores = [tracked.transfer(piece, tail.key, before) for piece in pieces]
                blocks = block_ids[:read], block_ids[read:]
                self._waiting.add(WaitingStore(self._step, stores, *blocks, request.lora_request))
                tracked.stores_open = True
            return tail if tokens > request.num_prompt_tokens else None
        return None

    def reset_cache(self) -> bool:
        self._weights.reset()
        if not self._is_connected:
            return True  # it has stored nothing yet
        # Requests may have stored what new weights computed, under the name of the old ones. If there are none, the
        # namespace stays: other engines of the run may have stored KV of the next version.
        keeps = bool(self._weights.run) and not self._tracked and not self._weights.is_mixed
        is_forgotten = keeps or admin.reset(self._depot.client, self._model)
        self._weights.is_mixed &= not is_forgotten
        self._void_stores(None if keeps else wire.Forget(self._model))
        return is_forgotten

    def _part(self) -> None:
        """Share nothing from here on: this engine computes other KV than another that has stored under its name.

        What it has stored there is removed.
        """
        self._weights.part()
        own = wire.Forget(self._model, writer=self._trust.name)
        self._void_stores(own)
        self._depot.client.ask(own, deadline_s=None)

    def _void_stores(self, forget: wire.Forget | None) -> None:
        """Void the stores under way, and forget once more what may arrive still. None: what was to be forgotten."""
        for request_id in self._tracked:
            self._uncache(request_id)  # its blocks may be from before and after
        self._waiting.clear()
        if self._tracked or self._closing or self._ended_step < self._step:
            self._next.void = True
            if forget is not None:
                self._forget_again = self._step + 1, forget

    def shutdown(self) -> None:
        self._in_step.close()
        self._depot.close()
