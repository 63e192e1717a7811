"""vLLM's own prefix cache as the oracle: with memory for all, the depot's hits end where vLLM's own end.

One engine only stores, and keeps all blocks in its own prefix cache; its hits are vLLM's. Another one only loads, with
its own prefix cache emptied before each request; its hits are the depot's. Both see the same requests: prompts that
begin alike, go on differently, end within chunks and at their ends, and are repeated. One pair of engines for each kind
of model: each prompt is its test's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Depot, eventually
from tests.vllm.engines import Engine, nothing_is_held, output, prompt

ALL: dict[str, Any] = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
"""vLLM keeps what every boundary needs, not only what it expects to be needed."""
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # tokens per chunk; the engine's options
    "gqa": (256, ALL),
    "windows": (256, ALL | {"dtype": "float32"}),
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


class Pair(NamedTuple):
    kind: str
    depot: Depot
    storing: Engine
    loading: Engine


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Pair]:
    """A prefill engine, and a decoder that would store what it decodes if it stored anything."""
    _, options = KINDS[request.param]
    depot, extra = Depot(arena_mib=512).wait_ready(), {"kvdepot.boundary_chunks": 1}
    model = models[request.param]
    storing = Engine(model, depot.url, role="kv_producer", extra=extra, **options)
    loading = Engine(model, depot.url, role="kv_consumer", extra={**extra, "kvdepot.save_decode": True}, **options)
    try:
        yield Pair(request.param, depot, storing.wait_started(), loading.wait_started())
        storing.stop(), loading.stop()
        eventually(lambda: nothing_is_held(depot.status()))
    finally:
        storing.close(), loading.close(), depot.close()


def test_hits_end_where_vllms_own_prefix_cache_says_and_give_the_same_answer(pair: Pair) -> None:
    kind, depot, storing, loading = pair
    chunk, options = KINDS[kind]
    found = []
    for tokens in requests(chunk, random.Random(kind)):
        ours = loading.run_fresh(tokens, max_tokens=1)
        own = storing.run(tokens, max_tokens=1)
        found.append((len(tokens), ours["cached"], own["cached"]))
        if ours["cached"] == own["cached"]:  # so the rest was one batch of the same shape
            assert output(ours) == output(own), found[-1]
        elif "dtype" in options:
            assert ours["tokens"] == own["tokens"], found[-1]
        eventually(lambda: nothing_is_held(depot.status()))
    assert [(n, ours) for n, ours, _ in found] == [(n, own // chunk * chunk) for n, _, own in found]
    assert sum(own >= chunk for _, _, own in found) > REQUESTS / 3, "too few hits to test anything"
    assert depot.status()["evicted_chunks"] == 0


@pytest.mark.parametrize("pair", ["gqa"], indirect=True)
def test_a_decoder_gets_chunks_while_they_are_computed_and_stores_nothing(pair: Pair) -> None:
    _, depot, storing, loading = pair
    tokens = prompt(92, 4 * 256 + 17)
    before = depot.status()["chunks"]
    storing.tell("add", request=storing.request(tokens, max_tokens=1))
    storing.tell("step")  # computes the chunks
    storing.tell("step")  # sends them, and computes the rest
    eventually(lambda: depot.status()["chunks"] == before + 4)  # stored, or being stored
    from_depot = loading.run(tokens, max_tokens=300)
    own = loading.run(tokens, max_tokens=300)
    assert from_depot["cached"] == own["cached"] == 4 * 256
    assert output(from_depot) == output(own)
    storing.tell("finish")
    assert depot.status()["chunks"] == before + 4
    assert storing.run_fresh(tokens, max_tokens=1)["cached"] == 0, "a producer loads nothing"
