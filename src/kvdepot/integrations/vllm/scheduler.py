"""The connector's half in vLLM's scheduler: it decides what is looked up, loaded and stored.

It hashes a request's tokens, looks its prefix up when it arrives, and orders loads and stores with each step.
connector.py says when vLLM calls each method. Until it is connected, nothing is cached, stored or waits; the workers
connect by themselves, so they may be connected already. Invariants: no byte is stored that may be garbage; vLLM is
promised only tokens that the depot has answered to have.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace
from vllm.logger import init_logger

from kvdepot.client import admin
from kvdepot.client.scheduler import LOOKUP_S, Cached, Pending, SchedulerClient
from kvdepot.client.transfer import PromptChunks, Transfer
from kvdepot.integrations.vllm.answers import Answers
from kvdepot.integrations.vllm.events import Descriptions
from kvdepot.integrations.vllm.hints import ResponseParams, response_params
from kvdepot.integrations.vllm.in_step import StepLoad, StepLoads
from kvdepot.integrations.vllm.leases import RequestLeases
from kvdepot.integrations.vllm.load_or_compute import HitPart, LoadOrCompute
from kvdepot.integrations.vllm.lora import Roots
from kvdepot.integrations.vllm.messages import Orders, WorkerReport
from kvdepot.integrations.vllm.phases import ASKING, IN_STEP, NEXT, RequestPhase
from kvdepot.integrations.vllm.plan import GroupPlan, Piece, StateBlock
from kvdepot.integrations.vllm.proofs import Proofs
from kvdepot.integrations.vllm.requests import (
    ChunkRules,
    Promise,
    PromptEnd,
    Report,
    RequestChunks,
    RequestLoad,
    Tracked,
    names_are_contents,
)
from kvdepot.integrations.vllm.settings import ConnectorSettings
from kvdepot.integrations.vllm.stalls import PATIENCE_S, Passes
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


class ConnectedParts(NamedTuple):
    """The parts that depend on the server. plan: for the model's KV cache groups. events: None: not published."""

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
    _proofs: Proofs

    def __init__(self, vllm_config: VllmConfig, model: str, settings: ConnectorSettings, writer: str) -> None:
        """model: the engine's namespace. writer: the name under which it stores."""
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self.stats = KVDepotStats()
        self._model = model
        self._vllm_config = vllm_config
        self._is_connected = False
        self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size  # which load each chunk
        self._may_store = transfer.is_kv_producer
        self._may_load = transfer.is_kv_consumer
        mode = settings.save_decode if self._may_store else "off"
        self._answers = Answers(mode, self.stats.add, parallel.data_parallel_size)
        self._weights = NamedWeights(settings.weights_run, find_version() if settings.weights_run else str)
        self._roots = Roots(vllm_config, self._weights)
        self._tracked: dict[str, Tracked] = {}
        self._uncached: set[str] = set()  # requests that are not tracked; the reason was logged
        self._trust = Trust(vllm_config, writer if settings.trust == "earned" else "", self._weights)
        self._is_faulty = False  # whether a worker can neither store nor load
        self._logged: set[str] = set()  # names of error types that were logged
        self._next = Orders()  # orders for the next step, so far
        self._step = self._ended_step = 0
        self._passes = Passes(vllm_config.scheduler_config)
        self._in_step = StepLoads(self._ranks)
        self._ending_later: list[tuple[int, str, Report]] = []  # sessions to end once the output of a step is back
        self.holds = Holds(self._ranks)
        self._waiting = WaitingStores(self.holds)
        self._forget_again: tuple[int, wire.ForgetChunks] | None = None  # sent once this step's output is back
        self._incarnation = b""  # the server's run to which `saved_chunks` refers
        self._prefill = PrefillSpeed()
        self._choice = LoadOrCompute(self._prefill)
        self._ending: set[str] = set()  # finished requests with a store that waits for its step's output
        self._closing: set[str] = set()  # finished requests that workers have yet to report

    def __repr__(self) -> str:
        return f"<SchedulerHalf of {self._model}, {len(self._tracked)} requests, step {self._step}>"

    def connect(self, made: ConnectedParts) -> None:
        """Cache from now on, also for requests that have come before and were not scheduled yet."""
        config = self._vllm_config
        self._depot, self._plan, self._events = made
        self._in_step.folder = self._depot.client.arena_dir
        self._depot.watch = self.stats.count
        self._chunk_tokens = self._depot.spec.chunk_tokens
        self._rules = ChunkRules(self._chunk_tokens, names_are_contents(config), lookahead_tokens(config))
        self._leases = RequestLeases(self._depot, self.stats)
        self._tails = Tails(self._chunk_tokens)
        self._trust.connect(self._chunk_tokens, self._plan)
        self._passes.plan = self._plan
        self._choice.connect(self._plan, self._chunk_tokens)
        self._proofs = Proofs(self._trust, self.holds, self._plan, self._chunk_tokens)
        self._is_connected = True

    def bind_block_pool(self, pool: BlockPool) -> None:
        self.holds.bind(pool)
        self._passes.pool = pool

    # -- what is cached

    def on_new_request(self, request: Request) -> None:
        """Hash the prompt and send the lookup, so that the answer is there when the request is scheduled."""
        request_id = request.request_id
        self._follow_weights()
        if request.prompt_embeds is not None or request_id in self._tracked or request_id in self._uncached:
            return  # token ids do not identify embeddings: neither looked up nor stored
        if not self._is_connected:
            with suppress(Exception):  # the request is not cached anyway, and its errors may not end the engine
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
            tracked.is_cached = False
            self._depot.forget_lookup(request_id)
            if RequestPhase.GIVEN_UP in NEXT[tracked.phase]:  # a load under way goes on
                tracked.enter(RequestPhase.GIVEN_UP)

    def _submit_lookup(self, tracked: Tracked) -> None:
        request, depot = tracked.request, self._depot
        chain = tracked.prompt.hash()
        depot.forget_lookup(request.request_id)
        tracked.enter(RequestPhase.LOOKING)
        tracked.waits_since = 0.0
        depot.speed, depot.place = self._prefill.speed, self._passes.place(request)
        depot.writers, depot.layout = bool(self._trust.name), self._in_step.arena.layout
        if self._may_load and not request.skip_reading_prefix_cache:
            most = self._most_chunks(tracked)
            hashes, salt = bytes(chain.hashes[: most * HASH_BYTES]), tracked.salt
            if self._plan.has_tails and tracked.prompt.is_named(request.num_tokens):
                tracked.tails = self._tails.candidates(request, tracked.prompt, self._most_tokens(tracked))
            tails = tuple(wire.Tail(tail.chunks, tail.key) for tail in tracked.tails)
            tracked.has_pins = True  # set before the lookup, which may fail after it was sent
            depot.submit(request.request_id, PromptChunks(depot.spec, hashes, salt, True, tails), self._ranks)

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
        told: tuple[int | None, bool] = None, False
        if tracked is not None and tracked.phase is RequestPhase.LOADED:  # failed: its blocks are others' now
            tracked.enter(RequestPhase.COMPUTING)
            tracked.load = None
        if not self._passes.must_wait(request.request_id):
            told = self._match(tracked, num_computed_tokens) if tracked is not None else (0, False)
        is_copying = tracked is not None and tracked.phase in IN_STEP
        limit_s = max(self._times(request.num_tokens - num_computed_tokens)) + LOOKUP_S  # also for a hurried lookup
        if told[0] is None and not is_copying and self._passes.stands_still(limit_s):
            told = 0, False
            self.stats.add("stalls_broken")
            if tracked is not None and RequestPhase.GIVEN_UP in NEXT[tracked.phase]:
                tracked.enter(RequestPhase.GIVEN_UP)
        self._passes.told(request, told[0])
        return told

    def _match(self, tracked: Tracked, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Find how much of a request the depot has beyond the engine's own tokens; None: not known yet."""
        request = tracked.request
        if not self._may_load or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.phase in IN_STEP:
            return None, False  # preempted, and its load may not be copied yet: its session goes on
        if request.num_preemptions > tracked.preemptions and tracked.is_cached:
            tracked.preemptions = request.num_preemptions
            if tracked.phase is RequestPhase.COMPUTING:
                try:
                    self._submit_lookup(tracked)
                except Exception as exc:  # noqa: BLE001 - see `_stop_caching`
                    self._stop_caching(request.request_id, exc)
        most = min(len(tracked.prompt.chain), self._most_chunks(tracked)) * self._chunk_tokens
        reach = max([most, *(tail.tokens for tail in tracked.tails)])
        wanted = request.num_tokens if tracked.hints.most_loaded is None else reach
        missing, own = max(0, wanted - num_computed_tokens), min(num_computed_tokens, most)
        tracked.offered = wire.Asked(missing, 0, own) if tracked.phase in ASKING else None
        if tracked.phase not in ASKING or reach <= num_computed_tokens:
            return 0, False  # the depot cannot add tokens: do not wait for its answer
        found = self._await_answer(tracked, missing)
        return (None, False) if found is None else self._offer(tracked, found, num_computed_tokens)

    def _await_answer(self, tracked: Tracked, missing: int) -> Cached | None:
        """Wait a moment for the answer to a request's lookup; None: no answer yet. A lookup that failed is a miss."""
        request_id, begun = tracked.request.request_id, time.monotonic()
        limit_s = self._passes.time_for_answer(tracked.phase is RequestPhase.LOOKING)
        outcome = self._depot.wait_lookup(request_id, limit_s)
        self._passes.waited(time.monotonic() - begun)
        if not isinstance(outcome, Pending):
            tracked.enter(RequestPhase.FOUND)
            return outcome if isinstance(outcome, Cached) else Cached(0)
        if tracked.phase is not RequestPhase.HURRIED:
            tracked.enter(RequestPhase.AWAITED)
        if self._passes.is_overdue(tracked, *self._times(missing)):  # once: a server that hangs gets no more time
            tracked.enter(RequestPhase.HURRIED)
            self._depot.hurry_lookup(request_id)
        return None

    def _offer(self, tracked: Tracked, found: Cached, own: int) -> tuple[int | None, bool]:
        """Decide how many of the tokens that a lookup has found are loaded, and tell vLLM so. own: tokens from the
        prompt's start that the engine's own cache has."""
        request, client, size = tracked.request, self._depot.client, self._chunk_tokens
        tail = None if found.tail is None else tracked.tails[found.tail]
        in_depot = found.tokens if tail is None else tail.tokens
        # A request that has waited for a tier must not pay for a prefill, too.
        sampled = 0.0 if tracked.waits_since and client.welcome.lookup_s else client.welcome.verify_hits
        allowed, tracked.check, is_unproven = self._trust.divide(tracked, found, in_depot, own, sampled)
        tracked.saved_chunks = allowed // size
        if self._events is not None:
            self._events.found(request, tracked.prompt.chain, in_depot // size)
        is_close = client.is_welcomed and self._in_step.has_room(found, own // size, allowed // size)
        load = HitPart(allowed, is_close)
        if not is_unproven:  # else the proof needs the whole load
            load = self._choice.choose(request, own, load)
        ends = in_depot, allowed, load.tokens
        in_depot, trusted, new = (max(0, min(end, request.num_tokens) - own) for end in ends)
        assert tracked.offered is not None
        tracked.offered = replace(tracked.offered, found=in_depot, compared=in_depot - trusted, computed=trusted - new)
        log.debug(
            "request %s: %d tokens in the depot, of which %d may be loaded and %d are, %d in vLLM's own cache, of %d",
            request.request_id, *ends, own, request.num_tokens,
        )  # fmt: skip
        tail = tail if load.tokens == ends[0] else None
        tracked.promise = promise = Promise(own, tail, _writers(found.writers, allowed, size), is_unproven)
        if not new:
            return 0, False
        if not (load.in_step and self._in_step.promise(found, own // size, load.tokens // size)):
            return (new, True) if self._passes.may_load(request, load.tokens) else (None, False)
        tracked.promise = promise._replace(held=found.held)
        return min(new, request.num_tokens - 1 - own), False  # vLLM computes a token at least

    def _times(self, missing: int) -> tuple[float, float]:
        """The seconds that the server may take for a lookup, and the seconds that computing the missing tokens takes;
        0.0: unknown."""
        tiers_s = self._depot.client.welcome.lookup_s if self._is_connected else 0.0
        return max(PATIENCE_S, tiers_s), missing / self._prefill.speed if self._prefill.speed else 0.0

    # -- what is loaded

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note which chunks go into which of the blocks that were just allocated."""
        self._passes.given(request.request_id)
        if self._is_connected:
            self._choice.scheduled(request)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.read_tokens = None
        if tracked.offered is not None and tracked.offered.computed:
            self.stats.add("computed_tokens", tracked.offered.computed)
        tracked.count_asked()
        if num_external_tokens == 0:
            self._proofs.hide(tracked, blocks.get_block_ids())
            return
        promise = tracked.promise
        tokens, tail = promise.local_tokens + num_external_tokens, promise.tail
        is_tail = tail is not None and tail.tokens == tokens
        end, key = tokens // self._chunk_tokens + is_tail, tail.key if tail is not None and is_tail else b""
        if promise.held is not None:  # without the last token of the prompt
            end = -(-tokens // self._chunk_tokens)
        tables = blocks.get_block_ids()
        pieces = self._plan.to_load(tables, promise.local_tokens, end)
        targets = frozenset(block for piece in pieces for block in piece.blocks[piece.skip :])
        self._waiting.overwritten(targets)
        tracked.load = RequestLoad(targets, num_external_tokens, tokens, promise.is_unproven)
        if promise.held is not None:
            tracked.enter(RequestPhase.COPYING)
            self._load_in_step(tracked, pieces, promise.held)
            self._proofs.hide(tracked, tables)
            return
        tracked.enter(RequestPhase.LOADING)  # whatever its outcome, the request is not loaded twice
        self._passes.holds(tracked, self._plan.count_blocks(tables))
        self._choice.ordered(self._step + 1, pieces)
        self._next.loads[request.request_id] = [tracked.transfer(piece, key) for piece in pieces]
        self._next.writers[request.request_id] = promise.writers

    def _load_in_step(self, tracked: Tracked, pieces: Sequence[Piece], held: wire.Places) -> None:
        """Have workers copy these chunks before the step that is being scheduled computes, which cannot fail."""
        assert tracked.load is not None
        for piece in pieces:
            span = slice(piece.first - held.first, piece.end - held.first)
            ranks = [[place.extents for place in places[span]] for places in held.ranks]
            load = StepLoad(
                tracked.request.request_id, self._in_step.arena.run, piece.blocks, piece.skip, ranks, held.size
            )
            self._next.step_loads.append(load)
            shards = self._ranks * (piece.end - piece.first)
            tracked.copied = tracked.copied[0] + shards, tracked.copied[1] + shards * held.size
        self._count_saved(tracked, tracked.load)

    def _count_saved(self, tracked: Tracked, load: RequestLoad) -> None:
        """A request does not compute the tokens of a load."""
        load.saved = load.tokens, load.tokens / self._prefill.speed if self._prefill.speed else 0.0
        tracked.saved_tokens += load.saved[0]
        tracked.saved_s += load.saved[1]

    def _load_ended(self, tracked: Tracked, load: RequestLoad) -> None:
        """A load has ended on all ranks: count the tokens that it saved, or offer its chunks again if it failed.

        Its pins stay until the rest of the prompt is stored (`_end_pins`): if these chunks were evicted before, chunks
        stored after them could never be found.
        """
        tracked.enter(RequestPhase.LOADED)
        if not load.has_failed:
            self._count_saved(tracked, load)
            return
        request_id = tracked.request.request_id
        if self._trust.name:  # the load may have met another writer's chunk
            tracked.check = self._trust.terms(tracked.request, load.end)
        self._depot.end_session(request_id)  # a corrupt chunk can be stored again once no session holds it
        tracked.saved_chunks = 0  # store recomputed chunks again; the server skips chunks that it has
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
        self._passes.ended(scheduler_output.num_scheduled_tokens, self._step)
        preempted = set(scheduler_output.preempted_req_ids or ())
        for request_id in preempted:
            self._waiting.drop(request_id)
            if request_id in self._tracked:
                self._tracked[request_id].stores_open = False
                self._tracked[request_id].saved_chunks = 0  # its last stores may have been voided
        orders, self._next = self._next, Orders()
        orders.model = self._model
        self._in_step.built(self._step, orders.step_loads)
        self._choice.built()
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
            if tracked.phase is not RequestPhase.COMPUTING:
                self._passes.left(request_id)
                if self._proofs.begin(self._step, tracked):
                    assert state is not None
                    self._proofs.prove(orders, state, tracked, new_tokens)
            if self._keeps(tracked) or tracked.check is not None:
                assert state is not None
                try:
                    self._prepare_store(state, tracked, new_tokens)
                except Exception as exc:  # noqa: BLE001 - see `_stop_caching`
                    self._stop_caching(request_id, exc)
            if tracked.has_pins and request_id not in going and tracked.phase not in IN_STEP:
                self._end_pins(tracked)
        return orders

    def _drop_unproven(self, failed: set[int]) -> set[int]:
        """Let requests whose load the last step did not prove compute its tokens. Returns the other failed blocks."""
        for tracked in self._proofs.disproved(failed) if failed else ():
            request_id, load = tracked.request.request_id, tracked.load
            if self._tracked.get(request_id) is tracked and load is not None:
                failed = failed - load.blocks
                self._waiting.drop(request_id)
                tracked.saved_tokens -= load.saved[0]
                tracked.saved_s -= load.saved[1]
                tracked.read_tokens, tracked.saved_chunks = None, 0
        return failed

    def _keeps(self, tracked: Tracked) -> bool:
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
        if tracked.check is None:  # a request's bound on stores does not hold for comparisons
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
        junction = request.shared_prefix_boundary
        prompt_tokens = tracked.hints.stored(request.num_prompt_tokens - 1) + 1
        pieces = self._plan.to_store(tables, chunks, prompt_tokens, states, junction)
        stores = [tracked.transfer(piece) for piece in pieces]
        block_ids, read = self._plan.split(tables, tracked.read_tokens, chunks.stop)
        held = self._plan.held(pieces)
        if not self.holds.hold(held):
            stores, held = [store for store in stores if not self._plan.is_held(store.group)], []
        tracked.saved_chunks = chunks.stop
        if not stores:
            return
        blocks = block_ids[:read], block_ids[read:]
        kept = self._keeps(tracked) and tracked.hints.stored(chunks.stop * size) == chunks.stop * size
        compared = list[Transfer]()
        if tracked.check is not None and tracked.phase is not RequestPhase.PROVING:  # what it reads proves nothing
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
        self._choice.reported(report)
        sent = connector_output.finished_sending or ()
        self._closing.difference_update(sent)
        self._leases.stores_ended(sent)
        self.holds.ended(report.ended)
        if report.fault and not self._is_faulty:
            self._is_faulty = True
            self._void_stores(None)  # other ranks must not store their parts of its chunks
        self._in_step.mapped(report.mapped)
        if self._trust.report(report.compared) is Verdict.DIFFERENT:
            self._part()
        failed = self._drop_unproven(failed)
        self._passes.output(report.step)
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
        self._proofs.ended(self._ended_step)
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
            self._depot.client.ask(self._forget_again[1])  # stores from before that step cannot arrive any more
            self._forget_again = None

    def _loads(self, request_ids: Iterable[str]) -> Iterator[tuple[Tracked, RequestLoad]]:
        """The loads of these requests that have not ended."""
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.phase is RequestPhase.LOADING and tracked.load is not None:
                yield tracked, tracked.load

    # -- the end

    def request_finished(self, request: Request, tables: Sequence[Sequence[int]]) -> tuple[bool, ResponseParams | None]:
        """Whether its blocks must stay until a worker reports it, and the params of its response. tables: its blocks by
        KV cache group, without blocks that only tokens of later steps would need."""
        self._uncached.discard(request.request_id)
        self._passes.left(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        return self._end(tracked, tables), response_params(request, tracked.reuse, tracked.hints)

    def _end(self, tracked: Tracked, tables: Sequence[Sequence[int]]) -> bool:
        """End a request. Returns whether its blocks must stay until a worker reports it."""
        request_id = tracked.request.request_id
        self._proofs.drop(tracked)
        self._depot.forget_lookup(request_id)
        self._leases.request_ending(tracked)
        self._depot.answers = self._answers.status
        copied_in = tracked.load.step if tracked.load is not None else 0
        self._end_session(request_id, copied_in, tracked.take_report())
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

        Steps under way compute no more tokens than vLLM counts as computed, and the store waits for these steps. But
        vLLM counts the tokens of a load before they are there, and for a streaming session one token less than its
        state has.
        """
        request, tokens = tracked.request, tracked.request.num_computed_tokens
        is_over = request.num_prompt_tokens <= tokens <= request.num_tokens  # and no placeholder was computed
        is_over &= tracked.phase is not RequestPhase.LOADING and request.streaming_queue is None
        if not (self._plan.has_tails and self._keeps(tracked) and tracked.is_cached and is_over):
            return None
        with suppress(Exception):  # errors in a caller's tokens or items cost the tail, never the engine
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
                before = tracked.promise.tail.key if tracked.promise.tail is not None else b""
                stores = [tracked.transfer(piece, tail.key, before) for piece in pieces]
                blocks = block_ids[:read], block_ids[read:]
                self._waiting.add(WaitingStore(self._step, stores, *blocks, request.lora_request))
                tracked.stores_open = True
            return tail if tokens > request.num_prompt_tokens else None
        return None

    def reset_cache(self) -> bool:
        self._weights.reset()
        if not self._is_connected:
            return True  # this engine has stored nothing yet
        # Requests may have stored what new weights computed, under the name of the old ones. If there are none, the
        # namespace stays: other engines of the run may have stored KV of the next version.
        keeps = bool(self._weights.run) and not self._tracked and not self._weights.is_mixed
        is_forgotten = keeps or admin.reset(self._depot.client, self._model)
        self._weights.is_mixed &= not is_forgotten
        self._void_stores(None if keeps else wire.ForgetChunks(self._model))
        return is_forgotten

    def _part(self) -> None:
        """Share nothing from here on: this engine's KV differs from another engine's of the same name.

        The KV that this engine has stored under that name is removed.
        """
        self._weights.part()
        own = wire.ForgetChunks(self._model, writer=self._trust.name)
        self._void_stores(own)
        self._depot.client.ask(own, deadline_s=None)

    def _void_stores(self, forget: wire.ForgetChunks | None) -> None:
        """Void the stores under way. forget: sent again once no such store can arrive; None: leave an earlier one."""
        for request_id in self._tracked:
            self._uncache(request_id)  # its blocks may be from before and after the change
        self._waiting.drop()
        if self._tracked or self._closing or self._ended_step < self._step:
            self._next.void = True
            if forget is not None:
                self._forget_again = self._step + 1, forget

    def shutdown(self) -> None:
        self._in_step.close()
        self._depot.close()


def _writers(runs: Iterable[wire.WriterRun], tokens: int, chunk_tokens: int) -> tuple[str, ...]:
    """The writers of the chunks that have the first `tokens` of a prompt."""
    last = min((run.end for run in runs if run.end * chunk_tokens >= tokens), default=0)
    return tuple({run.writer for run in runs if run.end <= last})
