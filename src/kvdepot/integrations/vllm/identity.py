"""What distinguishes one engine's KV from another's, and which configurations are refused.

connector.py calls it in the scheduler and in every worker when a connector is made. What differs between requests is in
requests.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from blake3 import blake3
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvdepot.errors import ConfigError
from kvdepot.integrations.loaded import loaded_since
from kvdepot.integrations.processor import platform_facts
from kvdepot.integrations.vllm.facts import describe_engine, models_of, noted_facts, noted_since
from kvdepot.integrations.vllm.groups import Group, describe_groups, find_groups, holds_plain_numbers
from kvdepot.integrations.vllm.layouts import LAYOUTS
from kvdepot.integrations.vllm.versions import KV_FORMATS, installed_release, lookahead_tokens, tells_of_sleep
from kvdepot.integrations.vllm.weight_files import ALL_KINDS, Kind, find_weights, kinds_read
from kvdepot.protocol.addresses import fault_of_endpoint
from kvdepot.protocol.model_names import name_model
from kvdepot.protocol.wire import MAX_TOPIC

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["Settings", "namespace", "read_settings", "refuse_unserved"]

log = init_logger(__name__)

_PREFIX = "kvdepot."
_EMBEDDED = "embedded"
"""In place of a URL: the engine has a server of its own."""
_STARTS = ("auto", "never")
_LOCAL_FORMATS = {
    "auto",
    "hf",
    "safetensors",
    "pt",
    "npcache",
    "mistral",
    "fastsafetensors",
    "instanttensor",
    "dummy",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
}
"""Load formats that read only the model's own folder."""
_OLD_FORMATS = {"pt", "npcache"}
"""Those of them that read what the others leave aside where safetensors lie beside it."""
_TOWERS = {"ultravox": ("audio_model_id", "text_model_id")}
"""Fields of models' configurations that name repositories with more of their weights."""
_SPECULATION = {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "draft_model", "eagle", "eagle3", "mtp"}
"""Methods without KV of their own (medusa and mlp_speculator exist before vLLM 0.33); and those whose KV at a position
depends on the tokens up to it, or as many after it as vLLM's `num_prefill_lookahead_tokens` says."""
_SETTLED_S = 2.0
"""Files that changed less than this before the engine began to load count as changed during the load: the clocks of
file systems lag behind ours."""


@dataclass(frozen=True)
class Settings:
    """Our keys of `kv_connector_extra_config`, without their prefix.

    url, start, required: see place.py; an empty url stands for the default endpoint. key: a file; empty: the client's
    default. boundary_chunks: see plan.py; 0: the default. events_topic: see wire.Register; empty: none. max_hint_s: the
    longest time for which a request's hints keep its chunks, in seconds; 0: they do not, and remove none. layout: see
    layouts.py.
    """

    url: str = ""
    start: str = "auto"
    required: bool = False
    key: str = ""
    save_decode: bool = False
    weights_revision: str = ""
    boundary_chunks: int = 0
    events_topic: str = ""
    max_hint_s: int = 1 << 31
    layout: str = "engine"

    @property
    def is_embedded(self) -> bool:
        """Whether the engine has a server of its own."""
        return self.url == _EMBEDDED


def read_settings(extra: dict[str, Any]) -> Settings:
    """Our keys of kv_connector_extra_config. Raises ConfigError for unknown ones and wrong types.

    vLLM itself reads none of a connector's keys, so all are ours except those with another connector's prefix, which
    may be left from it.
    """
    known = get_type_hints(Settings)
    given: dict[str, Any] = {}
    for key, value in extra.items():
        prefix, dot, name = key.partition(".")
        if dot and prefix.lower() != "kvdepot":
            continue
        if prefix + dot != _PREFIX or name not in known:
            raise ConfigError(f"{key} is not a kvdepot setting; {_suggestion(key, value, list(known))}")
        if type(value) is not known[name]:  # True is an int
            raise ConfigError(f"{key} is {value!r}, not of type {known[name].__name__}")
        given[name] = value
    if given.get("boundary_chunks", 0) < 0:
        raise ConfigError(f"{_PREFIX}boundary_chunks is {given['boundary_chunks']}: a number of chunks, or 0")
    if given.get("max_hint_s", 0) < 0:
        raise ConfigError(f"{_PREFIX}max_hint_s is {given['max_hint_s']}: a number of seconds, or 0")
    settings = Settings(**given)
    if len(settings.events_topic.encode()) > MAX_TOPIC:
        raise ConfigError(f"{_PREFIX}events_topic is longer than {MAX_TOPIC} bytes")
    if settings.url not in ("", _EMBEDDED) and (fault := fault_of_endpoint(settings.url)):
        raise ConfigError(f"{_PREFIX}url: {fault}, or {_EMBEDDED}")
    for name, value, values in (("start", settings.start, _STARTS), ("layout", settings.layout, LAYOUTS)):
        if value not in values:
            raise ConfigError(f"{_PREFIX}{name} is {value!r}, not one of {', '.join(values)}")
    return settings


def _suggestion(key: str, value: object, known: list[str]) -> str:
    """What the user may have meant by an unknown key."""
    if isinstance(value, dict):
        return f'write each setting with its prefix, such as "{_PREFIX}save_decode": true'
    name = re.sub(r"^kvdepot\W?_?", "", key.lower()).replace("-", "_")
    close = get_close_matches(name, known, n=1)
    meant = f"did you mean {_PREFIX}{close[0]}? " if close else ""
    return f"{meant}valid settings: {', '.join(_PREFIX + each for each in known)}"


def refuse_unserved(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for configurations whose KV would be cached wrongly or not at all."""
    groups = find_groups(kv_cache_config)
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "kvdepot does not support prefill context parallelism: vLLM does not say which of its ranks hold the KV of "
            "a decoded token. Start with --prefill-context-parallel-size 1"
        )
    if vllm_config.model_config.enable_sleep_mode and not tells_of_sleep():
        raise ConfigError(
            f"kvdepot does not support sleep mode with vLLM {installed_release()}: a sleeping engine frees its KV's "
            "memory and wakes with other memory, and only vLLM 0.33 or newer notifies connectors. Start without "
            "--enable-sleep-mode"
        )
    model = vllm_config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigError(
            "kvdepot does not support pooling models that need every token of a prompt in one step (bidirectional "
            "attention, pooling by MEAN, CLS or STEP), as vLLM's own prefix cache does not: start without kvdepot"
        )
    if vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            "kvdepot does not support engines whose weights are replaced while they run (weight_transfer_config): it "
            "is not notified, and would mix the KV of old and new weights"
        )
    cache = vllm_config.cache_config
    if cache.use_replayssm or cache.use_kda_recoverssm:
        raise ConfigError(
            "kvdepot does not support states that are rebuilt from the last tokens: start without --use-replayssm and "
            "--use-kda-recoverssm"
        )
    _refuse_speculation(vllm_config, groups)


def _refuse_speculation(vllm_config: VllmConfig, groups: Sequence[Group]) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method not in _SPECULATION:
        raise ConfigError(
            f"kvdepot does not support speculative decoding by {speculative.method}: on which tokens the KV of its "
            f"drafter depends is not known. Supported methods: {', '.join(sorted(_SPECULATION))}"
        )
    if lookahead_tokens(vllm_config) > 1 and any(group.is_state for group in groups):
        raise ConfigError(
            "kvdepot does not support chained MTP modules with states (Mamba, gated delta net): vLLM offers a state "
            "before the KV of all modules is final. Start with fewer speculative tokens, or without kvdepot"
        )


def namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, weights_revision: str) -> str:
    """Everything that is fixed for an engine and may change KV bytes, as a hash with a readable name.

    Equal in the scheduler and every worker, and after a restart with the same weights and configuration: what building
    a model may change was described before (facts.py). Reads the model's files: call it once the weights have been
    loaded. Raises ConfigError for versions that it cannot identify,
    unless weights_revision names them; it is added to what can be identified.
    """
    facts = {
        "format": _format(kv_cache_config),
        "engine": noted_facts(vllm_config) or describe_engine(vllm_config, vouched=bool(weights_revision)),
        "platform": platform_facts(),
        "groups": describe_groups(kv_cache_config),
        "layout": vllm_config.cache_config.kv_cache_layout,  # vLLM settles it after facts.py has described the engine
        "weights": [_weights_or_name(vllm_config, model, weights_revision) for model in models_of(vllm_config)],
        "revision": weights_revision,
    }
    text = json.dumps(facts, sort_keys=True)
    log.debug("kvdepot: identity of this engine's KV: %s", text)
    return name_model(Path(vllm_config.model_config.model).name, blake3(text.encode()).hexdigest())


def _weights_or_name(vllm_config: VllmConfig, model: tuple[ModelConfig, LoadConfig], revision: str) -> list[str]:
    """Facts of a model's weights; where nothing can be known, their name, if the user has named their version."""
    try:
        return _weights(vllm_config, *model)
    except ConfigError:
        if not revision:
            raise
        return ["vouched for", model[0].model_weights or model[0].model, model[0].revision or ""]


def _format(kv_cache_config: KVCacheConfig) -> list[str]:
    """What only vLLM's code decides about the bytes of KV: our number for it, and, where that may change unseen, the
    release itself."""
    release = installed_release()
    facts = [f"format {KV_FORMATS[release]}"]
    is_known = current_platform.is_cuda() or current_platform.is_cpu()
    if not is_known or not holds_plain_numbers(kv_cache_config):
        facts.append(f"vLLM {release}")
    return facts


def _weights(vllm_config: VllmConfig, model: ModelConfig, load: LoadConfig) -> list[str]:
    """Facts that identify the version of a model's weights, and of the code and scales with them."""
    origin = model.model_weights or model.model
    settings = load.model_loader_extra_config
    if str(load.load_format) not in _LOCAL_FORMATS:
        raise _unknown(f"what load format {load.load_format} loads")
    if not isinstance(settings, dict) or _has_text(settings):
        raise _unknown(f"which files model_loader_extra_config {settings!r:.200} names")
    read = kinds_read(model) | ({Kind.DUPLICATE} if str(load.load_format) in _OLD_FORMATS else set())
    paths: list[tuple[str, str | None, Collection[Kind]]] = [(origin, model.revision, read)]
    if model.trust_remote_code and "--" in str(getattr(model.hf_config, "auto_map", "")):
        raise _unknown("which version of another repository's code runs this model")
    if model.trust_remote_code and model.code_revision:
        paths.append((model.model, model.code_revision, ALL_KINDS))
    if model.trust_remote_code and model.hf_config_path:
        revision = getattr(model, "_hf_config_revision", None) or model.revision
        paths.append((model.hf_config_path, revision, {Kind.CONFIG, Kind.CODE}))
    scales = model.multimodal_config and model.multimodal_config.mm_encoder_fp8_scale_path
    if scales:
        paths.append((scales, None, ALL_KINDS))
    for name in _TOWERS.get(model.hf_config.model_type, ()):
        if tower := getattr(model.hf_config, name, None):
            paths.append((tower, None, {Kind.WEIGHTS}))
    since = noted_since(vllm_config) or loaded_since()  # equal in all processes, or they would disagree
    facts = []
    for path, revision, kinds in paths:
        found = find_weights(path, revision, load.download_dir, kinds)
        if found is None:
            raise _unknown(f"which version of {path} this is")
        facts.append(found.digest)
        if found.changed_at > since - _SETTLED_S:
            log.warning(
                "kvdepot: %s changed while this engine was loading it, so its KV is shared with no other engine. "
                "Restart the engine to share it",
                path,
            )
            transfer = vllm_config.kv_transfer_config
            facts.append(f"private to {vllm_config.instance_id} {transfer.engine_id if transfer else ''}")
    return facts


def _has_text(value: object) -> bool:
    """Whether settings contain a text, which may be the name of a file."""
    if isinstance(value, dict | list | tuple):
        return any(_has_text(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str)


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"kvdepot cannot determine {what}. Set "
        '"kvdepot.weights_revision" in kv_connector_extra_config to a name for this version of the model, and change '
        "the name whenever the weights change"
    )
