"""Compression and encryption of objects: round trips, bytes that are anyone's, and keys."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot.install import advice
from kvdepot.memory.extents import checksum
from kvdepot.tiers import Options
from kvdepot.tiers import codec as codecs
from kvdepot.tiers.codec import BLOCK_BYTES, SLACK, Codec, make_codec
from kvdepot.tiers.format import HEADER_BYTES, NO_SALT, Header, ShardFacts
from kvdepot.tiers.stamps import Stamps
from kvdepot.tiers.worker import Load, Mover, NotLoaded, Part, Save, Written
from tests.conftest import HANG_S
from tests.tiers.faulty import Area, MemoryTier
from tests.tiers.servers import need

Bytes = npt.NDArray[np.uint8]


need(modules=["zstandard", "cryptography"])

import zstandard  # noqa: E402

FACTS = ShardFacts("", "model", 1, 0, 16, 256, bytes(32))
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
PLAIN, ZSTD, AES, BOTH = Codec(), Codec(True), Codec(key=KEY), Codec(True, KEY)
CODECS = [PLAIN, ZSTD, AES, BOTH]
coded = pytest.mark.parametrize("codec", CODECS[1:], ids=["zstd", "aes", "zstd+aes"])
sealed = pytest.mark.parametrize("codec", CODECS[2:], ids=["aes", "zstd+aes"])

sizes = st.one_of(
    st.integers(0, 70), st.builds(lambda n, d: max(0, n * BLOCK_BYTES + d), st.integers(0, 3), st.integers(-9, 9))
)
"""Of KV: a few bytes, and around whole blocks."""


def header_of(kv: Bytes, **fields: Any) -> Header:
    total = checksum(kv, [(0, len(kv))], len(kv))
    return msgspec.structs.replace(Header(FACTS.digest, b"k" * 32, NO_SALT, len(kv), len(kv), total, 5), **fields)


def cut(memory: Bytes, places: Sequence[int]) -> list[memoryview]:
    """All of it, in pieces."""
    edges = [0, *sorted(place % (len(memory) + 1) for place in places), len(memory)]
    return [memory[a:b].data for a, b in itertools.pairwise(edges)]


def normal(size: int, seed: int = 0) -> Bytes:
    """KV of bf16 as layers make it: numbers around zero."""
    floats = np.random.default_rng(seed).standard_normal(size // 2 + 1).astype("<f4")
    return (floats.view("<u4") >> 16).astype("<u2").view(np.uint8)[:size].copy()


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


KINDS = {"normal": normal, "noise": noise, "zeros": lambda size, seed=0: np.zeros(size, np.uint8)}


def unpacked(data: memoryview) -> Header:
    header = Header.unpack(data)
    assert header is not None
    return header


def coding_of(codec: Codec, kv: Bytes) -> tuple[Header, list[memoryview]]:
    head, *rest = codec.encode(header_of(kv), FACTS, [kv.data])
    return unpacked(head), rest


class Guarded:
    """Memory to decode into, with a margin that must stay as it is."""

    def __init__(self, size: int, places: Sequence[int] = ()) -> None:
        self.all = np.full(size + 128, 0xA5, np.uint8)
        self.bytes = self.all[64 : 64 + size]
        self.pieces = cut(self.bytes, places)

    def assert_untouched_outside(self) -> None:
        assert (self.all[:64] == 0xA5).all() and (self.all[64 + len(self.bytes) :] == 0xA5).all()


# -- round trips


def test_kv_whose_plane_shrinks_by_nothing_comes_back() -> None:
    """A frame as long as its plane would be taken for the plane itself."""
    random, ties = np.random.default_rng(0), 0
    for size in random.integers(100, 1200, 500):
        low, high = random.integers(0, 256, size, np.uint8), np.full(size, 63, np.uint8)
        low[: random.integers(1, 40)] = 7
        kv = np.stack([low, high], 1).reshape(-1)
        ties += len(codecs._compressor().compress(low.data)) == size
        header, rest = coding_of(ZSTD, kv)
        target = Guarded(len(kv))
        assert ZSTD.decode(header, rest, target.pieces) and (target.bytes == kv).all()
    assert ties


@settings(deadline=None)
@given(
    st.sampled_from(CODECS),
    st.sampled_from(sorted(KINDS)),
    sizes,
    st.integers(0, 2**32),
    st.lists(st.integers(0, 2**20), max_size=4),
    st.lists(st.integers(0, 2**20), max_size=4),
    st.lists(st.integers(0, 2**20), max_size=4),
)
def test_kv_comes_back_however_it_is_cut(
    codec: Codec, kind: str, size: int, seed: int, parts: list[int], stored: list[int], out: list[int]
) -> None:
    kv = KINDS[kind](size, seed)
    head, *rest = codec.encode(header_of(kv), FACTS, cut(kv, parts))
    header = unpacked(head)
    body = np.frombuffer(b"".join(rest), np.uint8)
    assert header.stored == len(body) <= size + codec.slack <= size + SLACK
    assert header.names(FACTS, NO_SALT, b"k" * 32, size) and not codec.why_not(header)
    target = Guarded(size, out)
    assert codec.decode(header, cut(body, stored), target.pieces)
    assert (target.bytes == kv).all()
    target.assert_untouched_outside()


@coded
def test_other_threads_run_while_bytes_are_coded(codec: Codec) -> None:
    kv = normal(1 << 20).repeat(32)
    header = header_of(kv)
    started, interval = threading.Event(), sys.getswitchinterval()

    def code() -> None:
        started.set()
        codec.encode(header, FACTS, [kv.data])

    laps = 0
    thread = threading.Thread(target=code)
    try:
        sys.setswitchinterval(HANG_S)  # whoever does not let go of the GIL keeps it
        thread.start()
        started.wait()
        while thread.is_alive():
            Path("/").stat()  # lets go of the GIL
            laps += 1
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert laps > 100, "another thread ran only between two parts of it"


# -- compression


def test_bf16_shrinks_by_a_third_and_bytes_without_a_pattern_stay_as_they_are() -> None:
    kv = normal(4 * BLOCK_BYTES)
    header, _ = coding_of(ZSTD, kv)
    assert header.coding and header.stored < 0.7 * len(kv)
    kv = noise(4 * BLOCK_BYTES)
    header, rest = coding_of(ZSTD, kv)
    assert header.coding == 0 and header.stored == len(kv)
    assert np.shares_memory(np.frombuffer(rest[0], np.uint8), kv)


def frame(data: bytes, **options: Any) -> bytes:
    made: bytes = zstandard.ZstdCompressor(**options).compress(data)
    return made


def compressed(size: int, planes: Sequence[bytes]) -> tuple[Header, bytes]:
    """An object of two-byte elements whose planes are these."""
    body = np.array([len(plane) for plane in planes], "<u4").tobytes() + b"".join(planes)
    return header_of(np.zeros(size, np.uint8), stored=len(body), coding=1 | 1 << 2), body


def frames_that_lie() -> Iterator[Any]:
    good = frame(bytes(500))
    yield pytest.param(frame(bytes(1 << 26)), id="a frame of 64 MiB")
    yield pytest.param(frame(bytes(499)), id="a frame of less")
    yield pytest.param(frame(bytes(1 << 26), write_content_size=False), id="a frame of 64 MiB that says nothing")
    yield pytest.param(frame(bytes(500), write_content_size=False), id="a frame that says nothing of its size")
    yield pytest.param(good[:-3], id="a frame cut off")
    yield pytest.param(b"\x50\x2a\x4d\x18\xf4\x01\x00\x00" + bytes(20), id="a frame to skip")
    yield pytest.param(good[:4] + b"\xe0" + (2**62).to_bytes(8, "little") + good[6:], id="a frame of 4 EiB")
    yield pytest.param(b"", id="no frame")
    yield pytest.param(bytes(501), id="no frame, one byte too many")


@pytest.mark.parametrize("lie", list(frames_that_lie()))
def test_frames_that_lie_cost_neither_memory_nor_an_exception(lie: bytes) -> None:
    header, body = compressed(1000, [frame(bytes(500)), frame(bytes(500))])
    target = Guarded(1000)
    assert PLAIN.decode(header, [memoryview(body)], target.pieces), "the honest one is read"
    header, body = compressed(1000, [frame(bytes(500)), lie])
    tracemalloc.start()
    try:
        assert not PLAIN.decode(header, [memoryview(body)], target.pieces)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body) + (1 << 20)
    finally:
        tracemalloc.stop()
    target.assert_untouched_outside()


# -- bytes that are anyone's

changes = st.dictionaries(
    st.sampled_from(["size", "stored", "coding", "checksum", "born"]),
    st.one_of(st.integers(0, 70), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)),
    max_size=3,
)


@settings(deadline=None)
@given(st.sampled_from(CODECS), changes, st.binary(max_size=300), st.integers(0, 200), st.booleans())
def test_any_header_and_any_bytes_give_an_answer_and_touch_nothing_else(
    codec: Codec, change: dict[str, int], stored: bytes, size: int, is_consistent: bool
) -> None:
    header = header_of(np.zeros(size, np.uint8), **change)
    if is_consistent:  # past the first checks
        header = msgspec.structs.replace(header, size=size, stored=len(stored))
    if codec in (AES, BOTH) and is_consistent:
        header = msgspec.structs.replace(header, coding=codec._coding | header.coding & 0xD)
    target = Guarded(size)
    assert codec.decode(header, [memoryview(stored)], target.pieces) in (True, False)
    target.assert_untouched_outside()


@settings(deadline=None)
@given(st.data(), st.sampled_from(CODECS[1:]), st.integers(1, 2000))
def test_damage_to_what_was_written_never_changes_kv_unnoticed(data: st.DataObject, codec: Codec, size: int) -> None:
    kv = normal(size)
    header, rest = coding_of(codec, kv)
    body = bytearray(b"".join(rest))
    what = data.draw(st.sampled_from(["flip", "drop", "insert", "cut"]))
    at = data.draw(st.integers(0, len(body) - 1))
    if what == "flip":
        body[at] ^= 1 << data.draw(st.integers(0, 7))
    elif what == "drop":
        del body[at]
    elif what == "insert":
        body.insert(at, data.draw(st.integers(0, 255)))
    else:
        del body[at:]
    for stored in (header.stored, len(body)):
        changed = msgspec.structs.replace(header, stored=stored)
        target = Guarded(size)
        if codec.decode(changed, [memoryview(body)], target.pieces) and (target.bytes != kv).any():
            # What no one encrypted, the checksum vouches for (worker.py compares it).
            assert codec is ZSTD and checksum(target.bytes, [(0, size)], size) != header.checksum
        target.assert_untouched_outside()


# -- encryption


@sealed
def test_encrypted_bytes_show_nothing_and_never_repeat(codec: Codec) -> None:
    kv = np.frombuffer(b"what nobody else may read. " * 500, np.uint8)
    header, rest = coding_of(codec, kv)
    body = b"".join(rest)
    assert b"nobody" not in body and len(zstandard.ZstdCompressor().compress(body)) > len(body)
    again, second = coding_of(codec, kv)
    assert again.nonce != header.nonce and b"".join(second) != body


@sealed
@pytest.mark.parametrize(
    "change",
    [
        {"facts": b"o" * 32}, {"key": b"o" * 32}, {"salt": b"o" * 16}, {"size": 9}, {"stored": 9}, {"checksum": 9},
        {"born": 9}, {"coding": 9}, {"nonce": bytes(12)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_encrypted_bytes_belong_to_their_header_alone(codec: Codec, change: dict[str, Any]) -> None:
    kv = normal(1000)
    header, rest = coding_of(codec, kv)
    out = np.zeros(1000, np.uint8)
    assert codec.decode(header, rest, [out.data])
    assert not codec.decode(msgspec.structs.replace(header, **change), rest, [out.data])


def test_a_codec_says_why_it_cannot_read_an_object() -> None:
    kv = normal(1000)
    (plain, _), (sealed, _) = coding_of(PLAIN, kv), coding_of(AES, kv)
    later = msgspec.structs.replace(plain, coding=16)
    for codec, header, says in (
        (PLAIN, sealed, "no key_file"), (AES, plain, "not encrypted"), (Codec(key=OTHER_KEY), sealed, "another key"),
        (PLAIN, later, "this version"), (AES, later, "this version"),
    ):  # fmt: skip
        assert says in codec.why_not(header)
    assert AES.why_not(sealed) == PLAIN.why_not(plain) == ""


# -- keys


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "tier.key"
    path.write_text(KEY.hex() + "\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (KEY.hex(), 0o640, "others can read"),
        (KEY.hex(), 0o604, "others can read"),
        (KEY.hex()[:-1], 0o600, "not a 32-byte key"),
        (KEY.hex() + "00", 0o600, "not a 32-byte key"),
        ("x" + KEY.hex()[1:], 0o600, "not a 32-byte key"),
        ("", 0o600, "not a 32-byte key"),
    ],
)
def test_a_key_file_that_is_none_or_that_others_can_read_is_refused(
    key_file: Path, text: str, mode: int, says: str
) -> None:
    key_file.write_text(text)
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=says) as caught:
        make_codec(Options(key_file=str(key_file)))
    assert str(key_file) in str(caught.value)
    assert KEY.hex()[8:16] not in str(caught.value) and caught.value.__cause__ is None


def test_nothing_shows_the_key(key_file: Path) -> None:
    codec = make_codec(Options(key_file=str(key_file)))
    assert KEY.hex()[:8] not in repr(codec) and repr(KEY)[2:20] not in repr(codec)
    header, _ = coding_of(codec, normal(100))
    assert KEY[:4] not in header.pack(FACTS)


@pytest.mark.parametrize("part", ["zstandard", "zstandard.backend_c", "cryptography", "cryptography.hazmat.bindings"])
def test_without_its_library_a_codec_names_the_package_to_install(part: str) -> None:
    """Or with one whose native part does not load."""
    library = part.partition(".")[0]
    extra = {"zstandard": "compress", "cryptography": "encrypt"}[library]
    program = (
        f"import sys; sys.modules[{part!r}] = None\n"
        "from kvdepot.errors import ConfigError\n"
        "from kvdepot.tiers.codec import Codec\n"
        "Codec()\n"
        "try: Codec(True, bytes(32))\n"
        "except ConfigError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert advice(extra) in done.stdout and library in advice(extra)


# -- behind the tier worker


@pytest.mark.parametrize("codec", CODECS, ids=["plain", "zstd", "aes", "zstd+aes"])
def test_a_shard_goes_to_a_tier_and_back_and_is_told_from_one_with_another_key(
    codec: Codec, caplog: pytest.LogCaptureFixture
) -> None:
    size = BLOCK_BYTES + 8192
    area, shelf = Area(1 << 20), MemoryTier()
    heads = np.zeros((16, HEADER_BYTES + SLACK), np.uint8)
    kv = normal(size)
    area.bytes[4096 : 4096 + BLOCK_BYTES], area.bytes[400000 : 400000 + 8192] = kv[:BLOCK_BYTES], kv[BLOCK_BYTES:]
    here = Part(FACTS, b"", b"k" * 32, [(4096, BLOCK_BYTES), (400000, 8192)], size)
    there = Part(FACTS, b"", b"k" * 32, [(500032, size)], size)
    assert Mover(shelf, area, codec, heads, Stamps(codec)).run(Save(0, [here]), 0.0) == Written([True])

    def load(reader: Codec) -> Any:
        area.bytes[500000:] = 0
        return Mover(shelf, area, reader, heads, Stamps(reader)).run(Load(0, [there]), 0.0).shards[0]

    assert load(codec).names(FACTS, NO_SALT, b"k" * 32, size)
    assert (area.bytes[500032 : 500032 + size] == kv).all() and not area.bytes[500032 + size :].any()
    stranger = Codec(True, OTHER_KEY)
    assert load(stranger) is NotLoaded.ABSENT, "another key: not for us, and not to be removed"
    assert load(stranger) is NotLoaded.ABSENT
    assert ["key" in record.message for record in caplog.records] == [True], "said once"
    ((name, data),) = shelf.objects.items()
    shelf.objects[name] = (
        data[: HEADER_BYTES + 1000] + bytes([data[HEADER_BYTES + 1000] ^ 1]) + data[HEADER_BYTES + 1001 :]
    )
    assert load(codec) is NotLoaded.CORRUPT
