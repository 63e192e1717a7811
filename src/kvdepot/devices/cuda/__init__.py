"""GPUs: KV in device memory, copied to and from the arena. Imported only where a worker has tensors on a GPU.

`gpus.py` is the server's end and says which file does what; `sharing.py` and `order.py` are the worker's.
"""
