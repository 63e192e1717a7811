"""Storing and loading the KV of token sequences.

A call hashes the tokens, asks the server where the chunks belong or are, copies them to or from the arena in this
process, and tells the server. Invariant: what was placed is completed, whatever happens to the call: the server keeps
its memory until then.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeAlias, cast, overload

import msgspec
import numpy as np
from blake3 import blake3

from kvdepot.client import admin
from kvdepot.client.calls import ANSWER_S, answer
from kvdepot.client.link import Link, copy_all
from kvdepot.client.reuse import NOTHING_REUSED, Reuse
from kvdepot.client.socket import Client
from kvdepot.client.transfer import GroupSpec, LeaseTerms, PromptChunks, ShardSpec
from kvdepot.errors import BadRequest, KVDepotError, UnknownInstance, UnknownRequest
from kvdepot.library.shapes import ITEM_BYTES, Plain, Shape, State, layers_of, new_array, refuse_overlaps, state_bytes
from kvdepot.memory.arena_view import ArenaView
from kvdepot.memory.extents import Bytes, views
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ChunkChain
from kvdepot.protocol.layout import BlockFormat, chunk_format
from kvdepot.protocol.model_names import name_model

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar

    from kvdepot.library.shapes import Array, Kv, Layers, NumPyType, Tokens

    S_co = TypeVar("S_co", bound=Layers | Sequence[Layers], default=Layers | Sequence[Layers], covariant=True)
    D_co = TypeVar("D_co", bound=NumPyType | torch.dtype, default=NumPyType | torch.dtype, covariant=True)
else:
    from typing import TypeVar

    S_co, D_co = TypeVar("S_co"), TypeVar("D_co")

log = logging.getLogger(__name__)
T = TypeVar("T")

_CHUNK_BYTES = 2 << 20
"""Bytes of a chunk if the library chooses its size: copying one takes ten times as long as the server's work for it."""
_TOKENS = 16, 32, 64, 128, 256
_STATE_TOKENS = 256
"""Tokens per chunk where layers have states, as each chunk contains a whole state."""


@dataclass(frozen=True)
class ModelFacts:
    """All that determines the bytes of a namespace's chunks; the fields are the parameters of `Depot.namespace`.

    library: whose arrays `get` makes, "numpy" or "torch"; the only field that says nothing about the bytes.
    """

    model: str
    revision: str
    dtype: str
    shapes: tuple[Shape | State, ...]
    adapter: str = ""
    chunk_tokens: int = 0
    library: str = field(default="numpy", kw_only=True)

    def fit(self, least_tokens: int) -> ModelFacts:
        """The same facts with a chunk size. least_tokens: the least tokens per chunk that the server takes.
        Raises BadRequest for facts that are missing or impossible."""
        for name, others in (("model", "models"), ("revision", "weights")):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise BadRequest(f"a namespace needs {name}: without it, KV of other {others} could be served")
        if not isinstance(self.adapter, str):
            raise BadRequest(f"adapter must be a text, not {type(self.adapter).__name__}")
        if not (self.model + self.revision + self.adapter).isprintable():
            raise BadRequest("model, revision and adapter must be printable text")
        if not self.shapes or not all(isinstance(each, Shape | State) for each in self.shapes):
            raise BadRequest("shape must be a kvdepot.Shape or kvdepot.State, or a list of them")
        tokens = self.chunk_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= wire.MAX_CHUNK_TOKENS:
            raise BadRequest(f"chunk_tokens must be 0 to {wire.MAX_CHUNK_TOKENS} tokens, not {tokens!r:.40}")
        if 0 < tokens < least_tokens:
            raise BadRequest(f"chunk_tokens is {tokens}, but this server's --chunk-size is {least_tokens}")
        return replace(self, chunk_tokens=tokens or max(self._chosen_tokens(), least_tokens))

    def _chosen_tokens(self) -> int:
        if any(isinstance(shape, State) for shape in self.shapes):
            return _STATE_TOKENS
        token_bytes = ITEM_BYTES[self.dtype] * sum(each.values for each in self.shapes if isinstance(each, Shape))
        return next((tokens for tokens in _TOKENS if tokens * token_bytes >= _CHUNK_BYTES), _TOKENS[-1])

    def format(self, group: int) -> BlockFormat:
        """The format of a shape's chunks, each of which is one block."""
        shape = self.shapes[group]
        size = shape.size if isinstance(shape, State) else shape.values * self.chunk_tokens * ITEM_BYTES[self.dtype]
        return chunk_format(size, f"{group} {self.dtype} {self.chunk_tokens} {shape!r}")

    def spec(self) -> ShardSpec:
        """The namespace as the server knows it."""
        groups = tuple(GroupSpec(shape.reach(self.chunk_tokens), 1) for shape in self.shapes)
        is_plain = len(groups) == 1 and groups[0].reach == 0
        facts = [1, self.model, self.revision, self.dtype, self.adapter, self.chunk_tokens, *map(repr, self.shapes)]
        name = name_model(self.model, blake3(msgspec.json.encode(facts)).hexdigest())
        return ShardSpec(name, 1, 0, self.chunk_tokens, 1, () if is_plain else groups)


class Namespace(Generic[S_co, D_co]):
    """The KV of one model in a depot; `Depot.namespace` makes it. Any thread may use it.

    Calls block while they copy and until the server has answered, 30 s at most for each of its two or three answers.
    Without a server, nothing is stored or found; no call raises for that. For type checkers, it is generic in the types
    of `shape` and `dtype`.
    """

    def __init__(self, link: Link, facts: ModelFacts) -> None:
        self.chunk_tokens = facts.chunk_tokens
        self.last = NOTHING_REUSED
        """The result of the last `get`, `get_into` or `contains` that has ended, in any thread. The library neither
        computes nor compares, so its `compared` and `saved_s` are 0."""
        self.facts = facts
        self._link = link
        self._spec = facts.spec()
        self._instance = secrets.randbits(62)
        self._is_registered = False
        self._registering = threading.Lock()  # a second registration would end operations under the first
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"<kvdepot.Namespace {self._spec.model}, {self.chunk_tokens} tokens a chunk>"

    # -- calls

    def put(self, tokens: Tokens, kv: Kv | Sequence[Kv]) -> int:
        """Store the KV of a token sequence. Returns the tokens that the depot then has from the start, in whole chunks.

        tokens: a list of ids, or a one-dimensional array of integers. kv: the KV of these tokens, from the first on, as
        the namespace's shape describes it; with several shapes, a list with the KV of each. A window may have only its
        last tokens, from the start of the first chunk that has some of the window. A state is the state after the last
        token, which must end a chunk. Raises BadRequest.
        """
        chain = self._chain(tokens)
        count = len(chain)
        given = enumerate(self._given(kv))
        sources = [self._source(group, each, len(tokens), count) for group, each in given] if count else []

        def store(client: Client) -> int:
            is_whole, request = True, f"put-{next(self._numbers)}"
            for group, (first, moves) in enumerate(sources):
                message = wire.Store(self._instance + group, self._shards(chain, first, count, request))
                is_whole &= self._move(message, first, moves, bool) is True
            return count if is_whole else self._find(client, chain)

        return self.chunk_tokens * self._call(store) if count else 0

    @overload
    def get(self: Namespace[Layers, NumPyType], tokens: Tokens) -> tuple[np.ndarray | None, int]: ...
    @overload
    def get(self: Namespace[Sequence[Layers], NumPyType], tokens: Tokens) -> tuple[list[np.ndarray] | None, int]: ...
    @overload
    def get(self: Namespace[Layers, torch.dtype], tokens: Tokens) -> tuple[torch.Tensor | None, int]: ...
    @overload
    def get(
        self: Namespace[Sequence[Layers], torch.dtype], tokens: Tokens
    ) -> tuple[list[torch.Tensor] | None, int]: ...
    @overload
    def get(self, tokens: Tokens) -> tuple[Array | list[Array] | None, int]: ...

    def get(self, tokens: Tokens) -> tuple[Array | list[Array] | None, int]:
        """Load the KV of the longest stored prefix: its arrays, or None, and its number of tokens; 0 is a miss.

        The arrays have the namespace's dtype: they are torch's if the dtype was given as torch's type, and NumPy's
        otherwise. NumPy has bfloat16 and float8 only if the package ml_dtypes is installed; else their bits come as
        unsigned integers. A state is an array of uint8. Arrays are shaped as for `put`; a window's begin with the first
        chunk that is needed. Raises BadRequest for wrong tokens.
        """
        made: list[tuple[Array, int]] = []

        def make(count: int) -> Sequence[tuple[Kv, int]]:
            made[:] = [self._empty(group, count) for group in range(len(self.facts.shapes))]
            return made

        count = self._load(tokens, make)
        if not count:
            return None, 0
        arrays = [array for array, _ in made]
        return (arrays[0] if len(arrays) == 1 else arrays), count * self.chunk_tokens

    def get_into(self, tokens: Tokens, kv: Kv | Sequence[Kv]) -> int:
        """As `get`, into the caller's arrays. kv: arrays shaped as for `put`, long enough for all whole chunks of
        `tokens`; no two elements may share memory.

        Returns the number of tokens loaded, which lie at the arrays' start; elements behind them may be overwritten.
        Raises BadRequest, and then loads nothing.
        """
        given = self._given(kv)
        most = len(self._chain(tokens)) * self.chunk_tokens
        filled: list[Plain] = []
        for shape, each in zip(self.facts.shapes, given, strict=True):
            if isinstance(shape, State):
                arrays, held = list[Plain]([state_bytes(each, shape.size)]), most
            else:
                arrays, held = layers_of(each, shape, self.facts.dtype)
            if not all(array.flags.writeable for array in arrays):
                raise BadRequest("KV is loaded into arrays that are read-only")
            if held < most:
                raise BadRequest(f"KV for {held} tokens is too short: up to {most} of these may be loaded")
            filled += arrays
        refuse_overlaps(filled)
        return self.chunk_tokens * self._load(tokens, lambda count: [(each, 0) for each in given])

    def contains(self, tokens: Tokens) -> int:
        """The tokens that `get` would load. Raises BadRequest for wrong tokens."""
        chain = self._chain(tokens)
        found = self.chunk_tokens * self._call(lambda client: self._find(client, chain))
        self.last = Reuse(found)
        return found

    def delete(self, tokens: Tokens) -> int:
        """Remove the chunks of these tokens from memory and tiers, except chunks with which other sequences begin, too.

        Returns the chunks removed from memory. Raises BadRequest for wrong tokens.
        """
        prompt = self._prompt(self._chain(tokens))
        return self._call(lambda client: admin.drop(client, prompt)) if prompt else 0

    def lease(self, tokens: Tokens, retain_s: int, name: str = "") -> int:
        """Keep the chunks of these tokens from eviction for `retain_s` seconds. Returns the tokens held so far; chunks
        stored later are held, too. name: an earlier lease of this name is replaced; empty: a name that stands for these
        tokens.

        Raises BadRequest for wrong arguments, or the server's error.
        """
        if not isinstance(retain_s, int) or isinstance(retain_s, bool) or not 0 < retain_s < 1 << 32:
            raise BadRequest(f"retain_s must be a whole number of seconds, not {retain_s!r:.40}")
        chain = self._chain(tokens)
        name, prompt = self._lease_name(chain, name), self._prompt(chain)
        if not prompt:
            return 0
        lease = prompt.lease(name, LeaseTerms("retain", retain_s))
        return self.chunk_tokens * self._call(lambda client: answer(client, lease, int))

    def release(self, tokens: Tokens, name: str = "") -> bool:
        """End the lease of these tokens, or the one of this name: its chunks may be evicted again. Returns whether
        there was one. Raises BadRequest for wrong arguments."""
        end = wire.EndLease(self._lease_name(self._chain(tokens), name))
        return bool(self._call(lambda client: answer(client, end, bool)))

    # -- arguments

    def _chain(self, tokens: Tokens) -> ChunkChain:
        """The hashes of the whole chunks. Raises BadRequest."""
        ids: Sequence[int]
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(tokens, torch.Tensor):
            if tokens.device.type != "cpu":
                raise BadRequest(f"tokens on {tokens.device}: pass tokens.cpu()")
            if tokens.is_floating_point() or tokens.is_complex() or tokens.layout is not torch.strided:
                raise BadRequest(f"tokens must be plain integers, not {tokens.dtype} of layout {tokens.layout}")
            tokens = tokens.numpy()
        if isinstance(tokens, np.ndarray):
            if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or isinstance(tokens, np.ma.MaskedArray):
                found = f"{type(tokens).__name__} of {tokens.dtype} of shape {list(tokens.shape)}"
                raise BadRequest(f"tokens must be a row of integers, not {found}")
            if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < 1 << 32):
                raise BadRequest("tokens must be integers in [0, 2**32)")
            ids = array("I", tokens.astype(np.uint32).tobytes())
        elif isinstance(tokens, list | tuple | array):
            if wrong := set(map(type, tokens)) - {int}:
                raise BadRequest(f"tokens must be integers, not {', '.join(sorted(each.__name__ for each in wrong))}")
            ids = tokens
        else:
            raise BadRequest(f"tokens must be a list or an array of integers, not {type(tokens).__name__}")
        chain = ChunkChain(self.chunk_tokens)
        chain.grow(ids)
        if len(chain) > wire.MAX_CHUNKS:
            raise BadRequest(f"{len(ids)} tokens are more than {wire.MAX_CHUNKS} chunks of {self.chunk_tokens}")
        return chain

    def _given(self, kv: Kv | Sequence[Kv]) -> list[Kv]:
        if len(self.facts.shapes) == 1:
            return [cast("Kv", kv)]
        if not isinstance(kv, list | tuple) or len(kv) != len(self.facts.shapes):
            raise BadRequest(f"KV must be a list with one item for each of {len(self.facts.shapes)} shapes")
        return list(cast("Sequence[Kv]", kv))

    def _first(self, group: int, count: int) -> int:
        """The number of the first of `count` chunks that a shape needs to resume after them."""
        reach = self.facts.shapes[group].reach(self.chunk_tokens)
        return max(0, count - reach) if reach else 0

    def _source(self, group: int, kv: Kv, tokens: int, count: int) -> tuple[int, _Moves]:
        """The first chunk that an argument of `put` has, and how chunks are copied from it. Raises BadRequest."""
        shape, size = self.facts.shapes[group], self.chunk_tokens
        if isinstance(shape, State):
            if tokens != count * size:
                raise BadRequest(f"a state is that after a whole chunk: {tokens} tokens are not a multiple of {size}")
            return count - 1, _StateMoves(kv, shape.size)
        arrays, held = layers_of(kv, shape, self.facts.dtype)
        first = self._first(group, count)
        needed = tokens - first * size
        if not needed <= held <= tokens:
            raise BadRequest(f"KV of {held} tokens for {tokens} tokens, of which the last {needed} are needed")
        return first, _TokenMoves(arrays, shape, size, tokens - held)

    def _empty(self, group: int, count: int) -> tuple[Array, int]:
        """Arrays for what a shape needs of `count` chunks, and the number of their first token."""
        shape, first = self.facts.shapes[group], self._first(group, count)
        if isinstance(shape, State):
            return new_array((shape.size,), "uint8", self.facts.library), 0
        held = (count - first) * self.chunk_tokens
        return new_array(shape.sized(held), self.facts.dtype, self.facts.library), first * self.chunk_tokens

    def _target(self, group: int, kv: Kv, first_token: int) -> _Moves:
        """Views for copying chunks into arrays that begin with this token."""
        shape = self.facts.shapes[group]
        if isinstance(shape, State):
            return _StateMoves(kv, shape.size)
        return _TokenMoves(layers_of(kv, shape, self.facts.dtype)[0], shape, self.chunk_tokens, first_token)

    # -- the server

    def _call(self, work: Callable[[Client], int]) -> int:
        """The result of `work`; 0 without a server, or if the server does not answer in time."""
        with self._link.call() as client:
            try:
                self._register(client)
                return work(client)
            except UnknownInstance as exc:
                log.warning("not stored or loaded: %s", exc)
                self._is_registered = False
                return 0
            except BadRequest:
                raise
            except KVDepotError as exc:
                log.warning("not stored or loaded: %s", exc)
                return 0

    def _register(self, client: Client) -> None:
        with self._registering:
            if self._is_registered:
                return
            formats = [self.facts.format(group) for group in range(len(self.facts.shapes))]
            for asked in [client.ask(message) for message in self._spec.register(self._instance, formats)]:
                asked.result(ANSWER_S)
            self._is_registered = True

    def _prompt(self, chain: ChunkChain) -> PromptChunks | None:
        return PromptChunks(self._spec, bytes(chain.hashes)) if len(chain) else None

    def _lease_name(self, chain: ChunkChain, name: str) -> str:
        """The name of a lease of these chunks: the given one, or one that no other sequence or namespace has."""
        if not isinstance(name, str):
            raise BadRequest(f"a lease's name must be a text, not {type(name).__name__}")
        return name or f"library-{blake3(self._spec.model.encode() + chain.parent(len(chain))).hexdigest()[:32]}"

    def _shards(self, chain: ChunkChain, first: int, end: int, request: str) -> list[wire.Shards]:
        shape = self._spec.model, self._spec.world_size, self._spec.rank
        return [wire.Shards(request, *shape, chain.parent(first), first, chain.slice(first, end), blocks=1)]

    def _find(self, client: Client, chain: ChunkChain, request: str = "") -> int:
        """The chunks of the longest stored prefix. They stay pinned for `request`, if it is given."""
        prompt = self._prompt(chain)
        if prompt is None:
            return 0
        lookup = prompt.lookup(request, 1) if request else prompt.probe(f"{self._instance}-{next(self._numbers)}")
        return answer(client, lookup, wire.Hit).chunks

    def _load(self, tokens: Tokens, make: Callable[[int], Sequence[tuple[Kv, int]]]) -> int:
        """The number of chunks loaded. make: returns, for this many chunks, each shape's arrays and the number of the
        token with which they begin."""
        chain, found = self._chain(tokens), 0

        def load(client: Client) -> int:
            nonlocal found
            request = f"get-{self._instance}-{next(self._numbers)}"
            try:
                count = found = self._find(client, chain, request)
                for group, (kv, first_token) in enumerate(make(count) if count else ()):
                    first = self._first(group, count)
                    moves = self._target(group, kv, first_token)
                    shards = self._shards(chain, first, count, request)
                    message = wire.Retrieve(self._instance + group, shards, unpins=False)
                    loaded = self._move(message, first, moves, list[bool])
                    if loaded is None or not all(loaded):
                        return 0
                return count
            finally:
                client.ask(wire.EndSession(request), deadline_s=None)
                client.pump()

        loaded = self._call(load)
        self.last = Reuse(found * self.chunk_tokens, loaded * self.chunk_tokens)
        return loaded

    def _move(self, message: wire.Store | wire.Retrieve, first: int, moves: _Moves, kind: type[T]) -> T | None:
        """The answer to a store or retrieve, whose chunks are copied here; None: the answer was lost, for example with
        its server. first: number of its first chunk."""
        is_store = isinstance(message, wire.Store)

        def copy(view: ArenaView, placement: wire.Placement) -> None:
            def copy_one(placed: tuple[int, wire.Place]) -> None:
                _copy(view.bytes, placed[1], moves=moves, chunk=first + placed[0], is_store=is_store)

            placed = list(zip(placement.chunks, placement.places, strict=True))
            copy_all(copy_one, placed, len(placed) * moves.size)

        try:
            return self._link.move(message, moves.size, copy, kind, ANSWER_S)
        except UnknownRequest:
            log.info("not stored or loaded: the server was replaced, or its answer was lost")
            return None


def _copy(arena: Bytes, place: wire.Place, *, moves: _Moves, chunk: int, is_store: bool) -> None:
    """Copy one chunk to or from its place in the arena. chunk: its number in the sequence."""
    parts = views(arena, place.extents, 0, moves.size)
    data = parts[0] if len(parts) == 1 else np.concatenate(parts)
    for stored, given in moves.pairs(chunk, data):
        np.copyto(*((stored, given) if is_store else (given, stored)))
    if is_store and len(parts) > 1:
        for part in parts:
            part[:], data = data[: len(part)], data[len(part) :]


class _TokenMoves:
    """The caller's arrays of attention layers, and the bytes of chunks that belong to them. size: bytes of a chunk."""

    def __init__(self, arrays: list[Plain], shape: Shape, chunk_tokens: int, first_token: int) -> None:
        """arrays: the arrays that `layers_of` returns, from token `first_token` of the sequence on."""
        self.size = shape.values * chunk_tokens * arrays[0].itemsize
        self._arrays = arrays
        self._shape = shape.sized(chunk_tokens)
        self._axis = shape.token_axis - (5 - arrays[0].ndim)
        self._tokens = chunk_tokens
        self._first_token = first_token

    def pairs(self, chunk: int, data: Bytes) -> Iterator[tuple[Plain, Plain]]:
        """Pairs of equally shaped views: of a chunk's bytes, and of the caller's arrays. chunk: its number in the
        sequence."""
        start = chunk * self._tokens - self._first_token
        at = (*[slice(None)] * self._axis, slice(start, start + self._tokens))
        values = data.view(self._arrays[0].dtype).reshape(-1, *self._shape[5 - self._arrays[0].ndim :])
        return ((values[i], each[at]) for i, each in enumerate(self._arrays))


class _StateMoves:
    """As _TokenMoves, for one array that is the state after a chunk."""

    def __init__(self, kv: Kv, size: int) -> None:
        """Raises BadRequest unless `kv` is one array of this many bytes."""
        self.size = size
        self._bytes = state_bytes(kv, size)

    def pairs(self, chunk: int, data: Bytes) -> Iterator[tuple[Plain, Plain]]:
        yield data, self._bytes


_Moves: TypeAlias = _TokenMoves | _StateMoves
