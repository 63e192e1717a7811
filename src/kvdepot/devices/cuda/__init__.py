"""GPUs: KV in device memory, copied to and from the arena. Imported only if a worker has tensors on a GPU.

The server uses `gpus.py`, workers use `sharing.py`.
"""

DMA_FROM_BYTES = 28 << 10
"""Copies of this size and larger are left to the copy engines by default: the setting `gpu_dma_from_kib`."""
