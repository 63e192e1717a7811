"""One vLLM engine of the demo, with processes of its own: runs prompts and writes its measurements as JSON.

    python engine.py MODEL_DIR DEPOT_URL PROMPTS.json OUT.json MODE STEPS

MODE `cold`: every prompt once. MODE `warm`: every prompt twice, first from the depot, then from the engine's own prefix
cache. The time to first token is that from adding the request until the step that returns its first token. The file
STEPS gets the number of completed runs and of all runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams

NEW_TOKENS = 16


def new_engine(model: str, url: str, role: str = "kv_both") -> LLM:
    """An engine with the depot at `url`."""
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype=json.loads(Path(model, "config.json").read_text())["torch_dtype"],  # "auto" makes bfloat16 of float32
        enforce_eager=True,
        max_model_len=8448,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        kv_transfer_config={
            "kv_connector": "KVDepotConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"kvdepot.url": url},
        },
    )


def run(llm: LLM, name: str, tokens: list[int], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Run one request to its end; returns TTFT in seconds, tokens, logprobs, and cached prompt tokens."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0, logprobs=5, detokenize=False, ignore_eos=True)
    engine = llm.llm_engine
    engine.add_request(name, {"prompt_token_ids": tokens}, params)
    start, first, last = time.perf_counter(), 0.0, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not first and output.outputs[0].token_ids:
                first = time.perf_counter() - start
            last = output
    assert last is not None
    logprobs = [{token: p.logprob for token, p in step.items()} for step in last.outputs[0].logprobs]
    return {
        "ttft": first,
        "tokens": list(last.outputs[0].token_ids),
        "logprobs": logprobs,
        "cached": last.num_cached_tokens,
    }


def reset(llm: LLM) -> None:
    """Empty the engine's own prefix cache, once the last request's blocks have been stored."""
    while not llm.reset_prefix_cache():
        time.sleep(0.01)


class Steps:
    """Write the progress, atomically."""

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._done, self._total = path, -1, total
        self.next()

    def next(self) -> None:
        self._done += 1
        new = self._path.with_suffix(".new")
        new.write_text(f"{self._done} {self._total}")
        new.replace(self._path)


def main() -> None:
    model, url, prompts_file, out, mode, steps = sys.argv[1:]
    prompts: dict[str, list[int]] = json.loads(Path(prompts_file).read_text())
    llm = new_engine(model, url)
    kinds = ["first", "own"] if mode == "warm" else ["first"]
    # The first calls are slower, which must not count for or against the depot. So warm up: compute two prompts, so
    # that the engine knows its own speed (it ignores its first step), and retrieve another if the depot has one.
    warm_ups = [[8] * 2050, [9] * 2050, [7] * 2050] if mode == "warm" else [[7] * 2050]
    told = Steps(Path(steps), len(warm_ups) + len(prompts) * len(kinds))
    for number, tokens in enumerate(warm_ups):
        run(llm, f"warm-up-{number}", tokens)
        told.next()
    results: dict[str, Any] = {}
    for name, tokens in prompts.items():
        reset(llm)
        results[name] = {}
        for kind in kinds:
            results[name][kind] = run(llm, f"{name}-{kind}", tokens)
            told.next()
    Path(out).write_text(json.dumps(results))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
