"""Engines that share their chunks with other front ends: how their blocks are described, and which engines cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvdepot.errors import ConfigError
from kvdepot.integrations.vllm.paged_kv import describe_kv
from kvdepot.integrations.vllm.settings import read_settings
from kvdepot.integrations.vllm.sharing import describe_blocks, shared_namespace
from tests.conftest import Depot
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import EngineError

BLOCKS, HEADS, TOKENS, DIMS = 4, 2, 128, 64
FULL = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=512)
LATENT = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def config(models: dict[str, Path]) -> VllmConfig:
    return EngineArgs(model=str(models["gqa"]), skip_tokenizer_init=True, max_model_len=1024).create_engine_config()


def name(config: VllmConfig, *specs: Any) -> str:
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    return shared_namespace(config, KVCacheConfig(8, [], groups), "llama")


def ranks(config: VllmConfig, **sizes: int) -> None:
    for each, size in sizes.items():
        setattr(config.parallel_config, each, size)


@pytest.mark.parametrize(
    ("change", "specs", "reason"),
    [
        (lambda config: ranks(config, tensor_parallel_size=2), [FULL], "each of its 2 ranks has a part"),
        (lambda config: ranks(config, pipeline_parallel_size=3), [FULL], "each of its 3 ranks has a part"),
        (lambda config: ranks(config, decode_context_parallel_size=2), [FULL], "each of its 2 ranks has a part"),
        (lambda config: None, [WINDOW], "1 groups of SlidingWindowSpec"),
        (lambda config: None, [LATENT], "1 groups of MLAAttentionSpec"),
        (lambda config: None, [FULL, WINDOW], "2 groups of FullAttentionSpec, SlidingWindowSpec"),
        (lambda config: None, [replace(FULL, dtype=torch.float8_e4m3fn)], "its KV is quantized"),
    ],
)
def test_engines_that_cannot_share_say_why(
    config: VllmConfig, change: Callable[[VllmConfig], None], specs: list[Any], reason: str
) -> None:
    changed = copy.deepcopy(config)
    change(changed)
    with pytest.raises(ConfigError, match=rf"share_as is not possible here: .*{reason}.*Start this engine without it"):
        name(changed, *specs)


def test_an_engine_with_a_drafter_cannot_share(models: dict[str, Path]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = EngineArgs(
        model=str(models["gqa"]), skip_tokenizer_init=True, max_model_len=1024, speculative_config=drafts
    ).create_engine_config()
    with pytest.raises(ConfigError, match="speculative decoding"):
        name(config, FULL)


def test_the_namespace_is_that_of_blocks_and_not_of_weights(config: VllmConfig, models: dict[str, Path]) -> None:
    assert name(config, FULL) == name(config, FULL) != name(config, replace(FULL, block_size=64))
    renamed = copy.deepcopy(config)
    renamed.model_config.model = str(models["mla"])
    assert name(renamed, FULL) == name(config, FULL)
    assert name(config, FULL).startswith("share:llama@kv-")


def test_a_name_that_cannot_be_shared_under_is_refused_with_the_settings() -> None:
    assert read_settings({"kvdepot.share_as": "llama-3.1"}).share_as == "llama-3.1"
    with pytest.raises(ConfigError, match="letters, digits"):
        read_settings({"kvdepot.share_as": "two words"})


def test_an_engine_that_cannot_share_ends_before_it_serves(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    engine = start_engine(models["mla"], vllm_depot.url, extra={"kvdepot.share_as": "mla"})
    with pytest.raises(EngineError, match="share_as is not possible here: full attention in all layers"):
        engine.wait_started()


# -- blocks


def layer(config: VllmConfig, blocks: int, tokens: int) -> Any:
    """A layer as far as it matters here, with vLLM's own attention."""
    with set_current_vllm_config(config):
        impl = CPUAttentionBackendImpl(4, DIMS, 1.0, HEADS, None, None, "auto")
    cache = torch.zeros((blocks, HEADS, tokens, 2 * DIMS), dtype=torch.bfloat16)
    return SimpleNamespace(
        kv_cache=cache, num_kv_heads=HEADS, head_size=DIMS, isa="vec", impl=impl, _k_scale_float=1.0, _v_scale_float=1.0
    )


def described(config: VllmConfig, layers: list[Any]) -> Any:
    config = copy.deepcopy(config)
    named = {f"model.layers.{number}.self_attn.attn": each for number, each in enumerate(layers)}
    config.compilation_config.static_forward_context.update(named)
    caches = {name: each.kv_cache for name, each in named.items()}
    return describe_blocks(config, caches, describe_kv(caches, BLOCKS, "writers"))


@pytest.mark.parametrize(("blocks", "tokens"), [(BLOCKS, TOKENS), (2 * BLOCKS, TOKENS // 2)], ids=["whole", "halves"])
def test_what_vllm_writes_is_found_by_the_description(config: VllmConfig, blocks: int, tokens: int) -> None:
    """Halves: kernels use smaller blocks than the scheduler."""
    layers = [layer(config, blocks, tokens) for _ in range(3)]
    found = described(config, layers)
    assert found.geometry == ("bfloat16", 3, HEADS, DIMS) and found.block_tokens == TOKENS
    assert not any(each.kv_cache.any() for each in layers), "the engine's own blocks were written"
    keys, values = torch.randn(2, TOKENS, HEADS, DIMS).to(torch.bfloat16)
    slots = torch.arange(TOKENS, 2 * TOKENS)  # the second of the scheduler's blocks
    layers[1].impl.do_kv_cache_update(layers[1], keys, values, layers[1].kv_cache, slots)
    each = [one.kv_cache.view(BLOCKS, -1)[1] for one in layers]
    chunk = torch.cat(each).view(torch.int16).numpy()
    views = list(found.views(chunk, 1))
    for number, tensor in ((2, keys), (3, values)):
        expected = tensor.transpose(0, 1).contiguous().view(torch.int16).numpy()
        assert (views[number] == expected.reshape(views[number].shape)).all()


def test_layers_that_write_in_other_orders_or_not_at_all_are_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [layer(config, BLOCKS, TOKENS) for _ in range(2)]
    write = layers[1].impl.do_kv_cache_update

    def write_two_tokens_swapped(layer: Any, key: Any, value: Any, cache: Any, slots: torch.Tensor) -> None:
        order = torch.arange(len(slots))
        order[:2] = torch.tensor([1, 0])
        write(layer, key, value, cache, slots[order])

    monkeypatch.setattr(layers[1].impl, "do_kv_cache_update", write_two_tokens_swapped)
    with pytest.raises(ConfigError, match=r"layers.1.self_attn.attn has its values in another order"):
        described(config, layers)
    with pytest.raises(ConfigError, match="cannot be probed"):
        described(config, [SimpleNamespace(kv_cache=layers[0].kv_cache)])
    odd = layer(config, BLOCKS, TOKENS)
    odd.num_kv_heads = 1  # so half of each block stays empty
    with pytest.raises(ConfigError, match=r"does not keep each key and value once|cannot be probed"):
        described(config, [odd])
