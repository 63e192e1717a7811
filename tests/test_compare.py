"""What `make compare` and the demo's chats are made of: the requests, the figures, the tables."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("comparison.workloads")


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("comparison.results")


def test_a_workload_follows_from_its_seed(workloads: ModuleType) -> None:
    for kind in (workloads.Chats, workloads.Documents):
        assert kind(seed=3).requests() == kind(seed=3).requests() != kind(seed=4).requests()


def test_chats_share_their_system_prompt_and_nothing_else(workloads: ModuleType) -> None:
    made = workloads.Chats(clients=3, chats=7, system_tokens=64).requests()
    first = [request for client in made for request in client if request.turn == 0]
    assert len({request.chat for request in first}) == len(first) == 7
    assert len({tuple(request.tokens[:64]) for request in first}) == 1
    assert len({tuple(request.tokens[64:128]) for request in first}) == 7


def test_chats_have_the_lengths_that_were_asked_for(workloads: ModuleType) -> None:
    chats = workloads.Chats(turns=(12, 18), first_tokens=(5, 9), message_tokens=(2, 4), answer_tokens=(3, 6))
    by_chat: dict[str, list[Any]] = {}
    for request in (request for client in chats.requests() for request in client):
        by_chat.setdefault(request.chat, []).append(request)
        assert 3 <= request.answer <= 6
        shortest, longest = (2, 4) if request.turn else (chats.system_tokens + 5, chats.system_tokens + 9)
        assert shortest <= len(request.tokens) <= longest
        assert all(3 <= token < workloads.VOCABULARY for token in request.tokens)
    assert len(by_chat) == chats.chats
    for requests in by_chat.values():
        assert [request.turn for request in requests] == list(range(len(requests)))
        assert 12 <= len(requests) <= 18


def test_between_two_turns_of_a_chat_its_client_asks_each_of_its_other_chats_that_go_on(workloads: ModuleType) -> None:
    made = workloads.Chats(clients=2, chats=6, turns=(3, 5)).requests()
    assert [len({request.chat for request in client}) for client in made] == [3, 3]
    assert not {request.chat for request in made[0]} & {request.chat for request in made[1]}
    for client in made:
        assert [request.turn for request in client] == sorted(request.turn for request in client)


def test_documents_are_asked_repeatedly_with_new_prompts_between(workloads: ModuleType) -> None:
    documents = workloads.Documents(clients=2, documents=4, document_tokens=100, questions=3, misses=2)
    made = documents.requests()
    beginnings = [tuple(request.tokens[:100]) for client in made for request in client]
    counts = sorted(beginnings.count(each) for each in set(beginnings))
    assert counts == [1] * 12 + [3] * 4  # two misses for each client and round; each document three times
    assert len({tuple(request.tokens) for client in made for request in client}) == len(beginnings)
    for client in made:
        kinds = ["miss" if request.name.startswith("miss") else "document" for request in client]
        assert kinds == ["document", "document", "miss", "miss"] * 3
    assert {len(request.tokens) for client in made for request in client} == {100 + documents.question_tokens}


def test_there_are_no_clients_without_work(workloads: ModuleType) -> None:
    with pytest.raises(ValueError, match="2 chats for 4 clients"):
        workloads.Chats(chats=2, clients=4).requests()
    with pytest.raises(ValueError, match="1 documents for 2 clients"):
        workloads.Documents(documents=1).requests()


def test_a_percentile_is_a_value_that_was_measured(results: ModuleType) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert results.percentile(values, 0.99) == 99
    assert results.percentile(values, 0.5) == 50
    assert results.percentile(values, 1) == 100
    assert results.percentile([7.0], 0.99) == 7
    for wrong in ([], 0.5), ([1.0], 0), ([1.0], 1.1):
        with pytest.raises(ValueError, match="no percentile"):
            results.percentile(*wrong)


def one_round(factor: float, answer: int = 5) -> dict[str, Any]:
    """As run.py measures it; factor: of all times."""
    requests = [
        {
            "name": f"{turn}", "chat": "a", "turn": turn, "prompt": 100, "first_s": factor * (turn + 1), "whole_s": 9.0,
            "answer": [answer], "cached": 0,
        }
        for turn in range(3)
    ]  # fmt: skip
    return {
        "start_s": factor,
        "resident_bytes": 100 << 20,
        "engine_start_s": 8.0,
        "prompts": {
            "1024": {
                "cold_s": 1.0, "settled_s": 0.5, "own_s": 0.01, "cache_s": [0.02 * factor, 0.04 * factor],
                "cached": [1024, 768], "lookup_s": [0.001, 0.003],
            }
        },
        "chats": {"seconds": 3 * factor, "computed": 250, "requests": requests},
    }  # fmt: skip


def without_cache() -> dict[str, Any]:
    found = one_round(4)
    for figure in ("cache_s", "cached", "lookup_s"):
        del found["prompts"]["1024"][figure]
    return {**found, "start_s": None, "resident_bytes": None}


def test_the_figures_of_all_rounds_count(results: ModuleType) -> None:
    found = results.summary({"none": [without_cache()], "kvdepot": [one_round(1), one_round(3)]}, "none")
    depot = found["kvdepot"]
    assert (depot["rounds"], depot["start_s"], found["none"]["start_s"]) == (2, 2, None)
    assert depot["prompts"]["1024"]["cached"] == 768
    assert depot["prompts"]["1024"]["cache_s"] == pytest.approx(0.05)
    assert depot["prompts"]["1024"]["lookup_worst_s"] == 0.003
    chats = depot["chats"]
    assert (chats["first_median_s"], chats["first_p99_s"]) == (3, 9)
    assert (chats["requests"], chats["prompt_tokens"], chats["computed"]) == (3, 300, 250)
    assert chats["requests_s"] == pytest.approx((1 + 1 / 3) / 2)
    assert "documents" not in depot


def test_one_round_with_other_answers_is_told(results: ModuleType) -> None:
    same = results.summary({"none": [without_cache()], "kvdepot": [one_round(1)]}, "none")
    other = results.summary({"none": [without_cache()], "kvdepot": [one_round(1), one_round(1, answer=6)]}, "none")
    assert same["kvdepot"]["chats"]["same_answers"] == 3
    assert other["kvdepot"]["chats"]["same_answers"] == 0


def test_each_turn_has_its_median_and_its_slow_ones(results: ModuleType) -> None:
    runs = [one_round(factor)["chats"] for factor in (1, 2, 10)]
    assert results.turns(runs) == [(0, 2, 10), (1, 4, 20), (2, 6, 30)]


def test_turns_that_few_chats_have_are_left_out(results: ModuleType) -> None:
    runs = [one_round(1)["chats"] for _ in range(4)]
    for run in runs[:2]:  # two of the four chats end before the third turn, and one of them before the second
        del run["requests"][2]
    del runs[0]["requests"][1]
    assert [turn for turn, *_ in results.turns(runs)] == [0, 1]


def test_the_tables_have_a_row_for_each_system_in_their_order(results: ModuleType) -> None:
    figures = results.summary({"kvdepot": [one_round(1)], "none": [without_cache()]}, "none")
    tables = results.tables(figures, {"none": "no cache", "other": "absent", "kvdepot": "kvdepot"})
    assert list(tables) == ["Start and memory", "One prompt of 1,024 tokens", "Multi-turn chats"]
    for rows in tables.values():
        assert [row[0] for row in rows] == ["system", "no cache", "kvdepot"]
        assert {len(row) for row in rows} == {len(rows[0])}
    assert tables["Start and memory"][1][1:] == ("-", "-", "8.0 s")
    assert tables["One prompt of 1,024 tokens"][1][2:6] == ("-", "-", "-", "-")
    assert tables["Multi-turn chats"][2][1:] == (
        "2,000 ms", "3,000 ms", "1,000 ms", "2,500 ms", "1.00", "250 of 300", "3 of 3",
    )  # fmt: skip
    lines = results.markdown(tables["Multi-turn chats"]).splitlines()
    assert lines[1] == "|---|---:|---:|---:|---:|---:|---:|---:|"
    assert lines[3].startswith("| kvdepot | 2,000 ms |")


@pytest.fixture
def multi_turn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    for folder in ("bench", "demo"):
        monkeypatch.syspath_prepend(str(BENCH.parent / folder))
    return importlib.import_module("multi_turn")


def test_the_demo_draws_each_turn_on_one_scale(multi_turn: ModuleType) -> None:
    runs = {"none": one_round(1)["chats"], "kvdepot": one_round(0.25)["chats"]}
    head, *lines = multi_turn.bars(multi_turn.Compared(runs))
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    widths = [[part.count("█") for part in line.split(" ms", 1)] for line in lines]
    assert widths == [[9, 2], [19, 5], [28, 7]]
    assert "3000 ms" in lines[2] and "750 ms" in lines[2]
    column = head.index("with kvdepot")
    assert [line[column - 1 : column + 1] for line in lines] == [" █"] * 3


def test_the_demo_fails_where_answers_differ_or_nothing_was_saved(
    multi_turn: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    computed, fewer = one_round(1)["chats"], {**one_round(1)["chats"], "computed": 249}
    assert multi_turn.report(multi_turn.Compared({"none": computed, "kvdepot": fewer}))
    assert not multi_turn.report(multi_turn.Compared({"none": computed, "kvdepot": computed}))
    assert "same answers: yes" in capsys.readouterr().out
    other = {**one_round(1, answer=6)["chats"], "computed": 249}
    assert not multi_turn.report(multi_turn.Compared({"none": computed, "kvdepot": other}))
    assert "same answers: NO" in capsys.readouterr().out


def test_the_numbers_of_the_demos_chats_are_what_its_plots_need(multi_turn: ModuleType, results: ModuleType) -> None:
    run = one_round(1)["chats"]
    figures = multi_turn.Compared({"none": run, "kvdepot": run}).figures()
    assert figures.pop("same_answers") is True
    assert {key: results.turns([each]) for key, each in figures.items()} == dict.fromkeys(figures, results.turns([run]))
