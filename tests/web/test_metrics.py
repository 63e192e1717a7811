"""Each metric, compared with what the test did: chunks dropped, refused, damaged and forgotten, a tier, a GPU."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvdepot.client import MessageQueueClient, admin
from kvdepot.errors import BadRequest, Busy
from kvdepot.protocol import wire
from tests.client.engine import CHUNK, PER_CHUNK, Engine
from tests.conftest import HANG_S, SHM, eventually
from tests.devices.engines import Engine as GpuEngine
from tests.devices.engines import tokens_of
from tests.fakecuda.machine import VARIABLES, Machine
from tests.web.conftest import StartWeb, Web
from tests.web.samples import read, samples

pytestmark = pytest.mark.faults  # a server and a web process each

BLOCK_BYTES = 64 << 10
CHUNK_BYTES = PER_CHUNK * BLOCK_BYTES
BLOCKS = list(range(2 * PER_CHUNK))


def fresh(web: Web) -> dict[str, float]:
    """Metrics without labels, of a status that was requested after this call."""
    web.status()
    return {name.removeprefix("kvdepot_"): value for name, value in read(web).items()}


def labelled(web: Web, name: str) -> dict[tuple[str, ...], float]:
    """Values of one metric, by the values of its labels, which are sorted by name."""
    return {
        tuple(value for _, value in labels): count
        for (found, labels), count in samples(web.get("/metrics")).items()
        if found == f"kvdepot_{name}"
    }


def prompt(number: int, chunks: int = 2) -> list[int]:
    return [number] * (chunks * CHUNK)


@pytest.fixture
def holders() -> Iterator[list[MessageQueueClient]]:
    """Clients that hold pins until they are closed, at the end of the test at the latest."""
    made: list[MessageQueueClient] = []
    yield made
    for each in made:
        each.close()


def test_what_is_lost_refused_damaged_and_removed_is_counted_by_its_metric(
    start_web: StartWeb, holders: list[MessageQueueClient]
) -> None:
    web = start_web("--verify", "always", "--max-sessions", "2", arena_mib=2)
    depot = web.depot
    engine = Engine(depot, BLOCK_BYTES)
    person = MessageQueueClient(depot.url, depot.context)
    try:
        # As much as there is room for, pinned by name and by requests: what comes then is dropped.
        kept = 0
        while depot.status()["counters"].get("dropped_chunks", 0) == 0:
            engine.store(prompt(kept, 1), BLOCKS[:PER_CHUNK])
            if depot.status()["chunks"] == kept + 1:
                pinned = admin.make_prompt(person, prompt(kept, 1), b"", engine.model, "")
                if kept < 2:
                    assert admin.lease(person, f"pin {kept}", pinned) == 1
                else:
                    asked = wire.Lookup(engine.model, 1, 0, f"held {kept}", 1, pinned.hashes, True)
                    holder = MessageQueueClient(depot.url, depot.context)
                    holders.append(holder)
                    assert holder.ask(asked).result(HANG_S) == 1
                kept += 1
        told = fresh(web)
        assert told["chunks"] == told["pins"] == told["stored_shards_total"] == kept > 3
        assert (told["dropped_shards_total"], told["evicted_chunks_total"], told["failed_shards_total"]) == (1, 0, 0)
        assert (told["leases"], told["leased_bytes"], told["sessions"]) == (2, 2 * CHUNK_BYTES, kept - 2)
        assert told["memory_used_bytes"] == kept * CHUNK_BYTES == told["stored_bytes_total"]
        assert (told["instances"], told["engine_processes"]) == (1, 1 + len(holders))
        assert told["clients"] >= 2 + len(holders) + 2  # the engine's two, the person, the web process
        assert told["record_slots_used"] == kept + 1  # the namespace has one, too
        assert told["reserved_shards"] == told["operations"] == told["unrecorded_shards"] == 0

        # Room again: one goes for what comes.
        for holder in holders:
            holder.close()
        eventually(lambda: depot.status()["sessions"] == 0)
        engine.store(prompt(100, 1), BLOCKS[:PER_CHUNK])
        told = fresh(web)
        assert (told["evicted_chunks_total"], told["chunks"]) == (1, kept)

        # A store that its engine gave up, chunks that are not there, and one that changed in memory.
        assert engine.retrieve(prompt(200), BLOCKS) == set(BLOCKS)
        with (SHM / depot.name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            at = arena.find(engine.cache[0].numpy().tobytes())
            while at >= 0:  # every copy: the last stored is one of them
                arena[at] ^= 0xFF
                at = arena.find(engine.cache[0].numpy().tobytes(), at + 1)
        assert engine.retrieve(prompt(100, 1), BLOCKS[PER_CHUNK:])
        engine.worker.mq_client.liveness.raise_fence(1 << 60)
        engine.store(prompt(300, 1), BLOCKS[:PER_CHUNK])
        told = fresh(web)
        assert told["retrieve_misses_total"] == 2
        assert told["corrupt_shards_total"] == 1
        assert told["failed_shards_total"] == 1
        assert told["retrieved_shards_total"] == told["retrieved_bytes_total"] == 0

        # What is asked wrongly, too often, or not at all in our words.
        with pytest.raises(BadRequest):
            person.ask(wire.EndSession("r", -1)).result(HANG_S)
        there = admin.make_prompt(person, prompt(0, 1), b"", engine.model, "").hashes
        for number in range(2):
            assert person.ask(wire.Lookup(engine.model, 1, 0, f"r{number}", 1, there, True)).result(HANG_S) == 1
        with pytest.raises(Busy):
            person.ask(wire.Lookup(engine.model, 1, 0, "r2", 1, there, True)).result(HANG_S)
        stranger = depot.context.socket(zmq.DEALER)
        try:
            stranger.connect(depot.url)
            stranger.send(b"no message of ours")
            assert stranger.poll(1000 * HANG_S)
            stranger.recv()
        finally:
            stranger.close(linger=0)
        told = fresh(web)
        assert (told["errors_total"], told["bad_messages_total"]) == (2, 1)
        refused = labelled(web, "refused_total")
        assert refused["lookups",] == 1 == sum(refused.values())
        errors = labelled(web, "request_errors_total")
        assert (errors["EndSession",], errors["Lookup",]) == (1, 1)
        assert sum(errors.values()) == 2
        assert labelled(web, "namespace_bytes")[str(PER_CHUNK), engine.model, "", "1"] == told["memory_used_bytes"]
        assert labelled(web, "namespace_workers")[str(PER_CHUNK), engine.model, "", "1"] == 1

        # And what people and clients remove.
        for number in range(2):
            person.ask(wire.EndSession(f"r{number}", 256, 0.5)).result(HANG_S)
            admin.end_lease(person, f"pin {number}")
        before = fresh(web)
        assert (before["reused_tokens_total"], before["saved_prefill_seconds_total"]) == (512, 1.0)
        admin.forget(person, engine.model, "")
        engine.worker.mq_client.liveness.close()
        other = Engine(depot, BLOCK_BYTES)
        other.store(prompt(1), BLOCKS)
        person.ask(wire.Clear(other.model)).result(HANG_S)
        other.close()
        told = fresh(web)
        assert told["forgotten_chunks_total"] == before["chunks"] - 1 > 0  # the damaged one was nobody's any more
        assert told["cleared_chunks_total"] == 2
        assert told["chunks"] == told["pins"] == told["leases"] == told["memory_used_bytes"] == 0
    finally:
        person.close()
        engine.close()


def test_chunks_that_are_too_old_are_counted(start_web: StartWeb) -> None:
    web = start_web("--ttl-s", "1")
    engine = Engine(web.depot)
    engine.store(prompt(1), BLOCKS)
    engine.close()
    eventually(lambda: read(web)["kvdepot_chunks"] == 0 and read(web)["kvdepot_expired_chunks_total"] == 2)


def test_what_a_tier_saves_and_gives_back_is_told_until_it_is_left_alone(start_web: StartWeb, tmp_path: Path) -> None:
    web = start_web("--tiers", f"disk://{tmp_path}/kv?capacity_gib=1")
    tier = f"disk://{tmp_path}/kv"
    engine = Engine(web.depot, BLOCK_BYTES)
    person = MessageQueueClient(web.depot.url, web.depot.context)
    try:
        engine.store(prompt(1), BLOCKS)
        eventually(lambda: web.depot.status()["tiers"][0]["objects"] == 2)
        person.ask(wire.Clear()).result(HANG_S)
        assert engine.lookup(prompt(1)) == 2 * CHUNK
        told = fresh(web)
        assert (told["tier_hit_chunks_total"], told["hit_chunks_total"], told["lookup_chunks_total"]) == (2, 2, 2)
        assert labelled(web, "tier_saved_shards_total") == labelled(web, "tier_loaded_shards_total") == {(tier,): 2}
        for call in ("load", "save"):
            calls = labelled(web, f"tier_{call}_seconds_count")[tier,]
            assert 1 <= calls <= 2 and labelled(web, f"tier_{call}_bytes_per_second_count") == {(tier,): calls}
            assert labelled(web, f"tier_{call}_seconds_sum")[tier,] > 0
        assert labelled(web, "tier_objects") == {(tier,): 2}
        assert labelled(web, "tier_bytes")[tier,] >= 2 * CHUNK_BYTES
        assert labelled(web, "tier_capacity_bytes") == {(tier,): 1 << 30}
        assert labelled(web, "tier_free_bytes")[tier,] > 0
        for idle in ("tier_queued_bytes", "tier_saves", "tier_loads"):
            assert labelled(web, idle) == {(tier,): 0}
        assert labelled(web, "tier_up") == {(tier,): 1}
        shutil.rmtree(tmp_path / "kv")
        person.ask(wire.Clear()).result(HANG_S)
        eventually(lambda: engine.lookup(prompt(2)) == 0 and labelled(web, "tier_up") == {(tier,): 0})
        assert labelled(web, "tier_breaker_openings_total")[tier,] >= 1
    finally:
        person.close()
        engine.close()


def test_what_the_server_has_of_a_gpu_is_told(start_web: StartWeb, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    for name in VARIABLES:
        monkeypatch.setenv(name, machine.environment()[name])
    web = start_web("--gpu-staging-mib", "8", arena_mib=16)
    assert labelled(web, "device_up") == {}
    engines = [GpuEngine(web.depot.url, os.environ, gpu, seed=gpu) for gpu in (0, 1, 1)]
    try:
        for number, engine in enumerate(engines):
            assert engine.store(list(range(8)), tokens_of(number, 2))
        eventually(lambda: all(gpu["pinned_bytes"] == 16 << 20 for gpu in web.depot.status()["devices"]))
        gpus = {(gpu["uuid"],): gpu for gpu in web.status()["devices"]}
        assert len(gpus) == 2
        for field in ("registrations", "context_bytes", "staging_bytes", "pinned_bytes"):
            assert labelled(web, f"device_{field}") == {gpu: said[field] for gpu, said in gpus.items()}, field
        assert sorted(labelled(web, "device_registrations").values()) == [1, 2]
        assert set(labelled(web, "device_pinned_bytes").values()) == {16 << 20}
        assert set(labelled(web, "device_up").values()) == {1}
        machine.fail("copy", "CUDA_ERROR_ECC_UNCORRECTABLE", pid=web.depot.process.pid)
        engines[0].store(list(range(8, 16)), tokens_of(9, 2))
        web.status()
        assert sorted(labelled(web, "device_up").values()) == [0, 1]
        assert fresh(web)["failed_shards_total"] == 2
        engines[0].process.kill()
        eventually(lambda: len(labelled(web, "device_up")) == 1)
    finally:
        for engine in engines:
            engine.process.close()
        failures = machine.failures()
        web.depot.close()
        machine.close()
    assert failures == []


def test_prometheus_own_format_says_the_same_numbers(web: Web) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    answer = web.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {
        sample.name for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples
    }
    assert names == {name for name, _ in samples(web.get("/metrics"))}
