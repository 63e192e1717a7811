"""Replays of traces (bench/replay.py): formats, exact hit rates of small traces, the bound."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.replay import Trace, load, main, replay
from bench.traces import WORKLOADS
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES

MOONCAKE = """\
{"timestamp": 0, "input_length": 1024, "output_length": 52, "hash_ids": [0, 1]}
{"timestamp": 1500, "input_length": 1100, "output_length": 26, "hash_ids": [0, 1, 2]}

{"timestamp": 3000, "input_length": 400, "output_length": 1, "hash_ids": [3]}
"""
BAILIAN = """\
{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 40, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [10, 11, 12]}
{"chat_id": 8, "parent_chat_id": 7, "timestamp": 62.5, "input_length": 50, "output_length": 8, "type": "text", "turn": 2, "hash_ids": [10, 11, 12, 13]}
{"chat_id": 9, "parent_chat_id": -1, "timestamp": 63.0, "input_length": 30, "output_length": 8, "type": "file", "turn": 1, "hash_ids": [14, 11]}
"""  # noqa: E501


def trace_of(*prompts: Sequence[int | str]) -> Trace:
    return Trace((float(number), prompt) for number, prompt in enumerate(prompts))


def numbers(trace: Trace) -> list[list[int]]:
    return [blocks.tolist() for blocks in trace]


def written(folder: Path, text: str, name: str = "trace.jsonl") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# -- formats


def test_mooncake_ids_are_prefixes_of_512_tokens_a_block_in_order_of_arrival(tmp_path: Path) -> None:
    trace = load(written(tmp_path, MOONCAKE))
    assert (numbers(trace), trace.unique, trace.block_tokens) == ([[0, 1], [0, 1, 2], [3]], 4, 512)
    turned = load(written(tmp_path, "".join(reversed(MOONCAKE.splitlines(keepends=True)))))
    assert [len(prompt) for prompt in numbers(turned)] == [2, 3, 1]


def test_the_same_bailian_id_behind_another_beginning_is_another_block(tmp_path: Path) -> None:
    trace = load(written(tmp_path, BAILIAN))
    assert (numbers(trace), trace.block_tokens) == ([[0, 1, 2], [0, 1, 2, 3], [4, 5]], 16)


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        (MOONCAKE + '{"timestamp": 4, "hash_ids": [1', 5, "truncated"),
        (MOONCAKE + '{"timestamp": 4}', 5, "hash_ids"),
        (MOONCAKE + '{"timestamp": 4, "hash_ids": [1.5]}', 5, "hash_ids"),
        (MOONCAKE + '{"timestamp": 4, "hash_ids": null}', 5, "hash_ids"),
        (BAILIAN + MOONCAKE, 4, "chat_id"),
        (BAILIAN + "\xff", 4, "not JSON"),
        ("once upon a time\n", 1, "not JSON"),
        ("17\n", 1, "object"),
        ("\n\n{}\n", 3, "timestamp"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert complaint in str(caught.value)


@pytest.mark.parametrize("content", [None, gzip.compress(MOONCAKE.encode())[:-12]], ids=["missing", "cut off"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "trace.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace\.gz"):
        load(str(path))


# -- hit rates


def hits(trace: Trace, policy: str, capacity: int) -> int:
    return replay(trace, policy, capacity).hits


def test_small_traces_hit_exactly_as_often_as_by_hand() -> None:
    again = trace_of("a", "b", "a", "c", "a", "b")  # a hit is a use
    assert [hits(again, "lru", capacity) for capacity in (1, 2, 3)] == [0, 2, 3]
    assert [hits(again, "belady", capacity) for capacity in (1, 2)] == [2, 3]
    trace = trace_of("ab", "cd", "ab")
    assert [hits(trace, "lru", capacity) for capacity in (1, 2, 3, 4, 5)] == [0, 0, 1, 2, 2]
    assert [hits(trace, "belady", capacity) for capacity in (1, 2, 3)] == [1, 2, 2]
    result = replay(trace, "lru", 3)
    assert (len(trace), result.references, result.hit_rate) == (3, 6, 1 / 6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_is_larger_than_the_cache_leaves_its_beginning(policy: str) -> None:
    assert hits(trace_of("abcdefgh", "abcdefgh"), policy, 3) == 3


PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=60)


@given(prompts=PROMPTS, capacity=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_no_policy_exceeds_belady_nor_belady_the_infinite_cache(prompts: list[list[int]], capacity: int) -> None:
    trace = trace_of(*prompts)
    bound, infinite = hits(trace, "belady", capacity), len(trace.blocks) - trace.unique
    assert bound <= infinite
    assert bound <= hits(trace, "belady", capacity + 1)
    for policy in POLICIES:
        assert hits(trace, policy, capacity) <= bound
    if capacity >= trace.unique:
        assert {hits(trace, policy, capacity) for policy in POLICIES} == {infinite}


def most_hits(trace: Trace, capacity: int) -> int:
    """Brute force: try every prefix-closed set of blocks that can be kept after each request."""
    best: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for prompt in trace:
        path = [tuple(prompt[: end + 1].tolist()) for end in range(len(prompt))]
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for cached, count in best.items():
            found = count + len(list(itertools.takewhile(cached.__contains__, path)))
            there = sorted(cached.union(path))
            for size in range(min(capacity, len(there)) + 1):
                for kept in map(frozenset, itertools.combinations(there, size)):
                    if all(block[:-1] in kept or len(block) == 1 for block in kept):
                        following[kept] = max(following.get(kept, 0), found)
        best = following
    return max(best.values())


@given(prompts=st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=6), capacity=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_belady_is_the_most_a_cache_of_whole_prefixes_can_hit(prompts: list[list[int]], capacity: int) -> None:
    trace = trace_of(*prompts)
    assert hits(trace, "belady", capacity) == most_hits(trace, capacity)


# -- made-up traces


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time_in_order_of_time_and_its_ids_mean_prefixes(name: str) -> None:
    requests = list(WORKLOADS[name](5, 400))
    assert requests == list(WORKLOADS[name](5, 400)) != list(WORKLOADS[name](6, 400))
    assert len(requests) == 400
    assert all(prompt for _, prompt in requests)
    times = [time_s for time_s, _ in requests]
    assert times == sorted(times)
    before: dict[int, tuple[int, ...]] = {}
    for _, prompt in requests:
        for place, block in enumerate(prompt):
            assert before.setdefault(block, tuple(prompt[:place])) == tuple(prompt[:place])


def test_a_trace_is_replayed_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, MOONCAKE)
    assert main([path, "1", "4"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "33.3%" in out[0] and [line.split()[0] for line in out[2:]] == ["1", "4"]
    assert out[-1].split()[1:] == ["33.3%"] * (len(POLICIES) + 1)
    assert main([path, "0"]) == 2 and main([str(tmp_path / "none")]) == 2
