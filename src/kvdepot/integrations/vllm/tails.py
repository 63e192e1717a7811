"""Ends of prompts and answers within a chunk, of models with states: where a later prompt may be resumed.

Used by scheduler.py. vLLM fits the blocks of these models to their states: 400 to 2,144 tokens. It keeps states at the
ends of blocks, but resumes a prompt at any token whose state is loaded. When a request ends, the state after its last
computed token is in its last block; so that block of each KV cache group is stored, as a **tail**.

A prompt does not say where a tail may be. Candidates are the ends of requests of this engine behind the same chunk, and
the places of tokens at which requests stop: so a chat's next turn also finds the tail that another engine has stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvdepot.integrations.vllm.requests import PromptEnd, RequestChunks

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MOST = 32
"""Candidates that are looked up for one prompt."""
_SCANNED = 8192
"""The last tokens of a prompt, among which stop tokens are looked for."""
_BEHIND, _REMEMBERED = 16, 1 << 14
"""The numbers of ends that are remembered behind one chunk, and of chunks with such ends; the latest are kept."""


class Tails:
    """The ends of an engine's requests, and the candidates that follow for new prompts."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._ends: dict[bytes, list[int]] = {}  # tokens from the prompt's start, by the hash of the chunk before

    def candidates(self, request: Request, prompt: RequestChunks, most: int) -> list[PromptEnd]:
        """The tails that may be stored of a hashed prompt's first `most` tokens, the longest first."""
        chain, ends = prompt.chain, set[int]()
        if request.streaming_queue is not None:
            return []
        for chunk in range(len(chain) + 1):
            ends.update(self._ends.get(chain.parent(chunk), ()))
        params = request.sampling_params
        ends |= _stops(request.prompt_token_ids or (), params.all_stop_token_ids if params is not None else ())
        size = self._chunk_tokens
        useful = [end for end in ends if end <= most and end % size and end // size <= len(chain)]
        return [self._make(prompt, end) for end in sorted(useful, reverse=True)[:_MOST]]

    def end(self, prompt: RequestChunks, tokens: int) -> PromptEnd | None:
        """Remember the end of a request; returns its tail, None if a chunk ends there or its chunks have no hashes."""
        chunks = tokens // self._chunk_tokens
        if not tokens % self._chunk_tokens or chunks > len(prompt.chain):
            return None
        parent = prompt.chain.parent(chunks)
        ends = self._ends.pop(parent, [])
        self._ends[parent] = [*(end for end in ends if end != tokens), tokens][-_BEHIND:]
        if len(self._ends) > _REMEMBERED:
            del self._ends[next(iter(self._ends))]
        return self._make(prompt, tokens)

    def _make(self, prompt: RequestChunks, tokens: int) -> PromptEnd:
        return PromptEnd(tokens, tokens // self._chunk_tokens, prompt.tail(tokens))


def _stops(tokens: Sequence[int], stops: Collection[int]) -> set[int]:
    """The ends before and behind the last stop tokens of a prompt: a step may have computed the stop token, too."""
    if not stops:
        return set()
    first = max(0, len(tokens) - _SCANNED)
    places = [place for place, token in enumerate(tokens[first:], first) if token in stops]
    return {end for place in places for end in (place, place + 1)}
