"""Servers that die under a real vLLM engine: the same tokens as without them, and no request that waits for them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.conftest import Depot, StartDepot, eventually
from tests.server.process import kill
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import Engine, nothing_is_held, output, prompt

CHUNKS = 3
PROMPTS = [prompt(100 + i, CHUNKS * 256 + 11 + i) for i in range(6)]


def alone(engine: Engine) -> list[Any]:
    """The engine's own answers, one request at a time."""
    return [output(engine.run_fresh(tokens)) for tokens in PROMPTS]


def together(engine: Engine) -> list[dict[str, Any]]:
    """All prompts at once, as the engine batches them."""
    engine.tell("reset")
    requests = [engine.request(tokens) for tokens in PROMPTS]
    results = engine.tell("run", requests=requests)
    return [results[request["id"]] for request in requests]


def test_a_server_killed_under_traffic_changes_no_token_and_hits_after_a_restart(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=256)
    engine = start_engine(models["gqa"], depot.url).wait_started()
    cold = alone(engine)
    warm = [engine.run_fresh(tokens) for tokens in PROMPTS]
    assert [result["cached"] for result in warm] == [CHUNKS * 256] * len(PROMPTS)

    for number, tokens in enumerate(PROMPTS):  # killed between a lookup and its load, which fails or comes back
        engine.tell("reset")
        engine.tell("add", request=engine.request(tokens))
        kill(depot)
        depot = start_depot(url=depot.url, name=depot.name, arena_mib=256)
        (result,) = engine.tell("finish").values()
        # Recomputed or loaded: bit for bit what one of the two gave before.
        assert output(result) in (cold[number], output(warm[number])), number
    # Killed and started again at moments that the engine does not choose.
    over = threading.Event()
    kills = 0

    def trouble() -> Depot:
        nonlocal kills
        server = depot
        while not over.wait(0.4):
            kill(server)
            kills += 1
            server = start_depot(url=depot.url, name=depot.name, arena_mib=256)
        return server

    with ThreadPoolExecutor(1) as background:
        troubled = background.submit(trouble)
        try:
            deadline = time.monotonic() + 400
            while kills < 5:
                assert time.monotonic() < deadline, f"only {kills} kills"
                for number, tokens in enumerate(PROMPTS):
                    assert output(engine.run_fresh(tokens)) in (cold[number], output(warm[number])), number
        finally:
            over.set()
        depot = troubled.result()
    assert depot.status()["chunks"] >= CHUNKS * len(PROMPTS)

    # Everything stored before the kills is there, and gives what it gave.
    eventually(lambda: engine.run_fresh(PROMPTS[0])["cached"])
    again = [engine.run_fresh(tokens) for tokens in PROMPTS]
    assert [result["cached"] for result in again] == [CHUNKS * 256] * len(PROMPTS)
    assert [output(result) for result in again] == [output(result) for result in warm]
    eventually(lambda: nothing_is_held(depot.status()))

    # Without a server: the engine's own answers, and none waits.
    kill(depot)
    assert alone(engine) == cold
    assert [len(result["tokens"]) for result in together(engine)] == [8] * len(PROMPTS)
    engine.stop()
