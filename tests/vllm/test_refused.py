"""Configurations that an engine refuses to start with, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvdepot.errors import ConfigError
from kvdepot.integrations.vllm import versions
from kvdepot.integrations.vllm.identity import refuse_unserved


def refuse(model: Path, sleeps: bool = False, **options: Any) -> None:
    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=1024, max_num_batched_tokens=1024, **options
    ).create_engine_config()
    config.model_config.enable_sleep_mode = sleeps  # which vLLM refuses on processors
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    refuse_unserved(config, KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)]))


def test_sleep_mode_is_refused_where_vllm_does_not_tell_of_it(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(models["gqa"])
    with pytest.raises(ConfigError, match=r"does not support sleep mode with vLLM .*0\.33"):
        refuse(models["gqa"], sleeps=True)
    monkeypatch.setattr(versions, "installed_release", lambda: "0.33")
    refuse(models["gqa"], sleeps=True)


@pytest.mark.parametrize("kind", ["MEAN", "CLS"])
def test_pooling_that_needs_every_token_in_one_step_is_refused(kind: str, models: dict[str, Path]) -> None:
    """vLLM's model runner raises at the first hit, which ends the engine."""
    with pytest.raises(ConfigError, match="need every token of a prompt in one step"):
        refuse(models["gqa"], runner="pooling", pooler_config={"pooling_type": kind})
    refuse(models["gqa"], runner="pooling", pooler_config={"pooling_type": "LAST"})
