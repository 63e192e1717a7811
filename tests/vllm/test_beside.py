"""KVDepotConnector below MultiConnector, beside a connector whose loads fail; and requests that cannot be cached.

One engine for all tests of this file: each prompt is its test's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from tests.conftest import Depot, eventually
from tests.vllm.engines import Engine, nothing_is_held, output, prompt, write_lora

TOKENS = 3 * 256 + 17
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def beside(url: str, **settings: Any) -> dict[str, Any]:
    """vLLM's settings for a depot behind a loader that fails."""
    connectors = [
        {
            "kv_connector": "FailingLoader",
            "kv_connector_module_path": "tests.vllm.failing_loader",
            "kv_role": "kv_both",
        },
        {"kv_connector": "KVDepotConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"kvdepot.url": url}},
    ]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    } | settings


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of LoRA adapters that are there before the engine is."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("replaced", "dangling")):
        write_lora(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def engine(vllm_depot: Depot, models: dict[str, Path], adapters: Path) -> Iterator[Engine]:
    started = Engine(
        models["gqa"],
        vllm_depot.url,
        dtype="float32",  # so that a batch of another shape gives the same tokens
        kv_transfer_config=beside(vllm_depot.url, kv_load_failure_policy="recompute"),
        **LORA,
    )
    try:
        yield started.wait_started()
        started.stop()
    finally:
        started.close()
    eventually(lambda: nothing_is_held(vllm_depot.status()))


def recovered(engine: Engine) -> int:
    return engine.logged().count("Recovered from KV load failure")


def test_a_failure_policy_that_ends_requests_is_refused_before_loading(
    vllm_depot: Depot, models: dict[str, Path]
) -> None:
    told = beside(vllm_depot.url)
    options = {"skip_tokenizer_init": True, "kv_transfer_config": KVTransferConfig(**told)}
    with pytest.raises(Exception, match='"kv_load_failure_policy": "recompute"'):
        EngineArgs(model=str(models["gqa"]), **options).create_engine_config()
    nested = told["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
    nested["kvdepot.load_failure_policy"] = "fail"  # now it is what the operator wants
    EngineArgs(model=str(models["gqa"]), **options).create_engine_config()


def test_the_documented_lines_of_the_connector_are_in_vllms_log_once(engine: Engine, vllm_depot: Depot) -> None:
    lines = [line for line in engine.logged().splitlines() if f"scheduler at {vllm_depot.url} as gqa" in line]
    assert len(lines) == 1 and "INFO" in lines[0]


def test_a_load_that_fails_within_a_step_stores_nothing_of_its_blocks(engine: Engine) -> None:
    tokens = prompt(41, TOKENS)
    longer = [*tokens[:700], *prompt(42, 300)]
    fails = {"transfer": {"fails": "within"}}
    # In one step: the second and third request find the blocks of the first in vLLM's own cache.
    before = recovered(engine)
    requests = [engine.request(tokens, **fails), engine.request(tokens), engine.request(longer)]
    for request in requests:
        engine.tell("add", request=request)
    engine.tell("finish")
    assert recovered(engine) > before
    for each in (tokens, longer):
        cold = engine.run_fresh(each, salt=f"nobody has this: {len(each)}")
        assert cold["cached"] == 0
        assert engine.run_fresh(each)["tokens"] == cold["tokens"]
        from_depot = engine.run_fresh(each)
        assert from_depot["cached"] == 768 and from_depot["tokens"] == cold["tokens"]


def test_a_prompt_that_failed_to_load_between_steps_is_stored_as_it_was_computed(engine: Engine) -> None:
    tokens = prompt(43, TOKENS)
    before = recovered(engine)
    cold = engine.run(tokens, transfer={"fails": "between"})
    assert recovered(engine) > before
    from_depot = engine.run_fresh(tokens)
    assert from_depot["cached"] == 768
    assert cold["tokens"] == from_depot["tokens"]
    assert from_depot["told"]["kvdepot"]["loaded"] == 768
    assert output(from_depot) == output(engine.run(tokens))


def test_an_adapter_replaced_while_it_is_loaded_is_not_stored_under_its_new_name(
    engine: Engine, vllm_depot: Depot, adapters: Path
) -> None:
    lora = ("replaced", 1, str(adapters / "replaced"))
    engine.run(prompt(44, TOKENS), lora=lora)
    assert engine.run_fresh(prompt(44, TOKENS), lora=lora)["cached"] == 768
    before = vllm_depot.status()["chunks"]
    (adapters / "replaced").rename(adapters / "was")
    write_lora(adapters / "replaced", 7)
    engine.run(prompt(45, TOKENS), lora=lora)
    assert engine.run_fresh(prompt(44, TOKENS), lora=lora)["cached"] == 0
    assert vllm_depot.status()["chunks"] == before
    assert "LoRA adapter 'replaced' is not cached" in engine.logged()


def test_an_adapter_that_cannot_be_read_costs_a_request_its_caching_not_the_engine(
    engine: Engine, adapters: Path
) -> None:
    tokens = prompt(46, TOKENS)
    engine.run(tokens)
    (adapters / "dangling" / "extra.bin").symlink_to(adapters / "nowhere")
    lora = ("dangling", 2, str(adapters / "dangling"))
    engine.run(tokens, lora=lora)
    assert engine.run_fresh(tokens, lora=lora)["cached"] == 768
    (adapters / "dangling" / "loop.bin").symlink_to("loop.bin")
    assert engine.run_fresh(tokens, lora=lora)["cached"] == 0
    assert engine.run_fresh(tokens)["cached"] == 768
    assert engine.tell("metrics")["vllm:kvdepot_uncached_requests"] >= 1
