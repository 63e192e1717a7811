"""Prefill and decode on different engines of one host: part of `make demo`.

One engine computes prompts and stores them, another one loads them and decodes. Shows the time to the first token
beside that of one engine that does both, and whether tokens and logprobs are bit for bit those of the first
engine's own prefix-cache hit.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from kvdepot.cli.certify import TestedEngine
from kvdepot.cli.completions import Case

TOKENS = 2048 + 17
PROMPTS = 2
CHUNK = 256


@dataclass(frozen=True)
class Apart:
    """One prompt. Times in seconds: alone_s: to the first token of one engine that computes the prompt itself;
    prefill_s: the prefill engine's answer; decode_s: from then to the decoder's first token.
    """

    tokens: int
    alone_s: float
    prefill_s: float
    decode_s: float
    loaded: int
    identical: bool

    @property
    def whole(self) -> bool:
        """Whether the decoder computed no whole chunk itself, and decoded the same."""
        return self.identical and self.loaded == (self.tokens - 1) // CHUNK * CHUNK


def measure(folder: Path, url: str, words: list[str]) -> list[Apart]:
    """Start both engines, and run the prompts. words: vLLM's arguments."""
    seed = time.time_ns()  # prompts that a running server has not seen

    with ExitStack() as stack:
        roles = [{"kv_connector": "KVDepotConnector", "kv_role": role} for role in ("kv_producer", "kv_consumer")]
        engines = [
            stack.enter_context(
                closing(TestedEngine(folder / role["kv_role"], url, [*words, "--kv-transfer-config", json.dumps(role)]))
            )
            for role in roles
        ]
        prefill, decoder = (engine.start() for engine in engines)

        def prompt(number: int) -> Case:
            generator = random.Random(seed + number)
            return Case("", [generator.randrange(3, 32000) for _ in range(TOKENS)], 0)

        warm_up = prompt(0)  # an engine's first calls are slower
        prefill.run(warm_up, source="computing", new_tokens=1)
        decoder.run(warm_up)
        decoder.run(prompt(1))
        return [_measure(prefill, decoder, prompt(2 * each), prompt(2 * each + 1)) for each in range(1, PROMPTS + 1)]


def _measure(prefill: TestedEngine, decoder: TestedEngine, case: Case, other: Case) -> Apart:
    (alone,) = decoder.run(other)  # nobody has stored this one
    (first,) = prefill.run(case, source="computing", new_tokens=1)
    (apart,) = decoder.run(case)
    (own,) = prefill.run(case, source="own cache")
    identical = (apart.tokens, apart.logprobs) == (own.tokens, own.logprobs)
    return Apart(len(case.tokens), alone.ttft_s, first.ttft_s, apart.ttft_s, apart.cached, identical)


def report(measured: list[Apart]) -> bool:
    """Print the times; returns whether all is as it should be."""
    print("\nprefill and decode on different engines")
    print(f"{'prompt':<16} {'one engine, TTFT':>18} {'prefill':>10} {'decoder':>10} {'ratio':>6} {'loaded':>7} same")
    for number, each in enumerate(measured, 1):
        print(
            f"{f'{number}: {each.tokens} tokens':<16} {each.alone_s * 1e3:>15.0f} ms {each.prefill_s * 1e3:>7.0f} ms "
            f"{each.decode_s * 1e3:>7.0f} ms {(each.prefill_s + each.decode_s) / each.alone_s:>5.2f}x {each.loaded:>7} "
            f"{'yes' if each.identical else 'NO'}"
        )
    return all(each.whole for each in measured)
