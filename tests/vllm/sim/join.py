"""The connector's outside, simulated: its clock, socket, threads, and the memory that it shares with the server.

Real are both halves of the connector, the link that connects them, the clients, the lane, and the plans of all copies.
`joined` puts the simulation's parts in the place of what they would take from the machine, for as long as a run lasts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from kvdepot.client.socket import RETURN_S
from kvdepot.devices import open_blocks
from kvdepot.devices.blocks import ArenaBytes, CopyPiece
from kvdepot.devices.host import HostBlocks
from kvdepot.devices.self_test import CopySpeed
from kvdepot.errors import Unavailable
from kvdepot.integrations.vllm import in_step
from kvdepot.integrations.vllm.link import ServerLink
from kvdepot.protocol.layout import Layout
from tests.sim.copies import Blocks, SimLane, View
from tests.sim.host import Client
from tests.sim.world import Process

if TYPE_CHECKING:
    from tests.vllm.sim.engine import Engine
    from tests.vllm.sim.run import VllmRun

URL = "ipc:///simulated"


class EngineClient(Client):
    """A client of an engine that knows whether its server comes back."""

    def is_returning(self) -> bool:
        return 0 < self._connection.lost_s < RETURN_S and self.host.server is not None


class _Flag:
    """A threading.Event between processes of one engine."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        for process in self._client.processes:
            process.poke()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float) -> bool:
        return self._is_set or self._client.running().wait(self.is_set, timeout, timeout) or self._is_set


class _Thread:
    """A threading.Thread that is a process of the simulation."""

    def __init__(self, client: Client, run: Callable[[], None]) -> None:
        self._client, self._run = client, run
        self._process: Process | None = None

    @property
    def ident(self) -> str | None:
        return None if self._process is None else self._process.name

    def start(self) -> None:
        self._process = Process(self._client.host.world, f"{self._client.name}.link", self._run)
        self._client.processes.append(self._process)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.alive

    def join(self, timeout: float) -> None:
        self._client.running().wait(lambda: not self.is_alive(), timeout, 0.05)


class _Link(ServerLink):
    """The real link of the engine that is being made, on a process of the simulation."""

    def __init__(self, place: Any, half: Any) -> None:
        super().__init__(place, half)
        client: Any = self._client
        self._thread: Any = _Thread(client, self._run)
        self._settled: Any = _Flag(client)
        self._closing: Any = _Flag(client)

    def _open(self) -> Any:
        return _run().making.new_client()


class Memory:
    """A worker's KV of one group, as the simulation of copies (tests/sim/copies.py) knows it."""

    rank = 0

    def __init__(self, name: str, layout: Layout, data: npt.NDArray[np.uint8]) -> None:
        self.name, self.layout, self.bytes = name, layout, data
        self.dead = False  # its engine is


class EngineBlocks(Blocks):
    """An engine's paged KV. What a load writes must belong to a request of the engine."""

    def __init__(self, engine: Engine, memory: Memory, memories: dict[str, npt.NDArray[np.uint8]]) -> None:
        HostBlocks.__init__(self, memory.layout, memories)
        self.memory: Any = memory
        self._client = engine.clients[-1]  # the worker's
        self._host = engine.host
        self._engine = engine
        self.copying: bool | None = None
        self.moved = []

    def load_in_step(self, arena: ArenaBytes, pieces: Sequence[CopyPiece]) -> None:
        """A lane may store meanwhile."""
        assert isinstance(arena, View)
        self._host.world.counters["loaded_in_step"] += len(pieces)
        for piece in pieces:
            self._move_in_halves(arena, piece, False, False)

    def check(self, arena: View, piece: CopyPiece, is_store: bool) -> None:
        if is_store or self.memory.dead:
            return  # the server looks at what was stored, and a worker at what it reads
        free = [block for block in piece.block_ids[piece.skip :].tolist() if self._engine.is_free(block)]
        assert not free, f"{self.memory.name}: blocks {free} are written after they were given back"


def _open_blocks(layout: Layout, tensors: Iterable[Any]) -> EngineBlocks:
    real: Any = open_blocks(layout, tensors)
    engine = _run().making
    (data,), (mapping,) = real._memories, layout.mappings  # one storage for all layers
    group = len(engine.blocks)
    engine.host.groups[layout.fingerprint] = group
    blocks = EngineBlocks(engine, Memory(f"{engine.name}-kv{group}", layout, data), {mapping.name: data})
    engine.blocks.append(blocks)
    return blocks


class _StepView(View):
    """The arena as a scheduler has mapped it: its uses end with its engine."""

    def __init__(self, folder: Path, name: str, boot: bytes, access: int) -> None:
        run = _run()
        file = run.files.get(name)
        if file is None or file.boot != boot or run.world.chance(run.map_failures):
            raise Unavailable(f"arena {name} cannot be mapped")
        super().__init__(run, file, boot)
        self._engine = run.engine_of(lambda process: process.is_current())

    @contextlib.contextmanager
    def use(self, extents: Iterable[tuple[int, int]]) -> Iterator[npt.NDArray[np.uint8]]:
        before = {*self.file.uses}
        with super().use(extents) as data:
            self._engine.uses += [(self.file, key) for key in self.file.uses if key not in before]
            yield data

    def withdrawals(self) -> int:
        server = self.file.server
        return int(server.depot.withdrawals) if server is not None and server.boot == self.key[1] else -1


_current: list[VllmRun] = []


def _run() -> VllmRun:
    return _current[-1]


@contextlib.contextmanager
def joined(run: VllmRun) -> Iterator[None]:
    """The world of this run is that of all connectors that are made meanwhile."""
    from vllm.forward_context import override_forward_context

    world, ours = run.world, "kvdepot.integrations.vllm"
    state = random.getstate()
    random.seed(world.seed)
    _current.append(run)
    in_step._uses_by_request.clear()  # of engines that were killed in an earlier run
    # Steps may be under way in several engines: there is always a context, which none of them uses.
    with (
        mock.patch("time.monotonic", lambda: world.now),
        mock.patch("secrets.randbits", world.random.getrandbits),
        mock.patch("secrets.token_hex", lambda size: world.random.randbytes(size).hex()),
        mock.patch(f"{ours}.connector.ServerLink", _Link),
        mock.patch(f"{ours}.connector.open_blocks", _open_blocks),
        mock.patch(f"{ours}.connector.test_blocks", lambda blocks: CopySpeed(1e8, 1e8)),
        mock.patch(f"{ours}.link.is_taken", lambda url: run.server is not None),
        mock.patch(f"{ours}.in_step.ArenaView", _StepView),
        mock.patch(f"{ours}.in_step._STEP_BYTES", run.step_bytes),
        mock.patch("kvdepot.client.worker.Lane", SimLane),
        override_forward_context(mock.sentinel.context),
    ):
        try:
            yield
        finally:
            _current.pop()
            random.setstate(state)
