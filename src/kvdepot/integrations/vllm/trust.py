"""Whether this engine may load what other engines have stored, which it must have proved, and goes on proving.

Used by scheduler.py. What names a namespace (identity.py) is a list of facts, and no list is whole: the KV itself is
the proof. So the first hit on chunks that this engine has not stored is computed as if it were a miss, and its stores
go with a comparison: each rank has the server compare its blocks with the stored chunks (memory/comparison.py). If they
are equal within rounding, the engine loads from then on. If not, what it computes is private from then on, and what it
has stored under the shared name is removed. The same for the first hit with each LoRA adapter, and with images or other
items. An engine that only meets its own chunks computes nothing twice; until it has proved itself, the server gives
it no others (`Retrieve.writer`).

With `--verify-hits`, the same is done with a share of all later hits, for as long as the engine runs; then the server
draws the consequences (core/verification.py). Invariant: nothing is loaded that another engine has stored before a
comparison of the same scope has ended well on every rank.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvdepot.client.scheduler import Cached
from kvdepot.client.worker import CompareTerms
from kvdepot.integrations.vllm.messages import Check, Compared, Scope, Terms
from kvdepot.protocol import wire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvdepot.integrations.vllm.requests import Tracked
    from kvdepot.integrations.vllm.stores import WaitingStore
    from kvdepot.integrations.vllm.weights import NamedWeights

log = init_logger(__name__)

_MOST_EPSILONS, _LEAST_EPSILON = 4.0, 2.0**-10
"""The limit of the difference: 4 epsilons of the model's data type (of TF32 for float32) times the square root of the
number of layers, because differences add up (docs/internals/integrations.md has what was measured)."""
_ROUNDED = 0.1
"""KV of 8 bits adds this: values that differ a little are rounded to neighbours, an eighth apart."""
_CHOSEN = 0.2
"""A mixture of experts adds this: rounding chooses other experts."""
_MOST_VALUE = wire.MAX_CLIENT_NAME
_VARIABLES = "VLLM_ATTENTION_BACKEND", "VLLM_BATCH_INVARIANT", "VLLM_KV_CACHE_LAYOUT", "VLLM_USE_V2_MODEL_RUNNER"
"""Variables that people can compare; others may have secrets."""


class Verdict(Enum):
    """The meaning of a comparison that has ended."""

    EQUAL = auto()
    DIFFERENT = auto()
    UNKNOWN = auto()


@dataclass
class _Open:
    """A comparison under way, and what ranks have reported of it."""

    scope: Scope
    is_sample: bool
    found: list[Compared] = field(default_factory=list)


class Trust:
    """A record of what one engine has proved."""

    def __init__(self, vllm_config: VllmConfig, writer: str, weights: NamedWeights) -> None:
        """writer: names this start of the engine; empty: it loads without proof."""
        parallel = vllm_config.parallel_config
        self.name, self._weights = writer, weights
        self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._limit = _largest_difference(vllm_config)
        experts = vllm_config.model_config.get_num_experts() > 0
        self._proof, self._sample = (CompareTerms(self._limit, is_sample, experts) for is_sample in (False, True))
        self._proven: set[Scope] = set()
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}

    def __repr__(self) -> str:
        return f"<Trust in {len(self._proven)} scopes, {len(self._open)} comparisons under way>"

    def writer(self, request: Request, tokens: int) -> str:
        """As in wire.Lookup and wire.Retrieve, for the first `tokens` of a request; empty if it does not matter who has
        stored them."""
        return "" if self._scope(request, tokens) in self._proven else self.name

    def check(self, tracked: Tracked, found: Cached, sampled: float) -> Terms | None:
        """The terms on which the request must be computed and compared; None: it may load what its lookup has found.

        sampled: the share of hits that the server wants to be compared.
        """
        tokens = found.tokens if found.tail is None else tracked.tails[found.tail].tokens
        if tokens and not found.is_own and self.writer(tracked.request, tokens):
            return self.terms(tracked.request, tokens)
        is_sample = found.tokens > 0 and found.tail is None and tracked.draw < sampled
        return Terms(self._scope(tracked.request, tokens), self._sample) if is_sample else None

    def terms(self, request: Request, tokens: int) -> Terms:
        """The terms on which the first `tokens` of a request prove what it computes."""
        item = _first_item(request)
        return Terms(self._scope(request, tokens), self._proof, item if item < tokens else 0)

    def order(self, waiting: Iterable[WaitingStore]) -> dict[int, Check]:
        """The comparisons that go with stores that are ready, by number."""
        checks = {}
        for store in waiting:
            if store.terms is not None and store.compared:
                number = next(self._numbers)
                checks[number] = Check(store.compared, store.terms.compare)
                self._open[number] = _Open(store.terms.scope, store.terms.compare.is_sample)
        return checks

    def report(self, compared: Mapping[int, Sequence[Compared]]) -> Verdict:
        """Handle what ranks have found, by number; returns the worst verdict of those that have ended on all ranks.

        Without chunks to compare with, which may have been evicted, nothing is known, and the next hit is the first.
        """
        verdicts = {Verdict.UNKNOWN}
        for number, found in compared.items():
            check = self._open.get(number)
            if check is None:
                continue
            check.found += found
            if len(check.found) >= self._ranks:
                del self._open[number]
                if check.scope[0] == self._weights.parts:  # else it compared what other weights had computed
                    verdicts.add(self._judge(check))
        return next(each for each in (Verdict.DIFFERENT, Verdict.EQUAL, Verdict.UNKNOWN) if each in verdicts)

    def _judge(self, check: _Open) -> Verdict:
        worst = max(each.worst for each in check.found)
        if worst > self._limit:
            if check.is_sample:
                log.error(
                    "kvdepot: a sampled hit differs by %.2g from what this engine computes (limit: %.2g); the server "
                    "serves no chunk of this model until it is released: see `kvdepot verify`", worst, self._limit,
                )  # fmt: skip
                return Verdict.UNKNOWN
            log.error(
                "kvdepot: this engine's KV differs by %.2g from what another engine has stored under the same name "
                "(limit: %.2g). This engine shares no KV until it is restarted; `kvdepot verify` shows how the two "
                "engines differ", worst, self._limit,
            )  # fmt: skip
            return Verdict.DIFFERENT
        # A sample may have met chunks of this engine only. And a model's groups are proved by any of them: what one
        # layer keeps depends on all layers before it.
        is_proof = not check.is_sample and all(each.chunks or each.unknown for each in check.found)
        if check.scope in self._proven or not is_proof:
            return Verdict.UNKNOWN
        self._proven.add(check.scope)
        if not all(each.chunks for each in check.found):
            log.warning("kvdepot: KV of this engine's format cannot be compared, so stored KV is loaded unchecked")
            return Verdict.EQUAL
        log.info(
            "kvdepot: this engine computes what others have stored (largest difference %.2g, limit %.2g), and loads it "
            "from here on", worst, self._limit,
        )  # fmt: skip
        return Verdict.EQUAL

    def _scope(self, request: Request, tokens: int) -> Scope:
        adapter = request.lora_request
        number = adapter.lora_int_id if adapter is not None else 0
        return self._weights.parts, number, _first_item(request) < tokens


def _first_item(request: Request) -> int:
    """The place of the first image or other item in a prompt; behind its end if it has none."""
    return min([int(item.mm_position.offset) for item in request.mm_features], default=int(request.num_tokens))


def _largest_difference(vllm_config: VllmConfig) -> float:
    model = vllm_config.model_config
    epsilon = max(torch.finfo(model.dtype).eps, _LEAST_EPSILON)
    limit: float = _MOST_EPSILONS * epsilon * math.sqrt(max(1, model.get_total_num_hidden_layers()))
    limit += _CHOSEN if model.get_num_experts() > 0 else 0.0
    return limit + _ROUNDED if vllm_config.cache_config.cache_dtype.startswith(("fp8", "int8")) else limit


def describe_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """Facts of this engine that people can read, to be shown beside another's whose KV differs."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = model.hf_text_config.to_dict()
    settings = {name: value for name, value in sorted(config.items()) if isinstance(value, int | float | str | dict)}
    facts: dict[str, object] = {
        "model": model.model,
        "revision": model.revision,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype,
        "KV dtype": vllm_config.cache_config.cache_dtype,
        "quantization": model.quantization,
        "load format": vllm_config.load_config.load_format,
        "longest prompt": model.max_model_len,
        "tensor parallel": parallel.tensor_parallel_size,
        "pipeline parallel": parallel.pipeline_parallel_size,
        "processor": current_platform.get_device_name() or platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "general plugins": ", ".join(sorted(each.name for each in _plugins())),
        **{name: os.environ.get(name) for name in _VARIABLES},
        **{f"version of {name}": _version(name) for name in ("vllm", "torch", "transformers", "kvdepot")},
    }
    for name, value in itertools.islice(settings.items(), wire.MAX_FACTS - len(facts)):
        facts.setdefault(f"config {name}", value)
    return {name[:_MOST_VALUE]: str(value)[:_MOST_VALUE] for name, value in facts.items() if value is not None}


def _plugins() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group="vllm.general_plugins")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
