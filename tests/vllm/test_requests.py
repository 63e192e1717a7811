"""What besides the tokens identifies a request's chunks, on vLLM's own request objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, StreamingUpdate

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.integrations.vllm.connector import KVDepotConnector
from kvdepot.integrations.vllm.messages import WorkerReport
from kvdepot.integrations.vllm.phases import RequestPhase
from kvdepot.integrations.vllm.requests import ChunkRules, RequestChunks, names_are_contents
from kvdepot.protocol import wire
from tests.client.answers import Answering
from tests.conftest import Depot, StartDepot
from tests.vllm.conftest import StartSteps

SIZE = 256
ROOT = b"r" * 32


def item(name: str, offset: int, length: int = 16) -> Any:
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=length), name)


def request(tokens: list[int], items: list[Any] | None = None, **options: Any) -> Any:
    return Request("r", tokens, SamplingParams(max_tokens=4), None, mm_features=items, **options)


def hashes(of: Any, named: bool = True) -> bytes:
    return bytes(RequestChunks(of, ROOT, ChunkRules(SIZE, named)).hash().hashes)


def test_with_a_lookahead_an_image_that_begins_right_after_a_chunk_is_in_its_hash() -> None:
    def ahead(items: list[Any]) -> bytes:
        return bytes(RequestChunks(request(list(range(600)), items), ROOT, ChunkRules(SIZE, lookahead=1)).hash().hashes)

    plain, after, later = ahead([]), ahead([item("cat", 256)]), ahead([item("cat", 257)])
    assert len(plain) == 2 * 32
    assert plain[:32] != after[:32] and plain[:32] == later[:32] and plain[32:] != later[32:]


def test_with_a_lookahead_a_chunk_at_the_end_gets_its_hash_with_the_token_after_it() -> None:
    decoding = request(list(range(2 * SIZE)))
    prompt = RequestChunks(decoding, ROOT, ChunkRules(SIZE, lookahead=1))
    assert len(prompt.hash()) == 1
    decoding.append_output_token_ids(7)
    assert len(prompt.hash()) == 2
    longer = request([*range(2 * SIZE), 7, 8, 9])
    assert prompt.hash().hashes == RequestChunks(longer, ROOT, ChunkRules(SIZE, lookahead=1)).hash().hashes


def update(session: Any, tokens: list[int], items: list[Any]) -> None:
    """As vLLM's scheduler does with the next input of a streaming session."""

    class Bare:
        hash_block_size = 16
        log_stats = False

    following = request(tokens, items, resumable=True)
    session.num_computed_tokens = session.num_tokens
    Scheduler._update_request_as_session(Bare(), session, StreamingUpdate.from_request(following))  # type: ignore[arg-type]


def test_an_image_that_a_later_update_of_a_session_brings_is_in_its_chunks() -> None:
    last = []
    for name in ("cat", "dog"):
        session = request(list(range(300)), resumable=True)
        prompt = RequestChunks(session, ROOT, ChunkRules(SIZE))
        first = bytes(prompt.hash().hashes)
        update(session, [7] * 400, [item(name, 100)])
        whole = bytes(prompt.hash().hashes)
        assert len(whole) == 2 * 32 and whole[:32] == first
        assert whole == hashes(request(list(range(300)) + [7] * 400, [item(name, 400)]))
        last.append(whole)
    assert last[0][32:] != last[1][32:]


def test_an_item_that_changes_where_chunks_are_hashed_already_changes_them() -> None:
    one = request([7] * 600, [item("cat", 300)])
    prompt = RequestChunks(one, ROOT, ChunkRules(SIZE))
    before = bytes(prompt.hash().hashes)
    one.mm_features[0] = item("dog", 300)
    after = bytes(prompt.hash().hashes)
    assert after[:32] == before[:32] and after[32:] != before[32:]
    assert after == hashes(one)


def test_chunks_end_before_an_item_that_is_not_named_by_its_contents() -> None:
    images = [item("renderer0-mm-1-image-0", 520), item("renderer0-mm-1-image-1", 700)]
    assert hashes(request([7] * 1024, images), named=False) == hashes(request([7] * 520))
    assert hashes(request([7] * 1024), named=False) == hashes(request([7] * 1024))


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gib", "named"), [(False, 0, False), (True, 0, True), (False, 1, True), (True, 1, True)]
)
def test_items_have_names_of_their_contents_unless_both_of_vllms_caches_are_off(
    prefix_caching: bool, cache_gib: float, named: bool
) -> None:
    config: Any = SimpleNamespace(
        cache_config=CacheConfig(enable_prefix_caching=prefix_caching),
        model_config=SimpleNamespace(multimodal_config=MultiModalConfig(mm_processor_cache_gb=cache_gib)),
    )
    assert names_are_contents(config) is named
    config.model_config.multimodal_config = None
    assert names_are_contents(config)


class Steps:
    """A scheduler's connector, and steps as vLLM builds and returns them."""

    def __init__(self, url: str, model: Path, **settings: object) -> None:
        told = KVTransferConfig(
            kv_connector="KVDepotConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"kvdepot.url": url, "kvdepot.trust": "given"} | settings,
        )
        options = EngineArgs(model=str(model), skip_tokenizer_init=True, kv_transfer_config=told)
        spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.connector = KVDepotConnector(options.create_engine_config(), KVConnectorRole.SCHEDULER, config)

    def build(self, tokens: int = 0, preempted: bool = False) -> Any:
        """The orders of a step that computes `tokens` tokens of request `r`, in blocks 1 to 4."""
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = ({"r": tokens} if tokens else {}), tokens
        step.preempted_req_ids = {"r"} if preempted else None
        step.kv_connector_block_state = KVConnectorBlockState({"r"}, lambda request_id: ([1, 2, 3, 4],), {})
        return self.connector.build_connector_meta(step)

    def back(self, orders: Any, failed: set[int] | None = None) -> None:
        """Return the step's output."""
        report = WorkerReport(step=orders.step)
        self.connector.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=report, invalid_block_ids=failed or set())
        )


def test_a_reset_makes_stores_void_that_are_under_way_and_forgets_what_came_too_late(
    vllm_depot: Depot, start_steps: StartSteps
) -> None:
    steps = start_steps(vllm_depot.url)
    connector = steps.connector
    one = request(list(range(512)))
    connector.on_new_request(one)
    before = connector._scheduler._tracked["r"].prompt.chain.root
    first = steps.build(512)
    assert connector.reset_cache() is True
    second = steps.build(512)
    assert second.void and not second.stores
    steps.back(first)
    assert connector._scheduler._forget_again
    third = steps.build()
    assert not third.void and not third.stores
    steps.back(second)
    assert not connector._scheduler._forget_again
    connector.request_finished(one, [1, 2, 3, 4])
    connector.on_new_request(one)
    assert connector._scheduler._tracked["r"].prompt.chain.root != before


def test_a_reset_that_failed_forgets_the_next_time(start_depot: StartDepot, start_steps: StartSteps) -> None:
    depot = start_depot()
    connector = start_steps(depot.url).connector
    weights = connector._scheduler._weights
    weights.run, weights.is_mixed = "run", True  # its version has changed without a reset
    depot.process.kill(), depot.process.wait()
    assert connector.reset_cache() is False and weights.is_mixed


def test_a_lookup_is_hurried_once_after_the_time_of_computing(vllm_depot: Depot, start_steps: StartSteps) -> None:
    steps, peer = start_steps(vllm_depot.url), Answering()
    half = steps.connector._scheduler
    depot = half._depot
    try:
        half._depot = SchedulerClient(cast(Any, peer), depot.spec)
        peer.welcome = msgspec.structs.replace(peer.welcome, lookup_s=1e9)
        one = request(list(range(512)))
        steps.connector.on_new_request(one)
        for is_measured in (False, True):
            half._prefill._samples.extend([1e12] * is_measured)
            for _ in range(5):
                assert steps.connector.get_num_new_matched_tokens(one, 0) == (None, False)
                steps.build()
            assert len(peer.asked) == 1 + is_measured
        assert [each.hurries for each in peer.asked if isinstance(each, wire.Lookup)] == [False, True]
    finally:
        half._depot = depot


def test_pins_of_a_load_end_when_the_rest_of_the_prompt_is_stored(vllm_depot: Depot, start_steps: StartSteps) -> None:
    """A chunk stored behind evicted ones can never be found; but decoding takes long, and must hold no pins."""
    steps = start_steps(vllm_depot.url)
    connector = steps.connector

    def told_saved() -> int:
        """Tokens that ended sessions saved; one connection's messages keep their order."""
        return int(connector._scheduler._depot.client.ask(wire.GetStatus()).result(60.0)["saved"]["tokens"])

    before = told_saved()
    one = request(list(range(512)))
    connector.on_new_request(one)
    connector._scheduler._tracked["r"].enter(RequestPhase.FOUND)
    connector.update_state_after_alloc(one, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 256)
    steps.build()
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert told_saved() == before, "ended with the load"
    one.num_computed_tokens = 256
    steps.back(steps.build(256))
    one.num_computed_tokens = 512
    going = steps.build(1)
    assert [store.request_id for store in going.stores] == ["r"]
    assert told_saved() == before, "ended before the worker had the order to store"
    steps.back(going)
    steps.build(1)
    assert told_saved() == before + 256
    connector.request_finished(one, [1, 2, 3, 4])
    assert told_saved() == before + 256, "told twice"


def test_stores_follow_their_steps_output_and_keep_a_finished_requests_blocks(
    vllm_depot: Depot, start_steps: StartSteps
) -> None:
    steps = start_steps(vllm_depot.url)
    connector = steps.connector
    one = request(list(range(512)))
    connector.on_new_request(one)
    first = steps.build(512)
    second = steps.build()  # ahead, as vLLM's async scheduling does
    assert first.stores == second.stores == []
    assert connector.request_finished(one, [1, 2, 3, 4]) == (True, None)  # aborted while the first runs
    third = steps.build()
    assert third.stores == [] and third.ended == set()
    steps.back(first)
    fourth = steps.build()
    assert [store.request_id for store in fourth.stores] == ["r"] and fourth.ended == {"r"}
    # A request that is preempted before its step is back loses its blocks, and stores nothing.
    connector.on_new_request(one)
    fifth = steps.build(512)
    sixth = steps.build(preempted=True)
    steps.back(fifth), steps.back(sixth)
    assert steps.build().stores == []
    # Nor does one that read a block which failed.
    one.num_computed_tokens = 128
    connector._scheduler._tracked["r"].read_tokens = None
    seventh = steps.build(384)
    steps.back(seventh, failed={1})
    assert steps.build().stores == []
