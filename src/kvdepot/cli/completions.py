"""The messages between `kvdepot certify` and its engines, and the difference between two answers."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

Source: TypeAlias = Literal["nothing", "computing", "own cache", "depot"]
"""Where an answer's KV comes from. "computing" also stores the KV in the depot. The other sources store nothing there,
because a second try would find the chunks that the first one had stored."""
ROOM = 2.0
"""An answer with the depot may differ this many times as much as two answers without it: those few answers do not show
the largest difference that rounding can make."""
MOST = 1e9
"""The largest difference: a token that is not among the likeliest of the other answer, or no number. It fails any
answer with the depot."""


class Generate(msgspec.Struct, tag=True):
    """A command to an engine: answer prompts together, with one adapter. source: of their KV."""

    prompts: list[list[int]]
    adapter: int
    source: Source
    new_tokens: int


class Encode(msgspec.Struct, tag=True):
    """A command to an engine: turn a text into tokens."""

    text: str


class Description(msgspec.Struct):
    """An engine. tried: its features by name, each with its value, or empty if the engine does not use the feature.
    longest: most tokens of prompt and answer together. blocks: of the engine's own cache, in all KV cache groups."""

    model: str
    tried: dict[str, str]
    adapters: list[str]
    block_tokens: int
    longest: int
    vocabulary: int
    has_tokenizer: bool
    blocks: int


class Completion(msgspec.Struct, frozen=True):
    """An engine's answer to one prompt. logprobs: of the likeliest tokens at each place, by token.

    ttft_s: seconds to the first token. cached: prompt tokens that were not computed; loaded: those that the depot had.
    failed: shards of all prompts run together that could not be loaded, whose tokens were computed. took_s: seconds to
    the last token.
    """

    ttft_s: float
    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached: int
    loaded: int
    failed: int
    took_s: float = 0.0


class Case(msgspec.Struct):
    """A prompt, for the model (adapter 0) or an adapter. computed: its answers alone and together with the others; own:
    twice from the engine's own prefix cache. expected: tokens that should be loaded, at least."""

    name: str
    tokens: list[int]
    adapter: int
    computed: list[Completion] = []
    own: list[Completion] = []
    expected: int = 1


def difference(one: Completion, other: Completion) -> tuple[float, str]:
    """The largest difference of logprobs up to the first other token, and where `other` begins to differ."""
    most, where = 0.0, ""
    for place, (mine, others, left, right) in enumerate(
        zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True), 1
    ):
        for token in left:
            if token in right or token in (str(mine), str(others)):  # not those that just one has among the likeliest
                gap = abs(left[token] - right.get(token, math.inf)) if left[token] != right.get(token) else 0.0
                most = max(most, gap if gap < MOST else MOST)
                if gap != 0.0 and not where:
                    where = f"token {place}: the logprob of {token} is {right.get(token)} instead of {left[token]}"
        if mine != others:
            return most, f"token {place} is {others} instead of {mine}; {where}"
    return most, where or ("" if one.logprobs == other.logprobs else "other tokens are among the likeliest")
