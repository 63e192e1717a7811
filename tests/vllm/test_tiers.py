"""A tier that does not answer, below a real engine; test_tails.py has one that does, tests/tiers/test_depots.py all."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.conftest import StartDepot, eventually
from tests.tiers.servers import RedisServer, need
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import output, prompt

TOKENS = prompt(71, 4 * 256 + 17)


def test_a_request_goes_on_when_a_tier_never_answers_and_later_ones_do_not_ask_it(
    start_depot: StartDepot, start_engine: StartEngine, models: dict[str, Path], tmp_path: Path
) -> None:
    need(commands=["redis-server"], modules=["redis"])
    redis = RedisServer(tmp_path)
    try:
        depot = start_depot(f"--tiers=redis://127.0.0.1:{redis.port}?timeout_s=60", "--lookup-s", "8", arena_mib=128)
        engine = start_engine(models["gqa"], depot.url, dtype="float32").wait_started()
        for number in range(2):
            engine.run(prompt(80 + number, 1024))  # from which it knows how fast it computes
        redis.process.send_signal(signal.SIGSTOP)
        prompts = [prompt(90 + number, 1024) for number in range(4)]
        answers = [engine.run(tokens) for tokens in prompts]
        assert [answer["cached"] for answer in answers] == [0] * 4
        assert [engine.run(tokens)["tokens"] for tokens in prompts] == [answer["tokens"] for answer in answers]
        (tier,) = depot.status()["tiers"]
        assert tier["counters"]["late"] == 1 and tier["counters"]["computed_tokens"] >= 1024
        assert not tier["error"], "the lookup has waited for its deadline"
        redis.process.send_signal(signal.SIGCONT)
        engine.stop()
        depot.stop()
    finally:
        redis.kill()


def test_an_engine_elsewhere_gets_the_same_tokens_through_a_shared_tier(
    start_depot: StartDepot, start_engine: StartEngine, models: dict[str, Path], tmp_path: Path
) -> None:
    need(commands=["redis-server"], modules=["redis"])
    redis = RedisServer(tmp_path)
    try:
        tier = f"redis://127.0.0.1:{redis.port}"
        one = start_depot("--tiers", tier, arena_mib=128)
        two = start_depot("--tiers", tier, "--lookup-s", "8", arena_mib=128)
        first, second = (start_engine(models["gqa"], depot.url) for depot in (one, two))
        assert first.wait_started().run(TOKENS)["cached"] == 0
        answer = first.run(TOKENS)
        first.stop()
        eventually(lambda: one.status()["tiers"][0]["counters"].get("saved_chunks", 0) >= 4)
        one.stop()
        assert two.status()["chunks"] == 0, "its memory begins empty"
        through, own = second.wait_started().run_fresh(TOKENS), second.run(TOKENS)
        assert through["cached"] == own["cached"] == 1024
        assert output(through) == output(own) == output(answer)
        assert two.status()["tiers"][0]["counters"]["loaded_chunks"] >= 4
        second.stop()
        two.stop()
    finally:
        redis.kill()
