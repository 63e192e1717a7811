"""Compression and encryption of KV in a tier, beside direct use of the same libraries.

The KV is that of the demo's model, computed here: its layers with random weights, on random tokens, in bf16. It is
compared with zstd at its fastest level on the same bytes, and AES-256-GCM from one buffer into another.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from common import Scale, say
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from report import Figure, at_least, at_most
from torch import Tensor
from torch.nn import functional

from kvdepot.tiers.codec import Codec
from kvdepot.tiers.format import NO_SALT, Header, ShardFacts

__all__ = ["demo_kv", "run"]

Bytes = npt.NDArray[np.uint8]

# The model of demo/demo.py.
HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS, HEAD, THETA = 1024, 3072, 32000, 16, 8, 128, 500000.0
CHUNK_TOKENS = 256
_FACTS = ShardFacts("", "bench", 1, 0, 16, CHUNK_TOKENS, bytes(32))


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Ratio and speed of what `compress=zstd` and `key_file` do to a chunk, on one thread."""
    say("coding: computing KV")
    kv = demo_kv(scale.codec_layers)
    size = len(kv)
    header = Header(_FACTS.digest, bytes(32), NO_SALT, size, size, 1, 0)
    out = np.ones(size, np.uint8)
    say("coding: compressing and encrypting it")
    plain = zstandard.ZstdCompressor(level=1)
    packed = plain.compress(kv.data)
    key, nonce = os.urandom(32), os.urandom(12)
    cipher, sealed = AESGCM(key), bytearray(size + 16)
    codecs = {"compress": Codec(compress=True), "encrypt": Codec(key=key)}
    objects: dict[str, tuple[Header, list[memoryview]]] = {}

    def encode(name: str) -> None:
        first, *rest = codecs[name].encode(header, _FACTS, [kv.data])
        found = Header.unpack(first)
        assert found is not None
        objects[name] = found, rest

    def decode(name: str) -> None:
        if not codecs[name].decode(*objects[name], [out.data]):
            raise RuntimeError(f"{name}: what was written is not what is read")

    work: dict[str, Callable[[], object]] = {
        "compress": lambda: encode("compress"),
        "decompress": lambda: decode("compress"),
        "encrypt": lambda: encode("encrypt"),
        "decrypt": lambda: decode("encrypt"),
        "plain zstd, compress": lambda: plain.compress(kv.data),
        "plain zstd, decompress": lambda: zstandard.ZstdDecompressor().decompress(packed),
        "AES-GCM, encrypt": lambda: cipher.encrypt_into(nonce, kv.data, None, sealed),
        "AES-GCM, decrypt": lambda: cipher.decrypt_into(nonce, sealed, None, out.data),
    }
    speeds = _speeds(work, size, scale.codec_runs)
    kept = {what: _kept_waiting(work[what], scale.codec_runs) for what in codecs}
    decode("compress")
    if not np.array_equal(out, kv):
        raise RuntimeError("what was decompressed is not what was compressed")
    ratio = size / objects["compress"][0].stored
    notes.append(
        f"coding: bf16 KV of the demo's model, {size / 2**20:.1f} MiB a chunk: zstd behind a byte shuffle makes it "
        f"{ratio:.2f} times smaller, plain zstd {size / len(packed):.2f} times"
    )
    return [
        at_least("KV compressed by a tier, ratio", "x", [ratio], [size / len(packed)], 1.1),
        at_least("KV compressed by a tier", "GB/s", speeds["compress"], speeds["plain zstd, compress"], 0.5),
        at_least("KV decompressed by a tier", "GB/s", speeds["decompress"], speeds["plain zstd, decompress"], 0.7),
        at_least("KV encrypted by a tier", "GB/s", speeds["encrypt"], speeds["AES-GCM, encrypt"], 0.3),
        at_least("KV decrypted by a tier", "GB/s", speeds["decrypt"], speeds["AES-GCM, decrypt"], 0.3),
        at_most("another thread waits while a tier compresses KV", "ms", *kept["compress"], 0.6),
        at_most("another thread waits while a tier encrypts KV", "ms", *kept["encrypt"], 0.6),
    ]


def _kept_waiting(once: Callable[[], object], runs: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each run: the longest wait of another thread, and the work itself."""
    longest, computed = [], []
    interval = sys.getswitchinterval()

    def work() -> None:
        begun = time.thread_time()
        once()
        computed.append((time.thread_time() - begun) * 1000)

    try:
        sys.setswitchinterval(5.0)  # whoever does not let go of the GIL keeps it
        for _ in range(runs):
            thread, waited_s, last = threading.Thread(target=work), 0.0, time.perf_counter()
            thread.start()
            while thread.is_alive():
                os.sched_yield()  # lets go of the GIL
                now = time.perf_counter()
                waited_s, last = max(waited_s, now - last), now
            waited_s = max(waited_s, time.perf_counter() - last)
            thread.join()
            longest.append(waited_s * 1000)
    finally:
        sys.setswitchinterval(interval)
    return longest, computed


def _speeds(work: dict[str, Callable[[], object]], size: int, runs: int) -> dict[str, Sequence[float]]:
    """GB/s of each, measured alternately."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for number in range(-1, runs):  # the first warms up
        for name, once in work.items():
            begun = time.perf_counter()
            once()
            if number >= 0:
                found[name].append(size / (time.perf_counter() - begun) / 1e9)
    return dict(found)


def demo_kv(layers: int) -> Bytes:
    """One chunk of KV as the demo's engine stores it: layer by layer, keys before values."""
    draw = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw) * 0.02).to(torch.bfloat16).float()

    def norm(states: Tensor) -> Tensor:
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5)

    tokens = 2 * CHUNK_TOKENS  # the chunk is the second, behind some context
    angles = torch.outer(torch.arange(tokens), THETA ** (-torch.arange(0, HEAD, 2) / HEAD))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotate(heads: Tensor) -> Tensor:
        low, high = heads.chunk(2, -1)
        return heads * cos + torch.cat((-high, low), -1) * sin

    def split(states: Tensor, heads: int) -> Tensor:
        return states.view(tokens, heads, HEAD).transpose(0, 1)

    states = weight(VOCABULARY, HIDDEN)[torch.randint(3, VOCABULARY, (tokens,), generator=draw)]
    parts: list[Bytes] = []
    for _ in range(layers):
        normed = norm(states)
        queries = rotate(split(normed @ weight(HIDDEN, HEADS * HEAD), HEADS))
        keys = rotate(split(normed @ weight(HIDDEN, KV_HEADS * HEAD), KV_HEADS))
        values = split(normed @ weight(HIDDEN, KV_HEADS * HEAD), KV_HEADS)
        for each in (keys, values):
            chunk = each[:, CHUNK_TOKENS:].to(torch.bfloat16).contiguous()
            parts.append(chunk.view(torch.uint8).numpy().reshape(-1))
        shared = HEADS // KV_HEADS
        mixed = functional.scaled_dot_product_attention(
            queries, keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0), is_causal=True
        )
        states = states + mixed.transpose(0, 1).reshape(tokens, -1) @ weight(HEADS * HEAD, HIDDEN)
        normed = norm(states)
        gate = functional.silu(normed @ weight(HIDDEN, INNER)) * (normed @ weight(HIDDEN, INNER))
        states = states + gate @ weight(INNER, HIDDEN)
    return np.concatenate(parts)
