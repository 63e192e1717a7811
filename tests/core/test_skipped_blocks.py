"""Blocks that a retrieve skips: a client names the null block for tokens that have left a sliding window."""

from __future__ import annotations

import numpy as np
import pytest

from kvdepot.core.admission import check_shards, check_source, check_targets
from kvdepot.errors import BadRequest
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, Mapping, Segment

LAYOUT = Layout([Mapping("kv", 8 * 64)], [Segment(0, 0, 64, 64)], 8, b"f" * 32)


def part(blocks: list[int], skip: int) -> wire.Shards:
    ids = np.array(blocks, np.uint32).tobytes()
    return wire.Shards("r", "model", 1, 0, b"p" * 32, 0, b"h" * 64, ids, skip)


def test_skipped_blocks_may_repeat_and_others_may_not() -> None:
    check_shards(part([0, 0, 1, 2, 3, 4], skip=2), LAYOUT)
    for blocks, skip in (([0, 0, 0, 1, 2, 3], 1), ([0, 0, 1, 2, 3, 1], 2)):
        with pytest.raises(BadRequest, match="repeat"):
            check_shards(part(blocks, skip), LAYOUT)


def test_two_parts_may_skip_the_same_block_and_not_write_it() -> None:
    check_targets([part([0, 1, 2, 3], 1), part([0, 4, 5, 6], 1)])
    with pytest.raises(BadRequest, match="same block"):
        check_targets([part([0, 1, 2, 3], 1), part([0, 4, 5, 3], 1)])


def test_a_store_skips_nothing() -> None:
    check_source(part([0, 1, 2, 3], 0))
    with pytest.raises(BadRequest, match="only a retrieve"):
        check_source(part([0, 0, 1, 2], 1))
