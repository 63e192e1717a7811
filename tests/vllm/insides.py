"""What tests want of an engine core and its workers that vLLM has no call for: single steps, and the connector's state.

`install` adds methods to vLLM's EngineCore, which the front end calls as vLLM calls its own (`call_utility`).
"""

from __future__ import annotations

import sys
import time
from typing import Any


def install() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    step = EngineCoreProc._process_engine_step

    def step_unless_held(core: Any) -> bool:
        if not core.__dict__.get("is_held"):
            return step(core)
        core._handle_client_request(*core.input_queue.get())
        return False

    def hold(core: Any, held: bool) -> None:
        """Make no step by itself until this is called again."""
        core.is_held = held

    EngineCoreProc._process_engine_step = step_unless_held
    methods = (_failed_chunks, _is_alone, _link, _look_up, _meet, _record, _calls, _adapter)
    for name, method in {"hold": hold, "step": step, **{m.__name__[1:]: m for m in methods}}.items():
        setattr(EngineCore, f"test_{name}", method)


def _is_alone(core: Any) -> bool:
    """Whether no request is left, nor blocks of one that wait for a store."""
    return not core.scheduler.requests


def _connector(core: Any) -> Any:
    return _ours(core.scheduler.connector)


def _worker_connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return _ours(get_kv_transfer_group())


def _ours(connector: Any) -> Any:
    return getattr(connector, "sub_connectors", [connector])[-1]  # the last below MultiConnector


def _look_up(core: Any) -> None:
    """Wait until all lookups of the depot are answered."""
    connector = _connector(core)
    if hasattr(connector, "scheduler_adapter"):  # of vLLM 0.15 to 0.17's own connector
        futures = list(connector.scheduler_adapter.lookup_futures.values())
    else:
        half = connector._scheduler  # it may have no server yet
        futures = [lookup.future for lookup in half._depot._lookups.values()] if hasattr(half, "_depot") else []
    deadline = time.monotonic() + 60
    while not all(future.query() for future in futures):
        assert time.monotonic() < deadline, "the lookup was not answered"


def _link(core: Any) -> None:
    """Wait until the scheduler and the workers have found a server that came after the engine."""
    assert _connector(core)._link._settled.wait(120), "no server was found"
    core.model_executor.collective_rpc(_link_worker)


def _link_worker(_worker: Any) -> None:
    assert _worker_connector()._link._settled.wait(120), "no server was found"


def _meet(core: Any) -> None:
    """Wait until the scheduler and the workers know of a server that is there."""
    _greet(_connector(core)._scheduler)
    core.model_executor.collective_rpc(_meet_worker)


def _meet_worker(_worker: Any) -> None:
    _greet(_worker_connector()._worker)


def _greet(half: Any) -> None:
    deadline = time.monotonic() + 30
    while not half._depot.client.is_welcomed:
        assert time.monotonic() < deadline, "no server is there"
        half._depot.client.pump()


def _failed_chunks(core: Any) -> int:
    """Chunks that were retrieved in vain so far, of all workers."""
    return sum(core.model_executor.collective_rpc(_failed_chunks_of_worker))


def _failed_chunks_of_worker(_worker: Any) -> int:
    failed: int = _worker_connector()._worker._depot.counters["chunks_failed"]
    return failed


HOOKS = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "finish_forward", "wait_for_save",
    "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events", "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip
"""What a runner calls in each step; those of layers, which do nothing, are left out."""


def note_calls(owner: Any, name: str, calls: list[str], called: str = "") -> None:
    """Have an object's method add its name, or another, to `calls` before it runs."""
    method = getattr(owner, name)

    def noting(*arguments: Any, **named: Any) -> Any:
        calls.append(called or name)
        return method(*arguments, **named)

    setattr(owner, name, noting)


def _record(core: Any) -> None:
    core.model_executor.collective_rpc(_record_worker)


def _record_worker(worker: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    runner, calls = worker.model_runner, []
    worker.model_runner.noted = calls
    for name in HOOKS:
        note_calls(get_kv_transfer_group(), name, calls)
    runner.model.register_forward_pre_hook(lambda *_: calls.append("forward"))
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    if drafter is not None:
        note_calls(drafter, "propose", calls, "draft")


def _calls(core: Any) -> list[str]:
    """The first worker's, in order."""
    noted: list[str] = core.model_executor.collective_rpc(_calls_of_worker)[0]
    return noted


def _calls_of_worker(worker: Any) -> list[str]:
    return list(worker.model_runner.noted)


def _adapter(core: Any) -> str | None:
    """The file that vLLM 0.15 to 0.17's own connector runs."""
    return sys.modules[type(core.scheduler.connector.scheduler_adapter).__module__].__file__
