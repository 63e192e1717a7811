"""The mooncake tier against a real master and real hosts."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvdepot.errors import ConfigError, TierError
from kvdepot.testing.tiers import TierConformance, content, cut, name_of, together
from kvdepot.tiers import Blob, Tier, parse
from kvdepot.tiers.mooncake import MooncakeOptions, MooncakeTier
from kvdepot.tiers.mooncake.membership import SPANS_UNDER_WAY
from tests.conftest import HANG_S, ends, eventually
from tests.ports import free_port
from tests.tiers.mooncake_servers import Host
from tests.tiers.servers import MooncakeMaster, assert_all_fail, need

need(modules=["mooncake"])

MIB = 1 << 20
StartMaster = Callable[..., MooncakeMaster]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """A master, and a host with memory that outlives every tier of a test."""
    master = MooncakeMaster(tmp_path_factory.mktemp("pool"))
    host = Host(master.url)
    yield master
    host.close()
    master.kill()


@pytest.fixture
def start_master(tmp_path: Path) -> Iterator[StartMaster]:
    """Masters for one test."""
    with ExitStack() as stack:

        def run(*flags: str) -> MooncakeMaster:
            master = MooncakeMaster(tmp_path, *flags)
            stack.callback(master.kill)
            return master

        yield run


class TestMooncake(TierConformance):
    shared: ClassVar[bool] = True
    keeps: ClassVar[bool] = False  # it does, but leaving and joining the pool takes seconds
    examples: ClassVar[int] = 3

    def open_tier(self, place: Any) -> Tier:
        return join(place)

    @pytest.fixture(scope="class")
    @classmethod
    def sweeper(cls, pool: MooncakeMaster) -> Iterator[Tier]:
        """A client of the pool that is there all the time: joining it takes long."""
        with closing(join(pool)) as tier:
            yield tier

    @pytest.fixture
    def place(self, pool: MooncakeMaster, sweeper: Tier) -> MooncakeMaster:
        sweeper.forget("", "")
        return pool


# -- bytes


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, 64 * MIB))


@pytest.fixture
def tier(pool: MooncakeMaster, memory: memoryview) -> Iterator[Tier]:
    """A client without memory for the pool: all that it stores lies with another process."""
    with closing(join(pool)) as tier:
        tier.attach([memory])
        tier.forget("", "")
        yield tier


def join(master: MooncakeMaster, segment_mib: int = 0) -> Tier:
    """Tries again where the machine was too busy for the time that a tier has to join."""

    def try_it() -> Tier | None:
        try:
            return parse(f"{master.url}?segment_gib={segment_mib / 1024}&local_host=127.0.0.1").open()
        except TierError as exc:
            assert "cannot be joined within" in str(exc)
            return None

    found: Tier = eventually(try_it)
    return found


def write_or_not(tier: Tier, number: int) -> bool:
    with suppress(TierError):
        return write(tier, number)
    return False


def write(tier: Tier, number: int, size: int = MIB) -> bool:
    return tier.write([Blob(name_of(number), [memoryview(content(number, size))])])[0]


def read(tier: Tier, number: int, size: int = MIB) -> str:
    area = bytearray(size)
    (found,) = tier.read([Blob(name_of(number), [memoryview(area)])])
    return "missing" if found is None else "right" if found == size and area == content(number, size) else "wrong"


def test_bytes_go_straight_to_where_they_are_wanted(tier: Tier, memory: memoryview) -> None:
    data = content(1, 8 * MIB)
    memory[: len(data)] = data
    assert tier.write([Blob(name_of(1), cut(memory[: len(data)], [1024]))]) == [True]
    head = memoryview(bytearray(1024))  # as the headers of objects: outside what was attached
    assert tier.read([Blob(name_of(1), [head, *cut(memory[9 * MIB : 17 * MIB - 1024], [MIB])])]) == [len(data)]
    assert head == data[:1024] and memory[9 * MIB : 17 * MIB - 1024] == data[1024:]
    assert tier.usage().counters["staged_bytes"] == 0


def test_where_memory_has_to_be_registered_other_memory_is_staged(pool: MooncakeMaster, memory: memoryview) -> None:
    tier = MooncakeTier(
        ("127.0.0.1", pool.port), MooncakeOptions(segment_gib=0, local_host="127.0.0.1", buffer_mib=1), registers=True
    )
    try:
        tier.forget("", "")
        tier.attach([memory[: 32 * MIB]])
        data = content(1, 3 * MIB)
        memory[: len(data)] = data
        assert tier.write([Blob(name_of(1), [memory[: len(data)]])]) == [True]
        target = memory[8 * MIB : 8 * MIB + len(data)]
        assert tier.read([Blob(name_of(1), [target])]) == [len(data)] and target == data
        assert tier.usage().counters["staged_bytes"] == 0
        blobs = [Blob(name_of(n), cut(memoryview(content(n, MIB + n)), [n])) for n in range(2, 6)]
        assert tier.write(blobs) == [True] * 4
        assert [read(tier, n, MIB + n) for n in range(2, 6)] == ["right"] * 4
        assert tier.usage().counters["staged_bytes"] == 2 * sum(blob.size for blob in blobs)
    finally:
        tier.close()


@pytest.mark.parametrize("spare", [0, 16])
def test_the_first_read_has_memory_of_just_the_objects_size_and_succeeds(
    pool: MooncakeMaster, tier: Tier, spare: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """What worker.py offers has room for more than there is, as an object may be longer where it is encrypted."""
    assert write(tier, 1) and write(tier, 2)
    with closing(join(pool)) as fresh:
        for number in (1, 2, 1):
            area = bytearray(MIB + spare)
            assert fresh.read([Blob(name_of(number), [memoryview(area)])]) == [MIB]
            assert area[:MIB] == content(number, MIB)
        assert fresh.usage().counters["failed"] == 0
    assert "TRANSFER" not in (said := capfd.readouterr().err) and "slice" not in said


def test_any_number_of_pieces_and_threads_stays_below_what_the_library_can_bear(tier: Tier, memory: memoryview) -> None:
    """Beyond 2048 transfers to one host it hangs for a minute, and that host is lost to this client for ever."""
    count, piece, threads = 250, 512, 9
    assert threads * count > 2048 > SPANS_UNDER_WAY
    abreast = threading.Barrier(threads)

    def move(thread: int) -> None:
        start = thread * 4 * MIB
        places = [memory[start + 2 * i * piece : start + (2 * i + 1) * piece] for i in range(8 * count)]
        for turn in range(2):
            abreast.wait(HANG_S)
            blobs = [Blob(name_of(800 * thread + 8 * turn + i), places[i * count : (i + 1) * count]) for i in range(8)]
            data = [content(800 * thread + 8 * turn + i, count * piece) for i in range(8)]
            for place, part in zip(places, cut(memoryview(b"".join(data)), [piece] * (8 * count)), strict=True):
                place[:] = part
            assert tier.write(blobs) == [True] * 8
            for place in places:
                place[:] = bytes(piece)
            assert tier.read(blobs) == [count * piece] * 8
            assert [b"".join(blob.buffers) for blob in blobs] == data

    together(*(partial(move, thread) for thread in range(threads)))
    assert tier.usage().counters["failed"] == 0


def test_an_object_that_another_host_is_still_writing_is_not_there(pool: MooncakeMaster, tier: Tier) -> None:
    with closing(Host(pool.url, segment_mib=0)) as other:
        assert other.ask(f"begin 7 {MIB}") == "0"
        assert not write(tier, 7)
        assert tier.find([name_of(7)]) == [False] and read(tier, 7) == "missing"


# -- room


def test_a_full_pool_refuses_and_evicts_and_goes_on(start_master: StartMaster) -> None:
    tier = join(start_master("--default_kv_lease_ttl=100"), segment_mib=64)
    assert not write(tier, 1000, 80 * MIB), "larger than the pool"
    stored = [write(tier, number, 4 * MIB) for number in range(40)]
    assert all(stored[:10])
    number = iter(range(40, 10_000))
    assert eventually(lambda: write(tier, next(number), 4 * MIB)), "it did not make room"
    found = tier.find([name_of(n) for n in range(40)])
    assert sum(found) < 16
    assert all(read(tier, n, 4 * MIB) in ("right", "missing") for n in range(40) if found[n])
    tier.close()


# -- failures

BEATS = 50
"""A call that waits for a master that hangs takes seconds: hundreds of beats."""


class Beat:
    """A thread that counts how often it could run: a call that keeps the GIL until it ends lets it run never."""

    def __init__(self) -> None:
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.002):
            self._beats += 1

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._beats


def test_without_a_master_it_says_so() -> None:
    with ends(), pytest.raises(TierError, match="mooncake_master"):
        parse(f"mooncake://127.0.0.1:{free_port()}/?segment_gib=0").open()


def test_a_master_that_is_killed_and_comes_back(start_master: StartMaster) -> None:
    master = start_master()
    tier = join(master, segment_mib=64)
    assert write(tier, 1)
    master.kill()
    assert_all_fail(tier, ".")
    master.start()
    eventually(lambda: write_or_not(tier, 2))
    assert read(tier, 2) == "right" and read(tier, 1) == "missing"
    tier.close()


def test_a_master_that_hangs_and_goes_on(start_master: StartMaster) -> None:
    master = start_master("--put_start_discard_timeout_sec=1")
    tier = join(master, segment_mib=64)
    assert write(tier, 1) and tier.read([Blob(name_of(1), [memoryview(bytearray(2 * MIB))])]) == [MIB]
    with master.stopped():
        beat = Beat()
        assert_all_fail(tier, ".")
        assert beat.end() > BEATS, "the GIL was held"
    eventually(lambda: write_or_not(tier, 2))
    assert read(tier, 2) == "right"
    eventually(lambda: write_or_not(tier, 99))  # what it began while nobody answered is forgotten some time
    tier.close()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_host_that_dies_takes_its_objects_along_and_nothing_else(how: str, start_master: StartMaster) -> None:
    master, names = start_master("--client_ttl=2"), [name_of(n) for n in range(8)]
    other = Host(master.url)
    tier = join(master)
    try:
        assert all(write(tier, number) for number in range(8))
        assert [read(tier, number) for number in range(8)] == ["right"] * 8
        own = join(master, segment_mib=64)
        getattr(other, how)()
        for number in range(8):
            with ends():
                assert read(tier, number) == "missing"
        eventually(lambda: tier.find(names) == [False] * 8)
        fresh = iter(range(100, 10_000))
        number = eventually(lambda: n if write(tier, n := next(fresh)) else 0)
        assert read(tier, number) == "right" and read(own, number) == "right"
        if how == "stop":
            other.go_on()
            eventually(lambda: other.ask(f"read {number} {MIB}") == "right")
            assert tier.find(names) == [False] * 8
        own.close()
        tier.close()
    finally:
        other.close()


# -- what is said


def test_an_address_or_a_segment_that_this_host_has_not_is_refused(pool: MooncakeMaster) -> None:
    with pytest.raises(ConfigError, match="local_host"):
        parse(f"{pool.url}?local_host=192.0.2.1").open()
    with pytest.raises(TierError, match="joined"):
        parse(f"{pool.url}?segment_gib=60000").open()


def test_an_rdma_device_that_is_not_there_is_not_replaced_by_tcp(pool: MooncakeMaster) -> None:
    with ends(), pytest.raises(TierError):
        parse(f"{pool.url}?protocol=rdma&device=none_0&segment_gib=0").open()
