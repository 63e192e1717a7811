"""An extension of vLLM's workers: in engines whose id begins with `divided`, the worker names the engine's KV otherwise
than the scheduler, which does not load this module."""

from __future__ import annotations

from typing import Any

from kvdepot.integrations.vllm import process

_identify = process.identify


def _divided(vllm_config: Any, *arguments: Any) -> Any:
    found = _identify(vllm_config, *arguments)
    is_divided = vllm_config.kv_transfer_config.engine_id.startswith("divided")
    return found._replace(namespace=f"{found.namespace[:-4]}beef") if is_divided else found


process.identify = _divided


class Extension:
    """vLLM wants a class; this one adds nothing."""
