"""SGLang's own classes on the processor: host pools, their controller, and what they need of a running engine.

Stubbed: torchvision, where it is not installed, which only image processors use; and ranks, which a launcher publishes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (docs/sglang.md)", allow_module_level=True)

import torch

from tests.sglang import stubs  # noqa: F401 - before SGLang is imported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.server_args
    from sglang.srt import runtime_context
    from sglang.srt.environ import envs
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.version import __version__

HiCacheStorageFailureInjector = getattr(hicache_storage, "HiCacheStorageFailureInjector", None)  # from 0.5.23 on

__all__ = [
    "PAGE", "Engine", "HiCacheStorageExtraInfo", "HiCacheStorageFailureInjector", "PoolHitPolicy", "PoolName",
    "PoolTransfer", "backend", "config", "device_pool", "envs", "extra", "hashes", "host_pool", "mamba_pool", "prompt",
    "publish",
]  # fmt: skip

PAGE = 16
_for_good = contextlib.ExitStack()
_TOKENS = 256


def publish(folder: Path) -> None:
    """Make this process one of an engine's, of a model whose files are in `folder`."""
    folder.mkdir(exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 3, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 2048,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    arguments = sglang.srt.server_args.ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True)
    runtime_context.get_context().set_server_args(arguments)
    ranks = {"tp_rank": 0, "pp_rank": 0} | ({"attn_dcp_rank": 0} if __version__ >= "0.5.21" else {})
    _for_good.enter_context(runtime_context.get_parallel().override(**ranks))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def extra(url: str, **more: object) -> dict[str, Any]:
    """The extra config of the documentation, for a server at `url`."""
    return {
        "backend_name": "kvdepot", "module_path": "kvdepot.integrations.sglang", "class_name": "KVDepotHiCache",
        "interface_v1": 1, "kvdepot.url": url, **more,
    }  # fmt: skip


def device_pool(kind: str = "mha") -> Any:
    sizes: dict[str, Any] = {"size": _TOKENS, "page_size": PAGE, "dtype": torch.float32, "layer_num": 3}
    place: dict[str, Any] = {"device": "cpu", "enable_memory_saver": False}
    if kind == "mla":
        return MLATokenToKVPool(**sizes, **place, kv_lora_rank=32, qk_rope_head_dim=16)
    return MHATokenToKVPool(**sizes, **place, head_num=2, head_dim=8)


def host_pool(device: Any, layout: str = "page_first", allocator: str = "default") -> Any:
    """SGLang's host pool of a device pool, with random bytes."""
    kind = MLATokenToKVPoolHost if isinstance(device, MLATokenToKVPool) else MHATokenToKVPoolHost
    options: dict[str, Any] = {"pin_memory": False, "allocator_type": allocator}
    describe = getattr(device, "_mla_buffer_info" if kind is MLATokenToKVPoolHost else "_mha_buffer_info", None)
    if describe is None:  # before 0.5.23
        pool = kind(device, 2.0, 0, PAGE, layout, **options)
    else:
        ends = {"device_capacity_tokens": _TOKENS, "start_layer": 0, "end_layer": 3}
        ends |= {"target_layer_num": 3} if kind is MLATokenToKVPoolHost else {}
        pool = kind(describe(), 2.0, 0, PAGE, layout, **options, **ends)
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
    return pool


def mamba_pool() -> Any:
    """SGLang's host pool of Mamba states, 17 of them, with random bytes."""
    device_pool_info = pytest.importorskip("sglang.srt.mem_cache.device_pool_info", exc_type=ImportError)
    if not hasattr(device_pool_info, "MambaStateBufferInfo"):
        pytest.skip("this version of SGLang makes pools of states in another way")
    states = device_pool_info.MambaStateBufferInfo(temporal=torch.zeros(2, 8, 4, 8), conv=(torch.zeros(2, 8, 16),))
    options: dict[str, Any] = {"pin_memory": False, "allocator_type": "default", "layout": "page_first"}
    pool = MambaPoolHost(states, 2.0, 0, device_capacity=8, **options)
    for part in (pool.temporal_buffer, *pool.conv_buffer):
        part.copy_(torch.rand(part.shape))
    return pool


def config(url: str, tp: tuple[int, int] = (0, 1), is_mla: bool = False, **more: Any) -> Any:
    """What SGLang's controller tells a backend; tp: rank and size."""
    names: dict[str, Any] = {
        "tp_rank": tp[0], "tp_size": tp[1], "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": is_mla, "enable_storage_metrics": True, "is_page_first_layout": True, "model_name": "m",
        "extra_config": extra(url),
    }  # fmt: skip
    return HiCacheStorageConfig(**names | more)


def backend(settings: Any, *pools: tuple[str, Any]) -> Any:
    """A backend from SGLang's factory, with host pools by name; the first is the KV pool."""
    made = StorageBackendFactory.create_backend("dynamic", settings, pools[0][1] if pools else None)
    for number, (name, pool) in enumerate(pools):
        if number == 0:
            made.register_mem_pool_host(pool)
        made.register_mem_host_pool_v2(pool, name)
    return made


def prompt(*pages: int) -> Any:
    """A prompt of whole pages, each with tokens of its own."""
    return RadixKey([page * PAGE + token for page in pages for token in range(PAGE)])


def hashes(*pages: int) -> list[str]:
    """SGLang's keys of a prompt's pages."""
    found: list[str] = get_storage_hash_str(prompt(*pages), None, page_size=PAGE)
    return found


class _Allocator:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool


class Engine:
    """SGLang's controller with its threads, on a device pool and a host pool, without a model."""

    def __init__(self, url: str, layout: str = "page_first", **more: object) -> None:
        device = device_pool()
        self.host = host_pool(device, layout)
        self.controller = HiCacheController(
            _Allocator(device), self.host, PAGE, torch.distributed.group.WORLD, threading.Event(),
            storage_backend="dynamic", model_name="m", storage_backend_extra_config=extra(url, **more),
            io_backend="direct",
        )  # fmt: skip

    def back_up(self, *pages: int) -> tuple[Any, int]:
        """Store a prompt's pages; their slots, and the tokens that were stored."""
        slots = self.host.alloc(PAGE * len(pages))
        self.controller.write_storage(slots, prompt(*pages), hashes(*pages), [])
        return slots, self.controller.ack_backup_queue.get(timeout=60).completed_tokens

    def prefetch(self, *pages: int) -> tuple[int, Any, int]:
        """Load a prompt's pages; how many tokens were found, their slots, and how many tokens were loaded."""
        self.controller.prefetch("r", prompt(*pages), None, [])
        operation = self.controller.prefetch_hit_queue.get(timeout=60)
        found = operation.storage_hit_count
        operation.host_indices = self.host.alloc(found)
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=60)).completed_req:
            loaded = ack.completed_tokens
        return found, operation.host_indices, loaded

    def flush(self) -> None:
        """What SGLang's tree does when it flushes its caches."""
        self.controller.reset()
        self.controller.mem_pool_host.clear()

    def bytes_at(self, slots: Any) -> list[bytes]:
        """The bytes of each page in host memory."""
        starts = slots[::PAGE].tolist()
        return [self.host.get_data_page(start).numpy().tobytes() for start in starts]

    def close(self) -> None:
        self.controller.detach_storage_backend()
