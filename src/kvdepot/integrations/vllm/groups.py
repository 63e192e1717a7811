"""vLLM's KV cache groups as the depot knows them: how much of each a resumed prompt needs, and what cannot be served.

Only this file knows vLLM's kinds of attention. connector.py and identity.py call it in the scheduler and in every
worker, which must find the same groups. Invariant: a group that is not served exactly as vLLM itself caches it is
refused, with its reason.

| vLLM's spec | what a prompt needs of the group to be resumed after T tokens |
|---|---|
| full attention, MLA; windows that vLLM keeps whole (its hybrid manager is disabled) | all tokens |
| sliding window of w tokens | the last w - 1 |
| chunked local attention, in chunks of a tokens | the last T modulo a |
| states (Mamba, gated delta net, linear attention), in vLLM's cache mode `align` | the state after T tokens |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    iter_layer_specs,
)

from kvdepot.client.transfer import GroupSpec, ShardSpec
from kvdepot.errors import ConfigError
from kvdepot.integrations.vllm.plan import GroupBlocks, GroupPlan, PlanRules

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_ALL = (FullAttentionSpec, MLAAttentionSpec)
_WINDOWS = (SlidingWindowSpec, SlidingWindowMLASpec)
"""Exactly these classes: what a class derived from one of them needs to be resumed is not known."""


class CacheGroup(NamedTuple):
    """One KV cache group that is stored and loaded.

    number: its place in vLLM's list, and in vLLM's block ids. window: number of tokens before a boundary that resuming
    there needs; 0: all. local_chunk: tokens per chunk of chunked local attention; otherwise 0. is_state: whether the
    group is one state, in one block.
    """

    number: int
    kind: str
    block_tokens: int
    layers: tuple[str, ...]
    window: int = 0
    local_chunk: int = 0
    is_state: bool = False

    @property
    def is_bounded(self) -> bool:
        """Whether resuming needs only some of the group's tokens."""
        return bool(self.window or self.local_chunk or self.is_state)

    def fit(self, chunk_tokens: int) -> GroupSpec:
        """Its reach and stored blocks per chunk, with chunks of this many tokens.

        If the window is shorter than a chunk, only the last blocks of each chunk are stored, which the window needs.
        """
        if self.is_state:
            return GroupSpec(1, 1)
        window, span = self.window, chunk_tokens // self.block_tokens
        if self.local_chunk:  # the most tokens of a local chunk that lie before the end of one of our chunks
            window = max(1, self.local_chunk - math.gcd(self.local_chunk, chunk_tokens))
        if not window:
            return GroupSpec(0, span)
        if window <= chunk_tokens:
            return GroupSpec(1, -(-window // self.block_tokens))
        return GroupSpec(-(-window // chunk_tokens), span)


def find_groups(kv_cache_config: KVCacheConfig, dcp_size: int = 1) -> list[CacheGroup]:
    """The groups that vLLM caches by prefix; groups that need all tokens come first.

    dcp_size: ranks over which each block's tokens are spread (decode context parallelism). Raises ConfigError for a
    group that cannot be served.
    """
    numbered = list(enumerate(kv_cache_config.kv_cache_groups))
    cached = set(kv_cache_config.prefix_cacheable_group_ids)
    groups = [_make(number, group, dcp_size) for number, group in numbered if number in cached]
    if not groups:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for _, group in numbered) or "none"
        raise ConfigError(f"kvdepot: this model has no KV cache that vLLM can reuse for another prompt: {kinds}")
    return sorted(groups, key=lambda group: group.is_bounded)


def _make(number: int, group: KVCacheGroupSpec, dcp_size: int) -> CacheGroup:
    """Raises ConfigError."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if group.host_resident or group.role is not KVCacheGroupRole.DEFAULT:
        raise _refused(number, group, "vLLM keeps it in host memory (HiSparse), in blocks of its own")
    made = {_measure(number, group, spec) for spec in specs}
    if len(made) != 1:
        raise _refused(number, group, "its layers need different parts of a prompt")
    needs = made.pop()
    kind = get_kv_cache_spec_kind(specs[0]).value
    block_tokens = _block_tokens(group.kv_cache_spec, dcp_size)
    return CacheGroup(number, kind, block_tokens, tuple(group.layer_names), *needs)


def _block_tokens(spec: KVCacheSpec, dcp_size: int) -> int:
    """Tokens of a block over all ranks that hold a part of it."""
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size  # imports much of vLLM: not before it is set up

    return int(resolve_dcp_kv_block_size(spec, dcp_size))


def _measure(number: int, group: KVCacheGroupSpec, spec: KVCacheSpec) -> tuple[int, int, bool]:
    """The window and the local chunk of a spec, and whether it is a state. Raises ConfigError."""
    if getattr(spec, "non_causal", False):
        raise _refused(number, group, "its attention is not causal: the KV of a token depends on those after it")
    if type(spec) in _ALL:
        return 0, 0, False
    if type(spec) in _WINDOWS:
        assert isinstance(spec, SlidingWindowSpec)
        return max(1, spec.sliding_window - 1 + spec.extra_retained_tokens), 0, False
    if type(spec) is ChunkedLocalAttentionSpec:
        return 0, spec.attention_chunk_size, False
    if type(spec) is MambaSpec:
        if spec.mamba_cache_mode == "align":
            return 0, 0, True
        why = (
            f"its states are kept in the mode {spec.mamba_cache_mode!r}, and only those of 'align' are known to belong "
            "to the end of a block: start with --enable-prefix-caching --mamba-cache-mode align"
        )
        raise _refused(number, group, why)
    raise _refused(number, group, f"{type(spec).__name__} is not supported")


def _refused(number: int, group: KVCacheGroupSpec, reason: str) -> ConfigError:
    layers = group.layer_names
    named = f"{len(layers)} layers, the first is {layers[0]}" if layers else "no layers on this rank"
    kind = type(next(iter(iter_layer_specs(group.kv_cache_spec)))).__name__
    return ConfigError(f"kvdepot cannot serve KV cache group {number} of this model ({kind}; {named}): {reason}")


def hit_alignment(kv_cache_config: KVCacheConfig, dcp_size: int = 1) -> int:
    """Every boundary at which vLLM accepts loaded KV is a multiple of this many tokens, of all groups' blocks.

    dcp_size: ranks over which each block's tokens are spread.
    """
    groups = kv_cache_config.kv_cache_groups
    return math.lcm(*(_block_tokens(group.kv_cache_spec, dcp_size) for group in groups))


def fit_groups(groups: Sequence[CacheGroup], spec: ShardSpec) -> ShardSpec:
    """The spec with these groups of its model; without groups if there is only one, of which all tokens are needed."""
    fitted = tuple(group.fit(spec.chunk_tokens) for group in groups)
    if len(fitted) == 1 and not fitted[0].reach:
        return replace(spec, blocks_in_chunk=fitted[0].blocks_in_chunk)
    return replace(spec, blocks_in_chunk=fitted[0].blocks_in_chunk, groups=fitted)


def describe_groups(kv_cache_config: KVCacheConfig) -> list[str]:
    """The groups in words that are equal in the scheduler and in every worker.

    If a group's layers differ, vLLM shows one layer's spec to its scheduler, and their own layers' specs to workers.
    """
    described = []
    for group in kv_cache_config.kv_cache_groups:
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        size = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        if isinstance(spec, FullAttentionSpec):
            size = None  # vLLM keeps all tokens, however few a layer attends to
        replay = " replayed" if getattr(spec, "bounded_replay", False) else ""  # 0.31 and later
        described.append(f"{type(spec).__name__} {group.kv_cache_spec.block_size} {size}{replay}")
    return described


def holds_plain_numbers(kv_cache_config: KVCacheConfig) -> bool:
    """Whether all KV is keys and values (or MLA's latent vectors) in 16 or 32 bits, which every release of vLLM writes
    alike. Almost every release packs and scales quantized KV in another way, and kernels change states."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    return all(
        isinstance(spec, AttentionSpec)
        and spec.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and spec.kv_quant_mode == KVQuantMode.NONE
        for spec in specs
    )


def make_plan(groups: Sequence[CacheGroup], spec: ShardSpec, rules: PlanRules) -> GroupPlan:
    """The plan by which these groups, which `fit_groups` has fitted, are stored and loaded."""
    fitted = spec.groups or (GroupSpec(0, spec.blocks_in_chunk),)
    blocks = [
        GroupBlocks(
            group.number, spec.chunk_tokens // group.block_tokens, each.blocks_in_chunk, each.reach, group.is_state
        )
        for group, each in zip(groups, fitted, strict=True)
    ]
    return GroupPlan(blocks, spec.chunk_tokens, rules)
