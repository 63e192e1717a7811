"""Chunks that a vLLM engine and transformers share under one name, and what keeps others apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kvdepot
from kvdepot.errors import ConfigError
from kvdepot.hf import PrefixCache
from tests.conftest import Depot, StartDepot
from tests.huggingface.models import compute, make
from tests.vllm import engines
from tests.vllm.engines import Engine, prompt

TOKENS = 700


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = engines.LLAMA | {"torch_dtype": request.param}
    return engines.write_model(tmp_path_factory.mktemp("shared") / request.param, config)


@pytest.fixture(scope="module")
def engine(depot: Depot, folder: Path) -> Iterator[Engine]:
    started = Engine(folder, depot.url, extra={"kvdepot.share_as": "llama"}, dtype=folder.name)
    try:
        yield started.wait_started()
        started.stop()
    finally:
        started.close()


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, folder.name)).eval()


def other_weights(model: Any) -> Any:
    """A model like this with weights of its own."""
    torch.manual_seed(1)
    return type(model)(model.config).to(model.dtype).eval()


def prompts(seed: int) -> tuple[list[int], torch.Tensor]:
    tokens = prompt(seed, TOKENS)
    return tokens, torch.tensor([tokens])


def greedy(model: Any, ids: torch.Tensor, past: Any) -> list[int]:
    mask = torch.ones_like(ids)
    answer = model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=8, do_sample=False)
    return [int(token) for token in answer[0, ids.shape[1] :]]


def whole(cache: PrefixCache) -> int:
    return (TOKENS - 1) // cache.chunk_tokens * cache.chunk_tokens


def is_exact(model: Any) -> bool:
    """Whether rounding is too fine to change a token; a random model's likeliest tokens are close to each other."""
    return bool(model.dtype == torch.float32)


def test_transformers_loads_what_an_engine_has_stored(
    engine: Engine, library: kvdepot.Depot, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tokens, ids), cache = prompts(1), PrefixCache(library, model, share_as="llama")
    answer = engine.run(tokens)["tokens"]
    past, count = cache.load(ids)
    assert count == whole(cache) > 0
    expected, logits = compute(model, ids, DynamicCache(config=model.config)), compute(model, ids, past)
    difference = (logits - expected[:, count:]).norm() / expected[:, count:].norm()
    assert float(difference) < (1e-5 if is_exact(model) else 0.03)
    if is_exact(model):
        own = greedy(model, ids, DynamicCache(config=model.config))
        assert greedy(model, ids, cache.load(ids)[0]) == own == answer
    assert not caplog.records
    assert library.status().divided_engines == 0, "the engine's processes name two models"


def test_an_engine_loads_what_transformers_has_stored(engine: Engine, library: kvdepot.Depot, model: Any) -> None:
    (known, first), (tokens, ids), cache = prompts(1), prompts(2), PrefixCache(library, model, share_as="llama")
    own = engine.run(tokens, salt="not the one of transformers")
    assert own["cached"] == 0
    cache.generate(ids, max_new_tokens=1)
    assert engine.run_fresh(tokens, salt="nor this")["cached"] == 0
    engine.run(known)
    assert cache.load(first)[1] == whole(cache), "nothing has been compared"
    cache.generate(ids, max_new_tokens=1)
    loaded = engine.run_fresh(tokens)
    assert loaded["cached"] == whole(cache) > 0
    if is_exact(model):
        assert loaded["tokens"] == own["tokens"]
        engines.assert_close(loaded, own)


def test_other_weights_under_the_same_name_are_noticed_by_a_load(
    engine: Engine, library: kvdepot.Depot, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, ids = prompts(3)
    engine.run(tokens)
    cache = PrefixCache(library, other_weights(model), share_as="llama")
    assert cache.load(ids)[1] == 0
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "choose another name" in record.getMessage()
    # From here on it has chunks of its own.
    for _ in range(2):
        cache.generate(prompts(4)[1], max_new_tokens=1)
    assert cache.load(prompts(4)[1])[1] == whole(cache) > 0
    assert engine.run_fresh(prompts(4)[0])["cached"] == 0
    assert len(caplog.records) == 1


def test_other_weights_under_the_same_name_are_noticed_by_a_store(
    engine: Engine, library: kvdepot.Depot, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tokens, ids), other = prompts(5), other_weights(model)
    engine.run(tokens[:300])
    cache = PrefixCache(library, other, share_as="llama")
    past = DynamicCache(config=other.config)
    compute(other, ids, past)
    assert cache.store(ids, past) == TOKENS // cache.chunk_tokens * cache.chunk_tokens
    assert "choose another name" in caplog.text
    assert engine.run_fresh(tokens)["cached"] <= 300


def test_until_something_was_compared_transformers_has_chunks_of_its_own(
    engine: Engine, library: kvdepot.Depot, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PrefixCache(library, other_weights(model), share_as="llama")
    (mine, ids), (tokens, others) = prompts(6), prompts(7)
    cache.generate(ids, max_new_tokens=1)
    assert cache.load(ids)[1] == whole(cache) > 0
    assert engine.run(mine)["cached"] == 0
    assert not caplog.records
    engine.run(tokens)
    assert cache.load(others)[1] == 0
    assert "choose another name" in caplog.text
    assert cache.load(ids)[1] == whole(cache) > 0


def test_weights_that_change_are_no_longer_those_that_are_shared(
    engine: Engine, library: kvdepot.Depot, folder: Path
) -> None:
    tokens, ids = prompts(8)
    engine.run(tokens)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, folder.name)).eval()
    cache = PrefixCache(library, model, share_as="llama")
    assert cache.load(ids)[1] == whole(cache)
    with torch.no_grad():
        model.lm_head.weight += 1
    assert cache.load(ids)[1] == 0


def test_nothing_is_shared_without_the_name_or_under_another(
    engine: Engine, library: kvdepot.Depot, model: Any
) -> None:
    tokens, ids = prompts(9)
    engine.run(tokens)
    for options in ({}, {"share_as": "llama-2"}):
        cache = PrefixCache(library, model, **options)
        assert cache.load(ids)[1] == 0
        cache.generate(prompts(10)[1], max_new_tokens=1)
    assert engine.run_fresh(prompts(10)[0])["cached"] == 0


def test_models_of_another_geometry_share_nothing(engine: Engine, library: kvdepot.Depot, model: Any) -> None:
    tokens, ids = prompts(11)
    engine.run(tokens)
    for change in ({"num_hidden_layers": 3}, {"num_key_value_heads": 4}, {"head_dim": 32}):
        other = make("llama", **(model.config.to_dict() | change)).to(model.dtype)
        cache = PrefixCache(library, other, share_as="llama")
        assert cache.load(ids)[1] == 0
        cache.generate(prompts(12)[1], max_new_tokens=1)
    assert engine.run_fresh(prompts(12)[0])["cached"] == 0


def test_the_engines_format_comes_and_stays_with_the_engine_and_its_chunks(
    start_depot: StartDepot, folder: Path, model: Any
) -> None:
    depot = start_depot(chunk_size="auto", arena_mib=256)
    (tokens, ids), (again, others) = prompts(13), prompts(14)
    with kvdepot.connect(depot.url) as library:
        # Before an engine has declared its blocks, chunks are not shared.
        cache = PrefixCache(library, model, share_as="later")
        cache.generate(ids, max_new_tokens=1)
        assert cache.load(ids)[1] == whole(cache) > 0
        engine = Engine(folder, depot.url, extra={"kvdepot.share_as": "later"}, dtype=folder.name)
        with contextlib.closing(engine.wait_started()):
            assert engine.run(tokens)["cached"] == 0
            assert cache.load(ids)[1] == whole(cache) > 0
            # A server without memory of the one before learns it from the engine.
            depot.close()
            depot = start_depot(url=depot.url, chunk_size="auto", arena_mib=256)
            engine.tell("meet")
            engine.run_fresh(again)
            assert engine.run_fresh(again)["cached"] > 0
            engine.stop()
    # The engine has gone, and its chunks have not.
    with kvdepot.connect(depot.url) as library:
        cache = PrefixCache(library, model, share_as="later")
        assert cache.load(others)[1] == whole(cache) > 0
        assert cache.load(ids)[1] == 0


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_models_with_windows_cannot_share(library: kvdepot.Depot, kind: str) -> None:
    with pytest.raises(ConfigError, match="full attention in all layers"):
        PrefixCache(library, make(kind), share_as="llama")


def test_models_with_adapters_cannot_share(library: kvdepot.Depot) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).eval()
    with pytest.raises(ConfigError, match="merge_and_unload"):
        PrefixCache(library, model, share_as="llama")


def test_a_name_with_spaces_is_refused(library: kvdepot.Depot) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        PrefixCache(library, make("llama"), share_as="two words")
