"""The library for asyncio: the same calls, each in a thread, so that the event loop goes on meanwhile.

Invariant: no call ends before its thread, which until then reads or fills the caller's arrays. So a cancelled call
raises CancelledError once the server has answered it, and nothing stays placed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, overload

from kvdepot import library
from kvdepot.library.namespace import D_co, S_co
from kvdepot.protocol.status import Status

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvdepot.library.depot import Dtype, Shapes
    from kvdepot.library.shapes import Array, Kv, Layers, NumPyType, Tokens

P = ParamSpec("P")
T = TypeVar("T")


async def _run(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    task = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # else asyncio logs that nobody has read it
        raise


@contextlib.asynccontextmanager
async def connect(url: str = "", key: str = "") -> AsyncIterator[Depot]:
    """Connect to a depot until the block ends: `async with kvdepot.aio.connect() as depot`. As `kvdepot.connect`."""
    opened: list[library.Depot] = []
    try:
        await _run(lambda: opened.append(library.connect(url, key)))
        yield Depot(opened[0])
    finally:
        for depot in opened:
            await _run(depot.close)


class Depot:
    """A connected depot; `connect` makes it."""

    def __init__(self, depot: library.Depot) -> None:
        self.url = depot.url
        self._depot = depot

    def namespace(
        self, *, model: str, revision: str, dtype: Dtype, shape: Shapes, adapter: str = "", chunk_tokens: int = 0
    ) -> Namespace[Shapes, Dtype]:
        """As `kvdepot.Depot.namespace`. Does not block."""
        return Namespace(
            self._depot.namespace(
                model=model, revision=revision, dtype=dtype, shape=shape, adapter=adapter, chunk_tokens=chunk_tokens
            )
        )

    async def status(self) -> Status:
        return await _run(self._depot.status)


class Namespace(Generic[S_co, D_co]):
    """The KV of one model in a depot; `Depot.namespace` makes it. Tasks may use it side by side."""

    def __init__(self, namespace: library.Namespace[S_co, D_co]) -> None:
        self.chunk_tokens = namespace.chunk_tokens
        self._namespace = namespace

    @property
    def last(self) -> library.Reuse:
        """As `kvdepot.Namespace.last`; the call may be any task's."""
        return self._namespace.last

    async def put(self, tokens: Tokens, kv: Kv | Sequence[Kv]) -> int:
        """As `kvdepot.Namespace.put`. Leave `kv` unchanged until it has ended."""
        return await _run(self._namespace.put, tokens, kv)

    @overload
    async def get(self: Namespace[Layers, NumPyType], tokens: Tokens) -> tuple[np.ndarray | None, int]: ...
    @overload
    async def get(
        self: Namespace[Sequence[Layers], NumPyType], tokens: Tokens
    ) -> tuple[list[np.ndarray] | None, int]: ...
    @overload
    async def get(self: Namespace[Layers, torch.dtype], tokens: Tokens) -> tuple[torch.Tensor | None, int]: ...
    @overload
    async def get(
        self: Namespace[Sequence[Layers], torch.dtype], tokens: Tokens
    ) -> tuple[list[torch.Tensor] | None, int]: ...
    @overload
    async def get(self, tokens: Tokens) -> tuple[Array | list[Array] | None, int]: ...

    async def get(self, tokens: Tokens) -> tuple[Array | list[Array] | None, int]:
        return await _run(self._namespace.get, tokens)

    async def get_into(self, tokens: Tokens, kv: Kv | Sequence[Kv]) -> int:
        """As `kvdepot.Namespace.get_into`. Leave `kv` unused until it has ended."""
        return await _run(self._namespace.get_into, tokens, kv)

    async def contains(self, tokens: Tokens) -> int:
        return await _run(self._namespace.contains, tokens)

    async def delete(self, tokens: Tokens) -> int:
        return await _run(self._namespace.delete, tokens)

    async def lease(self, tokens: Tokens, retain_s: int, name: str = "") -> int:
        return await _run(self._namespace.lease, tokens, retain_s, name)

    async def release(self, tokens: Tokens, name: str = "") -> bool:
        return await _run(self._namespace.release, tokens, name)
