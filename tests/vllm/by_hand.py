"""Engines in this process, made of vLLM's own parts but for models: its scheduler, the connector in both roles, and the
code of its runners that calls the connector. A worker calls that code where the runner that it stands for does.

The model is arithmetic. What it writes for a token is a number that follows from all tokens up to it, a drafter's from
one more; where attention would read, it compares. So a wrong byte in a block that is read, by whoever and however late
it was written, is found by the step that reads it. The text after a prompt follows from the prompt, too. A state is the
number of the last token, in the block in which vLLM's runners keep it: that of the last token that was computed.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch

from tests.conftest import HANG_S, Depot, eventually

BLOCK, CHUNK, BATCH = 32, 64, 160
"""Tokens of a block, of a chunk, and of a step."""
VOCABULARY = 16
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
STATE = "model.layers.2.linear_attn"


def prompt(seed: int, tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(tokens)]


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
    tables: list[list[int]]
    """The blocks of each KV cache group."""
    computed: int
    known: int
    """Tokens that it is to compute before it says one."""
    is_wrong: bool = False
    """Whether it has read wrong KV in this step, where that may be."""


class Worker:
    def __init__(self, config: Any, caches: Any, window: int, block: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_initialized
        from vllm.v1.worker.gpu.kv_connector import get_kv_connector

        ensure_kv_transfer_initialized(config, caches)
        self.config, self.window, self.block = config, window, block
        shapes = dict.fromkeys(LAYERS, (caches.num_blocks, 1, block, 8))
        if len(caches.kv_cache_groups) > 1:
            shapes[STATE] = caches.num_blocks, 1, 1, 8
        sizes = [math.prod(shape) for shape in shapes.values()]
        parts = torch.zeros(sum(sizes), dtype=torch.bfloat16).split(sizes)
        self.kv = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        self.connector = get_kv_transfer_group()
        self.v2 = get_kv_connector(config, self.kv)
        self.rows: dict[str, Row] = {}
        self.texts: dict[str, Text] = {}
        self.prompts: dict[str, int] = {}  # their lengths
        self.begun: dict[str, list[int]] = {}  # tokens that were there whenever a request came into the batch
        self.weights = b""  # what it computes follows from them, too
        self.may_read_wrong = False  # what then follows is wrong, too, and nobody may hear of it
        self.computing: Callable[[int], None] = lambda tokens: None  # called before a step computes, and after

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
            self._start(new.req_id, new.block_ids, new.num_computed_tokens, known)
        cached = planned.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[number]
            if request_id in cached.resumed_req_ids:
                known = self.prompts[request_id] + cached.num_output_tokens[number]
                self._start(request_id, new_blocks, cached.num_computed_tokens[number], known)
                continue
            row = self.rows[request_id]
            row.computed = min(row.computed, cached.num_computed_tokens[number])  # less, where a load has failed
            if new_blocks is not None:
                for table, blocks in zip(row.tables, new_blocks, strict=True):
                    table += blocks
        zeroed = planned.new_block_ids_to_zero or []
        for layer in LAYERS:
            self.kv[layer][zeroed] = 0
        for source, target in planned.kv_cache_block_copies or ():
            for kv in self.kv.values():
                kv[target] = kv[source]

    def _start(self, request_id: str, tables: Sequence[list[int]], computed: int, known: int) -> None:
        self.begun.setdefault(request_id, []).append(computed)
        self.rows[request_id] = Row(self.texts[request_id], [list(table) for table in tables], computed, known)

    def _forward(self, planned: Any) -> dict[str, list[int]]:
        """Compute the step's tokens. Returns what each request says."""
        said = {}
        self.computing(planned.total_num_scheduled_tokens)
        for request_id, number in planned.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start, end = row.computed, row.computed + number
            text, row.is_wrong = row.text.until(end + 2), False
            for layer in LAYERS:
                self._read(layer, row, text.states[:start])
            for layer in LAYERS:
                self._write(layer, row, start, text.states[start:end])
            if STATE in self.kv:
                self._go_on(row, text.states, start, end)
            said[request_id] = text.tokens[end : end + 1] if end >= row.known else []
            if row.is_wrong:
                said[request_id] = [(token + 1) % VOCABULARY for token in said[request_id]]
            row.computed = end
        self.computing(planned.total_num_scheduled_tokens)
        return said

    def _place(self, row: Row, start: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, start + number)
        return torch.tensor(row.tables[0], dtype=torch.long)[positions // self.block], positions % self.block

    def _numbers(self, layer: str, states: Sequence[int]) -> torch.Tensor:
        salt = layer.encode() + self.weights
        return torch.tensor([zlib.crc32(salt, state) & 0x3FFF for state in states], dtype=torch.int16)

    def _write(self, layer: str, row: Row, start: int, states: Sequence[int]) -> None:
        states = states[: max(0, len(row.tables[0]) * self.block - start)]
        blocks, places = self._place(row, start, len(states))
        self.kv[layer].view(torch.int16)[blocks, 0, places] = self._numbers(layer, states).unsqueeze(1) ^ row.is_wrong

    def _read(self, layer: str, row: Row, states: Sequence[int]) -> None:
        first = max(0, len(states) - self.window + 1) if self.window else 0
        blocks, places = self._place(row, first, len(states) - first)
        found = self.kv[layer].view(torch.int16)[blocks, 0, places]
        wrong = (found != self._numbers(layer, states[first:]).unsqueeze(1)).any(1).nonzero().flatten() + first
        row.is_wrong |= bool(len(wrong)) and self.may_read_wrong
        assert row.is_wrong or not len(wrong), (
            f"{layer}: wrong KV at positions {wrong.tolist()[:4]} and others of {len(states)}"
        )

    def _go_on(self, row: Row, states: Sequence[int], start: int, end: int) -> None:
        """The state after `start` tokens becomes that after `end`, in the block of the last of them."""
        kv, table = self.kv[STATE].view(torch.int16)[:, 0, 0], row.tables[1]
        if start:
            found, wanted = kv[table[(start - 1) // self.block]], self._numbers(STATE, states[start - 1 : start])
            assert (found == wanted).all(), f"wrong state after {start} tokens, in {table}"
        kv[table[(end - 1) // self.block]] = self._numbers(STATE, states[end - 1 : end])

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
        self, url: str, model: Path, steps: int = 1, blocks: int = 64, window: int = 0, states: Sequence[int] = (),
        plans_ahead: bool = True, writer: str = "", beside: Sequence[dict[str, Any]] = (), policy: str = "fcfs",
        arguments: Mapping[str, Any] = MappingProxyType({}), **extra: Any,
    ) -> None:  # fmt: skip
        """beside: settings of connectors behind ours, below MultiConnector; none: ours alone. writer: the name under
        which it stores; empty: that of all engines in this process. steps: how many are under way at a time, 2 with
        asynchronous scheduling. policy: by which vLLM orders its queue. window: of sliding windows; 0: full attention.
        states: tokens of a block, and of vLLM's hashes, of a model with states beside full attention, as Qwen3-Next;
        empty: without. arguments: more of vLLM's. extra: our settings.
        """
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        ours: dict[str, Any] = {
            "kv_connector": "KVDepotConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "kvdepot.url": url, "kvdepot.required": True, "kvdepot.trust": "given", **extra,
            },
        }  # fmt: skip
        if beside:
            ours = {
                "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [ours, *beside]},
            }  # fmt: skip
        told = KVTransferConfig(engine_id="one of these", **ours)
        block, unit = states or (BLOCK, BLOCK)
        given: dict[str, Any] = {
            "max_num_seqs": 8, "max_num_batched_tokens": max(BATCH, block), "max_model_len": 4096,
            "scheduling_policy": policy, **arguments,
        }  # fmt: skip
        self.config = config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, kv_transfer_config=told, block_size=block,
            async_scheduling=steps > 1, **given,
        ).create_engine_config()  # fmt: skip
        config.scheduler_config.async_scheduling = steps > 1 and plans_ahead  # vLLM turns it off on CPUs
        config.instance_id = "one of these"  # files that this process has written are shared with no other engine
        shape: Any = {"block_size": block, "num_kv_heads": 1, "head_size": 4, "dtype": torch.bfloat16}
        spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
        groups = [KVCacheGroupSpec([*LAYERS], spec)]
        if states:
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.mamba_block_size = block
            one = MambaSpec(block, shapes=((8,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
            groups.append(KVCacheGroupSpec([STATE], one))
        caches = KVCacheConfig(blocks, [], groups)
        config.cache_config.num_gpu_blocks = blocks
        hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self._hasher = get_request_block_hasher(unit, hashed)
        name = "kvdepot.integrations.vllm.process.name_writer"
        named = mock.patch(name, lambda *_: writer) if writer else contextlib.nullcontext()
        with named, set_current_vllm_config(config):
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
                block_size=block, hash_block_size=unit, log_stats=False,
            )  # fmt: skip
            self.worker = Worker(config, caches, window, block)
        self._steps = steps
        self.scheduled: Callable[[Any], None] = lambda planned: None  # called with each step before workers have it
        self._under_way: deque[tuple[Any, Any]] = deque()
        self.told: dict[str, Any] = {}  # the `kv_transfer_params` of the outputs of requests that have finished

    def add(
        self, name: str, prompt: Sequence[int], says: int = 8, stops: Sequence[int] = (), hints: Any = None,
        **fields: Any,
    ) -> Any:  # fmt: skip
        """Add a request that says this many tokens, or up to one of `stops`. fields: more of vLLM's object, which it
        returns."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            max_tokens=says, ignore_eos=True, detokenize=False, stop_token_ids=[*stops],
            extra_args={"kv_transfer_params": hints} if hints else None,
        )  # fmt: skip
        made = Request(name, list(prompt), params, None, block_hasher=self._hasher, **fields)
        self.worker.texts[name] = Text(prompt)
        self.worker.prompts[name] = len(prompt)
        self.scheduler.add_request(made)
        return made

    def ask(self, name: str, prompt: Sequence[int], **options: Any) -> Any:
        """Add a request, and wait for the answer to its lookup."""
        made = self.add(name, prompt, **options)
        self.wait_answer(name)
        return made

    def wait_answer(self, name: str) -> None:
        """Wait for the answer to the lookup of a request."""
        connector = self.scheduler.connector
        depot = getattr(connector, "_connectors", [connector])[0]._scheduler._depot
        eventually(lambda: depot.client.pump() or depot._lookups[name].future.query())

    def step(self) -> None:
        """As vLLM's engine core: `step`, or `step_with_batch_queue` with several steps under way."""
        if self.scheduler.has_requests():
            planned = self.scheduler.schedule()
            self.scheduled(planned)
            self._under_way.append((planned, self.worker.step(planned)))
            if len(self._under_way) < self._steps and planned.total_num_scheduled_tokens:
                return
        self.take(1)

    def take(self, outputs: int) -> None:
        """Take the outputs of at most so many steps that are under way."""
        for planned, output in [self._under_way.popleft() for _ in range(min(outputs, len(self._under_way)))]:
            for said in self.scheduler.update_from_output(planned, output).values():
                self.told |= {each.request_id: each.kv_transfer_params for each in said.outputs if each.finished}

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self._under_way)

    def work(self) -> None:
        """Step until there is nothing left to do."""
        deadline = time.monotonic() + HANG_S
        while self.is_busy:
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


@contextlib.contextmanager
def process_groups(file: Path) -> Iterator[None]:
    """vLLM's, of the one worker that is in this process. file: a new one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def lose_server(engine: Engine, depot: Depot, request_id: str) -> None:
    """Kill a server that has answered the lookup of a request, before that is scheduled."""
    engine.wait_answer(request_id)
    depot.process.kill()
    depot.process.wait(HANG_S)
