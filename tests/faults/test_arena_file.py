"""An arena that was cut off, changed, or is not ours: refused or repaired chunk by chunk, never served wrong."""

from __future__ import annotations

import os
import random
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from blake3 import blake3
from tools.toy_engine import ToyEngine

from kvdepot.errors import ArenaError
from kvdepot.keys import HASH_BYTES, ChunkChain
from kvdepot.memory.arena import Arena
from kvdepot.memory.arena_header import HEADER_BYTES
from tests.cli.command import run
from tests.conftest import SHM, Depot, StartDepot, eventually
from tests.faults.conftest import MakeEngine

pytestmark = pytest.mark.faults

MIB = 1 << 20
FAMILIES = list(range(60))
CHUNKS = 3
WIDTH = 16
"""4 KiB a chunk."""
ARENA_BYTES = 4 * MIB
TABLE_BYTES = ARENA_BYTES // 128
CHUNKS_START = HEADER_BYTES + TABLE_BYTES + 64
OPTIONS: dict[str, Any] = {"arena_mib": 4, "chunk_size": 64}


class Left(NamedTuple):
    """Where a server was that has ended and left its arena."""

    name: str
    url: str


@pytest.fixture(scope="module")
def contents() -> bytes:
    """An arena with the chunks of all families."""
    depot = Depot("--on-stop", "keep", **OPTIONS).wait_ready()
    engine = ToyEngine(depot.url, context=depot.context, width=WIDTH)
    try:
        assert all(engine.store(family, CHUNKS) for family in FAMILIES)
        assert depot.stop() == 0
        return (SHM / depot.name).read_bytes()
    finally:
        engine.close()
        depot.close()


@pytest.fixture
def left(contents: bytes, tmp_path: Path) -> Iterator[Left]:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    Depot.names.add(name)
    (SHM / name).touch(0o600)
    (SHM / name).write_bytes(contents)
    yield Left(name, f"ipc://{tmp_path}/depot.sock")
    (SHM / name).unlink(missing_ok=True)


def refused(depot: Left) -> str:
    """What a server says that does not start on this arena, and does not change it."""
    before = (SHM / depot.name).read_bytes()
    arguments = "--arena-gib", str(ARENA_BYTES / 2**30), "--chunk-size", "64"
    ended = run("serve", "--url", depot.url, "--arena-name", depot.name, *arguments)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert depot.name in ended.stderr and (SHM / depot.name).read_bytes() == before
    return ended.stderr


def check(depot: Left | Depot) -> subprocess.CompletedProcess[str]:
    return run("check", "--arena-name", depot.name)


def flip(path: Path, offsets: list[int], chance: random.Random) -> None:
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def served_right(engine: ToyEngine) -> int:
    """Chunks that are hits, all of them with the right bytes."""
    hits = engine.hits(FAMILIES, CHUNKS)
    assert not engine.wrong
    return hits


Survives = Callable[[str], tuple[int, int]]


@pytest.fixture
def survives(left: Left, start_depot: StartDepot, make_engine: MakeEngine) -> Survives:
    """What the next server has of the arena: its chunks, and how many are hits. It logs `said`, serves the hits right,
    stores the others again, and leaves an arena without a fault."""

    def take_over(said: str) -> tuple[int, int]:
        depot = start_depot("--on-stop", "keep", url=left.url, name=left.name, **OPTIONS)
        engine = make_engine(depot, width=WIDTH)
        found = depot.status()["chunks"], served_right(engine)
        eventually(lambda: said in depot.logged())
        assert all(engine.store(family, CHUNKS) for family in FAMILIES)
        assert served_right(engine) == len(FAMILIES) * CHUNKS
        assert depot.stop() == 0
        assert check(left).returncode == 0
        return found

    return take_over


@pytest.mark.parametrize("whole", [150, 0])
def test_of_an_arena_that_was_cut_off_only_the_lost_chunks_are_lost(left: Left, survives: Survives, whole: int) -> None:
    os.truncate(SHM / left.name, CHUNKS_START + whole * 4096 + 2222)  # in the middle of a chunk
    assert "cut off" in check(left).stdout
    chunks, hits = survives("cut off")
    assert hits <= chunks == whole


@pytest.mark.parametrize("seed", range(2))
def test_bits_flipped_in_the_table_cost_their_chunks_and_no_other(left: Left, survives: Survives, seed: int) -> None:
    chance = random.Random(seed)
    count = 8 * 16**seed
    used = 128 * (len(FAMILIES) * CHUNKS + 1)
    flip(SHM / left.name, [HEADER_BYTES + chance.randrange(used) for _ in range(count)], chance)
    checked = check(left)
    assert checked.returncode == 1 and " problem" in checked.stdout
    chunks, _ = survives("were invalid")
    # Each flip costs a chunk at most, unless it hit the record of the namespace.
    assert chunks >= len(FAMILIES) * CHUNKS - count or chunks == 0


@pytest.mark.parametrize("size", [1, 30, HEADER_BYTES, HEADER_BYTES + TABLE_BYTES // 2])
def test_an_arena_cut_off_before_its_first_chunk_is_refused_with_what_to_do(left: Left, size: int) -> None:
    os.truncate(SHM / left.name, size)
    assert "remove" in refused(left)


def test_whichever_bit_of_the_header_is_flipped_the_arena_is_refused_and_left_alone(
    left: Left, contents: bytes
) -> None:
    path, chance = SHM / left.name, random.Random(2)
    for offset in range(40):
        flip(path, [offset], chance)
        before = path.read_bytes()
        with pytest.raises(ArenaError, match=left.name):
            Arena(SHM, left.name, ARENA_BYTES, b"new boot")
        assert path.read_bytes() == before, f"byte {offset}: refused, and changed all the same"
        path.write_bytes(contents)
    flip(path, [20], chance)
    assert "remove" in refused(left)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to somebody else")
def test_an_arena_of_another_user_is_refused_and_left_alone(left: Left) -> None:
    os.chown(SHM / left.name, 12345, 12345)
    assert "not a file of user 0" in refused(left)
    assert (SHM / left.name).stat().st_uid == 12345


def place_of(depot: Depot, engine: ToyEngine, family: int, block: int) -> int:
    """Where a block's bytes lie in the arena's file."""
    key = engine.prompt(family, CHUNKS).keys[block]
    # Of a block, the first layer's K comes first and is stored beside that of the chunk's other blocks.
    start = (SHM / depot.name).read_bytes().find(blake3(key).digest(length=engine.parts[0].shape[1]))
    assert start > HEADER_BYTES + TABLE_BYTES, "the block is not in the arena"
    return start


@pytest.mark.parametrize("restart", [False, True], ids=["live", "after a restart"])
def test_a_bit_flipped_in_a_sealed_chunk_is_detected_recomputed_and_stored_anew(
    start_depot: StartDepot, make_engine: MakeEngine, restart: bool
) -> None:
    depot = start_depot("--on-stop", "keep", "--verify", "always", **OPTIONS)
    engine = make_engine(depot, width=WIDTH)
    for family in FAMILIES:
        assert engine.store(family, CHUNKS)
    flip(SHM / depot.name, [place_of(depot, engine, 7, 5)], random.Random(1))  # block 5 is in chunk 1
    if restart:
        assert depot.stop() == 0
        said = check(depot)
        assert said.returncode == 1 and "do not match its checksum" in said.stdout
        depot = start_depot("--verify", "always", url=depot.url, name=depot.name, **OPTIONS)
        engine = make_engine(depot, width=WIDTH)
    assert engine.retrieve(7, CHUNKS) == 4  # its blocks are reported; all others hold what they must
    assert not engine.wrong
    assert depot.status()["counters"]["corrupt_chunks"] == 1
    assert engine.lookup(7, CHUNKS) == 1
    assert engine.store(7, CHUNKS)
    assert served_right(engine) == len(FAMILIES) * CHUNKS
    assert depot.status()["counters"]["corrupt_chunks"] == 1


def test_sampled_checksums_detect_the_flips_in_the_chunks_they_sample(
    start_depot: StartDepot, make_engine: MakeEngine
) -> None:
    depot = start_depot("--verify", "sampled", **OPTIONS)
    engine = make_engine(depot, width=WIDTH)
    chance = random.Random(3)
    sampled = []
    for family in FAMILIES:
        assert engine.store(family, CHUNKS)
        chain = ChunkChain(engine.chunk_size)
        chain.extend(engine.prompt(family, CHUNKS).tokens)
        sampled += [(family, i) for i in range(CHUNKS) if chain.hashes[i * HASH_BYTES] < 16]
    assert len(sampled) > 3
    places = [place_of(depot, engine, family, chunk * engine.per_chunk) for family, chunk in sampled]
    flip(SHM / depot.name, places, chance)
    failed = sum(engine.retrieve(family, CHUNKS) for family in FAMILIES)
    assert not engine.wrong
    assert failed == len(sampled) * engine.per_chunk
    assert depot.status()["counters"]["corrupt_chunks"] == len(sampled)


def test_without_checksums_nothing_is_summed_up(start_depot: StartDepot, make_engine: MakeEngine) -> None:
    depot = start_depot(**OPTIONS)
    engine = make_engine(depot, width=WIDTH)
    assert engine.store(1, CHUNKS)
    assert "0 shards have a checksum" in check(depot).stdout
