"""The surroundings of an engine that may change its KV: environment variables, the processor, and code of others.

Used by identity.py (and, for the processor, by lmcache/). All of vLLM's variables are identity, except those that are
listed here with a reason. Only variables that are set are described: the default of an unset one belongs to vLLM's
release (`KV_FORMATS` in versions.py), so that a release that adds variables shares KV with earlier releases.

Code of others: plugins, workers, and models that are registered elsewhere. vLLM's own code is described by the
release's KV format, and code in a model's folder by the model's files. Invariant: code is described by the contents of
its package's files, as a version may stay the same while they change (an editable install).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

HARMLESS_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "how vLLM was built": (
        "CMAKE_BUILD_TYPE", "CUDA_HOME", "NVCC_THREADS", "VERBOSE", "VLLM_BUILD_COMMIT", "VLLM_BUILD_PIPELINE",
        "VLLM_BUILD_URL", "VLLM_DOCKER_BUILD_CONTEXT", "VLLM_IMAGE_TAG", "VLLM_MAIN_CUDA_VERSION",
        "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX", "VLLM_TARGET_DEVICE", "VLLM_USE_PRECOMPILED",
        "VLLM_USE_PRECOMPILED_RUST",
    ),
    "where libraries are": (
        "VLLM_CUDART_SO_PATH", "VLLM_HAS_FLASHINFER_CUBIN", "VLLM_NCCL_INCLUDE_PATH", "VLLM_NCCL_SO_PATH",
    ),
    "which plugins are loaded: they are described themselves": ("VLLM_PLUGINS",),
    "which layout KV has: the one that results is described itself": ("VLLM_KV_CACHE_LAYOUT",),
    "how other connectors and caches move data": (
        "MOONCAKE_PREFERRED_SEGMENT", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "VLLM_EC_SIDE_CHANNEL_HOST",
        "VLLM_EC_SIDE_CHANNEL_PORT", "VLLM_GPU_NIC_PCIE_MAPPING", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
        "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "VLLM_MOONCAKE_BOOTSTRAP_PORT",
        "VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO", "VLLM_MOONCAKE_LOAD_RECV_THREADS",
        "VLLM_MOONCAKE_STORE_TIER_LOG", "VLLM_NIC_SELECTION_VARS", "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_P2P_HANDSHAKE_TIMEOUT_S", "VLLM_P2P_IDLE_TIMEOUT_S", "VLLM_P2P_MAX_PEERS", "VLLM_P2P_SIDE_CHANNEL_HOST",
        "VLLM_P2P_SIDE_CHANNEL_PORT", "VLLM_USE_SIMPLE_KV_OFFLOAD",
    ),
    "text and requests before they are tokens, and after": (
        "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT", "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "VLLM_ENABLE_COHERE_API", "VLLM_ENABLE_RESPONSES_API_STORE",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING", "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS",
        "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS", "VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_LORA_RESOLVER_HF_REPO_LIST",
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "VLLM_MAX_COMPLETION_PROMPTS", "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB",
        "VLLM_MAX_NUM_BAD_WORDS", "VLLM_MAX_N_SEQUENCES", "VLLM_MAX_STOP_STRINGS", "VLLM_REGEX_COMPILATION_TIMEOUT_S",
        "VLLM_RUST_FRONTEND_PATH", "VLLM_SYSTEM_START_DATE", "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY",
        "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS", "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT", "VLLM_USE_FASTOKENS",
        "VLLM_USE_RUST_BENCH", "VLLM_USE_RUST_FRONTEND", "VLLM_V1_USE_OUTLINES_CACHE", "VLLM_XGRAMMAR_CACHE_MB",
    ),
    "what is chosen from the logits; chosen tokens are part of a chunk's hash": (
        "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN", "VLLM_COMPUTE_NANS_IN_LOGITS", "VLLM_RAISE_ON_LOGIT_NANS",
        "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_XPU_USE_SAMPLER_KERNEL",
    ),
    "what is logged, measured or published": (
        "VLLM_CONFIGURE_LOGGING", "VLLM_CUSTOM_SCOPES_FOR_PROFILING", "VLLM_DEBUG_MFU_METRICS", "VLLM_DEBUG_WORKSPACE",
        "VLLM_DISABLE_LOG_LOGO", "VLLM_GC_DEBUG", "VLLM_GPU_SYNC_CHECK", "VLLM_LOG_BATCHSIZE_INTERVAL",
        "VLLM_LOG_MODEL_INSPECTION", "VLLM_NVTX_SCOPES_FOR_PROFILING", "VLLM_PATTERN_MATCH_DEBUG",
        "VLLM_PROCESS_NAME_PREFIX", "VLLM_TRACE_FUNCTION", "VLLM_USAGE_SOURCE", "VLLM_XLA_CHECK_RECOMPILATION",
    ),
    "which processes compute, and how they reach each other": (
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES", "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES", "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
        "RAY_EXPERIMENTAL_NOSET_RBLN_RT_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE",
        "VLLM_ELASTIC_EP_DRAIN_REQUESTS", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_LOOPBACK_IP",
        "VLLM_MQ_MAX_CHUNK_BYTES_MB", "VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "VLLM_RAY_BUNDLE_INDICES",
        "VLLM_RAY_DP_PACK_STRATEGY", "VLLM_RAY_DP_PLACEMENT_NODE_IPS", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY",
        "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "VLLM_RAY_PER_WORKER_GPUS", "VLLM_SKIP_P2P_CHECK",
        "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE", "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "VLLM_USE_RAY_WRAPPED_PP_COMM", "VLLM_USE_SPINLOOP_EXT",
        "VLLM_WSL2_ENABLE_PIN_MEMORY",
    ),
    "how much memory there is, and where, not what is in it": (
        "VLLM_DEEPEP_BUFFER_SIZE_MB", "VLLM_FASTSAFETENSORS_QUEUE_SIZE", "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE",
        "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY", "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA",
    ),
    "what is captured, warmed up or cached of the same kernels": (
        "VLLM_COMPILE_CACHE_SAVE_FORMAT", "VLLM_DEEP_GEMM_WARMUP", "VLLM_DISABLE_COMPILE_CACHE",
        "VLLM_ENABLE_CUDAGRAPH_GC", "VLLM_USE_AOT_COMPILE", "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "VLLM_USE_MEGA_AOT_ARTIFACT",
    ),
}  # fmt: skip
"""Variables among vLLM's `compile_factors()` that engines may differ in and still share KV, by the reason why.
vLLM leaves others out itself: paths, ports, time limits, credentials."""

_LEFT_OUT = (
    "VLLM_CPU_MOE_PREPACK", "VLLM_MEDIA_CONNECTOR", "VLLM_TEST_FORCE_LOAD_FORMAT", "VLLM_VIDEO_LOADER_BACKEND",
    "VLLM_ZENTORCH_WEIGHT_PREPACK",
)  # fmt: skip
"""Variables that vLLM leaves out of `compile_factors()`, although they change what is loaded, decoded or computed."""
_OF_LIBRARIES = ("NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables of cuBLAS and cuDNN, of oneDNN, and of PyTorch that set the precision of products."""


def describe_environment() -> dict[str, str]:
    """The variables that are set and may change KV bytes, with what vLLM reads from them."""
    from vllm import envs

    harmless = {name for names in HARMLESS_VARIABLES.values() for name in names}
    read = {name: str(value) for name, value in envs.compile_factors().items() if name not in harmless}
    others = {name: os.environ.get(name, "") for name in (*_LEFT_OUT, *_OF_LIBRARIES)}
    return {name: value for name, value in (others | read).items() if os.environ.get(name)}


# -- the processor

_INSTRUCTION_SETS: dict[str, Callable[[], bool]] = {
    "amx": lambda: torch.cpu._is_amx_tile_supported(),
    "avx512": lambda: torch.cpu._is_avx512_supported(),
}


def platform_facts() -> list[str]:
    """vLLM's platform. Its CPU attention packs keys for the CPU's instruction set, with the same backend name and
    shapes for all of them."""
    from vllm.platforms import current_platform

    facts = [current_platform.device_type, str(current_platform.fp8_dtype())]
    if current_platform.is_cpu():
        facts.append(current_platform.get_cpu_architecture().name)
        facts += [f"{name} {supported()}" for name, supported in _INSTRUCTION_SETS.items()]
    return facts


# -- code of others

_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Plugins that vLLM loads in its workers."""
_KNOWN = ("", "auto", "kvdepot", "transformers_modules", "vllm")
"""Packages whose code needs no digest: ours and vLLM's resolvers of LoRA adapters compute no KV, code in a model's
folder is described with the model's files, and "auto" is a worker class of vLLM."""


def describe_code(vllm_config: VllmConfig, models: Sequence[ModelConfig]) -> list[list[str]]:
    """Each piece of foreign code that this engine loads, with a digest of its package."""
    parallel = vllm_config.parallel_config
    names = [*_plugins(), *map(_model, models)]
    for worker in (parallel.worker_cls, parallel.worker_extension_cls):
        names.append(worker if isinstance(worker, str) else f"{worker.__module__}.{worker.__qualname__}")
    return [[name, _digest(package)] for name in sorted({*names}) if (package := _package(name))]


def _plugins() -> Iterator[str]:
    from vllm import envs

    for group in _GROUPS:
        for point in importlib.metadata.entry_points(group=group):
            if envs.VLLM_PLUGINS is None or point.name in envs.VLLM_PLUGINS:
                yield point.value


def _model(model: ModelConfig) -> str:
    """The module of a model's class, which a program may also register without a plugin."""
    from vllm.model_executor.models.registry import ModelRegistry

    registered = ModelRegistry.models.get(model.architecture)
    cls = getattr(registered, "model_cls", None)
    module = str(getattr(registered, "module_name", "") or getattr(cls, "__module__", ""))
    if module.startswith("vllm.model_executor.models.transformers"):
        return f"transformers:{model.architecture}"  # vLLM's wrapper around a model of transformers
    return f"{module}:{model.architecture}"


def _package(name: str) -> str:
    """The top-level package of a qualified name; empty if its code is known."""
    top = name.partition(":")[0].partition(".")[0]
    return "" if top in _KNOWN else top


@cache
def _digest(package: str) -> str:
    """A digest of all files of a package, or of a module; "unknown" without files.

    Raises ConfigError for a file that cannot be read.
    """
    hasher = blake3()
    found = 0
    try:
        for place in _places(package):
            files = sorted(place.rglob("*")) if place.is_dir() else [place]
            for file in files:
                if file.is_file() and "__pycache__" not in file.parts:
                    hasher.update(f"{file.relative_to(place)}\0{file.stat().st_size}\0".encode())
                    hasher.update(file.read_bytes())
                    found += 1
    except OSError as exc:
        raise ConfigError(f"kvdepot cannot determine what {package} is, which vLLM loads: {exc}") from exc
    return hasher.hexdigest()[:32] if found else "unknown"


def _places(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec: the program itself
        return [Path(file)] if (file := getattr(sys.modules[package], "__file__", None)) else []
    if spec is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
