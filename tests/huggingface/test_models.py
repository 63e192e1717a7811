"""What real models compute with a depot is what they compute without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import kvdepot
from kvdepot.errors import BadRequest
from kvdepot.hf import PrefixCache
from tests.huggingface.models import CHUNK, HAS_STATES, PLAIN, SERVED, WINDOWED, compute, make, prompt

TOKENS = 100
WHOLE = TOKENS // CHUNK * CHUNK


def greedy(model: Any, ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    answer: torch.Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **others)
    return answer


def cached(cache: PrefixCache, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    answer = cache.generate(ids, max_new_tokens=20, do_sample=False, **arguments)
    assert isinstance(answer, torch.Tensor)
    return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", SERVED)
def test_logits_after_a_load_are_those_of_the_same_chunks(
    library: kvdepot.Depot, kind: str, dtype: torch.dtype
) -> None:
    model = make(kind).to(dtype)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS)
    computed, n = cache.load(ids)
    assert n == 0
    compute(model, ids[:, :WHOLE], computed)
    assert cache.store(ids[:, :WHOLE], computed) == WHOLE
    loaded, n = PrefixCache(library, model, CHUNK).load(ids)
    assert n == WHOLE == loaded.get_seq_length()
    # each decoded token reads what its predecessors have left in the cache
    ends = range(WHOLE + 2, TOKENS)
    assert torch.equal(compute(model, ids, loaded, *ends), compute(model, ids, computed, *ends))


@pytest.mark.parametrize("kind", SERVED)
def test_greedy_answers_are_equal_and_end_in_the_depot(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS)
    expected = greedy(model, ids)
    for loaded in (0, WHOLE):
        assert torch.equal(cached(cache, ids), expected)
        last = cache.last
        assert (last.found, last.loaded, last.compared, last.saved_s > 0) == (loaded, loaded, 0, loaded > 0)
    assert cache.load(ids)[1] == cache.last.loaded == WHOLE
    answer_is_stored = kind != "states"
    assert cache.load(expected)[1] == (112 if answer_is_stored else WHOLE)


@pytest.mark.parametrize("kind", [*PLAIN, *WINDOWED])
def test_a_prompt_that_shares_a_few_chunks_resumes_after_them(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids, other = PrefixCache(library, model, CHUNK), prompt(200), prompt(200, seed=1)
    cached(cache, ids)
    for shared in (CHUNK, 5 * CHUNK, 9 * CHUNK):
        other[:, :shared] = ids[:, :shared]
        assert cache.load(other)[1] == shared
        assert torch.equal(cached(cache, other), greedy(model, other))


@pytest.mark.parametrize("kind", SERVED)
def test_the_users_own_calls_load_generate_and_store(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS)
    past, _ = cache.load(ids)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=past, max_new_tokens=13, return_dict_in_generate=True
    )
    assert past.get_seq_length() == 7 * CHUNK  # where a chunk ends, as states need it
    assert cache.store(output.sequences, output.past_key_values) == 7 * CHUNK
    assert cache.load(output.sequences)[1] == 7 * CHUNK


@pytest.mark.parametrize("kind", SERVED)
def test_static_caches_are_filled(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    if kind == "latent" and not HAS_STATES:
        pytest.skip("before transformers 5, a StaticCache has no room for values of another size")
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS)
    expected = greedy(model, ids)
    static = transformers.StaticCache(config=model.config, max_cache_len=160)
    assert torch.equal(cached(cache, ids, past_key_values=static), expected)
    static = transformers.StaticCache(config=model.config, max_cache_len=160)
    past, n = cache.load(ids, past=static)
    assert (past is static, n) == (True, WHOLE)
    assert torch.equal(greedy(model, ids, past_key_values=static), expected)


def test_a_static_cache_of_full_attention_is_stored(library: kvdepot.Depot) -> None:
    model = make("llama")
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS)
    static = transformers.StaticCache(config=model.config, max_cache_len=128)
    compute(model, ids, static)
    assert cache.store(ids, static) == WHOLE
    assert torch.equal(cached(cache, ids), greedy(model, ids))


@pytest.mark.parametrize("kind", SERVED)
def test_batches_with_padding_answer_as_without_a_depot(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS, batch=4)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((13, 0, TOKENS - 1, 60)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    expected = greedy(model, ids, attention_mask=mask)
    for _ in range(2):
        assert torch.equal(cached(cache, ids, attention_mask=mask), expected)
    assert [cache.load(row[pad:])[1] for row, pad in zip(ids, (13, 0, 99, 60), strict=True)] == [80, 96, 0, 32]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_padded_batch_is_loaded_up_to_the_shortest_row(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS, batch=3)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((13, 0, 60)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    expected = greedy(model, ids, attention_mask=mask)
    cached(cache, ids, attention_mask=mask)
    past, n = cache.load(ids, mask)
    assert n == past.get_seq_length() == min(13 + 80, 96, 60 + 32)
    assert (cache.last.found, cache.last.loaded) == (80 + 96 + 32, (n - 13) + n + (n - 60))
    assert torch.equal(greedy(model, ids, attention_mask=mask, past_key_values=past), expected)


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_batch_of_windows_is_loaded_where_all_rows_can_resume(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS, batch=2)
    ids[1, :70] = ids[0, :70]
    cached(cache, ids[:1])
    past, n = cache.load(ids)
    assert n == 64
    assert torch.equal(greedy(model, ids, past_key_values=past), greedy(model, ids))
    assert cache.store(ids, past) == WHOLE


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind not in PLAIN])
def test_rows_that_resume_at_different_columns_are_a_miss(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS, batch=2)
    mask = torch.ones_like(ids)
    ids[0, :13], mask[0, :13] = 0, 0
    expected = greedy(model, ids, attention_mask=mask)
    cached(cache, ids, attention_mask=mask)
    past, n = cache.load(ids, mask)
    assert n == past.get_seq_length() == cache.last.loaded == 0
    assert torch.equal(greedy(model, ids, attention_mask=mask, past_key_values=past), expected)


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_loaded_window_is_stored_no_further_than_it_reaches(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS)
    expected = cached(cache, ids)
    past, n = cache.load(ids)
    assert n == WHOLE
    cache._namespace.delete(expected[0].tolist())
    assert cache.load(ids)[1] == 0
    assert cache.store(ids, past) == WHOLE
    assert cache.load(ids[:, : WHOLE // 2 + 1])[1] == 0
    assert torch.equal(cached(cache, ids), expected)


def test_a_static_window_that_is_full_is_not_stored(library: kvdepot.Depot) -> None:
    model = make("mistral", sliding_window=CHUNK)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(WHOLE)
    static = transformers.StaticCache(config=model.config, max_cache_len=128)
    compute(model, ids, static)
    with pytest.raises(BadRequest, match="has dropped KV that its windows need at token 96"):
        cache.store(ids, static)


@pytest.mark.parametrize("kind", SERVED)
def test_beams_answer_as_without_a_depot(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS, batch=2)
    expected = greedy(model, ids, num_beams=3)
    for _ in range(2):
        assert torch.equal(cached(cache, ids, num_beams=3), expected)


@pytest.mark.parametrize("kind", [*PLAIN, *WINDOWED])
def test_beams_of_the_users_own_calls_answer_on_a_hit_as_on_a_miss(library: kvdepot.Depot, kind: str) -> None:
    model = make(kind)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(TOKENS, batch=2)
    expected = greedy(model, ids, num_beams=3)
    for count in (0, WHOLE):
        past, n = cache.load(ids)
        assert n == count
        assert torch.equal(greedy(model, ids, num_beams=3, past_key_values=past), expected)
        cached(cache, ids)


def test_prompts_shorter_than_a_chunk_are_misses(library: kvdepot.Depot) -> None:
    model = make("llama")
    cache = PrefixCache(library, model, CHUNK)
    for tokens in (1, 2, CHUNK):
        ids = prompt(tokens)
        assert torch.equal(cached(cache, ids)[:, : tokens + 1], greedy(model, ids)[:, : tokens + 1])
        assert cache.load(ids)[1] == 0


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_cache_that_has_dropped_what_windows_need_is_refused(library: kvdepot.Depot, kind: str) -> None:
    model, ids = make(kind), prompt(TOKENS)
    cache, own = PrefixCache(library, model, CHUNK), transformers.DynamicCache(config=make(kind).config)
    compute(model, ids, own)
    with pytest.raises(BadRequest, match="has dropped KV that its windows need at token 96"):
        cache.store(ids, own)
    assert cache.load(ids)[1] == 0


@pytest.mark.skipif(not HAS_STATES, reason="before transformers 5, models with states have caches of their own")
def test_a_state_that_has_passed_the_end_of_a_chunk_is_refused(library: kvdepot.Depot) -> None:
    model, ids = make("states"), prompt(TOKENS)
    cache = PrefixCache(library, model, CHUNK)
    past, _ = cache.load(ids)
    compute(model, ids, past)
    with pytest.raises(BadRequest, match="has seen 100 tokens: store it at 96"):
        cache.store(ids, past)


def test_without_a_server_answers_are_computed(start_depot: Any) -> None:
    server = start_depot(chunk_size="auto")
    model, ids = make("llama"), prompt(TOKENS)
    with kvdepot.connect(server.url) as connected:
        cache = PrefixCache(connected, model, CHUNK)
        expected = cached(cache, ids)
        server.process.kill()
        server.process.wait()
        assert torch.equal(cached(cache, ids), expected)
        assert cache.load(ids)[1] == 0
