"""The conformance suite, which every tier must pass. Only this module of the package needs pytest and hypothesis.

    class TestMine(TierConformance):
        def open_tier(self, place):
            return mine.open(f"mine://{place}", {}, threads=4)

`place` is a fixture: a new path, unless a subclass has its own (such as a server's URL with an unused prefix). What
else a subclass may set is at the top of TierConformance. The suite requires only what the contract (kvdepot.tiers)
promises. Each test begins with an empty tier. In a conftest.py,
`pytest.register_assert_rewrite("kvdepot.testing.tiers")` makes failures more informative.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvdepot.errors import KVDepotError, TierError
from kvdepot.tiers import NAME, Blob, Tier, TierUsage

__all__ = ["TierConformance", "content", "cut", "name_of", "together"]

KIB = 1 << 10
MIB = 1 << 20
_BOUND = 8 * MIB
_SIZES = (1, 2, 511, 4095, 4096, 4097, 64 * KIB + 3, MIB, 8 * MIB + 1, 32 * MIB)


Place = TypeVar("Place")
"""The value of a subclass's fixture `place`, passed to its `open_tier`."""


def name_of(number: int, salt: int = 0, space: int = 0, rank: int = 0) -> str:
    """A name like those of kvdepot: keys look random; spaces 0 to 15 begin with the same 16 characters."""
    key = hashlib.sha256(number.to_bytes(8, "little")).hexdigest()
    return f"{salt:032x}/{space // 16:016x}{space:016x}/{key}.{rank:x}"


def content(number: int, size: int) -> bytes:
    """`size` random bytes, seeded by `number`."""
    return random.Random(number).randbytes(size)


def cut(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """`memory` in pieces of these sizes and the rest; none is empty."""
    pieces = []
    for size in sizes:
        if 0 < size < len(memory):
            pieces.append(memory[:size])
            memory = memory[size:]
    return [*pieces, memory]


def together(*tasks: Callable[[], None], timeout_s: float = 120.0) -> None:
    """Run each task in a thread; raises the first error. Fails if one has not ended in time."""
    failures: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as exc:  # noqa: BLE001 - the top of a thread; raised below
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"a call on the tier did not end within {timeout_s} s"
    if failures:
        raise failures[0]


def _stamped(version: int, size: int) -> bytes:
    """An object whose every 8 bytes are the version."""
    return version.to_bytes(8, "little") * (size // 8)


class TierConformance(Generic[Place]):
    """Tests of one tier; subclass it in a test module and name the subclass Test..."""

    keeps: ClassVar[bool] = True
    """Whether objects persist after `close` and are found when the same place is opened again."""
    shared: ClassVar[bool] = False
    """Whether several tiers may open one place at the same time (as depots on several hosts do)."""
    largest_bytes: ClassVar[int] = 32 * MIB
    """Size of the largest objects in the tests. The store must keep 64 MiB in total without evicting."""
    examples: ClassVar[int] = 25
    """Runs of the state machine."""
    slack_bytes: ClassVar[int] = 64 * KIB
    """Maximum overhead of one object beyond its own bytes (see `open_bounded`)."""

    def open_tier(self, place: Place) -> Tier:
        """Open the tier at `place`. When called again after `close`, it finds the same objects if `keeps` is true."""
        raise NotImplementedError

    def open_bounded(self, place: Place, capacity_bytes: int) -> Tier | None:
        """The same with this capacity (the suite uses a few MiB); None if the store controls its capacity itself."""
        return None

    @pytest.fixture
    def place(self, tmp_path: Path) -> object:
        """An unused place."""
        return tmp_path / "tier"

    @pytest.fixture(scope="class")
    @classmethod
    def memory(cls) -> memoryview:
        """The memory passed to `attach`; page aligned, and large enough for two of the largest objects."""
        return memoryview(mmap.mmap(-1, 2 * cls.largest_bytes + MIB))

    @pytest.fixture
    def tier(self, place: Place, memory: memoryview) -> Iterator[Tier]:
        with closing(self._start(place, memory)) as tier:
            assert tier.forget("", "") == 0, "the suite needs an empty place of its own"
            yield tier

    @pytest.fixture
    def bounded(self, place: Place, memory: memoryview) -> Iterator[Tier]:
        """A tier with a capacity of `_BOUND`."""
        tier = self.open_bounded(place, _BOUND)
        if tier is None:
            pytest.skip("the store controls its capacity itself")
        with closing(tier):
            tier.attach([memory])
            yield tier

    def _start(self, place: Place, memory: memoryview) -> Tier:
        tier = self.open_tier(place)
        tier.attach([memory])
        return tier

    # -- bytes

    @pytest.mark.parametrize("size", _SIZES)
    def test_what_is_written_is_read_back_byte_for_byte(self, tier: Tier, memory: memoryview, size: int) -> None:
        size = min(size, self.largest_bytes)
        data = content(size, size)
        source, target = memory[:size], memory[self.largest_bytes + 64 : self.largest_bytes + 64 + size]
        source[:] = data
        name = name_of(size)
        assert tier.find([name]) == [False]
        assert tier.write([Blob(name, [source])]) == [True]
        source[:] = bytes(size)  # the tier must not read it after `write` has returned
        target[:] = bytes(size)
        assert tier.find([name]) == [True]
        assert tier.read([Blob(name, [target])]) == [size]
        assert target == data

    @pytest.mark.parametrize("pieces", [2, 3, 64, 1024, 1025, 3000])
    def test_pieces_are_joined_and_parted_anywhere(self, tier: Tier, memory: memoryview, pieces: int) -> None:
        size = 300_007
        data = content(pieces, size)
        draw = random.Random(pieces)
        memory[1 : 1 + size] = data  # not even aligned to two bytes
        written = cut(memory[1 : 1 + size], [1, *(draw.randrange(1, size // pieces) for _ in range(pieces - 2))])
        assert len(written) == pieces
        assert tier.write([Blob(name_of(1), written)]) == [True]
        target = memory[MIB + 3 : MIB + 3 + size]
        target[:] = bytes(size)
        wanted = cut(target, [draw.randrange(1, size // pieces) for _ in range(pieces - 1)])
        assert len(wanted) == pieces
        assert tier.read([Blob(name_of(1), wanted)]) == [size]
        assert target == data

    def test_pieces_need_not_lie_in_order_or_side_by_side(self, tier: Tier, memory: memoryview) -> None:
        data = content(1, 3 * 4096)
        assert _put(tier, name_of(1), data)
        memory[: 7 * 4096] = bytes(7 * 4096)
        places = [memory[5 * 4096 : 6 * 4096], memory[4096 : 2 * 4096], memory[3 * 4096 : 4 * 4096]]
        assert tier.read([Blob(name_of(1), places)]) == [len(data)]
        assert b"".join(places) == data
        for page in (0, 2, 4, 6):
            assert memory[page * 4096 : (page + 1) * 4096] == bytes(4096), "wrote outside the buffers"

    # -- batches and names

    def test_a_batch_is_answered_in_its_order_each_object_for_itself(self, tier: Tier) -> None:
        numbers = [*range(100)]
        kept = [number for number in numbers if number % 3]
        blobs = [Blob(name_of(n), cut(memoryview(content(n, 1000 + 37 * n)), [n])) for n in kept]
        assert tier.write(blobs) == [True] * len(kept)
        order = [*reversed(numbers), 1, 2, 1]
        assert tier.find([name_of(n) for n in order]) == [n % 3 > 0 for n in order]
        areas = [bytearray(1000 + 37 * n - (n % 5 == 0)) for n in order]  # every fifth buffer is one byte too small
        answers = tier.read([Blob(name_of(n), [memoryview(area)]) for n, area in zip(order, areas, strict=True)])
        assert answers == [1000 + 37 * n if n % 3 else None for n in order]
        for n, area in zip(order, areas, strict=True):
            if n % 3 and n % 5:
                assert area == content(n, len(area))

    def test_names_differ_in_every_part_and_to_the_last_character(self, tier: Tier) -> None:
        zero, last = "0" * 32, "f" * 32
        rests = ["0.0", "0.1", "0.10", "00.1"]
        longest = [f"{'f' * 64}.{'f' * 29}", f"{'f' * 64}.{'f' * 28}0", f"{'f' * 92}.f", f"f.{'f' * 92}"]
        names = [f"{zero}/{zero}/{rest}" for rest in rests] + [f"{last}/{last}/{rest}" for rest in longest]
        names += [f"{zero}/{last}/0.0", f"{last}/{zero}/0.0", name_of(1, rank=0), name_of(1, rank=255)]
        assert all(NAME.fullmatch(name) for name in names) and max(map(len, names)) == 160
        for number, name in enumerate(names):
            assert tier.find([name]) == [False], name
            assert _put(tier, name, content(number, 100 + number)), name
        for number, name in enumerate(names):
            assert _get(tier, name, 200) == content(number, 100 + number), name
        for number, name in enumerate(names):
            tier.remove([name])
            assert tier.find(names) == [False] * (number + 1) + [True] * (len(names) - number - 1), name

    def test_forget_takes_what_begins_so_and_nothing_else(self, tier: Tier) -> None:
        names = [name_of(n, salt, space) for n in range(3) for salt in (0, 1) for space in (0, 1, 17)]
        salt, space, _ = name_of(0, 1, 1).split("/")
        for salts, spaces in [(salt, ""), (salt, space), ("", space), ("", space[:16]), (salt[:31], ""), ("f", "")]:
            assert tier.write([Blob(name, [memoryview(name.encode())]) for name in names]) == [True] * len(names)
            stays = [not (name.startswith(salts) and name[33:].startswith(spaces)) for name in names]
            assert tier.forget(salts, spaces) == stays.count(False), (salts, spaces)
            assert tier.find(names) == stays, (salts, spaces)

    # -- reopening and closing

    def test_close_is_safe_twice_and_what_follows_fails_like_a_store_that_is_gone(
        self, place: Place, memory: memoryview
    ) -> None:
        tier = self._start(place, memory)
        assert _put(tier, name_of(1), bytes(10))
        tier.close()
        tier.close()
        area = memoryview(bytearray(10))
        calls: list[tuple[Callable[[], object], tuple[object, ...]]] = [
            (lambda: tier.find([name_of(1)]), ([False], [True])),
            (lambda: tier.read([Blob(name_of(1), [area])]), ([None], [10])),
            (lambda: tier.write([Blob(name_of(2), [area])]), ([False], [True])),
            (lambda: tier.remove([name_of(1)]), (None,)),
            (lambda: tier.forget("", ""), (0, 1, 2)),
        ]
        for call, answers in calls:
            with suppress(TierError):
                assert call() in answers

    def test_close_ends_calls_under_way_and_none_of_them_lies(self, place: Place, memory: memoryview) -> None:
        tier = self._start(place, memory)
        data = content(1, MIB)
        assert _put(tier, name_of(1), data)
        started = threading.Barrier(4)

        def read() -> None:
            area = bytearray(MIB)
            started.wait()
            for turn in range(500):
                try:
                    size = tier.read([Blob(name_of(1), [memoryview(area)])])[0]
                except TierError:
                    return
                if size is None:
                    return
                assert size == MIB and area == data, f"read {turn} is wrong"

        def close() -> None:
            started.wait()
            tier.close()

        together(read, read, read, close)

    def test_two_that_share_a_store_see_each_others_objects(self, place: Place, memory: memoryview) -> None:
        if not self.shared:
            pytest.skip("one at a time")
        with closing(self._start(place, memory)) as one, closing(self._start(place, memory)) as two:
            data = content(1, 300_000)
            assert _put(one, name_of(1), data)
            assert two.find([name_of(1)]) == [True]
            assert _get(two, name_of(1), 300_000) == data
            two.remove([name_of(1)])
            assert one.find([name_of(1)]) == [False] and _get(one, name_of(1), 300_000) is None
            assert _put(two, name_of(2), data)
            assert one.forget("", "") == 1
            assert two.find([name_of(2)]) == [False]

    def test_one_that_cannot_be_shared_is_refused_to_the_second(self, place: Place, memory: memoryview) -> None:
        if self.shared or not self.keeps:
            pytest.skip("any number at a time")
        with closing(self._start(place, memory)) as one:
            assert _put(one, name_of(1), b"first")
            with pytest.raises(KVDepotError):
                self._start(place, memory)
            assert _get(one, name_of(1), 5) == b"first"
        with closing(self._start(place, memory)) as two:
            assert _get(two, name_of(1), 5) == b"first"

    # -- threads

    def test_a_reader_never_sees_a_part_or_a_mixture_while_others_write_and_remove(self, tier: Tier) -> None:
        names = [name_of(n) for n in range(3)]
        # Sizes that stores may treat differently, such as in parts of a MiB; the version number determines the size.
        sizes = [8, 4096, 65_536 + 8, 2 * MIB + 8]
        ended = threading.Event()

        def write(thread: int) -> None:
            for turn in itertools.count():
                if ended.is_set():
                    return
                version = (turn * 4 + thread) * 4 + turn % 4
                data = memoryview(_stamped(version, sizes[version % 4]))
                for name in names:
                    assert tier.write([Blob(name, cut(data, [1, 4096]))]) in ([True], [False])
                if turn % 8 == 7:
                    tier.remove([names[thread % 3]])

        def read() -> None:
            whole: set[int] = set()
            while len(whole) < 25 and not ended.is_set():
                areas = [bytearray(sizes[-1]) for _ in names]
                answers = tier.read([Blob(n, cut(memoryview(a), [9])) for n, a in zip(names, areas, strict=True)])
                for size, area in zip(answers, areas, strict=True):
                    if size is not None:
                        version = int.from_bytes(area[:8], "little")
                        assert size == sizes[version % 4], f"{size} bytes of version {version}"
                        assert area[:size] == _stamped(version, size), "bytes of another version"
                        whole.add(version)

        def until_ended(*tasks: Callable[[], None]) -> None:
            try:
                together(*tasks)
            finally:
                ended.set()

        writers = [partial(until_ended, partial(write, thread)) for thread in range(3)]
        together(partial(until_ended, read, read), *writers)

    def test_forgetting_while_others_write_leaves_whole_objects_only(self, tier: Tier) -> None:
        def write(thread: int) -> None:
            for turn in range(60):
                number = thread * 100 + turn % 10
                assert tier.write([Blob(name_of(number, salt=turn % 2), [memoryview(_stamped(number, 8000))])])
                area = bytearray(8000)
                size = tier.read([Blob(name_of(number, salt=turn % 2), [memoryview(area)])])[0]
                assert size is None or (size == 8000 and area == _stamped(number, 8000))

        def forget() -> None:
            for turn in range(30):
                tier.forget(*(("", ""), (f"{turn % 2:032x}", ""), ("", "0"))[turn % 3])

        together(*(partial(write, thread) for thread in (1, 2, 3)), forget)
        tier.forget("", "")
        names = [name_of(thread * 100 + n, salt=s) for thread in (1, 2, 3) for n in range(10) for s in (0, 1)]
        assert not any(tier.find(names))
        assert tier.usage().objects in (None, 0)

    # -- capacity

    def test_a_bounded_tier_never_holds_more_than_its_bound_and_keeps_the_newest(self, bounded: Tier) -> None:
        size = MIB - self.slack_bytes
        for number in range(30):
            assert _put(bounded, name_of(number), content(number, size))
            usage = bounded.usage()
            assert usage.capacity_bytes is not None and usage.capacity_bytes <= _BOUND
            assert usage.bytes is not None and usage.bytes <= _BOUND
            assert bounded.find([name_of(number)]) == [True]
        found = bounded.find([name_of(number) for number in range(30)])
        assert sum(found) == usage.objects and 4 <= sum(found) <= 8
        assert _get(bounded, name_of(29), MIB) == content(29, size)
        large = name_of(1000)
        assert not _put(bounded, large, bytes(_BOUND + 1))
        assert bounded.find([large]) == [False] and _get(bounded, large, 2 * _BOUND) is None
        assert sum(bounded.find([name_of(number) for number in range(30)])) == sum(found), "evicted for nothing"

    def test_a_bounded_tier_stays_within_its_bound_when_many_write_at_once(self, bounded: Tier) -> None:
        stored = [0] * 4

        def write(thread: int) -> None:
            for turn in range(40):
                number = thread * 1000 + turn
                data = content(number, 200_000 + turn * 9000)
                stored[thread] += _put(bounded, name_of(number), data)
                used = bounded.usage().bytes
                assert used is not None and used <= _BOUND
                assert _get(bounded, name_of(number), MIB) in (None, data)

        together(*(partial(write, thread) for thread in range(4)))
        assert min(stored) > 20

    # -- sequences of calls, compared with a dict: a fixed one, which meets each rule, and drawn ones

    def test_a_life_with_everything_in_it_is_that_of_a_dict(self, place: Place, memory: memoryview) -> None:
        life = _Life(self, place, memory)
        first, *others = _LIFE_NAMES
        sizes = [1, 8, 1000, 4096, 5000, 100_000] * 5
        everything = {name: (n, sizes[n], 3 * n) for n, name in enumerate(_LIFE_NAMES)}
        steps: list[Callable[[], object]] = [
            partial(life.read, names=[first, others[0]], piece=0, less=0),
            partial(life.write, objects=everything),
            partial(life.read, names=_LIFE_NAMES, piece=5, less=0),
            partial(life.read, names=_LIFE_NAMES, piece=0, less=1),
            partial(life.write, objects={name: (n + 20, sizes[n + 2], 1) for n, name in enumerate(_LIFE_NAMES)}),
            partial(life.remove, names=[first, others[5]]),
            partial(life.remove, names=[first, others[4]]),
            partial(life.read, names=[*others[:6], first], piece=1, less=0),
            partial(life.write, objects={first: (40, 5000, 16), others[8]: (41, 8, 0)}),
            partial(life.forget, like=first, salt=32, space=32),
            partial(life.forget, like=first, salt=32, space=31),
            partial(life.write, objects={others[0]: (42, 1000, 7)}),
            partial(life.remove, names=_LIFE_NAMES),
            partial(life.write, objects={first: (43, 1000, 0)}),
        ]
        life.everything_is_found_and_nothing_else()
        for step in steps:
            step()
            life.everything_is_found_and_nothing_else()
            if self.keeps:
                life.reopen()
                life.everything_is_found_and_nothing_else()
        life.teardown()

    def test_any_life_is_that_of_a_dict(self, place: Place, memory: memoryview) -> None:
        checks = list(hypothesis.HealthCheck)
        settings = hypothesis.settings(
            max_examples=self.examples, stateful_step_count=30, deadline=None, suppress_health_check=checks
        )
        life = partial(_Life, self, place, memory)
        run_state_machine_as_test(life, settings=settings)  # type: ignore[arg-type]


def _put(tier: Tier, name: str, data: bytes) -> bool:
    """Write one object."""
    (kept,) = tier.write([Blob(name, [memoryview(data)])])
    return kept


def _get(tier: Tier, name: str, room: int) -> bytes | None:
    """Read one object; None if it is absent."""
    area = bytearray(room)
    (size,) = tier.read([Blob(name, [memoryview(area)])])
    assert size is None or size <= room, f"{name} has {size} bytes"
    return None if size is None else bytes(area[:size])


_LIFE_NAMES = [
    name_of(n, salt, space, rank) for n in range(2) for salt in (0, 1) for space in (0, 1, 16) for rank in (0, 1)
]
_NAMES = st.lists(st.sampled_from(_LIFE_NAMES), max_size=6, unique=True)
_OBJECT = st.tuples(st.integers(0, 9), st.sampled_from([1, 8, 1000, 4096, 5000, 100_000]), st.integers(0, 5000))
_PREFIX = st.sampled_from([0, 15, 16, 31, 32])


class _Life(RuleBasedStateMachine):
    """Makes the same calls on a tier and a dict; sometimes closes and reopens the tier."""

    def __init__(self, suite: TierConformance[Place], place: Place, memory: memoryview) -> None:
        super().__init__()
        self.open: Callable[[], Tier] = lambda: suite._start(place, memory)
        self.keeps = suite.keeps
        self.slack_bytes = suite.slack_bytes
        self.tier = self.open()
        self.tier.forget("", "")
        self.model: dict[str, bytes] = {}

    @rule(objects=st.dictionaries(st.sampled_from(_LIFE_NAMES), _OBJECT, max_size=5))
    def write(self, objects: dict[str, tuple[int, int, int]]) -> None:
        """The tier may keep the existing object instead; then the dict keeps it, too."""
        data = {name: content(number, size) for name, (number, size, _) in objects.items()}
        blobs = [Blob(name, cut(memoryview(data[name]), [piece])) for name, (_, _, piece) in objects.items()]
        assert self.tier.write(blobs) == [True] * len(blobs)
        for name, new in data.items():
            found = _get(self.tier, name, 100_001)
            assert found in (new, self.model.get(name, new)), name
            assert found is not None
            self.model[name] = found

    @rule(names=_NAMES, piece=st.integers(0, 5000), less=st.sampled_from([0, 0, 1, 50_000]))
    def read(self, names: list[str], piece: int, less: int) -> None:
        rooms = [max(1, len(self.model.get(name, b"0")) - less) for name in names]
        areas = [bytearray(room) for room in rooms]
        answers = self.tier.read([Blob(n, cut(memoryview(a), [piece])) for n, a in zip(names, areas, strict=True)])
        assert list(answers) == [len(self.model.get(name, b"")) or None for name in names]
        for name, area in zip(names, areas, strict=True):
            if name in self.model and len(area) == len(self.model[name]):
                assert area == self.model[name], name

    @rule(names=_NAMES)
    def remove(self, names: list[str]) -> None:
        self.tier.remove(names)
        for name in names:
            self.model.pop(name, None)

    @rule(like=st.sampled_from(_LIFE_NAMES), salt=_PREFIX, space=_PREFIX)
    def forget(self, like: str, salt: int, space: int) -> None:
        first, second = like[:salt], like[33 : 33 + space]
        gone = [name for name in self.model if name.startswith(first) and name[33:].startswith(second)]
        assert self.tier.forget(first, second) == len(gone)
        for name in gone:
            del self.model[name]

    @precondition(lambda self: self.keeps)
    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.open()

    @invariant()
    def everything_is_found_and_nothing_else(self) -> None:
        assert self.tier.find(_LIFE_NAMES) == [name in self.model for name in _LIFE_NAMES]
        usage = self.tier.usage()
        assert isinstance(usage, TierUsage)
        size, count = sum(map(len, self.model.values())), len(self.model)
        assert usage.objects in (None, count)
        assert usage.bytes is None or size <= usage.bytes <= size + count * self.slack_bytes
        assert usage.capacity_bytes is None or usage.capacity_bytes >= (usage.bytes or 0)
        assert all(isinstance(key, str) and number >= 0 for key, number in usage.counters.items())

    def teardown(self) -> None:
        if self.keeps:
            self.tier.close()
            self.tier = self.open()
        for name, data in self.model.items():
            assert _get(self.tier, name, len(data)) == data, name
        self.tier.close()
