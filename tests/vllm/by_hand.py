"""Engines in this process, made of vLLM's own parts but for models: its scheduler, the connector in both roles, and the
code of its runners that calls the connector. A worker calls that code where the runner that it stands for does.

The model is arithmetic. What it writes for a token is a number that follows from all tokens up to it, a drafter's from
one more; where attention would read, it compares. So a wrong byte in a block that is read, by whoever and however late
it was written, is found by the step that reads it. The text after a prompt follows from the prompt, too.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conftest import HANG_S

BLOCK, CHUNK, BATCH = 32, 64, 160
"""Tokens of a block, of a chunk, and of a step."""
VOCABULARY = 16
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


class Text:
    """The tokens of a request and what the model says after them, with a state that all tokens up to each determine."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []
        for token in prompt:
            self._put(token)

    def _put(self, token: int) -> None:
        self.tokens.append(token)
        self.states.append(follow(self.states[-1] if self.states else 0, token))

    def until(self, end: int) -> Text:
        """The same, with as many tokens at least."""
        while len(self.tokens) < end:
            self._put(self.states[-1] % VOCABULARY)
        return self


def follow(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), state)


@dataclass
class Row:
    """One request of a worker's batch."""

    text: Text
    blocks: list[int]
    computed: int
    known: int
    """Tokens that it is to compute before it says one."""


class Worker:
    def __init__(self, config: Any, caches: Any, window: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_initialized
        from vllm.v1.worker.gpu.kv_connector import get_kv_connector

        ensure_kv_transfer_initialized(config, caches)
        self.config, self.window = config, window
        self.kv = {name: torch.zeros(caches.num_blocks, 1, BLOCK, 8, dtype=torch.bfloat16) for name in LAYERS}
        self.connector = get_kv_transfer_group()
        self.v2 = get_kv_connector(config, self.kv)
        self.rows: dict[str, Row] = {}
        self.texts: dict[str, Text] = {}
        self.prompts: dict[str, int] = {}  # their lengths
        self.begun: dict[str, list[int]] = {}  # tokens that were there whenever a request came into the batch

    def step(self, planned: Any) -> Any:
        """As in vllm/v1/worker/gpu/model_runner.py."""
        from vllm.forward_context import set_forward_context

        self._update(planned)
        if not planned.total_num_scheduled_tokens:
            return self.v2.no_forward(planned)
        with set_forward_context(None, self.config):
            self.v2.pre_forward(planned)
            said = self._forward(planned)
        self.v2.finish_forward()
        return self._output(said, self.v2.post_forward(planned.finished_req_ids))

    def _update(self, planned: Any) -> None:
        for request_id in {*planned.finished_req_ids, *(planned.preempted_req_ids or ())}:
            self.rows.pop(request_id, None)
        for new in planned.scheduled_new_reqs:
            known = len(new.prefill_token_ids or new.prompt_token_ids)
            self._start(new.req_id, new.block_ids[0], new.num_computed_tokens, known)
        cached = planned.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            (blocks,) = cached.new_block_ids[number] or ([],)
            if request_id in cached.resumed_req_ids:
                known = self.prompts[request_id] + cached.num_output_tokens[number]
                self._start(request_id, blocks, cached.num_computed_tokens[number], known)
            else:
                self.rows[request_id].blocks += blocks

    def _start(self, request_id: str, blocks: list[int], computed: int, known: int) -> None:
        self.begun.setdefault(request_id, []).append(computed)
        self.rows[request_id] = Row(self.texts[request_id], list(blocks), computed, known)

    def _forward(self, planned: Any) -> dict[str, list[int]]:
        """Compute the step's tokens. Returns what each request says."""
        said = {}
        for request_id, number in planned.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start, end = row.computed, row.computed + number
            text = row.text.until(end + 2)
            for layer in LAYERS:
                self._read(layer, row, text.states[:start])
            for layer in LAYERS:
                self._write(layer, row, start, text.states[start:end])
            said[request_id] = text.tokens[end : end + 1] if end >= row.known else []
            row.computed = end
        return said

    def _place(self, row: Row, start: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, start + number)
        return torch.tensor(row.blocks, dtype=torch.long)[positions // BLOCK], positions % BLOCK

    def _numbers(self, layer: str, states: Sequence[int]) -> torch.Tensor:
        salt = layer.encode()
        return torch.tensor([zlib.crc32(salt, state) & 0x7FFF for state in states], dtype=torch.int16)

    def _write(self, layer: str, row: Row, start: int, states: Sequence[int]) -> None:
        states = states[: max(0, len(row.blocks) * BLOCK - start)]
        blocks, places = self._place(row, start, len(states))
        self.kv[layer].view(torch.int16)[blocks, 0, places] = self._numbers(layer, states).unsqueeze(1)

    def _read(self, layer: str, row: Row, states: Sequence[int]) -> None:
        first = max(0, len(states) - self.window + 1) if self.window else 0
        blocks, places = self._place(row, first, len(states) - first)
        found = self.kv[layer].view(torch.int16)[blocks, 0, places]
        wrong = (found != self._numbers(layer, states[first:]).unsqueeze(1)).any(1).nonzero().flatten() + first
        assert not len(wrong), f"{layer}: wrong KV at positions {wrong.tolist()[:4]} and others of {len(states)}"

    def _output(self, said: dict[str, list[int]], told: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(said)
        return ModelRunnerOutput(
            ids, {name: i for i, name in enumerate(ids)}, [said[name] for name in ids], kv_connector_output=told
        )


def check(request: Any) -> None:
    """A request has said all that it was to say, and nothing else."""
    known, prompt = list(request.all_token_ids), list(request.prompt_token_ids)
    assert known == Text(prompt).until(len(known)).tokens[: len(prompt) + request.max_tokens]


class Engine:
    """A scheduler and a worker. Only one at a time can be in a process."""

    def __init__(
        self,
        url: str,
        model: Path,
        steps: int = 1,
        blocks: int = 64,
        window: int = 0,
        **extra: Any,
    ) -> None:
        """steps: how many are under way at a time, 2 with asynchronous scheduling. window: of sliding windows; 0: full
        attention. extra: our settings.
        """
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.structured_output import StructuredOutputManager

        told = KVTransferConfig(
            kv_connector="KVDepotConnector", kv_role="kv_both", engine_id="one of these",
            kv_connector_extra_config={"kvdepot.url": url, "kvdepot.required": True, **extra},
        )  # fmt: skip
        self.config = config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, kv_transfer_config=told, block_size=BLOCK, max_num_seqs=8,
            max_num_batched_tokens=BATCH, max_model_len=1024, async_scheduling=steps > 1,
        ).create_engine_config()  # fmt: skip
        config.instance_id = "one of these"  # files that this process has written are shared with no other engine
        shape: Any = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.bfloat16}
        spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
        caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec([*LAYERS], spec)])
        config.cache_config.num_gpu_blocks = blocks
        hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self._hasher = get_request_block_hasher(BLOCK, hashed)
        with set_current_vllm_config(config):
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK, hash_block_size=BLOCK, log_stats=False,
            )  # fmt: skip
            self.worker = Worker(config, caches, window)
        self._steps = steps
        self._under_way: deque[tuple[Any, Any]] = deque()

    def add(self, name: str, prompt: Sequence[int], says: int = 8) -> Any:
        """Add a request that says this many tokens. Returns vLLM's object."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=says, ignore_eos=True, detokenize=False)
        made = Request(name, list(prompt), params, None, block_hasher=self._hasher)
        self.worker.texts[name] = Text(prompt)
        self.worker.prompts[name] = len(prompt)
        self.scheduler.add_request(made)
        return made

    def step(self) -> None:
        """As vLLM's engine core: `step`, or `step_with_batch_queue` with several steps under way."""
        if self.scheduler.has_requests():
            planned = self.scheduler.schedule()
            self._under_way.append((planned, self.worker.step(planned)))
            if len(self._under_way) < self._steps and planned.total_num_scheduled_tokens:
                return
        if self._under_way:
            planned, output = self._under_way.popleft()
            self.scheduler.update_from_output(planned, output)

    def work(self) -> None:
        """Step until there is nothing left to do."""
        deadline = time.monotonic() + HANG_S
        while self.scheduler.has_requests() or self._under_way:
            assert time.monotonic() < deadline, f"never ended: {list(self.scheduler.requests)}"
            self.step()

    def finish(self) -> None:
        """Step until all requests have ended, and vLLM has freed their blocks."""
        self.work()
        assert not self.scheduler.requests

    def run(self, name: str, prompt: Sequence[int], says: int = 8) -> int:
        """One request, from its arrival until its blocks are free. Returns how many of its tokens were not computed."""
        made = self.add(name, prompt, says)
        self.finish()
        check(made)
        return self.worker.begun[name][-1]

    def close(self) -> None:
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        self.scheduler.shutdown()
        ensure_kv_transfer_shutdown()
