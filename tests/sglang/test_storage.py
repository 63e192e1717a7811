"""The backend below SGLang's own factory, controller, host pools and failure injector; real servers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdepot.errors import ConfigError, Unavailable
from tests.conftest import HANG_S, Depot, StartDepot, ends, eventually, suspend
from tests.sglang import parts
from tests.sglang.parts import (
    PAGE,
    Engine,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    backend,
    config,
    device_pool,
    envs,
    extra,
    hashes,
    host_pool,
)

StartEngine = Callable[..., Engine]


@pytest.fixture(scope="module", autouse=True)
def _published(tmp_path_factory: pytest.TempPathFactory) -> None:
    parts.publish(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _not_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's engines are processes of their own, whose weights have not changed yet."""
    monkeypatch.setattr("kvdepot.integrations.sglang.identity._are_updated", False)


@pytest.fixture(scope="module")
def depot() -> Iterator[Depot]:
    server = Depot(chunk_size="auto").wait_ready()
    yield server
    server.close()


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    started: list[Engine] = []

    def start(*arguments: Any, **options: Any) -> Engine:
        started.append(Engine(*arguments, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Backends that end with the test."""
    made: list[Any] = []

    def make_one(*arguments: Any) -> Any:
        made.append(backend(*arguments))
        return made[-1]

    yield make_one
    for each in made:
        each.close()


class TestController:
    @pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct"])
    def test_pages_that_were_backed_up_are_prefetched_as_they_were(
        self, depot: Depot, start_engine: StartEngine, layout: str
    ) -> None:
        engine = start_engine(depot.url, layout)
        slots, stored = engine.back_up(1, 2, 3)
        assert stored == 3 * PAGE
        found, loaded_slots, loaded = engine.prefetch(1, 2, 3, 4)
        assert (found, loaded) == (3 * PAGE, 3 * PAGE)
        assert engine.bytes_at(loaded_slots) == engine.bytes_at(slots) != engine.bytes_at(slots.flip(0)[::PAGE])

    def test_another_engine_of_the_same_model_finds_them(self, depot: Depot, start_engine: StartEngine) -> None:
        first, second = start_engine(depot.url), start_engine(depot.url)
        slots, _ = first.back_up(11, 12)
        found, loaded_slots, _ = second.prefetch(11, 12)
        assert found == 2 * PAGE and second.bytes_at(loaded_slots) == first.bytes_at(slots)
        other = start_engine(depot.url, **{"kvdepot.weights_revision": "other"})
        assert other.prefetch(11, 12)[0] == 0

    def test_a_flush_keeps_what_is_stored_and_an_update_of_weights_does_not(
        self, depot: Depot, start_engine: StartEngine
    ) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        engine = start_engine(depot.url)
        engine.back_up(21, 22)
        engine.flush()
        assert engine.prefetch(21, 22)[0] == 2 * PAGE
        with contextlib.suppress(Exception):  # there is no model
            WeightUpdater.update_weights_from_tensor(None, named_tensors=[], load_format=None)
        assert engine.back_up(23)[1] == 0 and engine.prefetch(21, 22)[0] == 0
        engine.flush()
        assert engine.prefetch(21, 22)[0] == 0
        assert engine.back_up(21)[1] == PAGE and engine.prefetch(21, 22)[0] == PAGE

    @pytest.mark.faults
    def test_a_server_that_dies_costs_misses_and_no_thread(
        self, start_depot: StartDepot, start_engine: StartEngine
    ) -> None:
        depot = start_depot(chunk_size="auto")
        engine = start_engine(depot.url)
        slots, _ = engine.back_up(1, 2)
        depot.process.kill()
        depot.process.wait(HANG_S)
        with ends():
            assert engine.prefetch(1, 2)[::2] == (0, 0) and engine.back_up(3)[1] == 0
        start_depot(chunk_size="auto", url=depot.url, name=depot.name)
        eventually(lambda: engine.prefetch(1, 2)[0] == 2 * PAGE)
        assert engine.bytes_at(engine.prefetch(1, 2)[1]) == engine.bytes_at(slots)

    @pytest.mark.faults
    def test_a_server_that_hangs_costs_misses_and_no_thread(
        self, start_depot: StartDepot, start_engine: StartEngine
    ) -> None:
        depot = start_depot(chunk_size="auto")
        engine = start_engine(depot.url)
        engine.back_up(1, 2)
        suspend(depot.process.pid)
        try:
            with ends():
                assert engine.prefetch(1, 2)[0] == 0 and engine.back_up(3)[1] == 0
        finally:
            os.kill(depot.process.pid, signal.SIGCONT)
        eventually(lambda: engine.prefetch(1, 2)[0] == 2 * PAGE)


@pytest.mark.skipif(HiCacheStorageFailureInjector is None, reason="this version of SGLang has no failure injector")
class TestFailureInjector:
    def test_injected_failures_are_misses(self, depot: Depot, start_engine: StartEngine) -> None:
        with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(1.0):
            engine = start_engine(depot.url)
            assert isinstance(engine.controller.storage_backend, HiCacheStorageFailureInjector)
            assert engine.back_up(31)[1] == 0 and engine.prefetch(31)[0] == 0
            engine.controller.storage_backend._backend.close()

    def test_with_failures_now_and_then_what_is_loaded_is_right(self, depot: Depot, start_engine: StartEngine) -> None:
        with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):
            engine = start_engine(depot.url)
            loaded = 0
            for page in range(1000, 1040):  # that each of 40 fails once in three calls, one run in 10 million sees
                slots, _ = engine.back_up(page)
                found, at, tokens = engine.prefetch(page)
                assert tokens == 0 or engine.bytes_at(at) == engine.bytes_at(slots)
                loaded += tokens
                for each in [slots, at] if found else [slots]:
                    engine.host.free(each)
            assert loaded > 0
            engine.controller.storage_backend._backend.close()


class TestRanks:
    def test_keys_of_tensor_parallel_ranks_are_found_when_all_have_stored(
        self, depot: Depot, make: Callable[..., Any]
    ) -> None:
        pools = [host_pool(device_pool()) for _ in range(2)]
        ranks = [make(config(depot.url, (rank, 2)), ("kv", pool)) for rank, pool in enumerate(pools)]
        names, slots = hashes(51, 52), torch.arange(2 * PAGE)
        assert ranks[0].batch_set_v1(names, slots) == [True, True]
        assert [rank.batch_exists(names) for rank in ranks] == [0, 0]
        assert ranks[1].batch_set_v1(names, slots) == [True, True]
        assert [rank.batch_exists(names) for rank in ranks] == [2, 2]
        assert ranks[1].batch_get_v1(names, slots + 2 * PAGE) == [True, True]
        kept = pools[1].kv_buffer
        assert torch.equal(kept[:, : 2 * PAGE], kept[:, 2 * PAGE : 4 * PAGE])
        assert not torch.equal(pools[0].kv_buffer[:, : 2 * PAGE], kept[:, : 2 * PAGE])
        assert make(config(depot.url), ("kv", host_pool(device_pool()))).batch_exists(names) == 0

    def test_of_mla_one_rank_writes_and_all_read(self, depot: Depot, make: Callable[..., Any]) -> None:
        pools = [host_pool(device_pool("mla")) for _ in range(2)]
        ranks = [make(config(depot.url, (rank, 2), True), ("kv", pool)) for rank, pool in enumerate(pools)]
        names, slots = hashes(61), torch.arange(PAGE)
        assert ranks[0].batch_set_v1(names, slots) == [True]
        assert ranks[1].batch_exists(names) == 1 and ranks[1].batch_get_v1(names, slots) == [True]
        assert torch.equal(pools[0].kv_buffer[:PAGE], pools[1].kv_buffer[:PAGE])

    def test_ranks_find_what_all_have_stored_since_the_same_update(
        self, depot: Depot, make: Callable[..., Any]
    ) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        ranks = [make(config(depot.url, (rank, 2)), ("kv", host_pool(device_pool()))) for rank in range(2)]
        names, slots = hashes(76), torch.arange(PAGE)
        assert [rank.batch_set_v1(names, slots) for rank in ranks] == [[True], [True]]
        with contextlib.suppress(Exception):  # there is no model
            WeightUpdater.update_weights_from_tensor(None, named_tensors=[], load_format=None)
        for rank in ranks:
            rank.registered_pools[PoolName.KV].clear()
            assert rank.batch_exists(names) == 0 and rank.batch_set_v1(names, slots) == [True]
        assert [rank.batch_exists(names) for rank in ranks] == [1, 1]

    def test_what_is_attached_again_after_an_update_has_a_name_of_its_own(
        self, depot: Depot, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names, slots = hashes(71), torch.arange(PAGE)
        first = make(config(depot.url), ("kv", host_pool(device_pool())))
        assert first.batch_set_v1(names, slots) == [True]
        monkeypatch.setattr("kvdepot.integrations.sglang.identity._are_updated", True)
        again = [make(config(depot.url), ("kv", host_pool(device_pool()))) for _ in range(2)]
        assert again[0].batch_exists(names) == 0 and again[0].batch_set_v1(names, slots) == [True]
        assert [each.batch_exists(names) for each in (*again, first)] == [1, 0, 1]


class TestHybrid:
    """Pools of hybrid models: what is announced can be restored from all of them."""

    @pytest.fixture
    def hybrid(self, depot: Depot, make: Callable[..., Any]) -> Any:
        pools = [(name, host_pool(device_pool())) for name in ("kv", "indexer", "mamba")]
        return make(config(depot.url, extra_config=extra(depot.url, **{"kvdepot.weights_revision": "v2"})), *pools)

    def transfer(self, name: PoolName, keys: list[str], policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES) -> Any:
        return PoolTransfer(name=name, host_indices=torch.arange(len(keys) * PAGE), keys=keys, hit_policy=policy)

    def test_the_answer_is_what_all_pools_can_restore(self, hybrid: Any) -> None:
        names, known = hashes(71, 72, 73, 74, 75), HiCacheStorageExtraInfo(prefix_keys=[])
        trailing = PoolHitPolicy.TRAILING_PAGES
        assert all(hybrid.batch_set_v1(names, torch.arange(5 * PAGE), known))
        stored = hybrid.batch_set_v2([self.transfer(PoolName.INDEXER, names[:4])], known)
        assert stored == {PoolName.INDEXER: [True] * 4}
        for name in (names[1], names[2], names[4]):
            hybrid.batch_set_v2([self.transfer(PoolName.MAMBA, [name], trailing)])
        indexer = PoolTransfer(name=PoolName.INDEXER)

        def found(*transfers: Any) -> tuple[int, Any, Any]:
            result = hybrid.batch_exists_v2(names, list(transfers), known)
            return result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages

        assert found() == (5, {"kv": 5}, [1, 2, 3, 4, 5])
        assert found(indexer) == (4, {"kv": 5, "indexer": 4}, [1, 2, 3, 4])
        state = PoolTransfer(name=PoolName.MAMBA, keys=names[-1:], hit_policy=trailing)
        assert found(indexer, state) == (3, {"kv": 5, "indexer": 4, "mamba": 5}, [2, 3])
        window = PoolTransfer(name=PoolName.MAMBA, keys=names[-2:], hit_policy=trailing)
        assert found(window) == (3, {"kv": 5, "mamba": 3}, [3])
        assert found(PoolTransfer(name=PoolName.SWA)) == (0, {"kv": 5}, [])  # was never registered

    def test_pages_of_pools_come_back_apart(self, hybrid: Any) -> None:
        names = hashes(81, 82)
        pool = hybrid.registered_pools[PoolName.MAMBA].kv_buffer
        before = pool.clone()
        hybrid.batch_set_v2([self.transfer(PoolName.MAMBA, names)])
        assert hybrid.batch_exists(names) == 0  # the KV pool has none of them
        pool.zero_()
        got = hybrid.batch_get_v2([self.transfer(PoolName.MAMBA, [*names, "0" * 64])])
        assert got == {PoolName.MAMBA: [True, True, False]}
        assert torch.equal(pool[:, : 2 * PAGE], before[:, : 2 * PAGE]) and not pool[:, 2 * PAGE :].any()

    def test_states_of_mamba_come_back_with_all_their_parts(self, depot: Depot, make: Callable[..., Any]) -> None:
        states, names = parts.mamba_pool(), hashes(121)
        made = make(config(depot.url), ("kv", host_pool(device_pool())), ("mamba", states))
        buffers = [states.temporal_buffer, *states.conv_buffer]
        before = [buffer.clone() for buffer in buffers]
        at = [PoolTransfer(name=PoolName.MAMBA, host_indices=torch.tensor([slot]), keys=names) for slot in (3, 16)]
        assert made.batch_set_v2(at[:1]) == made.batch_get_v2(at[1:]) == {PoolName.MAMBA: [True]}
        for buffer, old in zip(buffers, before, strict=True):
            assert torch.equal(buffer[16], old[3]) and torch.equal(buffer[:16], old[:16])


class TestOtherMethods:
    def test_no_method_raises_or_returns_none_whatever_it_is_given(
        self, depot: Depot, make: Callable[..., Any]
    ) -> None:
        made, names = make(config(depot.url), ("kv", host_pool(device_pool()))), hashes(91)
        assert made.batch_get_v1(names, torch.arange(3)) == made.batch_set_v1(names, torch.arange(3)) == [False]
        assert made.batch_get_v1(names, None) == made.batch_set_v1(["x"], None) == [False]
        assert made.batch_exists([]) == 0 and made.batch_exists(["", "no hash"]) == 0 and not made.exists("x")
        assert made.batch_get_v2([PoolTransfer(name=PoolName.SWA, keys=names)]) == {PoolName.SWA: [False]}
        assert (
            made.get("x") is None and made.batch_get(names) == [None] and not made.set("x") and not made.batch_set([])
        )

    def test_statistics_count_pages_since_the_last_call(self, depot: Depot, make: Callable[..., Any]) -> None:
        made, names = make(config(depot.url), ("kv", host_pool(device_pool()))), hashes(101, 102)
        assert all(made.batch_set_v1(names, torch.arange(2 * PAGE)))
        assert made.batch_get_v1([*names, "0" * 64], torch.arange(3 * PAGE)) == [True, True, False]
        stats = made.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2]) and stats.prefetch_bandwidth[0] > 0
        assert made.get_stats().backup_pgs == []

    def test_clear_removes_the_pages(self, depot: Depot, make: Callable[..., Any]) -> None:
        made, names = make(config(depot.url), ("kv", host_pool(device_pool()))), hashes(111)
        made.batch_set_v1(names, torch.arange(PAGE))
        assert made.clear() and made.batch_exists(names) == 0


class TestMemory:
    def test_pages_pass_between_engines_whose_pools_are_in_different_memory(
        self, depot: Depot, make: Callable[..., Any]
    ) -> None:
        pools = [host_pool(device_pool(), allocator=allocator) for allocator in ("default", "shm")]
        names, slots = hashes(131, 132), torch.arange(2 * PAGE)
        one, other = (make(config(depot.url), ("kv", pool)) for pool in pools)
        assert one.batch_set_v1(names, slots) == other.batch_get_v1(names, slots + PAGE) == [True, True]
        assert torch.equal(pools[0].kv_buffer[:, : 2 * PAGE], pools[1].kv_buffer[:, PAGE : 3 * PAGE])


class TestRefusedAtTheStart:
    def test_a_drafter_with_keys_and_values_per_rank_beside_mla(self, depot: Depot, make: Callable[..., Any]) -> None:
        made = make(config(depot.url, (0, 2), True), ("kv", host_pool(device_pool("mla"))))
        with pytest.raises(ConfigError, match=r"SGLang stores one rank's only. Start without that draft model"):
            made.register_mem_host_pool_v2(host_pool(device_pool()), PoolName.DRAFT)

    def test_a_required_server_that_is_not_there(self, tmp_path: Path) -> None:
        given = extra(f"ipc://{tmp_path}/none.sock", **{"kvdepot.required": True})
        with pytest.raises(Unavailable):
            backend(config("", extra_config=given), ("kv", host_pool(device_pool())))
