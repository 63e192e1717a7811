"""SGLang's pages in a real server, by a host pool like SGLang's; tests/sglang has SGLang's own classes."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvdepot.client.calls import OwnClient
from kvdepot.errors import BadRequest, ConfigError, DeadlineExceeded, LayoutError, Unavailable, UnknownRequest
from kvdepot.integrations.sglang import pages
from kvdepot.integrations.sglang.pages import KV, PagePool, PageStore, hash_keys
from tests.conftest import HANG_S, Depot, StartDepot, ends, eventually, suspend
from tests.integrations.hicache import Pool

Open = Callable[..., PageStore]


def keys(count: int, seed: str = "") -> list[str]:
    return [hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(count)]


def fill(pool: Pool, seed: int = 1) -> None:
    pool.kv.copy_(torch.rand(pool.kv.shape, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture(scope="module")
def depot() -> Iterator[Depot]:
    server = Depot(chunk_size="auto").wait_ready()
    yield server
    server.close()


@pytest.fixture
def open_store() -> Iterator[Open]:
    """A store of pools at a server: `open_store(depot, pool, model=, ranks=, required=)`."""
    opened: list[PageStore] = []

    def open_one(
        depot: Depot, *pools: Pool, model: str = "m", ranks: tuple[int, int] = (1, 0), required: bool = True
    ) -> PageStore:
        client = OwnClient(depot.url, engine="test")
        store = PageStore(client, lambda pool, epoch: f"{model} {pool.name} {pool.facts} {epoch}", lambda: None)
        opened.append(store)
        for number, pool in enumerate(pools):
            try:
                store.add(PagePool(pool, KV if number == 0 else f"pool{number}", ranks))
            except Unavailable:
                if required:
                    raise
        return store

    yield open_one
    for store in opened:
        store.close()


class TestCopies:
    @pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
    def test_a_page_comes_back_as_it_was_and_no_other_page_changes(
        self, depot: Depot, open_store: Open, layout: str
    ) -> None:
        pool, names = Pool(layout), keys(3, layout)
        fill(pool)
        store = open_store(depot, pool, model=layout)
        before = pool.kv.clone()
        assert store.exists(KV, names) == 0
        assert store.set(KV, names, pool.slots(5, 0, 9)) == [True] * 3
        assert store.exists(KV, [*names, "0" * 64]) == 3
        pool.kv.zero_()
        assert store.get(KV, [names[2], names[0]], pool.slots(1, 15)) == [True, True]
        expected = torch.zeros_like(before)
        expected.select(pool.page_axis, 1).copy_(before.select(pool.page_axis, 9))
        expected.select(pool.page_axis, 15).copy_(before.select(pool.page_axis, 5))
        assert torch.equal(pool.kv, expected)

    def test_pages_that_are_not_there_are_missed_one_by_one(self, depot: Depot, open_store: Open) -> None:
        pool, names = Pool(), keys(3, "gaps")
        store = open_store(depot, pool, model="gaps")
        assert all(store.set(KV, [names[0], names[2]], pool.slots(0, 2)))
        assert store.exists(KV, names) == 1
        assert store.present(KV, names) == [True, False, True]
        assert store.get(KV, names, pool.slots(3, 4, 5)) == [True, False, True]

    def test_pages_behind_a_known_prefix_are_found_behind_it(self, depot: Depot, open_store: Open) -> None:
        pool, names = Pool(), keys(7, "chain")
        store = open_store(depot, pool, model="chain")
        assert all(store.set(KV, names[:4], pool.slots(0, 1, 2, 3), []))
        assert all(store.set(KV, names[4:6], pool.slots(4, 5), names[:4]))
        assert [store.exists(KV, names[at:], names[:at]) for at in (0, 3, 5, 6)] == [6, 3, 1, 0]
        assert store.exists(KV, names[4:]) == 2  # also where the prefix is not known
        assert store.get(KV, names[3:6], pool.slots(8, 9, 10)) == [True] * 3
        assert all(store.set(KV, names[6:], pool.slots(6), ["0" * 64] * 6))  # no such prefix is there
        assert store.exists(KV, names[6:]) == 1

    def test_other_layouts_and_other_names_share_nothing(self, depot: Depot, open_store: Open) -> None:
        names = keys(1, "apart")
        assert open_store(depot, Pool("page_first"), model="a").set(KV, names, Pool().slots(0)) == [True]
        assert open_store(depot, Pool("page_first"), model="a").exists(KV, names) == 1
        assert open_store(depot, Pool("page_first"), model="b").exists(KV, names) == 0
        assert open_store(depot, Pool("page_first_direct"), model="a").get(KV, names, Pool().slots(0)) == [False]

    def test_a_page_exists_once_all_ranks_have_stored_it(self, depot: Depot, open_store: Open) -> None:
        names, pools = keys(2, "ranks"), [Pool(), Pool()]
        ranks = [open_store(depot, pool, model="r", ranks=(2, rank)) for rank, pool in enumerate(pools)]
        for pool, seed in zip(pools, (1, 2), strict=True):
            fill(pool, seed)
        assert ranks[0].set(KV, names, pools[0].slots(0, 1)) == [True, True]
        assert [each.exists(KV, names) for each in ranks] == [0, 0]
        assert ranks[1].set(KV, names[:1], pools[1].slots(0)) == [True]
        assert [each.exists(KV, names) for each in ranks] == [1, 1]
        assert ranks[1].get(KV, names[:1], pools[1].slots(7)) == [True]
        assert torch.equal(pools[1].page(7), pools[1].page(0))

    def test_slots_that_are_no_whole_pages_are_refused_before_anything_is_sent(
        self, depot: Depot, open_store: Open
    ) -> None:
        pool = Pool()
        store = open_store(depot, pool)
        for slots in (pool.slots(0), pool.slots(0, 1)[1:], pool.slots(0, 1) + 1):
            with pytest.raises(BadRequest, match="are not 2 pages of 4"):
                store.get(KV, keys(2), slots)
            with pytest.raises(BadRequest, match="are not 2 pages of 4"):
                store.set(KV, keys(2), slots)

    def test_pages_that_are_not_the_pools_or_named_twice_are_refused(self, depot: Depot, open_store: Open) -> None:
        pool, names = Pool(), keys(2, "wrong")
        store = open_store(depot, pool, model="wrong")
        for wrong in ((0, 16), (-1, 3), (5, 5)):
            for call in (store.get, store.set):
                with pytest.raises(BadRequest, match="are not 2 of the 16"):
                    call(KV, names, pool.slots(*wrong))
        assert store.exists(KV, names) == 0

    def test_the_server_counts_what_sglang_asked_for_found_and_loaded(
        self, start_depot: StartDepot, open_store: Open
    ) -> None:
        pool, names, depot = Pool(), keys(5), start_depot(chunk_size="auto")
        ranks = [open_store(depot, pool, ranks=(2, rank)) for rank in (0, 1)]
        for store in ranks:
            assert all(store.set(KV, names[:4], pool.slots(0, 1, 2, 3), []))
        for store in ranks:
            assert store.exists(KV, names[1:], names[:1]) == 3
            assert all(store.get(KV, names[1:4], pool.slots(5, 6, 7)))
        counted = depot.status()
        assert [counted["tokens"][kind] for kind in ("asked", "found", "reused")] == [16, 12, 12]
        assert counted["saved"]["tokens"] == 12

    def test_no_query_leaves_a_pin(self, depot: Depot, open_store: Open) -> None:
        pool, names = Pool(), keys(4, "pins")
        store = open_store(depot, pool, model="pins")
        store.set(KV, names, pool.slots(0, 1, 2, 3))
        assert store.exists(KV, names) == 4
        eventually(lambda: depot.status()["sessions"] == 0)


class TestHashes:
    def test_keys_of_sha256_are_their_own_hashes_whatever_stands_beside_them(self) -> None:
        good, odd = keys(1)[0], "ab" * 20
        assert hash_keys([good]) == bytes.fromhex(good)
        assert hash_keys([good, odd])[:32] == bytes.fromhex(good)
        assert hash_keys([odd, good])[32:] == bytes.fromhex(good)
        spaced = good[:62] + " " + good[62]
        others = [odd, spaced, "z" * 64, good[:63], "x"]
        hashes = [hash_keys([each]) for each in others]
        assert len(set(hashes)) == len(others) and all(len(each) == 32 for each in hashes)
        assert hash_keys(others) == b"".join(hashes)


class TestClear:
    def test_it_removes_this_models_pages_only(self, depot: Depot, open_store: Open) -> None:
        pool, names = Pool(), keys(2, "clear")
        stores = [open_store(depot, pool, model=model) for model in ("cleared", "kept")]
        for store in stores:
            assert all(store.set(KV, names, pool.slots(0, 1)))
        assert stores[0].clear()
        assert [store.exists(KV, names) for store in stores] == [0, 2]


class TestUpdatesOfWeights:
    def test_nothing_is_found_or_kept_until_the_flush_and_nothing_old_after_it(
        self, depot: Depot, open_store: Open
    ) -> None:
        pool, names = Pool(), keys(2, "weights")
        store = open_store(depot, pool, model="w")
        assert all(store.set(KV, names, pool.slots(0, 1)))
        store.flushed()  # a flush alone changes nothing
        assert store.exists(KV, names) == 2
        store.suspend()
        assert store.exists(KV, names) == 0 and store.present(KV, names) == [False, False]
        assert store.get(KV, names, pool.slots(0, 1)) == store.set(KV, names, pool.slots(0, 1)) == [False, False]
        store.flushed()
        assert store.exists(KV, names) == 0
        assert store.get(KV, names, pool.slots(0, 1)) == [False, False]
        assert store.set(KV, names[:1], pool.slots(3)) == [True]
        assert store.exists(KV, names) == 1
        assert open_store(depot, pool, model="w").exists(KV, names) == 2  # an engine with the old weights has them


@pytest.mark.faults
class TestFaults:
    def test_a_server_that_restarts_is_used_again(self, start_depot: StartDepot, open_store: Open) -> None:
        depot, pool, names = start_depot(chunk_size="auto"), Pool(), keys(2)
        fill(pool)
        store = open_store(depot, pool)
        assert all(store.set(KV, names, pool.slots(0, 1)))
        depot.process.kill()
        depot.process.wait(HANG_S)
        with ends():
            assert missed(lambda: store.exists(KV, names)) == 0
            assert not any(missed(lambda: store.get(KV, names, pool.slots(2, 3)), []))
        again = start_depot(chunk_size="auto", url=depot.url, name=depot.name)
        eventually(lambda: missed(lambda: store.exists(KV, names)) == 2)  # recovered from the arena
        assert store.get(KV, names, pool.slots(2, 3)) == [True, True]
        assert torch.equal(pool.page(2), pool.page(0)) and again.process.poll() is None

    def test_a_server_that_is_stopped_is_a_miss_and_used_again_when_it_goes_on(
        self, start_depot: StartDepot, open_store: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        depot, pool, names = start_depot(chunk_size="auto"), Pool(), keys(2)
        store = open_store(depot, pool)
        assert all(store.set(KV, names, pool.slots(0, 1)))
        suspend(depot.process.pid)
        try:
            with ends():
                assert missed(lambda: store.exists(KV, names)) == 0
                assert not any(missed(lambda: store.get(KV, names, pool.slots(2, 3)), []))
                monkeypatch.setattr(pages, "_SET_S", 0.5)
                with pytest.raises(DeadlineExceeded):
                    store.set(KV, keys(1, "late"), pool.slots(4))
        finally:
            os.kill(depot.process.pid, signal.SIGCONT)
        eventually(lambda: missed(lambda: store.exists(KV, names)) == 2)
        assert store.exists(KV, keys(1, "late")) == 0  # what was placed after its call has been given back
        eventually(lambda: not depot.status()["operations"])
        assert store.get(KV, names, pool.slots(2, 3)) == [True, True]

    @pytest.mark.parametrize("do", ["get", "set"])
    def test_a_server_that_stops_during_a_copy_is_a_miss_without_a_page_held(
        self, start_depot: StartDepot, open_store: Open, monkeypatch: pytest.MonkeyPatch, do: str
    ) -> None:
        depot, pool, names = start_depot(chunk_size="auto"), Pool(), keys(4)
        fill(pool)
        store = open_store(depot, pool)
        assert all(store.set(KV, names[:2], pool.slots(0, 1)))
        monkeypatch.setattr(pages, "_GET_S", 0.5)
        monkeypatch.setattr(pages, "_SET_S", 0.5)
        copying = Paused(store)
        moved, slots = (names[:2], pool.slots(2, 3)) if do == "get" else (names[2:], pool.slots(0, 1))
        asked = Thread(lambda: getattr(store, do)(KV, moved, slots))
        assert copying.begun.wait(HANG_S)
        suspend(depot.process.pid)
        try:
            copying.go_on.set()
            with ends(), pytest.raises(DeadlineExceeded):
                asked.result()
        finally:
            os.kill(depot.process.pid, signal.SIGCONT)
        eventually(lambda: not depot.status()["operations"])
        pool.page(0).zero_()  # SGLang has used it for something else
        assert store.get(KV, names[:2], pool.slots(4, 5)) == [True, True] and pool.page(4).all()
        if do == "set":
            assert store.get(KV, names[2:], pool.slots(6, 7)) == [True, True] and pool.page(6).all()

    @pytest.mark.parametrize("do", ["get", "set"])
    def test_a_server_killed_during_a_copy_is_a_miss_and_its_successor_is_used(
        self, start_depot: StartDepot, open_store: Open, do: str
    ) -> None:
        depot, pool, names = start_depot(chunk_size="auto"), Pool(), keys(4)
        fill(pool)
        store = open_store(depot, pool)
        assert all(store.set(KV, names[:2], pool.slots(0, 1)))
        copying = Paused(store)
        moved, slots = (names[:2], pool.slots(2, 3)) if do == "get" else (names[2:], pool.slots(0, 1))
        asked = Thread(lambda: getattr(store, do)(KV, moved, slots))
        assert copying.begun.wait(HANG_S)
        depot.process.kill()
        depot.process.wait(HANG_S)
        copying.go_on.set()
        with ends(), pytest.raises((DeadlineExceeded, Unavailable, UnknownRequest)):
            asked.result()
        start_depot(chunk_size="auto", url=depot.url, name=depot.name)
        eventually(lambda: missed(lambda: store.exists(KV, names[:2])) == 2)
        assert store.exists(KV, names[2:]) == 0
        assert store.get(KV, names[:2], pool.slots(4, 5)) == [True, True]
        assert torch.equal(pool.page(4), pool.page(0))

    def test_a_store_is_closed_once_its_copies_have_ended(self, start_depot: StartDepot, open_store: Open) -> None:
        depot, pool, names = start_depot(chunk_size="auto"), Pool(), keys(2)
        fill(pool)
        store = open_store(depot, pool)
        assert all(store.set(KV, names, pool.slots(0, 1)))
        copying = Paused(store)
        asked = Thread(lambda: store.get(KV, names, pool.slots(2, 3)))
        assert copying.begun.wait(HANG_S)
        closed = Thread(store.close)
        eventually(lambda: store._link.is_closed)
        assert depot.status()["instances"] == 1, "it has left while it copies"
        copying.go_on.set()
        assert asked.result() == [True, True] and torch.equal(pool.page(3), pool.page(1))
        closed.result()
        eventually(lambda: depot.status()["instances"] == 0)
        assert store.set(KV, names, pool.slots(0, 1)) == [False, False]

    def test_a_store_without_a_server_is_connected_when_there_is_one(
        self, start_depot: StartDepot, open_store: Open
    ) -> None:
        first = start_depot(chunk_size="auto")
        first.stop()
        pool, names = Pool(), keys(1)
        store = open_store(first, pool, required=False)
        assert missed(lambda: store.set(KV, names, pool.slots(0)), [False]) == [False]
        start_depot(chunk_size="auto", url=first.url)
        eventually(lambda: missed(lambda: store.set(KV, names, pool.slots(0)), [False]) == [True])
        assert store.exists(KV, names) == 1


class Paused:
    """The next copies of a store's KV pool begin, and then wait for `go_on`."""

    def __init__(self, store: PageStore) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        pool = store._pools[KV]
        copy = pool.copy

        def wait_and_copy(*arguments: Any, **options: Any) -> None:
            self.begun.set()
            assert self.go_on.wait(HANG_S)
            copy(*arguments, **options)

        pool.copy = wait_and_copy  # type: ignore[method-assign]


class Thread:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        self._call = call
        threading.Thread(target=self._run).start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as exc:  # noqa: BLE001 - raised by `result`
            self._future.set_exception(exc)

    def result(self) -> Any:
        return self._future.result(HANG_S)


def missed(call: Callable[[], Any], value: Any = 0) -> Any:
    """What a call returns; `value` where it fails, as storage.py does."""
    try:
        return call()
    except (Unavailable, DeadlineExceeded):
        return value


class TestPoolsWhoseCopiesAreWrong:
    def test_nothing_is_kept_and_the_server_knows_why(
        self, depot: Depot, open_store: Open, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Doubled(Pool):
            """Its values are where its keys are: what is written to either changes both."""

            def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
                starts, sizes = super().get_page_buffer_meta(indices)
                return [starts[at - at % 2] for at in range(len(starts))], sizes

        pool, names = Doubled(), keys(2, "doubled")
        fill(pool)
        before = pool.kv.clone()
        store = open_store(depot, pool, model="doubled")
        assert torch.equal(pool.kv, before)
        assert "nothing of pool kv is kept, because copies of its pages are wrong" in caplog.text
        assert store.set(KV, names, pool.slots(0, 1)) == store.get(KV, names, pool.slots(0, 1)) == [False, False]
        assert store.exists(KV, names) == 0 and store.present(KV, names) == [False, False]
        assert "pool kv: " in str(depot.status())


class TestPoolsThatAreRefused:
    def test_a_pool_that_does_not_name_all_its_bytes(self) -> None:
        pool = Pool()
        pool.size_per_token += 1
        with pytest.raises(LayoutError, match=r"its pages have .* bytes, but its tokens"):
            PagePool(pool, KV, (1, 0))

    def test_a_pool_whose_layout_has_no_pages_to_name(self) -> None:
        class Unified(Pool):
            def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
                raise ValueError("Unsupported layout: page_unified")

        class Logical(Pool):
            def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
                return None

        with pytest.raises(LayoutError, match="Try another --hicache-mem-layout, such as page_first"):
            PagePool(Unified(), KV, (1, 0))
        with pytest.raises(LayoutError, match="holds no bytes itself"):
            PagePool(Logical(), KV, (1, 0))
        with pytest.raises(LayoutError, match="does not say where its pages are"):
            PagePool(SimpleNamespace(page_size=4, size=16), KV, (1, 0))  # type: ignore[arg-type]

    @pytest.mark.parametrize("fact", ["shared_allocation_domain", "stores_page_envelope"])
    def test_a_pool_whose_pages_move(self, fact: str) -> None:
        pool = Pool()
        setattr(pool, fact, True)
        with pytest.raises(LayoutError, match="shares its memory with other pools, and its pages move"):
            PagePool(pool, KV, (1, 0))

    def test_a_pool_whose_pages_are_not_equally_apart(self) -> None:
        class Scattered(Pool):
            def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
                starts, sizes = super().get_page_buffer_meta(indices)
                return [start + 64 * (indices[0].item() > 8) for start in starts], sizes

        with pytest.raises(LayoutError, match="its pages are not equally apart"):
            PagePool(Scattered(), KV, (1, 0))

    def test_pages_shorter_than_the_servers_chunks(self, start_depot: StartDepot, open_store: Open) -> None:
        depot = start_depot(chunk_size=256)
        with pytest.raises(ConfigError, match=r"pages of 4 tokens are shorter .* --chunk-size auto, or SGLang with a"):
            open_store(depot, Pool())
