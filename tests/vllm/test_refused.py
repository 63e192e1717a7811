"""Configurations that an engine refuses to start with, by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvdepot.errors import ConfigError
from kvdepot.integrations.vllm import identity, versions
from kvdepot.integrations.vllm.identity import refuse_unserved

WHOLE = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
STATE = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def configured(models: dict[str, Path], **options: Any) -> VllmConfig:
    return EngineArgs(
        model=str(models["gqa"]), skip_tokenizer_init=True, max_model_len=1024, max_num_batched_tokens=1024, **options
    ).create_engine_config()


def refuse(config: VllmConfig, spec: Any = WHOLE) -> None:
    refuse_unserved(config, KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)]))


@pytest.mark.parametrize(
    ("part", "field", "value", "said"),
    [
        ("", "weight_transfer_config", object(), "weight_transfer_config"),
        ("", "speculative_config", SimpleNamespace(method="dspark"), "speculative decoding by dspark"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
        ("cache_config", "use_replayssm", True, "--use-replayssm"),
        ("model_config", "enable_sleep_mode", True, r"sleep mode with vLLM .*0\.33"),
    ],
)
def test_an_engine_whose_kv_is_not_known_to_come_back_exactly_is_refused(
    part: str, field: str, value: Any, said: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "lookahead_tokens", lambda config: 0)
    config = configured(models)
    refuse(config)
    setattr(getattr(config, part) if part else config, field, value)
    with pytest.raises(ConfigError, match=f"does not support .*{said}"):
        refuse(config)
    monkeypatch.setattr(versions, "installed_release", lambda: "0.33")
    if field == "enable_sleep_mode":
        refuse(config)


def test_chained_modules_are_refused_beside_states_alone(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(models)
    refuse(config, STATE)
    monkeypatch.setattr(identity, "lookahead_tokens", lambda config: 2)
    refuse(config)
    with pytest.raises(ConfigError, match="chained MTP modules with states"):
        refuse(config, STATE)


@pytest.mark.parametrize("kind", ["MEAN", "CLS"])
def test_pooling_that_needs_every_token_in_one_step_is_refused(kind: str, models: dict[str, Path]) -> None:
    """vLLM's model runner raises at the first hit, which ends the engine."""
    with pytest.raises(ConfigError, match="need every token of a prompt in one step"):
        refuse(configured(models, runner="pooling", pooler_config={"pooling_type": kind}))
    refuse(configured(models, runner="pooling", pooler_config={"pooling_type": "LAST"}))
