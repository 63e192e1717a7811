"""A real vLLM engine on a real server: what comes from the depot equals the engine's own prefix-cache hit, bit for bit.

Prompts end just past a chunk: the engine's own cache (blocks of 128) and the depot (chunks of 256) then hold the same
tokens of it, so both runs compute the same rest in the same batch. test_oracle.py has many prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.vllm import engines
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import LLAMA, WIDE, WINDOWS, Engine, nothing_is_held, output, prompt, same_as_own
from tests.vllm.test_beside import beside

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
STATES: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str]]:
    """LoRA adapters that are there before the engine is."""
    folder = tmp_path_factory.mktemp("adapters")
    return [(name, i + 1, str(engines.write_lora(folder / name, i))) for i, name in enumerate(("red", "blue"))]


@pytest.fixture(scope="module")
def engine(vllm_depot: Depot, models: dict[str, Path], adapters: object) -> Iterator[Engine]:
    """One that takes the ids of requests as they come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
        started = Engine(models["gqa"], vllm_depot.url, **LORA)
    try:
        yield started.wait_started()
        started.stop()
    finally:
        started.close()


def test_a_fresh_engine_gets_what_an_earlier_one_stored(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    tokens = prompt(1, 4 * 256 + 17)
    first = start_engine(models["mla"], vllm_depot.url).wait_started()
    assert first.run(tokens)["cached"] == 0
    assert first.run(tokens, max_tokens=1)["cached"] == 1024  # by itself
    first.stop()

    second = start_engine(models["mla"], vllm_depot.url).wait_started()
    from_depot = second.run(tokens)
    own = second.run(tokens)
    assert from_depot["cached"] == own["cached"] == 1024
    assert output(from_depot) == output(own)

    longer = tokens[:700] + prompt(2, 900)  # two chunks of it are stored
    assert second.run_fresh(longer)["cached"] == 512
    from_depot = second.run_fresh([*longer[:1536], 5, 6, 7])
    own = second.run([*longer[:1536], 5, 6, 7])
    assert from_depot["cached"] == own["cached"] == 1536
    assert output(from_depot) == output(own)
    exact = tokens[:1024]  # all of it is stored; the last token is computed all the same
    assert output(second.run_fresh(exact)) == output(second.run_fresh(exact))
    second.stop()
    eventually(lambda: vllm_depot.status()["holds"] == 0)


def test_salts_and_lora_adapters_never_share_and_two_engines_do(
    engine: Engine, vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine,
    adapters: list[tuple[str, int, str]],
) -> None:  # fmt: skip
    two = start_engine(models["gqa"], vllm_depot.url, **LORA).wait_started()
    tokens = prompt(3, 2 * 256 + 9)
    variants: list[dict[str, Any]] = [{}, {"salt": "tenant-1"}, {"salt": "tenant-2"}]
    variants += [{"lora": adapter} for adapter in adapters]
    for variant in variants:
        assert engine.run_fresh(tokens, **variant)["cached"] == 0, variant
    for variant in variants:
        from_depot = two.run_fresh(tokens, **variant)
        assert from_depot["cached"] == 512, variant
        assert output(from_depot) == output(two.run(tokens, **variant)), variant
    outputs = [output(two.run_fresh(tokens, **variant)) for variant in variants]
    assert outputs[0] == outputs[1] == outputs[2]  # a salt changes nothing but who shares
    assert outputs[3] != outputs[0] and outputs[4] != outputs[0] and outputs[3] != outputs[4]
    mixed = two.tell("run", requests=[two.request(tokens, salt=f"tenant-{i}") for i in (1, 2)])
    assert len(mixed) == 2
    two.stop()


def test_a_request_that_wants_no_load_or_a_short_one_computes_the_rest_and_is_stored(engine: Engine) -> None:
    tokens = prompt(9, 3 * 256 + 11)
    assert engine.run_fresh(tokens, transfer={"kvdepot": {"load": False}})["cached"] == 0
    assert engine.run_fresh(tokens)["cached"] == 768
    for hints, cached in (({"load": False}, 0), ({"max_load_tokens": 600}, 512), ({"max_load_tokens": 9000}, 768)):
        assert engine.run_fresh(tokens, transfer={"kvdepot": hints})["cached"] == cached, hints


def test_a_request_id_that_is_used_again_ends_each_time(engine: Engine) -> None:
    for turn in range(4):
        for tokens in (2 * 256 + 11, 40):  # one that stores, and one that is shorter than a chunk
            results = engine.tell("run", requests=[{"id": "same", "tokens": prompt(100 + turn, tokens)}])
            assert list(results) == ["same"]


@pytest.mark.parametrize(
    ("config", "options", "chunk"),
    [
        (LLAMA | WIDE, {"block_size": 32}, 32),
        (WINDOWS | WIDE, {"block_size": 32, "dtype": "float32", "num_gpu_blocks_override": 512}, 32),
    ],
    ids=["gqa", "windows"],
)
def test_with_chunk_size_auto_turns_of_a_chat_end_at_the_engines_boundaries(
    config: dict[str, Any], options: dict[str, Any], chunk: int, start_depot: StartDepot, start_engine: StartEngine,
    tmp_path: Path,
) -> None:  # fmt: skip
    depot = start_depot(arena_mib=256, chunk_size="auto")
    engine = start_engine(engines.write_model(tmp_path / "model", config), depot.url, **options).wait_started()
    turns = [prompt(97, 3 * chunk + 5)]
    for turn in range(11):
        turns.append(turns[-1] + prompt(400 + turn, 40 + 13 * turn))
    own = [engine.run(tokens, salt="its own cache") for tokens in turns]
    from_depot = [engine.run_fresh(tokens) for tokens in turns]
    boundaries = [0, *(len(tokens) // chunk * chunk for tokens in turns[:-1])]
    assert [turn["cached"] for turn in from_depot] == [turn["cached"] for turn in own] == boundaries
    assert [output(turn) for turn in from_depot] == [output(turn) for turn in own]
    assert {namespace["chunk_tokens"] for namespace in depot.status()["namespaces"]} == {chunk}
    engine.stop()


class Kind(NamedTuple):
    """A kind of model: tokens per chunk, the parts of three chunks that a prompt loads, and options of its engine."""

    chunk: int
    parts: int
    options: dict[str, Any]


KINDS = {
    "gqa": Kind(256, 3, {"dtype": "float32"}),  # so that a batch of another shape gives the same tokens
    "windows": Kind(256, 9, {"dtype": "float32"}),
    "states": Kind(640, 6, STATES),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_fails_is_computed_as_if_nothing_had_been_promised(
    kind: str, start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    chunk, parts, options = KINDS[kind]
    depot = start_depot("--verify", "always", arena_mib=64)
    if kind == "windows":  # below MultiConnector, which asks for failures in another way
        options = options | {"kv_transfer_config": beside(depot.url, kv_load_failure_policy="recompute")}

    def seen(result: dict[str, Any]) -> Any:
        return output(result) if kind == "states" else result["tokens"]

    engine = start_engine(models[kind], depot.url, **options).wait_started()
    tokens = prompt(350, 3 * chunk + 11)
    cold = engine.run(tokens)
    engines.spoil_a_part(depot)  # one wrong part fails the load of a model with several as a whole
    recomputed = engine.run_fresh(tokens)
    assert depot.status()["counters"]["corrupt_chunks"] == 1
    assert engine.tell("failed_chunks") == 1
    assert seen(recomputed) == seen(cold)
    same_as_own(engine, tokens, 3 * chunk)  # what was recomputed was stored again
    engine.tell("reset")
    engine.tell("add", request=engine.request(tokens))  # the lookup finds three chunks ...
    instances = depot.status()["instances"]
    depot.process.kill()
    depot.process.wait(HANG_S)
    (recomputed,) = engine.tell("finish").values()  # ... and then they are gone
    assert engine.tell("failed_chunks") == 1 + parts
    assert output(recomputed) == output(cold)
    again = start_depot(url=depot.url, arena_mib=64)  # another arena
    eventually(lambda: again.status()["instances"] == instances)
    engine.tell("meet")
    assert output(engine.run_fresh(tokens)) == output(cold)
    same_as_own(engine, tokens, 3 * chunk)
    again.process.kill()
    again.process.wait(HANG_S)
    assert seen(engine.run_fresh(tokens)) == seen(cold)  # without a server at all
    engine.stop()


@pytest.mark.parametrize(
    ("kind", "rest", "decoded", "options"),
    [
        ("windows", 256 + 17, 700, {"num_gpu_blocks_override": 76, "max_model_len": 2048}),
        ("states", -140, 500, {"num_gpu_blocks_override": 24, "max_model_len": 2560}),
    ],
)
def test_preemption_under_a_tiny_kv_space_leaves_no_wrong_byte(
    kind: str, rest: int, decoded: int, options: dict[str, Any], start_depot: StartDepot, models: dict[str, Path],
    start_engine: StartEngine,
) -> None:  # fmt: skip
    chunk, depot = KINDS[kind].chunk, start_depot(arena_mib=256)
    options = {**KINDS[kind].options, **options, "extra": {"kvdepot.save_decode": True}}
    engine = start_engine(models[kind], depot.url, **options).wait_started()
    prompts = [prompt(340 + i, 2 * chunk + rest + i) for i in range(4)]
    engines.run_preempted(engine, prompts, max_tokens=decoded)
    for number, tokens in enumerate(prompts):
        from_depot, own = engine.run_fresh(tokens), engine.run(tokens)
        assert from_depot["cached"] == own["cached"] == len(tokens) // chunk * chunk
        assert output(from_depot) == output(own)
        assert from_depot["tokens"] == engine.run_fresh(tokens, salt=f"computed {number}")["tokens"]
    if kind != "states":
        tokens = prompt(345, 2 * 256 + 200)
        said = engine.run(tokens, max_tokens=400)["tokens"]
        same_as_own(engine, tokens + said[:70], 3 * 256, exact=False)  # decoded chunks are boundaries, too
        same_as_own(engine, tokens + said[:330], 4 * 256, exact=False)
    engine.stop()
    eventually(lambda: nothing_is_held(depot.status()))


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ({"kvdepot.save_decodes": True}, "kvdepot.save_decodes is not a kvdepot setting"),
        ({"kvdepot.start": "never", "kvdepot.required": True}, "no kvdepot server answers at .*kvdepot serve"),
    ],
)
def test_an_engine_is_refused_before_it_loads_a_model(
    transfer: dict[str, Any], message: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("kvdepot.integrations.vllm.settings.REQUIRED_S", 0.2)
    told = KVTransferConfig(kv_connector="KVDepotConnector", kv_role="kv_both", kv_connector_extra_config=transfer)
    with pytest.raises(Exception, match=message):
        EngineArgs(model=str(models["gqa"]), skip_tokenizer_init=True, kv_transfer_config=told).create_engine_config()
