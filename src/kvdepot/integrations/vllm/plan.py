"""Which chunks of which KV cache groups are stored and loaded, and from or into which blocks. Pure; knows no vLLM.

Used by scheduler.py. A **table** is vLLM's list of a request's block ids in one group, in the order of its tokens. It
has the null block where the request has no block: tokens that have left its window. Invariant: no null block is read
or written.

Of a bounded group, a prompt can be resumed at a boundary only with the parts of the last chunks before it. So parts
are stored where hits can end:

- at the end of the prompt, and at the end of the same prompt without its last token, which is always computed;
- behind it, after every decoded chunk, as nobody knows where decoding ends;
- at every n-th chunk, for prompts that begin alike and go on differently;
- where vLLM has seen an earlier prompt part from this one (the **junction**).

A state is another thing: it is there only at the end of a step, and vLLM says in which block (`State`). Where vLLM
offers those of all steps, the first behind every n-th chunk is stored, besides those at the ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["NULL_BLOCK", "Piece", "Place", "Plan", "State"]

NULL_BLOCK = 0
_SPACING = 16
"""Chunks between two boundaries within a prompt: 4,096 tokens with the default chunk size. A longer distance computes
up to that many tokens again where prompts part; a shorter one stores more parts that only such prompts need. Decision
0052 has the figures."""
_SPACING_REACHES = 4
"""But at least this many times the reach of a group, so that at most every fourth of its parts is stored for it."""


class Place(NamedTuple):
    """Where a group's blocks are. table: the number of its table. span: blocks per chunk there. stored: how many of
    them are stored, the last ones. reach: as in wire.Group. is_state: whether it is one state, in one block.
    """

    table: int
    span: int
    stored: int
    reach: int
    is_state: bool = False


class State(NamedTuple):
    """The block in which the state after this many tokens is, once the step is over. table: of its group."""

    table: int
    block: int
    tokens: int


class Piece(NamedTuple):
    """Chunks `[first, end)` of a group, and the stored blocks of each. skip: leading blocks that a load must not
    write.
    """

    group: int
    first: int
    end: int
    blocks: list[int]
    skip: int = 0


class Plan:
    """The groups of one model, in the order of `ShardSpec.groups`."""

    def __init__(
        self,
        places: Sequence[Place],
        chunk_tokens: int,
        spacing: int = 0,
        has_all_states: bool = False,
        lookahead: int = 0,
        holds_all: bool = False,
    ) -> None:
        """spacing: chunks between boundaries within a prompt; 0: the default. has_all_states: whether vLLM offers the
        states of all steps, not only of those that it expects to be needed. lookahead: as of `ChunkChain`.
        holds_all: whether vLLM may write to any group's blocks before it says that their request was preempted.
        """
        self._places = list(places)
        self._chunk_tokens = chunk_tokens
        self._spacing = spacing
        self._has_all_states = has_all_states
        self._lookahead = lookahead
        self._holds_all = holds_all
        self.is_bounded = any(place.reach for place in places)

    def __repr__(self) -> str:
        return f"<Plan {self._places}>"

    def most_chunks(self, tokens: int) -> int:
        """How many chunks of a prompt of this many tokens may be loaded.

        vLLM computes the last token of a prompt again even if all of it is loaded. In a bounded group, that needs one
        more token before the boundary than is there. With a lookahead, a chunk at the very end has no hash.
        """
        return max(0, tokens - max(self.is_bounded, self._lookahead)) // self._chunk_tokens

    def final_tokens(self, computed: int, known: int) -> int:
        """How many tokens' KV will not change any more once this many are computed. known: tokens that are no drafts.

        Where each of several drafters reads one token further than the one before it, the KV of the last positions is
        computed again once the tokens are known that it was computed from.
        """
        return min(computed, known) - max(0, self._lookahead - 1)

    # -- loads

    def to_load(self, tables: Sequence[Sequence[int]], local_tokens: int, end: int) -> list[Piece]:
        """What must be loaded to resume at chunk `end`, where the engine has the first `local_tokens` itself."""
        pieces = []
        for group, place in enumerate(self._places):
            table, last = tables[place.table], end * place.span
            block = local_tokens * place.span // self._chunk_tokens
            while block < last and table[block] == NULL_BLOCK:
                block += 1
            if block < last:
                pieces.append(self._load(group, place, table, block, end))
        return pieces

    def _load(self, group: int, place: Place, table: Sequence[int], block: int, end: int) -> Piece:
        """block: the first in the table to write."""
        first = block // place.span
        blocks = _stored(place, table, first, end)
        skip = block - (first + 1) * place.span + place.stored
        is_whole = (not place.reach or first >= end - place.reach) and skip >= 0 and NULL_BLOCK not in blocks[skip:]
        assert is_whole, f"group {group}: block {block} of {table}, to resume at chunk {end}"
        return Piece(group, first, end, blocks, skip)

    # -- stores

    def to_store(
        self,
        tables: Sequence[Sequence[int]],
        first: int,
        end: int,
        prompt_tokens: int,
        states: Iterable[State] = (),
        junction: int = 0,
    ) -> list[Piece]:
        """What to store of chunks `[first, end)`, which are computed. prompt_tokens: of the whole prompt.

        states: those that vLLM offers. junction: the tokens that an earlier prompt shares, as far as vLLM knows.
        """
        last, junction = self.most_chunks(prompt_tokens), junction // self._chunk_tokens
        at = {(state.table, state.tokens // self._chunk_tokens): state.block for state in states if self._ends(state)}
        # With a lookahead, the last state that vLLM keeps of a prompt is that one block before its last whole one.
        kept = last - (self._lookahead > 0)
        resumed = {chunk for _, chunk in at if first < chunk <= end and self._is_due(first, chunk, kept)}
        pieces = []
        for group, place in enumerate(self._places):
            table = tables[place.table]
            if place.is_state:
                blocks = [(chunk, at.get((place.table, chunk), NULL_BLOCK)) for chunk in sorted(resumed)]
                pieces += [Piece(group, chunk - 1, chunk, [block]) for chunk, block in blocks if block != NULL_BLOCK]
                continue
            if not place.reach:
                pieces.append(Piece(group, first, end, _stored(place, table, first, end)))
                continue
            useful = {chunk for chunk in range(first, end) if self._is_useful(place.reach, chunk, last)}
            ends = {*resumed, junction} if first < junction <= end else resumed
            useful.update(*(range(max(0, chunk - place.reach), chunk) for chunk in ends))
            there = [c for c in sorted(useful) if NULL_BLOCK not in _stored(place, table, c, c + 1)]
            for start, stop in _runs(there):
                pieces.append(Piece(group, start, stop, _stored(place, table, start, stop)))
        return pieces

    def _is_useful(self, reach: int, chunk: int, last: int) -> bool:
        """Whether a hit can end within `reach` chunks from the start of this one. last: boundary of the prompt."""
        spacing = self._spacing or max(_SPACING, _SPACING_REACHES * reach)
        return chunk + reach >= last or spacing - chunk % spacing <= reach

    def _ends(self, state: State) -> bool:
        """Whether a state is one at the end of a chunk."""
        return state.tokens > 0 and state.tokens % self._chunk_tokens == 0

    def _is_due(self, first: int, chunk: int, last: int) -> bool:
        """Whether the states at the end of a step that began behind chunk `first` are stored."""
        spacing = self._spacing or _SPACING
        return chunk >= last or not self._has_all_states or first // spacing < chunk // spacing

    def is_held(self, group: int) -> bool:
        """Whether vLLM may take blocks of this group from a request before their store is ended or voided."""
        return self._holds_all or self._places[group].reach > 0

    @property
    def holds(self) -> bool:
        """Whether blocks of any group are held."""
        return self._holds_all or self.is_bounded

    def held(self, pieces: Iterable[Piece]) -> list[int]:
        """The blocks of pieces that must be held until they are stored."""
        return [block for piece in pieces if self.is_held(piece.group) for block in piece.blocks]

    def split(self, tables: Sequence[Sequence[int]], read_tokens: int, end: int | None = None) -> tuple[list[int], int]:
        """The blocks of a request up to chunk `end` (None: all), those first that it did not compute; and their number.

        read_tokens: tokens that it did not compute.
        """
        read: list[int] = []
        computed: list[int] = []
        for place in self._places:
            table, at = tables[place.table], -(-read_tokens * place.span // self._chunk_tokens)
            stop = len(table) if end is None else end * place.span
            read += table[: min(at, stop)]
            computed += table[at:stop]
        if self.is_bounded:
            read = [block for block in read if block != NULL_BLOCK]
            computed = [block for block in computed if block != NULL_BLOCK]
        return read + computed, len(read)


def _stored(place: Place, table: Sequence[int], first: int, end: int) -> list[int]:
    """The stored blocks of chunks `[first, end)`."""
    if place.stored == place.span:
        return list(table[first * place.span : end * place.span])
    ends = ((chunk + 1) * place.span for chunk in range(first, end))
    return [block for last in ends for block in table[last - place.stored : last]]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs `[start, stop)`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
