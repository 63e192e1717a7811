"""An engine that registers its KV with the server at KVDEPOT_URL, as test_images.py runs it in a container.

    python registers.py                 its KV is one of torch's tensors, as vLLM's
    python registers.py memory-file     its KV is in a memory file, as SGLang's

Prints "registered", or the error of kvdepot.
"""

import ctypes
import mmap
import os
import sys

import torch
import zmq

from kvdepot.client.socket import Client
from kvdepot.client.transfer import ShardSpec
from kvdepot.client.worker import WorkerClient
from kvdepot.devices.cpu import share, view_memory_file
from kvdepot.errors import KVDepotError
from kvdepot.protocol.layout import build_layout

BLOCKS, BYTES = 16, 4096

try:
    client = Client(os.environ["KVDEPOT_URL"], zmq.Context())
    worker = WorkerClient(client, ShardSpec("model", 1, 0, client.learn_chunk_size(5.0) or 256, 1))
    if sys.argv[1:] == ["memory-file"]:
        fd = os.memfd_create("kvdepot-test-registers")
        os.truncate(fd, BLOCKS * BYTES)
        memory = mmap.mmap(fd, BLOCKS * BYTES)
        view = view_memory_file("kv", ctypes.addressof(ctypes.c_byte.from_buffer(memory)), (BLOCKS, BYTES, BYTES))
    else:
        tensor = torch.zeros(BLOCKS, BYTES, dtype=torch.uint8)
        view = share(tensor, "kv")
    worker.register([build_layout([view], [0])])
    print("registered")
    worker.close()
except KVDepotError as exc:
    print(f"{type(exc).__name__}: {exc}")
