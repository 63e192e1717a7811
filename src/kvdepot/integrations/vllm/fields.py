"""The fields of vLLM's configuration that change no byte of KV, each with a reason. All others are identity.

Used by identity.py. Engines that differ in a field not listed here do not share KV, so a field that a new version of
vLLM adds costs hits, but never causes wrong bytes. List a field in `HARMLESS` only if it is known to change no KV byte
beyond the rounding that the composition of batches causes anyway; and in `NEUTRAL`, so that releases with and without
it share, only with a value that was seen, in the releases' sources, to mean what releases without the field do.
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

__all__ = ["HARMLESS", "NEUTRAL", "describe_config"]

_SCHEDULING = "when tokens are computed, not what"
_FRONTEND = "text and requests before they are tokens"
_SAMPLING = "what is chosen from the logits; chosen tokens are part of a chunk's hash"
_STATE = "found out while the engine runs"
_PLACE = "which processes compute, and how they reach each other"
_MEMORY = "how much memory there is, not what is in it"
_TELLING = "what is logged, measured or published"
_CAPTURE = "what is captured or cached of the same kernels"
_FILES = "the description of its files stands for it"

HARMLESS: dict[str, dict[str, str]] = {
    "VllmConfig": {
        "observability_config": _TELLING,
        "logging_config": _TELLING,
        "watchdog_config": _TELLING,
        "profiler_config": _TELLING,
        "kv_events_config": _TELLING,
        "kv_transfer_config": "how KV is moved; connectors beside ours must load what this engine would compute",
        "structured_outputs_config": _SAMPLING,
        "reasoning_config": _SAMPLING,
        "watermark_config": _SAMPLING,
        "instance_id": "a random name",
        "shutdown_timeout": _SCHEDULING,
        "performance_mode": "presets of fields that are described themselves",
        "quant_config": "made from fields and files that are described themselves; loading a model changes it",
    },
    "ModelConfig": {
        "model": _FILES,
        "model_weights": _FILES,
        "tokenizer": "described by its files, if it is not the model's own (facts.py)",
        "tokenizer_revision": "described with the tokenizer",
        "skip_tokenizer_init": _FRONTEND,
        "served_model_name": _FRONTEND,
        "allowed_local_media_path": _FRONTEND,
        "allowed_media_domains": _FRONTEND,
        "renderer_num_workers": _FRONTEND,
        "revision": _FILES,
        "code_revision": "names a version of code, which is described by its files or by its commit",
        "hf_config_path": "what was read from it is described",
        "hf_token": "a credential",
        "enforce_eager": "sets fields of the compilation that are described themselves",
        "return_sampling_mask": _SAMPLING,
        "max_logprobs": _SAMPLING,
        "logprobs_mode": _SAMPLING,
        "use_fp64_gumbel": _SAMPLING,
        "logits_processors": _SAMPLING,
        "_hf_config_revision": _FILES,
        "_model_info": "made from the model's class, which is vLLM's own or a plugin's",
        "_pooler_config_sources": "says where the pooler's settings come from; they are described themselves",
        "_supports_multimodal_inputs_cache": _STATE,
        "_supports_multimodal_inputs_cached": _STATE,
        "config_updated": _STATE,
        "model_arch_config": "made from hf_config, which is described itself",
        "original_max_model_len": "what was asked for; the length that the model is built with is described",
    },
    "MultiModalConfig": {
        "mm_encoder_fp8_scale_path": _FILES,
        "limit_per_prompt": _FRONTEND,
        "interleave_mm_strings": _FRONTEND,
        "mm_processor_cache_gb": _MEMORY,
        "mm_processor_cache_type": _MEMORY,
        "mm_shm_cache_max_object_size_mb": _MEMORY,
        "mm_ipc_gpu_memory_gb": _MEMORY,
        "mm_tensor_ipc": _PLACE,
        "skip_mm_profiling": _MEMORY,
    },
    "CacheConfig": {
        "gpu_memory_utilization": _MEMORY,
        "kv_cache_memory_bytes": _MEMORY,
        "num_gpu_blocks_override": _MEMORY,
        "num_gpu_blocks": _STATE,
        "num_cpu_blocks": _STATE,
        "kv_cache_size_tokens": _STATE,
        "kv_cache_max_concurrency": _STATE,
        "effective_attention_block_size": _STATE,
        "_block_size_resolved": _STATE,
        "user_specified_block_size": "the block size itself is described",
        "user_specified_mamba_block_size": "the block size itself is described",
        "hash_block_size": _STATE,
        "cache_hit_alignment_tokens": _STATE,
        "enable_prefix_caching": "what the engine keeps for itself",
        "prefix_caching_hash_algo": "the engine's own hashes; images without a content hash are refused one by one",
        "prefix_cache_retention_interval": "what the engine keeps for itself",
        "prefix_match_unit": "what the engine keeps for itself",
        "kv_offloading_size": _MEMORY,
        "kv_offloading_backend": _MEMORY,
    },
    "ParallelConfig": {
        "data_parallel_size": _PLACE,
        "data_parallel_size_local": _PLACE,
        "data_parallel_rank": _PLACE,
        "data_parallel_rank_local": _PLACE,
        "data_parallel_index": _PLACE,
        "data_parallel_master_ip": _PLACE,
        "data_parallel_rpc_port": _PLACE,
        "data_parallel_master_port": _PLACE,
        "data_parallel_backend": _PLACE,
        "data_parallel_external_lb": _PLACE,
        "data_parallel_hybrid_lb": _PLACE,
        "dp_sync_interval": _SCHEDULING,
        "disable_nccl_for_dp_synchronization": "how replicas agree on a step; set by async_scheduling",
        "max_parallel_loading_workers": _PLACE,
        "ray_workers_use_nsight": _TELLING,
        "ray_runtime_env": _PLACE,
        "placement_group": _PLACE,
        "distributed_executor_backend": _PLACE,
        "master_addr": _PLACE,
        "master_port": _PLACE,
        "node_rank": _PLACE,
        "nnodes": _PLACE,
        "numa_bind": _PLACE,
        "numa_bind_nodes": _PLACE,
        "numa_bind_cpus": _PLACE,
        "assigned_physical_gpu_ids": _PLACE,
        "distributed_timeout_seconds": _PLACE,
        "cpu_distributed_timeout_seconds": _PLACE,
        "rank": _PLACE,
        "world_size": "the product of parallel sizes that are described themselves",
        "_data_parallel_master_port_list": _PLACE,
        "_coord_store_port": _PLACE,
        "_api_process_count": _PLACE,
        "_api_process_rank": _PLACE,
        "enable_fault_tolerance": _PLACE,
        "fault_tolerance_config": _PLACE,
    },
    "SchedulerConfig": {
        "max_num_batched_tokens": _SCHEDULING,
        "max_num_scheduled_tokens": _SCHEDULING,
        "max_num_seqs": _SCHEDULING,
        "max_num_active_seqs": _SCHEDULING,
        "long_prefill_token_threshold": _SCHEDULING,
        "long_prefill_token_threshold_adaptive": _SCHEDULING,
        "max_num_queued_reqs": _SCHEDULING,
        "max_num_queued_tokens": _SCHEDULING,
        "enable_chunked_prefill": _SCHEDULING,
        "max_num_encoder_input_tokens": _SCHEDULING,
        "encoder_cache_size": _MEMORY,
        "policy": _SCHEDULING,
        "scheduler_reserve_full_isl": _SCHEDULING,
        "watermark": _SCHEDULING,
        "prefill_schedule_interval": _SCHEDULING,
        "async_scheduling": _SCHEDULING,
        "stream_interval": _FRONTEND,
    },
    "KernelConfig": {
        "enable_jit_warmup": "when kernels are compiled, not which",
    },
    "AttentionConfig": {
        "sparse_mla_prefill_workspace_factor": "how much is computed at a time",
    },
    "LoadConfig": {
        "download_dir": _FILES,
        "safetensors_load_strategy": "how files are read",
        "safetensors_prefetch_num_threads": "how files are read",
        "safetensors_prefetch_block_size": "how files are read",
        "use_tqdm_on_load": _TELLING,
    },
    "LoRAConfig": {
        "max_loras": _MEMORY,
        "max_cpu_loras": _MEMORY,
    },
    "SpeculativeConfig": {
        "model": "the drafter's own configuration and files are described",
        "revision": _FILES,
        "code_revision": "names a version of code, which is described by its files or by its commit",
    },
    "CompilationConfig": {
        "debug_dump_path": _TELLING,
        "cache_dir": _CAPTURE,
        "local_cache_dir": _CAPTURE,
        "compile_cache_save_format": _CAPTURE,
        "cudagraph_mode": _CAPTURE,
        "cudagraph_num_of_warmups": _CAPTURE,
        "cudagraph_capture_sizes": _CAPTURE,
        "cudagraph_copy_inputs": _CAPTURE,
        "max_cudagraph_capture_size": _CAPTURE,
        "cudagraph_mm_encoder": _CAPTURE,
        "encoder_cudagraph_token_budgets": _CAPTURE,
        "encoder_cudagraph_max_vision_items_per_batch": _CAPTURE,
        "encoder_cudagraph_max_frames_per_batch": _CAPTURE,
        "cudagraph_decoder_replay": _CAPTURE,
        "decoder_replay_cudagraph_capture_sizes": _CAPTURE,
        "decoder_replay_trim_threshold": _CAPTURE,
        "compile_sizes": _CAPTURE,
        "compile_ranges_endpoints": _CAPTURE,
        "splitting_ops": _CAPTURE,
        "enabled_custom_ops": _STATE,
        "disabled_custom_ops": _STATE,
        "traced_files": _STATE,
        "compilation_time": _STATE,
        "encoder_compilation_time": _STATE,
        "static_forward_context": _STATE,
        "static_all_moe_layers": _STATE,
    },
    "ECTransferConfig": {
        "engine_id": "a random name",
        "ec_buffer_device": _PLACE,
        "ec_buffer_size": _MEMORY,
        "ec_role": _PLACE,
        "ec_ip": _PLACE,
        "ec_port": _PLACE,
    },
    "PreTrainedConfig": {
        "_name_or_path": _FILES,
        "_commit_hash": _FILES,
        "transformers_version": "which version wrote or read the file",
        "output_router_logits": "what is returned; releases of transformers differ in which models have it",
    },
}
"""Fields and other attributes by the class that has them, with the reason why engines that differ in them may share
KV."""

NEUTRAL: dict[str, dict[str, tuple[object, str]]] = {
    "VllmConfig": {
        "aux_output_config": ({}, "since 0.31: what is returned beside tokens; empty: none of its fields is set"),
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
    "EPLBConfig": {
        "enable_migration_batching": (False, "since 0.32: experts move as before"),
    },
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
    "LoRAConfig": {
        "max_lora_cls_labels": (None, "since 0.31: classification heads are as large as before"),
    },
    "SpeculativeConfig": {
        "disable_lookahead_block_hashes": (False, "since 0.33: the engine's own hashes; with connectors as before"),
        "draft_lm_head_quantization": (None, "since 0.33: not quantized, as before"),
        "xpress_topc": (None, "since 0.33: as the draft's files say"),
        "fly_window_size": (None, "since 0.33: which drafts are accepted; tokens are part of a chunk's hash"),
        "fly_entropy_threshold": (0.3, "since 0.33: which drafts are accepted; tokens are part of a chunk's hash"),
        "fly_entropy_top_k": (3, "since 0.33: which drafts are accepted; tokens are part of a chunk's hash"),
    },
}
"""Fields that not all releases have that are served (versions.py), by the class that declares them: each with the value
at which it does what releases without it do, and why. With that value a field is left out, so that an upgrade of vLLM
keeps its cache; with any other it is identity. Values are as described, in JSON."""

_MAX_DEPTH = 12


def describe_config(config: object, vouched: bool) -> object:
    """Everything in a configuration that is not known to be harmless, as JSON values: equal in every process.

    vouched: the user has named this model's version, which stands for values that cannot be described (functions).
    Otherwise such values raise ConfigError, which names the field.
    """
    return _describe(config, type(config).__name__, vouched, 0)


def _describe_bound(bound: partial[Any], inner: Callable[[object, object], object]) -> object:
    """A function with arguments that are bound to it; as itself, where those are its own defaults."""
    function = inner("func", bound.func)
    own: dict[str, object] = {}
    with suppress(ValueError, TypeError):  # of a function that is built in
        own = {name: each.default for name, each in signature(bound.func).parameters.items()}
    keywords = {name: item for name, item in bound.keywords.items() if item != own.get(name, Parameter.empty)}
    if not bound.args and not keywords:
        return function
    return [function, inner("args", bound.args), inner("keywords", keywords)]


def _describe(value: object, path: str, vouched: bool, depth: int) -> object:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if depth > _MAX_DEPTH:
        raise ConfigError(f"kvdepot: {path} is nested more than {_MAX_DEPTH} levels deep")

    def inner(name: object, item: object) -> object:
        return _describe(item, f"{path}.{name}", vouched, depth + 1)

    match value:
        case enum.Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case bytes() | Path():
            return str(value)
        case type():
            return f"{value.__module__}.{value.__qualname__}"
        case FunctionType() if value.__module__.startswith("vllm.") and value.__closure__ is None:
            return f"{value.__module__}.{value.__qualname__}"  # vLLM's own, such as a draft model's `hf_overrides`
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
        return inner(type(value).__name__, _without(HARMLESS["PreTrainedConfig"], value.to_dict()))
    fields = dict(_fields(value))
    if fields or dataclasses.is_dataclass(value):
        harmless = _harmless(type(value))
        told = {name: inner(name, item) for name, item in sorted(fields.items()) if name not in harmless}
        return _without_neutral(type(value), told)
    if vouched:
        return "vouched for"
    raise ConfigError(
        f"kvdepot cannot determine how {path} affects KV: it is {type(value).__name__} {value!r:.80}. Set "
        '"kvdepot.weights_revision" in kv_connector_extra_config to a name for this version of the model, and change '
        "the name whenever the model changes"
    )


def _fields(value: object) -> Iterator[tuple[str, object]]:
    """Names and values of an object's fields and other attributes; none for functions and the like.

    Cached properties are left out: they are made of other attributes, and are there only once somebody has asked.
    """
    if callable(value) and not dataclasses.is_dataclass(value):
        return
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = dict.fromkeys([*(field.name for field in fields), *getattr(value, "__dict__", ())])
    for name in names:
        if hasattr(value, name) and not isinstance(getattr(type(value), name, None), cached_property):
            yield name, getattr(value, name)


def _without(names: Mapping[str, str], value: object) -> object:
    """A configuration's dictionary without these keys, and so all dictionaries nested in it.

    Nor with keys that are None: releases of transformers differ in which they tell of those that are not set. Who sets
    one to None by `hf_overrides` is told apart by those.
    """
    if isinstance(value, Mapping):
        return {key: _without(names, item) for key, item in value.items() if key not in names and item is not None}
    return value


def _without_neutral(cls: type, told: Mapping[str, object]) -> dict[str, object]:
    neutral = {name: each[0] for base in cls.__mro__ for name, each in NEUTRAL.get(base.__name__, {}).items()}
    return {
        name: value
        for name, value in told.items()
        if name not in neutral or json.dumps(value) != json.dumps(neutral[name])  # 1 is not True, nor 1.0
    }


def _harmless(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in HARMLESS.get(base.__name__, ())}
