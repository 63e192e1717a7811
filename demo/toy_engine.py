"""A complete engine in NumPy whose KV goes through a depot: paged KV, continuous batching, prefix reuse.

    python demo/toy_engine.py            # three prompts that share a prefix, twice

docs/integrations.md explains where a real engine does the same. The model is a transformer of two layers with random
weights; what matters is that its KV at a position depends on all tokens before it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

import kvdepot

Array = npt.NDArray[np.float32]
LAYERS, HEADS, DIM, VOCABULARY, BLOCK = 2, 4, 16, 512, 16
WIDTH = HEADS * DIM


class Model:
    """Random weights from a seed, which therefore names them."""

    def __init__(self, seed: int) -> None:
        self.revision = f"seed-{seed}"
        random = np.random.default_rng(seed)
        self.embedding, self.output = (random.normal(size=(VOCABULARY, WIDTH)).astype(np.float32) for _ in range(2))
        self.weights = random.normal(size=(LAYERS, 4, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5

    def forward(self, tokens: list[int], past: Array) -> tuple[Array, Array]:
        """Logits after the last of these tokens, and their KV `[layers, 2, tokens, heads, dim]`. past: of those before
        them, in the same shape."""
        start, count = past.shape[2], len(tokens)
        hidden = self.embedding[tokens] + np.sin(np.arange(start, start + count)[:, None] / (1 + np.arange(WIDTH)))
        new = np.empty((LAYERS, 2, count, HEADS, DIM), np.float32)
        hidden_from_all = np.arange(start + count) <= np.arange(start, start + count)[:, None]
        for layer in range(LAYERS):
            queries, new[layer, 0], new[layer, 1] = (
                (hidden @ self.weights[layer, i]).reshape(count, HEADS, DIM) for i in range(3)
            )
            keys, values = np.concatenate([past[layer], new[layer]], axis=1)
            scores = np.einsum("qhd,khd->hqk", queries, keys) / DIM**0.5
            scores = np.exp(np.where(hidden_from_all, scores - scores.max(-1, keepdims=True), -np.inf))
            mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), values)
            hidden = np.tanh(hidden + mixed.reshape(count, WIDTH) @ self.weights[layer, 3]).astype(np.float32)
        return hidden[-1] @ self.output.T, new


@dataclass
class Request:
    tokens: list[int]  # the prompt, then the answer
    wanted: int  # tokens of the answer
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose KV is in the blocks
    loaded: int = 0  # of these, from the depot
    answer: list[int] = field(default_factory=list)


class Engine:
    """Runs up to three requests at once; the KV of each is in blocks of 16 tokens of one array."""

    def __init__(self, model: Model, depot: kvdepot.Depot | None, blocks: int = 256) -> None:
        self.model = model
        self.pages = np.zeros((blocks, LAYERS, 2, BLOCK, HEADS, DIM), np.float32)
        self.free = list(range(blocks))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.computed_tokens = 0
        # All that changes the bytes of KV must be in here; the depot serves whoever gives the same facts.
        shape = kvdepot.Shape(LAYERS, HEADS, DIM)
        self.kv = depot and depot.namespace(
            model="toy", revision=model.revision, dtype="float32", shape=shape, chunk_tokens=BLOCK
        )

    def run(self, prompts: list[list[int]], answer_tokens: int = 8) -> list[Request]:
        """Answer all prompts, continuously batched."""
        requests = [Request(list(prompt), answer_tokens) for prompt in prompts]
        self.waiting += requests
        while self.waiting or self.running:
            while self.waiting and len(self.running) < 3:
                self.running.append(self.admit(self.waiting.pop(0)))
            for request in self.running[:]:
                self.step(request)
        return requests

    def admit(self, request: Request) -> Request:
        """Allocate blocks, and fill them with what the depot has: all but the last token, whose logits are needed."""
        needed = -(-(len(request.tokens) + request.wanted) // BLOCK)
        request.blocks = [self.free.pop() for _ in range(needed)]
        # Blocks for a round trip and a copy; 0 on a miss, or if the server is gone.
        kv, request.loaded = self.kv.get(request.tokens[:-1]) if self.kv else (None, 0)
        if kv is not None:
            self.write(request, 0, kv)
            request.computed = request.loaded
        return request

    def step(self, request: Request) -> None:
        """Compute the rest of the prompt, or one more token of the answer."""
        prompt_ends = not request.answer
        new = request.tokens[request.computed :]
        logits, kv = self.model.forward(new, self.read(request, request.computed))
        self.write(request, request.computed, kv)
        request.computed += len(new)
        self.computed_tokens += len(new)
        if prompt_ends and self.kv:  # a real engine does this in a thread, and keeps the blocks meanwhile
            self.kv.put(request.tokens, self.read(request, request.computed))
        request.answer.append(int(logits.argmax()))
        request.tokens.append(request.answer[-1])
        if len(request.answer) == request.wanted:
            self.free += request.blocks
            self.running.remove(request)

    def read(self, request: Request, count: int) -> Array:
        """The KV of the first `count` tokens, `[layers, 2, tokens, heads, dim]`."""
        pages = self.pages[request.blocks[: -(-count // BLOCK)]]
        joined = pages.transpose(1, 2, 0, 3, 4, 5).reshape(LAYERS, 2, -1, HEADS, DIM)
        return joined[:, :, :count]

    def write(self, request: Request, first: int, kv: Array) -> None:
        """Put KV into the request's blocks, from token `first` on."""
        at = np.arange(first, first + kv.shape[2])
        blocks = np.array(request.blocks)[at // BLOCK]
        self.pages[blocks, :, :, at % BLOCK] = kv.transpose(2, 0, 1, 3, 4)


def main() -> None:
    url = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    url.add_argument("--url", default="embedded", help="address of a depot; default: one of its own")
    shared = list(range(100, 164))
    prompts = [[*shared, 7, 8, 9], [*shared, 1, 2], [*shared, *range(300, 340)], [*shared, 7, 8, 9, 10]]
    with kvdepot.connect(url.parse_args().url) as depot:
        for _ in range(2):
            engine = Engine(Model(seed=1), depot)
            for request in engine.run(prompts):
                print(f"loaded {request.loaded:3} tokens, answered {request.answer}")
            print(f"computed {engine.computed_tokens} tokens")


if __name__ == "__main__":
    main()
