"""vLLM's own prefix cache as the oracle: with memory for all, the depot's hits end where vLLM's own end.

One engine only stores, and keeps all blocks in its own prefix cache; its hits are vLLM's. Another one only loads, with
its own prefix cache emptied before each request; its hits are the depot's. Both see the same requests: prompts that
begin alike, go on differently, end within chunks and at their ends, and are repeated.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import nothing_is_held, prompt

ALL: dict[str, Any] = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
"""vLLM keeps what every boundary needs, not only what it expects to be needed."""
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # tokens per chunk; the engine's options
    "gqa": (256, ALL),
    "windows": (256, ALL | {"dtype": "float32"}),
    "mistral": (256, ALL | {"dtype": "float32"}),
    "states": (640, ALL),
}
REQUESTS = 24
MOST_TOKENS = 3000


def requests(chunk: int, generator: random.Random) -> list[list[int]]:
    """Each a prompt of its own, or an earlier one: repeated, cut, continued, or both."""
    made: list[list[int]] = []
    for number in range(REQUESTS):
        tokens = list(generator.choice(made)) if number % 8 else []
        if tokens and generator.random() < 0.7:
            cut = generator.randrange(len(tokens) // 3, len(tokens)) + 1
            tokens = tokens[: generator.choice([cut, max(cut // chunk * chunk, 1), cut // chunk * chunk + 1])]
        if not tokens or generator.random() < 0.7:
            more = generator.choice([5, chunk, chunk + 1, 2 * chunk + 100]) if tokens else MOST_TOKENS - chunk - 50
            tokens += prompt(9000 + number, more)
        made.append(tokens[:MOST_TOKENS])
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_hits_end_where_vllms_own_prefix_cache_says(
    kind: str, start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    chunk, options = KINDS[kind]
    depot = start_depot(arena_mib=512)
    extra = {"kvdepot.boundary_chunks": 1}
    storing = start_engine(models[kind], depot.url, role="kv_producer", extra=extra, **options)
    loading = start_engine(models[kind], depot.url, role="kv_consumer", extra=extra, **options)
    storing.wait_started(), loading.wait_started()
    found = []
    for tokens in requests(chunk, random.Random(kind)):
        ours = loading.run_fresh(tokens, max_tokens=1)["cached"]
        own = storing.run(tokens, max_tokens=1)["cached"]
        found.append((len(tokens), ours, own))
        eventually(lambda: nothing_is_held(depot.status()))
    assert [(n, ours) for n, ours, _ in found] == [(n, own // chunk * chunk) for n, _, own in found]
    assert sum(own >= chunk for _, _, own in found) > REQUESTS / 3, "too few hits to test anything"
    assert depot.status()["evicted_chunks"] == 0
    storing.stop(), loading.stop()
