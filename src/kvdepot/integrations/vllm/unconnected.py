"""The halves of the connector before it has a server: nothing is cached, nothing is stored, nothing waits.

link.py replaces each of these by the half of the same methods (scheduler.py, worker.py) once that is connected. The
scheduler and each worker connect by themselves, so the other side may be connected already. Invariants: a worker that
is not connected reports every load that it is ordered as failed and every store as ended, in the same step and once, as
a connected one does without a server; it keeps nothing from one step to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvdepot.integrations.vllm.lora import Roots
from kvdepot.integrations.vllm.messages import Orders, WorkerReport
from kvdepot.integrations.vllm.scheduler import SchedulerHalf
from kvdepot.integrations.vllm.stats import OperationStats
from kvdepot.integrations.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["UnconnectedScheduler", "UnconnectedWorker"]


class UnconnectedScheduler:
    """The place of a SchedulerHalf. The half that replaces it takes up the requests that have not been scheduled."""

    def __init__(self, vllm_config: VllmConfig, model: str) -> None:
        """model: the engine's namespace."""
        self.stats = OperationStats()
        self._model = model
        self._roots = Roots(vllm_config)
        self._pool: BlockPool | None = None
        self._was_reset = False

    def __repr__(self) -> str:
        return f"<UnconnectedScheduler of {self._model}>"

    def hand_over(self, half: SchedulerHalf) -> None:
        """Pass on what was learned to the half that takes this place."""
        half.use_roots(self._roots)
        if self._pool is not None:
            half.bind_block_pool(self._pool)
        if self._was_reset:
            half.share_with_none()

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def has_pending_block_frees(self) -> bool:
        return False

    def holds_blocks(self) -> bool:
        return False

    def take_events(self) -> Iterable[KVCacheEvent]:
        return ()

    def on_new_request(self, request: Request) -> None:
        """Note its adapter: vLLM's own prefix cache keeps what it computes."""
        if request.prompt_embeds is None:
            with suppress(Exception):  # it is not cached anyway, and no error of one request may end the engine
                self._roots.root(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        return Orders(model=self._model)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        pass

    def request_finished(self, request: Request) -> bool:
        return False

    def reset_cache(self) -> bool:
        """True: this engine has stored nothing yet, and from here on its KV is its own."""
        self._was_reset = True
        return True


class UnconnectedWorker:
    """The place of a WorkerHalf."""

    def __init__(self, vllm_config: VllmConfig, rank: int, fails_whole: bool) -> None:
        """The arguments are those of WorkerHalf."""
        self.stats = OperationStats()
        self._rank = rank
        self._fails_whole = fails_whole
        self._failed = Orders()  # whose loads have failed and are not reported yet
        self.shares_none = False
        """Whether this worker's KV cannot be shared, so that it will never be connected."""

    def __repr__(self) -> str:
        return f"<UnconnectedWorker of rank {self._rank}>"

    def hand_over(self, half: WorkerHalf) -> None:
        """Pass on nothing: a step is over when this place is taken."""

    def give_up_preempted(self, orders: Orders) -> None:
        pass

    def start_loads(self, orders: Orders) -> None:
        self._failed = orders

    def store(self, orders: Orders) -> None:
        pass

    def get_finished(self, orders: Orders) -> tuple[set[str] | None, set[str] | None]:
        return set(orders.ended) or None, set(orders.loads) or None

    def take_failed_requests(self) -> set[str]:
        return set(self._failed.loads) if self._fails_whole else set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        loads = () if self._fails_whole else self._failed.loads.values()
        return {
            block
            for transfers in loads
            for transfer in transfers
            for block in memoryview(transfer.block_ids[4 * transfer.skip_blocks :]).cast("I")
        }

    def take_report(self, orders: Orders) -> WorkerReport:
        ended = {orders.step: {self._rank}} if orders.holds else {}
        return WorkerReport(ended=ended, step=orders.step, measured=orders.measured, shares_none=self.shares_none)
