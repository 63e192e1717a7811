"""What a worker tries before it shares its blocks: vLLM's own function writes into spare ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kvdepot.integrations.vllm import paged_kv as probe
from kvdepot.integrations.vllm.paged_kv import _try_writing
from kvdepot.integrations.vllm.versions import installed_release


@pytest.fixture(scope="module")
def layer(models: dict[str, Path]) -> Any:
    """A layer as far as it matters here, with vLLM's own attention."""
    config = EngineArgs(model=str(models["gqa"]), skip_tokenizer_init=True, max_model_len=1024).create_engine_config()
    with set_current_vllm_config(config):
        impl = CPUAttentionBackendImpl(4, 64, 1.0, 2, None, None, "auto")
    cache = torch.zeros((4, 2, 128, 2 * 64), dtype=torch.bfloat16)
    return SimpleNamespace(
        kv_cache=cache, num_kv_heads=2, head_size=64, isa="vec", impl=impl, _k_scale_float=1.0, _v_scale_float=1.0
    )


def test_another_place_within_a_block_is_seen_though_name_and_shape_are_the_same(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _try_writing("layer", layer, torch.bfloat16)
    assert before == _try_writing("layer", layer, torch.bfloat16)
    assert any(before)
    write = layer.impl.do_kv_cache_update

    def write_two_tokens_swapped(layer: Any, key: Any, value: Any, cache: Any, slots: torch.Tensor) -> None:
        order = torch.arange(len(slots))
        order[:2] = torch.tensor([1, 0])
        write(layer, key, value, cache, slots[order])

    monkeypatch.setattr(layer.impl, "do_kv_cache_update", write_two_tokens_swapped)
    after = _try_writing("layer", layer, torch.bfloat16)
    assert sorted(after) == sorted(before), "these are not the same numbers"
    assert after != before
    assert not layer.kv_cache.any(), "the engine's own blocks were written"


def test_a_layer_that_cannot_be_tried_shares_within_its_release_alone(
    layer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", probe.log.name):
        probe.log.addHandler(caplog.handler)
        assert probe._try_writing("layer", SimpleNamespace(), torch.bfloat16) == installed_release().encode()
        probe.log.removeHandler(caplog.handler)
    assert "cannot probe the block format of layer" in caplog.text
