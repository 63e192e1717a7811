"""The facts of an engine that are taken once, before it has workers, and travel with its configuration.

vLLM's code for a model changes the configuration as it builds the model, in the process that builds it: the scheduler's
process does not see it, and `--max-model-len auto` is fitted to the free memory afterwards. So an engine is described
when its executor is made (start.py), in the process of its scheduler, before any worker exists. The digest is kept in
`instance_id`, a random name that vLLM gives each VllmConfig and hands to every worker with it. Rejected: an attribute
of its own (vLLM copies configurations by their fields and refuses others), and a key of `kv_connector_extra_config` (a
user may give one KVTransferConfig to two engines).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from vllm.logger import init_logger

from kvdepot.errors import ConfigError
from kvdepot.integrations.loaded import loaded_since
from kvdepot.integrations.vllm.environment import describe_environment
from kvdepot.integrations.vllm.fields import describe_config
from kvdepot.integrations.vllm.foreign_code import describe_code
from kvdepot.integrations.vllm.versions import corrections

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, LoadConfig, ModelConfig, VllmConfig

__all__ = ["describe_engine", "models_of", "note_facts", "noted_facts", "noted_since"]

log = init_logger(__name__)

_WEIGHTS = {".bin", ".gguf", ".pt", ".pth", ".safetensors"}
"""Files beside a tokenizer that it does not consist of."""
_NOTE = re.compile(r"-kvdepot-([0-9a-f]{32})-([0-9]+)")


def note_facts(vllm_config: VllmConfig) -> None:
    """Describe an engine, and note the digest in its configuration. Raises ConfigError for what cannot be described."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "only engines with our connector are described"
    is_vouched = any(extra.get("kvdepot.weights_revision") for extra in _extra_configs(transfer))
    name = _NOTE.sub("", vllm_config.instance_id)
    digest, since_ms = describe_engine(vllm_config, is_vouched), int(1000 * loaded_since())
    vllm_config.instance_id = f"{name}-kvdepot-{digest}-{since_ms}"


def noted_facts(vllm_config: VllmConfig) -> str:
    """The digest that was noted; empty for a configuration whose executor is not one of vLLM's."""
    found = _NOTE.search(vllm_config.instance_id)
    return found[1] if found else ""


def noted_since(vllm_config: VllmConfig) -> float | None:
    """The Unix time at which the engine had read no file yet, equal in all its processes; None if it was not noted."""
    found = _NOTE.search(vllm_config.instance_id)
    return int(found[2]) / 1000 if found else None


def describe_engine(vllm_config: VllmConfig, vouched: bool) -> str:
    """A digest of everything that is given before a model is built. vouched: as of `describe_config`."""
    models = [model for model, _ in models_of(vllm_config)]
    facts = {
        "config": describe_config(vllm_config, vouched),
        "environment": describe_environment(),
        "code": describe_code(vllm_config, models),
        "tokenizers": [_tokenizer(model) for model in models],
        "corrections": [corrections(model) for model in models],
    }
    text = json.dumps(facts, sort_keys=True)
    log.debug("kvdepot: configuration of this engine: %s", text)
    return blake3(text.encode()).hexdigest()[:32]


def models_of(vllm_config: VllmConfig) -> list[tuple[ModelConfig, LoadConfig]]:
    """The model and its drafter, with how each is loaded."""
    models = [(vllm_config.model_config, vllm_config.load_config)]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        models.append((speculative.draft_model_config, speculative.draft_load_config or vllm_config.load_config))
    return models


def _tokenizer(model: ModelConfig) -> list[str | None]:
    """A tokenizer that is not the model's own, or of which the model computes with the tokens' text (Engram).

    Pixtral, Voxtral and MiniCPM-V take numbers from it, and other models may. The answer is a digest of its files, or
    its name and revision if it is not in a folder. Raises ConfigError for a file that cannot be read.
    """
    is_own = model.tokenizer in (None, model.model) and model.tokenizer_revision in (None, model.revision)
    if is_own and "engram" not in str(model.hf_config.to_dict()).lower():
        return []  # of models with images and sounds, the description of their own files has it
    place = Path(model.tokenizer).expanduser()
    if not place.exists():
        return [model.tokenizer, model.tokenizer_revision]
    hasher = blake3()
    try:
        files = [file for file in place.iterdir() if file.suffix not in _WEIGHTS] if place.is_dir() else [place]
        for file in sorted(file for file in files if file.is_file()):
            hasher.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            hasher.update(file.read_bytes())
    except OSError as exc:
        raise ConfigError(f"kvdepot cannot determine which tokenizer is at {place}: {exc}") from exc
    return [hasher.hexdigest()[:32]]


def _extra_configs(transfer: KVTransferConfig) -> Iterator[dict[str, Any]]:
    """The settings of our connectors, MultiConnector's children included."""
    children = transfer.kv_connector_extra_config.get("connectors", ())
    yield transfer.kv_connector_extra_config
    yield from (child.get("kv_connector_extra_config") or {} for child in children)
