"""One run of the simulation: a seed decides the machine, the engines, what they do, and what goes wrong.

`simulate(seed)` returns the world when every invariant held, and raises `Broken` when one did not.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from operator import methodcaller

from kvdepot.memory.records import SLOT_BYTES
from kvdepot.tiers.worker import Find, Load, Save
from tests.sim.content import CHUNK_TOKENS
from tests.sim.contract import CONTRACT_MODES, ContractEngine
from tests.sim.engine import MODES, Engine
from tests.sim.groups import HYBRIDS, MODELS, TAILED, Hybrid
from tests.sim.host import ARENA, Host, new_config
from tests.sim.odd import LOUD_RATE, OddClients
from tests.sim.tiers import new_stores
from tests.sim.world import World

STEPS = 150
"""Engine steps of a run, until everyone leaves."""
HYBRID_RUNS = 0.5
"""The share of runs with hybrid models. Their engines do more in a step, so that these runs have fewer."""
_SETTLE_S = 120.0
_PAGE = 4096
Kind = tuple[Hybrid, str]
"""Of an engine: model and mode."""


class Broken(AssertionError):
    """An invariant did not hold."""

    def __init__(self, world: World, cause: BaseException) -> None:
        super().__init__(f"seed {world.seed}: {type(cause).__name__}: {cause}")
        self.world = world


class Run(Host):
    """A host, its engines, and their misfortunes."""

    chunk_tokens = CHUNK_TOKENS

    def __init__(self, seed: int, steps: int = STEPS) -> None:
        world = World(seed)
        random = world.random
        config = new_config(
            self.chunk_tokens,
            max_queued=random.choice([2, 1024, 1024, 1024]),
            drain_s=random.choice([0.2, 5.0]),
            on_stop=random.choice(["remove", "keep"]),
            verify=random.choice(["off", "sampled", "always"]),
            lookup_s=random.choice([0.02, 0.1, 1.0]),
            ttl_s=random.choice([0, 0, 0, 0, 0, 2, 60]),
            max_rate=LOUD_RATE if seed % 16 == 5 else 20_000,
            idle_exit=1.0 if seed % 4 == 2 else 0.0,
        )
        slots = random.choice([3, 24, 256, 256, 256])
        pages = random.choice([1, 8, 16, 24, 24, 24, 32, 48, 48, 96])
        stores = new_stores(world) if seed % 6 != 1 else []  # without tiers, lookups wait for stores alone
        super().__init__(world, config, arena_bytes=_PAGE * pages, table_slots=slots, stores=stores)
        self.engines: list[Engine] = []
        self._odd = OddClients(self)
        self._steps = steps
        self.steps_taken = 0
        self._lives = 0
        # Each run has some of the faults, so that some go far into the works and others hit early.
        self._faults = [fault for fault in self.faults() if world.chance(0.35)]
        self._faults += [fault for fault in TIER_FAULTS if self.stores and world.chance(0.35)]
        self._every_s = world.spread(0.02, 1.0)
        self._over = False
        self._rarer = 1.0
        self._last_taken = 0
        world.note(f"seed {seed}: {[fault.__name__ for fault in self._faults]} every {self._every_s:.3f} s")

    # -- the course of a run

    def run(self) -> World:
        world = self.world
        try:
            if world.seed % 8 == 3:  # engines are there first, and connect late
                world.after(world.seed % 7 * 2.0, self.start_server)
            else:
                self.start_server()
            self._start_engines()
            world.after(self._every_s, self._misfortune)
            self._run_until(lambda: self.steps_taken >= self._steps, 100_000.0, "the engines' steps")
            self._leave()
        except Exception as exc:  # the top of a run: whatever it is, the log tells how it came about
            world.note(f"BROKEN {type(exc).__name__}: {exc}")
            raise Broken(world, exc) from exc
        finally:
            for engine in self.engines:
                engine.kill_processes()
        return world

    def faults(self) -> list[Callable[..., None]]:
        """The faults that may be drawn for this run, beside the faults of stores."""
        return FAULTS

    def _start_engines(self) -> None:
        world, choose = self.world, self.world.random.choice
        kinds = self._with_hybrids(
            [(choose(MODELS), choose(CONTRACT_MODES)) for _ in range(world.random.randint(1, 2))]
        )
        for model, mode in kinds:
            self._start_engine(model, mode)
        if len(self.engines) == 1 or world.chance(0.3):
            self._start_engine(*kinds[0])  # somebody to share with

    def _run_until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        world = self.world
        end = world.now + limit_s
        while not done():
            assert world.step(), f"nothing happens any more, and {what} are not done"
            assert world.now < end, f"{what} are not done after {limit_s:g} s"

    def _leave(self) -> None:
        """All faults end; engines finish what they have and go; then nothing may be left."""
        world = self.world
        self._over = True
        world.note("everyone leaves")
        self._heal()
        self._odd.leave()
        for engine in self.engines:
            engine.leaving, engine.pause_s = True, 0.0
            if engine.serving:
                engine.process.wake()
        if self.server is None:
            self.start_server()
        self._run_until(lambda: not any(engine.requests for engine in self._living()), _SETTLE_S, "requests")
        self._run_until(self._idle, _SETTLE_S, "what clients asked")
        assert self.server is not None
        self.server.check_idle()
        for engine in self.engines:
            engine.may_go = True
        self._run_until(self._engines_gone, _SETTLE_S, "engines")
        for what in range(4):
            end = world.now + 1.0
            world.after(1.0, lambda: None)
            self._run_until(lambda end=end: world.now >= end, 10.0, f"second {what} of quiet")  # type: ignore[misc]
        self._run_until(self._tiers_idle, _SETTLE_S, "what tiers are asked")
        assert self.server is not None
        self.server.check_quiet()
        self.server.count()

    def _tiers_idle(self) -> bool:
        return self.server is not None and not self.server.has_tier_tasks()

    def _idle(self) -> bool:
        server = self.server
        if server is None or not server.serving or server.depot.operations:
            return False
        if server.depot.tiering.loads or server.depot.tiering.forgettings or server.depot.removals:
            return False  # whose askers have stopped waiting, perhaps
        if any(server.is_busy_for(client.link) for client in self.clients):
            return False  # a client that has found its server again registers anew, without being asked
        return all(engine.serving for engine in self._living()) and not any(client.pending() for client in self.clients)

    def _engines_gone(self) -> bool:
        return not any(engine.alive for engine in self.engines)

    def _with_hybrids(self, kinds: list[Kind]) -> list[Kind]:
        """In some runs hybrid models instead of some. Drawn from numbers of their own: the others stay as they are."""
        draw = random.Random(self.world.seed ^ 0x4B1D)
        if draw.random() >= HYBRID_RUNS:
            return kinds
        self._steps = self._steps * 4 // 5
        if len(kinds) > 1 and draw.random() < 0.15:
            return [(model, MODES[0]) for model in HYBRIDS[:2]]  # of one name
        models = TAILED if draw.random() < 0.5 else HYBRIDS
        return [(draw.choice(models), draw.choice(MODES)) if draw.random() < 0.8 else kind for kind in kinds]

    def _start_engine(self, model: Hybrid, mode: str) -> None:
        self._lives += 1
        num_blocks = self.world.random.choice([10, 20, 30]) * (3 if model.has_tails else 1)
        kind = ContractEngine if model in MODELS else Engine
        engine = kind(self, f"e{self._lives}", model, mode, num_blocks)
        self.world.note(f"{engine!r} starts")
        self.engines.append(engine)

    # -- misfortunes

    def _misfortune(self) -> None:
        if self._over:
            return
        if self._faults:
            fault = self.world.random.choice(self._faults)
            if fault in AT_COPIES and self.world.chance(0.5):
                self.at_copy = lambda name: None if self._over else fault(self, name)
            elif fault in AT_TIER_TASKS and self.stores and self.world.chance(0.5):
                kind = self.world.random.choice([Find, Load, Load, Save])
                self.at_tier_task = kind, lambda: None if self._over else fault(self)
            else:
                fault(self)
        for engine in list(self.engines):
            if not engine.alive:
                self._bury(engine)
        # While engines are idle for hours, misfortunes get rarer too.
        self._rarer = 1.0 if self.steps_taken != self._last_taken else min(self._rarer * 1.5, 1000.0)
        self._last_taken = self.steps_taken
        self.world.after(self._rarer * self._every_s * 2 * self.world.random.random(), self._misfortune)

    def _bury(self, engine: Engine) -> None:
        """A dead engine starts again."""
        self.engines.remove(engine)
        self.steps_taken += 1
        if self.config.idle_exit and self._lives % 2:  # a server without engines ends before it comes
            self.world.after(5 * self.config.idle_exit, self._come_back, engine)
        else:
            self._start_engine(engine.model, engine.mode)

    def _come_back(self, engine: Engine) -> None:
        if not self._over:
            self._start_engine(engine.model, engine.mode)

    def _living(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.alive]

    def _restart_later(self) -> None:
        if self._over:
            self.start_server()
            return
        delay_s = self.world.spread(0.001, 0.1) if self.world.chance(0.6) else self.world.spread(0.1, 20.0)
        if delay_s < 0.1:
            self.world.counters["server_restarted_at_once"] += 1
        self.world.after(delay_s, self.start_server)

    def _heal(self) -> None:
        self.shm_full = self.copies_slow = self.network_slow = False
        self.copy_failures = self.map_failures = 0.0
        for store in self.stores:
            store.slow = False
            store.tier.inject()
            store.go_on()
        if self.server is not None:
            self.server.thaw()
        for process in [process for engine in self.engines for process in engine.processes]:
            process.resume()

    def kill_server(self, name: str = "") -> None:
        if self.server is not None:
            self.world.counters["server_killed"] += 1
            self.server.kill()
            self._restart_later()

    def stop_server(self) -> None:
        """A planned restart."""
        server = self.server
        if server is not None and server.serving and not server.draining and not server.frozen:
            self.world.counters["server_shut_down"] += 1
            server.stop()
            self._when_gone(server)

    def server_wants_to_stop(self) -> None:
        """The core has decided that no engine uses it."""
        if not self._over:
            self.world.counters["server_idle_exit"] += 1
            self.stop_server()

    def _when_gone(self, server: object) -> None:
        if self.server is server:
            self.world.after(0.01, self._when_gone, server)
        elif self.server is None:
            self._restart_later()

    def freeze_server(self, name: str = "") -> None:
        server = self.server
        if server is not None and server.serving and not server.frozen:
            duration_s = self.world.spread(0.005, 45.0)
            self.world.counters["server_stopped"] += 1
            self.world.counters["server_stopped_long"] += duration_s > 10
            self.world.note(f"{server!r} stops for {duration_s:.3f} s")
            server.freeze()
            self.world.after(duration_s, server.thaw)

    def cut_link(self, name: str = "") -> None:
        links = [link for link in self.network.links if name in ("", link.name)]
        if links:
            link = self.world.random.choice(links)
            if link.up:
                self.world.counters["connection_cut"] += 1
                self.world.note(f"{link!r} is cut")
                link.cut_at = self.world.now
                link.cut()

    def slow_link(self) -> None:
        if self.network.links:
            self.world.random.choice(self.network.links).slow_until = self.world.now + self.world.spread(0.1, 3.0)
            self.world.counters["connection_slow"] += 1

    def slow_network(self) -> None:
        self.network_slow = not self.network_slow
        self.world.counters["network_slow"] += self.network_slow

    def slow_copies(self) -> None:
        self.copies_slow = not self.copies_slow
        self.world.counters["copies_slow"] += self.copies_slow

    def fail_copies(self) -> None:
        self.copy_failures = 0.0 if self.copy_failures else 0.2

    def fail_mappings(self) -> None:
        self.map_failures = 0.0 if self.map_failures else 0.5

    def fill_shm(self) -> None:
        self.shm_full = not self.shm_full

    def kill_engine(self, name: str = "") -> None:
        engines = [engine for engine in self._living() if name.split(".")[0] in ("", engine.name)]
        if engines:
            engine = self.world.random.choice(engines)
            self.world.note(f"{engine!r} killed")
            self.world.counters["engine_killed"] += 1
            if engine.requests and any(r.storing for r in engine.requests.values()):
                self.world.counters["engine_killed_while_storing"] += 1
            if engine.requests and any(r.loading for r in engine.requests.values()):
                self.world.counters["engine_killed_while_loading"] += 1
            engine.kill()

    def stop_engine(self) -> None:
        if self._living():
            engine = self.world.random.choice(self._living())
            self.world.counters["engine_stopped"] += 1
            self.world.counters["engine_stopped_during_copy"] += any(each.copying is not None for each in engine.blocks)
            duration_s = self.world.spread(0.01, 10.0)
            for process in engine.processes:
                process.stop()
                self.world.after(duration_s, process.resume)

    def idle_for_hours(self) -> None:
        if self._living():
            self.world.random.choice(self._living()).pause_s = self.world.random.randint(1, 3) * 3600.0
            self.world.counters["engine_idle_for_hours"] += 1

    def pause_with_pins(self, engine: Engine) -> bool:
        """Whether an engine that has just been told of a hit takes hours before it goes on."""
        if self._over or Run.idle_for_hours not in self._faults or not self.world.chance(0.05):
            return False
        engine.pause_s = 3600.0
        return True

    def flip_chunk(self) -> None:
        server = self.server
        if self.config.verify != "off" and server is not None and server.serving:
            self.world.counters["chunk_flipped"] += server.flip_chunk()

    def flip_table(self) -> None:
        """Bits of the records; they are read again after the next restart."""
        file = self.files.get(ARENA)
        if file is not None:
            slot = self.world.random.randrange(min(self.table_slots, 40))
            for _ in range(self.world.random.randint(1, 3)):
                at = slot * SLOT_BYTES + self.world.random.randrange(SLOT_BYTES)
                file.bytes[at] ^= 1 << self.world.random.randrange(8)
            file.table_flipped = True
            self.world.counters["table_flipped"] += 1

    def _let_some_engine(self, act: Callable[[Engine], None]) -> None:
        """Let one of the living engines do something, if it is served."""
        if self._living():
            engine = self.world.random.choice(self._living())
            if engine.serving:
                act(engine)

    def clear(self) -> None:
        self._let_some_engine(methodcaller("clear"))

    def pin(self) -> None:
        self._let_some_engine(methodcaller("pin"))

    def forget(self) -> None:
        self._let_some_engine(methodcaller("forget"))

    def hang_tier(self) -> None:
        store = self.world.random.choice(self.stores)
        if not store.hangs:
            self.world.counters["tier_hung"] += 1
            self.world.note(f"{store.config.name} hangs")
            store.hang()
            self.world.after(self.world.spread(0.02, 20.0), store.go_on)

    def slow_tier(self) -> None:
        store = self.world.random.choice(self.stores)
        store.slow = not store.slow
        self.world.counters["tier_slow"] += store.slow

    def spoil_tier(self) -> None:
        self.world.random.choice(self.stores).spoil()

    def lose_tier(self) -> None:
        store = self.world.random.choice(self.stores)
        store.tier.inject(down=1)
        self.world.counters["tier_down"] += 1
        self.world.after(self.world.spread(0.1, 10.0), store.tier.inject)

    def lose_arena(self) -> None:
        """The server is killed, and its shared memory goes too: only tiers are left."""
        if self.server is not None:
            self.world.counters["arena_lost"] += 1
            self.kill_server()
            self.files.pop(ARENA, None)

    def store_elsewhere(self) -> None:
        self._let_some_engine(lambda engine: engine.store_elsewhere(2))

    def mix_up_tier(self) -> None:
        self.world.counters["objects_mixed_up"] += self.world.random.choice(self.stores).mix_up()


FAULTS: list[Callable[..., None]] = [
    Run.kill_server,
    Run.stop_server,
    Run.freeze_server,
    Run.cut_link,
    Run.slow_link,
    Run.slow_network,
    Run.slow_copies,
    Run.fail_copies,
    Run.fail_mappings,
    Run.fill_shm,
    Run.kill_engine,
    Run.stop_engine,
    Run.idle_for_hours,
    Run.clear,
    Run.flip_chunk,
    Run.flip_table,
    Run.pin,
    Run.forget,
]
TIER_FAULTS: list[Callable[..., None]] = [
    Run.hang_tier,
    Run.slow_tier,
    Run.spoil_tier,
    Run.lose_tier,
    Run.mix_up_tier,
    Run.lose_arena,
    Run.store_elsewhere,
]

AT_COPIES = {Run.kill_server, Run.freeze_server, Run.cut_link, Run.kill_engine}
"""Faults that are drawn to copies: half of them strike in the middle of one."""

AT_TIER_TASKS = {Run.kill_server, Run.freeze_server, Run.forget, Run.hang_tier}
"""Faults that are drawn to tasks of tiers: half of them strike in the middle of a task."""

EXPECTED = frozenset(
    """
    aborted_asked aborted_loading aborted_matched aborted_running answer_Busy answer_ProtocolError
    arena_taken_over_in_use
    answer_UnknownClient answer_UnknownInstance arena_kept blocks_kept_for_stores chunk_flipped cleared
    client_doubts_its_server compared
    clients_found_dead connection_cut connection_slow copies_slow copy_failed engine_could_not_start
    engine_idle_for_hours engine_killed engine_killed_while_loading engine_killed_while_storing engine_shut_down
    engine_stopped engine_stopped_during_copy finished_ids_twice flip_found hit load_done load_failed lookup_not_awaited
    mapping_failed miss network_slow partial_hit pause_between_lookup_and_retrieve preempted record_torn
    records_damaged recovered_with_repeats replies_without_connection server_drained server_killed
    server_killed_during_retrieve server_killed_during_store server_left_with_copies server_restarted_at_once
    server_shut_down server_stopped server_stopped_during_copy server_stopped_long shards_lost_to_flips
    shards_recovered shm_full_during_store store_arrived_after_death stores_given_up table_flipped
    arena_lost demoted demotion_overtaken errand_hung expired_chunks forgotten forgotten_during_tier_find
    forgotten_during_tier_load forgotten_during_tier_save forgotten_with_errors late_load_sealed late_load_used
    load_for_several load_without_room lookup_asked_again lookup_at_its_deadline lookup_cut_short objects_mixed_up
    pinned_by_name queue_full server_killed_during_tier_load server_killed_during_tier_save server_left_hung_tier
    stopped_with_searches stored_elsewhere tier_back tier_down tier_evicted tier_hit_chunks tier_hung
    tier_late tier_loaded_chunks tier_missed_chunks tier_overtaken_chunks tier_refused_chunks tier_saved_chunks
    corrupt_erased tier_slow tier_corrupt_chunks tier_tripped tier_undemoted_chunks unpinned
    bounded_parts_recovered groups_hit groups_hit_before_the_last_chunk groups_hit_from_tiers groups_hit_of_two_models
    groups_load_done groups_load_failed groups_miss_by_a_bounded_part groups_passed_while_storing
    groups_stored_without_state
    lookup_awaited_tail tail_continued tail_found_behind_memory tail_hit tail_hit_from_tiers tail_stored
    engine_connected_late server_idle_exit
    clear_while_removing forgetchunks_while_removing lookup_while_removing takelease_while_removing
    retrieve_while_removing
    server_died_while_removing store_while_removing
    asker_died_while_waiting awaited_chunks awaited_store_failed late_lookups lookup_awaited_room lookup_awaited_store
    lookup_answered_again shortened_lookups
    storer_died_while_awaited
    store_yielded wanted_evicted_for_sooner
    completed_twice completed_at_a_successor copy_asked_again now_equals_deadline
    """.split()  # noqa: SIM905 - a list of sixty strings is no easier to read
)
"""What must have happened somewhere in a thousand seeds, or they prove less than they seem to."""


def simulate(seed: int, steps: int = STEPS) -> World:
    """Run one seed. Raises Broken at the first invariant that does not hold."""
    log = logging.getLogger("kvdepot")
    level = log.level
    log.setLevel(logging.CRITICAL)  # failures are the point here
    try:
        return Run(seed, steps).run()
    finally:
        log.setLevel(level)
