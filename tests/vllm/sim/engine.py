"""One life of a simulated vLLM engine: an engine of by_hand.py on a process of the simulation, and its callers.

Callers send prompts that begin alike, end within chunks and at their ends, are repeated, and are continued as chats;
some alone, some as storms. They abort some, and operators reset the engine's cache.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdepot.errors import KVDepotError
from kvdepot.keys import derive_root, salt_tag
from kvdepot.protocol import wire
from tests.sim.host import Client, Processes
from tests.sim.world import Process
from tests.vllm import by_hand
from tests.vllm.by_hand import BLOCK, CHUNK, VOCABULARY, Text
from tests.vllm.sim.join import URL, EngineBlocks, EngineClient

if TYPE_CHECKING:
    from tests.vllm.sim.run import VllmRun

MOST_SAID = 4, 12, 48
STILL_S, LOADING_STILL_S = 12.0, 75.0
"""An engine that is not stopped computes something, or moves a byte, at least this often while it has requests; where
it loads, an operation may wait for its server for a minute (client/lane.py)."""


@dataclass(frozen=True)
class Kind:
    """A model and how its engine runs it; equal in all lives of an engine."""

    blocks: int = 24
    steps: int = 1
    window: int = 0
    states: tuple[int, ...] = ()
    seats: int = 4
    batch: int = 160
    policy: str = "fcfs"
    trust: str = "given"
    saves: str = "on"
    spacing: int = 0
    has_own_cache: bool = True

    @staticmethod
    def draw(draw: random.Random) -> Kind:
        shape = draw.choice(["whole", "whole", "whole", "window", "states"])
        return Kind(
            blocks=draw.choice([12, 12, 16, 24, 40]),
            steps=draw.choice([1, 2]),
            window=96 if shape == "window" else 0,
            states=(CHUNK, draw.choice([BLOCK, CHUNK])) if shape == "states" else (),
            seats=draw.choice([1, 3, 8, 8]),
            batch=draw.choice([96, 160, 512]),
            policy=draw.choice(["fcfs", "fcfs", "priority"]),
            trust=draw.choice(["given", "earned"]),
            saves=draw.choice(["on", "off", "auto"]),
            spacing=draw.choice([0, 1, 2]),
            has_own_cache=shape == "states" or draw.random() < 0.5,  # without, the depot has more to give
        )

    @property
    def block(self) -> int:
        return self.states[0] if self.states else BLOCK

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the longest request that its blocks can have; a state takes one or two."""
        return min(400, (self.blocks - 3 - 4 * bool(self.states)) * self.block)


@dataclass(eq=False)
class Asked:
    """A request of a caller."""

    made: Any  # vLLM's object
    chat: int  # the number of the conversation that it continues
    storing = False

    @property
    def loading(self) -> bool:
        from vllm.v1.request import RequestStatus

        return bool(self.made.status == RequestStatus.WAITING_FOR_REMOTE_KVS)


class Engine(Processes):
    def __init__(self, run: VllmRun, name: str, kind: Kind, writer: str) -> None:
        """writer: the name under which it stores, equal in all its lives."""
        self.host, self.world, self.name = run, run.world, name
        self.model, self.mode = kind, writer
        self.alive, self.leaving, self.may_go, self.serving = True, False, False, False
        self.pause_s = 0.0
        self.requests: dict[str, Asked] = {}
        self.clients: list[Client] = []
        self.blocks: list[EngineBlocks] = []
        self.uses: list[tuple[Any, object]] = []  # of arenas, by steps
        self.hand: Any = None  # the engine of by_hand.py
        self._arrived = 0
        self.ordered, self.told = Counter[str](), Counter[str]()  # shards, by what becomes of them
        self._moved_at = self.world.now  # when it last computed something or had nothing to do
        self._last_s = 0.0  # when it was last seen to run
        self.process = Process(run.world, name, self._main)

    def __repr__(self) -> str:
        return f"<Engine {self.name} {self.model} {self.mode}, {len(self.requests)} requests>"

    # -- its life

    def new_client(self) -> Client:
        client = EngineClient(self.host, self.process, f"{self.name}.{'r' if self.clients else 's'}")
        self.clients.append(client)
        return client

    def _main(self) -> None:
        run, process = self.host, self.process
        process.wait(lambda: not run.is_making, float("inf"), 0.05)
        run.begin_making(self)
        try:
            self.hand = self._make()
        except KVDepotError as exc:
            self.world.note(f"{self.name} cannot start: {exc}")
            self.world.counters["engine_could_not_start"] += 1
            self.end()
            return
        finally:
            run.end_making()
        self.hand.scheduled, self.hand.worker.computing = self._scheduled, self._computes
        self._update, self.hand.scheduler.update_from_output = self.hand.scheduler.update_from_output, self._hear
        self.serving = True
        while not (self.may_go and not self.requests):
            self._step()
        self.check_quiet()
        for connector in (self.hand.scheduler.connector, self.hand.worker.connector):
            connector.shutdown()
        self.world.counters["engine_shut_down"] += 1
        self.end()

    def _make(self) -> by_hand.Engine:
        kind = self.model
        arguments = {
            "max_num_seqs": kind.seats, "max_num_batched_tokens": max(kind.batch, kind.block),
            "scheduling_policy": kind.policy, "enable_prefix_caching": kind.has_own_cache,
        }  # fmt: skip
        settings: dict[str, Any] = {
            "kvdepot.required": False, "kvdepot.trust": kind.trust, "kvdepot.save_decode": kind.saves,
            "kvdepot.boundary_chunks": kind.spacing,
        }  # fmt: skip
        return by_hand.Engine(
            URL, self.host.folder, kind.steps, kind.blocks, kind.window, kind.states, writer=self.mode,
            arguments=arguments, **settings,
        )  # fmt: skip

    def end(self) -> None:
        """It is gone, whatever the reason: the kernel takes its locks and connections."""
        self.alive = self.serving = False
        for file, key in self.uses:
            file.uses.pop(key, None)
        for blocks in self.blocks:
            blocks.memory.dead = True
        for client in self.clients:
            if not client._closed:
                self.world.after(0.02 * self.world.random.random(), client.gone)

    # -- what others do to it

    @property
    def _half(self) -> Any:
        return self.hand.scheduler.connector._half

    @property
    def _worker_half(self) -> Any:
        return self.hand.worker.connector._half

    def clear(self) -> None:
        self.world.counters["cleared"] += 1
        self.clients[0].ask(wire.Clear(self._half._model))

    def forget(self) -> None:
        what = self.world.random.choice(["model", "salt", "all"])
        model, salt = self._half._model if what == "model" else "", salt_tag("tenant") if what == "salt" else b""
        self.clients[0].ask(wire.ForgetChunks(model, salt))

    def store_elsewhere(self, streams: int) -> None:
        """Nothing: what is in tiers has come from here."""

    def is_free(self, block: int) -> bool:
        return bool(self.hand.scheduler.kv_cache_manager.block_pool.blocks[block].ref_cnt == 0)

    # -- steps

    def _scheduled(self, planned: Any) -> None:
        tokens, orders = planned.num_scheduled_tokens, planned.kv_connector_metadata
        counters = self.world.counters
        counters["loads"] += len(orders.loads)
        counters["loads_in_steps"] += len(orders.step_loads)
        counters["preempted"] += len(planned.preempted_req_ids or ())
        if tokens:
            self.world.note(f"{self.name} computes {tokens}")
        if self.world.chance(0.1):  # workers are processes of their own
            self.process.sleep(self.world.spread(0.0001, 0.01))

    def _hear(self, planned: Any, output: Any) -> Any:
        """A step has ended. A worker that is not connected has neither stored nor loaded."""
        orders, told = planned.kv_connector_metadata, output.kv_connector_output
        loads = [transfer for transfers in orders.loads.values() for transfer in transfers]
        if self._worker_half.is_connected:
            self.ordered["stored"] += sum(transfer.chunks for transfer in orders.stores)
            self.ordered["retrieved"] += sum(transfer.chunks for transfer in loads)
            self.ordered["retrieved"] += sum(len(load.ranks[0]) for load in orders.step_loads)
        self._count(told.kv_connector_stats if told is not None else None)
        self.world.counters["stalls_broken"] += self._half.stats.data.pop("stalls_broken", 0)
        return self._update(planned, output)

    def _count(self, stats: Any) -> None:
        for name, count in (stats.data if stats is not None else {}).items():
            if name.endswith("_shards"):
                self.told[name] += count

    def _computes(self, tokens: int) -> None:
        self.process.sleep(tokens * self.host.token_s)
        self._moved_at = self.world.now

    def _step(self) -> None:
        world, scheduler = self.world, self.hand.scheduler
        self.host.steps_taken += 1
        if not self.leaving and len(self.requests) < 12 and world.chance(0.25):
            storm = world.random.randint(3, 8) if world.chance(0.2) else 1
            world.counters["storms"] += storm > 1
            chat = self.host.draw_chat()
            for _ in range(storm):
                self._arrive(chat if storm > 1 and world.chance(0.7) else self.host.draw_chat())
        if self.requests and world.chance(0.01):
            self._abort(world.random.choice([*self.requests.values()]))
        if world.chance(0.002):
            self._reset()
        computed_at = self._moved_at
        if self.hand.is_busy:
            self.hand.step()
        self._look(scheduler)
        self._check_still(computed_at == self._moved_at)
        pause_s = self.pause_s or world.spread(0.0001, 0.003 if self.hand.is_busy else 0.05)
        self.pause_s = 0.0
        self.process.sleep(pause_s)

    def _arrive(self, chat: int) -> None:
        world, kind = self.world, self.model
        says = world.random.randint(1, world.random.choice(MOST_SAID))
        tokens = self.host.draw_prompt(chat, kind.most_tokens - says)
        salt = "tenant" if world.chance(0.1) else None
        self._arrived += 1
        name = f"{self.name}-{self._arrived}"
        priority = world.random.randrange(3) if kind.policy == "priority" else 0
        made = self.hand.add(name, tokens, says, arrival_time=world.now, priority=priority, cache_salt=salt)
        self.requests[name] = Asked(made, chat)
        self._name_chunks(made)
        world.note(f"{name} arrives: {len(tokens)} tokens, says {says}")

    def _name_chunks(self, made: Any) -> None:
        text = Text(made.prompt_token_ids).until(made.num_prompt_tokens + made.max_tokens + 2)
        salt = (("salt", made.cache_salt),) if made.cache_salt else ()
        root = derive_root(*self._half._weights.parts, *salt)
        self.host.name_chunks(text, root, self.hand.worker.weights, has_tails=bool(self.model.states))

    def _abort(self, asked: Asked) -> None:
        from vllm.v1.request import RequestStatus

        self.world.counters[f"aborted_{asked.made.status.name.lower()}"] += 1
        self.hand.scheduler.finish_requests(asked.made.request_id, RequestStatus.FINISHED_ABORTED)

    def _reset(self) -> None:
        scheduler, chance = self.hand.scheduler, self.world.chance
        self.hand.take(self.model.steps)  # as an engine that is paused first: what a step under way uses is not freed
        preempts = chance(0.5) and not (self._half.holds.is_any_held or scheduler.deferred_frees)
        running, tables = {made.request_id for made in scheduler.running}, scheduler.kv_cache_manager.get_block_ids
        preempts &= not any(any(tables(name)) for name in scheduler.requests if name not in running)  # vLLM would raise
        is_update = chance(0.3)
        self.world.counters["reset"] += 1
        self.world.note(f"{self.name} resets{' and preempts' * preempts}{' for other weights' * is_update}")
        scheduler.reset_prefix_cache(preempts, is_update)
        if is_update and (preempts or not self.requests):
            self.hand.worker.weights += b"again"
            self.world.counters["weights_updated"] += 1
        for asked in self.requests.values():
            self._name_chunks(asked.made)

    def _look(self, scheduler: Any) -> None:
        """A request that has ended has said what it must, and a chat goes on from there."""
        from vllm.v1.request import RequestStatus

        for name, asked in list(self.requests.items()):
            made = asked.made
            if not made.is_finished():
                continue
            del self.requests[name]
            self.world.note(f"{name} ends: {made.status.name}, {made.num_output_tokens} said")
            if made.status == RequestStatus.FINISHED_ABORTED:
                continue
            by_hand.check(made)
            assert made.status == RequestStatus.FINISHED_LENGTH_CAPPED, f"{name} has ended: {made.status.name}"
            assert made.num_output_tokens == made.max_tokens, f"{name} has said {made.num_output_tokens} tokens"
            self.world.counters["answered"] += 1
            self.world.counters["begun_behind_tokens"] += max(self.hand.worker.begun.get(name, [0])) > 0
            self.host.answered(asked.chat, list(made.all_token_ids))
        for name in [name for name in self.hand.worker.texts if name not in scheduler.requests]:
            del self.hand.worker.texts[name]

    def _check_still(self, is_still: bool) -> None:
        """With requests, it goes on, whatever the server does."""
        now, counters = self.world.now, self.world.counters
        has_slept = now - self._last_s > 1.0  # it was stopped, or its own step waited
        self._last_s = now
        if not self.requests or has_slept or not is_still or any(each.copying is not None for each in self.blocks):
            self._moved_at = now
            return
        still_s = now - self._moved_at
        counters["stood_still_s"] = max(counters["stood_still_s"], int(still_s))
        loads = [name for name, asked in self.requests.items() if asked.loading]
        limit_s = LOADING_STILL_S if loads else STILL_S
        states = {name: asked.made.status.name for name, asked in self.requests.items()}
        assert still_s < limit_s, f"{self.name} has stood still for {still_s:.1f} s: {states}"

    # -- at the end

    def check_quiet(self) -> None:
        """Without requests, it holds nothing."""
        scheduler, half, deadline = self.hand.scheduler, self._half, self.world.now + LOADING_STILL_S
        while self.hand.is_busy or scheduler.requests or half.holds.is_any_held:
            assert self.world.now < deadline, f"{self.name} never frees the blocks of {[*scheduler.requests]}"
            self.hand.step()
            self.process.sleep(0.01)
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, f"{self.name} has lost blocks"
        assert not half._tracked, f"{self.name} goes on to know {[*half._tracked]}"
        self._count(self._worker_half.stats.take())
        for done, failed in (("stored", "store_failed"), ("retrieved", "retrieve_failed")):
            ended = self.told[f"{done}_shards"] + self.told[f"{failed}_shards"]
            assert ended == self.ordered[done], (
                f"{self.name}: of {self.ordered[done]} shards, {ended} were {done} or not"
            )
            self.world.counters[f"shards_{done}"] += self.told[f"{done}_shards"]
            self.world.counters[f"shards_{failed}"] += self.told[f"{failed}_shards"]


def new_tokens(draw: random.Random, number: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(number)]
