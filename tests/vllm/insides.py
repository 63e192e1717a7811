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
    methods = (_failed_chunks, _is_alone, _link, _look_up, _meet, _adapter, _stretch)
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


def _adapter(core: Any) -> str | None:
    """The file that vLLM 0.15 to 0.17's own connector runs."""
    return sys.modules[type(core.scheduler.connector.scheduler_adapter).__module__].__file__


def _stretch(core: Any, first: int) -> None:
    """Have the model compute with another rope factor than its configuration says, from this position on."""
    core.model_executor.collective_rpc(_stretch_model, args=(first,))


def _stretch_model(worker: Any, first: int) -> None:
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "cos_sin_cache"):
            module.cos_sin_cache[first:] = module.cos_sin_cache[::2].repeat_interleave(2, 0)[first:]
