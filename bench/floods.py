"""Lookups while another client floods the server, which the rate limit per client bounds.

Rounds with and without the flood alternate on one server. Each makes one lookup after the other, with pauses.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import zmq
from common import Peer, Scale, Serve, say
from peers import FLOODS
from report import Figure, at_most

from kvdepot.client import MessageQueueClient
from kvdepot.keys import HASH_BYTES
from kvdepot.protocol import wire

__all__ = ["run"]

_HASHES = bytes(32 * HASH_BYTES)
_REST_S = 0.001
_DEADLINE_S = 60.0


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """The p99 of lookups during each kind of flood."""
    context: zmq.Context[Any] = zmq.Context()
    server = Serve(arena_gib=1 / 128, chunk_size=256)
    figures = []
    try:
        server.wait_populated(context)
        client = MessageQueueClient(server.url, context)
        _p99_ms(client, scale.flood_lookups)
        for kind in FLOODS:
            say(f"floods: lookups beside one that floods with {kind}")
            beside, alone = [], []
            for _ in range(scale.flood_rounds):
                alone.append(_p99_ms(client, scale.flood_lookups))
                flood = Peer("flood", server.url, kind)
                try:
                    flood.hear()
                    beside.append(_p99_ms(client, scale.flood_lookups))
                finally:
                    flood.close()
            figures.append(at_most(f"lookup p99, another client floods: {kind}", "ms", beside, alone, 3))
        client.close()
    finally:
        server.close()
        context.term()
    return figures


def _p99_ms(client: MessageQueueClient, lookups: int) -> float:
    times = []
    for _ in range(lookups):
        begun = time.perf_counter()
        client.ask(wire.Lookup("m", 1, 0, "r", 1, _HASHES)).result(_DEADLINE_S)
        times.append((time.perf_counter() - begun) * 1000)
        client.wait(lambda: False, _REST_S)
    return float(np.percentile(times, 99))
