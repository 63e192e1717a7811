"""The messages between the connector's scheduler and its workers, which vLLM carries.

`Orders` go from the scheduler to every worker with each step. A `WorkerReport` comes back with the step's output; vLLM
aggregates those of all workers into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvdepot.client.transfer import Transfer
from kvdepot.client.worker import CompareTerms
from kvdepot.integrations.vllm.in_step import MappedArena, StepLoad
from kvdepot.protocol import wire

Scope: TypeAlias = tuple[object, int, bool]
"""The weights (`NamedWeights.parts`), the LoRA adapter, by vLLM's number (0: none), and whether the prompt has images
or other items."""


class Terms(NamedTuple):
    """The terms on which chunks that a request computes are compared with chunks that its lookup has found. first: the
    place of the prompt's first image or other item, if the comparison is to prove prompts with items; tokens before it
    prove nothing."""

    scope: Scope
    compare: CompareTerms
    first: int = 0


class Compared(NamedTuple):
    """A rank's result of a comparison, of all KV cache groups. The fields are those of wire.Comparison."""

    chunks: int = 0
    worst: float = 0.0
    unknown: int = 0
    writers: tuple[wire.WriterRun, ...] = ()

    def proves(self, limit: float) -> bool:
        """Whether no chunk differs by more than the limit, and some were compared or are of no comparable type."""
        return bool(self.chunks or self.unknown) and self.worst <= limit


class LaneTimes(NamedTuple):
    """The times of a rank's lane, in seconds. queued_s: for the loads that it was ordered and that have not ended.
    block_s: to load one block of each KV cache group."""

    queued_s: float
    block_s: tuple[float, ...]

    def load_s(self, blocks: Sequence[int]) -> float:
        return sum(number * took_s for number, took_s in zip(blocks, self.block_s, strict=True))


@dataclass(frozen=True)
class Check:
    """A comparison of blocks with stored chunks, on every worker."""

    transfers: list[Transfer]
    terms: CompareTerms
    blocks: frozenset[int] = frozenset()
    """The blocks that have failed to load unless this comparison, within a step, proves them."""


@dataclass
class Orders(KVConnectorMetadata):
    """The loads and stores of one step, and what workers must know about it."""

    model: str = ""
    """The namespace in which the scheduler looks up."""
    loads: dict[str, list[Transfer]] = field(default_factory=dict)
    """One transfer per KV cache group that needs any, by request."""
    writers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The writers whose chunks these loads may read, by request."""
    step_loads: list[StepLoad] = field(default_factory=list)
    """Chunks that workers copy before the step computes."""
    stores: list[Transfer] = field(default_factory=list)
    checks: dict[int, Check] = field(default_factory=dict)
    """Comparisons to begin before the stores, by number (trust.py)."""
    proofs: dict[int, Check] = field(default_factory=dict)
    """Comparisons of chunks that this step computes, which end within it; one without transfers proves nothing."""
    preempted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    """Finished requests whose blocks vLLM keeps until a worker reports them."""
    holds: bool = False
    """Whether the scheduler holds blocks until the stores of these orders have ended (stores.py)."""
    void: bool = False
    """Whether stores under way must be voided."""
    idle: bool = False
    """Whether the step computes nothing."""
    loads_early: bool = False
    """Whether the loads may begin before the step computes."""
    step: int = 0
    """The step's number, which the report of its output repeats."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The stores that have ended on workers, reported with a step's output."""

    ended: dict[int, set[int]] = field(default_factory=dict)
    """Steps whose orders hold blocks and whose stores have ended, each with the ranks on which they have."""
    compared: dict[int, list[Compared]] = field(default_factory=dict)
    """The findings of ranks, by number of the check."""
    step: int = 0
    mapped: dict[int, MappedArena] = field(default_factory=dict)
    """The arenas that ranks have mapped since the last report."""
    lanes: dict[int, LaneTimes] = field(default_factory=dict)
    """The times of the lanes of ranks, this step's orders included."""
    fault: str = ""
    """Why a worker can neither store nor load, so that the engine does neither; empty: all workers can."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        for step, ranks in other.ended.items():
            self.ended.setdefault(step, set()).update(ranks)
        for number, found in other.compared.items():
            self.compared.setdefault(number, []).extend(found)
        self.step = max(self.step, other.step)
        self.mapped |= other.mapped
        self.lanes |= other.lanes
        self.fault = self.fault or other.fault
        return self
