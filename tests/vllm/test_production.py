"""What a production server does beside plain prompts, on real engines: the depot changes no token of it.

Engines on one model share most of these tests: one without a depot, whose answers are the right ones; one with
asynchronous scheduling and its own prefix cache; and one with neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Depot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import LLAMA, Engine, assert_close, output, prompt, write_model
from tests.vllm.processors import IMAGE, write_seeing_model, write_tokenizer

CHUNKS = 3
TOKENS = CHUNKS * 256 + 17
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": False, "enable_prompt_embeds": True, "max_model_len": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, which structured output needs."""
    folder = write_model(tmp_path_factory.mktemp("served") / "model", LLAMA)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def alone(served: Path) -> Iterator[Engine]:
    """An engine without a depot."""
    started = Engine(served, "", kv_transfer_config=None, **OPTIONS)
    yield started.wait_started()
    started.close()


@pytest.fixture(scope="module")
def engine(served: Path, vllm_depot: Depot) -> Iterator[Engine]:
    started = Engine(served, vllm_depot.url, async_scheduling=True, **OPTIONS)
    yield started.wait_started()
    started.close()


@pytest.fixture(scope="module")
def plain(served: Path, vllm_depot: Depot) -> Iterator[Engine]:
    started = Engine(served, vllm_depot.url, async_scheduling=False, enable_prefix_caching=False, **OPTIONS)
    yield started.wait_started()
    started.close()


def test_engines_with_a_depot_give_the_answers_of_one_without(alone: Engine, engine: Engine, plain: Engine) -> None:
    tokens, other = prompt(301, TOKENS), prompt(302, TOKENS)
    for first, second, each in ((engine, plain, tokens), (plain, engine, other)):
        cold, warm = alone.run(each), alone.run(each)
        assert (cold["cached"], warm["cached"]) == (0, CHUNKS * 256)
        computed = first.run(each)
        assert computed["cached"] == 0 and output(computed) == output(cold)
        loaded = [second.run(each), first.run_fresh(each)]
        assert [result["cached"] for result in loaded] == [CHUNKS * 256] * 2
        assert [output(result) for result in loaded] == [output(warm)] * 2


def test_several_answers_to_one_prompt_load_it_and_are_what_they_are_without_a_depot(
    alone: Engine, engine: Engine
) -> None:
    tokens, sampling = prompt(320, TOKENS), {"n": 3, "temperature": 1.0, "seed": 7}
    alone.run(tokens), engine.run(tokens)
    right = alone.run(tokens, sampling=sampling)
    engine.tell("reset")
    loaded = engine.run(tokens, sampling=sampling)
    assert loaded["cached"] == CHUNKS * 256
    assert loaded["all"] == right["all"] and len({tuple(each) for each in right["all"]}) == 3


def test_logprobs_of_a_prompt_are_of_all_its_tokens_so_it_is_computed_and_stored(alone: Engine, engine: Engine) -> None:
    tokens, sampling = prompt(330, TOKENS), {"prompt_logprobs": 2}
    right = alone.run(tokens, sampling=sampling)
    for _ in range(2):
        told = engine.run_fresh(tokens, sampling=sampling)
        assert told["cached"] == 0
        assert output(told) == output(right)
        assert told["prompt_logprobs"] == right["prompt_logprobs"] and len(told["prompt_logprobs"]) == TOKENS - 1
    assert engine.run_fresh(tokens)["cached"] == CHUNKS * 256


def test_structured_output_follows_its_grammar_after_a_load(alone: Engine, engine: Engine) -> None:
    tokens = prompt(340, TOKENS)
    alone.run(tokens), engine.run(tokens)
    right = alone.run(tokens, regex="[xyz]{8}")
    loaded = engine.run_fresh(tokens, regex="[xyz]{8}")
    assert loaded["cached"] == CHUNKS * 256
    assert output(loaded) == output(right)
    assert loaded["tokens"] != engine.run(tokens)["tokens"]


def test_prompts_that_are_embeddings_are_neither_stored_nor_taken_for_others(
    alone: Engine, engine: Engine, vllm_depot: Depot
) -> None:
    before = vllm_depot.status()["chunks"]
    for seed in (1, 2):
        right = alone.run([], embeds=[seed, TOKENS, LLAMA["hidden_size"]])
        for _ in range(2):
            told = engine.run_fresh([], embeds=[seed, TOKENS, LLAMA["hidden_size"]])
            assert told["cached"] == 0 and output(told) == output(right)
    assert vllm_depot.status()["chunks"] == before


def test_after_new_weights_and_a_reset_nothing_from_before_is_served(
    alone: Engine, engine: Engine, tmp_path: Path
) -> None:
    tokens, folder = prompt(360, TOKENS), write_model(tmp_path / "new", LLAMA, seed=1)
    write_tokenizer(folder)
    old = engine.run(tokens)
    for each in (alone, engine):
        each.tell("reload", folder=str(folder))
    assert engine.tell("reset all") is True
    alone.tell("reset")
    right, warm = alone.run(tokens), alone.run(tokens)
    new = engine.run(tokens)
    assert new["cached"] == 0 and output(new) == output(right) != output(old)
    loaded = engine.run_fresh(tokens)
    assert loaded["cached"] == CHUNKS * 256 and output(loaded) == output(warm)
    engine.stop()


def test_a_pooling_model_that_reads_its_last_token_is_served(
    served: Path, vllm_depot: Depot, start_engine: StartEngine
) -> None:
    tokens = prompt(370, TOKENS)
    options = OPTIONS | {"enable_prompt_embeds": False, "runner": "pooling"}
    one = start_engine(served, vllm_depot.url, **options).wait_started()
    computed = one.run(tokens, pool="embed")
    loaded, own = one.run_fresh(tokens, pool="embed"), one.run(tokens, pool="embed")
    assert [each["cached"] for each in (computed, loaded, own)] == [0, CHUNKS * 256, CHUNKS * 256]
    assert loaded["pooled"] == own["pooled"]
    assert loaded["pooled"] == pytest.approx(computed["pooled"], abs=1e-4)
    one.stop()


def test_images_come_back_in_another_engine_and_are_never_mixed_up(
    vllm_depot: Depot, start_engine: StartEngine, tmp_path: Path
) -> None:
    model = write_seeing_model(tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": False, "max_model_len": 2048}
    one = start_engine(model, vllm_depot.url, **options)
    two = start_engine(model, vllm_depot.url, **options)
    one.wait_started(), two.wait_started()
    text = prompt(380, TOKENS)
    tokens = [*text[:300], IMAGE, *text[300:]]
    images = [(1, 160, 96), (2, 160, 96), (1, 96, 160), (3, 256, 256)]  # seed and size; two differ in contents alone
    computed = [one.run_fresh(tokens, images=[image]) for image in images]
    assert [each["cached"] for each in computed] == [0, 256, 256, 256], "only the text before the image is shared"
    assert len({str(each["logprobs"]) for each in computed}) == len(images)
    for image, right in zip(images, computed, strict=True):
        loaded, own = two.run_fresh(tokens, images=[image]), two.run(tokens, images=[image])
        assert own["cached"] >= loaded["cached"] >= 768, "not the image"
        assert loaded["tokens"] == own["tokens"] == right["tokens"]
        assert_close(loaded, right)
    one.stop(), two.stop()


def test_replicas_share_what_either_stored_and_a_prompt_may_stream_in(
    served: Path, vllm_depot: Depot, start_engine: StartEngine
) -> None:
    options = OPTIONS | {"is_async": True, "data_parallel_size": 2, "gpu_memory_utilization": 0.1}
    engine = start_engine(served, vllm_depot.url, **options).wait_started()
    tokens, other = prompt(390, TOKENS), prompt(391, 2 * TOKENS)
    before = vllm_depot.status()["chunks"]
    computed = engine.run(tokens, replica=0)
    eventually(lambda: vllm_depot.status()["chunks"] == before + CHUNKS)
    loaded = engine.run(tokens, replica=1)
    assert (computed["cached"], loaded["cached"]) == (0, CHUNKS * 256)
    own = engine.run(tokens, replica=1)
    assert output(loaded) == output(own)

    parts = [other[:TOKENS], other[TOKENS:]]
    streamed = engine.tell("stream", request=engine.request([], parts=parts, max_tokens=2, replica=0))
    whole = [*parts[0], streamed[0], *parts[1]]  # vLLM drops the last token of an answer that input follows
    eventually(lambda: vllm_depot.status()["chunks"] == before + CHUNKS + len(whole) // 256)
    for replica in (0, 1):
        again = engine.run(whole, max_tokens=2, replica=replica)
        assert again["cached"] >= len(whole) // 256 * 256, replica
        assert again["tokens"] == streamed[2:]
    engines, died = vllm_depot.status()["clients"], vllm_depot.status()["counters"]["clients_died"]
    engine.stop()
    eventually(lambda: vllm_depot.status()["clients"] == engines - 4)
    assert vllm_depot.status()["counters"]["clients_died"] == died, "an orderly stop looks like a crash"
