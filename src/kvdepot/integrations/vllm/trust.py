"""Whether this engine may load chunks that other engines have stored: up to where comparisons have proved each engine.

Used by scheduler.py. The name of a namespace (identity.py) stands for a list of facts, and no such list is complete:
only the KV itself is a proof. So a table says up to which position this engine has compared the chunks of each writer
with its own, in each scope. A writer is trusted up to four times that position. The answer to a lookup names the
writers of the chunks found, and the comparison begins with the first chunks of a writer that is not trusted there:

    chunks  |---- trusted ----|---- of an unproven writer ----| others ...
    load    [0 ............................................e-1)
    compute                                                [e-1 ...........)   on top of that, and compare

The last chunk of that writer's run shows other weights, scales, positions and kernels in its own keys and values, and,
through attention, wrong values in the chunks before it. No token may leave the engine before the comparison has ended
well, so the comparison ends within the step that computes the chunk (`Orders.proofs`, worker.py); otherwise that step
reports the load as failed, and vLLM drops what it has computed. Where vLLM cannot do that (versions.takes_loads_back),
only trusted chunks are loaded, and the others are computed and compared with the stored ones. For models with windows,
states or experts, and prompts with images or other items, all chunks are. If a comparison differs, the engine's KV is
private from then on, and its chunks under the shared name are removed.

With `--verify-hits`, a share of the hits on trusted chunks is computed and compared whole as long as the engine runs,
to find damaged bytes, which may be in any chunk. The server acts on the results (core/verification.py). Invariant:
nothing that follows from chunks of an unproven writer leaves the engine before a comparison has ended well on every
rank.
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
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvdepot.client.scheduler import Cached
from kvdepot.client.worker import CompareTerms
from kvdepot.integrations.vllm.messages import Check, Compared, Scope, Terms
from kvdepot.integrations.vllm.versions import takes_loads_back
from kvdepot.protocol import wire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvdepot.integrations.vllm.plan import GroupPlan
    from kvdepot.integrations.vllm.requests import Tracked
    from kvdepot.integrations.vllm.stores import WaitingStore
    from kvdepot.integrations.vllm.weights import NamedWeights

log = init_logger(__name__)

_MOST_EPSILONS, _LEAST_EPSILON = 4.0, 2.0**-10
"""The limit of the difference: 4 epsilons of the model's data type (of TF32 for float32) times the square root of the
number of layers, because differences add up (docs/internals/integrations.md has what was measured)."""
_ROUNDED = 0.1
"""KV of 8 bits adds this to the limit: values that differ a little may be rounded to numbers an eighth apart."""
_CHOSEN = 0.2
"""A mixture of experts adds this to the limit, because rounding makes it choose other experts."""
_REACH = 4
"""A writer that was compared up to some position is trusted up to this many times as far."""
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
    """A comparison under way, and the results that ranks have reported."""

    scope: Scope
    is_sample: bool
    found: list[Compared] = field(default_factory=list)


class TrustedHit(NamedTuple):
    """The part of a hit that is loaded. tokens: number of tokens from the prompt's start. terms: terms on which the
    rest is compared; None: no comparison. is_unproven: whether the first step that computes the rest must prove the
    load."""

    tokens: int
    terms: Terms | None = None
    is_unproven: bool = False


class Trust:
    """A record of what one engine has proved."""

    def __init__(self, vllm_config: VllmConfig, writer: str, weights: NamedWeights) -> None:
        """writer: the name under which this engine stores; empty: it loads without proof."""
        parallel = vllm_config.parallel_config
        self.name, self._weights = writer, weights
        self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._limit = _largest_difference(vllm_config)
        self._has_experts = vllm_config.model_config.get_num_experts() > 0
        self._proof, self._sample = (CompareTerms(self._limit, sample, self._has_experts) for sample in (False, True))
        self._chunk_tokens, self._is_plain = 1, False
        self._step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._takes_back = takes_loads_back(vllm_config)
        self._proven: dict[tuple[Scope, str], int] = {}
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}

    def __repr__(self) -> str:
        return f"<Trust in {len(self._proven)} writers, {len(self._open)} comparisons under way>"

    def connect(self, chunk_tokens: int, plan: GroupPlan) -> None:
        self._chunk_tokens, self._is_plain = chunk_tokens, plan.is_plain and not self._has_experts

    def divide(self, tracked: Tracked, found: Cached, tokens: int, local_tokens: int, sampled: float) -> TrustedHit:
        """Decide which of the prompt's first `tokens` tokens, which a request's lookup has found, are loaded.

        local_tokens: number of tokens that the engine's own cache has. sampled: the share of hits, 0 to 1, that the
        server wants to be compared.
        """
        request, size = tracked.request, self._chunk_tokens
        trusted, end = self._trusted(self._scope(request, tokens), found, local_tokens)
        if not self.name or trusted >= tokens:
            is_sample = found.tokens > 0 and found.tail is None and tracked.draw < sampled
            return TrustedHit(0, Terms(self._scope(request, tokens), self._sample)) if is_sample else TrustedHit(tokens)
        terms = self.terms(request, tokens)
        if not self._is_plain or request.mm_features:
            return TrustedHit(0, terms)
        is_unproven = self._takes_back and size <= self._step_tokens and end - size > max(trusted, local_tokens)
        return TrustedHit(end - size if is_unproven else trusted, terms, is_unproven)

    def _trusted(self, scope: Scope, found: Cached, local_tokens: int) -> tuple[int, int]:
        """The number of first tokens whose writers are trusted, and the end, in tokens, of the chunks behind them whose
        writers are known and not trusted."""
        begin = 0
        for chunks, runs in itertools.groupby(found.writers, key=attrgetter("end")):
            end = chunks * self._chunk_tokens
            bound = min(self._bound(scope, run.writer) for run in runs)
            if bound < end and end > local_tokens:
                return max(begin, int(bound) // self._chunk_tokens * self._chunk_tokens), end
            begin = end
        return begin, begin

    def _bound(self, scope: Scope, writer: str) -> float:
        return math.inf if writer == self.name else _REACH * self._proven.get((scope, writer), 0)

    def terms(self, request: Request, tokens: int) -> Terms:
        """The terms on which a request's chunks within its first `tokens` tokens are compared."""
        item = _first_item(request)
        return Terms(self._scope(request, tokens), self._proof, item if item < tokens else 0)

    def order(self, waiting: Iterable[WaitingStore]) -> dict[int, Check]:
        """The comparisons that go with stores that are ready, by number."""
        stores = [store for store in waiting if store.compared]
        return {self.open(store.terms): Check(store.compared, store.terms.compare) for store in stores if store.terms}

    def open(self, terms: Terms) -> int:
        """Begin a comparison that every rank will report; returns its number."""
        number = next(self._numbers)
        self._open[number] = _Open(terms.scope, terms.compare.is_sample)
        return number

    def report(self, compared: Mapping[int, Sequence[Compared]]) -> Verdict:
        """Handle ranks' results, by number of the check; returns the worst verdict of the checks that have ended on all
        ranks.

        If the stored chunks were evicted meanwhile, nothing is proved, and the next hit is compared as if it were the
        first.
        """
        verdicts = {Verdict.UNKNOWN}
        for number, found in compared.items():
            check = self._open.get(number)
            if check is None:
                continue
            check.found += found
            if len(check.found) >= self._ranks:
                del self._open[number]
                if check.scope[0] == self._weights.parts:  # else other weights had computed the compared chunks
                    verdicts.add(self._judge(check))
        return next(each for each in (Verdict.DIFFERENT, Verdict.EQUAL, Verdict.UNKNOWN) if each in verdicts)

    def _judge(self, check: _Open) -> Verdict:
        worst = max(each.worst for each in check.found)
        if worst > self._limit:
            if check.is_sample:
                log.error(
                    "kvdepot: a sampled hit differs by %.2g from what this engine computes, and up to %.2g is "
                    "rounding. The server serves no chunk of this model until it is released: see `kvdepot inspect "
                    "--compare`",
                    worst, self._limit,
                )  # fmt: skip
                return Verdict.UNKNOWN
            log.error(
                "kvdepot: this engine's KV differs by %.2g from what another engine has stored under the same name, "
                "and up to %.2g is rounding. This engine shares no KV until it is restarted. `kvdepot inspect "
                "--compare` shows how the two engines differ", worst, self._limit,
            )  # fmt: skip
            return Verdict.DIFFERENT
        if not all(each.proves(self._limit) for each in check.found):
            return Verdict.UNKNOWN
        # A model's groups are proved by any of them: what one layer keeps depends on all layers before it.
        ranks = [{run.writer: run.end for run in sorted(each.writers, key=attrgetter("end"))} for each in check.found]
        for writer in set.intersection(*map(set, ranks)) - {self.name}:
            end = min(rank[writer] for rank in ranks) * self._chunk_tokens
            key = check.scope, writer
            if end <= self._proven.get(key, 0):
                continue
            self._proven[key] = end
            called = writer.partition(" ")[2] or writer or "an unknown engine"
            if not all(each.chunks for each in check.found):
                log.warning(
                    "kvdepot: this engine's KV has a format that cannot be compared, so the KV of %s is loaded "
                    "unchecked", called,
                )  # fmt: skip
                continue
            log.info(
                "kvdepot: the KV that %s has stored equals what this engine computes: compared up to token %d, the "
                "largest difference is %.2g, and up to %.2g is rounding. It is loaded from now on, in prompts of up to "
                "%d tokens", called, end, worst, self._limit, _REACH * end,
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
    """Facts of this engine for people, to be shown beside those of another engine whose KV differs."""
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
