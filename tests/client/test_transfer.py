"""The values that go from a connector to the wire, and the messages that they become."""

from __future__ import annotations

import pickle

import pytest

from kvdepot.client.transfer import LeaseTerms, PromptChunks, ShardSpec, Transfer, free_chunk_tokens, pack_block_ids
from kvdepot.errors import BadRequest
from kvdepot.protocol import wire

SPEC = ShardSpec("model", 2, 1, 256, 4)
TRANSFER = Transfer("r", b"p" * 32, 3, b"h" * 64, pack_block_ids(range(8)), 2, b"s" * 16)


def test_a_spec_of_blocks_knows_both_lengths() -> None:
    assert ShardSpec.of_blocks("model", 2, 1, 256, 64) == SPEC and SPEC.block_tokens == 64


@pytest.mark.parametrize(
    ("least", "block", "chunk"), [(256, 64, 256), (256, 96, 288), (256, 544, 544), (100, 16, 112), (1, 16, 16)]
)
def test_a_chunk_that_fits_has_the_fewest_whole_blocks_that_reach_the_servers_size(
    least: int, block: int, chunk: int
) -> None:
    spec = ShardSpec.fit_blocks("model", 2, 1, least, block)
    assert (spec.chunk_tokens, spec.blocks_in_chunk, spec.block_tokens) == (chunk, chunk // block, block)


@pytest.mark.parametrize(
    ("token_kib", "longest", "tokens"),
    [(128, 1 << 17, 2), (12, 1 << 17, 22), (1, 1 << 17, 256), (0.1, 1 << 17, 256), (0, 1, 256), (128, 1 << 24, 256)],
)
def test_free_chunks_are_worth_an_entry_and_fit_a_message(token_kib: float, longest: int, tokens: int) -> None:
    assert free_chunk_tokens(int(token_kib * 1024), longest) == tokens


@pytest.mark.parametrize("block", [0, -16, wire.MAX_CHUNK_TOKENS + 1])
def test_a_block_that_is_no_length_fits_nothing(block: int) -> None:
    with pytest.raises(BadRequest, match=f"block size {block} is not between"):
        ShardSpec.fit_blocks("model", 2, 1, 256, block)


def test_messages_have_the_fields_of_the_spec_and_of_what_is_copied() -> None:
    assert SPEC.shards([TRANSFER]) == [wire.Shards("r", "model", 2, 1, b"p" * 32, 3, b"h" * 64, 4, b"s" * 16)]
    prompt = PromptChunks(SPEC, b"h" * 32, b"s")
    assert prompt.lookup("r", 2) == wire.Lookup("model", 2, 4, "r", 2, b"h" * 32, True, b"s", 256)
    assert prompt.lookup("r").readers == 0
    terms = LeaseTerms("expire", 7, 9, drops=True)
    of_lease = "name", "expire", "model", 2, 4, b"h" * 32, b"s", 256, 7, 9, True
    assert prompt.lease("name", terms) == wire.TakeLease(*of_lease)
    assert prompt.drop(3) == wire.Drop("model", 2, 4, b"h" * 32, b"s", 256, 3)


def test_a_transfer_counts_its_chunks_and_blocks_and_reaches_another_process_whole() -> None:
    assert (TRANSFER.chunks, TRANSFER.blocks) == (2, 8)
    assert pickle.loads(pickle.dumps(TRANSFER)) == TRANSFER  # noqa: S301 - as vLLM sends it to its workers
