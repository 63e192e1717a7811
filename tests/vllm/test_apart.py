"""Prefill and decode apart: one engine only computes prompts and stores them, another one loads and decodes.

One pair of engines for the first tests of this file: each prompt is its test's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Depot, eventually
from tests.vllm.engines import Engine, nothing_is_held, output, prompt

CHUNKS = 4
TOKENS = CHUNKS * 256 + 17
"""One step computes the chunks, the next one the rest."""


@pytest.fixture(scope="module")
def pair(vllm_depot: Depot, models: dict[str, Path]) -> Iterator[tuple[Engine, Engine]]:
    """A prefill engine, and a decoder that would store what it decodes if it stored anything."""
    started = [
        Engine(models["gqa"], vllm_depot.url, role="kv_producer"),
        Engine(models["gqa"], vllm_depot.url, role="kv_consumer", extra={"kvdepot.save_decode": True}),
    ]
    try:
        prefill, decoder = (engine.wait_started() for engine in started)
        yield prefill, decoder
        prefill.stop(), decoder.stop()
    finally:
        for engine in started:
            engine.close()
    eventually(lambda: nothing_is_held(vllm_depot.status()))


def same_as_its_own(decoder: Engine, tokens: list[int], from_depot: dict[str, Any]) -> None:
    own = decoder.run(tokens, max_tokens=300)
    assert from_depot["cached"] == own["cached"] == CHUNKS * 256
    assert output(from_depot) == output(own)


def test_a_decoder_decodes_what_a_prefill_engine_has_computed_and_stores_nothing(
    pair: tuple[Engine, Engine], vllm_depot: Depot
) -> None:
    prefill, decoder = pair
    tokens = prompt(91, TOKENS)
    before = vllm_depot.status()["chunks"]
    prefill.run(tokens, max_tokens=1)
    same_as_its_own(decoder, tokens, decoder.run(tokens, max_tokens=300))
    assert vllm_depot.status()["chunks"] == before + CHUNKS
    assert prefill.run_fresh(tokens, max_tokens=1)["cached"] == 0, "a producer loads nothing"


def test_a_second_engine_gets_chunks_while_the_first_computes_the_rest(
    pair: tuple[Engine, Engine], vllm_depot: Depot
) -> None:
    prefill, decoder = pair
    tokens = prompt(92, TOKENS)
    before = vllm_depot.status()["chunks"]
    prefill.tell("add", request=prefill.request(tokens, max_tokens=1))
    prefill.tell("step")  # computes the chunks
    prefill.tell("step")  # sends them, and computes the rest
    eventually(lambda: vllm_depot.status()["chunks"] == before + CHUNKS)  # stored, or being stored
    same_as_its_own(decoder, tokens, decoder.run(tokens, max_tokens=300))
    prefill.tell("finish")
