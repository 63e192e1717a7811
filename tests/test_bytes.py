"""Every byte that comes back through a server is the byte that was stored, and no other byte is touched."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp
from tests.devices.conformance import any_model, block_order
from tests.devices.tensors import Bytes, Model, Worker

if TYPE_CHECKING:
    from tests.conftest import Depot

CHUNK = 256  # tokens, as the server of these tests is started
TIMEOUT_S = 20.0
DRAWS = st.randoms(use_true_random=False)


class Memory:
    """All bytes that a worker's tensors lie in, also those between their elements."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self._worker = Worker()
        self._worker.make(model)
        self.tensors = {layer.name: tensor for layer, tensor in zip(model.layers, self._worker.tensors, strict=True)}
        self._random = np.random.default_rng(seed)

    def fill(self) -> list[Bytes]:
        """Write new bytes everywhere, also those that are no number; returns a copy."""
        self._worker.write([self._random.integers(0, 256, size, np.uint8) for size in self.model.sizes])
        return self._worker.read()

    def assert_is(self, expected: list[Bytes]) -> None:
        for number, (storage, right) in enumerate(zip(self._worker.read(), expected, strict=True)):
            wrong = np.flatnonzero(storage != right).tolist()
            assert not wrong, f"{len(wrong)} bytes of storage {number} are wrong, at {wrong[:8]}"


names = (f"bytes-{number}-{uuid.uuid4().hex[:6]}" for number in itertools.count())


@contextlib.contextmanager
def worker_of(depot: Depot, memory: Memory, blocks_in_chunk: int) -> Iterator[LMCacheMPWorkerAdapter]:
    worker = LMCacheMPWorkerAdapter(depot.url, depot.context, next(names), 1, 0, CHUNK // blocks_in_chunk)
    try:
        worker.register_kv_caches(memory.tensors, block_axes=memory.model.axes)
        yield worker
    finally:
        worker.shutdown()


def settle(worker: LMCacheMPWorkerAdapter, request: str) -> list[Any]:
    """Wait for the transfers of a request; their answers."""
    transfers = [*worker.store_futures.get(request, ()), *worker.retrieve_futures.get(request, ())]
    answers = []
    for transfer in transfers:
        assert transfer.futures is not None
        answers.append(transfer.futures[0].result(TIMEOUT_S) if transfer.futures else [])
    worker.get_finished({request})
    return answers


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_stored_blocks_come_back_byte_for_byte_into_other_blocks(depot: Depot, data: st.DataObject) -> None:
    blocks_in_chunk = data.draw(st.sampled_from([1, 2, 4, 8]))
    chunks = data.draw(st.integers(1, 3))
    count = chunks * blocks_in_chunk
    nb = count + data.draw(st.integers(0, 4))
    source, target = block_order(data.draw(DRAWS), nb, count), block_order(data.draw(DRAWS), nb, count)
    memory = Memory(any_model(data.draw(DRAWS), nb), data.draw(st.integers(0, 99)))
    named: dict[str, Any]
    if data.draw(st.booleans()):
        named = {"token_ids": list(range(chunks * CHUNK + data.draw(st.sampled_from([0, 7]))))}
    else:
        named = {"block_hashes": [bytes([i]) * 5 for i in range(count)]}
    with worker_of(depot, memory, blocks_in_chunk) as worker:
        stored = memory.fill()
        worker.submit_store_request("r", LoadStoreOp(source, **named), None)
        assert settle(worker, "r") == [True]
        memory.assert_is(stored)
        expected = memory.fill()
        memory.model.move(stored, expected, dict(zip(source, target, strict=True)))
        worker.submit_retrieve_request("r", LoadStoreOp(target, **named), None)
        assert settle(worker, "r") == [[True] * chunks]
        memory.assert_is(expected)
        assert worker.get_block_ids_with_load_errors() == set()
