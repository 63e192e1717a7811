"""Which chunks of which KV cache groups are stored and loaded. Tables are those that vLLM's managers would have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdepot.integrations.vllm.plan import NULL_BLOCK, GroupBlocks, GroupPlan, Piece, PlanRules, StateBlock

CHUNK = 256


def table(group: int, tokens: int, block: int, skipped: int = 0) -> list[int]:
    """Block ids of the first `tokens` tokens, without those of the first `skipped` ones."""
    return [NULL_BLOCK if i < skipped // block else 1000 * (group + 1) + i for i in range(-(-tokens // block))]


def whole(table_number: int = 0, block: int = 128) -> GroupBlocks:
    return GroupBlocks(table_number, CHUNK // block, CHUNK // block, 0)


def window(tokens: int, table_number: int = 1, block: int = 128) -> GroupBlocks:
    """A sliding window, as groups.py fits it."""
    needed, span = tokens - 1, CHUNK // block
    if needed <= CHUNK:
        return GroupBlocks(table_number, span, -(-needed // block), 1)
    return GroupBlocks(table_number, span, span, -(-needed // CHUNK))


def covered(plan: list[Piece], group: int) -> set[int]:
    return {chunk for piece in plan if piece.group == group for chunk in range(piece.first, piece.end)}


# -- loads


def test_a_local_chunk_that_has_just_ended_needs_nothing() -> None:
    plan = GroupPlan([whole(), GroupBlocks(1, 2, 2, 3)], CHUNK)  # local chunks of 1,024 tokens
    tables = [table(0, 4 * CHUNK, 128), table(1, 4 * CHUNK, 128, skipped=4 * CHUNK)]
    assert [piece.group for piece in plan.to_load(tables, 0, 4)] == [0]
    tables[1] = table(1, 6 * CHUNK, 128, skipped=4 * CHUNK)
    tables[0] = table(0, 6 * CHUNK, 128)
    assert plan.to_load(tables, 0, 6)[1] == Piece(1, 4, 6, tables[1][8:12])


# -- stores


def test_small_chunks_do_not_bring_boundaries_closer_together() -> None:
    plan = GroupPlan([GroupBlocks(0, 1, 1, 0), GroupBlocks(1, 1, 1, 4)], 16)
    tables = [list(range(1, 2001)), list(range(2001, 4001))]
    stored = covered(plan.to_store(tables, range(1000), 1000 * 16 + 5), 1)
    assert stored == {*range(252, 256), *range(508, 512), *range(764, 768), *range(996, 1000)}


def test_long_prompts_have_boundaries_at_the_configured_spacing() -> None:
    tables = [table(0, 64 * CHUNK, 128), table(1, 64 * CHUNK, 128)]
    plan = GroupPlan([whole(), window(512)], CHUNK)
    assert covered(plan.to_store(tables, range(64), 64 * CHUNK + 1), 1) == {14, 15, 30, 31, 46, 47, 62, 63}
    plan = GroupPlan([whole(), window(2048)], CHUNK)  # 8 chunks: every 32
    assert covered(plan.to_store(tables, range(64), 64 * CHUNK + 1), 1) == {*range(24, 32), *range(56, 64)}
    plan = GroupPlan([whole(), window(512)], CHUNK, PlanRules(spacing=4))
    assert covered(plan.to_store(tables, range(64), 64 * CHUNK + 1), 1) == {i for i in range(64) if i % 4 >= 2}
    plan = GroupPlan([whole(), window(512)], CHUNK, PlanRules(spacing=1))
    assert covered(plan.to_store(tables, range(64), 64 * CHUNK + 1), 1) == set(range(64))


def test_a_boundary_is_stored_where_earlier_prompts_have_parted() -> None:
    plan = GroupPlan([whole(), window(512)], CHUNK)
    tables = [table(0, 12 * CHUNK, 128), table(1, 12 * CHUNK, 128)]
    assert covered(plan.to_store(tables, range(12), 12 * CHUNK + 1, junction=5 * CHUNK + 130), 1) == {3, 4, 10, 11}
    assert covered(plan.to_store(tables, range(4), 12 * CHUNK + 1, junction=5 * CHUNK), 1) == set()
    assert covered(plan.to_store(tables, range(4, 8), 12 * CHUNK + 1, junction=5 * CHUNK), 1) == {3, 4}
    assert covered(plan.to_store(tables, range(6, 8), 12 * CHUNK + 1, junction=5 * CHUNK), 1) == set()


def test_only_blocks_that_leave_their_request_are_held() -> None:
    plan = GroupPlan([whole(), window(512)], CHUNK)
    tables = [table(0, 4 * CHUNK, 128), table(1, 4 * CHUNK, 128)]
    assert plan.held(plan.to_store(tables, range(4), 4 * CHUNK + 1)) == tables[1][4:]
    assert plan.holds and not GroupPlan([whole()], CHUNK).holds


def test_all_blocks_are_held_where_vllm_may_write_to_them_before_it_says_so() -> None:
    plan = GroupPlan([whole()], CHUNK, PlanRules(holds_all=True))
    blocks = table(0, 4 * CHUNK, 128)
    assert plan.holds and plan.held(plan.to_store([blocks], range(1, 4), 4 * CHUNK + 1)) == blocks[2:]


# -- states

STATE = GroupBlocks(1, 1, 1, 1, is_state=True)


def offered(*chunks: int, table: int = 1, size: int = CHUNK) -> list[StateBlock]:
    return [StateBlock(table, 900 + chunk, chunk * size) for chunk in chunks]


def test_only_the_state_at_the_boundary_is_loaded() -> None:
    plan = GroupPlan([whole(block=256), STATE], CHUNK)
    tables = [table(0, 4 * CHUNK, 256), [NULL_BLOCK] * 3 + [77]]
    assert plan.to_load(tables, 0, 4)[1] == Piece(1, 3, 4, [77])
    assert plan.to_load(tables, 2 * CHUNK, 4) == [Piece(0, 2, 4, tables[0][2:]), Piece(1, 3, 4, [77])]


def test_a_state_is_stored_from_where_vllm_says_and_at_the_end_of_a_chunk_alone() -> None:
    plan = GroupPlan([whole(block=256), STATE], CHUNK)
    tables = [table(0, 4 * CHUNK, 256), [1, 2, 3, 4]]  # what the table has may be anything
    pieces = plan.to_store(tables, range(4), 4 * CHUNK + 1, offered(4))
    assert pieces == [Piece(0, 0, 4, tables[0]), Piece(1, 3, 4, [904])]
    assert plan.held(pieces) == [904]
    assert len(plan.to_store(tables, range(4), 4 * CHUNK + 1)) == 1
    assert len(plan.to_store(tables, range(4), 4 * CHUNK + 1, [StateBlock(1, 904, 4 * CHUNK - 16)])) == 1
    assert len(plan.to_store(tables, range(4), 4 * CHUNK + 1, [StateBlock(1, NULL_BLOCK, 4 * CHUNK)])) == 1
    assert len(plan.to_store(tables, range(3), 4 * CHUNK + 1, offered(4))) == 1, "it is not computed yet"
    assert len(plan.to_store(tables, range(4, 5), 4 * CHUNK + 1, offered(4))) == 1, "it is there"


def test_states_within_a_prompt_are_stored_at_boundaries_and_all_behind_it() -> None:
    plan = GroupPlan([whole(block=256), STATE], CHUNK, PlanRules(has_all_states=True))
    tables = [table(0, 64 * CHUNK, 256), []]
    stored = []
    for first in range(0, 60, 3):  # steps of three chunks
        pieces = plan.to_store(tables, range(first, first + 3), 50 * CHUNK + 1, offered(first + 3))
        stored += [piece.end for piece in pieces if piece.group]
    assert stored == [18, 33, 48, 51, 54, 57, 60]
    chosen = GroupPlan([whole(block=256), STATE], CHUNK)  # vLLM itself offers only some
    assert chosen.to_store(tables, range(3, 6), 50 * CHUNK + 1, offered(6))[1:] == [Piece(1, 5, 6, [906])]


def test_windows_beside_states_are_stored_where_the_states_are() -> None:
    plan = GroupPlan([whole(block=256), window(512, table_number=2, block=256), STATE], CHUNK)
    tables = [table(0, 20 * CHUNK, 256), [], table(2, 20 * CHUNK, 256, skipped=15 * CHUNK)]
    pieces = plan.to_store(tables, range(15, 17), 40 * CHUNK + 1, offered(17))
    assert pieces[1:] == [Piece(1, 15, 17, tables[2][15:17]), Piece(2, 16, 17, [917])]


@given(
    st.integers(1, 900), st.sampled_from([16, 32, 128]), st.integers(1, 20), st.integers(0, 255), st.integers(0, 300),
    st.integers(1, 8),
)  # fmt: skip
def test_any_prompt_stores_what_the_same_and_a_longer_prompt_load(
    tokens: int, block: int, chunks: int, rest: int, step: int, local: int
) -> None:
    """Whatever the window, the block, the prompt and the steps: at each boundary that the lookup of the same prompt, or
    of a longer one, would answer, every block that vLLM allocates for a window is in a stored part."""
    plan = GroupPlan([whole(block=block), window(tokens + 1, block=block)], CHUNK)
    prompt, step = chunks * CHUNK + rest, step + CHUNK
    stored: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}
    done = saved = 0
    while done < prompt:
        now = min(done + step, prompt)
        # vLLM has taken away what the window of the step's first token does not need.
        tables = [table(0, now, block), table(1, now, block, skipped=max(0, done - tokens))]
        for piece in plan.to_store(tables, range(saved, now // CHUNK), prompt) if now // CHUNK > saved else ():
            assert NULL_BLOCK not in piece.blocks and not piece.skip
            each = len(piece.blocks) // (piece.end - piece.first)
            for i, chunk in enumerate(range(piece.first, piece.end)):
                stored[piece.group][chunk] = piece.blocks[i * each : (i + 1) * each]
        done, saved = now, now // CHUNK
    for longer in (0, 1):
        end = plan.most_chunks(prompt + longer)
        if not end:
            continue
        own = min(local * block, end * CHUNK - block)
        tables = [table(0, end * CHUNK, block), table(1, end * CHUNK, block, skipped=max(0, end * CHUNK - tokens))]
        wanted = [{b for b in one[own // block :] if b != NULL_BLOCK} for one in tables]
        for piece in plan.to_load(tables, own, end):
            there = [block_id for chunk in range(piece.first, piece.end) for block_id in stored[piece.group][chunk]]
            assert len(there) == len(piece.blocks)
            assert there[piece.skip :] == piece.blocks[piece.skip :]  # tables number blocks by their place
            wanted[piece.group] -= set(piece.blocks[piece.skip :])
        assert wanted == [set(), set()]


# -- drafters that look ahead


def test_with_a_lookahead_a_prompt_of_whole_chunks_is_loaded_without_its_last() -> None:
    plan = GroupPlan([whole()], CHUNK, PlanRules(lookahead=1))
    assert [plan.most_chunks(tokens) for tokens in (0, 1, CHUNK, CHUNK + 1, 2 * CHUNK)] == [0, 0, 0, 1, 1]
    far = GroupPlan([whole(), window(300)], CHUNK, PlanRules(lookahead=3))
    assert [far.most_chunks(tokens) for tokens in (CHUNK + 2, CHUNK + 3)] == [0, 1]


def test_positions_that_drafters_compute_again_are_not_final() -> None:
    assert GroupPlan([whole()], CHUNK).final_tokens(1000, 900) == 900
    assert GroupPlan([whole()], CHUNK, PlanRules(lookahead=1)).final_tokens(800, 900) == 800
    assert GroupPlan([whole()], CHUNK, PlanRules(lookahead=3)).final_tokens(800, 900) == 798


def test_with_a_lookahead_the_last_state_that_vllm_keeps_of_a_prompt_is_stored() -> None:
    places = [whole(block=256), GroupBlocks(1, 1, 1, 1, is_state=True)]
    plan = GroupPlan(places, CHUNK, PlanRules(spacing=99, has_all_states=True, lookahead=1))
    tables = [table(0, 5 * CHUNK, 256), table(1, 5 * CHUNK, 256)]
    pieces = plan.to_store(tables, range(2, 4), 5 * CHUNK + 17, [StateBlock(1, 77, 4 * CHUNK)])
    assert Piece(1, 3, 4, [77]) in pieces
