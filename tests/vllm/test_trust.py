"""Engines load what others have stored once the KV itself has shown that they compute the same."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from kvdepot.client.scheduler import Cached
from kvdepot.client.transfer import Transfer
from kvdepot.integrations.vllm.messages import Compared
from kvdepot.integrations.vllm.plan import GroupBlocks, GroupPlan
from kvdepot.integrations.vllm.requests import ChunkRules, RequestChunks, Tracked
from kvdepot.integrations.vllm.stores import WaitingStore
from kvdepot.integrations.vllm.trust import Trust, Verdict
from kvdepot.integrations.vllm.weights import NamedWeights
from kvdepot.memory.arena_header import ArenaHeader
from kvdepot.memory.records import Records, ShardRecord
from kvdepot.memory.shm import SHM
from kvdepot.protocol.wire import WriterRun
from tests.cli.command import run
from tests.conftest import Depot, StartDepot, eventually
from tests.vllm import engines
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import LLAMA, Engine, prompt, write_model
from tests.vllm.test_requests import item, request

WHOLE = 4 * 256
LENGTH = WHOLE + 17
STATES: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 64}
EARNED = {"kvdepot.trust": "earned"}
STATES_OF_EXPERTS = engines.STATES | {"mlp_only_layers": []}
"""Rounding depends on the batch, and decides between experts."""
FP8, RANKS = {"kv_cache_dtype": "fp8"}, {"tensor_parallel_size": 2}
OPTIONS: dict[str, dict[str, Any]] = {"states": STATES, "gqa": RANKS, "fp8": FP8}
CAN_FP8 = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
KINDS = ["gqa", "windows", "states", "mla", pytest.param("fp8", marks=pytest.mark.skipif(not CAN_FP8, reason=(
    "vLLM keeps KV in 8 bits only on x86 processors with AVX-512 or AMX"
)))]  # fmt: skip


def forget_all(depot: Depot) -> None:
    done = run("forget", "--url", depot.url, "--all", "--yes")
    assert done.returncode == 0, done.stderr


def names(depot: Depot) -> set[str]:
    """The engines that are connected, as the server names them."""
    return {each["engine"][:8] for each in depot.status()["engines"]}


def compared(depot: Depot) -> tuple[int, int]:
    counters = depot.status()["counters"]
    return counters["compared_chunks"], counters["differing_chunks"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_first_hit_is_computed_and_later_hits_are_loaded(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine, kind: str
) -> None:
    tokens, options, model = prompt(1, LENGTH + 512), OPTIONS.get(kind, {}), models.get(kind, models["gqa"])
    first = start_engine(model, vllm_depot.url, extra=EARNED, **options).wait_started()
    first.run(tokens)
    found = first.run_fresh(tokens)["cached"]
    assert found >= WHOLE, "its own chunks need no proof"
    before = compared(vllm_depot)
    first.stop()
    second = start_engine(model, vllm_depot.url, extra=EARNED, **options).wait_started()
    assert second.run(tokens)["cached"] == (found - 256 if kind in ("gqa", "fp8") else 0)
    assert second.run_fresh(tokens)["cached"] == found
    now = compared(vllm_depot)
    assert now[0] > before[0]
    assert now[1] == before[1]
    loaded = second.run_fresh(tokens)
    assert loaded["cached"] == found
    assert loaded["tokens"] == second.run(tokens)["tokens"]
    second.stop()


def test_an_engine_that_is_started_again_loads_what_it_had_stored(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    tokens, before = prompt(14, LENGTH), compared(vllm_depot)
    first = start_engine(models["gqa"], vllm_depot.url, extra=EARNED, command="the same").wait_started()
    computed = first.run(tokens)
    first.stop()
    again = start_engine(models["gqa"], vllm_depot.url, extra=EARNED, command="the same").wait_started()
    loaded = again.run(tokens)
    assert (loaded["cached"], loaded["tokens"]) == (WHOLE, computed["tokens"])
    assert compared(vllm_depot) == before


def by(writer: str, chunks: int) -> dict[str, Any]:
    """Who has stored this many chunks."""
    return {"writers": (WriterRun(chunks, writer),)}


def test_images_and_adapters_have_a_first_hit_of_their_own_and_text_before_them_none(models: dict[str, Path]) -> None:
    config = EngineArgs(model=str(models["gqa"]), skip_tokenizer_init=True).create_engine_config()
    trust = Trust(config, "a start", NamedWeights("", str))
    trust.connect(256, GroupPlan([GroupBlocks(0, 2, 2, 0)], 256))
    plain, shown = (request(list(range(600)), items) for items in ([], [item("cat", 300)]))
    text, image = (Tracked(each, RequestChunks(each, bytes(32), ChunkRules(256))) for each in (plain, shown))
    tokens, terms, _ = trust.divide(text, Cached(512, **by("another", 2)), 512, 0, 0.0)
    assert tokens == 0 and terms is not None
    store = [Transfer("r", b"", 0, bytes(32), bytes(8))]
    (number,) = trust.order([WaitingStore(1, store, [], [], terms=terms, compared=store)])
    assert trust.report({number: [Compared(2, 0.0, 0, by("another", 2)["writers"])]}) is Verdict.EQUAL
    assert trust.divide(text, Cached(512, **by("another", 2)), 512, 0, 0.0) == (512, None, False)
    assert trust.divide(image, Cached(256, **by("another", 1)), 256, 0, 0.0) == (256, None, False)
    _, before, _ = trust.divide(image, Cached(512, **by("another", 2)), 512, 0, 0.0)
    assert before is not None and before.first == 300
    _, before, _ = trust.divide(image, Cached(256, tail=0, **by("another", 2)), 400, 0, 0.0)
    assert before is not None, "the tail has a part of the image"
    red = request(list(range(600)), lora_request=LoRARequest("red", 1, "/red"))
    adapted = Tracked(red, RequestChunks(red, bytes(32), ChunkRules(256)))
    assert trust.divide(adapted, Cached(512, **by("another", 2)), 512, 0, 0.0)[0] == 0, "each adapter has its own"


def test_a_hit_ends_before_the_first_writer_that_is_not_trusted_so_far(models: dict[str, Path]) -> None:
    config = EngineArgs(model=str(models["gqa"]), skip_tokenizer_init=True).create_engine_config()
    trust = Trust(config, "own", NamedWeights("", str))  # whose vLLM takes no load back, as it has no connector
    trust.connect(256, GroupPlan([GroupBlocks(0, 2, 2, 0)], 256))
    tracked = Tracked(request(list(range(9000))), RequestChunks(request([]), bytes(32), ChunkRules(256)))

    def divide(*runs: tuple[int, str], local_tokens: int = 0, chunks: int = 32) -> tuple[int, bool]:
        found = Cached(256 * chunks, writers=tuple(WriterRun(*run) for run in runs))
        tokens, terms, _ = trust.divide(tracked, found, found.tokens, local_tokens, 0.0)
        return tokens // 256, terms is not None

    assert divide((32, "own")) == (32, False)
    assert divide((20, "own"), (32, "A")) == (20, True)
    number = trust.open(trust.terms(tracked.request, 1024))
    assert trust.report({number: [Compared(1, 0.0, 0, by("A", 4)["writers"])]}) is Verdict.EQUAL
    assert divide((16, "A"), chunks=16) == (16, False)
    assert divide((32, "A")) == (16, True), "four times as far as it was compared"
    assert divide((10, "own"), (12, "A"), (14, "B"), (32, "own")) == (12, True)
    assert divide((8, "A"), (8, "B"), (32, "own")) == (0, True), "ranks or groups of several writers"
    assert divide((8, "B"), (32, "own"), local_tokens=2048) == (32, False), "the engine has those itself"
    assert divide((10, "own")) == (10, True), "of chunks behind, the server does not say who has stored them"


# -- faults of an engine


def one_norm(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.input_layernorm.weight"] *= 1.5


def scaled_values(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.self_attn.v_proj.weight"] *= 1.25


@pytest.fixture
def spoil(models: dict[str, Path], tmp_path: Path) -> Callable[[Engine, Callable[..., None] | str], None]:
    """Change what an engine computes without changing anything that it is known by."""

    def run(engine: Engine, change: Callable[..., None] | str, kind: str = "gqa") -> None:
        if isinstance(change, str):
            engine.tell(change)
            return
        weights = load_file(models[kind] / "model.safetensors")
        change(weights)
        save_file({name: each.contiguous() for name, each in weights.items()}, tmp_path / "model.safetensors")
        engine.tell("reload", folder=str(tmp_path))

    return run


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("gqa", each) for each in (one_norm, scaled_values, "stretch positions")),
        *(("experts", each) for each in (one_norm, "stretch positions")),
    ],
)
def test_an_engine_that_computes_other_kv_shares_nothing(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine, spoil: Callable[..., None], kind: str,
    change: Callable[..., None] | str,
) -> None:  # fmt: skip
    depot = start_depot(arena_mib=64)
    shared, own = prompt(1, LENGTH), prompt(2, LENGTH)
    first = start_engine(models[kind], depot.url, extra=EARNED).wait_started()
    first.run(shared)
    known = names(depot)
    other = start_engine(models[kind], depot.url, extra=EARNED).wait_started()
    spoil(other, change, kind)
    other.run(own)
    assert depot.status()["chunks"] == 8, "under the shared name, until the KV tells"
    computed = other.run(shared)

    (mismatch,) = depot.status()["mismatches"]
    (newcomer,) = names(depot) - known
    assert ({mismatch["writer"][:8]}, mismatch["engine"][:8]) == (known, newcomer)
    assert depot.status()["quarantined"] == []
    eventually(lambda: "shares no KV until it is restarted" in other.logged())
    eventually(lambda: other.run_fresh(prompt(3, 300)) and depot.status()["chunks"] == 5)  # its own, by another name
    assert other.run_fresh(shared)["cached"] == 0
    again = other.run_fresh(shared)
    assert again["cached"] == WHOLE, "its own again"
    assert again["tokens"] == computed["tokens"]

    third = start_engine(models[kind], depot.url, extra=EARNED).wait_started()
    assert third.run(own)["cached"] == 0, "what the other had stored is gone"
    assert third.run(shared)["cached"] == (0 if kind == "experts" else WHOLE - 256)
    assert third.run_fresh(shared)["cached"] == WHOLE
    assert len(depot.status()["mismatches"]) == 1


@pytest.mark.parametrize(("change", "options"), [(one_norm, RANKS), ("stretch positions", {})])
def test_a_proved_engine_compares_what_the_next_writer_has_stored(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine, spoil: Callable[..., None],
    change: Callable[..., None] | str, options: dict[str, Any],
) -> None:  # fmt: skip
    depot, stored, wrong, short = start_depot(arena_mib=64), prompt(20, LENGTH), prompt(21, LENGTH), prompt(22, 40)
    reader, other = (start_engine(models["gqa"], depot.url, extra=EARNED, **options) for _ in range(2))
    reader.wait_started(), other.wait_started()
    other.run(stored)
    assert [reader.run_fresh(stored)["cached"] for _ in range(2)] == [WHOLE - 256, WHOLE]
    truth = [reader.run_fresh(tokens, salt="its own", max_tokens=24)["tokens"] for tokens in (short, wrong)]
    third = start_engine(models["gqa"], depot.url, extra=EARNED, **options).wait_started()
    spoil(third, change)
    assert third.run(wrong, max_tokens=24)["tokens"] != truth[1]
    reader.tell("reset")
    requests = [reader.request(tokens, max_tokens=24) for tokens in (short, wrong, wrong)]
    reader.tell("add", request=requests[0])
    for _ in range(3):
        reader.tell("step")
    for each in requests[1:]:
        reader.tell("add", request=each)
    results = reader.tell("finish")
    assert [results[each["id"]]["tokens"] for each in requests] == [*truth, truth[1]]
    assert compared(depot)[1] > 0


def test_a_writer_that_is_wrong_behind_a_position_is_found_there(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot, short, long = start_depot(arena_mib=64), prompt(23, 300), prompt(24, 1700)
    reader, other = (start_engine(models["gqa"], depot.url, extra=EARNED) for _ in range(2))
    reader.wait_started(), other.wait_started()
    truth = reader.run_fresh(long, salt="its own")["tokens"]
    other.tell("stretch positions", first=256)
    for tokens in (short, long):
        other.run(tokens)
    assert [reader.run_fresh(short)["cached"] for _ in range(2)] == [0, 256]
    assert compared(depot)[1] == 0
    assert reader.run_fresh(long)["tokens"] == truth
    assert compared(depot)[1] > 0


def test_an_engine_that_only_loads_also_compares_first(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    tokens = prompt(5, LENGTH)
    start_engine(models["gqa"], vllm_depot.url, extra=EARNED, role="kv_producer").wait_started().run(tokens)
    before = vllm_depot.status()["counters"]["stored_chunks"]
    consumer = start_engine(models["gqa"], vllm_depot.url, extra=EARNED, role="kv_consumer").wait_started()
    assert [consumer.run_fresh(tokens)["cached"] for _ in range(2)] == [WHOLE - 256, WHOLE]
    assert vllm_depot.status()["counters"]["stored_chunks"] == before


# -- faults in the depot, which sampled hits find


def swapped_chunks(chunks: list[np.ndarray]) -> None:
    chunks[0][:], chunks[1][:] = chunks[1].copy(), chunks[0].copy()


def a_layer_of_another_prompt(chunks: list[np.ndarray]) -> None:
    layer = len(chunks[0]) // LLAMA["num_hidden_layers"]
    chunks[2][layer:] = chunks[3][layer:]


def flipped_exponent(chunks: list[np.ndarray]) -> None:
    chunks[1][1001] ^= 0x40  # the highest bit of the exponent of one number


def doubled(chunks: list[np.ndarray]) -> None:
    for chunk in chunks:
        numbers = (chunk.view(np.uint16).astype(np.uint32) << 16).view(np.float32) * 2
        chunk[:] = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def change_stored(depot: Depot, change: Callable[[list[np.ndarray]], None]) -> None:
    """Change the bytes of all chunks in the server's memory, in the order in which they were stored."""
    with (SHM / depot.name).open("r+b") as file:
        header = ArenaHeader.read(file.fileno(), file.name)
        assert header is not None
        table = header.read_table(file.fileno())
        records = [record for _, record in Records(memoryview(table)).read().records]
        shards = sorted((r for r in records if isinstance(r, ShardRecord)), key=lambda r: r.serial)
        assert all(len(shard.extents) == 1 for shard in shards)
        chunks = [np.frombuffer(os.pread(file.fileno(), s.size, s.extents[0][0]), np.uint8).copy() for s in shards]
        change(chunks)
        for shard, chunk in zip(shards, chunks, strict=True):
            os.pwrite(file.fileno(), chunk.tobytes(), shard.extents[0][0])


def test_a_mismatch_is_found_once_a_killed_server_is_back(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    def again(depot: Depot) -> Depot:
        depot.process.kill(), depot.process.wait()
        started = start_depot("--verify-hits", "1", "--verify", "off", arena_mib=64, url=depot.url, name=depot.name)
        engine.tell("meet")
        return started

    depot, tokens = start_depot("--verify-hits", "1", "--verify", "off", arena_mib=64), prompt(12, LENGTH)
    engine = start_engine(models["gqa"], depot.url, extra=EARNED).wait_started()
    computed = engine.run(tokens)["tokens"]
    depot = again(depot)
    assert engine.run_fresh(tokens)["tokens"] == computed and compared(depot)[1] == 0, "a sample of its own chunks"
    change_stored(depot, doubled)
    engine.tell("reset")
    engine.tell("add", request=engine.request(tokens))  # a sample: its lookup has found the chunks
    depot = again(depot)
    (result,) = engine.tell("finish").values()
    assert (result["cached"], result["tokens"]) == (0, computed)
    result = engine.run_fresh(tokens)
    assert (result["cached"], result["tokens"]) == (0, computed)
    eventually(lambda: depot.status()["quarantined"])
    shown = run("inspect", "--compare", "--url", depot.url)
    assert "now in memory" in shown.stdout and re.search("^1-2 .* above the limit", shown.stdout, re.M)
    depot = again(depot)
    assert depot.status()["quarantined"]
    assert engine.run_fresh(tokens)["cached"] == 0


@pytest.fixture(scope="module")
def sampled(models: dict[str, Path]) -> Any:
    """A server that has every hit compared, and an engine."""
    depot = Depot("--verify-hits", "1", "--verify", "off").wait_ready()
    engine = Engine(models["gqa"], depot.url, extra=EARNED)
    yield depot, engine.wait_started()
    engine.close()
    depot.close()


@pytest.mark.parametrize("change", [swapped_chunks, a_layer_of_another_prompt, flipped_exponent, doubled])
def test_a_sampled_hit_finds_wrong_bytes_and_ends_their_use(
    sampled: tuple[Depot, Engine], change: Callable[..., None]
) -> None:
    depot, engine = sampled
    tokens = prompt(8, LENGTH)
    forget_all(depot)
    computed = engine.run_fresh(tokens)
    differing = compared(depot)[1]
    assert engine.run_fresh(tokens)["cached"] == 0, "sampled"
    assert compared(depot)[1] == differing, "an honest sample"
    change_stored(depot, change)
    result = engine.run_fresh(tokens)
    assert (result["cached"], result["tokens"]) == (0, computed["tokens"])
    eventually(lambda: depot.status()["quarantined"])
    assert compared(depot)[1] > differing
    said = run("inspect", "--compare", "--url", depot.url)
    assert said.returncode == 1
    assert "in quarantine: gqa@" in said.stdout
    assert "(sampled hit)" in said.stdout
    before = compared(depot)
    assert engine.run_fresh(tokens)["cached"] == 0
    assert compared(depot) == before, "its chunks are misses"
    (model,) = depot.status()["quarantined"]
    released = run("inspect", "--url", depot.url, "--release", model, "--json")
    assert json.loads(released.stdout) == {"released": 1}
    assert depot.status()["quarantined"] == []


def test_samples_of_its_own_chunks_prove_nothing(
    sampled: tuple[Depot, Engine], models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot, engine = sampled
    forget_all(depot)
    foreign, own = prompt(10, LENGTH), prompt(11, LENGTH)
    engine.run_fresh(foreign)
    other = start_engine(models["gqa"], depot.url, extra=EARNED).wait_started()
    for _ in range(3):
        other.run_fresh(own)  # its second and third hit are samples
    other.run_fresh(foreign)
    said = [line for line in other.logged().splitlines() if "trust.py" in line]
    assert "equals what this engine computes" in said[0]


@pytest.mark.parametrize("config", [LLAMA, STATES_OF_EXPERTS], ids=["dense", "experts"])
def test_engines_with_other_batches_agree(
    start_depot: StartDepot, start_engine: StartEngine, tmp_path: Path, config: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model", config)
    depot = start_depot("--verify-hits", "1", arena_mib=256)
    options: dict[str, Any] = {"extra": EARNED, **(STATES if config is STATES_OF_EXPERTS else {})}
    engine = start_engine(model, depot.url, **options)
    other = start_engine(model, depot.url, max_num_batched_tokens=384, max_num_seqs=3, **options)
    engine.wait_started(), other.wait_started()
    prompts = [prompt(seed, 300 + 60 * seed) for seed in range(20)]
    for each in (engine, other, engine):
        each.tell("reset")
        each.tell("run", requests=[each.request(tokens) for tokens in prompts])
    assert compared(depot)[0] >= 2 * sum(len(tokens) // 256 for tokens in prompts) - 40
    assert compared(depot)[1] == 0
    assert depot.status()["quarantined"] == []
