"""vLLM's own LMCacheMPConnector, its files as they come, in real engines: what it loads is what it would compute."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.memory.arena_header import ArenaHeader
from kvdepot.memory.records import Records, ShardRecord
from tests.conftest import SHM, Depot
from tests.contract.conftest import vllm_version
from tests.vllm.engines import LLAMA, Engine, output, prompt, same_as_own, write_model

LONG = 8192
TOKEN_KEYS = vllm_version() >= "0.17"
"""With vLLM's block hashes as keys, nothing is loaded where vLLM's own hit ends within a chunk."""
CHUNK = 256


@pytest.fixture(scope="module")
def depot() -> Iterator[Depot]:
    server = Depot("--verify", "always", arena_mib=256).wait_ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", LLAMA | {"max_position_embeddings": 16384})


def start(model: Path, depot: Depot, **arguments: Any) -> Engine:
    # Steps of 1,000 tokens end within blocks of 128: what is stored must have been computed.
    options = {"max_model_len": 16384, "max_num_batched_tokens": 1000, "num_gpu_blocks_override": 256} | arguments
    return Engine(
        model,
        "",
        kv_transfer_config={
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": depot.url, "lmcache.mp.port": 5555},
        },
        **options,
    ).wait_started()


@pytest.fixture(scope="module")
def engine(model: Path, depot: Depot) -> Iterator[Engine]:
    started = start(model, depot)
    yield started
    started.close()


@pytest.fixture(scope="module")
def stored(engine: Engine) -> list[int]:
    """A prompt that the engine has computed and stored."""
    tokens = prompt(1, LONG + 9)
    assert engine.run(tokens)["cached"] == 0
    return tokens


def same_as_the_blocks_that_are_there(engine: Engine, tokens: list[int], cached: int) -> None:
    """What the engine loads is what it has in its own prefix cache, bit for bit."""
    own, loaded = engine.run(tokens), engine.run_fresh(tokens)
    assert own["cached"] == loaded["cached"] == cached
    assert output(own) == output(loaded)


def test_8192_tokens_come_back_as_they_were_computed(engine: Engine, stored: list[int]) -> None:
    same_as_own(engine, stored, LONG)


def test_an_engine_whose_configuration_changes_the_kv_shares_nothing(
    model: Path, depot: Depot, stored: list[int]
) -> None:
    other = start(model, depot, hf_overrides={"rope_theta": 20000.0})
    try:
        assert other.run(stored)["cached"] == 0
    finally:
        other.close()


def test_vllms_own_files_are_what_runs(engine: Engine, stored: list[int]) -> None:
    assert "lmcache_integration/multi_process_adapter.py" in engine.tell("adapter")


def test_the_next_turn_is_stored_from_the_right_blocks(engine: Engine, stored: list[int]) -> None:
    longer = stored + prompt(2, 4 * CHUNK)
    assert engine.run_fresh(longer)["cached"] == LONG
    same_as_the_blocks_that_are_there(engine, longer, LONG + 4 * CHUNK)


def test_a_fresh_engine_finds_them(model: Path, depot: Depot, engine: Engine, stored: list[int]) -> None:
    own = engine.run_fresh(stored)
    fresh = start(model, depot)
    try:
        there = fresh.run(stored)
    finally:
        fresh.close()
    assert there["cached"] == own["cached"] == LONG
    assert output(there) == output(own)


def test_several_prompts_in_one_batch(engine: Engine) -> None:
    prompts = [prompt(10 + chunks, chunks * CHUNK + 9) for chunks in (3, 5, 8, 1)]
    engine.tell("run", requests=[engine.request(tokens) for tokens in prompts])
    for tokens in prompts:
        same_as_the_blocks_that_are_there(engine, tokens, len(tokens) - 9)
    engine.tell("reset")
    requests = [engine.request(tokens) for tokens in prompts]
    together = engine.tell("run", requests=requests)
    assert [together[request["id"]]["cached"] for request in requests] == [len(tokens) - 9 for tokens in prompts]


def test_of_a_chunk_that_vllm_has_in_part_only_the_rest_is_loaded(engine: Engine) -> None:
    tokens = prompt(30, 5 * CHUNK + 9)
    expected = engine.run(tokens)
    engine.tell("reset")
    engine.run(tokens[: CHUNK + 128 + 9])  # vLLM has three blocks of 128 now
    again = engine.run(tokens)
    assert again["cached"] == (5 * CHUNK if TOKEN_KEYS else CHUNK + 128)
    assert again["tokens"] == expected["tokens"]


def test_another_salt_is_another_prompt(engine: Engine) -> None:
    tokens = prompt(40, 4 * CHUNK)
    assert engine.run(tokens, salt="theirs")["cached"] == 0
    assert engine.run_fresh(tokens)["cached"] == 0
    assert engine.run_fresh(tokens, salt="ours")["cached"] == 0


def test_a_load_that_fails_is_recomputed(engine: Engine, depot: Depot) -> None:
    tokens = prompt(50, 8 * CHUNK + 9)
    expected = engine.run(tokens)
    change_a_byte_of_every_chunk(depot)
    before = depot.status()["counters"]["corrupt_chunks"]
    again = engine.run_fresh(tokens)
    assert depot.status()["counters"]["corrupt_chunks"] > before
    assert output(again) == output(expected)
    assert again["cached"] == 0
    same_as_own(engine, tokens, 8 * CHUNK)  # it has been stored again


def test_a_request_that_is_aborted_during_its_load_is_freed_when_the_load_has_ended(model: Path) -> None:
    depot = Depot().wait_ready()
    engine = start(model, depot, num_gpu_blocks_override=26, max_num_batched_tokens=4096)  # blocks for one prompt
    try:
        tokens, other = prompt(70, 8 * CHUNK + 9), prompt(71, 8 * CHUNK + 9)
        engine.run(tokens)
        expected = engine.run_fresh(other, salt="for vLLM alone")
        engine.tell("reset")
        request = engine.request(tokens)
        engine.tell("ask", request=request)
        depot.process.send_signal(signal.SIGSTOP)
        engine.tell("step")  # the load is ordered
        engine.tell("abort", id=request["id"])
        engine.tell("add only", request=engine.request(other, salt="for vLLM alone"))
        engine.tell("step")  # which has no blocks while the load may write to them
        engine.tell("step")
        depot.process.send_signal(signal.SIGCONT)
        (after,) = engine.tell("finish").values()
        assert output(after) == output(expected)
        assert engine.run_fresh(tokens)["cached"] == 8 * CHUNK
        engine.stop()
    finally:
        engine.close()
        depot.close()


def test_the_engine_goes_on_when_the_server_is_gone(model: Path) -> None:
    depot = Depot().wait_ready()
    engine = start(model, depot)
    try:
        tokens = prompt(60, 4 * CHUNK + 9)
        expected = engine.run(tokens)
        depot.process.kill()
        depot.process.wait()
        gone = engine.run_fresh(tokens)
        assert (gone["cached"], gone["tokens"]) == (0, expected["tokens"])
        engine.stop()
    finally:
        engine.close()
        depot.close()


def change_a_byte_of_every_chunk(depot: Depot) -> None:
    with (SHM / depot.name).open("r+b") as file:
        header = ArenaHeader.read(file.fileno(), file.name)
        assert header is not None
        records = [record for _, record in Records(memoryview(header.read_table(file.fileno()))).read().records]
        for record in records:
            if isinstance(record, ShardRecord):
                place = record.extents[0][0] + 1000
                (value,) = os.pread(file.fileno(), 1, place)
                os.pwrite(file.fileno(), bytes([value ^ 1]), place)
