"""An extension of vLLM's workers: in engines whose id begins with `divided`, the worker names the engine's KV otherwise
than the scheduler, which does not load this module."""

from __future__ import annotations

from typing import Any

from kvdepot.integrations.vllm import process

_namespace = process.namespace


def _divided(vllm_config: Any, *arguments: Any) -> str:
    name = _namespace(vllm_config, *arguments)
    return f"{name[:-4]}beef" if vllm_config.kv_transfer_config.engine_id.startswith("divided") else name


process.namespace = _divided


class Extension:
    """vLLM wants a class; this one adds nothing."""
