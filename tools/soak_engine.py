"""One engine of the soak: the toy engine (toy_engine.py) that soak.py starts and kills.

    python soak_engine.py URL MODEL SEED

It writes a JSON line per second to stdout, and reads commands from stdin: `pause` (finish running requests, start no
new ones), `resume`, `quit`. If the soak is killed, stdin closes, which ends the engine too.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch
import zmq
from toy_engine import ToyEngine

from kvdepot.errors import KVDepotError

STEP_S = 1.5
"""A step that takes longer is a failure, because an engine must never wait for a server."""
COUNTED = {"steps": "steps", "requests": "done", "loaded_blocks": "checked_blocks", "failed_blocks": "failed_blocks"}
"""The toy engine's counters, and how they are reported."""


def connect(url: str, model: str, seed: int, context: zmq.Context[Any]) -> ToyEngine:
    """An engine, as soon as a server answers."""
    while True:
        try:
            engine = ToyEngine(url, model, blocks=192, width=256, seed=seed, context=context)
        except KVDepotError as exc:
            say(note=f"not connected: {exc}")
            time.sleep(0.1)
            continue
        for adapter in (engine.scheduler, engine.worker):
            say(liveness_file=adapter.mq_client.liveness.name)
        # As after days: what an adapter remembers of finished requests has reached its bound.
        engine.worker.get_finished({f"old-{number}" for number in range(70_000)})
        return engine


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    url, model, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    orders: list[str] = []

    def listen() -> None:
        for line in sys.stdin:
            orders.append(line.strip())
        orders.append("quit")

    threading.Thread(target=listen, name="soak-orders", daemon=True).start()
    context: zmq.Context[Any] = zmq.Context()
    counts, wrong = Counter[str](), list[str]()
    engine, paused, next_report = connect(url, model, seed, context), False, 0.0
    while not (orders and orders[0] == "quit"):
        if orders:
            paused = orders.pop(0) == "pause"
        begun = time.monotonic()
        if paused:
            engine.step(admit=False, preempt=0, abort=0)
        else:  # all engines draw from the same prompts, which change
            engine.step(families=16, chunks=8, first_family=8 * int(time.time() / 15))
        if (took := time.monotonic() - begun) > STEP_S:
            wrong.append(f"a step took {took:.1f} s")
        time.sleep(0.002)
        if time.monotonic() >= next_report or engine.wrong or wrong:
            next_report = time.monotonic() + 1.0
            if paused:  # an engine that asks nothing does not find a new server
                engine.reaches_server()
            counts.update({name: engine.counters.pop(counter, 0) for counter, name in COUNTED.items()})
            wrong += engine.wrong
            engine.wrong.clear()
            say(counts=counts, wrong=wrong[:4], idle=paused and not engine.requests)
            wrong.clear()
    engine.close()
    context.term()
    say(ended=True)


if __name__ == "__main__":
    main()
