"""The fields of vLLM's configuration that change no byte of KV, each with a reason. All others are identity.

Used by identity.py and lmcache/connector.py. Engines that differ in a field not listed here do not share KV, so a field
that a new version of vLLM adds costs hits, but never causes wrong bytes. List a field in `HARMLESS` only if it is known
to change no KV byte beyond the rounding that the composition of batches causes anyway. `NEUTRAL` lets releases with and
without a field share KV: list a field there only with a value for which the sources of both were seen to do the same.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property, partial
from inspect import Parameter, signature
from pathlib import Path
from types import FunctionType
from typing import Any

from kvdepot.errors import ConfigError

_SCHEDULING = "when tokens are computed, not what"
_FRONTEND = "text and requests before they are tokens"
_SAMPLING = "what is chosen from the logits; chosen tokens are part of a chunk's hash"
_STATE = "found out while the engine runs"
_PLACE = "which processes compute, and how they reach each other"
_MEMORY = "how much memory there is, not what is in it"
_LOGGING = "what is logged, measured or published"
_CAPTURE = "what is captured or cached of the same kernels"
_FILES = "the description of its files stands for it"

HARMLESS: dict[str, dict[str, tuple[str, ...]]] = {
    "VllmConfig": {
        _LOGGING: ("observability_config", "logging_config", "watchdog_config", "profiler_config", "kv_events_config"),
        "how KV is moved; connectors beside ours must load what this engine would compute": ("kv_transfer_config",),
        _SAMPLING: ("structured_outputs_config", "reasoning_config", "watermark_config"),
        "a random name": ("instance_id",),
        _SCHEDULING: ("shutdown_timeout",),
        "presets of fields that are described themselves": ("performance_mode",),
        "made from fields and files that are described themselves; loading a model changes it": ("quant_config",),
    },
    "ModelConfig": {
        _FILES: ("model", "model_weights", "revision", "_hf_config_revision"),
        "described by its files, if it is not the model's own (identity.py)": ("tokenizer",),
        "described with the tokenizer": ("tokenizer_revision",),
        _FRONTEND: (
            "skip_tokenizer_init", "served_model_name", "allowed_local_media_path", "allowed_media_domains",
            "renderer_num_workers",
        ),
        "names a version of code, which is described by its files or by its commit": ("code_revision",),
        "what was read from it is described": ("hf_config_path",),
        "a credential": ("hf_token",),
        "sets fields of the compilation that are described themselves": ("enforce_eager",),
        _SAMPLING: ("return_sampling_mask", "max_logprobs", "logprobs_mode", "use_fp64_gumbel", "logits_processors"),
        "made from the model's class, which is vLLM's own or a plugin's": ("_model_info",),
        "says where the pooler's settings come from; they are described themselves": ("_pooler_config_sources",),
        _STATE: ("_supports_multimodal_inputs_cache", "_supports_multimodal_inputs_cached", "config_updated"),
        "made from hf_config, which is described itself": ("model_arch_config",),
        "what was asked for; the length that the model is built with is described": ("original_max_model_len",),
    },
    "MultiModalConfig": {
        _FILES: ("mm_encoder_fp8_scale_path",),
        _FRONTEND: ("limit_per_prompt", "interleave_mm_strings"),
        _MEMORY: (
            "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
            "mm_ipc_gpu_memory_gb", "skip_mm_profiling",
        ),
        _PLACE: ("mm_tensor_ipc",),
    },
    "CacheConfig": {
        _MEMORY: (
            "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_offloading_size",
            "kv_offloading_backend",
        ),
        _STATE: (
            "num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency",
            "effective_attention_block_size", "_block_size_resolved", "hash_block_size", "cache_hit_alignment_tokens",
        ),
        "the block size itself is described": ("user_specified_block_size", "user_specified_mamba_block_size"),
        "what the engine keeps for itself": (
            "enable_prefix_caching", "prefix_cache_retention_interval", "prefix_match_unit",
        ),
        "the engine's own hashes; images without a content hash are refused one by one": ("prefix_caching_hash_algo",),
    },
    "ParallelConfig": {
        _PLACE: (
            "data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_rank_local",
            "data_parallel_index", "data_parallel_master_ip", "data_parallel_rpc_port", "data_parallel_master_port",
            "data_parallel_backend", "data_parallel_external_lb", "data_parallel_hybrid_lb",
            "max_parallel_loading_workers", "ray_runtime_env", "placement_group", "distributed_executor_backend",
            "master_addr", "master_port", "node_rank", "nnodes", "numa_bind", "numa_bind_nodes", "numa_bind_cpus",
            "assigned_physical_gpu_ids", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "rank",
            "_data_parallel_master_port_list", "_coord_store_port", "_api_process_count", "_api_process_rank",
            "enable_fault_tolerance", "fault_tolerance_config",
        ),
        _SCHEDULING: ("dp_sync_interval",),
        "how replicas agree on a step; set by async_scheduling": ("disable_nccl_for_dp_synchronization",),
        _LOGGING: ("ray_workers_use_nsight",),
        "the product of parallel sizes that are described themselves": ("world_size",),
    },
    "SchedulerConfig": {
        _SCHEDULING: (
            "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs", "max_num_active_seqs",
            "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_num_queued_reqs",
            "max_num_queued_tokens", "enable_chunked_prefill", "max_num_encoder_input_tokens", "policy",
            "scheduler_reserve_full_isl", "watermark", "prefill_schedule_interval", "async_scheduling",
        ),
        _MEMORY: ("encoder_cache_size",),
        _FRONTEND: ("stream_interval",),
    },
    "KernelConfig": {
        "when kernels are compiled, not which": ("enable_jit_warmup",),
    },
    "AttentionConfig": {
        "how much is computed at a time": ("sparse_mla_prefill_workspace_factor",),
    },
    "LoadConfig": {
        _FILES: ("download_dir",),
        "how files are read": (
            "safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size",
        ),
        _LOGGING: ("use_tqdm_on_load",),
    },
    "LoRAConfig": {
        _MEMORY: ("max_loras", "max_cpu_loras"),
    },
    "SpeculativeConfig": {
        "the drafter's own configuration and files are described": ("model",),
        _FILES: ("revision",),
        "names a version of code, which is described by its files or by its commit": ("code_revision",),
    },
    "CompilationConfig": {
        _LOGGING: ("debug_dump_path",),
        _CAPTURE: (
            "cache_dir", "local_cache_dir", "compile_cache_save_format", "cudagraph_mode", "cudagraph_num_of_warmups",
            "cudagraph_capture_sizes", "cudagraph_copy_inputs", "max_cudagraph_capture_size", "cudagraph_mm_encoder",
            "encoder_cudagraph_token_budgets", "encoder_cudagraph_max_vision_items_per_batch",
            "encoder_cudagraph_max_frames_per_batch", "cudagraph_decoder_replay",
            "decoder_replay_cudagraph_capture_sizes", "decoder_replay_trim_threshold", "compile_sizes",
            "compile_ranges_endpoints", "splitting_ops",
        ),
        _STATE: (
            "enabled_custom_ops", "disabled_custom_ops", "traced_files", "compilation_time", "encoder_compilation_time",
            "static_forward_context", "static_all_moe_layers",
        ),
    },
    "ECTransferConfig": {
        "a random name": ("engine_id",),
        _PLACE: ("ec_buffer_device", "ec_role", "ec_ip", "ec_port"),
        _MEMORY: ("ec_buffer_size",),
    },
    "PreTrainedConfig": {
        _FILES: ("_name_or_path", "_commit_hash"),
        "which version wrote or read the file": ("transformers_version",),
        "what is returned; releases of transformers differ in which models have it": ("output_router_logits",),
    },
}  # fmt: skip
"""Fields and other attributes by the class that has them and the reason why engines may differ in them and share KV."""

NEUTRAL: dict[str, dict[str, tuple[object, str]]] = {
    "VllmConfig": {
        "aux_output_config": ({}, "since 0.31: what is returned beside tokens; empty: none of its fields is set")
    },
    "AuxOutputConfig": {
        "enable_return_routed_experts": (False, "moved here in 0.31: nothing is returned"),
        "max_bytes": (None, "since 0.31: how much is returned"),
    },
    "ModelConfig": {
        "enable_return_routed_experts": (False, "until 0.30: nothing is returned"),
        "is_submodel_config": (False, "since 0.31: a part of a model; its own configuration is described"),
        "sleep_preserve_parameter_names": ([], "since 0.31: sleep as before"),
        "sleep_mode_offload_cudagraph": (False, "since 0.32: sleep as before"),
    },
    "CacheConfig": {
        "swa_bounded_replay": (True, "since 0.31: a group that it changes is described as replayed (groups.py)"),
        "enable_mamba_fine_grained_prefix_cache": (False, "until 0.30, then renamed: which states the engine keeps"),
        "enable_mamba_shared_prefix_checkpoint": (False, "since 0.31, renamed: which states the engine keeps"),
        "simple_cpu_offload_num_blocks": (None, "since 0.33: another connector's memory"),
    },
    "ParallelConfig": {
        "sd_worker_cls": ("auto", "until 0.31, without effect: no code reads it"),
        "enable_hc_sp": (False, "since 0.32: each rank computes all, as before"),
        "enable_shm_tensor_arena": (False, "since 0.32: how inputs reach workers"),
    },
    "EPLBConfig": {"enable_migration_batching": (False, "since 0.32: experts move as before")},
    "KernelConfig": {
        "enable_rocm_segmented_attn_autotune": (False, "since 0.32: kernels are chosen as before"),
        "monokernel": (False, "since 0.33: kernels of before"),
    },
    "AttentionConfig": {
        "indexer_sparse_logits": (False, "since 0.31: the indexer computes all logits, as before"),
        "tokenspeed_mla_min_split_kv": (1, "since 0.32: scheduled as before"),
        "indexer_tp_shard_min_rows": (65536, "since 0.33: which rank scores a row"),
        "trtllm_ragged_backend": ("trtllm-gen", "since 0.33: the kernels of before"),
        "minimax_m3_indexer_cp": (False, "since 0.33: each rank scores all, as before"),
    },
    "PassConfig": {
        "enable_sp": (False, "until 0.31: no sequence parallelism"),
        "fuse_gemm_comms": (False, "until 0.31: part of sequence parallelism"),
        "sp_min_token_num": (None, "until 0.31: part of sequence parallelism"),
    },
    "LoRAConfig": {"max_lora_cls_labels": (None, "since 0.31: classification heads are as large as before")},
    "SpeculativeConfig": {
        "disable_lookahead_block_hashes": (False, "since 0.33: the engine's own hashes; with connectors as before"),
        "draft_lm_head_quantization": (None, "since 0.33: not quantized, as before"),
        "xpress_topc": (None, "since 0.33: as the draft's files say"),
        "fly_window_size": (None, "since 0.33: which drafts are accepted; tokens are part of a chunk's hash"),
        "fly_entropy_threshold": (0.3, "since 0.33: which drafts are accepted; tokens are part of a chunk's hash"),
        "fly_entropy_top_k": (3, "since 0.33: which drafts are accepted; tokens are part of a chunk's hash"),
    },
}
"""Fields that only some of the served releases have (versions.py), by the class that declares them: each with the value
at which vLLM does the same as releases without the field, and the reason. With that value, a field is left out, so that
an upgrade of vLLM keeps its cache; with any other value it is identity. Values are as described, in JSON."""

_OF_TRANSFORMERS = {name for names in HARMLESS["PreTrainedConfig"].values() for name in names}
_MAX_DEPTH = 12


def describe_config(config: object, revision: str = "") -> object:
    """Everything in a configuration that is not known to be harmless, as JSON values: equal in every process.

    revision: the user's name for this version of the model, which stands for values that cannot be described
    (functions). Without it, such values raise ConfigError, which names the field.
    """
    return _describe(config, type(config).__name__, revision, 0)


def _describe_bound(bound: partial[Any], inner: Callable[[object, object], object]) -> object:
    """Describe a function with bound arguments; like the function itself if the arguments are its own defaults."""
    function = inner("func", bound.func)
    own: dict[str, object] = {}
    with suppress(ValueError, TypeError):  # raised for built-in functions
        own = {name: each.default for name, each in signature(bound.func).parameters.items()}
    keywords = {name: item for name, item in bound.keywords.items() if item != own.get(name, Parameter.empty)}
    if not bound.args and not keywords:
        return function
    return [function, inner("args", bound.args), inner("keywords", keywords)]


def _describe(value: object, path: str, revision: str, depth: int) -> object:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if depth > _MAX_DEPTH:
        raise ConfigError(f"kvdepot: {path} is nested more than {_MAX_DEPTH} levels deep")

    def inner(name: object, item: object) -> object:
        return _describe(item, f"{path}.{name}", revision, depth + 1)

    match value:
        case enum.Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case bytes() | Path():
            return str(value)
        case type():
            return f"{value.__module__}.{value.__qualname__}"
        case FunctionType() if value.__module__.startswith("vllm.") and value.__closure__ is None:
            return f"{value.__module__}.{value.__qualname__}"  # of vLLM, such as a draft model's `hf_overrides`
        case partial():
            return _describe_bound(value, inner)
        case Mapping():
            return {str(key): inner(key, item) for key, item in value.items()}
        case Set():
            return sorted(json.dumps(inner("*", item), sort_keys=True) for item in value)
        case Sequence():
            return [inner(number, item) for number, item in enumerate(value)]
    module = type(value).__module__.partition(".")[0]
    if module == "torch":
        return str(value)  # dtypes and devices
    if hasattr(value, "to_dict") and hasattr(value, "to_json_string"):  # a configuration of transformers
        return inner(type(value).__name__, _without(_OF_TRANSFORMERS, value.to_dict()))
    fields = dict(_fields(value))
    if fields or dataclasses.is_dataclass(value):
        harmless = harmless_fields(type(value))
        described = {name: inner(name, item) for name, item in sorted(fields.items()) if name not in harmless}
        return _without_neutral(type(value), described)
    if revision:
        return "vouched for"
    raise ConfigError(
        f"kvdepot cannot determine how {path} affects KV: it is {type(value).__name__} {value!r:.80}. Set "
        '"kvdepot.weights_revision" in kv_connector_extra_config to a name for this version of the model, and change '
        "the name whenever the model changes"
    )


def _fields(value: object) -> Iterator[tuple[str, object]]:
    """Names and values of an object's fields and other attributes; none for functions and the like.

    Cached properties are left out: they are made of other attributes, and are there only once they were used.
    """
    if callable(value) and not dataclasses.is_dataclass(value):
        return
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = dict.fromkeys([*(field.name for field in fields), *getattr(value, "__dict__", ())])
    for name in names:
        if hasattr(value, name) and not isinstance(getattr(type(value), name, None), cached_property):
            yield name, getattr(value, name)


def _without(names: Set[str], value: object) -> object:
    """A configuration's dictionary without these keys, also in all dictionaries nested in it.

    Keys whose value is None are left out, too: releases of transformers differ in the unset attributes that they list.
    `hf_overrides`, which may set an attribute to None, are described by themselves.
    """
    if isinstance(value, Mapping):
        return {key: _without(names, item) for key, item in value.items() if key not in names and item is not None}
    return value


def _without_neutral(cls: type, described: Mapping[str, object]) -> dict[str, object]:
    neutral = {name: each[0] for base in cls.__mro__ for name, each in NEUTRAL.get(base.__name__, {}).items()}
    return {
        name: value
        for name, value in described.items()
        if name not in neutral or json.dumps(value) != json.dumps(neutral[name])  # 1 is not True, nor 1.0
    }


def harmless_fields(cls: type) -> set[str]:
    """Names of the harmless fields of a class, and of those that it inherits."""
    reasons = (names for base in cls.__mro__ for names in HARMLESS.get(base.__name__, {}).values())
    return {name for names in reasons for name in names}
