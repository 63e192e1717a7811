"""Chunks that a model shares with engines, under a name that the user gives on both sides (`share_as`).

prefix_cache.py uses it. An engine says how its blocks are to be read (integrations/shared_layout.py). Invariant: before
this process uses or stores anything there, keys and values of a stored chunk are compared with this model's own; if
they differ, nothing is loaded or stored there any more. So all that is there has been computed by an engine, or by
processes that have passed this check.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from kvdepot.client.transfer import ShardSpec
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.integrations.huggingface.layout import CacheLayout, Pair
from kvdepot.integrations.shared_layout import BlockFormat, check_name, find_shared
from kvdepot.library.depot import Depot, open_namespace
from kvdepot.library.namespace import ModelFacts, Moves, Namespace
from kvdepot.library.shapes import ITEM_BYTES, Shape
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, copied_by_client

if TYPE_CHECKING:
    from kvdepot.library.shapes import Plain

log = logging.getLogger(__name__)

_MOST_EPSILONS, _LEAST_EPSILON = 4.0, 2.0**-10
"""The limit of the difference of a layer's keys or values, relative to them: 4 epsilons of the data type (of TF32 for
float32) times the square root of the layer's number, because differences add up. In the 32nd layer of a random Llama,
vLLM and transformers differ by 7e-6 (float32), 0.013 (float16) and 0.10 (bfloat16); the limit is 0.022, 0.022 and 0.18.
Weights rounded to 8 bits differ by 0.22 to 0.26, with noise of 1 % by 0.31 to 0.34, other weights by 1.4. Noise of
0.1 % (0.03; 0.11 in bfloat16) goes unnoticed in bfloat16."""


@dataclass(frozen=True)
class _SharedFacts(ModelFacts):
    """A namespace of an engine's chunks. name: of its model on the wire. blocks: their number in a chunk."""

    name: str = ""
    blocks: int = 1
    format: BlockFormat | None = None

    def layout(self, group: int) -> Layout:
        assert self.format is not None
        size = self.format.block_values * ITEM_BYTES[self.dtype]
        layout = copied_by_client(size, "", wire.MAX_CHUNKS * self.blocks)
        return msgspec.structs.replace(layout, fingerprint=self.format.fingerprint)

    def spec(self) -> ShardSpec:
        return ShardSpec(self.name, 1, 0, self.chunk_tokens, self.blocks)

    def moves(self, arrays: list[Plain], shape: Shape, first_token: int) -> Moves:
        return _BlockMoves(self, arrays, first_token)


class _BlockMoves:
    """The keys and values of each layer, `[heads, tokens, dims]`, from token `first_token` of the sequence on."""

    def __init__(self, facts: _SharedFacts, arrays: list[Plain], first_token: int) -> None:
        assert facts.format is not None
        self._format, self._blocks, self._tokens = facts.format, facts.blocks, facts.chunk_tokens
        self._arrays, self._first_token = arrays, first_token
        self.size = facts.blocks * facts.format.block_values * ITEM_BYTES[facts.dtype]

    def pairs(self, chunk: int, data: Plain) -> Iterator[tuple[Plain, Plain]]:
        start = chunk * self._tokens - self._first_token
        values = data.view(self._arrays[0].dtype)
        for each, stored in zip(self._arrays, self._format.views(values, self._blocks), strict=True):
            yield stored, each[:, start : start + self._tokens].reshape(stored.shape)  # a view: axes are only split


class SharedPrefixes:
    """The chunks under one name, in the format that an engine has declared for models of this geometry."""

    def __init__(self, depot: Depot, name: str, model: torch.nn.Module, layout: CacheLayout) -> None:
        """Raises ConfigError for a model that cannot share."""
        check_name(name)
        if not (layout.is_plain and len(layout.groups) == 1 and len(layout.shapes) == 1):
            raise ConfigError("share_as serves models with full attention in all layers, whose KV has one shape")
        if any("_disable_adapters" in vars(each) for each in model.modules()):
            raise ConfigError("share_as serves models without adapters: merge them (merge_and_unload), or leave it out")
        self._depot, self._name, self._layout = depot, name, layout
        self._namespace: Namespace | None = None
        self.is_proven = self.is_refused = False

    def namespace(
        self, prompts: Sequence[torch.Tensor], compute: Callable[[torch.Tensor], list[Pair]]
    ) -> Namespace | None:
        """The chunks, if an engine has declared them and one of them has proved to be this model's.

        prompts: their beginnings are looked for until then. compute: gives the KV of tokens, of each layer.
        """
        if self._namespace is None and prompts and not self.is_refused:
            self._namespace = self._find()
        for tokens in prompts:
            if self._namespace is not None and not self.is_proven and not self.is_refused:
                self._check(tokens[: self._namespace.chunk_tokens], self._namespace, compute)
        return self._namespace if self.is_proven else None

    def _find(self) -> Namespace | None:
        (((heads, dim, _, _), layers),) = self._layout.groups
        dtype = str(self._layout.dtype).removeprefix("torch.")
        try:
            listed = {each.model: each for each in self._depot.status().namespaces}
        except KVDepotError as exc:
            log.warning("cannot ask what is shared as %s: %s", self._name, exc)
            return None
        fits = [
            (each, format)
            for each, format in ((listed[model], format) for model, format in find_shared(listed, self._name))
            if format.geometry == (dtype, len(layers), heads, dim)
            and (each.world_size, each.chunk_tokens) == (1, each.blocks_in_chunk * format.block_tokens)
        ]
        if not fits:
            return None
        found, format = max(fits, key=lambda fit: (fit[0].engines > 0, fit[0].chunks))
        shape = Shape(len(layers), heads, dim, 2, "heads")
        facts = (self._name, self._name, dtype, (shape,), "", found.chunk_tokens)
        return open_namespace(self._depot, _SharedFacts(*facts, found.model, found.blocks_in_chunk, format))

    def _check(self, tokens: torch.Tensor, namespace: Namespace, compute: Callable[[torch.Tensor], list[Pair]]) -> None:
        """Compare a prompt's first chunk with what this model computes, if it is stored."""
        (stored,) = self._layout.buffers(len(tokens))
        if not namespace.get_into(tokens.numpy(), self._layout.by_shape([stored])[0]):
            return
        differences = (
            max(_difference(*part) for part in zip(one, other, strict=True))
            for one, other in zip(stored, compute(tokens), strict=True)
        )
        worst, layer = max((found / math.sqrt(layer), layer) for layer, found in enumerate(differences, 1))
        limit = _MOST_EPSILONS * max(torch.finfo(self._layout.dtype).eps, _LEAST_EPSILON)
        self.is_proven = worst <= limit
        self.is_refused = not self.is_proven
        if self.is_refused:
            log.error(
                "share_as=%r: the stored keys or values of layer %d differ by %.2g from those that this model computes "
                "(limit: %.2g), so this PrefixCache uses chunks of its own only. Check that all who share it run "
                "the same weights and configuration, then choose another name",
                self._name, layer, worst * math.sqrt(layer), limit * math.sqrt(layer),
            )  # fmt: skip


def _difference(stored: torch.Tensor, computed: torch.Tensor) -> float:
    """The difference of keys or values, relative to those computed; infinite if it is no number."""
    difference = float((stored.float() - computed.float()).norm() / computed.float().norm())
    return difference if math.isfinite(difference) else math.inf
