"""SGLang's whole engine with a small model on the processor: scheduler, radix tree, threads; real servers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.integrations.weight_files import SETTLED_S
from tests.conftest import StartDepot, eventually
from tests.sglang.parts import __version__, extra

pytestmark = pytest.mark.skipif(__version__ != "0.5.23", reason="the stubs of tiny_engine.py are for SGLang 0.5.23")

_ROOT = Path(__file__).parents[2]
_TOKENS, _PAGES = 98, 6
_PROMPT = [(token * token * 7 + 3) % 256 for token in range(_TOKENS)]
_HANG_S = 600.0
"""To import SGLang takes a busy machine minutes."""


class _Engine:
    """A process of tests.sglang.tiny_engine."""

    def __init__(self, model: Path, *extras: str) -> None:
        command = [sys.executable, "-m", "tests.sglang.tiny_engine", str(model), *extras]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hangs = threading.Timer(_HANG_S, self._process.kill)
        self._hangs.start()

    def ask(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        pytest.fail(f"the engine ended with status {self._process.wait()}")

    def __call__(self, *words: Any) -> Any:
        self.ask(*words)
        return self.answer()

    def close(self) -> None:
        with self._process, contextlib.suppress(BrokenPipeError):  # closes its pipes, and waits
            pass
        self._hangs.cancel()


@pytest.fixture
def engines() -> Iterator[list[_Engine]]:
    started: list[_Engine] = []
    yield started
    for engine in started:
        engine.close()


def _save(folder: Path, seed: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 2048}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


def test_an_engine_loads_what_another_computed_until_its_weights_change(
    tmp_path: Path, start_depot: StartDepot, engines: list[_Engine]
) -> None:
    model, other = _save(tmp_path / "model", 0), _save(tmp_path / "other", 1)
    settled_at = time.time() + SETTLED_S + 0.5
    eventually(lambda: time.time() > settled_at)  # engines that start sooner may have read other files
    depot = start_depot(chunk_size="auto")
    settings = json.dumps(extra(depot.url, prefetch_threshold=16, hicache_storage_pass_prefix_keys=True))
    alone, first = _Engine(model), _Engine(model, settings)
    engines += [alone, first]
    for engine in engines:
        engine.ask("generate", _PROMPT)
    (computed, _), (tokens, loaded) = alone.answer(), first.answer()
    assert (tokens, loaded) == (computed, 0)
    eventually(lambda: depot.status()["chunks"] == _PAGES)
    assert alone("update", str(other))
    changed, _ = alone("generate", _PROMPT)
    assert changed != computed
    alone.close()
    first.close()

    second = _Engine(model, settings)
    engines.append(second)
    assert second("generate", _PROMPT) == [computed, _PAGES * 16]
    assert second("flush")
    assert second("generate", _PROMPT) == [computed, _PAGES * 16], "not kept over a flush"
    assert second("update", str(other))
    assert second("generate", _PROMPT) == [changed, 0], "another model's pages"
    eventually(lambda: depot.status()["chunks"] == 2 * _PAGES)
    assert second("flush")
    assert second("generate", _PROMPT) == [changed, _PAGES * 16], "not kept after an update"
