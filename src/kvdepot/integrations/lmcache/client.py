"""The contract's client for an adapter that does not expect errors: every failure becomes an answer.

vLLM's adapter takes `result()` of whatever has ended, in the engine's loop. An error there would end the engine, so a
lookup that failed is a miss, a store that failed was dropped, and a retrieve that failed has filled nothing; the
connector asks here for the blocks that vLLM must recompute. Used by one thread of the engine, as the adapter is.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from kvdepot.client.contract import Convert, IPCCacheEngineKey, MessageQueueClient, RequestType
from kvdepot.client.socket import CONNECT_S, MessagingFuture
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire

if TYPE_CHECKING:
    from kvdepot.client.operations import BlockIds
    from kvdepot.devices.blocks import DeviceEvent

log = logging.getLogger(__name__)

_SHUTDOWN_S = 5.0
_UNGUARDED = RequestType.REGISTER_KV_CACHE, RequestType.NOOP, RequestType.CLEAR
_PORT_OF_SOCKET = re.compile(r"(ipc://.*):\d*")


class GuardedFuture(MessagingFuture[Any]):
    """An answer that is never an error. `settle` makes it, once, from the server's answer or error."""

    __slots__ = ("_asked", "_kind", "_settle")

    def __init__(self, kind: RequestType, asked: MessagingFuture[Any], settle: Callable[[object], object]) -> None:
        super().__init__(None)
        self._kind = kind
        self._asked = asked
        self._settle = settle

    def query(self) -> bool:
        return self._done or self._asked.query()

    def result(self, timeout: float | None = None) -> Any:
        """The answer; blocks for `timeout` seconds at most (None: 5 s)."""
        if not self._done:
            try:
                answer: object = self._asked.result(_SHUTDOWN_S if timeout is None else timeout)
            except KVDepotError as exc:
                if self._kind is RequestType.RETRIEVE:
                    log.warning("retrieve failed: %s", exc)
                else:
                    log.info("%s failed: %s", self._kind.value, exc)
                answer = exc
            self._value, self._done = self._settle(answer), True
        return self._value


class GuardedClient(MessageQueueClient):
    """A connection to one server. Only registering, and asking for the chunk size, can fail."""

    def __init__(self, server_url: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """server_url: vLLM appends a port to every host; the port of a unix socket is left out."""
        super().__init__(_PORT_OF_SOCKET.sub(r"\1", server_url), context)
        self.skip_blocks: list[int] = []
        """The number of leading blocks of a key's first chunk that the next retrieve must not write."""
        self._failed_blocks: set[int] = set()
        self._stores: list[MessagingFuture[Any]] = []

    def submit_request(
        self, request_type: RequestType, payloads: list[Any], response_cls: type[object] | None = None
    ) -> MessagingFuture[Any]:
        """Send a request of the contract. Raises Unavailable if no server tells its chunk size within 5 s."""
        if request_type is RequestType.GET_CHUNK_SIZE:
            return MessagingFuture.resolved(self.learn_chunk_size(CONNECT_S))
        if request_type in _UNGUARDED:
            return super().submit_request(request_type, payloads, response_cls)
        skip = self.skip_blocks
        try:
            future = super().submit_request(request_type, payloads, response_cls)
        except KVDepotError as exc:
            future = MessagingFuture.resolved(exc)
        match request_type:
            case RequestType.LOOKUP:
                return GuardedFuture(request_type, future, partial(_hit, payloads))
            case RequestType.RETRIEVE:
                self.skip_blocks = []
                return GuardedFuture(request_type, future, partial(self._filled, payloads[0], payloads[2], skip))
            case RequestType.STORE:
                return GuardedFuture(request_type, future, lambda answer: answer is True)
        return GuardedFuture(request_type, future, lambda answer: None)

    def copy_blocks(
        self, request: wire.Copying, block_ids: list[BlockIds], event: DeviceEvent | None, convert: Convert
    ) -> MessagingFuture[Any]:
        """Remember stores, so that they can be voided, and leave out the blocks that a retrieve must not write."""
        if isinstance(request, wire.Retrieve) and self.skip_blocks:
            block_ids = [ids._replace(skip=skip) for ids, skip in zip(block_ids, self.skip_blocks, strict=True)]
        future = super().copy_blocks(request, block_ids, event, convert)
        if isinstance(request, wire.Store):
            self._stores.append(future)
        return future

    def end_stores(self, timeout_s: float) -> None:
        """Make sure that no store reads blocks any more: the engine is about to write to them.

        Waits up to `timeout_s`; stores that are still under way then are voided (see `Lane.give_up`).
        """
        if self._stores and self.lane.give_up(self._stores, timeout_s):
            log.warning("stores were dropped: they were not copied within %g s", timeout_s)
        self._stores.clear()

    def take_failed_blocks(self) -> set[int]:
        """Ids of blocks that a retrieve failed to fill since the last call; the engine must recompute them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _filled(
        self, keys: Sequence[IPCCacheEngineKey], block_ids: Sequence[int], skip: Sequence[int], answer: object
    ) -> list[bool]:
        """Whether each key's blocks were filled; notes the blocks that were not."""
        filled = answer if isinstance(answer, list) else [False] * len(keys)
        sizes = [_size(key) for key in keys]
        ends = [len(block_ids) * done // sum(sizes) for done in itertools.accumulate(sizes)]
        for first, end, left_out, is_filled in zip([0, *ends], ends, skip or [0] * len(keys), filled, strict=False):
            if not is_filled:
                self._failed_blocks.update(block_ids[first + left_out : end])
        return filled


def _hit(payloads: list[Any], answer: object) -> int | list[bool]:
    """Chunks in the longest cached prefix; vLLM 0.15 and 0.16, which also say whether to pin, want one bool per key."""
    chunks = answer if isinstance(answer, int) else 0
    return chunks if len(payloads) == 1 else [position < chunks for position in range(len(payloads[0]))]


def _size(key: IPCCacheEngineKey) -> int:
    """The number of tokens that a key names; 1 for an engine's own hash, which names one chunk like all others."""
    return 1 if key.token_ids is None else (key.end or len(key.token_ids)) - key.start
