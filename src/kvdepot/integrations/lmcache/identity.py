"""What distinguishes the KV of one engine of vLLM 0.15 to 0.17 from another's, beyond the model's path.

The contract's keys name KV by the model's path, and the server adds shapes and dtypes. As with `KVDepotConnector`
(vllm/identity.py), everything else of the configuration is identity unless it is known to be harmless.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import vllm
from blake3 import blake3

from kvdepot.integrations.loaded import loaded_since
from kvdepot.integrations.vllm.environment import platform_facts
from kvdepot.integrations.vllm.fields import describe_config
from kvdepot.integrations.vllm.weight_files import find_weights, kinds_read

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["identity"]

_SETTLED_S = 2.0
"""As in vllm/identity.py."""


def identity(vllm_config: VllmConfig) -> str:
    """A hash of all that is fixed for an engine and may change KV bytes, equal in all of its processes.

    Weights of a hub name that is not in the local cache are known by their name alone.
    """
    model = vllm_config.model_config
    found = find_weights(model.model, model.revision, vllm_config.load_config.download_dir, kinds_read(model))
    facts: list[object] = [vllm.__version__, platform_facts(), describe_config(vllm_config, "any")]
    if found is not None:
        facts.append(found.digest)
        if found.changed_at > loaded_since() - _SETTLED_S:  # nobody knows which version was loaded
            facts.append(vllm_config.instance_id)
    return blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
