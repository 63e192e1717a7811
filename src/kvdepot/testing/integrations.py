"""The conformance suite for integrations: engines that keep their KV in a depot. It needs pytest.

    class TestMine(IntegrationConformance):
        def start_engine(self, url, weights):
            return MyEngine(url, weights)

`weights` is 1 or 2, for an engine with those weights: two engines of equal weights must share KV, others must not. Each
test has a server of its own. docs/integrations.md says what an integration has to do to pass.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from kvdepot.client import admin
from kvdepot.client.launch import Embedded
from kvdepot.protocol.status import Status

__all__ = ["Answered", "EngineUnderTest", "IntegrationConformance"]

_START_S = 60.0
_ANSWER_S = 120.0


class Answered(NamedTuple):
    """One prompt's outcome. computed: tokens of the prompt that the engine computed."""

    tokens: list[int]
    computed: int


class EngineUnderTest(Protocol):
    """An engine under test. It decodes greedily, and keeps no KV between two calls."""

    def answer(self, prompts: Sequence[Sequence[int]]) -> list[Answered]:
        """Run these prompts at once, eight tokens each. Raises nothing, whatever becomes of the depot. Blocks."""

    def close(self) -> None:
        """End the engine, once its stores have been answered."""


class _Server(Embedded):
    arenas = "kvdepot-{user}-suite-"

    def status(self) -> Status:
        """Wait until it answers; its status."""
        with admin.connect(self.url, timeout_s=_START_S) as client:
            return admin.status(client)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; waits for its end, except after one that it survives."""
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait(_START_S)


class IntegrationConformance:
    """The tests of an engine beside a depot. Subclass it in a test module."""

    prompt_tokens = 400
    """Tokens of a test's prompts: several chunks."""
    vocabulary = 256
    """Token ids are below this."""

    @abstractmethod
    def start_engine(self, url: str, weights: int) -> EngineUnderTest:
        """An engine that is connected to the depot at `url`, if that answers."""

    @pytest.fixture
    def server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
        """A running server."""
        monkeypatch.setenv("KVDEPOT_ARENA_GIB", "0.0625")
        with contextlib.closing(_Server(f"ipc://{tmp_path / 'depot.sock'}", os.urandom(8).hex())) as server:
            server.status()
            yield server

    @contextlib.contextmanager
    def engine(self, server: _Server, weights: int = 1) -> Iterator[EngineUnderTest]:
        """An engine, closed at the end."""
        engine = self.start_engine(server.url, weights)
        try:
            yield engine
        finally:
            engine.close()

    def prompts(self, count: int = 3) -> list[list[int]]:
        """Prompts that share their first half."""
        half, own = self.prompt_tokens // 2, self.prompt_tokens - self.prompt_tokens // 2
        shared = [(7 * i + 3) % self.vocabulary for i in range(half)]
        return [[*shared, *((11 * i + 13 * n + 1) % self.vocabulary for i in range(own))] for n in range(count)]

    def cold(self, server: _Server) -> list[Answered]:
        """The prompts' outcomes from an engine that finds nothing, and stores them."""
        with self.engine(server) as engine:
            answered = engine.answer(self.prompts())
        assert len(answered[0].tokens) == 8 and answered[0].computed == self.prompt_tokens
        return answered

    def test_another_engine_computes_less_and_answers_the_same(self, server: _Server) -> None:
        cold = self.cold(server)
        with self.engine(server) as engine:
            warm = engine.answer(self.prompts())
        assert [each.tokens for each in warm] == [each.tokens for each in cold]
        assert all(each.computed < self.prompt_tokens // 2 for each in warm), warm

    def test_other_weights_find_nothing(self, server: _Server) -> None:
        self.cold(server)
        with self.engine(server, weights=2) as engine:
            assert engine.answer(self.prompts(1))[0].computed == self.prompt_tokens

    def test_a_longer_prompt_computes_only_its_end(self, server: _Server) -> None:
        cold = self.cold(server)
        longer = [*self.prompts(1)[0], *cold[0].tokens, *range(20)]
        with self.engine(server) as engine:
            assert engine.answer([longer])[0].computed < len(longer) // 2

    def test_an_engine_without_a_server_answers_the_same(self, server: _Server) -> None:
        cold = self.cold(server)
        server.send(signal.SIGKILL)
        with self.engine(server) as engine:
            assert engine.answer(self.prompts())[0].tokens == cold[0].tokens

    def test_a_server_that_restarts_is_used_again(self, server: _Server) -> None:
        cold = self.cold(server)
        with self.engine(server) as engine:
            server.send(signal.SIGKILL)
            assert [each.tokens for each in engine.answer(self.prompts())] == [each.tokens for each in cold]
            server.start()
            server.status()
            deadline = time.monotonic() + _ANSWER_S
            while (warm := engine.answer(self.prompts(1))[0]).computed == self.prompt_tokens:
                assert time.monotonic() < deadline, "the engine does not find what the server before had"
        assert warm.tokens == cold[0].tokens

    def test_a_server_that_hangs_delays_but_fails_nothing(self, server: _Server) -> None:
        cold = self.cold(server)
        with self.engine(server) as engine:
            server.send(signal.SIGSTOP)
            resume = threading.Timer(3.0, server.send, [signal.SIGCONT])
            resume.start()
            try:
                assert engine.answer(self.prompts(1))[0].tokens == cold[0].tokens
            finally:
                resume.join()

    def test_nothing_is_held_after_the_engine_is_closed(self, server: _Server) -> None:
        self.cold(server)
        with self.engine(server) as engine:
            engine.answer(self.prompts())
        deadline = time.monotonic() + _ANSWER_S
        while (status := server.status()).holds or status.operations or status.reserved_shards:
            assert time.monotonic() < deadline, f"still held: {status.holds} holds, {status.operations} operations"
