"""One run: a seed decides the server, its tiers, the engines, what their callers ask, and what goes wrong.

`simulate(seed)` returns the world when every invariant held, and raises `tests.sim.run.Broken` when one did not. The
server, its checks and the faults are those of tests/sim. `parts` are what all runs of a process have in common.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvdepot.integrations.vllm import in_step
from kvdepot.keys import ChunkChain
from tests.sim.run import FAULTS, Run
from tests.sim.world import Process, World
from tests.vllm import by_hand, drafters, engines
from tests.vllm.by_hand import CHUNK, LAYERS, STATE, Text
from tests.vllm.sim.engine import Engine, Kind, new_tokens
from tests.vllm.sim.join import joined

STEPS = 250
EXPECTED = frozenset(
    """
    aborted_running aborted_waiting answered begun_behind_tokens chunk_flipped cleared compared connection_cut
    copy_failed engine_killed engine_killed_while_loading engine_shut_down engine_stopped forgotten groups_hit
    loaded_in_step loads lookup_awaited_room preempted reset server_killed server_shut_down server_stopped
    shards_recovered shards_retrieve_failed shards_retrieved shards_store_failed shards_stored storms tier_hit_chunks
    weights_updated
    """.split()  # noqa: SIM905 - a list of thirty strings is no easier to read
)
"""What must have happened somewhere in a thousand seeds, or they prove less than they seem to."""
_folder: list[Path] = []


class VllmRun(Run):
    """A host, its vLLM engines, and their misfortunes."""

    chunk_tokens = CHUNK

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__(seed, steps)
        draw = self.world.random
        self.folder = _folder[-1]
        self.making: Engine
        """The engine that is being made: vLLM has one configuration at a time in a process."""
        self.is_making = False
        self.token_s = self.world.spread(0.000002, 0.0003)  # that computing takes
        self.step_bytes = draw.choice([0, 5000, in_step._STEP_BYTES])  # of loads within steps
        self.groups: dict[bytes, int] = {}  # KV cache group by layout fingerprint
        self._parts: dict[bytes, _Part] = {}  # by key
        kind = Kind.draw(draw)
        self._kinds = [kind]
        if self.world.chance(0.7):  # another with the same KV, but of other sizes, or one that shares nothing
            self._kinds.append(Kind.draw(draw) if self.world.chance(0.3) else self._like(kind))
        self._chats = [new_tokens(draw, draw.choice([20, CHUNK, 100, 2 * CHUNK, 200])) for _ in range(6)]

    def _like(self, kind: Kind) -> Kind:
        other = Kind.draw(self.world.random)
        return Kind(**{**vars(other), "window": kind.window, "states": kind.states})

    def faults(self) -> list[Callable[..., None]]:
        return [fault for fault in FAULTS if fault not in (Run.idle_for_hours, Run.pin)]

    # -- engines

    def _start_engines(self) -> None:
        for number, kind in enumerate(self._kinds):
            self._start_engine(kind, f"writer{number}")  # type: ignore[arg-type]

    def _start_engine(self, model: Any, mode: str) -> None:
        self._lives += 1
        engine = Engine(self, f"e{self._lives}", model, mode)
        self.world.note(f"{engine!r} starts")
        self.engines.append(engine)  # type: ignore[arg-type]

    def begin_making(self, engine: Engine) -> None:
        self.making, self.is_making = engine, True

    def end_making(self) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.is_making = False
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def engine_of(self, has: Callable[[Process], bool]) -> Engine:
        return next(each for each in self.engines if any(map(has, each.processes)))  # type: ignore[return-value]

    # -- what callers ask

    def draw_chat(self) -> int:
        return self.world.random.randrange(len(self._chats))

    def draw_prompt(self, chat: int, most: int) -> list[int]:
        """The chat so far, cut somewhere or not, and something new or not."""
        draw, tokens = self.world.random, self._chats[chat]
        if self.world.chance(0.3):
            cut = draw.randrange(len(tokens)) + 1
            tokens = tokens[: draw.choice([cut, max(1, cut // CHUNK * CHUNK), cut // CHUNK * CHUNK + 1])]
        if self.world.chance(0.7):
            tokens = tokens + new_tokens(draw, draw.choice([1, 5, 30, CHUNK, 3 * CHUNK]))
        return tokens[:most]

    def answered(self, chat: int, known: list[int]) -> None:
        if self.world.chance(0.6):
            self._chats[chat] = known if len(known) < 350 else known[:CHUNK]

    # -- what is true

    def name_chunks(self, text: Text, root: bytes, weights: bytes, has_tails: bool) -> None:
        """Somebody with these weights may store these tokens. root: what the chunks' names begin with."""
        chain = ChunkChain(CHUNK, root)
        chain.extend(text.tokens)
        for chunk in range(len(chain)):
            part = _Part(text, chunk * CHUNK, (chunk + 1) * CHUNK, weights)
            self._parts.setdefault(chain.slice(chunk, chunk + 1), part)
        for end in range(1, len(text.tokens)) if has_tails else ():
            if end % CHUNK:
                part = _Part(text, end // CHUNK * CHUNK, end, weights)
                self._parts.setdefault(chain.tail(text.tokens, end), part)

    def image(self, layout: bytes, key: bytes, rank: int) -> bytes | None:
        part = self._parts.get(key)
        return None if part is None else part.image(self.groups[layout])


class _Part(NamedTuple):
    """What a chunk has: tokens [first, end) of a text, as these weights compute them."""

    text: Text
    first: int
    end: int
    weights: bytes

    def image(self, group: int) -> bytes:
        """Its bytes as by_hand.Worker has them in memory; empty of a part of a block, behind which anything may be."""
        if group:
            return self._numbers(STATE, self.end - 1)
        return b"" if self.end % CHUNK else b"".join(self._numbers(layer, self.first) for layer in LAYERS)

    def _numbers(self, layer: str, first: int) -> bytes:
        salt, states = layer.encode() + self.weights, self.text.states[first : self.end]
        return np.array([zlib.crc32(salt, state) & 0x3FFF for state in states], np.int16).repeat(8).tobytes()


@contextlib.contextmanager
def parts() -> Iterator[None]:
    """A model's files, and vLLM's process groups, for the runs of this process."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        patch.setenv("PYTHONHASHSEED", "0")  # of vLLM's hashes of blocks
        patch.setattr("vllm.config.vllm.HAS_TRITON", True)  # of which nothing here runs
        _folder.append(engines.write_model(Path(folder) / "target", drafters.TARGET))
        with by_hand.process_groups(Path(folder) / "groups"):
            yield
        _folder.pop()


def simulate(seed: int, steps: int = STEPS) -> World:
    """Run one seed, within `parts`. Raises Broken at the first invariant that does not hold."""
    logs = [logging.getLogger(name) for name in ("kvdepot", "vllm")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)  # failures are the point here
    try:
        run = VllmRun(seed, steps)
        with joined(run):
            return run.run()
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
