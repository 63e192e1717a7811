"""The caches of transformers: which layers keep what, and how they are read and filled.

A cache is a list of layers. Attention keeps keys and values `[batch, heads, tokens, dim]`, all or the last
`sliding_window - 1` of them; a state layer keeps tensors of fixed size instead. What a window has dropped cannot be
stored any more, so the caches that this package makes have layers that also record it (`RecordingLayer`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer

from kvdepot.errors import BadRequest, ConfigError
from kvdepot.library.shapes import Shape, State

if TYPE_CHECKING:
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

_SERVED = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "RecordingLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
}
_STATES = ("conv_states", "recurrent_states")
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


class RecordingLayer(DynamicSlidingWindowLayer):
    """A sliding window that also keeps the KV that it has dropped, from token `first` on, until the cache is stored."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.first = 0
        self.record: list[Pair] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        self.record.append((key_states, value_states))
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows; KV that was dropped before cannot be stored any more."""
        super().reorder_cache(beam_idx)
        self._record_again()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._record_again()

    def _record_again(self) -> None:
        self.record = [(self.keys, self.values)]
        self.first = self.cumulative_length - self.keys.shape[-2]


class OwnCache(DynamicCache):
    """A cache of this package. It has as many rows as are computed with it: `load` gives one for each prompt, and
    `model.generate` computes several, for beams and for several answers. It records whether its rows were exchanged: by
    beam search, whose answers are in another order than its rows."""

    is_reordered = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> Pair:
        layer = self.layers[layer_idx]
        held = len(layer.keys) if layer.is_initialized and layer.keys.numel() else len(key_states)
        if len(key_states) > held:
            layer.batch_repeat_interleave(len(key_states) // held)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.is_reordered = True

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.is_reordered = True


class Geometry(NamedTuple):
    """The shape of the KV of layers of one kind. window: number of tokens before a position that the layers see there;
    0: all."""

    heads: int
    key_dim: int
    value_dim: int
    window: int


class StatePart(NamedTuple):
    """One tensor of a layer's state. shape: the tensor's shape without the batch dimension."""

    layer: int
    name: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class Held:
    """The KV of a row in the layers of one geometry, from token `first` on: `[heads, tokens, dim]` for each layer."""

    first: int
    pairs: list[Pair]


def new_cache(model: torch.nn.Module) -> Cache:
    """An empty dynamic cache of a model, whose windows record."""
    cache = OwnCache(config=model.config.get_text_config(decoder=True))
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = RecordingLayer(layer.sliding_window)
    return cache


def length_of(cache: Cache) -> int:
    """Number of tokens that a cache has seen. Raises ConfigError for a cache of states alone, which counts none."""
    try:
        return int(cache.get_seq_length())
    except ValueError as exc:
        raise ConfigError("kvdepot.hf does not serve models of states alone: their cache has no length") from exc


def check_empty(cache: object, own: Cache) -> None:
    """Raise BadRequest unless this is an empty cache with layers like those of `own`, which `new_cache` has made."""
    if not isinstance(cache, Cache):
        raise BadRequest(f"pass an empty cache of transformers, not {type(cache).__name__}")
    try:
        if getattr(cache, "layers", True):
            _refuse_unserved(cache)
    except ConfigError as exc:
        raise BadRequest(f"{exc}: pass a DynamicCache or a StaticCache") from exc
    if not cache.layers or length_of(cache):
        raise BadRequest("pass an empty cache: DynamicCache(config=model.config), or a StaticCache after reset()")
    kinds, expected = ([getattr(layer, "is_sliding", None) for layer in each.layers] for each in (cache, own))
    if kinds != expected:
        raise BadRequest("the cache to fill has other layers than the model: make it with config=model.config")


class CacheLayout:
    """The KV and states that the layers of a model's caches keep, and the depot's shapes for them."""

    def __init__(self, cache: Cache) -> None:
        """cache: one that the model has filled. Raises ConfigError if it cannot be served."""
        groups: dict[Geometry, list[int]] = {}
        self.states: list[StatePart] = []
        self.devices: dict[int, torch.device] = {}
        dtypes: set[torch.dtype] = set()
        self.batch = 0
        _refuse_unserved(cache)
        for index, layer in enumerate(cache.layers):
            if (geometry := _geometry(layer)) is not None:
                groups.setdefault(geometry, []).append(index)
                self.devices[index], self.batch = layer.keys.device, len(layer.keys)
                dtypes |= {layer.keys.dtype, layer.values.dtype}
            for name in _STATES:
                for number, each in getattr(layer, name, {}).items():
                    if each is not None:
                        part = StatePart(index, name, number, tuple(each.shape[1:]), each.dtype, each.device)
                        self.states.append(part)
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes))) or "no attention"
            raise ConfigError(f"kvdepot.hf serves caches with KV of one precision, and this one has {found}")
        self.dtype = dtypes.pop()
        self.groups = [(geometry, tuple(layers)) for geometry, layers in groups.items()]
        length_of(cache)

    def __repr__(self) -> str:
        return f"<CacheLayout {self.dtype} {self.groups} {len(self.states)} states>"

    @property
    def _kinds(self) -> tuple[object, ...]:
        """The facts that are equal in all caches of a model, whether these keep windows whole, in part or not."""
        heads = {index: geometry[:3] for geometry, layers in self.groups for index in layers}
        return self.dtype, heads, [part[:-1] for part in self.states]

    @property
    def state_bytes(self) -> int:
        return sum(_size(part) for part in self.states)

    @property
    def is_plain(self) -> bool:
        """Whether the KV of a prefix is a part of the KV of each longer prefix."""
        return not self.states and not any(geometry.window for geometry, _ in self.groups)

    @property
    def shapes(self) -> list[Shape | State]:
        found: list[Shape | State] = []
        for (heads, key_dim, value_dim, window), layers in self.groups:
            dims, parts = ([key_dim], 2) if key_dim == value_dim else ([key_dim, value_dim], 1)
            found += [Shape(len(layers), heads, dim, parts, "heads", window) for dim in dims]
        if self.states:
            found.append(State(self.state_bytes))
        return found

    def check(self, cache: object, batch: int) -> None:
        """Raise BadRequest unless this is a filled cache of this model, with `batch` rows."""
        if not isinstance(cache, Cache):
            raise BadRequest(f"pass a cache of transformers (outputs.past_key_values), not {type(cache).__name__}")
        try:
            found = CacheLayout(cache)
        except ConfigError as exc:
            raise BadRequest(f"{exc}: pass the cache that the model has filled") from exc
        if found._kinds != self._kinds:
            raise BadRequest(f"this is a cache of another model: {found!r}, and not {self!r}")
        if found.batch != batch:
            raise BadRequest(f"this cache has {found.batch} rows, and input_ids has {batch}")

    def read(self, cache: Cache, row: int) -> list[Held]:
        """The KV of one row of a cache, by geometry, on the CPU."""
        length, found = length_of(cache), []
        for _, layers in self.groups:
            held = [_held(cache.layers[index], length, row) for index in layers]
            first = max(start for start, _ in held)
            pairs = [(pair[0][:, first - start :].cpu(), pair[1][:, first - start :].cpu()) for start, pair in held]
            found.append(Held(first, pairs))
        return found

    def state(self, cache: Cache, row: int) -> torch.Tensor:
        parts = (getattr(cache.layers[part.layer], part.name)[part.number][row] for part in self.states)
        return torch.cat([each.contiguous().reshape(-1).view(torch.uint8).cpu() for each in parts])

    def reaches(self, chunk_tokens: int) -> list[int]:
        """The tokens before a chunk's end, in whole chunks, that resuming there needs, by geometry; 0: all."""
        return [math.ceil(geometry.window / chunk_tokens) * chunk_tokens for geometry, _ in self.groups]

    def arguments(self, held: list[Held], reaches: list[int], end: int) -> list[object]:
        """The attention layers' arguments of a depot's `put` of `end` tokens; for windows, the tokens within reach."""
        cuts = []
        for each, reach in zip(held, reaches, strict=True):
            at = slice(max(0, end - (reach or end)) - each.first, end - each.first)
            cuts.append([(keys[:, at], values[:, at]) for keys, values in each.pairs])
        return self.by_shape(cuts)

    def by_shape(self, pairs: list[list[Pair]]) -> list[object]:
        """Keys and values by geometry, as a depot takes them for `shapes`."""
        found: list[object] = []
        for (geometry, _), each in zip(self.groups, pairs, strict=True):
            is_pair = geometry.key_dim == geometry.value_dim
            found += [each] if is_pair else [[keys for keys, _ in each], [values for _, values in each]]
        return found

    def buffers(self, count: int) -> list[list[Pair]]:
        """Memory for the keys and values of this many tokens, by geometry and layer."""

        def empty(heads: int, dim: int, index: int) -> torch.Tensor:
            return torch.empty(heads, count, dim, dtype=self.dtype, pin_memory=self.devices[index].type == "cuda")

        return [
            [(empty(heads, key_dim, index), empty(heads, value_dim, index)) for index in layers]
            for (heads, key_dim, value_dim, _), layers in self.groups
        ]

    def fill(self, cache: Cache, loaded: list[list[Pair]], reaches: list[int], count: int) -> None:
        """Fill an empty cache of `new_cache` with `count` tokens of `buffers`."""
        for (_, layers), pairs, reach in zip(self.groups, loaded, reaches, strict=True):
            first = max(0, count - (reach or count))
            for index, pair in zip(layers, pairs, strict=True):
                keys, values = (each[None, :, first:count].to(self.devices[index]) for each in pair)
                _set(cache.layers[index], *((keys.clone(), values.clone()) if first else (keys, values)), count)

    def fill_states(self, cache: Cache, data: torch.Tensor) -> None:
        """Fill an empty cache of `new_cache` with the bytes of its states."""
        start = 0
        for part in self.states:
            values = data[start : start + _size(part)].clone().view(part.dtype).view(1, *part.shape)
            _set_state(cache.layers[part.layer], part, values.to(part.device))
            start += _size(part)

    def merge(self, target: Cache, rows: list[Cache], pads: list[int], columns: int) -> None:
        """Fill an empty cache with `columns` tokens of a batch: each row begins after its padding.

        Rows have at least `columns` tokens with their padding; exactly that many if there are windows or states.
        """
        for geometry, layers in self.groups:
            kept = min(columns, geometry.window or columns)
            for index in layers:
                pair = [_stack(rows, pads, (index, name), (kept, columns)) for name in ("keys", "values")]
                _set(target.layers[index], pair[0], pair[1], columns)
        for part in self.states:
            each = [getattr(row.layers[part.layer], part.name)[part.number] for row in rows]
            empty = torch.zeros(1, *part.shape, dtype=part.dtype, device=part.device)
            _set_state(target.layers[part.layer], part, torch.cat([empty if one is None else one for one in each]))


def _refuse_unserved(cache: Cache) -> None:
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    if not kinds or kinds - _SERVED:
        names = ", ".join(sorted(kinds - _SERVED)) or "no layers"
        raise ConfigError(f"kvdepot.hf does not serve {type(cache).__name__} with {names}")


def _geometry(layer: CacheLayerMixin) -> Geometry | None:
    """The geometry of a layer's KV; None for a layer without KV."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.ndim != 4:
        return None
    window = 0
    if layer.is_sliding:
        size = layer.sliding_window if hasattr(layer, "sliding_window") else layer.max_cache_len
        window = max(1, size - 1)
    return Geometry(keys.shape[1], keys.shape[-1], values.shape[-1], window)


def _held(layer: CacheLayerMixin, length: int, row: int) -> tuple[int, Pair]:
    """The first token that a layer still has, and a row's keys and values from it on."""
    keys, values, first = layer.keys, layer.values, length - layer.keys.shape[-2]
    if isinstance(layer, RecordingLayer):
        tokens = sum(each.shape[-2] for each, _ in layer.record)
        if layer.first + tokens == length and {len(each) for each, _ in layer.record} == {len(keys)}:
            keys, values = (torch.cat([pair[part] for pair in layer.record], 2) for part in (0, 1))
            layer.record, first = [(keys, values)], layer.first
    elif hasattr(layer, "max_cache_len"):
        size = layer.max_cache_len
        skipped = 1 if layer.is_sliding and length >= size else 0  # the oldest slot of a full window is never read
        first = max(0, length - size) + skipped
        keys, values = (each[:, :, skipped:length] for each in (keys, values))
    return first, (keys[row], values[row])


def _set(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
    """Let an empty layer have seen `count` tokens, the last of which have these keys and values."""
    if hasattr(layer, "max_cache_len"):
        _set_static(layer, keys, values, count)
        return
    if isinstance(layer, RecordingLayer):
        layer.record, layer.first = [(keys, values)], count - keys.shape[-2]
    if layer.is_sliding:
        keys, values = (each[:, :, -max(1, layer.sliding_window - 1) :] for each in (keys, values))
        layer.cumulative_length = count
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values, layer.is_initialized = keys, values, True


def _set_static(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
    size = layer.max_cache_len
    if layer.is_sliding and count >= size:
        keys, values = (torch.nn.functional.pad(each[:, :, 1 - size :], (0, 0, 1, 0)) for each in (keys, values))
    if keys.shape[-2] > size:
        raise BadRequest(f"a static cache of {size} tokens is too small for {count}: raise max_cache_len")
    layer.update(keys, values, {"cache_position": torch.arange(keys.shape[-2], device=keys.device)})
    if layer.is_sliding:
        is_tensor = hasattr(layer, "cumulative_length_int")  # transformers 5 counts tokens in both
        setattr(layer, "cumulative_length_int" if is_tensor else "cumulative_length", count)


def _set_state(layer: LinearAttentionLayer, part: StatePart, values: torch.Tensor) -> None:
    layer.lazy_initialization(**{part.name: values, "state_idx": part.number})
    getattr(layer, part.name)[part.number].copy_(values)
    layer.has_previous_state[part.number] = True


def _stack(rows: list[Cache], pads: list[int], part: tuple[int, str], size: tuple[int, int]) -> torch.Tensor:
    """Keys or values of a layer for a batch: the last `kept` of `columns` tokens; zeros where a row has padding."""
    kept, columns = size
    sources = [getattr(row.layers[part[0]], part[1]) for row in rows]
    model = next(each for each in sources if each is not None)
    batch = model.new_zeros((len(rows), model.shape[1], kept, model.shape[3]))
    for out, source, pad in zip(batch, sources, pads, strict=True):
        if source is not None:  # else the row has only the token that is to be computed
            last = source[0, :, : columns - pad][:, -kept:]
            out[:, kept - last.shape[1] :] = last
    return batch


def _size(part: StatePart) -> int:
    return int(math.prod(part.shape) * part.dtype.itemsize)
