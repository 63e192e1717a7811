"""Each metric, compared with what the test did: chunks dropped, refused, damaged and forgotten, a tier, a GPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvdepot.client import MessageQueueClient, admin
from kvdepot.errors import Busy
from kvdepot.protocol import wire
from tests.client.engine import CHUNK, PER_CHUNK, Engine
from tests.conftest import HANG_S, eventually
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


def test_what_is_dropped_missed_and_refused_is_counted_by_its_metric(start_web: StartWeb) -> None:
    web = start_web("--max-sessions", "2", arena_mib=2)
    engine = Engine(web.depot, BLOCK_BYTES)
    person = MessageQueueClient(web.depot.url, web.depot.context)
    try:
        for number in range(8):
            engine.store(prompt(number, 1), BLOCKS[:PER_CHUNK])
        assert engine.retrieve(prompt(200), BLOCKS) == set(BLOCKS)
        there = admin.make_prompt(person, prompt(7, 1), b"", engine.model, "").hashes
        for number in range(2):
            assert person.ask(wire.Lookup(engine.model, 1, 0, f"r{number}", 1, there, True)).result(HANG_S) == 1
        with pytest.raises(Busy):
            person.ask(wire.Lookup(engine.model, 1, 0, "r2", 1, there, True)).result(HANG_S)
        told = fresh(web)
        assert told["chunks"] + told["evicted_chunks_total"] == told["stored_shards_total"] == 8
        assert (told["retrieve_misses_total"], told["errors_total"], told["sessions"]) == (2, 1, 2)
        assert labelled(web, "refused_total")["lookups",] == 1 == labelled(web, "request_errors_total")["Lookup",]
        assert labelled(web, "namespace_bytes")[str(PER_CHUNK), engine.model, "", "1"] == told["memory_used_bytes"]
        assert labelled(web, "namespace_workers")[str(PER_CHUNK), engine.model, "", "1"] == 1
        for number in range(2):
            person.ask(wire.EndSession(f"r{number}", 256, 0.5)).result(HANG_S)
        admin.forget(person, engine.model, "")
        after = fresh(web)
        assert (after["reused_tokens_total"], after["saved_prefill_seconds_total"]) == (512, 1.0)
        assert after["forgotten_chunks_total"] == told["chunks"] and after["chunks"] == after["pins"] == 0
    finally:
        person.close()
        engine.close()


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
