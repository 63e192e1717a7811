"""Which chunks of which KV cache groups are stored and loaded, and from or into which blocks. Pure; knows no vLLM.

Used by scheduler.py. A **table** is vLLM's list of a request's block ids in one group, in the order of its tokens. It
has the null block where the request has no block: tokens that have left its window. Invariant: no null block is read
or written.

Of a bounded group, a prompt can be resumed at a boundary only with the parts of the last chunks before it. So parts
are stored where hits can end:

- at the end of the prompt, and at the end of the same prompt without its last token, which is always computed;
- behind it, after every decoded chunk, as decoding may end there;
- at every n-th chunk, for prompts that begin alike and go on differently;
- where vLLM has seen an earlier prompt part from this one (the **junction**).

States differ: a state exists only for the end of a step, and vLLM says in which block (`StateBlock`). Where vLLM offers
the states of all steps, the first state behind every n-th chunk is stored, besides the states at the ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

NULL_BLOCK = 0
_SPACING, _SPACING_TOKENS = 16, 4096
"""Two boundaries within a prompt are at least this many chunks, and this many tokens, apart. A longer distance computes
up to that many tokens again where prompts part; a shorter one stores more parts that only such prompts need
(docs/decisions.md has the figures)."""
_SPACING_REACHES = 4
"""Boundaries are also at least this many reaches of a group apart: at most a fourth of its parts is stored for them."""


class GroupBlocks(NamedTuple):
    """The blocks of a group. table: the number of its table. span: blocks per chunk in that table. stored: how many
    blocks of each chunk are stored, counted from its end. reach: see wire.Group. is_state: whether the group is one
    state, in one block.
    """

    table: int
    span: int
    stored: int
    reach: int
    is_state: bool = False


class StateBlock(NamedTuple):
    """The block that has the state after `tokens` tokens once the step is over. table: number of its group's table."""

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


class PlanRules(NamedTuple):
    """The ways in which an engine writes and offers blocks.

    spacing: chunks between boundaries within a prompt; 0: the default. lookahead: number of tokens after a position on
    which a drafter's KV at that position depends. has_all_states: whether vLLM offers the states of all steps, or only
    of steps whose states it expects to be needed. holds_all: whether vLLM may write to any group's blocks before it
    says that their request was preempted. has_drafts: whether steps compute tokens that may be rejected.
    """

    spacing: int = 0
    lookahead: int = 0
    has_all_states: bool = False
    holds_all: bool = False
    has_drafts: bool = False


class GroupPlan:
    """The groups of one model, in the order of `ShardSpec.groups`."""

    def __init__(self, groups: Sequence[GroupBlocks], chunk_tokens: int, rules: PlanRules = PlanRules()) -> None:  # noqa: B008
        self._groups = list(groups)
        self._chunk_tokens = chunk_tokens
        self._rules = rules
        self._spacing = rules.spacing or max(_SPACING, -(-_SPACING_TOKENS // chunk_tokens))
        self.is_bounded = any(group.reach for group in groups)
        self.is_plain = len(groups) == 1 and not self.is_bounded
        """Whether a request can resume after each chunk, and vLLM has one table of blocks for it."""
        self.has_tails = (
            any(group.is_state for group in groups)
            and all(group.span == 1 and (group.is_state or not group.reach) for group in groups)
            and not (rules.lookahead or rules.has_drafts)
        )
        """Whether a request can end, and another resume, within a chunk: its end is in the last block of each group."""

    def most_chunks(self, tokens: int) -> int:
        """The number of chunks of a prompt of this many tokens that may be loaded.

        vLLM computes the last token of a prompt again even if all of it is loaded. In a bounded group, computing that
        token needs one more token before the boundary than is stored. With a lookahead, a chunk at the very end has no
        hash.
        """
        return max(0, tokens - max(self.is_bounded, self._rules.lookahead)) // self._chunk_tokens

    def final_tokens(self, computed: int, known: int) -> int:
        """The number of tokens whose KV is final once this many are computed. known: number of tokens that are no
        drafts.

        Where each of several drafters reads one token further than the drafter before, the KV of the last positions is
        computed again once those tokens are known.
        """
        return min(computed, known) - max(0, self._rules.lookahead - 1)

    def most_blocks(self, tokens: int, step_tokens: int) -> int:
        """The most blocks that a request of this many tokens needs at a time; for windows and states, an upper bound.
        step_tokens: the most tokens of a request that a step computes."""
        needed = 0
        for group in self._groups:
            block_tokens = self._chunk_tokens // group.span
            kept = group.reach * self._chunk_tokens + step_tokens + 2 * block_tokens if group.reach else tokens
            needed += -(-min(tokens, kept) // block_tokens)
        return needed

    def count_blocks(self, tables: Sequence[Sequence[int]]) -> int:
        return sum(block != NULL_BLOCK for group in self._groups for block in tables[group.table])

    # -- loads

    def load_blocks(self, first: int, end: int) -> list[int]:
        """The number of blocks of each group to load to resume at chunk `end`, if the chunks before `first` are
        there."""
        return [group.stored * min(end - first, group.reach or end) for group in self._groups]

    def to_load(self, tables: Sequence[Sequence[int]], local_tokens: int, end: int) -> list[Piece]:
        """The pieces to load to resume at chunk `end`, where the engine has the first `local_tokens` itself."""
        pieces = []
        for number, group in enumerate(self._groups):
            table, last = tables[group.table], end * group.span
            block = local_tokens * group.span // self._chunk_tokens  # the first block to write
            while block < last and table[block] == NULL_BLOCK:
                block += 1
            if block == last:
                continue
            first = block // group.span
            blocks = _stored(group, table, first, end)
            skip = block - (first + 1) * group.span + group.stored
            is_whole = (not group.reach or first >= end - group.reach) and skip >= 0 and NULL_BLOCK not in blocks[skip:]
            assert is_whole, f"group {number}: block {block} of {table}, to resume at chunk {end}"
            pieces.append(Piece(number, first, end, blocks, skip))
        return pieces

    # -- stores

    def tail(self, tables: Sequence[Sequence[int]], chunks: int) -> list[Piece]:
        """The pieces of a tail behind this many chunks; empty if vLLM has let its blocks go."""
        blocks = [tables[group.table][chunks : chunks + 1] for group in self._groups]
        if any(not block or block[0] == NULL_BLOCK for block in blocks):
            return []
        return [Piece(number, chunks, chunks + 1, [*block]) for number, block in enumerate(blocks)]

    def to_store(
        self,
        tables: Sequence[Sequence[int]],
        chunks: range,
        prompt_tokens: int,
        states: Iterable[StateBlock] = (),
        junction: int = 0,
    ) -> list[Piece]:
        """The pieces to store of these chunks, which are computed. prompt_tokens: of the whole prompt.

        states: the states that vLLM offers. junction: number of tokens that an earlier prompt shares, as far as vLLM
        knows.
        """
        first, end = chunks.start, chunks.stop
        last, junction = self.most_chunks(prompt_tokens), junction // self._chunk_tokens
        ends_of_chunks = [each for each in states if each.tokens > 0 and each.tokens % self._chunk_tokens == 0]
        at = {(state.table, state.tokens // self._chunk_tokens): state.block for state in ends_of_chunks}
        # With a lookahead, the last state that vLLM keeps of a prompt is that one block before its last whole one.
        kept = last - (self._rules.lookahead > 0)
        resumed = {chunk for _, chunk in at if first < chunk <= end and self._is_due(first, chunk, kept)}
        pieces = []
        for number, group in enumerate(self._groups):
            table = tables[group.table]
            if group.is_state:
                blocks = [(chunk, at.get((group.table, chunk), NULL_BLOCK)) for chunk in sorted(resumed)]
                pieces += [Piece(number, chunk - 1, chunk, [block]) for chunk, block in blocks if block != NULL_BLOCK]
                continue
            if not group.reach:
                pieces.append(Piece(number, first, end, _stored(group, table, first, end)))
                continue
            useful = {chunk for chunk in range(first, end) if self._is_useful(group.reach, chunk, last)}
            ends = {*resumed, junction} if first < junction <= end else resumed
            useful.update(*(range(max(0, chunk - group.reach), chunk) for chunk in ends))
            there = [c for c in sorted(useful) if NULL_BLOCK not in _stored(group, table, c, c + 1)]
            for start, stop in _runs(there):
                pieces.append(Piece(number, start, stop, _stored(group, table, start, stop)))
        return pieces

    def _is_useful(self, reach: int, chunk: int, last: int) -> bool:
        """Whether a hit can end within `reach` chunks from the start of `chunk`. last: the prompt's last boundary."""
        spacing = self._rules.spacing or max(self._spacing, _SPACING_REACHES * reach)
        return chunk + reach >= last or spacing - chunk % spacing <= reach

    def _is_due(self, first: int, chunk: int, last: int) -> bool:
        """Whether the states at the end of a step that began behind chunk `first` are stored."""
        spacing = self._spacing
        return chunk >= last or not self._rules.has_all_states or first // spacing < chunk // spacing

    def is_held(self, group: int) -> bool:
        """Whether vLLM may take blocks of this group from a request before their store is ended or voided."""
        return self._rules.holds_all or self._groups[group].reach > 0

    @property
    def holds(self) -> bool:
        return self._rules.holds_all or self.is_bounded

    def held(self, pieces: Iterable[Piece]) -> list[int]:
        """The blocks of pieces that must be held until they are stored."""
        return [block for piece in pieces if self.is_held(piece.group) for block in piece.blocks]

    def split(self, tables: Sequence[Sequence[int]], read_tokens: int, end: int | None = None) -> tuple[list[int], int]:
        """The blocks of a request up to chunk `end` (None: all), first the blocks that it did not compute; and the
        number of those.

        read_tokens: number of tokens that it did not compute.
        """
        read: list[int] = []
        computed: list[int] = []
        for group in self._groups:
            table, at = tables[group.table], -(-read_tokens * group.span // self._chunk_tokens)
            stop = len(table) if end is None else end * group.span
            read += table[: min(at, stop)]
            computed += table[at:stop]
        if self.is_bounded:
            read = [block for block in read if block != NULL_BLOCK]
            computed = [block for block in computed if block != NULL_BLOCK]
        return read + computed, len(read)


def _stored(group: GroupBlocks, table: Sequence[int], first: int, end: int) -> list[int]:
    if group.stored == group.span:
        return list(table[first * group.span : end * group.span])
    ends = ((chunk + 1) * group.span for chunk in range(first, end))
    return [block for last in ends for block in table[last - group.stored : last]]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs `[start, stop)`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
