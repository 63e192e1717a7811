"""A prefix from a depot beside the same cache kept in the process, and beside computing it, with transformers.

    python bench/huggingface.py [--tokens 8192] [--layers 28] [--rounds 5] [--device cpu]

The model has random weights and the shape of Qwen3-0.6B. In each round it computes one token after a prompt: from the
cache that `load` returns, from a copy of a cache in this process (transformers changes a cache as it computes: whoever
keeps one for several prompts copies it), and from that cache itself, cut back afterwards. Prints medians in ms.
"""

from __future__ import annotations

import argparse
import collections
import copy
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import kvdepot
from kvdepot.hf import PrefixCache
from kvdepot.integrations.huggingface.identity import fingerprint, identity


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=options.layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(10, 150000, (1, options.tokens + 1), device=options.device)

    def timed(work: Callable[[], object]) -> float:
        if options.device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if options.device != "cpu":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    def one_token(past: object) -> None:
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=1, do_sample=False)

    def load() -> None:
        held[:] = cache.load(ids)

    def duplicate() -> None:
        held[:] = [copy.deepcopy(kept)]

    held: list[object] = []
    with kvdepot.connect("embedded") as depot:
        print(f"identity {timed(lambda: identity(model)):.0f} ms", end=", ")
        print(f"fingerprint {timed(lambda: fingerprint(model)):.1f} ms")
        cache = PrefixCache(depot, model)
        kept, _ = cache.load(ids)
        computing = timed(lambda: one_token(kept))
        kept.crop(-1)
        storing = timed(lambda: cache.store(ids[:, :-1], kept))
        rounds: dict[str, list[float]] = collections.defaultdict(list)
        for _ in range(options.rounds + 1):
            for name, prepare in (("load", load), ("copy", duplicate)):
                rounds[name].append(timed(prepare))
                rounds[f"{name} + token"].append(rounds[name][-1] + timed(lambda: one_token(held[0])))
                held.clear()
            rounds["kept + token"].append(timed(lambda: one_token(kept)))
            kept.crop(-1)
        size = sum(each.keys.nbytes + each.values.nbytes for each in kept.layers)
    print(f"{options.tokens} tokens, {size / 1e6:.0f} MB of KV; computing {computing:.0f} ms, storing {storing:.0f} ms")
    medians = {name: statistics.median(each[1:]) for name, each in rounds.items()}
    print(", ".join(f"{name} {each:.1f} ms" for name, each in medians.items()))
    whole = medians["load + token"]
    for name in ("copy + token", "kept + token"):
        print(
            f"load + token is {whole / medians[name]:.2f} of {name}, {computing / whole:.1f} times as fast as computing"
        )


if __name__ == "__main__":
    main()
