"""What the connector's scheduler and its workers tell each other, in what vLLM carries between them.

`Orders` go with each step from the scheduler to every worker; a `WorkerReport` comes back with the step's output, those
of all workers in one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvdepot.client.transfer import Transfer
from kvdepot.protocol.keys import HASH_BYTES

__all__ = ["Orders", "WorkerReport"]


@dataclass
class Orders(KVConnectorMetadata):
    """What workers are to do in one step."""

    model: str = ""
    """The namespace in which the scheduler looks up."""
    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    """Finished requests whose blocks vLLM keeps until a worker reports them."""
    void: bool = False
    """Whether no store that is under way may become visible any more."""
    idle: bool = False
    """Whether the step computes nothing."""
    step: int = 0
    """Its number, which its output brings back."""
    measured: int = 0
    """Its number among those of prefill (prefill_speed.py); 0 for others."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers tell the scheduler with a step's output."""

    keys: dict[bytes, set[int]] = field(default_factory=dict)
    """Chunks that they have stored since the last step, by the ranks of these workers."""
    step: int = 0
    """The number of the step."""
    measured: int = 0
    """Its number among those that are measured; 0 for others."""

    def add(self, keys: bytes, rank: int) -> None:
        """A worker has stored these, 32 bytes each."""
        for i in range(0, len(keys), HASH_BYTES):
            self.keys.setdefault(keys[i : i + HASH_BYTES], set()).add(rank)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Take another worker's in."""
        assert isinstance(other, WorkerReport)
        for key, ranks in other.keys.items():
            self.keys.setdefault(key, set()).update(ranks)
        self.step = max(self.step, other.step)
        self.measured = max(self.measured, other.measured)
        return self
