"""vLLM's KV cache groups as the depot is told of them, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, UniformTypeKVCacheSpecs

from kvdepot.client.transfer import GroupSpec, ShardSpec
from kvdepot.errors import BadRequest, ConfigError
from kvdepot.integrations.vllm.groups import describe_groups, find_groups, fit_groups, hit_alignment, make_plan
from kvdepot.integrations.vllm.plan import PlanRules


def spec(kind: str, block: int = 16, **options: Any) -> Any:
    made = getattr(kv_cache_interface, kind)
    heads = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    return made(block_size=block, **heads, **options)


def config(*specs: Any, **options: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer.{i}"], each, **options) for i, each in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def fitted(cache: Any, least_tokens: int = 256) -> Any:
    return fit_groups(find_groups(cache), ShardSpec.fit_blocks("model", 1, 0, least_tokens, hit_alignment(cache)))


def test_a_single_group_that_is_needed_whole_is_registered_without_groups() -> None:
    for cache in (
        config(spec("FullAttentionSpec")),
        config(spec("MLAAttentionSpec")),
        config(spec("FullAttentionSpec", sliding_window=64)),  # vLLM's hybrid manager is disabled: it keeps all
        config(spec("FullAttentionSpec", attention_chunk_size=64)),
    ):
        told = fitted(cache)
        assert (told.chunk_tokens, told.blocks_in_chunk, told.groups) == (256, 16, ())
    assert fitted(config(spec("FullAttentionSpec", block=48)), 100).chunk_tokens == 144


@pytest.mark.parametrize(
    ("window", "block", "told"),
    [
        (1, 16, GroupSpec(1, 1)), (17, 16, GroupSpec(1, 1)), (18, 16, GroupSpec(1, 2)), (257, 16, GroupSpec(1, 16)),
        (258, 16, GroupSpec(2, 16)), (512, 128, GroupSpec(2, 2)), (1024, 16, GroupSpec(4, 16)),
        (4096, 256, GroupSpec(16, 1)),
    ],
)  # fmt: skip
def test_a_window_reaches_back_over_the_chunks_with_tokens_that_the_next_one_sees(
    window: int, block: int, told: GroupSpec
) -> None:
    assert fitted(config(spec("SlidingWindowSpec", block, sliding_window=window))).groups == (told,)


def test_tokens_that_vllm_keeps_below_a_window_are_part_of_it() -> None:
    cache = config(spec("SlidingWindowSpec", sliding_window=254, extra_retained_tokens=4))
    assert fitted(cache).groups == (GroupSpec(2, 16),)


@pytest.mark.parametrize(
    ("local", "told"),
    [(128, GroupSpec(1, 1)), (512, GroupSpec(1, 16)), (1024, GroupSpec(3, 16)), (384, GroupSpec(1, 16))],
)
def test_local_chunks_reach_back_to_where_theirs_began(local: int, told: GroupSpec) -> None:
    assert fitted(config(spec("ChunkedLocalAttentionSpec", attention_chunk_size=local))).groups == (told,)


def state(block: int = 544, mode: str = "align", **options: Any) -> Any:
    return MambaSpec(block, shapes=((2, 8),), dtypes=(torch.float32,), mamba_cache_mode=mode, **options)


def test_a_state_group_needs_its_last_state_and_chunks_as_long_as_its_blocks() -> None:
    told = fitted(config(state(), state(), spec("FullAttentionSpec", 544)))
    assert told.chunk_tokens == 544
    assert told.groups == (GroupSpec(0, 1), GroupSpec(1, 1), GroupSpec(1, 1))
    assert fitted(config(state(16)), 256).groups == (GroupSpec(1, 1),)
    assert fitted(config(state(16)), 256).chunk_tokens == 256


def test_states_that_are_not_those_at_the_end_of_a_block_are_refused_with_what_to_do() -> None:
    for mode in ("none", "all"):
        with pytest.raises(ConfigError, match=f"'{mode}'.*--enable-prefix-caching --mamba-cache-mode align"):
            find_groups(config(spec("FullAttentionSpec"), state(mode=mode)))
    assert find_groups(config(state(num_speculative_blocks=3)))[0].is_state, "drafts have blocks of their own"


def test_groups_that_are_needed_whole_come_first_and_keep_their_numbers() -> None:
    cache = config(
        spec("SlidingWindowSpec", sliding_window=512), spec("FullAttentionSpec"),
        spec("SlidingWindowSpec", sliding_window=1024), spec("MLAAttentionSpec", 32),
    )  # fmt: skip
    groups = find_groups(cache)
    assert [group.number for group in groups] == [1, 3, 0, 2]
    told = fitted(cache)
    assert told.groups == (GroupSpec(0, 16), GroupSpec(0, 8), GroupSpec(2, 16), GroupSpec(4, 16))
    assert told.blocks_in_chunk == 16
    tables = [[100 * table + i for i in range(1, 33)] for table in range(4)]
    pieces = make_plan(groups, told, PlanRules()).to_store(tables, range(1), 300)
    assert [(piece.group, piece.blocks[0], len(piece.blocks)) for piece in pieces] == [
        (0, 101, 16), (1, 301, 8), (2, 1, 16), (3, 201, 16),
    ]  # fmt: skip


def test_chunks_are_whole_blocks_of_every_group_and_not_smaller_than_the_servers() -> None:
    cache = config(spec("FullAttentionSpec", 48), spec("SlidingWindowSpec", 32, sliding_window=512))
    assert fitted(cache, 100).chunk_tokens == 192
    assert fitted(cache, 256).chunk_tokens == 288
    assert fitted(cache, 256).groups == (GroupSpec(0, 6), GroupSpec(2, 9))
    with pytest.raises(BadRequest, match="block size"):
        fitted(config(spec("FullAttentionSpec", 1 << 19), spec("FullAttentionSpec", 3)))


def test_groups_that_vllm_does_not_cache_by_prefix_are_left_out() -> None:
    ring = spec("CircularBufferSpec", 64)
    groups = find_groups(config(ring, spec("FullAttentionSpec")))
    assert [group.number for group in groups] == [1]
    with pytest.raises(ConfigError, match="CircularBufferSpec"):
        find_groups(config(ring))
    with pytest.raises(ConfigError, match="none"):
        find_groups(config())


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("RSWASpec", {"rswa_window": 64}, "RSWASpec is not supported"),
        ("SinkFullAttentionSpec", {"sink_len": 16}, "SinkFullAttentionSpec is not supported"),
        ("HiddenStateCacheSpec", {}, "HiddenStateCacheSpec is not supported"),
        ("CrossAttentionSpec", {}, "CrossAttentionSpec is not supported"),
        ("EncoderOnlyAttentionSpec", {}, "EncoderOnlyAttentionSpec is not supported"),
        ("FullAttentionSpec", {"non_causal": True}, "not causal"),
    ],
)
def test_a_kind_that_is_not_known_to_come_back_exactly_is_refused_by_name(
    kind: str, options: dict[str, Any], said: str
) -> None:
    cache = config(spec("FullAttentionSpec"), spec(kind, **options))
    with pytest.raises(ConfigError, match=rf"KV cache group 1 .*{kind}.* layer\.1.*{said}"):
        find_groups(cache)


def test_groups_in_host_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="host memory"):
        find_groups(config(spec("FullAttentionSpec"), host_resident=True))


def test_blocks_whose_tokens_are_spread_over_ranks_have_that_many_times_the_tokens() -> None:
    """Decode context parallelism, with a drafter that has all tokens on every rank."""
    cache = config(spec("MLAAttentionSpec"), spec("MLAAttentionSpec", dcp_sharded=False))
    groups, alignment = find_groups(cache, 4), hit_alignment(cache, 4)
    assert ([group.block_tokens for group in groups], alignment) == ([64, 16], 64)
    told = fit_groups(groups, ShardSpec.fit_blocks("model", 8, 3, 100, alignment))
    assert (told.chunk_tokens, told.groups) == (128, (GroupSpec(0, 2), GroupSpec(0, 8)))
    plan = make_plan(groups, told, PlanRules())
    tables = [[10, 11, 12, 13], list(range(20, 36))]
    (sharded, whole) = plan.to_store(tables, range(2), 300)
    assert (sharded.blocks, whole.blocks) == (tables[0], tables[1])
    (sharded, whole) = plan.to_load(tables, 64 + 128, 2)  # the engine has a block and a half chunk itself
    assert (sharded.first, sharded.skip, whole.first, whole.skip) == (1, 1, 1, 4)


def test_a_group_of_layers_of_several_sizes_is_one_group_in_every_process() -> None:
    layers = {"a": spec("MLAAttentionSpec"), "b": spec("MLAAttentionSpec", cache_dtype_str="fp8")}
    group = KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(16, kv_cache_specs=layers))
    workers = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    scheduler = generate_scheduler_kv_cache_config([workers])
    assert scheduler.kv_cache_groups[0].kv_cache_spec != workers.kv_cache_groups[0].kv_cache_spec
    assert describe_groups(workers) == describe_groups(scheduler)
    (found,) = find_groups(workers)
    assert found.layers == ("a", "b") and find_groups(scheduler) == [found]
    mixed = {"a": spec("SlidingWindowSpec", sliding_window=512), "b": spec("SlidingWindowSpec", sliding_window=256)}
    group = KVCacheGroupSpec(list(mixed), UniformTypeKVCacheSpecs(16, kv_cache_specs=mixed))
    with pytest.raises(ConfigError, match="different parts"):
        find_groups(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group]))
