"""Every layout of vLLM's KV, on bytes that its own code lays out."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvdepot.devices import open_blocks
from kvdepot.devices.blocks import CopyPiece
from kvdepot.integrations.vllm.paged_kv import describe_kv
from tests.conftest import StartDepot
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import output, prompt, same_as_own

BLOCKS, LAYERS, TOKENS = 6, 3, 32
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
ONE_RUN = ("LBHNC", "LBNHC")
"""Those whose blocks vLLM can split for its kernels: a layer's block is one run of bytes, without a gap to the next."""
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "GQA": ({"num_kv_heads": 2, "head_size": 16}, LAYOUTS, ONE_RUN),
    "MLA": ({"num_kv_heads": 1, "head_size": 48}, LAYOUTS, (*ONE_RUN, "LHBNC")),
    "padded": ({"num_kv_heads": 2, "head_size": 16, "page_size_padded": 8192}, (*ONE_RUN, "BLHNC", "BLNHC"), ()),
}
"""A spec, the layouts that vLLM makes of it, and those it makes where kernels want smaller blocks."""


class Arena:
    """Memory to copy to."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)


def laid_out(kind: str, layout: str, kernel_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """vLLM's allocation, of random bytes, and its view of each layer."""
    assert {known.name for known in KVCacheLayout} == set(LAYOUTS), "vLLM has a layout that nobody has looked at"
    make = MLAAttentionSpec if kind == "MLA" else FullAttentionSpec
    spec = make(block_size=TOKENS, dtype=torch.bfloat16, **KINDS[kind][0])
    order = KVCacheLayout[layout]
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, order)
    raw = torch.randint(-128, 128, (spec.page_size_bytes * BLOCKS * LAYERS,), dtype=torch.int8)
    names = [f"layer.{i}" for i in range(LAYERS)]
    tensor = KVCacheTensor(len(raw), names, layer_stride=strides[0], block_stride=strides[1])
    views = create_kv_cache_views(raw, spec, BLOCKS, order, tensor, kernel_block_size=kernel_tokens)
    return raw, dict(zip(names, views, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 2])
def test_a_block_of_any_layout_is_all_its_bytes_in_every_layer_and_no_others(kind: str, split: int) -> None:
    for layout in KINDS[kind][split]:
        raw, caches = laid_out(kind, layout, TOKENS // split)
        described = describe_kv({**caches, "shares": caches["layer.0"]}, BLOCKS, "backend")
        assert described.num_blocks == BLOCKS
        if layout.startswith("B") and kind != "padded":
            assert len(described.segments) == 1, f"{layout}: all layers of a block are one piece"
        assert described.block_bytes == LAYERS * split * prod(caches["layer.0"].shape[1:]) * 2, layout
        # What a retrieve makes of blocks that were stored, as the engine sees them ...
        arena, extents = Arena(2 * described.block_bytes), [(0, 2 * described.block_bytes)]
        memory = open_blocks(described, caches.values())
        before = raw.clone()
        memory.move(arena, [CopyPiece(extents, np.array([4, 1], np.intp))], is_store=True)
        memory.move(arena, [CopyPiece(extents, np.array([0, 5], np.intp))], is_store=False)
        memory.close()
        after = raw.clone()
        # ... is what the engine's own copy of them makes, to the last byte of the allocation.
        raw.copy_(before)
        for cache in caches.values():
            blocks = cache.unflatten(0, (BLOCKS, -1))
            assert not torch.equal(blocks[0].view(torch.uint8), blocks[4].view(torch.uint8))
            blocks[0].view(torch.uint8).copy_(blocks[4].view(torch.uint8).clone())
            blocks[5].view(torch.uint8).copy_(blocks[1].view(torch.uint8).clone())
        assert torch.equal(raw, after), layout


def overlaid(layout: str) -> tuple[torch.Tensor, dict[str, dict[str, torch.Tensor]]]:
    """Random bytes, and vLLM's views of the layers of three groups that lie over each other: full attention, a sliding
    window, and padded states."""
    attention: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    full = FullAttentionSpec(**attention)
    page = full.page_size_bytes
    shapes, dtypes = ((3, 24), (4, 8, 16)), (torch.bfloat16, torch.float32)
    specs = {
        "full": full,
        "window": SlidingWindowSpec(**attention, sliding_window=64),
        "state": MambaSpec(TOKENS, shapes=shapes, dtypes=dtypes, page_size_padded=page, mamba_cache_mode="align"),
    }
    assert specs["state"].state_content_size_bytes < page
    raw = torch.randint(-128, 128, (page * BLOCKS * LAYERS,), dtype=torch.int8)
    order = KVCacheLayout[layout]
    groups = {}
    for kind, spec in specs.items():
        strides = compute_layout_strides(spec, BLOCKS, LAYERS, order)
        names = [f"{kind}.{i}" for i in range(LAYERS)]
        tensor = KVCacheTensor(len(raw), names, layer_stride=strides[0], block_stride=strides[1])
        groups[kind] = dict(zip(names, create_kv_cache_views(raw, spec, BLOCKS, order, tensor), strict=True))
    return raw, groups


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_groups_over_each_other_are_copied_by_their_own_blocks_and_without_padding(layout: str) -> None:
    raw, groups = overlaid(layout)
    described = {kind: describe_kv(caches, BLOCKS, "backend") for kind, caches in groups.items()}
    assert len({each.fingerprint for each in described.values()}) == len(groups)
    assert len({each.mappings[0].name for each in described.values()}) == 1, "they are in one storage"
    assert described["state"].block_bytes == LAYERS * (3 * 24 * 2 + 4 * 8 * 16 * 4)
    pairs = {"full": (4, 0), "window": (3, 1), "state": (2, 5)}  # each block belongs to one group
    before = raw.clone()
    for kind, (source, target) in pairs.items():
        arena, extents = Arena(described[kind].block_bytes), [(0, described[kind].block_bytes)]
        memory = open_blocks(described[kind], groups[kind].values())
        memory.move(arena, [CopyPiece(extents, np.array([source], np.intp))], is_store=True)
        memory.move(arena, [CopyPiece(extents, np.array([target], np.intp))], is_store=False)
        memory.close()
    after = raw.clone()
    raw.copy_(before)
    for kind, (source, target) in pairs.items():
        for cache in groups[kind].values():
            assert not torch.equal(cache[target].view(torch.uint8), cache[source].view(torch.uint8))
            cache[target].view(torch.uint8).copy_(cache[source].view(torch.uint8).clone())
    assert torch.equal(raw, after)


def test_engines_with_layers_side_by_side_share_and_never_with_others(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended = {"worker_extension_cls": "tests.vllm.block_major.BlockMajor"}
    depot, tokens = start_depot(arena_mib=64), prompt(951, 4 * 256 + 17)
    plain = start_engine(models["gqa"], depot.url, **extended)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    side_by_side = start_engine(models["gqa"], depot.url, **extended).wait_started()
    computed = side_by_side.run(tokens)
    same_as_own(side_by_side, tokens, 4 * 256)
    assert "Using BLHNC KV cache layout" in side_by_side.logged()
    same = plain.wait_started().run(tokens)
    assert same["cached"] == 0 and output(same) == output(computed), "other places, the same values"
    same_as_own(plain, tokens, 4 * 256)
    assert "Using LBHNC KV cache layout" in plain.logged()
    assert len(depot.status()["namespaces"]) == 2
    side_by_side.stop(), plain.stop()
