"""The name of an engine's KV, equal for all engines that may share it, and configurations that are refused.

vLLM's code for a model changes the configuration as it builds the model, in the process that builds it: the scheduler's
process does not see it, and `--max-model-len auto` is fitted to the free memory afterwards. So an engine is described
when its executor is made (start.py), in the process of its scheduler, before any worker exists (`note_facts`). The
digest is kept in `instance_id`, a random name that vLLM gives each VllmConfig and hands to every worker with it.
Rejected: an attribute of its own (vLLM copies configurations by their fields and refuses others), and a key of
`kv_connector_extra_config` (a user may give one KVTransferConfig to two engines).

process.py asks for the name (`identify`) in the scheduler and in every worker when a connector is made. Facts that
differ between requests are in lora.py and requests.py.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import vllm
from blake3 import blake3
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvdepot.errors import ConfigError
from kvdepot.integrations.loaded import loaded_since
from kvdepot.integrations.vllm.environment import describe_code, describe_environment, platform_facts
from kvdepot.integrations.vllm.fields import describe_config
from kvdepot.integrations.vllm.groups import describe_groups, find_groups, holds_plain_numbers
from kvdepot.integrations.vllm.trust import describe_facts
from kvdepot.integrations.vllm.versions import (
    KV_FORMATS,
    corrections,
    installed_release,
    lookahead_tokens,
    notifies_of_sleep,
)
from kvdepot.integrations.weight_files import ALL_KINDS, SETTLED_S, Kind, find_weights, kinds_read, read_place
from kvdepot.protocol import wire
from kvdepot.protocol.model_names import name_model

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = init_logger(__name__)

_WEIGHTS = {".bin", ".gguf", ".pt", ".pth", ".safetensors"}
"""Suffixes of files that may lie beside a tokenizer and are no part of it."""
_NOTE = re.compile(r"-kvdepot-([0-9a-f]{32})-([0-9]+)-([0-9]+)-([0-9a-f]{32})((?:-[0-9a-f]{16})*)")


class Note(NamedTuple):
    """The facts that `note_facts` adds to a configuration, equal in all processes of an engine. They are missing if the
    engine's executor is not one of vLLM's.

    digest: of the engine's description. since: a Unix time before the engine read any file; 0.0: not known.
    token_bytes: approximate bytes of KV of a token on one rank; 0: not known. start: see `_describe_start`. weights:
    the first digits of the digests of weights that were there before any process loaded them; see `find_weights`.
    """

    digest: str = ""
    since: float = 0.0
    token_bytes: int = 0
    start: str = ""
    weights: tuple[str, ...] = ()


def note_facts(vllm_config: VllmConfig) -> None:
    """Describe an engine, and note the digest in its configuration. Raises ConfigError for what cannot be described."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "only engines with our connector are described"
    extra = transfer.kv_connector_extra_config
    below = [child.get("kv_connector_extra_config") or {} for child in extra.get("connectors", ())]  # MultiConnector's
    revision = next(filter(None, (each.get("kvdepot.weights_revision") for each in (extra, *below))), "")
    name = _NOTE.sub("", vllm_config.instance_id)
    digest, since_ms = describe_engine(vllm_config, revision), int(1000 * loaded_since())
    token_bytes, start = _estimate_token_bytes(vllm_config), _describe_start(vllm_config)
    weights = "".join(f"-{each[:16]}" for each in _digests(vllm_config))
    vllm_config.instance_id = f"{name}-kvdepot-{digest}-{since_ms}-{token_bytes}-{start}{weights}"


def read_note(vllm_config: VllmConfig) -> Note:
    found = _NOTE.search(vllm_config.instance_id)
    if found is None:
        return Note()
    return Note(found[1], int(found[2]) / 1000, int(found[3]), found[4], tuple(found[5].split("-")[1:]))


def _estimate_token_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of KV of a token on one rank, as if all layers kept keys and values of each token; 0: the model does not
    say.

    The specs of vLLM's KV cache would be exact, but with pipeline parallelism each process sees only its own layers'
    specs.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    is_quantized = vllm_config.cache_config.cache_dtype.startswith(("fp8", "int8"))
    try:
        parts = 1 if model.use_mla else 2
        numbers = parts * model.get_num_kv_heads(parallel) * model.get_head_size() * model.get_total_num_hidden_layers()
        item_bytes = 1 if is_quantized else model.dtype.itemsize
    except (AttributeError, NotImplementedError, TypeError, ValueError) as exc:  # models without attention
        log.debug("kvdepot: the KV of a token is not known: %s", exc)
        return 0
    ranks = parallel.pipeline_parallel_size * parallel.decode_context_parallel_size
    return int(numbers * item_bytes // ranks)


def _digests(vllm_config: VllmConfig) -> list[str]:
    """The digests of the weights that are on this host already; weights that are still to be downloaded have none."""
    try:
        paths = [(*path, load) for model, load in _models_of(vllm_config) for path in _paths(model, load)]
    except ConfigError:
        return []
    versions = [find_weights(path, revision, load.download_dir, kinds) for path, revision, kinds, load in paths]
    return [found.digest for found in versions if found is not None]


def _describe_start(vllm_config: VllmConfig) -> str:
    """A digest of other facts that may change KV on this host: the command, vLLM's package, and `describe_facts`. It is
    random for a program that is not in a file."""
    program, package = Path(sys.argv[0]), Path(str(vllm.__file__))
    if not program.is_file():
        return secrets.token_hex(16)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    facts = [boot, read_place(program), read_place(package), sys.argv, describe_facts(vllm_config)]
    return blake3(json.dumps(facts, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def name_writer(vllm_config: VllmConfig, files: str) -> str:
    """The name under which an engine stores: a digest, and what people call it. Equal in all its processes.

    Engines of one name compute the same KV as far as a host can know; an engine that is started again keeps its name.
    files: a digest of the paths of the engine's files on this host. If `files` is empty, or the engine is on several
    hosts, the name is new at each start.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    is_here = parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray"
    start = read_note(vllm_config).start if files and is_here else ""
    name = [start, files] if start else [vllm_config.instance_id, str(transfer and transfer.engine_id)]
    called = f"{Path(vllm_config.model_config.model).name} on {os.uname().nodename}"
    return f"{blake3(' '.join(name).encode()).hexdigest()[:32]} {called}"[: wire.MAX_CLIENT_NAME]


def describe_engine(vllm_config: VllmConfig, revision: str) -> str:
    """A digest of everything that is given before a model is built. revision: the user's name for this version of the
    model; empty: none."""
    models = [model for model, _ in _models_of(vllm_config)]
    facts = {
        "config": describe_config(vllm_config, revision),
        "environment": describe_environment(),
        "code": describe_code(vllm_config, models),
        "tokenizers": [_tokenizer(model) for model in models],
        "corrections": [corrections(model) for model in models],
    }
    text = json.dumps(facts, sort_keys=True)
    log.debug("kvdepot: configuration of this engine: %s", text)
    return blake3(text.encode()).hexdigest()[:32]


def _models_of(vllm_config: VllmConfig) -> list[tuple[ModelConfig, LoadConfig]]:
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
        return []  # for models with images and sounds, the tokenizer is described with their own files
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


# -- the name

_LOCAL_FORMATS = {
    "auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor", "dummy",
    "runai_streamer", "runai_streamer_sharded", "sharded_state",
}  # fmt: skip
"""Load formats that read only the model's own folder."""
_OLD_FORMATS = {"pt", "npcache"}
"""Local formats that read files which the other formats ignore where safetensors lie beside them."""
_TOWERS = {"ultravox": ("audio_model_id", "text_model_id")}
"""Fields of models' configurations that name repositories with more of their weights."""
_SPECULATION = {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "draft_model", "eagle", "eagle3", "mtp"}
"""Methods of speculation that are served: those without KV of their own (medusa and mlp_speculator exist before vLLM
0.33), and those whose KV at a position depends only on tokens up to `num_prefill_lookahead_tokens` behind it."""


def refuse_unserved(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for configurations whose KV would be cached wrongly or not at all."""
    groups, model, cache = find_groups(kv_cache_config), vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    method = speculative and speculative.method
    unserved = {
        "prefill context parallelism: vLLM does not say which of its ranks hold the KV of a decoded token. Start with "
        "--prefill-context-parallel-size 1": vllm_config.parallel_config.prefill_context_parallel_size > 1,
        f"sleep mode with vLLM {installed_release()}: a sleeping engine frees its KV's memory and wakes with other "
        "memory, and only vLLM 0.33 or newer notifies connectors. Start without --enable-sleep-mode": (
            model.enable_sleep_mode and not notifies_of_sleep()
        ),
        "pooling models that need every token of a prompt in one step (bidirectional attention, pooling by MEAN, CLS "
        "or STEP), as vLLM's own prefix cache does not: start without kvdepot": (
            model.runner_type == "pooling" and not model.is_prefix_caching_supported
        ),
        "engines whose weights are replaced while they run (weight_transfer_config): it is not notified, and would mix "
        "the KV of old and new weights": vllm_config.weight_transfer_config is not None,
        "states that are rebuilt from the last tokens: start without --use-replayssm and --use-kda-recoverssm": (
            cache.use_replayssm or cache.use_kda_recoverssm
        ),
        f"speculative decoding by {method}: on which tokens the KV of its drafter depends is not known. Supported "
        f"methods: {', '.join(sorted(_SPECULATION))}": speculative is not None and method not in _SPECULATION,
        "chained MTP modules with states (Mamba, gated delta net): vLLM offers a state before the KV of all modules is "
        "final. Start with fewer speculative tokens, or without kvdepot": (
            lookahead_tokens(vllm_config) > 1 and any(group.is_state for group in groups)
        ),
    }
    for what, is_asked_for in unserved.items():
        if is_asked_for:
            raise ConfigError(f"kvdepot does not support {what}")


class NamedEngine(NamedTuple):
    """The name of an engine's namespace, and a digest of the paths of its files on this host; empty: not known."""

    namespace: str
    files: str = ""


def identify(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, weights_revision: str) -> NamedEngine:
    """Everything that is fixed for an engine and may change KV bytes, as a hash with a readable name.

    Equal in the scheduler and every worker, and after a restart with the same weights and configuration. Reads the
    model's files: call it once the weights have been loaded. Raises ConfigError for versions that it cannot identify,
    unless weights_revision names them; weights_revision is added to the facts that can be identified.
    """
    weights = [_weights_or_name(vllm_config, model, weights_revision) for model in _models_of(vllm_config)]
    facts = {
        "format": _format(kv_cache_config),
        "engine": read_note(vllm_config).digest or describe_engine(vllm_config, weights_revision),
        "platform": platform_facts(),
        "groups": describe_groups(kv_cache_config),
        "layout": vllm_config.cache_config.kv_cache_layout,  # vLLM settles the layout after `note_facts`
        "weights": [named for named, _ in weights],
        "revision": weights_revision,
    }
    text = json.dumps(facts, sort_keys=True)
    log.debug("kvdepot: identity of this engine's KV: %s", text)
    name = name_model(Path(vllm_config.model_config.model).name, blake3(text.encode()).hexdigest())
    places = [places for _, places in weights]
    return NamedEngine(name, blake3(json.dumps(places).encode()).hexdigest() if all(places) else "")


def _weights_or_name(
    vllm_config: VllmConfig, model: tuple[ModelConfig, LoadConfig], revision: str
) -> tuple[list[str], list[str]]:
    """Facts of a model's weights, and their paths. If nothing can be known of the weights and the user has named their
    version: their name, and no paths."""
    try:
        return _weights(vllm_config, *model)
    except ConfigError:
        if not revision:
            raise
        return ["vouched for", model[0].model_weights or model[0].model, model[0].revision or ""], []


def _format(kv_cache_config: KVCacheConfig) -> list[str]:
    """Our number for vLLM's format of KV (versions.py) and, if the format may change unnoticed, vLLM's release."""
    release = installed_release()
    facts = [f"format {KV_FORMATS[release]}"]
    is_known = current_platform.is_cuda() or current_platform.is_cpu()
    if not is_known or not holds_plain_numbers(kv_cache_config):
        facts.append(f"vLLM {release}")
    return facts


def _paths(model: ModelConfig, load: LoadConfig) -> list[tuple[str, str | None, Collection[Kind]]]:
    """Where a model's weights, and the code and scales with them, are: path, revision and kinds of files. Raises
    ConfigError if that cannot be known."""
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
    return paths


def _weights(vllm_config: VllmConfig, model: ModelConfig, load: LoadConfig) -> tuple[list[str], list[str]]:
    """Facts that identify the version of a model's weights, and of the code and scales with them; and their paths on
    this host."""
    noted, facts, places = read_note(vllm_config), [], []
    since = noted.since or loaded_since()  # equal in all processes, or they would disagree
    for path, revision, kinds in _paths(model, load):
        found = find_weights(path, revision, load.download_dir, kinds, noted.weights)
        if found is None:
            raise _unknown(f"which version of {path} this is")
        facts.append(found.digest)
        places.append(found.place)
        if found.changed_at > since - SETTLED_S:
            told = "kvdepot: %s changed while this engine was loading it, so its KV is shared with no other engine. %s"
            log.warning(told, path, "Restart the engine to share it")
            transfer = vllm_config.kv_transfer_config
            facts.append(f"private to {vllm_config.instance_id} {transfer.engine_id if transfer else ''}")
    return facts, places


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
