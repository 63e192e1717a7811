"""`kvdepot.hf.PrefixCache`: caches of a transformers model, loaded from a depot and stored in it.

Called on the thread that runs the model. Invariant: KV is stored under the identity of the weights that computed it, as
far as this process can know it; a load finds KV of the weights that the model has now.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import TYPE_CHECKING, TypeAlias

import torch
from transformers.cache_utils import Cache

from kvdepot.client.reuse import NOTHING_REUSED, Reuse
from kvdepot.errors import BadRequest, ConfigError
from kvdepot.integrations.huggingface.identity import fingerprint, identity, media_tokens, refuse_unserved
from kvdepot.integrations.huggingface.layout import CacheLayout, check_empty, length_of, new_cache

if TYPE_CHECKING:
    from kvdepot.library.depot import Depot
    from kvdepot.library.namespace import Namespace

TokenIds: TypeAlias = "torch.Tensor | Sequence[int] | Sequence[Sequence[int]]"

_PROBE_TOKENS, _PROBE_SPLIT = 16, 11
_MOST_DIFFERENCE = 0.15
"""Limit of `_check_continuation`: bfloat16 gives 0.01 to 0.03, a model that misuses its cache 0.3 and more."""
_MOST_OPENED = 8
"""Versions of a model that are remembered: adapters may take turns."""
_MEASURED_TOKENS, _MEASURES = 64, 31
"""The fewest tokens of a part of a prompt from which the speed of prefill is measured, and the number of parts of which
that speed is the median."""
_ASSISTED = "assisted decoding computes a loaded prompt again, and takes tokens back"
_REFUSED = {
    **dict.fromkeys(("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"), _ASSISTED),
    "is_assistant": _ASSISTED,
    "custom_generate": "it may use the cache in any way",
    "inputs_embeds": "a depot's keys are tokens",
    "negative_prompt_ids": "it needs a second cache",
    "output_attentions": "what is loaded has none",
    "output_hidden_states": "what is loaded has none",
    "prefill_chunk_size": "prompts are computed in parts already",
    "token_healing": "it takes a prompt's last token back",
}
"""Arguments of `generate`, and fields of its configuration, that are refused if they are set, and why."""
_ARGUMENTS = {
    "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "streamer",
    "tokenizer", "token_type_ids", "use_model_defaults", "max_length", "max_new_tokens", "min_length", "min_new_tokens",
}  # fmt: skip
"""Arguments of `generate`, beside the fields of its configuration, that change no KV of a prompt."""


@dataclass(frozen=True)
class _Opened:
    """One version of the model: the layout of its caches, and its namespace in the depot."""

    layout: CacheLayout
    namespace: Namespace
    revision: str


@dataclass(frozen=True)
class _Prompts:
    """A batch: `ids[batch, columns]` on the CPU, and the columns of padding at the left of each row."""

    ids: torch.Tensor
    pads: list[int]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter([(row[pad:], pad) for row, pad in zip(self.ids, self.pads, strict=True)])

    @property
    def columns(self) -> int:
        return int(self.ids.shape[1])


class PrefixCache:
    """The prefixes of a model in a depot.

    depot: from `kvdepot.connect`. model: a model of transformers in evaluation mode. chunk_tokens: see
    `Depot.namespace`. Reads a part of all weights and computes a few tokens. Raises ConfigError for a model that is not
    served, and says why; BadRequest for an argument that is wrong.
    """

    def __init__(self, depot: Depot, model: torch.nn.Module, chunk_tokens: int = 0) -> None:
        refuse_unserved(model)
        self._depot = depot
        self._model = model
        self._asked_tokens = chunk_tokens
        self._media = media_tokens(model)
        self.last = NOTHING_REUSED
        """The result of the last `load` or `generate`, of all rows together. Its `compared` is 0."""
        self._speeds: deque[float] = deque(maxlen=_MEASURES)  # of prefill, in tokens per second, the latest last
        self._opened: dict[bytes, _Opened] = {}
        self._open()
        self._check_continuation()

    def __repr__(self) -> str:
        return f"<kvdepot.hf.PrefixCache {type(self._model).__name__}, {self.chunk_tokens} tokens a chunk>"

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk, as of the last call: prefixes are stored and found in multiples of it."""
        size: int = self._namespace.chunk_tokens
        return size

    def load(
        self, input_ids: TokenIds, attention_mask: torch.Tensor | None = None, past: Cache | None = None
    ) -> tuple[Cache, int]:
        """The longest stored prefix of a prompt as a cache for the model, and the number of its tokens; 0: a miss.

        The prompt's last token is never loaded: the model has to compute it. input_ids: one prompt, or a batch, which
        is padded on the left as `attention_mask` says; then the number counts columns, and is equal for all rows. past:
        an empty cache to fill, such as a StaticCache; None makes a dynamic one. Raises BadRequest.
        """
        prompts = self._prompts(input_ids, attention_mask)
        self.last, opened = NOTHING_REUSED, self._open()
        layout, target, columns = opened.layout, self._target(past, opened, prompts.pads), prompts.columns - 1
        if len(prompts.pads) > 1 and not layout.is_plain:
            prefixes = [(tokens[: max(0, columns - pad)].numpy(), pad) for tokens, pad in prompts]
            columns = min(pad + opened.namespace.contains(prefix) for prefix, pad in prefixes)
        loaded = [self._load(tokens[: max(0, columns - pad)], opened) for tokens, pad in prompts]
        ends = [n + pad if n else 0 for (_, n), pad in zip(loaded, prompts.pads, strict=True)]
        if not min(ends) or (len(set(ends)) > 1 and not layout.is_plain):
            self._note(0)
            return target, 0
        self._note(sum(min(ends) - pad for pad in prompts.pads))
        if past is None and prompts.pads == [0]:
            return loaded[0]
        layout.merge(target, [cache for cache, _ in loaded], prompts.pads, min(ends))
        return target, min(ends)

    def store(self, input_ids: TokenIds, past: Cache) -> int:
        """Store the KV of a prompt, or of a batch without padding. Returns the number of tokens that the depot has
        then, in whole chunks, of the row with the fewest.

        past: the cache that the model has filled with these tokens; it may have seen more tokens, or fewer. Raises
        BadRequest: for a cache of another model, or of weights that were changed since; for padding; and where windows
        have dropped, or states have passed, the end of the last whole chunk.
        """
        prompts = self._prompts(input_ids, None)
        opened = self._open()
        revision = getattr(past, "kvdepot_revision", opened.revision)
        if revision != opened.revision:
            raise BadRequest("the cache is of another model, or the weights were changed since: compute it again")
        opened.layout.check(past, len(prompts.pads))
        if getattr(past, "is_reordered", False):
            raise BadRequest("this cache is of beam search, whose rows are not those of its answers: use generate()")
        if getattr(past, "kvdepot_has_padding", False):
            raise BadRequest("this cache was loaded for prompts with padding, which changes their KV: use generate()")
        return min(self._put(tokens, past, row, opened) for row, (tokens, _) in enumerate(prompts))

    def generate(
        self, input_ids: TokenIds | None = None, attention_mask: torch.Tensor | None = None, **arguments: object
    ) -> object:
        """The answer of `model.generate` to these arguments, with prefixes loaded, and the prompts' chunks stored.

        The prompts of a batch are computed one by one, the tokens after them together. input_ids: also as `inputs`.
        past_key_values: an empty cache to use, such as a StaticCache. Raises BadRequest, also for arguments that are
        not served.
        """
        given, inputs = arguments.pop("past_key_values", None), arguments.pop("inputs", None)
        copies = self._copies(arguments)
        if (input_ids is None) == (inputs is None):
            raise BadRequest("pass the tokens of a prompt once: as input_ids, or as inputs")
        prompts = self._prompts(inputs if input_ids is None else input_ids, attention_mask)
        self.last, opened = NOTHING_REUSED, self._open()
        is_single = given is None and copies == 1 and prompts.pads == [0]
        caches = []
        for tokens, _ in prompts:
            cache, end = self._prefill(tokens, opened)
            if not is_single:
                self._compute(tokens[end:-1], cache)
            caches.append(cache)
        self._note(self.last.loaded)
        past = caches[0] if is_single else self._target(given, opened, prompts.pads)
        if not is_single and prompts.columns > 1:
            rows = [cache for cache in caches for _ in range(copies)]
            pads = [pad for pad in prompts.pads for _ in range(copies)]
            opened.layout.merge(past, rows, pads, prompts.columns - 1)
        device = self._model.device
        mask = torch.ones_like(prompts.ids)
        for row, pad in zip(mask, prompts.pads, strict=True):
            row[:pad] = 0
        arguments |= {"input_ids": prompts.ids.to(device), "attention_mask": mask.to(device), "past_key_values": past}
        answer = self._model.generate(**arguments, cache_implementation=None)
        if is_single and not opened.layout.states:
            sequences = answer if isinstance(answer, torch.Tensor) else answer.sequences
            has_seen_all = length_of(past) == sequences.shape[1] - 1 and not getattr(past, "is_reordered", False)
            with contextlib.suppress(BadRequest, ConfigError):  # the model, or its cache, was changed meanwhile
                if has_seen_all and self._open().revision == opened.revision:
                    opened.layout.check(past, 1)
                    self._put(sequences[0].cpu(), past, 0, opened)
        return answer

    # -- the depot

    def _open(self) -> _Opened:
        """The model's version as it is now. Raises BadRequest for a model in training, ConfigError like the class."""
        training = [module for module in self._model.modules() if module.training]
        if any(any(module.children()) or "dropout" in type(module).__name__.lower() for module in training):
            raise BadRequest("the model is in training mode, where its KV is random: call model.eval()")
        mark = fingerprint(self._model)
        found = self._opened.get(mark)
        if found is None:
            if len(self._opened) >= _MOST_OPENED:
                self._opened.clear()
            try:
                layout = CacheLayout(self._probe(self._probe_tokens())[1])
            except (AttributeError, TypeError) as exc:
                raise ConfigError(
                    f"kvdepot.hf does not serve {type(self._model).__name__} in this release of transformers: it keeps "
                    f"a cache of its own ({exc})"
                ) from exc
            revision = identity(self._model)
            namespace = self._depot.namespace(
                model=type(self._model).__name__,
                revision=revision,
                dtype=str(layout.dtype).removeprefix("torch."),
                shape=layout.shapes,
                chunk_tokens=self._asked_tokens,
            )
            found = self._opened[mark] = _Opened(layout, namespace, revision)
        self._namespace = found.namespace
        return found

    def _load(self, tokens: torch.Tensor, opened: _Opened) -> tuple[Cache, int]:
        """A new cache with the longest stored prefix of one prompt, and the number of its tokens."""
        layout, namespace, ids = opened.layout, opened.namespace, tokens.numpy()
        cache, count = self._target(None, opened), namespace.contains(ids) if len(ids) else 0
        if not count:
            return cache, 0
        pairs, states = layout.buffers(count), torch.empty(layout.state_bytes, dtype=torch.uint8)
        arguments = layout.by_shape(pairs) + ([states] if layout.states else [])
        count = namespace.get_into(ids[:count], arguments if len(arguments) > 1 else arguments[0])
        self.last += namespace.last
        if count:
            layout.fill(cache, pairs, layout.reaches(namespace.chunk_tokens), count)
            layout.fill_states(cache, states)
        return cache, count

    def _note(self, loaded: int) -> None:
        """Set `last` after a call, which has used this many loaded tokens."""
        self.last = Reuse(self.last.found, loaded, 0, loaded / median_high(self._speeds) if self._speeds else 0.0)

    def _put(self, tokens: torch.Tensor, cache: Cache, row: int, opened: _Opened) -> int:
        """Store the whole chunks of a row of a cache. Raises BadRequest if the row lacks KV that a load needs."""
        layout, namespace = opened.layout, opened.namespace
        length, size = length_of(cache) if cache.layers else 0, namespace.chunk_tokens
        end = min(len(tokens), length) // size * size
        ids = tokens[:end].numpy()
        if not end or (stored := namespace.contains(ids)) == end:
            return end
        if layout.states and end != length:
            raise BadRequest(
                f"states are stored at the end of a chunk, but this cache has seen {length} tokens: store it at {end}, "
                "or use generate()"
            )
        held = layout.read(cache, row)
        reaches = layout.reaches(size)
        step = min((reach for reach in reaches if reach), default=end)
        ends = [end] if layout.states else range(end, stored, -step)
        whole = [e for e in ends if all(h.first <= max(0, e - (r or e)) for h, r in zip(held, reaches, strict=True))]
        if end not in whole:
            raise BadRequest(
                f"this cache has dropped KV that its windows need at token {end}: compute with the cache that load() "
                "returns, also after a miss, or use generate()"
            )
        for each in reversed(whole):  # the chunks of a window are stored up to each end, so that any can be resumed
            found = layout.arguments(held, reaches, each)
            if layout.states:
                found.append(layout.state(cache, row))
            stored = namespace.put(ids[:each], found if len(found) > 1 else found[0])
        return stored

    # -- the model

    def _prefill(self, tokens: torch.Tensor, opened: _Opened) -> tuple[Cache, int]:
        """A cache of a prompt up to the last chunk's end before its last token, which is stored too; its length."""
        end = (len(tokens) - 1) // opened.namespace.chunk_tokens * opened.namespace.chunk_tokens
        cache, count = self._load(tokens[:end], opened)
        if count < end:
            begun, logits = time.monotonic(), self._compute(tokens[count:end], cache)
            if logits is not None and end - count >= _MEASURED_TOKENS:
                logits[0].item()  # once a device has computed it
                self._speeds.append((end - count) / (time.monotonic() - begun))
            self._put(tokens[:end], cache, 0, opened)
        return cache, end

    def _compute(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor | None:
        """Append tokens of one prompt to a cache. Returns the last token's logits."""
        if not len(tokens):
            return None
        few = {"logits_to_keep": 1} if self._model._supports_logits_to_keep() else {}
        ids = tokens[None].to(self._model.device)
        with torch.no_grad():
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **few)
        if output.get("past_key_values") is not cache:
            own = type(output.get("past_key_values", output.get("cache_params"))).__name__
            raise ConfigError(
                f"kvdepot.hf does not serve {type(self._model).__name__}: it keeps a cache of its own ({own})"
            )
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def _target(self, given: object, opened: _Opened | None, pads: Sequence[int] = ()) -> Cache:
        """An empty cache: the caller's, or a new one. pads: columns of padding of each row. Raises BadRequest if the
        caller's cache has tokens or cannot be filled."""
        cache = new_cache(self._model)
        if given is not None:
            check_empty(given, cache)
            cache = given
        if opened is not None:
            cache.kvdepot_revision, cache.kvdepot_has_padding = opened.revision, any(pads)
        return cache

    def _probe_tokens(self) -> torch.Tensor:
        size = self._model.config.get_text_config(decoder=True).vocab_size
        usable = [token for token in range(size) if token not in self._media]
        return torch.tensor((usable * _PROBE_TOKENS)[1 : _PROBE_TOKENS + 1])

    def _probe(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        """The logits after tokens that are computed in these parts, and the cache."""
        cache = self._target(None, None)
        logits = [self._compute(part, cache) for part in parts][-1]
        assert logits is not None
        return logits, cache

    def _check_continuation(self) -> None:
        """Raise ConfigError if the model does not compute from a cache what it computes at once.

        The difference between the two must be far smaller than the effect of the prompt's first tokens.
        """
        tokens = self._probe_tokens()
        first, rest = tokens[:_PROBE_SPLIT], tokens[_PROBE_SPLIT:]
        whole, split, alone = (self._probe(*parts)[0] for parts in ([tokens], [first, rest], [rest]))
        if not (whole - split).norm() <= _MOST_DIFFERENCE * (whole - alone).norm():
            raise ConfigError(
                f"kvdepot.hf does not serve {type(self._model).__name__} in this release of transformers: computing a "
                "prompt in two parts gives other logits than computing it at once"
            )

    # -- arguments

    def _prompts(self, input_ids: TokenIds, attention_mask: torch.Tensor | None) -> _Prompts:
        try:
            ids = torch.as_tensor(input_ids)
        except (TypeError, ValueError, RuntimeError) as exc:
            raise BadRequest(f"input_ids must be token ids, as tokenizer(...).input_ids gives them: {exc}") from exc
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim not in {1, 2}:
            raise BadRequest(
                f"input_ids must be integers [tokens] or [batch, tokens], not {ids.dtype} {list(ids.shape)}: pass "
                "tokenizer(...).input_ids"
            )
        if not ids.numel():
            raise BadRequest("input_ids is empty: pass at least one token")
        ids = ids.detach().long().cpu().reshape(-1, ids.shape[-1])
        if self._media and not self._media.isdisjoint(ids.unique().tolist()):
            raise BadRequest("prompts with images or sounds are not served: their KV does not depend on tokens alone")
        pads = [0] * len(ids) if attention_mask is None else self._pads(ids, attention_mask)
        if attention_mask is None and len(ids) > 1 and not self._padding().isdisjoint(ids[:, 0].tolist()):
            raise BadRequest("this batch is padded: pass its attention_mask; store() takes only rows without padding")
        return _Prompts(ids, pads)

    def _padding(self) -> set[object]:
        """Ids of tokens that pad batches, as far as the model says: tokenizers without such a token pad with the end of
        a sequence."""
        configs = self._model.config, self._model.generation_config
        found: set[object] = set()
        for name in ("pad_token_id", "eos_token_id"):
            for value in (getattr(config, name, None) for config in configs):
                found |= set(value) if isinstance(value, list) else {value}
        return found - {getattr(config, "bos_token_id", None) for config in configs} - {None}

    def _pads(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> list[int]:
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.numel() != ids.numel():
            raise BadRequest(f"attention_mask must be a tensor with a value for each token, not {attention_mask!r:.60}")
        mask = attention_mask.cpu().reshape(-1, ids.shape[-1]) != 0
        pads = [int(pad) for pad in (~mask).sum(1)]
        if len(mask) != len(ids) or any(bool(row[:pad].any()) for row, pad in zip(mask, pads, strict=True)):
            raise BadRequest("attention_mask must mask padding on the left: set tokenizer.padding_side = 'left'")
        if max(pads) == ids.shape[1]:
            raise BadRequest("a row of the batch is empty: pass at least one token")
        return pads

    def _copies(self, arguments: dict[str, object]) -> int:
        """The rows that generation makes of each prompt. Raises BadRequest for arguments that are not served, and for
        such fields of the effective configuration, which also come from the model and from `generation_config`."""
        settings = {name: value for name, value in arguments.items() if name != "generation_config"}
        config, _ = self._model._prepare_generation_config(arguments.get("generation_config"), **settings)
        for name, why in _REFUSED.items():
            values = arguments.get(name), getattr(config, name, None)
            if any(value is not None and value is not False for value in values):
                raise BadRequest(f"kvdepot.hf does not serve {name}: {why}. Use model.generate")
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and not (name == "token_type_ids" and not value.any()):
                raise BadRequest(f"kvdepot.hf does not serve {name}: KV must depend on tokens alone")
        arguments.pop("cache_implementation", None)
        if config.cache_implementation not in {None, "dynamic"}:
            raise BadRequest(
                "pass past_key_values=StaticCache(config=model.config, max_cache_len=...), not a name "
                f"(cache_implementation={config.cache_implementation!r})"
            )
        for name in arguments.keys() - _ARGUMENTS:
            if not hasattr(config, name):
                raise BadRequest(f"kvdepot.hf does not serve {name}: the prompt is computed without it")
        if config.use_cache is False:
            raise BadRequest("use_cache=False leaves nothing to load or store: use model.generate")
        return max(config.num_beams or 1, config.num_return_sequences or 1)
