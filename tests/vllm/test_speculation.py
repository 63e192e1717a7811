"""Real vLLM engines that speculate: a hit in the depot gives the same tokens, and as many accepted drafts, as computing
the prompt does.

Models and drafters are random, with so few tokens that a draft is right now and then; whether it is depends on all of
the drafter's KV. Steps compute in float32, so that a batch of another shape gives the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Depot, eventually
from tests.vllm import drafters, engines
from tests.vllm.engines import Engine, nothing_is_held

CHUNK = 256
DECODED = 100


def prompt(seed: int, tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(drafters.VOCABULARY) for _ in range(tokens)]


class Speculating(NamedTuple):
    """How engines speculate."""

    model: Path
    speculation: dict[str, Any]
    options: dict[str, Any]

    def start(self, url: str, **options: Any) -> Engine:
        return Engine(self.model, url, speculative_config=self.speculation, **self.options, **options)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Speculating]:
    folder = tmp_path_factory.mktemp("drafters")
    target = engines.write_model(folder / "target", drafters.TARGET)
    small = engines.write_model(folder / "small", drafters.TARGET | {"num_hidden_layers": 1})
    eagles = {kind: drafters.write_drafter(folder / kind, kind, drafters.TARGET) for kind in ("eagle", "eagle3")}
    deepseek = drafters.write_mtp(folder / "mtp", drafters.DEEPSEEK)
    plain: dict[str, Any] = {"dtype": "float32", "block_size": 32}
    # vLLM computes prompts of such models in one step; its backend for AMX does not compute in float32.
    latent = {"dtype": "float32", "max_num_batched_tokens": 4096, "attention_config": {"backend": "CPU_MLA"}}
    return {
        "draft model": Speculating(
            target, {"method": "draft_model", "model": str(small), "num_speculative_tokens": 3}, plain
        ),
        **{
            kind: Speculating(target, {"method": kind, "model": str(path), "num_speculative_tokens": 3}, plain)
            for kind, path in eagles.items()
        },
        "mtp": Speculating(
            deepseek, {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}, latent
        ),
    }


@pytest.fixture(scope="module")
def greedy(kinds: dict[str, Speculating]) -> Iterator[list[list[int]]]:
    """What the target says to each of the prompts, without drafts."""
    depot = Depot(arena_mib=64).wait_ready()
    engine = Engine(kinds["eagle"].model, depot.url, **kinds["eagle"].options).wait_started()
    yield [engine.run(tokens, max_tokens=DECODED)["tokens"] for tokens in PROMPTS]
    engine.stop()
    engine.close()
    depot.close()


@pytest.fixture(scope="module")
def eagle(kinds: dict[str, Speculating], vllm_depot: Depot) -> Iterator[Engine]:
    """An engine that stores what it decodes."""
    engine = kinds["eagle"].start(vllm_depot.url, extra={"kvdepot.save_decode": True})
    yield engine.wait_started()
    engine.stop()
    engine.close()


PROMPTS = [prompt(700 + chunks, chunks * CHUNK + 17) for chunks in (1, 4)]


def speculated(engine: Engine, tokens: list[int], fresh: bool = True, **options: Any) -> tuple[list[int], list[int]]:
    """What the engine says, and how many tokens it drafted and accepted."""
    before = engine.tell("speculation")
    result = (engine.run_fresh if fresh else engine.run)(tokens, max_tokens=DECODED, **options)
    counted = [now - then for now, then in zip(engine.tell("speculation"), before, strict=True)]
    return result["tokens"], [result["cached"], *counted]


@pytest.mark.parametrize("kind", ["draft model", "eagle", "eagle3", "mtp"])
def test_tokens_and_accepted_drafts_after_a_hit_are_those_of_a_computed_prompt(
    kind: str, vllm_depot: Depot, kinds: dict[str, Speculating], eagle: Engine, greedy: list[list[int]]
) -> None:
    """vLLM drafts for the last token of a prompt if it is the only one left to compute: here there are more."""
    engine = eagle if kind == "eagle" else kinds[kind].start(vllm_depot.url).wait_started()
    for tokens, expected in zip(PROMPTS, greedy, strict=True):
        computed, (nothing, drafted, accepted) = speculated(engine, tokens)
        assert nothing == 0 < accepted < drafted
        own, figures = speculated(engine, tokens, fresh=False)
        assert speculated(engine, tokens) == (own, figures)
        assert figures[0] == len(tokens) // CHUNK * CHUNK
        if kind != "mtp":  # another model, which this backend rounds in another way once a part of a prompt is cached
            assert (own, figures[1:]) == (expected, [drafted, accepted])
            assert computed == expected
    if kind != "eagle":
        engine.stop()
        engine.close()
    eventually(lambda: nothing_is_held(vllm_depot.status()))


def test_a_chunk_is_shared_only_by_prompts_that_go_on_with_the_same_token(eagle: Engine) -> None:
    """EAGLE's KV at a position is computed from the token after it: a last chunk is stored once that is known."""
    engine, head = eagle, prompt(720, 2 * CHUNK)
    first, second = [*head, 3, *prompt(721, CHUNK + 16)], [*head, 4, *prompt(722, CHUNK + 16)]
    for tokens, hit in ((first, 0), (second, CHUNK)):
        computed, figures = speculated(engine, tokens)
        assert figures[0] == hit
        assert speculated(engine, tokens) == (computed, [3 * CHUNK, *figures[1:]])
    whole = prompt(723, 2 * CHUNK)
    answer, (_, drafted, accepted) = speculated(engine, whole)
    assert speculated(engine, whole) == (answer, [CHUNK, drafted, accepted])
    assert engine.run_fresh([*whole, *answer[:5]])["cached"] == 2 * CHUNK
    assert engine.run_fresh([*whole, (answer[0] + 1) % drafters.VOCABULARY])["cached"] == CHUNK
    # What was decoded, with drafts that were rejected in between.
    decoded = engine.run_fresh(prompt(724, CHUNK + 200), max_tokens=400)["tokens"]
    follows = [*prompt(724, CHUNK + 200), *decoded[:330], 5, 6, 7]
    from_depot, figures = speculated(engine, follows)
    assert figures[0] == 3 * CHUNK
    assert speculated(engine, follows, salt="computed") == (from_depot, [0, *figures[1:]])
