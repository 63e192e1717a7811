"""GPUs: KV in device memory, copied to and from the arena. Imported only if a worker has tensors on a GPU.

The server uses `gpus.py`, which describes the other files; workers use `sharing.py` and `order.py`.
"""
