"""Models, caches and arguments that are not served: the error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import kvdepot
from kvdepot.errors import BadRequest, ConfigError
from kvdepot.hf import PrefixCache
from tests.huggingface.models import CHUNK, compute, make, prompt

IDS = prompt(50)


def encoder_decoder() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    ).eval()


def on_the_meta_device() -> Any:
    with torch.device("meta"):
        return make()


def in_training() -> Any:
    return make().train()


def states_alone() -> Any:
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8}
    config = transformers.Mamba2Config(**shape, state_size=8, n_groups=1, chunk_size=16)
    return transformers.Mamba2ForCausalLM(config).eval()


def rotation_by_length() -> Any:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    name = "rope_parameters" if hasattr(transformers.LlamaConfig(), "rope_parameters") else "rope_scaling"
    return make(**{name: rope})


class FromZero(torch.nn.Module):
    """Rotary embeddings of positions within a part of a prompt."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, values: Any, position_ids: torch.Tensor, **others: Any) -> Any:
        return self.rotary(values, position_ids=position_ids - position_ids.min(), **others)


def that_ignores_its_cache() -> Any:
    model = make()
    model.model.rotary_emb = FromZero(model.model.rotary_emb)
    return model.eval()


def a_path() -> Any:
    return "Qwen/Qwen3-0.6B"


MODELS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (encoder_decoder, ConfigError, "encoder-decoder"),
    (on_the_meta_device, BadRequest, r"meta device.*from_pretrained"),
    (in_training, BadRequest, r"call model.eval\(\)"),
    (states_alone, ConfigError, "Mamba2ForCausalLM: it keeps a cache of its own"),
    (rotation_by_length, ConfigError, "rotary embeddings of type 'dynamic'"),
    (that_ignores_its_cache, ConfigError, "in two parts gives other logits"),
    (a_path, BadRequest, "pass a model of transformers.*not str"),
]  # fmt: skip


@pytest.mark.parametrize(("make_model", "error", "message"), MODELS, ids=[each[0].__name__ for each in MODELS])
def test_models_that_are_not_served_are_refused(
    library: kvdepot.Depot, make_model: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PrefixCache(library, make_model(), CHUNK)


class HalfLayer(transformers.cache_utils.QuantizedLayer):  # type: ignore[misc]
    """A layer that quantizes to half precision, without a library for it."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.half()

    def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float()


def quantized_cache() -> Any:
    cache = transformers.DynamicCache(config=make().config)
    cache.layers = [HalfLayer(residual_length=16) for _ in cache.layers]
    return cache


def test_caches_that_are_not_served_are_refused(library: kvdepot.Depot) -> None:
    model = make()
    cache = PrefixCache(library, model, CHUNK)
    other = make(num_key_value_heads=4)
    of_another, full = transformers.DynamicCache(config=other.config), transformers.DynamicCache(config=model.config)
    compute(other, IDS, of_another)
    compute(model, IDS, full)
    own = cache.load(IDS)[0]

    class OwnLayer(type(full.layers[0])):  # type: ignore[misc]
        pass

    class OwnCache(transformers.DynamicCache):  # type: ignore[misc]
        pass

    strange = OwnCache(config=model.config)
    strange.layers = [OwnLayer() for _ in strange.layers]
    compute(model, IDS, strange)
    for past, message in (
        (of_another, "cache of another model"),
        (PrefixCache(library, other, CHUNK).load(IDS)[0], "another model"),
        (full.layers, "pass a cache of transformers.*not list"),
        (own, "no attention: pass the cache that the model has filled"),
        (strange, "does not serve OwnCache with OwnLayer"),
    ):
        with pytest.raises(BadRequest, match=message):
            cache.store(IDS, past)
    with pytest.raises(BadRequest, match="this cache has 1 rows, and input_ids has 2"):
        cache.store(prompt(50, batch=2), full)
    for past, message in (
        (full, "pass an empty cache"),
        (transformers.DynamicCache(), r"DynamicCache\(config=model.config\)"),
        (transformers.DynamicCache(config=make("mistral").config), "other layers than the model"),
        (transformers.StaticCache(config=make(num_hidden_layers=3).config, max_cache_len=64), "other layers"),
        (transformers.EncoderDecoderCache(*[transformers.DynamicCache() for _ in "ab"]), "serve EncoderDecoderCache"),
        (quantized_cache(), "does not serve DynamicCache with HalfLayer"),
        (((torch.zeros(1),),), "pass an empty cache of transformers, not tuple"),
        ("static", "pass an empty cache of transformers, not str"),
    ):
        with pytest.raises(BadRequest, match=message):
            cache.load(IDS, past=past)
        with pytest.raises(BadRequest, match=message):
            cache.generate(IDS, past_key_values=past, max_new_tokens=2)
    assert cache.store(IDS, full) == 48
    small = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(BadRequest, match="a static cache of 32 tokens is too small for 48: raise max_cache_len"):
        cache.load(IDS, past=small)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS.float(), r"must be integers \[tokens\] or \[batch, tokens\], not torch.float32 \[1, 50\]"),
        (IDS > 5, "not torch.bool"), ("a prompt", r"as tokenizer\(...\).input_ids gives them"),
        (["a", "prompt"], r"as tokenizer\(...\).input_ids gives them"),
        (None, r"as tokenizer\(...\).input_ids gives them"),
        ([[1, 2], [3]], r"as tokenizer\(...\).input_ids gives them"), (IDS[None], r"not torch.int64 \[1, 1, 50\]"),
        ([], "input_ids"), (torch.zeros(1, 0, dtype=torch.long), "empty"), (-IDS, "integers in"),
        (IDS + (1 << 40), "integers in"),
    ],
)  # fmt: skip
def test_input_that_is_not_token_ids_is_refused(library: kvdepot.Depot, ids: Any, message: str) -> None:
    model = make(seed=7)
    cache = PrefixCache(library, model, CHUNK)
    full = cache.load(IDS)[0]
    compute(model, IDS, full)
    with pytest.raises(BadRequest, match=message):
        cache.load(ids)
    with pytest.raises(BadRequest, match=message):
        cache.store(ids, full)


@pytest.mark.parametrize("ids", [IDS[0].tolist(), IDS.tolist(), IDS.int(), IDS[0]], ids=["row", "rows", "int", "flat"])
def test_all_forms_of_tokens_are_one_prompt(library: kvdepot.Depot, ids: Any) -> None:
    model = make(seed=8)
    cache = PrefixCache(library, model, CHUNK)
    cache.generate(IDS, max_new_tokens=1)
    assert cache.load(ids)[1] == 48


def test_padding_must_be_at_the_left_and_masked(library: kvdepot.Depot) -> None:
    model, ids = make(), prompt(50, batch=2)
    cache, past = PrefixCache(library, model, CHUNK), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=past, use_cache=True)
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0
    with pytest.raises(BadRequest, match="padding on the left: set"):
        cache.load(ids, mask)
    with pytest.raises(BadRequest, match="a row of the batch is empty"):
        cache.load(ids, torch.zeros_like(ids))
    ids[1, :7] = 0
    with pytest.raises(BadRequest, match="pass its attention_mask"):
        cache.generate(ids)
    with pytest.raises(BadRequest, match="takes only rows without padding"):
        cache.store(ids, past)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"assistant_model": 1}, "assistant_model: assisted decoding"),
        ({"inputs_embeds": torch.zeros(2)}, "inputs_embeds: a depot's keys are tokens"),
        ({"pixel_values": torch.zeros(2)}, "pixel_values: KV must depend on tokens alone"),
        ({"custom_generate": print}, "custom_generate: it may use the cache in any way"),
        ({"past_key_values": "static"}, "not str"),
        ({"attention_mask": transformers.GenerationConfig()}, "attention_mask must be a tensor"),
        ({"attention_mask": torch.ones(1, 49)}, "a value for each token"),
        ({"inputs": IDS}, "pass the tokens of a prompt once"),
        ({"adapter_names": ["b"]}, "does not serve adapter_names: the prompt is computed without it"),
    ],
)
def test_arguments_of_generation_are_refused_by_name(library: kvdepot.Depot, arguments: Any, message: str) -> None:
    cache = PrefixCache(library, make(seed=9), CHUNK)
    with pytest.raises(BadRequest, match=message):
        cache.generate(IDS, **arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prompt_lookup_num_tokens", 3, "assisted decoding"), ("assistant_early_exit", 1, "assisted decoding"),
        ("is_assistant", True, "assisted decoding"), ("prefill_chunk_size", 16, "computed in parts already"),
        ("token_healing", True, "takes a prompt's last token back"), ("use_cache", False, "nothing to load or store"),
        ("output_hidden_states", True, "what is loaded has none"), ("output_attentions", True, "loaded has none"),
        ("cache_implementation", "static", "past_key_values=StaticCache"),
        ("cache_implementation", "quantized", "cache_implementation='quantized'"),
    ],
)  # fmt: skip
def test_unserved_settings_of_generation_are_refused_wherever_they_are(
    library: kvdepot.Depot, name: str, value: Any, message: str
) -> None:
    model = make(seed=9)
    cache = PrefixCache(library, model, CHUNK)
    config = transformers.GenerationConfig(max_new_tokens=4, **{name: value})
    for arguments in ({name: value}, {"generation_config": config}):
        with pytest.raises(BadRequest, match=message):
            cache.generate(IDS, **arguments)
    model.generation_config = config
    with pytest.raises(BadRequest, match=message):
        cache.generate(IDS)
    with pytest.raises(BadRequest, match=message):
        cache.generate(IDS, generation_config=transformers.GenerationConfig(max_new_tokens=4))


def test_a_prompt_is_taken_under_both_names_that_transformers_has(library: kvdepot.Depot) -> None:
    model = make(seed=13)
    cache = PrefixCache(library, model, CHUNK)
    answers = [cache.generate(**{name: IDS}, max_new_tokens=5) for name in ("inputs", "input_ids")]
    assert torch.equal(answers[0], answers[1])
    with pytest.raises(BadRequest, match="pass the tokens of a prompt once"):
        cache.generate(max_new_tokens=5)
    with pytest.raises(BadRequest, match="inputs_embeds: a depot's keys are tokens"):
        cache.generate(inputs_embeds=torch.zeros(1, 4, 64))
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    assert torch.equal(cache.generate(inputs=IDS, past_key_values=static, max_new_tokens=5), answers[0])


def test_an_answer_is_stored_only_if_its_cache_has_seen_just_its_tokens(library: kvdepot.Depot) -> None:
    model = make(seed=14)
    cache, own = PrefixCache(library, model, CHUNK), model.generate

    def compute_again(**arguments: Any) -> Any:
        """As transformers does for assisted decoding on a loaded cache."""
        compute(model, arguments["input_ids"], arguments["past_key_values"])
        return own(**arguments)

    model.generate = compute_again
    answer = cache.generate(IDS, max_new_tokens=40, do_sample=False)
    assert cache.load(answer)[1] == 48


def test_prompts_with_images_are_refused(library: kvdepot.Depot) -> None:
    model = make()
    model.config.image_token_id = int(IDS[0, 20])
    cache = PrefixCache(library, model, CHUNK)
    with pytest.raises(BadRequest, match="images or sounds"):
        cache.load(IDS)


def test_use_after_close_is_refused(depot: Any) -> None:
    with kvdepot.connect(depot.url) as connected:
        model = make()
        cache = PrefixCache(connected, model, CHUNK)
        past, _ = cache.load(IDS)
        compute(model, IDS, past)
    for call in (lambda: cache.load(IDS), lambda: cache.store(IDS, past), lambda: cache.generate(IDS)):
        with pytest.raises(BadRequest, match="this depot is closed"):
            call()


def test_beams_of_the_models_own_configuration_are_seen(library: kvdepot.Depot) -> None:
    model = make(seed=9)
    cache, short = PrefixCache(library, model, CHUNK), IDS[:, :10]
    model.generation_config.num_beams = 3
    given = transformers.GenerationConfig(max_new_tokens=40, do_sample=False, pad_token_id=0)
    answer = cache.generate(short, generation_config=given)
    assert cache.load(answer)[1] == 0, "a beam is no answer"


def test_a_cache_of_beam_search_is_not_stored(library: kvdepot.Depot) -> None:
    model = make(seed=10)
    cache = PrefixCache(library, model, CHUNK)
    past = cache.load(IDS)[0]
    compute(model, IDS, past)
    past.reorder_cache(torch.tensor([0]))
    with pytest.raises(BadRequest, match="beam search"):
        cache.store(IDS, past)


def test_autocast_has_prefixes_of_its_own(library: kvdepot.Depot) -> None:
    cache = PrefixCache(library, make(seed=11), CHUNK)
    cache.generate(IDS, max_new_tokens=2, do_sample=False)
    assert cache.load(IDS)[1] == 48
    with torch.autocast("cpu", torch.bfloat16):
        assert cache.load(IDS)[1] == 0
    assert cache.load(IDS)[1] == 48


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_that_was_loaded_beside_padding_is_not_stored(library: kvdepot.Depot, rows: int) -> None:
    model = make(seed=15)
    cache, ids = PrefixCache(library, model, CHUNK), prompt(50, batch=rows)
    ids[0, :7], mask = 7, torch.ones_like(ids)  # a token that nothing names as padding
    mask[0, :7] = 0
    for _ in range(2):  # computed, then loaded
        static = transformers.StaticCache(config=model.config, max_cache_len=64, max_batch_size=rows)
        for given in (None, static):
            past, _ = cache.load(ids, mask, given)
            answer = model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=4)
            with pytest.raises(BadRequest, match="loaded for prompts with padding"):
                cache.store(answer, past)
        cache.generate(ids, mask, max_new_tokens=2)
    static.reset()
    cache.generate(ids, mask, past_key_values=static, max_new_tokens=2)
    with pytest.raises(BadRequest, match="loaded for prompts with padding"):
        cache.store(ids, static)
    static.reset()
    assert cache.load(prompt(50, batch=rows, seed=1), past=static)[1] == 0
    compute(model, prompt(50, batch=rows, seed=1), static)
    assert cache.store(prompt(50, batch=rows, seed=1), static) == 48


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id"])
def test_a_batch_padded_as_its_model_or_its_tokenizer_does_is_refused(library: kvdepot.Depot, name: str) -> None:
    model = make(seed=12, bos_token_id=1, **{"pad_token_id": None, "eos_token_id": 3, name: 2})
    cache, padded = PrefixCache(library, model, CHUNK), prompt(50, batch=2)
    padded[1, :4] = 2
    past = cache.load(IDS)[0]
    with pytest.raises(BadRequest, match="this batch is padded: pass its attention_mask"):
        cache.load(padded)
    with pytest.raises(BadRequest, match="only rows without padding"):
        cache.store(padded, past)
