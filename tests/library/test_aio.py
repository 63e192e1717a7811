"""The library for asyncio: calls run side by side, and a cancelled one is over when it says so."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import kvdepot
import kvdepot.aio
from kvdepot.errors import BadRequest, Unavailable
from kvdepot.library import aio, namespace
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.library.conftest import Connect, at_rest
from tests.library.kv import SMALL, TOKENS, cut, random_kv, random_tokens


def open_namespace(depot: aio.Depot, revision: str) -> aio.Namespace:
    return depot.namespace(model="toy", revision=revision, dtype="bfloat16", shape=SMALL, chunk_tokens=TOKENS)


async def cancel(call: Coroutine[Any, Any, Any], reached: threading.Event, goes_on: threading.Event) -> None:
    """Cancel a call that has reached a place and waits there."""
    task = asyncio.ensure_future(call)
    assert await asyncio.to_thread(reached.wait, HANG_S)
    task.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_every_call_does_what_it_does_without_asyncio(server: Depot) -> None:
    tokens, kv = random_tokens(3 * TOKENS), random_kv(SMALL, 3 * TOKENS)

    async def work() -> None:
        async with kvdepot.aio.connect(server.url) as depot:
            ns = open_namespace(depot, "every call")
            assert ns.chunk_tokens == TOKENS
            assert await ns.get(tokens) == (None, 0)
            assert await ns.put(tokens, kv) == await ns.contains(tokens) == await ns.lease(tokens, 60) == 3 * TOKENS
            found, n = await ns.get(tokens)
            assert n == 3 * TOKENS and np.array_equal(found.view("u2"), kv)
            target = random_kv(SMALL, 4 * TOKENS, 1)
            assert await ns.get_into(tokens, target) == n == ns.last.loaded
            assert np.array_equal(cut(target, SMALL, 0, n), kv)
            assert (await depot.status()).pid == server.process.pid
            assert await ns.release(tokens)
            await ns.delete(tokens)
            with pytest.raises(BadRequest):
                await ns.put(tokens, kv[:1])
        with pytest.raises(BadRequest, match="closed"):
            await ns.get(tokens)

    asyncio.run(work())


def test_tasks_share_a_connection(server: Depot) -> None:
    async def work() -> None:
        async with kvdepot.aio.connect(server.url) as depot:
            ns = open_namespace(depot, "tasks")

            async def use(seed: int) -> int:
                tokens, kv = random_tokens(2 * TOKENS, seed), random_kv(SMALL, 2 * TOKENS, seed)
                assert await ns.put(tokens, kv) == 2 * TOKENS
                found, n = await ns.get(tokens)
                assert np.array_equal(found.view("u2"), kv)
                return n

            assert await asyncio.gather(*map(use, range(40))) == [2 * TOKENS] * 40

    asyncio.run(work())


def test_no_server_is_unavailable() -> None:
    async def work() -> None:
        async with kvdepot.aio.connect("nonsense"):
            pytest.fail("there is no server")

    with pytest.raises(Unavailable):
        asyncio.run(work())


@pytest.mark.parametrize("do", ["put", "get_into"])
def test_a_cancelled_call_ends_with_its_copy_and_leaves_nothing_placed(
    start_depot: StartDepot, connect: Connect, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    server = start_depot("--verify", "always", chunk_size=TOKENS)
    tokens, kv = random_tokens(2 * TOKENS), random_kv(SMALL, 2 * TOKENS)
    copying, goes_on = threading.Event(), threading.Event()
    copyto = np.copyto

    def slow(to: Any, source: Any) -> None:
        copying.set()
        assert goes_on.wait(HANG_S)
        copyto(to, source)

    async def work() -> None:
        async with kvdepot.aio.connect(server.url) as depot:
            ns = open_namespace(depot, f"cancelled {do}")
            if do == "get_into":
                assert await ns.put(tokens, kv) == 2 * TOKENS
            with monkeypatch.context() as patch:
                patch.setattr(namespace.np, "copyto", slow)
                target = kv.copy() if do == "put" else random_kv(SMALL, 2 * TOKENS, 1)
                call = asyncio.ensure_future(getattr(ns, do)(tokens, target))
                assert await asyncio.to_thread(copying.wait, HANG_S)
                for _ in range(3):
                    call.cancel()
                    await asyncio.sleep(0)
                assert not call.done(), "its thread still uses the arrays"
                goes_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await call
            before = target.copy()
            target[:] = 7  # it is the caller's again
            assert np.array_equal(before, kv)
            found, n = await ns.get(tokens)
            assert n == 2 * TOKENS and np.array_equal(found.view("u2"), kv)

    asyncio.run(work())
    at_rest(connect(server))


def test_a_cancelled_connect_leaves_no_client(server: Depot, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = connect(server)
    connecting, goes_on, connected = threading.Event(), threading.Event(), kvdepot.connect

    def slow(*args: str) -> kvdepot.Depot:
        connecting.set()
        assert goes_on.wait(HANG_S)
        return connected(*args)

    monkeypatch.setattr(aio.library, "connect", slow)
    opened: list[Callable[[], object]] = []

    async def use() -> None:
        async with kvdepot.aio.connect(server.url) as depot:
            opened.append(depot.status)

    asyncio.run(cancel(use(), connecting, goes_on))
    gc.collect()
    assert not opened
    eventually(lambda: watch.status().clients == 1)


def test_an_error_of_a_cancelled_call_is_not_logged_as_lost(
    server: Depot, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def fail(*_: Any) -> int:
        asked.set()
        assert goes_on.wait(HANG_S)
        raise BadRequest("late")

    async def work() -> None:
        async with kvdepot.aio.connect(server.url) as depot:
            ns = open_namespace(depot, "late")
            monkeypatch.setattr(ns._namespace, "contains", fail)
            await cancel(ns.contains([1]), asked, goes_on)

    asyncio.run(work())
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
