"""SGLang's engine on the processor: python -m tests.sglang.tiny_engine MODEL [EXTRA CONFIG OF HICACHE]

It carries out what it reads, a JSON list a line (a method of Engine and its arguments), and answers with a line each.

In place of SGLang's kernels, which are for GPUs: plain copies between the host pool and the pool of the "device", which
is memory of the processor, too, and no registration of host memory with CUDA. Nothing else that runs is stubbed. SGLang
starts its processes with this module imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import warnings
from typing import Any

from tests.sglang.stubs import Stub

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.modules["sgl_kernel"] = Stub("sgl_kernel")  # its names are imported; none is called

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang
    from sglang.srt.mem_cache.pool_host import common, mha


def _load_layer(
    src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any, layer_id: int, **sizes: int
) -> None:
    """transfer_kv_per_layer_pf_lf: one layer of tokens in host memory, whose layers are together, to the device's."""
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def _back_up(
    src_k_layers: Any, dst_k: Any, src_v_layers: Any, dst_v: Any, src_indices: Any, dst_indices: Any, item_size: int,
    **sizes: int,
) -> None:  # fmt: skip
    """transfer_kv_all_layer_lf_pf: the other way, of all layers, each given by the address of its pool."""
    places = list(zip(src_indices.tolist(), dst_indices.tolist(), strict=True))
    for layers, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(layers.tolist()):
            for source, target in places:
                ctypes.memmove(host[target, layer].data_ptr(), address + source * item_size, item_size)


common._cuda_host_register = lambda *arguments: None
mha.transfer_kv_per_layer_pf_lf = _load_layer
mha.transfer_kv_all_layer_lf_pf = _back_up


class Engine:
    def __init__(self, model: str, extra: str = "") -> None:
        caches: dict[str, Any] = {
            "enable_hierarchical_cache": True, "hicache_mem_layout": "page_first", "hicache_io_backend": "kernel",
            "hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": extra,
        }  # fmt: skip
        self._engine = sglang.Engine(
            model_path=model, device="cpu", dtype="float32", attention_backend="torch_native", disable_cuda_graph=True,
            skip_tokenizer_init=True, page_size=16, max_total_tokens=4096, max_running_requests=4, log_level="error",
            watchdog_timeout=3000, **caches if extra else {},
        )  # fmt: skip

    def generate(self, prompt: list[int]) -> tuple[list[int], int]:
        """Eight greedy tokens after a prompt, and how many of its tokens came from the storage."""
        sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        answer = self._engine.generate(input_ids=prompt, sampling_params=sampling)
        cached = answer["meta_info"].get("cached_tokens_details") or {}
        return answer["output_ids"], cached.get("storage", 0)

    def flush(self) -> bool:
        """Forget what is in the engine's own caches."""
        return bool(self._engine.flush_cache().success)

    def update(self, model: str) -> bool:
        return bool(self._engine.update_weights_from_disk(model)[0])

    def close(self) -> None:
        self._engine.shutdown()


def main() -> None:
    engine = Engine(*sys.argv[1:])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("answer", json.dumps(getattr(engine, name)(*arguments)), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
