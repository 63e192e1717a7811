"""The messages between the connector's scheduler and its workers, which vLLM carries.

`Orders` go from the scheduler to every worker with each step. A `WorkerReport` comes back with the step's output; vLLM
aggregates those of all workers into one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvdepot.client.transfer import Transfer
from kvdepot.integrations.vllm.stats import Moved
from kvdepot.protocol.keys import HASH_BYTES

__all__ = ["Orders", "WorkerReport"]


@dataclass
class Orders(KVConnectorMetadata):
    """The loads and stores of one step, and what workers must know about it."""

    model: str = ""
    """The namespace in which the scheduler looks up."""
    loads: dict[str, list[Transfer]] = field(default_factory=dict)
    """One transfer per KV cache group that needs any, by request."""
    stores: list[Transfer] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    """Finished requests whose blocks vLLM keeps until a worker reports them."""
    holds: bool = False
    """Whether the scheduler holds blocks until the stores of these orders have ended (stores.py)."""
    void: bool = False
    """Whether stores under way must be voided."""
    idle: bool = False
    """Whether the step computes nothing."""
    step: int = 0
    """Its number, which the report of its output repeats."""
    measured: int = 0
    """Its number among the measured prefill steps (stats.py); 0 for others."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Chunks that workers have stored, and stores that have ended, reported with a step's output."""

    keys: dict[bytes, set[int]] = field(default_factory=dict)
    """Chunks stored since the last step, each with the ranks that stored it."""
    ended: dict[int, set[int]] = field(default_factory=dict)
    """Steps whose orders hold blocks and whose stores have ended, each with the ranks on which they have."""
    moved: Moved = field(default_factory=Moved)
    """Counts of what was stored and loaded since the last step."""
    step: int = 0
    measured: int = 0
    shares_none: bool = False
    """Whether a worker's KV cannot be shared, so that this engine neither loads nor stores."""

    def add(self, keys: bytes, rank: int) -> None:
        """A rank has stored these chunks. keys: 32 bytes each."""
        for i in range(0, len(keys), HASH_BYTES):
            self.keys.setdefault(keys[i : i + HASH_BYTES], set()).add(rank)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another worker's report into this one."""
        assert isinstance(other, WorkerReport)
        for key, ranks in other.keys.items():
            self.keys.setdefault(key, set()).update(ranks)
        for step, ranks in other.ended.items():
            self.ended.setdefault(step, set()).update(ranks)
        self.moved += other.moved
        self.step = max(self.step, other.step)
        self.measured = max(self.measured, other.measured)
        self.shares_none |= other.shares_none
        return self
