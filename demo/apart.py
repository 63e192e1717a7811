"""Prefill and decode on different engines of one host: part of `make demo`.

One engine computes prompts and stores them, another one loads them and decodes. Shows the time to the first token
beside that of one engine that does both, and whether tokens and logprobs are bit for bit those of the decoder's own
prefix-cache hit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOKENS = 2048 + 17
PROMPTS = 2
CHUNK = 256
VOCABULARY = 32000


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


class Role:
    """One engine of role.py."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._log.read_text(errors='replace')[-12000:]}\nan engine failed; what it said last is above")
        return json.loads(line)

    def run(self, name: str, tokens: list[int], new: int = 16, reset: bool = True) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": name, "tokens": tokens, "new": new, "reset": reset}) + "\n")
        self._process.stdin.flush()
        return dict(self.hear())


@contextmanager
def role(folder: Path, url: str, kind: str, environ: dict[str, str]) -> Iterator[Role]:
    """Start an engine, which may not have started yet."""
    log = folder / f"{kind}.log"
    command = [sys.executable, str(HERE / "role.py"), kind, str(folder / "model"), url]
    with (
        log.open("wb") as written,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=written, text=True, env=environ
        ) as process,
    ):
        try:
            yield Role(process, log)
        finally:
            process.kill()


def measure(folder: Path, url: str, environ: dict[str, str]) -> list[Apart]:
    """folder: with the model. environ: of the engines."""
    generator = random.Random(time.time())  # prompts that a running server has not seen

    def prompt() -> list[int]:
        return [generator.randrange(3, VOCABULARY) for _ in range(TOKENS)]

    with ExitStack() as stack:
        environ = {**os.environ, **environ}
        prefill = stack.enter_context(role(folder, url, "kv_producer", environ))
        decoder = stack.enter_context(role(folder, url, "kv_consumer", environ))
        for engine in (prefill, decoder):
            engine.hear()
        warm_up = prompt()  # an engine's first calls are slower
        prefill.run("warm-up", warm_up, new=1)
        decoder.run("warm-up", warm_up)
        decoder.run("warm-up-alone", prompt())
        return [_measure(prefill, decoder, f"{number}", prompt(), prompt()) for number in range(PROMPTS)]


def _measure(prefill: Role, decoder: Role, name: str, tokens: list[int], other: list[int]) -> Apart:
    alone = decoder.run(f"{name}-alone", other)  # nobody has stored this one
    first = prefill.run(name, tokens, new=1)
    apart = decoder.run(name, tokens)
    own = decoder.run(f"{name}-own", tokens, reset=False)
    identical = bool(apart["tokens"] == own["tokens"] and apart["logprobs"] == own["logprobs"])
    return Apart(len(tokens), alone["ttft"], first["ttft"], apart["ttft"], apart["cached"], identical)


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
