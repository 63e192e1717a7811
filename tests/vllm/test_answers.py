"""Decoded chunks: which later prompts continue with them, and when they are stored."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.integrations.vllm import answers
from kvdepot.integrations.vllm.answers import Answers
from kvdepot.status import AnswersStatus
from tests.conftest import StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import LLAMA, WIDE, prompt, write_model


def hashes(*numbers: int) -> bytes:
    return b"".join(blake3(number.to_bytes(8, "little")).digest() for number in numbers)


class Engine(Answers):
    """The answers of an engine, with its counters. Each answer has two chunks."""

    def __init__(self, mode: str = "auto", schedulers: int = 1) -> None:
        self.counters = Counter[str]()
        self.ended = 0
        super().__init__(mode, lambda name, count: self.counters.update({name: count}), schedulers)

    def run(self, requests: int, back: int) -> None:
        """Requests one after the other; the last `back` of every 20 come back in the next prompt."""
        for _ in range(requests):
            self.end()
            is_back = self.ended % 20 >= 20 - back
            self.prompt_came(hashes(10**6, *([2 * self.ended, 2 * self.ended + 1] if is_back else [7]), 10**7))

    def end(self) -> None:
        self.ended += 1
        self.request_ended(hashes(2 * self.ended, 2 * self.ended + 1))


def test_answers_are_stored_at_first_then_as_they_come_back() -> None:
    engine = Engine()
    engine.run(64 + 30, back=0)
    assert engine.are_stored and engine.status == AnswersStatus("auto", True)  # it has not judged enough yet
    engine.run(100, back=0)
    assert not engine.are_stored and engine.status == AnswersStatus("auto", False, 0.0)
    engine.run(40, back=1)
    assert not engine.are_stored  # one in twenty is too few to begin again
    engine.run(100, back=10)
    assert engine.are_stored
    engine.run(400, back=2)
    assert engine.are_stored
    assert engine.counters["decoded_chunks"] == 2 * engine.ended


def test_chats_that_begin_at_once_are_not_taken_for_one_off_requests() -> None:
    engine = Engine()
    for _ in range(500):
        engine.end()
    for number in range(1, 501):
        engine.prompt_came(hashes(2 * number, 2 * number + 1, 10**6))
        assert engine.are_stored
    assert engine.share > 0.9


def test_a_scheduler_of_several_sees_a_part_of_the_chats_and_judges_accordingly() -> None:
    for schedulers, stores in ((1, False), (16, True)):
        engine = Engine(schedulers=schedulers)
        engine.run(600, back=0)
        for _ in range(20):
            engine.run(39, back=0)
            engine.run(1, back=20)  # one in forty
        assert engine.are_stored is stores, schedulers


def test_an_answer_that_came_back_counts_once_and_prompts_of_others_not_at_all() -> None:
    engine = Engine()
    engine.request_ended(hashes(1, 2, 3))
    for _ in range(3):
        engine.prompt_came(hashes(8, 1, 2))
        engine.prompt_came(hashes(7, 9))
    engine.prompt_came(b"")
    engine.request_ended(b"")
    assert engine.counters == {"decoded_chunks": 3, "continued_chunks": 3}


@pytest.mark.parametrize("mode", ["on", "off"])
def test_save_decode_on_or_off_stays_so_whatever_comes_back(mode: str) -> None:
    engine = Engine(mode)
    engine.run(200, back=0 if mode == "on" else 20)
    assert engine.are_stored is (mode == "on") and not engine.counters


@given(st.lists(st.integers(0, 3), max_size=60))
def test_memory_is_bounded_and_the_oldest_are_forgotten(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_MOST", 20)
        engine, number, firsts = Engine(), 0, list[tuple[int, int]]()
        for size in sizes:
            engine.request_ended(hashes(*range(number, number + size)))
            firsts += [(number, size)] if size else []
            number += size
        engine.prompt_came(hashes(*range(number)))
        assert engine.counters["continued_chunks"] == sum(size for _, size in firsts[-20:])


def test_answers_are_loaded_and_not_stored_once_they_never_come_back(
    start_depot: StartDepot, start_engine: StartEngine, tmp_path: Path
) -> None:
    depot, model = start_depot(arena_mib=256, chunk_size="auto"), write_model(tmp_path / "model", LLAMA | WIDE)
    engine = start_engine(model, depot.url, block_size=32, dtype="float32", max_num_seqs=40).wait_started()
    tokens, computed = prompt(900, 70), 0
    for turn in range(3):
        answer = engine.run_fresh(tokens, max_tokens=50)
        assert answer["cached"] == computed // 32 * 32
        computed = len(tokens) + 50 - 1  # all but the last token of the answer
        tokens = [*tokens, *answer["tokens"], *prompt(901 + turn, 20)]
    own = engine.run(tokens, max_tokens=5)
    assert engine.run_fresh(tokens, max_tokens=5)["tokens"] == own["tokens"]

    for batch in range(5):
        one_off = [prompt(1000 + 40 * batch + i, 40) for i in range(40)]
        engine.tell("run", requests=[engine.request(tokens, max_tokens=30) for tokens in one_off])
    stored = depot.status()["chunks"]
    answer = engine.run(prompt(2000, 40), max_tokens=60)
    eventually(lambda: depot.status()["chunks"] == stored + 1)  # that of the prompt alone
    tokens = [*prompt(2000, 40), *answer["tokens"], 5]
    assert engine.run_fresh(tokens)["cached"] == 32
    assert "decoded chunks are not stored from now on" in engine.logged()
    (said,) = {(each["answers"]["stored"], each["answers"]["mode"]) for each in depot.status()["namespaces"]}
    assert said == (False, "auto")
    engine.stop()
