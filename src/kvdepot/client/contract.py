"""The requests of the contract, and how each becomes a message.

Used by client/lmcache.py, which exports every public name here. The contract is that of the clients in vLLM 0.15 to
0.17's LMCache multi-process integration. Invariant: no token id leaves the process; messages carry 32 bytes a chunk.
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import zmq

from kvdepot.client.calls import read_hit
from kvdepot.client.socket import CONNECT_S, Client, MessagingFuture, check_type
from kvdepot.client.transfer import pack_block_ids
from kvdepot.errors import BadRequest, DeviceError, LayoutError
from kvdepot.protocol import wire
from kvdepot.protocol.curve import Key
from kvdepot.protocol.keys import HASH_BYTES, ROOT, ChunkChain, engine_hash
from kvdepot.protocol.layout import Layout, TensorView, build_layout, find_block_axes

if TYPE_CHECKING:
    import torch

    from kvdepot.client.lane import Lane
    from kvdepot.client.operations import BlockIds
    from kvdepot.devices.blocks import BlockMemory, DeviceEvent

__all__ = [
    "IPCCacheEngineKey",
    "KVCacheHandle",
    "LoadStoreOp",
    "MessageQueueClient",
    "RequestType",
    "get_response_class",
    "striding_block_hashes",
    "wrap_kv_caches",
]

log = logging.getLogger(__name__)

_MAX_CHAINS = 1024
_GIVE_UP_S = 1.0
"""Copies under way may take this long to end, once their tensors are unregistered, before they are voided."""


class RequestType(enum.Enum):
    """The requests of the contract, with their payloads and answers."""

    REGISTER_KV_CACHE = "register_kv_cache"
    """`[instance_id: int, handles: list[KVCacheHandle]]` -> None"""
    UNREGISTER_KV_CACHE = "unregister_kv_cache"
    """`[instance_id]` -> None"""
    LOOKUP = "lookup"
    """`[keys]`, one token key or one hash key a chunk -> int: chunks in the longest cached prefix"""
    STORE = "store"
    """`[keys, instance_id, block_ids: list[int], event_handle: bytes]` -> bool

    event_handle: if it is not empty, the copy waits for the work that was queued before this call."""
    RETRIEVE = "retrieve"
    """the payloads of STORE -> list[bool], one per key"""
    END_SESSION = "end_session"
    """`[request_id]` -> None"""
    GET_CHUNK_SIZE = "get_chunk_size"
    """`[]` -> int: tokens"""
    NOOP = "noop"
    """`[]` -> str"""
    CLEAR = "clear"
    """`[]` -> None"""


def get_response_class(request_type: RequestType) -> type[object]:
    """The type of a request's answer. Raises BadRequest for anything but a request type."""
    match request_type:
        case RequestType.LOOKUP | RequestType.GET_CHUNK_SIZE:
            return int
        case RequestType.STORE:
            return bool
        case RequestType.RETRIEVE:
            return list
        case RequestType.NOOP:
            return str
        case RequestType():
            return type(None)
    raise BadRequest(f"{request_type!r} is not a request type")


@dataclass(frozen=True)
class IPCCacheEngineKey:
    """Names chunks: those of tokens `[start, end)` of a prompt, or one chunk by the engine's own hash.

    token_ids: from the prompt's start. worker_id: the KV rank; None on lookups. request_id: for sessions; it takes no
    part in equality. Raises BadRequest unless exactly one of token_ids and chunk_hash is given.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: tuple[int, ...] | None = None
    start: int = 0
    end: int = 0
    chunk_hash: bytes | None = None
    request_id: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.token_ids is None) == (self.chunk_hash is None):
            raise BadRequest("a key needs exactly one of token_ids and chunk_hash")

    def no_worker_id_version(self) -> IPCCacheEngineKey:
        """The same key without a rank, for a lookup."""
        return replace(self, worker_id=None)


class KVCacheHandle:
    """Refers to one layer's paged KV tensor within this process, whose client copies it; nothing is moved or shared.

    Raises LayoutError for tensors that cannot be copied; the message says why.
    """

    __slots__ = ("tensor", "view")

    def __init__(self, tensor: torch.Tensor, name: str = "") -> None:
        from kvdepot.devices import describe

        self.view: TensorView = describe(tensor, name)
        self.tensor = tensor

    def __reduce__(self) -> str:
        raise BadRequest(f"the handle of {self.view.name or 'a tensor'} cannot leave its process, which copies the KV")


def wrap_kv_caches(kv_caches: dict[str, torch.Tensor]) -> list[KVCacheHandle]:
    """One handle per layer, in dict order. Raises LayoutError unless given a dict of names and tensors."""
    if not isinstance(kv_caches, dict):
        kind = f"{type(kv_caches).__module__}.{type(kv_caches).__qualname__}"
        raise LayoutError(f"KV tensors are registered as a dict of layer names and tensors, not as {kind}")
    return [KVCacheHandle(tensor, name) for name, tensor in kv_caches.items()]


def open_tested(layout: Layout, tensors: Iterable[torch.Tensor]) -> tuple[list[BlockMemory], str]:
    """Open the memory of these tensors' blocks, and copy random bytes both ways. Returns the memory and no fault; or
    none, and what is wrong with the device, which is logged. Blocks some milliseconds. Raises LayoutError."""
    from kvdepot.devices import open_blocks
    from kvdepot.devices.self_test import test_blocks

    blocks: list[BlockMemory] = []
    try:
        blocks.append(open_blocks(layout, tensors))
        test_blocks(blocks)
    except DeviceError as exc:
        log.warning("this engine runs without a cache: %s", exc)
        for each in blocks:
            each.close()
        return [], str(exc)
    return blocks, ""


def striding_block_hashes(block_hashes: list[bytes], blocks_in_chunk: int) -> Iterable[bytes]:
    """The hash of the last block of each full chunk; a tail shorter than a chunk yields nothing."""
    if blocks_in_chunk < 1:
        raise BadRequest(f"blocks_in_chunk is {blocks_in_chunk}")
    return block_hashes[blocks_in_chunk - 1 :: blocks_in_chunk]


@dataclass
class LoadStoreOp:
    """Blocks to copy, and what names their chunks: tokens `[start, end)` of a prompt, or the blocks' hashes.

    token_ids: from the prompt's start. Raises BadRequest unless exactly one of the two is given.
    """

    block_ids: list[int]
    token_ids: list[int] | None = None
    block_hashes: list[bytes] | None = None
    start: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        if (self.token_ids is None) == (self.block_hashes is None):
            raise BadRequest("an operation needs exactly one of token_ids and block_hashes")

    def __len__(self) -> int:
        return len(self.block_ids)


class PromptChains:
    """The chunk chains of requests under way, so that each token is hashed once per request. Any thread may use it: a
    thread removes a chain while it extends and reads it, and another one finds none meanwhile and hashes from the
    start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains: OrderedDict[str | None, ChunkChain] = OrderedDict()

    def name(
        self, request_id: str | None, token_ids: Sequence[int], chunk_size: int, start: int = 0, end: int = 0
    ) -> tuple[bytes, int, bytes]:
        """Parent, depth and hashes of the chunks of tokens `[start, end)` of a prompt, without a tail shorter than a
        chunk. end: 0 means the prompt's end. Only tokens new to the request are hashed. Raises BadRequest for a start
        within a chunk, a range beyond the prompt, and anything that is not a token id."""
        tokens = len(token_ids)
        end = end or tokens
        if start % chunk_size or not 0 <= start <= end <= tokens:
            raise BadRequest(
                f"tokens [{start}, {end}) of {tokens}: the start must be a multiple of the chunk size {chunk_size}"
            )
        first = start // chunk_size
        with self._lock:
            chain = self._chains.pop(request_id, None)
        if chain is None or chain.chunk_size != chunk_size:
            chain = ChunkChain(chunk_size, ROOT)
        chain.extend(token_ids)
        named = chain.parent(first), first, chain.slice(first, end // chunk_size)
        with self._lock:
            self._chains[request_id] = chain
            if len(self._chains) > _MAX_CHAINS:
                self._chains.popitem(last=False)
        return named

    def drop(self, request_id: str | None) -> None:
        """Forget a request's chain; unknown ids are fine."""
        with self._lock:
            self._chains.pop(request_id, None)


Naming: TypeAlias = tuple[bytes, int, bytes]
"""Parent, depth and hashes of the chunks that a key names."""
Convert: TypeAlias = Callable[[object], object]


class MessageQueueClient(Client):
    """A connection to one server that takes the contract's requests. Any thread may use it, several at once."""

    def __init__(self, server_url: str, context: zmq.Context[zmq.Socket[bytes]], *, key: str | Key = "") -> None:
        super().__init__(server_url, context, key=key, engine=f"{os.uname().nodename}:{os.getpid()}")
        self.chains = PromptChains()
        self._lane: Lane | None = None
        self._opened: dict[int, BlockMemory] = {}  # by instance
        self._making = threading.Lock()

    @property
    def lane(self) -> Lane:
        """Copies the blocks of tensors that were registered by requests of the contract."""
        from kvdepot.client.lane import Lane

        with self._making:
            if self._lane is None:
                self._lane = Lane(self)
            return self._lane

    def submit_request(
        self, request_type: RequestType, payloads: list[Any], response_cls: type[object] | None = None
    ) -> MessagingFuture[Any]:
        """Send a request of the contract, with the payloads listed at RequestType.

        Blocks, 5 s at most, only while the chunk size is not known; to register, for the milliseconds of a test of the
        copies; to unregister, until copies have ended, 1 s at most. Raises BadRequest for wrong payloads, LayoutError
        for tensors that cannot be described, Unavailable where no server tells its chunk size.
        """
        expected = get_response_class(request_type) if response_cls is None else response_cls
        check = partial(check_type, expected=expected)
        if request_type in (RequestType.LOOKUP, RequestType.STORE, RequestType.RETRIEVE) and not self.chunk_size:
            self.learn_chunk_size(CONNECT_S)
        try:
            match request_type:
                case RequestType.REGISTER_KV_CACHE:
                    return self._register(check, *payloads)
                case RequestType.UNREGISTER_KV_CACHE:
                    self._leave(payloads[0], _GIVE_UP_S)
                    return self.ask(wire.Unregister(payloads[0]), check)
                case RequestType.LOOKUP:
                    return self._look_up(payloads[0], check)
                case RequestType.STORE | RequestType.RETRIEVE:
                    return self._transfer(check, request_type, *payloads)
                case RequestType.END_SESSION:
                    self.chains.drop(payloads[0])
                    return self.ask(wire.EndSession(payloads[0]), check)
                case RequestType.GET_CHUNK_SIZE:
                    return self.ask(wire.ChunkSize(), check)
                case RequestType.NOOP:
                    return self.ask(wire.Noop(), check)
                case RequestType.CLEAR:
                    return self.ask(wire.Clear(), check)
        except (ValueError, IndexError, TypeError, AttributeError) as exc:
            raise BadRequest(f"payloads of {request_type.name}: {exc}") from exc
        raise BadRequest(f"{request_type!r} is not a request type")

    def _register(self, check: Convert, instance: int, handles: list[KVCacheHandle]) -> MessagingFuture[Any]:
        views = [handle.view for handle in handles]
        layout = build_layout(views, find_block_axes(views))
        blocks, fault = open_tested(layout, [handle.tensor for handle in handles])
        self._leave(instance, 0.0)
        for each in blocks:
            self.lane.add(instance, each)
            self._opened[instance] = each
        return self.ask(wire.Register(instance, layout.format, fault=fault), check)

    def _leave(self, instance: int, timeout_s: float) -> None:
        self.lane.remove(instance, timeout_s)
        if instance in self._opened:
            self._opened.pop(instance).close()

    def _name(self, key: IPCCacheEngineKey) -> Naming:
        if key.chunk_hash is not None:
            return b"", 0, engine_hash(key.chunk_hash)
        assert key.token_ids is not None
        return self.chains.name(key.request_id, key.token_ids, self.chunk_size, key.start, key.end)

    def _look_up(self, keys: IPCCacheEngineKey | list[IPCCacheEngineKey], check: Convert) -> MessagingFuture[Any]:
        keys = [keys] if isinstance(keys, IPCCacheEngineKey) else list(keys)
        hashes = b"".join(self._name(key)[2] for key in keys)
        if not hashes:
            return MessagingFuture.resolved(0)
        first = keys[0]
        chained = len(keys) == 1 and first.token_ids is not None and first.start == 0
        shape, ranks = (first.model_name, first.world_size, 0), first.world_size
        lookup = wire.Lookup(*shape, first.request_id or "", ranks, hashes, chained)
        return self.ask(lookup, lambda value: check(read_hit(value, lookup).chunks))

    def _transfer(
        self, check: Convert, kind: RequestType, keys: list[IPCCacheEngineKey], instance: int,
        block_ids: Sequence[int], handle: bytes,
    ) -> MessagingFuture[Any]:  # fmt: skip
        from kvdepot.client.operations import BlockIds  # commands, which import this module, start sooner without numpy
        from kvdepot.devices import record_event

        if not all(isinstance(key, IPCCacheEngineKey) for key in keys):
            raise BadRequest("keys must be a list of IPCCacheEngineKey")
        named = [self._name(key) for key in keys]
        counts = [len(hashes) // HASH_BYTES for _, _, hashes in named]
        if not sum(counts):
            return MessagingFuture.resolved(True if kind is RequestType.STORE else [not block_ids] * len(keys))
        if len(block_ids) % sum(counts):
            raise BadRequest(f"{len(block_ids)} block ids for {sum(counts)} chunks")
        packed, shards = pack_block_ids(block_ids), _make_shards(keys, named, len(block_ids) // sum(counts))
        ends = itertools.accumulate((4 * len(each.hashes) // HASH_BYTES * each.blocks for each in shards), initial=0)
        ids = [BlockIds.unpack(packed[start:end]) for start, end in itertools.pairwise(ends)]
        # The process that made an event cannot open its handle. But the work before the event is already queued on the
        # device, so an event that is recorded now comes after it.
        memory = self.lane.memory(instance)
        event = record_event(memory.device) if handle and memory is not None else None
        if kind is RequestType.STORE:
            return self.copy_blocks(wire.Store(instance, shards), ids, event, check)

        def per_key(value: object) -> object:
            results = iter(check_type(value, list))
            return check([count > 0 and all(list(itertools.islice(results, count))) for count in counts])

        return self.copy_blocks(wire.Retrieve(instance, shards), ids, event, per_key)

    def copy_blocks(
        self, request: wire.Copying, block_ids: list[BlockIds], event: DeviceEvent | None, convert: Convert
    ) -> MessagingFuture[Any]:
        """Store or retrieve; see Lane.submit. Never blocks."""
        return self.lane.submit(request, block_ids, event, convert)

    def close(self) -> None:
        """Close the connection; requests under way fail with Unavailable. Safe twice.

        Blocks 0.2 s at most; 5 s more for a device that hangs in a copy, and then the connection stays open: a server
        gives the memory of a client that has left to others.
        """
        if self._lane is None or self._lane.close():
            while self._opened:
                self._opened.popitem()[1].close()
            super().close()


def _make_shards(keys: list[IPCCacheEngineKey], named: list[Naming], blocks: int) -> list[wire.Shards]:
    """The shards of keys that name chunks; consecutive hash keys of one request are one run. Raises BadRequest."""
    shards: list[wire.Shards] = []
    for key, (parent, depth, hashes) in zip(keys, named, strict=True):
        if not hashes:
            continue
        if key.worker_id is None:
            raise BadRequest("a store or retrieve key needs a worker_id")
        made = wire.Shards(
            key.request_id or "", key.model_name, key.world_size, key.worker_id, parent, depth, hashes, blocks
        )
        last = shards[-1] if shards and not parent else made
        if last is not made and msgspec.structs.replace(last, hashes=hashes) == made:
            shards[-1] = msgspec.structs.replace(last, hashes=last.hashes + hashes)
        else:
            shards.append(made)
    return shards
