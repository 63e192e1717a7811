"""Decoded chunks: which later prompts continue with them, and when they are stored."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.integrations.vllm import answers
from kvdepot.integrations.vllm.answers import Answers
from tests.conftest import StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import LLAMA, output, prompt, write_model

WIDE: dict[str, Any] = LLAMA | {"num_key_value_heads": 4, "head_dim": 256}
"""32 tokens are worth a chunk."""


def hashes(*numbers: int) -> bytes:
    return b"".join(blake3(number.to_bytes(8, "little")).digest() for number in numbers)


class Engine(Answers):
    """The answers of an engine, with its counters."""

    def __init__(self, mode: str = "auto") -> None:
        self.counters = Counter[str]()
        super().__init__(mode, lambda name, count: self.counters.update({name: count}))

    def run(self, requests: int, back: int, first: int = 0) -> None:
        """Requests that decode two chunks each; after every one, the last `back` of every 20 come back."""
        for number in range(first, first + requests):
            self.request_ended(hashes(2 * number, 2 * number + 1))
            if number % 20 >= 20 - back:
                self.prompt_came(hashes(10**6, 2 * number, 2 * number + 1, 10**7))


def test_answers_are_stored_at_first_then_as_they_come_back() -> None:
    engine = Engine()
    engine.run(31, back=0)
    assert engine.are_stored
    engine.run(100, back=0, first=31)
    assert not engine.are_stored
    engine.run(20, back=1, first=140)
    assert not engine.are_stored  # one in twenty is too few to begin again
    engine.run(100, back=10, first=160)
    assert engine.are_stored
    engine.run(400, back=2, first=260)
    assert engine.are_stored
    assert engine.counters["decoded_chunks"] == 2 * 651


def test_a_chunk_that_came_back_counts_once_and_prompts_of_others_not_at_all() -> None:
    engine = Engine()
    engine.request_ended(hashes(1, 2, 3))
    for _ in range(3):
        engine.prompt_came(hashes(8, 1, 2))
        engine.prompt_came(hashes(7, 9))
    engine.prompt_came(b"")
    engine.request_ended(b"")
    assert engine.counters == {"decoded_chunks": 3, "continued_chunks": 2}


@pytest.mark.parametrize("mode", ["on", "off"])
def test_what_was_set_stays_so_whatever_comes_back(mode: str) -> None:
    engine = Engine(mode)
    engine.run(100, back=0 if mode == "on" else 20)
    assert engine.are_stored is (mode == "on")


@given(st.lists(st.integers(0, 40), max_size=60))
def test_memory_is_bounded_and_the_oldest_are_forgotten(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_MOST", 50)
        engine, ended = Engine(), list[int]()
        for size in sizes:
            new = range(len(ended), len(ended) + size)
            engine.request_ended(hashes(*new))
            ended += new
        engine.prompt_came(hashes(*ended))
        assert engine.counters["continued_chunks"] == min(50, len(ended))


def test_answers_are_loaded_and_not_stored_once_they_never_come_back(
    start_depot: StartDepot, start_engine: StartEngine, tmp_path: Path
) -> None:
    depot, model = start_depot(arena_mib=256, chunk_size="auto"), write_model(tmp_path / "model", WIDE)
    engine = start_engine(model, depot.url, block_size=32, dtype="float32").wait_started()
    tokens, computed = prompt(900, 70), 0
    for turn in range(3):
        answer = engine.run_fresh(tokens, max_tokens=50)
        assert answer["cached"] == computed // 32 * 32
        computed = len(tokens) + 50 - 1  # all but the last token of the answer
        tokens = [*tokens, *answer["tokens"], *prompt(901 + turn, 20)]
    own = engine.run(tokens, max_tokens=5)
    assert engine.run_fresh(tokens, max_tokens=5)["tokens"] == own["tokens"]

    requests = [engine.request(prompt(1000 + i, 40), max_tokens=30) for i in range(80)]
    engine.tell("run", requests=requests)
    stored = depot.status()["chunks"]
    answer = engine.run(prompt(2000, 40), max_tokens=60)
    eventually(lambda: depot.status()["chunks"] == stored + 1)  # that of the prompt alone
    tokens = [*prompt(2000, 40), *answer["tokens"], 5]
    assert engine.run_fresh(tokens)["cached"] == 32
    assert output(engine.run_fresh(tokens)) == output(engine.run_fresh(tokens))
    assert "decoded chunks are not stored from now on" in engine.logged()
    engine.stop()
